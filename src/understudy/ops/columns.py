"""Lay out what a strided convolution of many networks looks at, and add slopes back up.

The columns of a whole batch are one matrix, and a stack of networks' one matrix each, as a batched
product of matrices wants them. They are the largest tensors there are: a 5x5 kernel of stride 2
copies each pixel six times. On a GPU with Triton a kernel reads the maps as they lie and writes the
columns once; on the way back another reads the columns once and adds up, for each pixel, what the
windows it stands in say of it. Zeros around the maps are made up on the way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from understudy.ops.fused import parted, triton
from understudy.ops.neighbours import neighbours

if triton is not None:
    import triton.language as tl

__all__ = ["available", "columns"]

BLOCK = 512
"""Places, or pixels, of one channel that a program takes."""


def available(x: Tensor) -> bool:
    """Tell whether maps like these can go through the kernels."""
    return triton is not None and x.is_cuda and x.dtype == torch.float32


def columns(x: Tensor, side: int, stride: int, before: int, after: int) -> Tensor:
    """Return the patches of (n, C, H, W) as columns (C side^2, n places), pictures side by side.

    So many zeros are added ``before`` the first row and column and ``after`` the last.
    """
    if available(x):
        # Not x[None] and [0]: the slope of an index is a blank tensor, filled.
        stacked: Tensor = _Columns.apply(x.unsqueeze(0), side, stride, before, after)
        return stacked.squeeze(0)
    apart = neighbours(F.pad(x, (before, after, before, after)), side, stride)
    return apart.transpose(0, 1).reshape(apart.shape[1], -1)


class _Columns(torch.autograd.Function):
    """Map stacks of maps (networks, n, C, H, W) to columns (networks, C side^2, n places)."""

    @staticmethod
    def forward(x: Tensor, *how: int) -> Tensor:
        return _copied(x, *how)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *ctx.how = inputs
        ctx.shape = x.shape[1:]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return _Pixels.apply(slope, *ctx.shape, *ctx.how), None, None, None, None

    @staticmethod
    def vmap(info: Any, where: tuple[int | None, ...], x: Tensor, *how: int) -> Any:
        stacked = x.movedim(where[0] or 0, 0).flatten(0, 1)
        return parted(_Columns.apply(stacked, *how), info.batch_size), 0


class _Pixels(torch.autograd.Function):
    """Add up columns to maps, the other way round; each is the other's slope."""

    @staticmethod
    def forward(columns: Tensor, *how: int) -> Tensor:
        return _added(columns, *how)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.how = inputs[5:]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return _Columns.apply(slope, *ctx.how), *[None] * 8

    @staticmethod
    def vmap(info: Any, where: tuple[int | None, ...], columns: Tensor, *how: int) -> Any:
        stacked = columns.movedim(where[0] or 0, 0).flatten(0, 1)
        return parted(_Pixels.apply(stacked, *how), info.batch_size), 0


def _layout(
    height: int, width: int, side: int, stride: int, before: int, after: int
) -> dict[str, int]:
    """Return the sizes the kernels are compiled for."""
    return {
        "HEIGHT": height,
        "WIDTH": width,
        "ROWS": (height + before + after - side) // stride + 1,
        "COLUMNS": (width + before + after - side) // stride + 1,
        "SIDE": side,
        "STRIDE": stride,
        "BEFORE": before,
        "BLOCK": BLOCK,
        "num_warps": 4,
    }


def _copied(x: Tensor, side: int, stride: int, before: int, after: int) -> Tensor:
    networks, n, channels, height, width = x.shape
    sizes = _layout(height, width, side, stride, before, after)
    total = n * sizes["ROWS"] * sizes["COLUMNS"]
    copied = x.new_empty(networks, channels * side**2, total)
    if copied.numel():
        blocks = triton.cdiv(total, BLOCK)
        _copy_kernel[(networks * channels * blocks,)](
            x, copied, *x.stride(), channels, total, blocks, **sizes
        )
    return copied


def _added(
    columns: Tensor, n: int, channels: int, height: int, width: int, *how: int
) -> Tensor:  # fmt: skip
    """Return maps that lie channel by channel, as a product of matrices left them."""
    columns, sizes = columns.contiguous(), _layout(height, width, *how)
    added = columns.new_empty(len(columns), channels, n, height, width)
    if added.numel():
        blocks = triton.cdiv(n * height * width, BLOCK)
        _add_kernel[(len(columns) * channels * blocks,)](columns, added, n, blocks, **sizes)
    return added.transpose(1, 2)


if triton is not None:

    @triton.jit
    def _copy_kernel(
        x, copied, by_network, by_picture, by_channel, by_row, by_column, channels, total, blocks,
        HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
        SIDE: tl.constexpr, STRIDE: tl.constexpr, BEFORE: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Copy one channel of one network's maps to all rows that look at it, for some places."""
        program = tl.program_id(0)
        row = (program // blocks).to(tl.int64)  # of maps: one channel of one network
        number = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
        picture, place = number // (ROWS * COLUMNS), number % (ROWS * COLUMNS)
        top = (place // COLUMNS) * STRIDE - BEFORE
        left = (place % COLUMNS) * STRIDE - BEFORE
        maps = x + (row // channels) * by_network + (row % channels) * by_channel
        own = maps + picture.to(tl.int64) * by_picture
        here = number < total
        for tap in tl.static_range(SIDE * SIDE):
            down, right = top + tap // SIDE, left + tap % SIDE
            inside = here & (down >= 0) & (down < HEIGHT) & (right >= 0) & (right < WIDTH)
            value = tl.load(own + down * by_row + right * by_column, mask=inside, other=0.0)
            tl.store(copied + (row * SIDE * SIDE + tap) * total + number, value, mask=here)

    @triton.jit
    def _add_kernel(
        columns, added, n, blocks,
        HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
        SIDE: tl.constexpr, STRIDE: tl.constexpr, BEFORE: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Add up, for some pixels of one channel of one network, the windows they stand in.

        Of the taps only each STRIDEth can have met a pixel, along either side.
        """
        program = tl.program_id(0)
        row = (program // blocks).to(tl.int64)
        number = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
        here = number < n * HEIGHT * WIDTH
        picture, pixel = number // (HEIGHT * WIDTH), number % (HEIGHT * WIDTH)
        y, x = pixel // WIDTH + BEFORE, pixel % WIDTH + BEFORE
        total = tl.zeros((BLOCK,), added.dtype.element_ty)
        for step in tl.static_range(((SIDE - 1) // STRIDE + 1) * ((SIDE - 1) // STRIDE + 1)):
            up, aside = step // ((SIDE - 1) // STRIDE + 1), step % ((SIDE - 1) // STRIDE + 1)
            down, right = y % STRIDE + up * STRIDE, x % STRIDE + aside * STRIDE
            top, left = y // STRIDE - up, x // STRIDE - aside
            seen = here & (down < SIDE) & (top >= 0) & (top < ROWS)
            seen = seen & (right < SIDE) & (left >= 0) & (left < COLUMNS)
            tap = row * SIDE * SIDE + down * SIDE + right
            at = (tap * n + picture) * (ROWS * COLUMNS) + top * COLUMNS + left
            total += tl.load(columns + at, mask=seen, other=0.0)
        tl.store(added + row * n * HEIGHT * WIDTH + number, total, mask=here)
