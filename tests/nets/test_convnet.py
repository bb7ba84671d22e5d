from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F

from tests.ops.kernels import DEVICE, needs_triton
from understudy.nets import ConvNet, draw_parameters, random_convnet, uniforms
from understudy.nets.convnet import default_depth, halve
from understudy.ops import fused
from understudy.ops.by_record import convolve_by_record
from understudy.ops.gradients import (
    batch_gradient,
    loss_along,
    matched,
    row_distance,
    slopes_of_distance,
)


@pytest.mark.parametrize(("shape", "count"), [((1, 28, 28), 317_706), ((3, 32, 32), 320_010)])
def test_is_the_papers_network(shape: tuple[int, int, int], count: int) -> None:
    net = random_convnet(0, shape, 10)
    assert sum(p.numel() for p in net.parameters()) == count
    assert net.features == 2048
    assert net.embed(torch.zeros(2, *shape)).shape == (2, 2048)
    assert net(torch.zeros(2, *shape)).shape == (2, 10)


def test_the_layers_are_in_the_papers_order() -> None:
    net = random_convnet(5, (3, 32, 32), 10)
    x = torch.randn(4, 3, 32, 32)
    expected = x
    for convolution, norm in zip(net.convolutions, net.norms, strict=True):
        expected = F.conv2d(expected, convolution.weight, convolution.bias, padding=1)
        expected = F.instance_norm(expected, weight=norm.weight, bias=norm.bias)
        expected = F.avg_pool2d(F.relu(expected), 2)
    torch.testing.assert_close(net.embed(x), expected.flatten(1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("side", "depth", "features"),
    [(8, 2, 512), (16, 2, 2048), (28, 3, 2048), (32, 3, 2048), (64, 4, 2048), (128, 5, 2048)],
)
def test_depth_follows_the_picture(side: int, depth: int, features: int) -> None:
    assert default_depth(side, side) == depth
    with torch.device("meta"):
        net = ConvNet((1, side, side), 10)
    assert (len(net.norms), net.features) == (depth, features)


def test_surplus_blocks_do_not_pool() -> None:
    net = random_convnet(0, (1, 8, 8), 10, width=4, depth=4)
    assert (len(net.norms), net.pools, net.features) == (4, 2, 16)
    assert net(torch.randn(1, 1, 8, 8)).isfinite().all()


@pytest.mark.parametrize("shape", [(3, 12, 20), (1, 9, 11), (2, 28, 28), (3, 33, 47)])
def test_odd_shapes_work(shape: tuple[int, int, int]) -> None:
    net = random_convnet(0, shape, 3, width=4)
    assert net.embed(torch.zeros(1, *shape)).shape == (1, net.features)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 8x8"):
        random_convnet(0, (1, 6, 28), 10)
    with pytest.raises(ValueError, match="mlp"):
        ConvNet((14,), 2)  # type: ignore[arg-type]


def test_seed_is_the_network_and_nothing_global_moves() -> None:
    before = torch.get_rng_state()
    one, same, other = (random_convnet(seed, (1, 8, 8), 10) for seed in (7, 7, 8))
    assert torch.equal(before, torch.get_rng_state())
    for a, b, c in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.requires_grad
        assert a.dim() == 1 or not torch.equal(a, c)


def test_seeded_weights_never_change() -> None:
    """A release stores seeds: these numbers are part of the format."""
    words = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # SplitMix64 of seed 0
    from understudy.nets.draw import _GAMMA, _scramble

    assert [_scramble(i * _GAMMA % 2**64) for i in range(3)] == words
    start = _scramble(0)
    expected = []
    for i in range(1, 5):
        top = _scramble((start + (i - 1) * _GAMMA) % 2**64) >> 40
        expected.append((top if top < 2**23 else top - 2**24) / 2**23)
    assert uniforms([0], 4)[0].tolist() == expected


def test_seeds_of_any_size_are_taken() -> None:
    drawn = uniforms([0, 1, -1, 2**63, 2**64 - 2, 10**30], 100)
    assert len({tuple(row) for row in drawn.tolist()}) == 6
    assert torch.equal(uniforms([-1], 5), uniforms([2**64 - 1], 5))


def test_uniforms_are_uniform_and_streams_uncorrelated() -> None:
    u = uniforms(range(20), 20_000).double()
    assert u.min() >= -1
    assert u.max() < 1
    assert abs(u.mean()) < 4 / (3 * u.numel()) ** 0.5
    assert abs(3 * u.square().mean() - 1) < 0.01
    assert torch.corrcoef(u).fill_diagonal_(0).abs().max() < 5 / 20_000**0.5
    assert abs((u[:, 1:] * u[:, :-1]).mean() * 3) < 0.01


def test_weights_have_pytorchs_initial_distribution() -> None:
    net = random_convnet(0, (3, 32, 32), 10)
    for part, bound in [(net.convolutions[1], 1152**-0.5), (net.classifier, 2048**-0.5)]:
        assert 0.99 * bound < part.weight.abs().max() <= bound
        assert part.bias.abs().max() <= bound
    assert (net.norms[0].weight == 1).all()
    assert (net.norms[0].bias == 0).all()


def test_stacked_draws_equal_single_ones_and_run_under_vmap() -> None:
    with torch.device("meta"):
        template = ConvNet((1, 8, 8), 10, width=8)
    stack = draw_parameters(template, [3, 4])
    x = torch.randn(5, 1, 8, 8)
    together = vmap(lambda p: functional_call(template, p, (x,)))(stack)
    for row, seed in enumerate((3, 4)):
        net = random_convnet(seed, (1, 8, 8), 10, width=8)
        torch.testing.assert_close(together[row], net(x))


def test_per_record_gradients_by_vmap() -> None:
    net = random_convnet(0, (1, 8, 8), 3, width=8).double()
    parameters = dict(net.named_parameters())
    x, y = torch.randn(4, 1, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 0])

    def loss(p: dict[str, torch.Tensor], image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(net, p, (image,)), label)

    each = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    F.cross_entropy(net(x), y, reduction="sum").backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(each[name].sum(0), parameter.grad)


