"""The fused blocks give what PyTorch's own operations give: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from tests.ops.kernels import DEVICE, needs_gpu, needs_triton
from understudy.engine import captured
from understudy.nets.convnet import ConvNet
from understudy.nets.draw import draw_parameters, materialise
from understudy.ops import fused, opening
from understudy.ops.gradients import gradient_of_one, matched


def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.avg_pool2d(F.relu(F.group_norm(x, x.shape[1], weight, bias)), 2)


def case(channels: int, side: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(channels + side)
    x = torch.randn(6, channels, side, side, device=DEVICE) * 3 + 1
    weight, bias = torch.randn(2, channels, device=DEVICE).unbind()
    return x, weight, bias, torch.randn(6, channels, side // 2, side // 2, device=DEVICE)


@needs_triton
@pytest.mark.parametrize(("channels", "side"), [(128, 32), (128, 16), (128, 8), (20, 14), (3, 2)])
def test_forward_and_backward_are_those_of_the_operations_one_by_one(
    channels: int, side: int
) -> None:
    *given, slope = case(channels, side)
    given = [value.requires_grad_() for value in given]
    ours, theirs = fused.norm_relu_halve(*given), plain(*given)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    for a, b in zip(
        torch.autograd.grad(ours, given, slope), torch.autograd.grad(theirs, given, slope)
    ):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=1e-3)


@needs_triton
def test_it_maps_over_records_and_over_parameters() -> None:
    x, weight, bias, _ = case(16, 8)

    def loss(how: object, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return how(x[None], weight, bias).square().sum()  # type: ignore[operator, no-any-return]

    for places in ((0, None, None), (0, 0, 0)):
        w, b = (weight, bias) if places[1] is None else (weight.expand(6, 16), bias.expand(6, 16))
        ours, theirs = (
            vmap(grad(lambda *given, how=how: loss(how, *given), (0, 1, 2)), places)(x, w, b)
            for how in (fused.norm_relu_halve, plain)
        )
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b, atol=2e-3, rtol=1e-3)


Block = tuple[Tensor, Tensor, Tensor, Tensor]


def opened(x: Tensor, kernel: Tensor, weight: Tensor, bias: Tensor, margin: int = 1) -> Tensor:
    return opening.convolve_norm_relu_halve(x, kernel, weight, bias, margin, torch.float32)


def plainly_opened(
    x: Tensor, kernel: Tensor, weight: Tensor, bias: Tensor, margin: int = 1
) -> Tensor:
    return plain(F.conv2d(x, kernel, padding=margin), weight, bias)


def first_block(n: int, channels: int, side: int, maps: int) -> Block:
    torch.manual_seed(channels + side)
    x = torch.randn(n, channels, side, side, device=DEVICE) + 0.5
    kernel = torch.randn(maps, channels, 3, 3, device=DEVICE)
    weight, bias = torch.randn(2, maps, device=DEVICE).unbind()
    return x, kernel, weight, bias


@needs_triton
@pytest.mark.parametrize(
    ("channels", "side", "maps", "margin"),
    [(1, 28, 32, 3), (3, 32, 16, 1), (1, 8, 16, 1), (3, 12, 48, 1)],
)
@pytest.mark.parametrize("asked", [(0, 1, 2, 3), (0,), (1, 2, 3)], ids=str)
def test_a_first_block_is_convolution_norm_rectifier_and_pool(
    channels: int, side: int, maps: int, margin: int, asked: tuple[int, ...]
) -> None:
    given = first_block(3, channels, side, maps)
    leaves = [given[place].requires_grad_() for place in asked]
    ours, theirs = opened(*given, margin), plainly_opened(*given, margin)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    slope = torch.randn_like(theirs)
    for a, b in zip(
        torch.autograd.grad(ours, leaves, slope), torch.autograd.grad(theirs, leaves, slope)
    ):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=1e-3)


@needs_triton
@pytest.mark.parametrize("places", [(0, None, None, None), (0, 0, 0, 0), (0, 0, None, None)])
def test_a_first_block_maps_over_records_and_over_parameters(
    places: tuple[int | None, ...],
) -> None:
    x, *shared = first_block(3, 1, 8, 16)
    parameters = [
        value if place is None else value * torch.rand(3, *[1] * value.dim(), device=DEVICE)
        for value, place in zip(shared, places[1:])
    ]

    def loss(how: object, x: Tensor, *parameters: Tensor) -> Tensor:
        return how(x[None], *parameters).square().sum()  # type: ignore[operator, no-any-return]

    for asked in ((0, 1, 2, 3), (0,), (1, 2, 3)):
        ours, theirs = (
            vmap(grad(lambda *given, how=how: loss(how, *given), asked), places)(x, *parameters)
            for how in (opened, plainly_opened)
        )
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b, atol=2e-3, rtol=1e-3)


@needs_triton
def test_gradients_by_mapped_parameters_come_row_by_row() -> None:
    """With the gradient taken outside of the map, of both kinds of block."""
    x, *shared = first_block(3, 1, 8, 16)
    rows = [(value * torch.ones(3, *[1] * value.dim(), device=DEVICE)) for value in shared]
    maps = torch.randn(3, 16, 8, 8, device=DEVICE)
    for blocks, first, leaves in (
        ((opened, plainly_opened), x, rows),
        ((fused.norm_relu_halve, plain), maps, rows[1:]),
    ):
        leaves = [value.detach().requires_grad_() for value in leaves]
        ours, theirs = (
            torch.autograd.grad(
                vmap(lambda x, *p, how=how: how(x[None], *p))(first, *leaves).square().sum(), leaves
            )
            for how in blocks
        )
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b, atol=2e-3, rtol=1e-3)


@needs_triton
def test_there_is_no_second_derivative() -> None:
    x, *shared = first_block(2, 1, 8, 16)
    x.requires_grad_()
    (slope,) = torch.autograd.grad(opened(x, *shared).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(slope.sum(), x)


@needs_gpu
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8), (3, 64, 64)])
def test_a_network_in_bfloat16_has_nearly_the_same_features(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    images = torch.randn(5, *shape, device="cuda")
    exact, fast = (
        materialise(ConvNet(shape, 4, precision=precision).to("meta"), 3, "cuda").embed(images)
        for precision in (torch.float32, torch.bfloat16)
    )
    assert fast.dtype == torch.float32
    assert (exact - fast).norm() < 0.02 * exact.norm()


@needs_gpu
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 64, 64)])
def test_a_network_for_records_has_nearly_the_same_gradient_of_each(
    shape: tuple[int, int, int],
) -> None:
    torch.manual_seed(0)
    images, labels = torch.randn(5, *shape, device="cuda"), torch.arange(5, device="cuda") % 4
    exact, fast = (
        ConvNet(shape, 4, width=32, precision=precision, by_record=True).to("meta")
        for precision in (torch.float32, torch.bfloat16)
    )
    theta = draw_parameters(exact, 3, device="cuda")
    rows = [
        vmap(gradient_of_one(net, theta, matched(theta)))(images, labels) for net in (exact, fast)
    ]
    blocks = len(exact.convolutions)  # every one rounds to eight bits, and turns some units off
    assert (rows[0] - rows[1]).norm() < 0.02 * blocks * rows[0].norm()


@needs_gpu
def test_a_recorded_step_is_the_step() -> None:
    device = torch.device("cuda")
    value, added = torch.zeros(3, device=device), torch.ones(3, device=device)

    def step() -> None:
        value.add_(added)

    go = captured(step, device, (value,))
    assert value.tolist() == [0, 0, 0], "runs that warm up leave no trace"
    go()
    added.fill_(5)
    go()
    assert value.tolist() == [6, 6, 6]
