"""Normalise, rectify and halve maps together with their tangents, in one pass over a GPU's memory.

A map z of a network changes at a rate z' as the network's weights go along a direction. The two are
a *pair*: one tensor of twice as many channels, the maps first, so that a convolution of both is one
convolution. The kernels here take a pair through the block of :mod:`~understudy.ops.fused`, and a
gradient by both back. So a derivative by weights and pictures costs two first derivatives.

With P positions, mean over them m(.), d = z - m(z), s = 1 / sqrt(m(d^2) + epsilon) and u = s d::

    a  = weight u + bias                     where a > 0 it shines, in y as in y'
    u' = s (d' - u c)                        with d' = z' - m(z') and c = m(u d')

and back, for cotangents p of u by way of y, and q of u' by way of y' (weights are in both)::

    by z' = s (q - m(q) - u k)               with k = m(u q)
    by z  = s (p - m(p) - s (c (q - m(q)) + k d') - u (m(u p) + s (m(d' q) - 3 c k)))

Arithmetic is float32 whatever the tensors hold. No picture sees another. Weight and bias are
constants, and there is no second derivative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from understudy.ops.fused import EPSILON, channels_last, room_for_halves, sizes, triton

if triton is not None:
    import triton.language as tl

    from understudy.ops.fused import places

__all__ = ["norm_relu_halve"]

NUMBERS = 4096
"""Numbers of a map that one program holds, and as many of its tangent."""

A_THREAD = 32
"""Of these, those that one thread holds: eight channels of a 2x2 square, and registers suffice."""


def norm_relu_halve(pair: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``fused.norm_relu_halve`` of the maps of (n, 2 C, H, W), and how fast that changes."""
    halved: Tensor = _NormReluHalve.apply(pair, weight, bias)
    return halved


