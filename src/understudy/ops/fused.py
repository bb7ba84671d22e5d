"""Normalise, rectify and halve maps in one pass over a GPU's memory.

A ConvNet's block after its convolution is ``halve(relu(instance_norm(x)))``. Done one after the
other these read and write the map, by far the largest tensor there is, about ten times forward and
as often backward. The kernels here read it once and write the quarter that is left; backward they
read it once more and write its gradient. Arithmetic is float32 whatever the tensors hold.

Written in Triton, which comes with PyTorch's CUDA builds for Linux; ``available`` tells whether it
can be used for a map, and whoever calls falls back on PyTorch's own operations. No record sees
another, and ``torch.func.vmap`` maps over the first dimension as over any batch.

There is no second derivative. PSG's public half, which needs one by the pictures, takes the maps'
tangents along instead: :mod:`~understudy.ops.fused_pair`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without
    triton = None

__all__ = [
    "EPSILON",
    "LARGEST_MAP",
    "FirstDerivative",
    "added",
    "available",
    "channels_last",
    "folded",
    "norm_relu_halve",
    "parted",
    "sizes",
    "triton",
]

EPSILON = 1e-5
"""What PyTorch's norms add to a variance."""

LARGEST_MAP = 1024
"""Positions of a map that one program holds in registers."""

NUMBERS = 16_384
"""Numbers of a map that one program holds: positions times channels."""


def available(x: Tensor) -> bool:
    """Tell whether maps like these can go through the kernels."""
    height, width = x.shape[-2:]
    return (
        triton is not None
        and x.is_cuda
        and height % 2 == width % 2 == 0
        and height * width <= LARGEST_MAP
    )


