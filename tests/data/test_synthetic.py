"""Sets from several releases, put together."""

from __future__ import annotations

import pytest
import torch

from understudy.data.synthetic import SyntheticSet, combined
from understudy.errors import BadConfiguration
from understudy.privacy import Public


def part(name: str, classes: tuple[str, ...], shape: tuple[int, ...] = (1, 2, 2)) -> SyntheticSet:
    labels = torch.arange(len(classes)).repeat_interleave(2)
    images = torch.arange(len(labels)).float().reshape(-1, 1, 1, 1).expand(-1, *shape)
    public = Public(name=name, shape=shape, classes=classes, counts=(9,) * len(classes))
    return SyntheticSet(images=images, labels=labels, public=public)


def test_classes_of_the_same_name_become_one() -> None:
    both = combined([part("north", ("healthy", "ill")), part("south", ("ill", "unknown"))])
    assert both.public.classes == ("healthy", "ill", "unknown")
    assert both.public.name == "north + south"
    assert both.public.counts is None
    assert both.labels.tolist() == [0, 0, 1, 1, 1, 1, 2, 2]
    assert both.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_one_set_stays_as_it_is() -> None:
    alone = part("north", ("healthy", "ill"))
    same = combined([alone])
    assert torch.equal(same.images, alone.images)
    assert torch.equal(same.labels, alone.labels)


def test_records_of_another_shape_are_refused() -> None:
    with pytest.raises(BadConfiguration, match="cannot be combined"):
        combined([part("north", ("a", "b")), part("south", ("a", "b"), (1, 3, 3))])
    with pytest.raises(BadConfiguration, match="no synthetic set"):
        combined([])
