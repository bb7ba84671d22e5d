"""Hold a synthetic labelled set."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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


def combined(sets: Sequence[SyntheticSet]) -> SyntheticSet:
    """Put sets from several releases together; classes of the same name are one class.

    For whoever collects releases from many holders. Classes keep the order of their first
    appearance. Each part keeps the guarantee of its own release, towards its own records; a person
    with records at several holders has all of them added up.
    """
    if not sets:
        raise BadConfiguration("There is no synthetic set to combine.")
    first = sets[0].public
    for other in sets[1:]:
        if (other.public.shape, other.public.columns) != (first.shape, first.columns):
            raise BadConfiguration(
                f"'{other.public.name}' has records of shape {other.public.shape} and "
                f"'{first.name}' of {first.shape}, or other columns: they cannot be combined."
            )
    classes = tuple(dict.fromkeys(name for part in sets for name in part.public.classes))
    place = {name: number for number, name in enumerate(classes)}
    labels = [
        torch.tensor([place[name] for name in part.public.classes])[part.labels.cpu()]
        for part in sets
    ]
    return SyntheticSet(
        images=torch.cat([part.images.cpu() for part in sets]),
        labels=torch.cat(labels),
        public=dataclasses.replace(
            first,
            name=" + ".join(dict.fromkeys(part.public.name for part in sets)),
            classes=classes,
            counts=None,
            counts_measured=False,
        ),
    )
