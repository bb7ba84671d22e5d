"""Follow slopes by Adam (Kingma and Ba 2015, Algorithm 1), in place: one learner or a whole stack.

A learner's state is a dictionary of tensors: its weights, the two moments of each, and the number
of steps taken. :func:`adam` is a function of ONE learner's, so ``torch.func.vmap`` makes thousands
learn, each by its own moments and its own count; what lies in the stack is changed where it lies,
and nothing has to be copied back.

On a GPU with Triton one kernel reads weights, moments and slopes once and writes the first three
once; one operation after the other reads and writes them about four times as often.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from understudy.ops.fused import triton

if triton is not None:
    import triton.language as tl

__all__ = ["adam", "available", "part", "untrained"]

SQUARES = 0.999  # the second moment's decay, TensorFlow's and PyTorch's default
TINY = 1e-8  # epsilon, likewise

CACHED_NUMBERS = 2**18
"""Weights that a CPU moves at a time, so that what it works with stays in its cache."""

BLOCK = 1024
"""Weights of one learner that a program moves."""


def available(weight: Tensor) -> bool:
    """Tell whether weights like these can go through the kernel."""
    return triton is not None and weight.is_cuda and weight.dtype == torch.float32


def untrained(weights: Mapping[str, Tensor], steps: Tensor) -> dict[str, Tensor]:
    """Return a state that has taken ``steps``, zeros, and learns in the very tensors given."""
    state = {"steps": steps}
    for name, value in weights.items():
        state[f"weights.{name}"] = value
        state[f"mean.{name}"], state[f"square.{name}"] = (torch.zeros_like(value) for _ in "ab")
    return state


def part(state: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Return what a state holds of one kind, by the names of the weights."""
    prefix = f"{kind}."
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


@torch.no_grad()
def adam(
    state: dict[str, Tensor], slopes: Mapping[str, Tensor], learning_rate: float, momentum: float
) -> dict[str, Tensor]:
    """Take one step against the slopes, in place, and return the same state."""
    steps = state["steps"].add_(1)
    root = torch.sqrt(1 - SQUARES**steps)  # moves both corrections to numbers of one learner
    pace, tiny = learning_rate * root / (1 - momentum**steps), TINY * root
    for name, slope in slopes.items():
        weight, mean, square = (state[f"{kind}.{name}"] for kind in ("weights", "mean", "square"))
        _Step.apply(weight, mean, square, slope, pace, tiny, momentum)
    return state


class _Step(torch.autograd.Function):
    """Change weights and moments, a whole stack's at once; there is no derivative.

    ``pace`` and ``tiny`` have a number for each learner of a stack, whose dimensions come first in
    every other tensor, or are numbers of the only learner.
    """

    @staticmethod
    def forward(
        weight: Tensor,
        mean: Tensor,
        square: Tensor,
        slope: Tensor,
        pace: Tensor,
        tiny: Tensor,
        momentum: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        moving = weight, mean, square
        if available(weight) and all(value.is_contiguous() for value in moving):
            _fused((*moving, *(value.contiguous() for value in (slope, pace, tiny))), momentum)
            return moving
        given = [*moving, slope, pace, tiny]
        if pace.dim() == 0:
            given = [value[None] for value in given]
        few = len(given[0])
        if weight.device.type == "cpu":
            few = max(1, CACHED_NUMBERS * few // max(1, weight.numel()))
        for some in zip(*(torch.split(value, few) for value in given)):
            _plainly(some, momentum)
        return moving

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_dirty(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("A step of Adam, which is taken in place, has no derivative.")

    @staticmethod
    def vmap(info: Any, where: tuple[int | None, ...], *given: Any) -> Any:
        if None in where[:3]:
            raise ValueError("Learners that learn apart need weights and moments of their own.")
        first = [
            value.expand(info.batch_size, *value.shape) if at is None else value.movedim(at, 0)
            for value, at in zip(given[:6], where)
        ]
        _Step.apply(*first, given[6])
        return given[:3], where[:3]


def _plainly(given: tuple[Tensor, ...], momentum: float) -> None:
    """Do what the kernel does by one operation after the other."""
    weight, mean, square, slope, pace, tiny = given
    own = [1] * (weight.dim() - pace.dim())
    pace, tiny = (number.reshape(*number.shape, *own) for number in (pace, tiny))
    mean.lerp_(slope, 1 - momentum)
    square.lerp_(slope * slope, 1 - SQUARES)
    weight.sub_((pace * mean).div_(square.sqrt().add_(tiny)))


def _fused(given: tuple[Tensor, ...], momentum: float) -> None:
    weight, *_, pace, _ = given
    if not weight.numel():
        return
    learners = pace.numel()
    numbers = weight.numel() // learners
    blocks = triton.cdiv(numbers, BLOCK)
    _kernel[(learners * blocks,)](
        *given, 1 - momentum, 1 - SQUARES, numbers, blocks,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


if triton is not None:

    @triton.jit
    def _kernel(
        weight, mean, square, slope, pace, tiny, by_slope, by_square, numbers, blocks,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Move some weights of one learner; by_slope and by_square are how fast moments follow."""
        program = tl.program_id(0)
        learner = (program // blocks).to(tl.int64)
        number = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
        at, here = learner * numbers + number, number < numbers
        s = tl.load(slope + at, mask=here, other=0.0)
        m = tl.load(mean + at, mask=here, other=0.0)
        q = tl.load(square + at, mask=here, other=0.0)
        w = tl.load(weight + at, mask=here, other=0.0)
        m += (s - m) * by_slope
        q += (s * s - q) * by_square
        w -= tl.load(pace + learner) * m / (tl.sqrt(q) + tl.load(tiny + learner))
        tl.store(mean + at, m, mask=here)
        tl.store(square + at, q, mask=here)
        tl.store(weight + at, w, mask=here)
