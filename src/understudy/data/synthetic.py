"""Hold a synthetic labelled set."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from understudy.errors import BadConfiguration
from understudy.privacy.public import Public


@dataclass(frozen=True)
class SyntheticSet:
    """Hold synthetic records and their labels.

    ``images``: float32, shape (n, *public.shape), on the scale where real records lie in [-1, 1].
    They are *not* clamped: noise that leaves the range helps training, and only pictures made for
    people are cut to it. ``labels``: int64, indices into ``public.classes``.
    """

    images: Tensor
    labels: Tensor
    public: Public

    def __post_init__(self) -> None:
        if self.images.shape != (len(self.labels), *self.public.shape):
            raise BadConfiguration(
                f"A synthetic set of {len(self.labels)} labels cannot hold records of shape "
                f"{tuple(self.images.shape)}."
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def per_class(self) -> list[int]:
        """Count the synthetic records of each class."""
        return torch.bincount(self.labels, minlength=len(self.public.classes)).tolist()

    def pixels(self) -> Tensor:
        """Return uint8 pictures for people: cut to [-1, 1] and mapped to 0..255."""
        return self.images.clamp(-1, 1).add(1).mul(127.5).round().to(torch.uint8)
