"""The columns a GPU's kernels lay out are those of ``F.unfold``, and slopes go back alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from tests.ops.kernels import DEVICE, needs_triton
from understudy.ops import columns as module
from understudy.ops.columns import columns

HOW = [(5, 2, 1, 2), (3, 1, 1, 1), (4, 3, 0, 2), (2, 3, 0, 0)]
"""Side, stride, zeros before and after; the last leaves pixels that no window meets."""

Way = Callable[..., Tensor]


def plainly(x: Tensor, side: int, stride: int, before: int, after: int) -> Tensor:
    unfolded = F.unfold(F.pad(x, (before, after, before, after)), side, stride=stride)
    return unfolded.transpose(0, 1).flatten(1)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send every map through the kernels, wherever it lies."""
    monkeypatch.setattr(module, "available", lambda x: True)


def maps(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_cpu_takes_pytorchs_own(how: tuple[int, ...]) -> None:
    x = maps(4, 3, 12, 10).cpu()
    assert not module.available(x)
    assert torch.equal(columns(x, *how), plainly(x, *how))


@needs_triton
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("shape", [(4, 3, 12, 10), (1, 1, 28, 28), (9, 2, 8, 8)], ids=str)
def test_columns_and_slopes_are_those_of_unfold(
    how: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    x = maps(*shape).requires_grad_()
    ours, theirs = columns(x, *how), plainly(x, *how)
    assert torch.equal(ours, theirs)
    slope = torch.randn_like(theirs)
    for a, b in zip(torch.autograd.grad(ours, x, slope), torch.autograd.grad(theirs, x, slope)):
        torch.testing.assert_close(a, b)


@needs_triton
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("mapped", ["both", "weights", "maps"])
def test_stacks_of_networks_have_columns_of_their_own(how: tuple[int, ...], mapped: str) -> None:
    """Maps lie channel by channel, as a convolution by a product of matrices leaves them."""
    places = {"both": (0, 0), "weights": (0, None), "maps": (None, 2)}[mapped]
    x = maps(6, 3, 4, 12, 12).transpose(1, 2)  # stacked networks, pictures, channels
    x = x[0] if mapped == "weights" else x.movedim(0, 2) if mapped == "maps" else x
    weights = maps(6, 8, 3 * how[0] ** 2)
    weights = weights[0] if mapped == "maps" else weights

    def slopes(way: Way) -> tuple[Tensor, Tensor]:
        def loss(weight: Tensor, x: Tensor) -> Tensor:
            return (weight @ way(x, *how)).sin().sum()

        found: tuple[Tensor, Tensor] = vmap(grad(loss, argnums=(0, 1)), places)(weights, x)
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a missing batching rule would run one by one
        ours = slopes(columns)
    for a, b in zip(ours, slopes(plainly)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@needs_triton
@pytest.mark.usefixtures("kernels")
def test_one_network_moves_no_others_slopes() -> None:
    how, weights, x = HOW[0], maps(5, 4, 2 * 25), maps(5, 3, 2, 8, 8)

    def slopes(weights: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        def loss(weight: Tensor, x: Tensor) -> Tensor:
            return (weight @ columns(x, *how)).square().sum()

        found: tuple[Tensor, Tensor] = vmap(grad(loss, argnums=(0, 1)))(weights, x)
        return found

    other = x.clone()
    other[2] = torch.nan
    for before, after in zip(slopes(weights, x), slopes(weights, other)):
        same = [torch.equal(a, b) for a, b in zip(before, after)]
        assert same == [True, True, False, True, True]


@needs_triton
@pytest.mark.usefixtures("kernels")
def test_columns_of_no_picture_are_no_columns() -> None:
    x = maps(0, 2, 8, 8).requires_grad_()
    found = columns(x, *HOW[0])
    assert found.shape == (50, 0)
    assert torch.autograd.grad(found.sum(), x)[0].shape == x.shape
