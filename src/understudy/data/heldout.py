"""Read a real test set, prepared as the private data was declared to be.

A held-out set is not private: it is what accuracy is measured on, and passes no gate.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from understudy.data.found import MEMORY_LIMIT, Ask, Found, gather, number_labels, told
from understudy.data.preparation import Preparation
from understudy.data.readers import find
from understudy.engine import Progress, silent
from understudy.errors import DataError
from understudy.privacy.public import Public


@dataclass(frozen=True)
class HeldOut:
    """Hold real test records: ``images`` float32 in [-1, 1], ``labels`` int64 in 0..K-1."""

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def digest(self) -> str:
        """Return a hash by which the same records in the same order are known again."""
        content = hashlib.sha256(repr((tuple(self.images.shape), self.classes)).encode())
        content.update(self.images.numpy().tobytes())
        content.update(self.labels.numpy().tobytes())
        return content.hexdigest()


def read_heldout(
    source: Any,
    *,
    like: Public,
    label: str | None = None,
    image: str | None = None,
    split: str | None = None,
    value_range: tuple[float, float] | None = None,
    memory_limit: int = MEMORY_LIMIT,
    progress: Progress | None = None,
) -> HeldOut:
    """Read a test set with the classes, columns and preparation of ``like``.

    Of a source with splits the test split is taken. ``value_range`` is needed only where the test
    set lies in other numbers than the private data did.
    """
    ask = Ask(
        image=image,
        label=label,
        classes=like.classes,
        columns=like.columns or None,
        split=split,
        otherwise="test",
        memory_limit=memory_limit,
    )
    with told(source):
        found = find(source, ask)
        return held_out(
            found, like, value_range=value_range, memory_limit=memory_limit, progress=progress
        )


def held_out(
    found: Found,
    like: Public,
    *,
    value_range: tuple[float, float] | None = None,
    memory_limit: int = MEMORY_LIMIT,
    progress: Progress | None = None,
) -> HeldOut:
    """Prepare what a reader found as ``like`` was prepared, and check that it matches."""
    declared = Preparation.recall(like.preparation)
    preparation = Preparation(
        resize=declared.resize,
        grayscale=declared.grayscale,
        value_range=value_range or declared.value_range,
    )
    images, _ = gather(found, preparation, memory_limit=memory_limit, progress=progress or silent)
    labels, _ = number_labels(found, like.classes, complete=False)
    if images.shape[1:] != like.shape:
        raise DataError(
            f"{found.where}: test records have shape {tuple(images.shape[1:])}, but '{like.name}' "
            f"has {like.shape}. They must be the same kind of record, before the declared "
            f"preparation ({'; '.join(like.preparation) or 'none'})."
        )
    values = torch.from_numpy(np.array(images))
    if values.dtype == torch.uint8:
        values = values.float().div_(127.5).sub_(1.0)  # as the gate does
    return HeldOut(values, torch.from_numpy(labels), like.classes)