class _NormReluHalve(torch.autograd.Function):
    """Keep each map's moments for the way back."""

    @staticmethod
    def forward(ctx: Any, pair: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        pair = channels_last(pair)
        halved, moments = _forward(pair, weight, bias)
        ctx.save_for_backward(pair, weight, bias, moments)
        return halved

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        return _backward(channels_last(slope), *ctx.saved_tensors), None, None


def _layout(pair: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid of programs, the sizes they are compiled for and how many warps they take."""
    n, channels, height, width = pair.shape
    each = sizes(channels // 2, height, width, NUMBERS)
    threads = 4 * each["QUARTER"] * each["AT_ONCE"] // A_THREAD
    warps = min(16, max(1, threads // 32))
    return (n, triton.cdiv(channels // 2, each["AT_ONCE"])), {**each, "num_warps": warps}


def _forward(pair: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    halved = room_for_halves(pair)
    moments = torch.empty(len(pair), 4, pair.shape[1] // 2, dtype=torch.float32, device=pair.device)
    grid, layout = _layout(pair)
    _forward_kernel[grid](
        pair, weight.contiguous(), bias.contiguous(), halved, moments, EPSILON, **layout
    )
    return halved, moments


def _backward(slope: Tensor, pair: Tensor, weight: Tensor, bias: Tensor, moments: Tensor) -> Tensor:
    for_pair = torch.empty_like(pair, memory_format=torch.channels_last)
    grid, layout = _layout(pair)
    _backward_kernel[grid](
        slope, pair, weight.contiguous(), bias.contiguous(), moments, for_pair, **layout
    )
    return for_pair


if triton is not None:

    @triton.jit
    def _mean(values, HALVES: tl.constexpr):
        """Return each map's mean. What lies beyond a map is zero."""
        return (tl.sum(tl.sum(values, axis=1), axis=0) / (4 * HALVES))[None, None, :]

    @triton.jit
    def _forward_kernel(
        pair, weight, bias, halved, moments, epsilon,
        CHANNELS: tl.constexpr, HALF_WIDTH: tl.constexpr, HALVES: tl.constexpr,
        QUARTER: tl.constexpr, AT_ONCE: tl.constexpr,
    ):  # fmt: skip
        n = tl.program_id(0).to(tl.int64)
        channel = (tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE))[None, None, :]
        real = channel < CHANNELS
        whole, half, here, here_half = places(CHANNELS, 2 * CHANNELS, HALF_WIDTH, HALVES, QUARTER, AT_ONCE)  # fmt: skip
        source = pair + n * (8 * HALVES * CHANNELS) + whole
        values = tl.load(source, mask=here, other=0.0).to(tl.float32)
        rates = tl.load(source + CHANNELS, mask=here, other=0.0).to(tl.float32)
        center, drift = _mean(values, HALVES), _mean(rates, HALVES)
        apart = tl.where(here, values - center, 0.0)
        factor = 1.0 / tl.sqrt(_mean(apart * apart, HALVES) + epsilon)
        unit, rates = apart * factor, rates - drift
        along = _mean(unit * rates, HALVES)
        w = tl.load(weight + channel, mask=real, other=0.0).to(tl.float32)
        b = tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
        shining = unit * w + b
        passed = here & (shining > 0)
        rates = (rates - unit * along) * (factor * w)
        quarter = tl.sum(tl.where(passed, shining, 0.0), axis=1, keep_dims=True) * 0.25
        rate = tl.sum(tl.where(passed, rates, 0.0), axis=1, keep_dims=True) * 0.25
        out = halved + n * (2 * HALVES * CHANNELS) + half
        tl.store(out, quarter.to(halved.dtype.element_ty), mask=here_half)
        tl.store(out + CHANNELS, rate.to(halved.dtype.element_ty), mask=here_half)
        kept = moments + n * (4 * CHANNELS) + channel
        tl.store(kept, center, mask=real)
        tl.store(kept + CHANNELS, factor, mask=real)
        tl.store(kept + 2 * CHANNELS, drift, mask=real)
        tl.store(kept + 3 * CHANNELS, along, mask=real)

    @triton.jit
    def _backward_kernel(
        slope, pair, weight, bias, moments, for_pair,
        CHANNELS: tl.constexpr, HALF_WIDTH: tl.constexpr, HALVES: tl.constexpr,
        QUARTER: tl.constexpr, AT_ONCE: tl.constexpr,
    ):  # fmt: skip
        n = tl.program_id(0).to(tl.int64)
        channel = (tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE))[None, None, :]
        real = channel < CHANNELS
        whole, half, here, here_half = places(CHANNELS, 2 * CHANNELS, HALF_WIDTH, HALVES, QUARTER, AT_ONCE)  # fmt: skip
        first = n * (8 * HALVES * CHANNELS)
        values = tl.load(pair + first + whole, mask=here, other=0.0).to(tl.float32)
        rates = tl.load(pair + first + whole + CHANNELS, mask=here, other=0.0).to(tl.float32)
        above = slope + n * (2 * HALVES * CHANNELS) + half
        up = tl.load(above, mask=here_half, other=0.0).to(tl.float32) * 0.25
        up_rate = tl.load(above + CHANNELS, mask=here_half, other=0.0).to(tl.float32) * 0.25
        kept = moments + n * (4 * CHANNELS) + channel
        center = tl.load(kept, mask=real, other=0.0)
        factor = tl.load(kept + CHANNELS, mask=real, other=0.0)
        drift = tl.load(kept + 2 * CHANNELS, mask=real, other=0.0)
        along = tl.load(kept + 3 * CHANNELS, mask=real, other=0.0)
        w = tl.load(weight + channel, mask=real, other=0.0).to(tl.float32)
        b = tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
        unit, rates = (values - center) * factor, rates - drift
        passed = here & (unit * w + b > 0)
        by_unit, by_rate = tl.where(passed, up * w, 0.0), tl.where(passed, up_rate * w, 0.0)
        common = _mean(by_unit, HALVES)
        turn = _mean(by_rate * unit, HALVES)
        pull = _mean(by_unit * unit, HALVES)
        pull += factor * (_mean(by_rate * rates, HALVES) - 3.0 * along * turn)
        by_rate -= _mean(by_rate, HALVES)  # from here on not zero beyond the map
        by_value = by_unit - common - factor * (along * by_rate + turn * rates) - unit * pull
        kind: tl.constexpr = for_pair.dtype.element_ty
        out = for_pair + first + whole
        tl.store(out, (factor * by_value).to(kind), mask=here)
        tl.store(out + CHANNELS, (factor * (by_rate - unit * turn)).to(kind), mask=here)