def norm_relu_halve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``avg_pool2d(relu(group_norm(x, channels, weight, bias)), 2)`` of (n, C, H, W)."""
    halved: Tensor = _Forward.apply(x, weight, bias)[0]
    return halved


class _Forward(torch.autograd.Function):
    """Keep each map's mean and scale for the way back."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _forward(channels_last(x), weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        _, mean, scale = output
        ctx.mark_non_differentiable(mean, scale)
        ctx.save_for_backward(*inputs, mean, scale)

    @staticmethod
    def backward(ctx: Any, slope: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        for_x, affines = _Backward.apply(slope, x, weight, bias, mean, scale)
        if not any(ctx.needs_input_grad[1:]):
            return for_x, None, None
        weights, biases = added(affines, weight, 1).unbind(-2)
        return for_x, weights.to(weight.dtype), biases.to(bias.dtype)

    @staticmethod
    def vmap(
        info: Any, where: tuple[int | None, ...], x: Tensor, weight: Tensor, bias: Tensor
    ) -> Any:
        x, weight, bias = folded(info.batch_size, where, (x,), (weight, bias), (1, 1))
        results = _Forward.apply(x, weight, bias)
        return tuple(parted(result, info.batch_size) for result in results), (0, 0, 0)


class FirstDerivative(torch.autograd.Function):
    """Be a derivative that has none itself. Subclasses say what it is, and how it is mapped."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Refuse."""
        raise NotImplementedError(
            "This has no second derivative. Build the network with precision float32."
        )


class _Backward(FirstDerivative):
    """Return the gradient by the map, and by weight and bias for each picture of the batch."""

    @staticmethod
    def forward(
        slope: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        return _backward(channels_last(slope), channels_last(x), weight, bias, mean, scale)

    @staticmethod
    def vmap(info: Any, where: tuple[int | None, ...], *given: Tensor) -> Any:
        slope, x, weight, bias, mean, scale = given
        at = (where[0], where[1], where[4], where[5], where[2], where[3])
        slope, x, mean, scale, weight, bias = folded(
            info.batch_size, at, (slope, x, mean, scale), (weight, bias), (1, 1)
        )
        results = _Backward.apply(slope, x, weight, bias, mean, scale)
        return tuple(parted(result, info.batch_size) for result in results), (0, 0)


def folded(
    size: int,
    where: tuple[int | None, ...],
    maps: tuple[Tensor, ...],
    shared: tuple[Tensor, ...],
    own: tuple[int, ...],
) -> tuple[Tensor, ...]:
    """Fold the mapped dimension into the batch. Parameters become one row each, or a row a part.

    ``own`` counts the dimensions of each parameter itself. Where some are mapped, all become rows.
    """
    results = []
    for value, place in zip(maps, where):
        each = value.movedim(place, 0) if place is not None else value.expand(size, *value.shape)
        results.append(each.flatten(0, 1))
    places = where[len(maps) :]
    dims = [v.dim() - (place is not None) for v, place in zip(shared, places)]
    rows = any(place is not None for place in places) or dims != list(own)
    for value, place, count in zip(shared, places, own):
        if rows:
            each = value.expand(size, *value.shape) if place is None else value.movedim(place, 0)
            value = each.reshape(-1, *each.shape[each.dim() - count :])
        results.append(value)
    return tuple(results)


def added(each: Tensor, parameter: Tensor, own: int) -> Tensor:
    """Add up gradients that came for each picture: for all, or for each row of parameters."""
    if parameter.dim() == own:
        return each.sum(0)
    return each.unflatten(0, (len(parameter), -1)).sum(1)


def parted(value: Tensor, size: int) -> Tensor:
    """Undo :func:`folded` for a result."""
    return value.unflatten(0, (size, -1))


def channels_last(x: Tensor) -> Tensor:
    """Bring the channels to the end of the memory, where one program finds many of them."""
    return x.contiguous(memory_format=torch.channels_last)


def room_for_halves(x: Tensor) -> Tensor:
    """Return room for maps of half the sides."""
    n, channels, height, width = x.shape
    return torch.empty(
        (n, channels, height // 2, width // 2),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )


def sizes(channels: int, height: int, width: int, numbers: int = NUMBERS) -> dict[str, int]:
    """Return the sizes kernels are compiled for, if a program holds so many numbers of a map.

    The channels it takes at once are a power of two, and eight even of a large map.
    """
    quarter = triton.next_power_of_2(height * width // 4)
    most = max(8, numbers // (4 * quarter))
    return {
        "CHANNELS": channels,
        "HALF_WIDTH": width // 2,
        "HALVES": height * width // 4,
        "QUARTER": quarter,
        "AT_ONCE": min(most, triton.next_power_of_2(channels), 128),
    }


def _layout(x: Tensor, weight: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid of programs and the sizes they are compiled for.

    ``weight`` is one row for all maps, or a row for each of as many equal parts of the batch.
    """
    n, channels, height, width = x.shape
    each = sizes(channels, height, width)
    grid = (n, triton.cdiv(channels, each["AT_ONCE"]))
    return grid, {"maps_a_row": n // (weight.numel() // channels), **each}


def _forward(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n, channels = x.shape[:2]
    halved = room_for_halves(x)
    mean = torch.empty(n, channels, dtype=torch.float32, device=x.device)
    scale = torch.empty_like(mean)
    grid, sizes = _layout(x, weight)
    weight, bias = weight.contiguous(), bias.contiguous()
    _forward_kernel[grid](x, weight, bias, halved, mean, scale, EPSILON, **sizes, num_warps=8)
    return halved, mean, scale


def _backward(
    slope: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    for_x = torch.empty_like(x, memory_format=torch.channels_last)
    affines = torch.empty(len(x), 2, x.shape[1], dtype=torch.float32, device=x.device)
    grid, sizes = _layout(x, weight)
    weight, bias = weight.contiguous(), bias.contiguous()
    mean, scale = mean.contiguous(), scale.contiguous()
    _backward_kernel[grid](
        slope, x, weight, bias, mean, scale, for_x, affines, **sizes, num_warps=8
    )
    return for_x, affines


if triton is not None:

    @triton.jit
    def places(
        CHANNELS: tl.constexpr, PITCH: tl.constexpr, HALF_WIDTH: tl.constexpr,
        HALVES: tl.constexpr, QUARTER: tl.constexpr, AT_ONCE: tl.constexpr,
    ):  # fmt: skip
        """Return where a program's numbers lie: (a place of the halved map, 2x2, channel).

        From one place to the next are PITCH numbers.
        """
        place = tl.arange(0, QUARTER)[:, None, None]
        corner = tl.arange(0, 4)[None, :, None]
        channel = (tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE))[None, None, :]
        row = 2 * (place // HALF_WIDTH) + corner // 2
        column = 2 * (place % HALF_WIDTH) + corner % 2
        here = (place < HALVES) & (channel < CHANNELS) & (corner < 4)
        whole = (row * (2 * HALF_WIDTH) + column) * PITCH + channel
        half = place * PITCH + channel
        return whole, half, here, (place < HALVES) & (channel < CHANNELS)

    @triton.jit
    def _forward_kernel(
        x, weight, bias, halved, mean, scale, epsilon,
        maps_a_row,
        CHANNELS: tl.constexpr, HALF_WIDTH: tl.constexpr, HALVES: tl.constexpr,
        QUARTER: tl.constexpr, AT_ONCE: tl.constexpr,
    ):  # fmt: skip
        n = tl.program_id(0).to(tl.int64)
        channel = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
        real = channel < CHANNELS
        whole, half, here, here_half = places(
            CHANNELS, CHANNELS, HALF_WIDTH, HALVES, QUARTER, AT_ONCE
        )
        values = tl.load(x + n * 4 * HALVES * CHANNELS + whole, mask=here, other=0.0)
        values = values.to(tl.float32)
        center = tl.sum(tl.sum(values, axis=1), axis=0) / (4 * HALVES)
        apart = tl.where(here, values - center[None, None, :], 0.0)
        spread = tl.sum(tl.sum(apart * apart, axis=1), axis=0) / (4 * HALVES)
        factor = 1.0 / tl.sqrt(spread + epsilon)
        row = (n // maps_a_row) * CHANNELS
        w = tl.load(weight + row + channel, mask=real, other=0.0).to(tl.float32)
        b = tl.load(bias + row + channel, mask=real, other=0.0).to(tl.float32)
        rectified = tl.maximum(apart * (factor * w)[None, None, :] + b[None, None, :], 0.0)
        quarter = tl.sum(rectified, axis=1, keep_dims=True) * 0.25
        out = halved + n * HALVES * CHANNELS + half
        tl.store(out, quarter.to(halved.dtype.element_ty), mask=here_half)
        tl.store(mean + n * CHANNELS + channel, center, mask=real)
        tl.store(scale + n * CHANNELS + channel, factor, mask=real)

    @triton.jit
    def _backward_kernel(
        slope, x, weight, bias, mean, scale, for_x, affines,
        maps_a_row,
        CHANNELS: tl.constexpr, HALF_WIDTH: tl.constexpr, HALVES: tl.constexpr,
        QUARTER: tl.constexpr, AT_ONCE: tl.constexpr,
    ):  # fmt: skip
        n = tl.program_id(0).to(tl.int64)
        channel = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
        real = channel < CHANNELS
        whole, half, here, here_half = places(
            CHANNELS, CHANNELS, HALF_WIDTH, HALVES, QUARTER, AT_ONCE
        )
        first = n * 4 * HALVES * CHANNELS
        values = tl.load(x + first + whole, mask=here, other=0.0).to(tl.float32)
        up = tl.load(slope + n * HALVES * CHANNELS + half, mask=here_half, other=0.0)
        up = up.to(tl.float32) * 0.25
        center = tl.load(mean + n * CHANNELS + channel, mask=real, other=0.0)
        factor = tl.load(scale + n * CHANNELS + channel, mask=real, other=0.0)
        row = (n // maps_a_row) * CHANNELS
        w = tl.load(weight + row + channel, mask=real, other=0.0).to(tl.float32)
        b = tl.load(bias + row + channel, mask=real, other=0.0).to(tl.float32)
        unit = (values - center[None, None, :]) * factor[None, None, :]
        passed = here & (unit * w[None, None, :] + b[None, None, :] > 0)
        by_unit = tl.where(passed, up, 0.0)
        for_bias = tl.sum(tl.sum(by_unit, axis=1), axis=0)
        for_weight = tl.sum(tl.sum(by_unit * unit, axis=1), axis=0)
        # d norm / d x = (I - 1 1^T / P - unit unit^T / P) * factor, times w.
        share = (for_bias / (4 * HALVES))[None, None, :]
        along = (for_weight / (4 * HALVES))[None, None, :]
        result = (by_unit - share - unit * along) * (factor * w)[None, None, :]
        tl.store(for_x + first + whole, result.to(for_x.dtype.element_ty), mask=here)
        tl.store(affines + n * 2 * CHANNELS + channel, for_weight, mask=real)
        tl.store(affines + n * 2 * CHANNELS + CHANNELS + channel, for_bias, mask=real)
