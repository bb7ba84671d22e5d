"""Make small private datasets for tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from understudy.engine import Engine
from understudy.privacy import Budget, Gate, Ledger, Plan, PrivateDataset, Public, Records, Secret
from understudy.privacy.gate import record_digests
from understudy.privacy.public import Adjacency

REPOSITORY = Path(__file__).parents[1]


def shared_data_folder() -> Path | None:
    """Find the real datasets."""
    places = [p for p in os.environ.get("UNDERSTUDY_DATA", "").split(os.pathsep) if p]
    for place in (*map(Path, places), REPOSITORY.parent / "shared" / "data"):
        if (place / "mnist").is_dir():
            return place
    return None


def private(
    images: npt.NDArray[Any],
    labels: npt.NDArray[Any],
    *,
    name: str = "test data",
    counts: tuple[int, ...] | None | str = "declared",
    classes: int | None = None,
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE,
) -> PrivateDataset:
    """Wrap arrays as a private dataset, class sizes declared public unless told otherwise."""
    labels = np.asarray(labels, dtype=np.int64)
    total = classes or int(labels.max()) + 1
    sizes = tuple(np.bincount(labels, minlength=total).tolist())
    public = Public(
        name=name,
        shape=images.shape[1:],
        classes=tuple(map(str, range(total))),
        counts=sizes if counts == "declared" else counts,  # type: ignore[arg-type]
        adjacency=adjacency,
    )
    return PrivateDataset(Records(images, labels, record_digests(images)), public)


def little(records: int = 40, *, seed: int = 0, classes: int = 2, **kwargs: Any) -> PrivateDataset:
    """Make a few random 1 x 4 x 4 float records."""
    random = np.random.default_rng(seed)
    images = random.uniform(-1, 1, (records, 1, 4, 4)).astype(np.float32)
    return private(images, np.arange(records) % classes, classes=classes, **kwargs)


@contextmanager
def gate_for(
    data: PrivateDataset,
    plan: Plan,
    *,
    secret: Secret | None = None,
    ledger: Ledger | None = None,
    chunk: int | None = None,
    public: Public | None = None,
    recipe: dict[str, Any] | None = None,
) -> Iterator[Gate]:
    """Open a gate with an unlimited cap."""
    with data.open(
        plan,
        by="test",
        recipe=recipe or {},
        ledger=ledger or data.ledger(),
        budget=Budget(float("inf")),
        public=public,
        secret=secret,
        engine=Engine(device="cpu", chunk=chunk),
    ) as gate:
        yield gate


Check = Callable[[], None]
