"""Adam in place, by one kernel or plainly, for one learner or a stack: PyTorch's own is the measure."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from tests.ops.kernels import DEVICE, needs_triton
from understudy.ops import adam as module
from understudy.ops.adam import adam, part, untrained

State = dict[str, Tensor]

SHAPES = {"map": (3, 2, 5, 5), "bias": (1,), "wide": (3, module.BLOCK // 2 + 1)}

RATE = 1e-2


@pytest.fixture(params=["plain", pytest.param("kernel", marks=needs_triton)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Move weights plainly, then by the kernel."""
    monkeypatch.setattr(module, "available", lambda weight: request.param == "kernel")
    return str(request.param)


def drawn(stream: torch.Generator, *stack: int) -> dict[str, Tensor]:
    return {
        name: torch.randn(*stack, *shape, generator=stream).to(DEVICE)
        for name, shape in SHAPES.items()
    }


def fresh(stream: torch.Generator, *stack: int) -> State:
    return untrained(drawn(stream, *stack), torch.zeros(stack, device=DEVICE))


def copied(state: State) -> State:
    return {name: value.clone() for name, value in state.items()}


def by_pytorch(weights: State, slopes: list[State], momentum: float) -> State:
    moving = {name: value.clone().requires_grad_() for name, value in weights.items()}
    optimiser = torch.optim.Adam(moving.values(), lr=RATE, betas=(momentum, 0.999))
    for each in slopes:
        for name, value in moving.items():
            value.grad = each[name].clone()
        optimiser.step()
    return {name: value.detach() for name, value in moving.items()}


def step(momentum: float = 0.5) -> Callable[[State, State], State]:
    return lambda state, slopes: adam(state, slopes, RATE, momentum)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_one_learner_moves_as_pytorchs(momentum: float) -> None:
    stream = torch.Generator().manual_seed(0)
    state = fresh(stream)
    slopes = [drawn(stream) for _ in range(4)]
    theirs = by_pytorch(part(state, "weights"), slopes, momentum)
    for each in slopes:
        state = step(momentum)(state, each)
    assert float(state["steps"]) == 4
    for name, value in part(state, "weights").items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("way")
def test_a_stack_learns_in_place_as_each_would_alone() -> None:
    """Learners have taken different numbers of steps; their moments and paces are their own."""
    stream = torch.Generator().manual_seed(1)
    whole = fresh(stream, 7)
    whole["steps"].copy_(torch.arange(7))
    before = copied(whole)
    group = {name: value[2:6] for name, value in whole.items()}  # as the gate cuts its stack
    slopes = [drawn(stream, 4) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a missing batching rule would run one by one
        for each in slopes:
            after = vmap(step())(group, each)
    for name, value in after.items():
        assert value.data_ptr() == group[name].data_ptr() and value.shape == group[name].shape
        for outside in (0, 1, 6):
            assert torch.equal(whole[name][outside], before[name][outside])
    for which in range(4):
        alone = {name: value[2 + which].clone() for name, value in before.items()}
        for each in slopes:
            alone = step()(alone, {name: value[which] for name, value in each.items()})
        for name, value in alone.items():
            torch.testing.assert_close(whole[name][2 + which], value, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("way")
def test_one_learner_moves_no_other() -> None:
    stream = torch.Generator().manual_seed(2)
    ours, slopes = fresh(stream, 5), drawn(stream, 5)
    theirs, others = copied(ours), copied(slopes)
    for value in others.values():
        value[3] = torch.nan
    vmap(step())(ours, slopes)
    vmap(step())(theirs, others)
    for name in ours:
        same = [torch.equal(a, b) for a, b in zip(ours[name], theirs[name])]
        assert same == [True, True, True, name == "steps", True]


@pytest.mark.usefixtures("way")
def test_slopes_may_lie_as_they_like_and_be_everybodys() -> None:
    stream = torch.Generator().manual_seed(3)
    ours = fresh(stream, 3)
    theirs = copied(ours)
    slopes = drawn(stream)
    laid = {"map": slopes["map"].mT.contiguous().mT, "bias": slopes["bias"]}
    laid["wide"] = slopes["wide"].mT.contiguous().mT
    assert not laid["wide"].is_contiguous()
    vmap(step(), (0, None))(ours, laid)
    vmap(step())(theirs, {name: value.expand(3, *value.shape) for name, value in slopes.items()})
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0)


@pytest.mark.usefixtures("way")
def test_a_stack_need_not_lie_one_learner_after_the_other() -> None:
    stream = torch.Generator().manual_seed(4)
    ours, slopes = fresh(stream, 3), drawn(stream, 3)
    aside = {name: value.clone().movedim(0, -1).contiguous() for name, value in ours.items()}
    last = {name: value.dim() - 1 for name, value in aside.items()}
    vmap(step(), (last, 0), last)(aside, slopes)
    vmap(step())(ours, slopes)
    for name in ours:
        torch.testing.assert_close(aside[name].movedim(-1, 0), ours[name], rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("way")
def test_learners_that_share_their_weights_are_refused() -> None:
    stream = torch.Generator().manual_seed(5)
    state, slopes = fresh(stream), drawn(stream, 3)
    with pytest.raises(ValueError, match="of their own"):
        vmap(step(), (None, 0), None)(state, slopes)


def test_a_cpu_moves_plainly() -> None:
    assert not module.available(torch.zeros(3))
