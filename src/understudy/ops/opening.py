"""Convolve, normalise, rectify and halve pictures in one pass: a ConvNet's first block on a GPU.

A picture of one or three channels becomes a map of a hundred and more, the largest tensor of the
whole network, made by hardly any arithmetic. Here it is never written to memory: a program takes one
picture, keeps the 3x3 neighbourhoods of all its pixels in registers, and makes, normalises,
rectifies and halves the map a few channels at a time. On the way back the map is made once more,
which is cheaper than having kept it.

The norm takes each map's constant away, so the convolution has no bias. Products are of numbers in
the precision asked for, added up in float32, and so is everything after them. As in
:mod:`~understudy.ops.fused`, there is no second derivative, no record sees another, and
``torch.func.vmap`` maps over the first dimension as over any batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from understudy.ops.fused import (
    EPSILON,
    LARGEST_MAP,
    FirstDerivative,
    added,
    channels_last,
    folded,
    parted,
    triton,
)

if triton is not None:
    import triton.language as tl

__all__ = ["available", "convolve_norm_relu_halve"]

KERNEL = 3
"""Rows and columns of the convolution."""

MOST_NEIGHBOURS = 64
"""Numbers of a neighbourhood that one program holds for every position: up to seven channels."""

FORWARD, BACKWARD = {"AT_ONCE": 16, "num_warps": 4}, {"AT_ONCE": 16, "num_warps": 8}
"""Channels of the map that are made at a time, and by how many warps of 32 threads."""


def available(x: Tensor, kernel: Tensor, margin: int) -> bool:
    """Tell whether pictures like these can go through the kernels."""
    height, width = (side + 2 * margin - KERNEL + 1 for side in x.shape[-2:])
    return (
        triton is not None
        and x.is_cuda
        and tuple(kernel.shape[-2:]) == (KERNEL, KERNEL)
        and kernel.shape[-3] * KERNEL**2 <= MOST_NEIGHBOURS
        and kernel.shape[-4] % FORWARD["AT_ONCE"] == 0
        and height % 2 == width % 2 == 0
        and height * width <= LARGEST_MAP
    )


def convolve_norm_relu_halve(
    x: Tensor, kernel: Tensor, weight: Tensor, bias: Tensor, margin: int, precision: torch.dtype
) -> Tensor:
    """Return ``avg_pool2d(relu(group_norm(conv2d(x, kernel), channels, weight, bias)), 2)``.

    ``margin`` zeros are padded on every side. The result lies channels last, in ``precision``.
    """
    halved: Tensor = _Forward.apply(x, kernel, weight, bias, margin, precision)[0]
    return halved


class _Forward(torch.autograd.Function):
    """Keep each map's mean and scale for the way back."""

    @staticmethod
    def forward(
        x: Tensor, kernel: Tensor, weight: Tensor, bias: Tensor, margin: int, precision: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _forward(x, kernel, weight, bias, margin, precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, kernel, weight, bias, ctx.margin, ctx.precision = inputs
        _, mean, scale = output
        ctx.mark_non_differentiable(mean, scale)
        ctx.save_for_backward(x, kernel, weight, bias, mean, scale)

    @staticmethod
    def backward(ctx: Any, slope: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, kernel, weight, bias, mean, scale = ctx.saved_tensors
        for_x, for_parameters = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:4])
        asked = for_x, for_parameters, ctx.margin, ctx.precision
        by_neighbour, kernels, affines = _Backward.apply(
            slope, x, mean, scale, kernel, weight, bias, *asked
        )
        result: list[Tensor | None] = [None] * 6
        if for_x:
            result[0] = _Gather.apply(by_neighbour, *x.shape[-3:], ctx.margin).to(x.dtype)
        if for_parameters:
            by_kernel = added(kernels, kernel, 4)[..., : kernel.shape[-3:].numel(), :]
            weights, biases = added(affines, weight, 1).unbind(-2)
            result[1:4] = by_kernel.mT.reshape(kernel.shape), weights, biases
        return tuple(result)

    @staticmethod
    def vmap(
        info: Any,
        where: tuple[int | None, ...],
        x: Tensor,
        kernel: Tensor,
        weight: Tensor,
        bias: Tensor,
        margin: int,
        precision: torch.dtype,
    ) -> Any:
        size, at = info.batch_size, where[:4]
        x, kernel, weight, bias = folded(size, at, (x,), (kernel, weight, bias), (4, 1, 1))
        results = _Forward.apply(x, kernel, weight, bias, margin, precision)
        return tuple(parted(result, size) for result in results), (0, 0, 0)


class _Backward(FirstDerivative):
    """Return the gradients by each neighbourhood, by the kernel, and by weight and bias.

    Those by parameters come for each picture of the batch. What is not asked for is empty.
    """

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _backward(*given)

    @staticmethod
    def vmap(info: Any, where: tuple[int | None, ...], *given: Any) -> Any:
        size = info.batch_size
        maps, shared, asked = given[:4], given[4:7], given[7:]
        tensors = folded(size, where[:7], maps, shared, (4, 1, 1))
        results = _Backward.apply(*tensors, *asked)
        return tuple(parted(result, size) for result in results), (0, 0, 0)


class _Gather(FirstDerivative):
    """Add up, for each pixel, what the neighbourhoods it stands in say of it."""

    @staticmethod
    def forward(
        by_neighbour: Tensor, channels: int, height: int, width: int, margin: int
    ) -> Tensor:
        return _gather(by_neighbour, channels, height, width, margin)

    @staticmethod
    def vmap(info: Any, where: tuple[int | None, ...], by_neighbour: Tensor, *sizes: int) -> Any:
        whole = by_neighbour.movedim(where[0] or 0, 0).flatten(0, 1)
        return parted(_Gather.apply(whole, *sizes), info.batch_size), 0


def _layout(x: Tensor, kernel: Tensor, margin: int) -> dict[str, int]:
    """Return the sizes the kernels are compiled for."""
    channels, height, width = x.shape[1:]
    half = (width + 2 * margin - KERNEL + 1) // 2
    halves = half * (height + 2 * margin - KERNEL + 1) // 2
    return {
        "CHANNELS": channels,
        "HEIGHT": height,
        "WIDTH": width,
        "MARGIN": margin,
        "HALF_WIDTH": half,
        "HALVES": halves,
        "QUARTER": max(16, triton.next_power_of_2(halves)),
        "MAPS": kernel.shape[-4],
        "NEIGHBOURS": max(16, triton.next_power_of_2(channels * KERNEL**2)),
    }


def _forward(
    x: Tensor, kernel: Tensor, weight: Tensor, bias: Tensor, margin: int, precision: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    x, kernel, weight, bias = (value.contiguous() for value in (x, kernel, weight, bias))
    sizes = _layout(x, kernel, margin)
    n, maps, half = len(x), sizes["MAPS"], sizes["HALF_WIDTH"]
    halved = torch.empty(
        (n, maps, sizes["HALVES"] // half, half),
        dtype=precision,
        device=x.device,
        memory_format=torch.channels_last,
    )
    mean = torch.empty(n, maps, dtype=torch.float32, device=x.device)
    scale = torch.empty_like(mean)
    each = n // (weight.numel() // maps)
    _forward_kernel[(n,)](
        x, kernel, weight, bias, halved, mean, scale, EPSILON, each, **sizes, **FORWARD
    )
    return halved, mean, scale


def _backward(
    slope: Tensor,
    x: Tensor,
    mean: Tensor,
    scale: Tensor,
    kernel: Tensor,
    weight: Tensor,
    bias: Tensor,
    for_x: bool,
    for_parameters: bool,
    margin: int,
    precision: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    given = (x, kernel, weight, bias, mean, scale)
    x, kernel, weight, bias, mean, scale = (value.contiguous() for value in given)
    sizes = _layout(x, kernel, margin)
    n, maps, neighbours = len(x), sizes["MAPS"], sizes["NEIGHBOURS"]

    def room(wanted: bool, *shape: int) -> Tensor:
        return torch.empty((n, *shape) if wanted else (n, 0), device=x.device)

    by_neighbour = room(for_x, neighbours, 4, sizes["QUARTER"])
    kernels, affines = room(for_parameters, neighbours, maps), room(for_parameters, 2, maps)
    _backward_kernel[(n,)](
        channels_last(slope.to(precision)), x, kernel, weight, bias, mean, scale,
        by_neighbour, kernels, affines, n // (weight.numel() // maps),
        FOR_X=for_x, FOR_PARAMETERS=for_parameters, **sizes, **BACKWARD,
    )  # fmt: skip
    return by_neighbour, kernels, affines


def _gather(by_neighbour: Tensor, channels: int, height: int, width: int, margin: int) -> Tensor:
    n, neighbours, _, quarter = by_neighbour.shape
    by_picture = torch.empty(n, channels, height, width, device=by_neighbour.device)
    half = (width + 2 * margin - KERNEL + 1) // 2
    rows = height + 2 * margin - KERNEL + 1
    pixels = 256
    _gather_kernel[(n * channels, triton.cdiv(height * width, pixels))](
        by_neighbour, by_picture, CHANNELS=channels, HEIGHT=height, WIDTH=width, MARGIN=margin,
        HALF_WIDTH=half, ROWS=rows, QUARTER=quarter, NEIGHBOURS=neighbours, PIXELS=pixels,
        num_warps=4,
    )  # fmt: skip
    return by_picture


if triton is not None:

    @triton.jit
    def _neighbourhoods(
        x, n, corner: tl.constexpr, kind: tl.constexpr,
        CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MARGIN: tl.constexpr,
        HALF_WIDTH: tl.constexpr, HALVES: tl.constexpr, QUARTER: tl.constexpr,
        NEIGHBOURS: tl.constexpr,
    ):  # fmt: skip
        """Return the 3x3 pixels around one corner of each 2x2 square of the map, row by row."""
        place = tl.arange(0, QUARTER)[:, None]
        number = tl.arange(0, NEIGHBOURS)[None, :]
        channel = number // 9
        row = 2 * (place // HALF_WIDTH) + corner // 2 + (number % 9) // 3 - MARGIN
        column = 2 * (place % HALF_WIDTH) + corner % 2 + number % 3 - MARGIN
        here = (place < HALVES) & (channel < CHANNELS)
        here = here & (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
        at = ((n * CHANNELS + channel) * HEIGHT + row) * WIDTH + column
        return tl.load(x + at, mask=here, other=0.0).to(kind)

    @triton.jit
    def _forward_kernel(
        x, kernel, weight, bias, halved, mean, scale, epsilon, each,
        CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MARGIN: tl.constexpr,
        HALF_WIDTH: tl.constexpr, HALVES: tl.constexpr, QUARTER: tl.constexpr, MAPS: tl.constexpr,
        NEIGHBOURS: tl.constexpr, AT_ONCE: tl.constexpr,
    ):  # fmt: skip
        n = tl.program_id(0).to(tl.int64)
        kind: tl.constexpr = halved.dtype.element_ty
        a = _neighbourhoods(x, n, 0, kind, CHANNELS, HEIGHT, WIDTH, MARGIN, HALF_WIDTH, HALVES, QUARTER, NEIGHBOURS)  # fmt: skip
        b = _neighbourhoods(x, n, 1, kind, CHANNELS, HEIGHT, WIDTH, MARGIN, HALF_WIDTH, HALVES, QUARTER, NEIGHBOURS)  # fmt: skip
        c = _neighbourhoods(x, n, 2, kind, CHANNELS, HEIGHT, WIDTH, MARGIN, HALF_WIDTH, HALVES, QUARTER, NEIGHBOURS)  # fmt: skip
        d = _neighbourhoods(x, n, 3, kind, CHANNELS, HEIGHT, WIDTH, MARGIN, HALF_WIDTH, HALVES, QUARTER, NEIGHBOURS)  # fmt: skip
        place = tl.arange(0, QUARTER)[:, None]
        number = tl.arange(0, NEIGHBOURS)[:, None]
        real = place < HALVES
        row = (n // each) * MAPS
        for first in range(0, MAPS, AT_ONCE):
            channel = first + tl.arange(0, AT_ONCE)
            taps = kernel + (row + channel[None, :]) * (CHANNELS * 9) + number
            w = tl.load(taps, mask=number < CHANNELS * 9, other=0.0).to(kind)
            p = tl.dot(a, w, input_precision="ieee")
            q = tl.dot(b, w, input_precision="ieee")
            r = tl.dot(c, w, input_precision="ieee")
            s = tl.dot(d, w, input_precision="ieee")
            center = tl.sum(p + q + r + s, axis=0) / (4 * HALVES)  # rows of no place are zero
            p = tl.where(real, p - center[None, :], 0.0)
            q = tl.where(real, q - center[None, :], 0.0)
            r = tl.where(real, r - center[None, :], 0.0)
            s = tl.where(real, s - center[None, :], 0.0)
            spread = tl.sum(p * p + q * q + r * r + s * s, axis=0) / (4 * HALVES)
            factor = 1.0 / tl.sqrt(spread + epsilon)
            slope = (factor * tl.load(weight + row + channel).to(tl.float32))[None, :]
            shift = tl.load(bias + row + channel).to(tl.float32)[None, :]
            quarter = tl.maximum(p * slope + shift, 0.0) + tl.maximum(q * slope + shift, 0.0)
            quarter += tl.maximum(r * slope + shift, 0.0) + tl.maximum(s * slope + shift, 0.0)
            out = halved + (n * HALVES + place) * MAPS + channel[None, :]
            tl.store(out, (quarter * 0.25).to(kind), mask=real)
            tl.store(mean + n * MAPS + channel, center)
            tl.store(scale + n * MAPS + channel, factor)

    @triton.jit
    def _passed(unit, up, w, b):
        """Return the gradient by a normalised map: a corner's part of the square's, where it shone."""
        return tl.where(unit * w + b > 0, up, 0.0)

    @triton.jit
    def _backward_kernel(
        slope, x, kernel, weight, bias, mean, scale, by_neighbour, kernels, affines, each,
        FOR_X: tl.constexpr, FOR_PARAMETERS: tl.constexpr,
        CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MARGIN: tl.constexpr,
        HALF_WIDTH: tl.constexpr, HALVES: tl.constexpr, QUARTER: tl.constexpr, MAPS: tl.constexpr,
        NEIGHBOURS: tl.constexpr, AT_ONCE: tl.constexpr,
    ):  # fmt: skip
        n = tl.program_id(0).to(tl.int64)
        kind: tl.constexpr = slope.dtype.element_ty
        a = _neighbourhoods(x, n, 0, kind, CHANNELS, HEIGHT, WIDTH, MARGIN, HALF_WIDTH, HALVES, QUARTER, NEIGHBOURS)  # fmt: skip
        b = _neighbourhoods(x, n, 1, kind, CHANNELS, HEIGHT, WIDTH, MARGIN, HALF_WIDTH, HALVES, QUARTER, NEIGHBOURS)  # fmt: skip
        c = _neighbourhoods(x, n, 2, kind, CHANNELS, HEIGHT, WIDTH, MARGIN, HALF_WIDTH, HALVES, QUARTER, NEIGHBOURS)  # fmt: skip
        d = _neighbourhoods(x, n, 3, kind, CHANNELS, HEIGHT, WIDTH, MARGIN, HALF_WIDTH, HALVES, QUARTER, NEIGHBOURS)  # fmt: skip
        place = tl.arange(0, QUARTER)
        number = tl.arange(0, NEIGHBOURS)
        real = (place < HALVES)[:, None]
        row = (n // each) * MAPS
        by_a = tl.zeros((QUARTER, NEIGHBOURS), tl.float32)
        by_b = tl.zeros((QUARTER, NEIGHBOURS), tl.float32)
        by_c = tl.zeros((QUARTER, NEIGHBOURS), tl.float32)
        by_d = tl.zeros((QUARTER, NEIGHBOURS), tl.float32)
        for first in range(0, MAPS, AT_ONCE):
            channel = first + tl.arange(0, AT_ONCE)
            taps = kernel + (row + channel[None, :]) * (CHANNELS * 9) + number[:, None]
            w = tl.load(taps, mask=number[:, None] < CHANNELS * 9, other=0.0).to(kind)
            center = tl.load(mean + n * MAPS + channel)[None, :]
            factor = tl.load(scale + n * MAPS + channel)[None, :]
            gain = tl.load(weight + row + channel).to(tl.float32)[None, :]
            shift = tl.load(bias + row + channel).to(tl.float32)[None, :]
            p = (tl.dot(a, w, input_precision="ieee") - center) * factor
            q = (tl.dot(b, w, input_precision="ieee") - center) * factor
            r = (tl.dot(c, w, input_precision="ieee") - center) * factor
            s = (tl.dot(d, w, input_precision="ieee") - center) * factor
            above = slope + (n * HALVES + place[:, None]) * MAPS + channel[None, :]
            up = tl.load(above, mask=real, other=0.0).to(tl.float32) * 0.25
            by_p = _passed(p, up, gain, shift)
            by_q = _passed(q, up, gain, shift)
            by_r = _passed(r, up, gain, shift)
            by_s = _passed(s, up, gain, shift)
            for_bias = tl.sum(by_p + by_q + by_r + by_s, axis=0)
            for_weight = tl.sum(by_p * p + by_q * q + by_r * r + by_s * s, axis=0)
            # d norm / d map = (I - 1 1^T / P - unit unit^T / P) * factor, times the gain.
            share = (for_bias / (4 * HALVES))[None, :]
            along = (for_weight / (4 * HALVES))[None, :]
            gain = gain * factor
            by_p = tl.where(real, (by_p - share - p * along) * gain, 0.0).to(kind)
            by_q = tl.where(real, (by_q - share - q * along) * gain, 0.0).to(kind)
            by_r = tl.where(real, (by_r - share - r * along) * gain, 0.0).to(kind)
            by_s = tl.where(real, (by_s - share - s * along) * gain, 0.0).to(kind)
            if FOR_X:
                back = tl.trans(w)
                by_a += tl.dot(by_p, back, input_precision="ieee")
                by_b += tl.dot(by_q, back, input_precision="ieee")
                by_c += tl.dot(by_r, back, input_precision="ieee")
                by_d += tl.dot(by_s, back, input_precision="ieee")
            if FOR_PARAMETERS:
                taught = tl.dot(tl.trans(a), by_p, input_precision="ieee")
                taught += tl.dot(tl.trans(b), by_q, input_precision="ieee")
                taught += tl.dot(tl.trans(c), by_r, input_precision="ieee")
                taught += tl.dot(tl.trans(d), by_s, input_precision="ieee")
                tl.store(kernels + (n * NEIGHBOURS + number[:, None]) * MAPS + channel[None, :], taught)  # fmt: skip
                tl.store(affines + n * 2 * MAPS + channel, for_weight)
                tl.store(affines + n * 2 * MAPS + MAPS + channel, for_bias)
        if FOR_X:
            out = by_neighbour + (n * NEIGHBOURS + number[None, :]) * (4 * QUARTER) + place[:, None]
            tl.store(out, by_a)
            tl.store(out + QUARTER, by_b)
            tl.store(out + 2 * QUARTER, by_c)
            tl.store(out + 3 * QUARTER, by_d)

    @triton.jit
    def _gather_kernel(
        by_neighbour, by_picture,
        CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MARGIN: tl.constexpr,
        HALF_WIDTH: tl.constexpr, ROWS: tl.constexpr, QUARTER: tl.constexpr,
        NEIGHBOURS: tl.constexpr, PIXELS: tl.constexpr,
    ):  # fmt: skip
        picture = tl.program_id(0).to(tl.int64)
        n, channel = picture // CHANNELS, picture % CHANNELS
        pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
        row, column = pixel // WIDTH, pixel % WIDTH
        total = tl.zeros((PIXELS,), tl.float32)
        for tap in tl.static_range(9):
            y = row + MARGIN - tap // 3
            x = column + MARGIN - tap % 3
            here = (pixel < HEIGHT * WIDTH) & (y >= 0) & (y < ROWS) & (x >= 0) & (x < 2 * HALF_WIDTH)  # fmt: skip
            corner = (y % 2) * 2 + x % 2
            place = (y // 2) * HALF_WIDTH + x // 2
            at = ((n * NEIGHBOURS + channel * 9 + tap) * 4 + corner) * QUARTER + place
            total += tl.load(by_neighbour + at, mask=here, other=0.0)
        tl.store(by_picture + picture * HEIGHT * WIDTH + pixel, total, mask=pixel < HEIGHT * WIDTH)
