from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from understudy.errors import BadConfiguration
from understudy.nets.dpaf import Discriminator, Generator, halved


def net(side: int = 8, channels: int = 1, **changes: Any) -> Discriminator:
    fields = {"classes": 3, "width": 4, "maps": 6, "head": 5, **changes}
    return Discriminator(shape=(channels, side, side), **fields)


def pictures(count: int, side: int = 8, channels: int = 1) -> torch.Tensor:
    stream = torch.Generator().manual_seed(9)
    return torch.rand(count, channels, side, side, generator=stream) * 2 - 1


@pytest.mark.parametrize(
    ("side", "sides", "depths"),
    [
        (8, (8, 4, 4, 4), (1, 1, 1)),
        (28, (28, 14, 7, 4), (1, 1, 1)),
        (32, (32, 16, 8, 4), (1, 1, 1)),
        (64, (64, 32, 16, 8, 4), (1, 2, 1)),
        (128, (128, 64, 32, 16, 8, 4), (1, 3, 1)),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_depth_follows_the_size_of_the_picture(
    side: int, sides: tuple[int, ...], depths: tuple[int, int, int], channels: int
) -> None:
    critic = net(side, channels)
    assert critic.depths == depths
    assert tuple(height for height, _ in critic.sides) == sides
    before = sides[depths[0] + depths[1]]
    assert critic.aggregate == (6, before, before)
    assert critic.bound == pytest.approx(math.sqrt(6) * before)
    weights = critic.draw(1)
    features = critic.features(weights, pictures(2, side, channels))
    assert features.shape == (2, *critic.aggregate)
    assert critic.judge(weights, features, torch.tensor([0, 2])).shape == (2,)
    maker = Generator(shape=(channels, side, side), classes=3, width=2, latent=4)
    made = maker.make(maker.draw(1), torch.randn(2, 4), torch.tensor([0, 2]))
    assert made.shape == (2, channels, side, side)
    assert made.abs().max() <= 1


def test_the_position_of_the_aggregate_can_be_moved() -> None:
    early, late = net(64, layers=(1, 1, 2)), net(64, layers=(1, 3, 1))
    assert early.aggregate == (6, 16, 16)
    assert late.aggregate == (6, 4, 4)
    for critic in (early, late):
        weights = critic.draw(0)
        features = critic.features(weights, pictures(1, 64))
        assert critic.judge(weights, features, torch.tensor([1])).shape == (1,)


def test_features_are_plain_layers_and_then_a_standardised_map() -> None:
    critic = net(28, 3)
    weights, images = critic.draw(4), pictures(3, 28, 3)
    x = F.conv2d(images, weights["conv1.0.weight"], weights["conv1.0.bias"], stride=2, padding=2)
    x = F.conv2d(torch.where(x > 0, x, 0.2 * x), weights["conv2.0.weight"], stride=2, padding=2)
    x = torch.where(x > 0, x, 0.2 * x)
    mean, deviation = x.mean((2, 3), keepdim=True), x.var((2, 3), correction=0, keepdim=True)
    expected = (x - mean) / torch.sqrt(deviation + 1e-8)
    torch.testing.assert_close(critic.features(weights, images), expected, rtol=1e-4, atol=1e-4)
    alone = torch.cat([critic.features(weights, image[None]) for image in images])
    torch.testing.assert_close(critic.features(weights, images), alone, rtol=1e-4, atol=1e-4)


def test_the_judgement_is_that_of_the_class() -> None:
    critic = net()
    weights = critic.draw(2)
    aggregates = torch.randn(3, *critic.aggregate)
    labels = torch.arange(3)
    x = F.conv2d(aggregates, weights["conv3.0.weight"], weights["conv3.0.bias"], padding=2)
    x = F.leaky_relu(x, 0.2).flatten(1)
    expected = [
        float(x[c] @ (weights["fc.weight"][0] + weights["fc.class"][c]) + weights["fc.bias"][0])
        for c in range(3)
    ]
    assert critic.judge(weights, aggregates, labels).tolist() == pytest.approx(expected, abs=1e-4)
    classifier = critic.draw(2, outputs=3)
    assert "fc.class" not in classifier
    shares = critic.shares(classifier, aggregates)
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(3))


def test_a_fainter_picture_has_other_features_because_conv1_has_a_bias() -> None:
    critic, images = net(28), pictures(2, 28)
    weights = critic.draw(5)
    without = {**weights, "conv1.0.bias": torch.zeros(4)}
    same = critic.features(without, images / 2) - critic.features(without, images)
    other = critic.features(weights, images / 2) - critic.features(weights, images)
    assert same.abs().max() < 0.01
    assert other.abs().max() > 0.1


def test_weights_are_those_of_the_seed() -> None:
    critic, maker = net(), Generator(shape=(1, 8, 8), classes=3, width=2, latent=4)
    for draw in (critic.draw, maker.draw):
        first, again, other = draw(7), draw(7), draw(8)
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert not all(torch.equal(first[name], other[name]) for name in first)
    large = dataclasses.replace(critic, width=256)
    assert float(large.draw(1)["conv1.0.weight"].std()) == pytest.approx(0.02, rel=0.05)
    assert critic.names("conv1", "fc") == (
        *("conv1.0.weight", "conv1.0.bias"),
        *("fc.weight", "fc.bias", "fc.class"),
    )


def test_a_picture_depends_on_its_own_latent_and_label() -> None:
    maker = Generator(shape=(3, 28, 28), classes=3, width=2, latent=4)
    weights, latents = maker.draw(1), torch.randn(5, 4)
    labels = torch.tensor([0, 1, 2, 0, 1])
    made = maker.make(weights, latents, labels)
    alone = maker.make(weights, latents[3:4], labels[3:4])
    torch.testing.assert_close(made[3:4], alone, rtol=1e-4, atol=1e-5)
    told_another = maker.make(weights, latents, (labels + 1) % 3)
    assert not torch.allclose(made, told_another)


@pytest.mark.parametrize(
    "shape", [(1, 8, 8), (1, 28, 28), (3, 64, 64), (1, 6, 11), (1, 4, 16), (1, 4, 4)]
)
def test_the_generator_goes_back_the_way_the_discriminator_comes(shape: tuple[int, ...]) -> None:
    critic = Discriminator(shape=shape, classes=2)
    maker = Generator(shape=shape, classes=2, width=2, latent=3)
    way = [sides for sides, _ in itertools.groupby(critic.sides)]
    assert maker.sides[-1] == tuple(shape[1:])
    assert set(maker.sides) >= set(way) or len(maker.sides) <= len(way)
    made = maker.make(maker.draw(0), torch.randn(2, 3), torch.tensor([0, 1]))
    assert made.shape == (2, *shape)
    assert critic.features(critic.draw(0), made).shape[1:] == critic.aggregate


def test_a_map_is_halved_until_four_pixels_are_left() -> None:
    assert [halved(side) for side in (4, 5, 7, 8, 28, 64)] == [4, 3, 4, 4, 14, 32]


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (14,)},
        {"shape": (1, 3, 8)},
        {"width": 0},
        {"layers": (1, 0, 1)},
        {"layers": (1, 1)},
    ],
)
def test_senseless_networks_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadConfiguration):
        dataclasses.replace(net(), **changes)
    with pytest.raises(BadConfiguration):
        Generator(shape=(1, 8, 8), classes=2, latent=0)
