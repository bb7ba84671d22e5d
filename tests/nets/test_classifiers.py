from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from understudy.errors import UnknownName
from understudy.nets import NETWORKS, build


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 16, 12), (1, 28, 28), (3, 32, 32), (3, 64, 64)])
def test_every_network_takes_a_step_on_every_size(name: str, shape: tuple[int, ...]) -> None:
    before = torch.get_rng_state()
    net = build(name, shape, 4, seed=1)
    x = torch.linspace(-1, 1, 2 * torch.Size(shape).numel()).sin().view(2, *shape)
    logits = net(x)
    assert logits.shape == (2, 4)
    F.cross_entropy(logits, torch.tensor([0, 3])).backward()
    for parameter in net.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", NETWORKS)
def test_128_pixels_fit(name: str) -> None:
    with torch.no_grad():
        assert build(name, (3, 128, 128), 2, seed=0)(torch.zeros(1, 3, 128, 128)).shape == (1, 2)


@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [
        ("lenet", (1, 28, 28), 61_706),
        ("lenet", (3, 32, 32), 62_006),
        ("mlp", (1, 28, 28), 118_282),
        ("vgg11", (3, 32, 32), 9_231_114),
        ("resnet18", (3, 32, 32), 11_173_962),
        ("convnet", (3, 32, 32), 320_010),
    ],
)
def test_sizes_are_the_well_known_ones(name: str, shape: tuple[int, ...], count: int) -> None:
    assert sum(p.numel() for p in build(name, shape, 10, seed=0).parameters()) == count


@pytest.mark.parametrize("name", NETWORKS)
def test_same_seed_same_network(name: str) -> None:
    one, same, other = (build(name, (1, 8, 8), 3, seed=s) for s in (5, 5, 6))
    x = torch.linspace(-1, 1, 128).view(2, 1, 8, 8)
    assert torch.equal(one(x), same(x))  # in training mode, so dropout agrees as well
    assert not torch.equal(one(x), other(x))


@pytest.mark.parametrize("name", NETWORKS)
def test_no_network_mixes_records(name: str) -> None:
    net = build(name, (1, 8, 8), 3, seed=0).eval()
    x = torch.linspace(-1, 1, 192).sin().view(3, 1, 8, 8)
    torch.testing.assert_close(net(x)[:1], net(x[:1]), atol=1e-5, rtol=1e-5)


def test_dropout_drops_in_training_only() -> None:
    net = build("datalens", (1, 8, 8), 3, seed=0)
    x = torch.ones(2, 1, 8, 8)
    assert not torch.equal(net(x), net(x))
    net.eval()
    assert torch.equal(net(x), net(x))


def test_tables_go_through_the_mlp() -> None:
    assert build("mlp", (14,), 2, seed=0)(torch.zeros(5, 14)).shape == (5, 2)


def test_refusals_help() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'resnet18'"):
        build("resnet", (3, 32, 32), 10, seed=0)
    for name in set(NETWORKS) - {"mlp"}:
        with pytest.raises(ValueError, match="'mlp'"):
            build(name, (14,), 2, seed=0)
        with pytest.raises(ValueError, match="8x8"):
            build(name, (1, 4, 4), 2, seed=0)
    with pytest.raises(ValueError, match="two classes"):
        build("mlp", (14,), 1, seed=0)
