from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional as F

from understudy.nets.draw import draw_parameters, materialise
from understudy.nets.small import SMALL, EdgeLinear, TanhCNN, _slopes
from understudy.ops.gradients import gradient_of_one

SHAPES = [(1, 8, 8), (3, 16, 12), (1, 28, 28), (3, 32, 32), (3, 64, 64)]


def built(name: str, shape: tuple[int, ...], classes: int = 4) -> nn.Module:
    with torch.device("meta"):
        net = SMALL[name](shape, classes)
    return materialise(net, 1, "cpu")


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_one_record_at_a_time_on_every_size(name: str, shape: tuple[int, ...]) -> None:
    net = built(name, shape)
    own = dict(net.named_parameters())
    x = torch.linspace(-1, 1, 2 * math.prod(shape)).sin().view(2, *shape)
    labels = torch.tensor([0, 3])
    rows = vmap(gradient_of_one(net, own, tuple(own)))(x, labels)
    for row, image, label in zip(rows, x, labels, strict=True):
        net.zero_grad()
        F.cross_entropy(net(image[None]), label[None]).backward()
        expected = torch.cat([p.grad.flatten() for p in own.values() if p.grad is not None])
        torch.testing.assert_close(row, expected, rtol=1e-3, atol=1e-5)
        assert row.abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [("tanh", (1, 28, 28), 26_010), ("edges", (1, 28, 28), 3_930), ("linear", (14,), 150)],
)
def test_how_many_weights_there_are(name: str, shape: tuple[int, ...], count: int) -> None:
    assert sum(p.numel() for p in built(name, shape, 10).parameters()) == count


def test_tanh_is_the_published_network_at_28() -> None:
    layers = [part for part in TanhCNN((1, 28, 28), 10).modules() if isinstance(part, nn.Conv2d)]
    assert [(c.out_channels, c.kernel_size, c.stride, c.padding) for c in layers] == [
        (16, (8, 8), (2, 2), (2, 2)),
        (32, (4, 4), (2, 2), (0, 0)),
    ]


@pytest.mark.parametrize("name", ["tanh", "edges"])
def test_pictures_only(name: str) -> None:
    for shape in ((14,), (1, 4, 4)):
        with pytest.raises(ValueError, match="'mlp'"):
            SMALL[name](shape, 2)


def test_slopes_answer_a_ramp_by_its_direction() -> None:
    """A plane rising 1 a pixel in some direction: the filters give the cosines to it."""
    filters = _slopes(8, 1.0).double()
    side = torch.arange(7, dtype=torch.float64)
    for turn in (0.3, 2.0, 4.4):
        plane = math.cos(turn) * side[None] + math.sin(turn) * side[:, None]
        answers = F.conv2d(plane[None, None], filters).flatten()
        angles = torch.arange(8, dtype=torch.float64) * 2 * math.pi / 8
        torch.testing.assert_close(answers, torch.cos(angles - turn), atol=1e-6, rtol=0.0)


def test_features_are_histograms_of_the_directions_in_each_cell() -> None:
    """Against plain loops in numpy, on a picture whose borders repeat."""
    net = EdgeLinear((1, 8, 8), 3)
    picture = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    padded = np.pad(picture[0, 0].numpy(), 3, mode="edge")
    filters = net.filters[:, 0].numpy()
    histogram = np.zeros((8, 4, 4))
    for direction in range(8):
        for y in range(8):
            for x in range(8):
                slope = float((padded[y : y + 7, x : x + 7] * filters[direction]).sum())
                histogram[direction, y // 2, x // 2] += max(0.0, slope) ** 2 / 4
    flat = histogram.flatten()
    expected = (flat - flat.mean()) / np.sqrt(flat.var() + 1e-8)
    np.testing.assert_allclose(net.embed(picture)[0].numpy(), expected, rtol=1e-3, atol=1e-4)


def test_features_ignore_brightness_and_have_unit_variance() -> None:
    net = EdgeLinear((3, 28, 28), 3)
    pictures = torch.rand(4, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    features = net.embed(pictures)
    torch.testing.assert_close(net.embed(pictures - 0.3), features, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(features.mean(1), torch.zeros(4), atol=1e-5, rtol=0.0)
    assert float(features.var(1, correction=0).min()) > 0.9
    blank = net.embed(torch.zeros(1, 3, 28, 28))
    assert not blank.any()


def test_only_the_last_layer_of_edges_is_drawn() -> None:
    assert set(draw_parameters(EdgeLinear((1, 28, 28), 10), 0)) == {
        "classifier.weight",
        "classifier.bias",
    }
