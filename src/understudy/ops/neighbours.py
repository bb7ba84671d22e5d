"""Lay out what a convolution looks at as columns, so that it becomes one product of matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["neighbours"]


def neighbours(x: Tensor, side: int, stride: int = 1) -> Tensor:
    """Return the patches of (n, C, H, W) as columns (n, C side^2, places), as ``F.unfold`` does.

    On a GPU PyTorch's ``F.unfold`` starts a kernel for every picture, its inverse one for all.
    """
    if not x.is_cuda:
        return F.unfold(x, side, stride=stride)
    columns: Tensor = Neighbours.apply(x, side, stride)  # type: ignore[no-untyped-call]
    return columns


class Neighbours(torch.autograd.Function):
    """Copy windows at once; the slope goes back by ``F.fold``, which adds overlapping ones."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, side: int, stride: int) -> Tensor:
        """Copy every window."""
        windows = x.unfold(2, side, stride).unfold(3, side, stride)
        return windows.permute(0, 1, 4, 5, 2, 3).reshape(len(x), x.shape[1] * side * side, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
        """Remember the shape."""
        x, ctx.side, ctx.stride = inputs
        ctx.size = x.shape[-2:]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        """Add up what each pixel was copied to."""
        return F.fold(slope, ctx.size, ctx.side, stride=ctx.stride), None, None