def test_a_convolutionconvolve_by_record_is_the_convolution_and_so_are_gradients_of_records() -> (
    None
):
    torch.manual_seed(0)
    images, weight = torch.randn(5, 8, 6, 6), torch.randn(4, 8, 3, 3)

    def as_usual(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, padding=1)

    def rows(convolve: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        def loss(weight: Tensor, x: Tensor) -> Tensor:
            return convolve(x[None], weight).square().sum()

        return vmap(grad(loss), (None, 0))(weight, images)

    torch.testing.assert_close(
        convolve_by_record(images, weight), as_usual(images, weight), atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(rows(convolve_by_record), rows(as_usual), atol=1e-3, rtol=1e-4)


def test_one_image_needs_no_batch_dimension() -> None:
    net = random_convnet(0, (1, 8, 8), 10)
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(net.embed(x[1]), net.embed(x)[1])


@pytest.mark.parametrize("size", [(8, 8), (7, 9)])
def test_halve_is_average_pooling(size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *size)
    torch.testing.assert_close(halve(x), F.avg_pool2d(x, 2))


ALONG = [((1, 28, 28), 3), ((3, 8, 12), 2), ((1, 8, 8), 4), ((2, 9, 11), 2)]
"""Shapes and depths: padded, of colours, with blocks that do not pool, and odd."""


@pytest.mark.parametrize(("shape", "depth"), ALONG)
@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_triton)])
def test_logits_change_along_a_direction_as_forward_differentiation_says(
    shape: tuple[int, int, int], depth: int, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the distance of gradients changes with the pictures as differentiating twice says."""
    if kernels:
        monkeypatch.setattr(fused, "available", lambda x: x.shape[-2] % 2 == x.shape[-1] % 2 == 0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    net = ConvNet(shape, 3, width=8, depth=depth).to("meta")
    theta = draw_parameters(net, 3, device=DEVICE)
    torch.manual_seed(4)
    images = torch.randn(4, *shape, device=DEVICE, requires_grad=True)
    labels, names = torch.arange(4, device=DEVICE) % 3, matched(theta)
    ours = batch_gradient(net, theta, images, labels, names, create_graph=True)
    real = {name: torch.randn_like(slope) for name, slope in ours.items()}
    (expected,) = torch.autograd.grad(row_distance(ours, real), images, retain_graph=True)

    direction = slopes_of_distance(ours, real)
    logits, tangents = net.along(theta, direction, images)
    (slope,) = torch.autograd.grad(loss_along(logits, tangents, labels), images)
    still = {name: torch.zeros_like(value) for name, value in theta.items()}
    theirs = jvp(lambda p: functional_call(net, p, (images,)), (theta,), ({**still, **direction},))
    torch.testing.assert_close(logits, theirs[0], rtol=1e-4, atol=1e-5)
    assert (tangents - theirs[1]).norm() < 1e-4 * theirs[1].norm()
    assert (slope - expected).norm() < 1e-3 * expected.norm()
