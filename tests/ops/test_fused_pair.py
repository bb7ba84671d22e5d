"""The block of maps and tangents gives what autograd gives: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import jvp
from torch.nn import functional as F

from tests.ops.kernels import DEVICE, needs_triton
from understudy.ops import fused_pair


def plain(pair: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    def block(maps: Tensor) -> Tensor:
        return F.avg_pool2d(F.relu(F.group_norm(maps, maps.shape[1], weight, bias)), 2)

    maps, tangents = pair.chunk(2, dim=1)
    return torch.cat(jvp(block, (maps,), (tangents,)), dim=1)


@needs_triton
@pytest.mark.parametrize(
    ("channels", "height", "width"),
    [(64, 32, 32), (40, 16, 16), (128, 8, 8), (20, 14, 14), (16, 6, 10), (3, 2, 2)],
)
def test_it_is_the_derivative_of_the_operations_one_by_one_and_so_is_its_gradient(
    channels: int, height: int, width: int
) -> None:
    torch.manual_seed(channels + height)
    pair = torch.randn(3, 2 * channels, height, width, device=DEVICE) * 3 + 1
    weight, bias = torch.randn(2, channels, device=DEVICE).unbind()
    slope = torch.randn(3, 2 * channels, height // 2, width // 2, device=DEVICE)
    pair.requires_grad_()
    ours = fused_pair.norm_relu_halve(pair, weight, bias)
    exact = pair.detach().double().requires_grad_()
    theirs = plain(exact, weight.double(), bias.double())
    torch.testing.assert_close(ours, theirs.float(), atol=1e-4, rtol=1e-4)
    (a,), (b,) = (
        torch.autograd.grad(ours, pair, slope),
        torch.autograd.grad(theirs, exact, slope.double()),
    )
    torch.testing.assert_close(a, b.float(), atol=1e-4, rtol=1e-3)
