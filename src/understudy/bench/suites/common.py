"""What several suites declare alike: the papers' datasets, augmentation and evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from understudy.bench.cells import Bar, Cell, Reference, repeated

GRAY = ("mnist", "fashion-mnist")
THREE = (*GRAY, "cifar10")
FACES = "celeba"

WITH_FLIPS = "color_crop_cutout_flip_scale_rotate"
"""Augmentation of the matching methods for pictures that may be mirrored; as in NDPDC's code."""

REPEATS, NETWORKS = 2, 3
"""Full repeats and networks on each, where a paper's are too many to repeat here (issue 3)."""


def mirrored(dataset: str) -> bool:
    """Tell whether pictures may be mirrored: not digits."""
    return dataset not in ("mnist", "digits")


def prepared(dataset: str) -> dict[str, Any]:
    """Return how a condensation paper reads and judges a dataset: faces at 32x32, flips."""
    return {
        "dataset": dataset,
        "flips": mirrored(dataset),
        "resize": 32 if dataset == FACES else None,
    }


def matching(dataset: str, **values: Any) -> dict[str, Any]:
    """Return the values of a matching method for a dataset: with flips where they are allowed."""
    return {**({"augmentation": WITH_FLIPS} if mirrored(dataset) else {}), **values}


def dm(dataset: str, size: int, **told: Any) -> Iterator[Cell]:
    """Declare distribution matching without privacy."""
    return repeated(
        REPEATS,
        NETWORKS,
        method="dm",
        preset="paper",
        values=matching(dataset),
        images_per_class=size,
        **prepared(dataset),
        **told,
    )


def ldpdc(dataset: str, epsilon: float | None, size: int = 50, **told: Any) -> Iterator[Cell]:
    """Declare LDPDC: five releases of one network each, as in the paper, since it is quick."""
    return repeated(
        5,
        1,
        method="ldpdc",
        epsilon=epsilon,
        images_per_class=size,
        **prepared(dataset),
        **told,
    )


def ndpdc(
    dataset: str,
    epsilon: float | None,
    size: int = 50,
    values: Mapping[str, Any] | None = None,
    repeats: int = REPEATS,
    networks_each: int = NETWORKS,
    **told: Any,
) -> Iterator[Cell]:
    """Declare NDPDC with the paper's preset."""
    return repeated(
        repeats,
        networks_each,
        method="ndpdc",
        preset="paper",
        values=matching(dataset, **(values or {})),
        epsilon=epsilon,
        images_per_class=size,
        **prepared(dataset),
        **told,
    )


def dp_merf(dataset: str, epsilon: float, size: int = 50, **told: Any) -> Iterator[Cell]:
    """Declare DP-MERF, its generator sampled to a size."""
    return repeated(
        REPEATS,
        NETWORKS,
        method="dp-merf",
        epsilon=epsilon,
        images_per_class=size,
        **prepared(dataset),
        **told,
    )


def dosser(
    dataset: str,
    size: int,
    *,
    epsilon: float = 1.0,
    auxiliary: Any = None,
    expand: bool = False,
    after: Mapping[str, Any] | None = None,
    **told: Any,
) -> Iterator[Cell]:
    """Declare Dosser; with SER (500 directions) where there is an auxiliary set."""
    subspace = {} if auxiliary is None else {"subspace": 500, "auxiliary": auxiliary}
    return repeated(
        REPEATS,
        NETWORKS,
        method="dosser",
        preset="paper",
        values=matching(dataset, **subspace),
        epsilon=epsilon,
        images_per_class=size,
        after={"expand": expand, **(after or {})},
        **prepared(dataset),
        **told,
    )


def judged(repeats: int, **declared: Any) -> Iterator[Cell]:
    """Declare a generator as DataLens judges one, unless told otherwise."""
    how = {"samples": 10_000, "protocol": "datalens", "networks": ("datalens",)}
    return repeated(repeats, 1, **{**how, **declared})


def shown(
    row: str,
    column: str,
    references: tuple[Reference, ...] = (),
    bar: Bar | None = None,
) -> dict[str, Any]:
    """Say where a cell stands in its table and what it is compared with."""
    return {"row": row, "column": column, "references": references, "bar": bar}


def quoted(
    source: str, *figures: float, spread: float | None = None, remark: str = ""
) -> tuple[Reference, ...]:
    """Quote figures of one source."""
    return tuple(
        Reference(figure=figure, source=source, spread=spread, remark=remark) for figure in figures
    )
