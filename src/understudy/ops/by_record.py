"""Convolve so that gradients by the weights, one for each record, are products of matrices.

Mapped over records, a convolution's gradient by its weights is to libraries a convolution with as
many groups as there are records, which is slow. The rest is what it always is: one convolution of
all records forward, and one backward to the pictures, since the weights are everybody's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_input

from understudy.ops.fused import FirstDerivative, folded, parted
from understudy.ops.neighbours import neighbours

__all__ = ["convolve_by_record"]


def convolve_by_record(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``F.conv2d(x, weight, padding=1)`` of 3x3 filters, channels last on a GPU.

    ``torch.func.vmap`` may map over records, and not over weights. There is no second derivative.
    """
    convolved: Tensor = _Forward.apply(x, weight)  # type: ignore[no-untyped-call]
    return convolved


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, _laid_out(weight), padding=1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        asked = ctx.needs_input_grad
        by_x, by_weight = _Backward.apply(slope, *ctx.saved_tensors, *asked)  # type: ignore[no-untyped-call]
        total = by_weight[0] if len(by_weight) == 1 else by_weight.sum(0)
        return by_x if asked[0] else None, total if asked[1] else None

    @staticmethod
    def vmap(info: Any, where: tuple[int | None, ...], x: Tensor, weight: Tensor) -> Any:
        _everybodys(where[1])
        (x,) = folded(info.batch_size, where[:1], (x,), (), ())
        convolved = _Forward.apply(x, weight)  # type: ignore[no-untyped-call]
        return parted(convolved, info.batch_size), 0


class _Backward(FirstDerivative):
    """Return the gradients by the pictures, and by the weights for each picture; empty if not asked."""

    @staticmethod
    def forward(
        slope: Tensor, x: Tensor, weight: Tensor, by_x: bool, by_weight: bool
    ) -> tuple[Tensor, Tensor]:
        pictures = slope.new_empty(len(x), 0)
        if by_x:
            pictures = conv2d_input(x.shape, _laid_out(weight), slope, padding=1)  # type: ignore[no-untyped-call]
        rows = slope.new_empty(len(x), 0)
        if by_weight:
            columns = neighbours(F.pad(x, (1, 1, 1, 1)), 3)
            rows = torch.bmm(slope.flatten(2), columns.mT).view(len(x), *weight.shape)
        return pictures, rows

    @staticmethod
    def vmap(
        info: Any,
        where: tuple[int | None, ...],
        slope: Tensor,
        x: Tensor,
        weight: Tensor,
        *asked: bool,
    ) -> Any:
        _everybodys(where[2])
        slope, x = folded(info.batch_size, where[:2], (slope, x), (), ())
        results = _Backward.apply(slope, x, weight, *asked)  # type: ignore[no-untyped-call]
        return tuple(parted(value, info.batch_size) for value in results), (0, 0)


def _laid_out(weight: Tensor) -> Tensor:
    """Return weights as a GPU's libraries like them."""
    return weight.contiguous(memory_format=torch.channels_last) if weight.is_cuda else weight


def _everybodys(where: int | None) -> None:
    if where is not None:
        raise NotImplementedError("A convolution by record has one set of weights for all records.")
