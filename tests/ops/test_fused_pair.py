"""The block of maps and tangents gives what autograd gives: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn import functional as F

from tests.ops.kernels import DEVICE, needs_triton
from understudy.ops import fused_pair


def plain(pair: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Differentiate twice: a gradient that depends on its cotangent linearly, and then by that."""
    maps, tangents = pair.chunk(2, dim=1)
    halved = F.avg_pool2d(F.relu(F.group_norm(maps, maps.shape[1], weight, bias)), 2)
    cotangent = torch.zeros_like(halved, requires_grad=True)
    (slope,) = grad(halved, maps, cotangent, create_graph=True)
    (rates,) = grad(slope, cotangent, tangents, create_graph=True)
    return torch.cat([halved, rates], dim=1)


def case(channels: int, height: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(channels + height)
    pair = torch.randn(3, 2 * channels, height, width, device=DEVICE) * 3 + 1
    weight, bias = torch.randn(2, channels, device=DEVICE).unbind()
    slope = torch.randn(3, 2 * channels, height // 2, width // 2, device=DEVICE)
    return pair, weight, bias, slope


def both(pair: Tensor, weight: Tensor, bias: Tensor, slope: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return results, ours and in float64, and gradients."""
    exact = pair.double().requires_grad_()
    pair.requires_grad_()
    ours = fused_pair.norm_relu_halve(pair, weight, bias)
    theirs = plain(exact, weight.double(), bias.double())
    return [(ours, theirs), (grad(ours, pair, slope)[0], grad(theirs, exact, slope.double())[0])]


@needs_triton
@pytest.mark.parametrize(
    ("channels", "height", "width"),
    [(64, 32, 32), (40, 16, 16), (128, 8, 8), (20, 14, 14), (16, 6, 10), (130, 4, 4), (3, 2, 2)],
)
def test_rates_and_their_gradient_are_those_of_the_operations_one_by_one(
    channels: int, height: int, width: int
) -> None:
    for ours, theirs in both(*case(channels, height, width)):
        torch.testing.assert_close(ours, theirs.float(), atol=1e-4, rtol=1e-3)


@needs_triton
def test_in_bfloat16_only_what_is_written_is_rounded() -> None:
    pair, weight, bias, slope = case(16, 8, 8)
    for ours, theirs in both(pair.bfloat16(), weight, bias, slope.bfloat16()):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - theirs).norm() < 2**-8 * theirs.norm()


@needs_triton
def test_there_is_no_second_derivative() -> None:
    pair, weight, bias, slope = case(3, 4, 4)
    pair.requires_grad_()
    ours = fused_pair.norm_relu_halve(pair, weight, bias)
    (once,) = grad(ours, pair, slope.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        once.sum().backward()
