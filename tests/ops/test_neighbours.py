"""Columns of neighbours, as a GPU gets them, are those of ``F.unfold``."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from understudy.ops.neighbours import Neighbours


@pytest.mark.parametrize(("side", "stride"), [(3, 1), (5, 2)])
def test_columns_are_those_of_unfold(side: int, stride: int) -> None:
    x = torch.randn(4, 3, 12, 12, dtype=torch.float64)
    assert torch.equal(Neighbours.apply(x, side, stride), F.unfold(x, side, stride=stride))


@pytest.mark.parametrize(("side", "stride"), [(3, 1), (5, 2)])
def test_slopes_are_those_of_unfold_for_stacks_of_networks(side: int, stride: int) -> None:
    x = torch.randn(6, 4, 3, 12, 12, dtype=torch.float64)
    weights = torch.randn(6, 8, 3 * side * side, dtype=torch.float64)

    def slopes(columns: object) -> tuple[Tensor, Tensor]:
        def loss(weight: Tensor, x: Tensor) -> Tensor:
            return (weight @ columns(x)).sin().sum()  # type: ignore[operator]

        return vmap(grad(loss, argnums=(0, 1)))(weights, x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a missing batching rule would run one by one
        ours = slopes(lambda x: Neighbours.apply(x, side, stride))
    theirs = slopes(lambda x: F.unfold(x, side, stride=stride))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
