"""Why DPAF's own bound does not hold, in the worst case, and why the sound one does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from tests.fixtures import gate_for
from tests.methods.test_dpaf import per_sample_gradients, players, small
from tests.methods.test_ndpdc import two_pictures
from understudy.methods import DPAF
from understudy.methods.dpaf_game import Game, clipped_sum, pull_of_one
from understudy.nets.dpaf import Discriminator, Weights
from understudy.nets.draw import public_seed
from understudy.privacy import Ledger

Rows = Callable[[Tensor, Tensor], Tensor]


def test_a_removed_record_moves_the_published_sum_by_more_than_the_clip_norm() -> None:
    """Adding or removing one row of norm C may move a sum by C; here it moves the others, too."""
    net, weights, images, labels = players()
    images, labels = images.repeat(8, 1, 1, 1), labels.repeat(8)
    images = images + 0.3 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    whole = per_sample_gradients(net, weights, images, labels)
    without = per_sample_gradients(net, weights, images[1:], labels[1:])
    assert not torch.allclose(whole[1:], without, rtol=1e-3), "others' gradients stay"
    clip = 0.1 * float(whole.norm(dim=1).min())
    moved = float((clipped_sum(whole, clip) - clipped_sum(without, clip)).norm()) / clip
    assert moved > 1.2


def classifier(batch: int) -> tuple[Discriminator, Weights, Tensor, Tensor]:
    """C, and records alike, for whose class shares it predicts what lies just between two sets.

    The two sets are the batch and the batch without its first record.
    """
    net = Discriminator(shape=(1, 8, 8), classes=2, width=4, maps=5, head=6)
    weights, stream = net.draw(3, outputs=2), torch.Generator().manual_seed(0)
    images = torch.rand(1, 1, 8, 8, generator=stream) * 2 - 1
    images = images + 1e-3 * torch.randn(batch, 1, 8, 8, generator=stream)
    labels = torch.arange(batch) % 2
    between = (shares(labels) + shares(labels[1:])) / 2
    weights["fc.bias"] = torch.zeros(2)
    aggregate = net.features(weights, images).mean(dim=0, keepdim=True)
    weights["fc.bias"] = between.log() - net.shares(weights, aggregate)[0].log()
    return net, weights, images, labels


def shares(labels: Tensor) -> Tensor:
    return torch.bincount(labels, minlength=2) / len(labels)


@pytest.mark.parametrize("batch", [4, 16, 64])
def test_in_the_classifier_phase_no_bound_holds_but_that_of_the_whole_batch(batch: int) -> None:
    """Section 3.1: the loss compares shares of the batch, so one record turns everybody's gradient.

    Restated with plain autograd for v and one row a sample: its path from conv1 to the loss.
    """
    net, weights, images, labels = classifier(batch)
    names = net.names("conv1")

    def direction(images: Tensor, labels: Tensor) -> Tensor:
        aggregate = net.features(weights, images).mean(dim=0, keepdim=True).detach()
        predicted = net.shares(weights, aggregate.requires_grad_())[0]
        loss = (predicted - shares(labels)).square().mean()
        return torch.autograd.grad(loss, aggregate)[0].expand(2, -1, -1, -1)

    def coupled(images: Tensor, labels: Tensor) -> Tensor:
        v = direction(images, labels) / len(images)
        return vmap(pull_of_one(net, weights, names, v))(images, labels)

    def sound(images: Tensor, labels: Tensor) -> Tensor:
        return vmap(pull_of_one(net, weights, names, released))(images, labels)

    def moved(rows: Rows) -> float:
        whole, without = rows(images, labels), rows(images[1:], labels[1:])
        clip = 0.1 * float(torch.cat([whole, without]).norm(dim=1).min())
        return float((clipped_sum(whole, clip) - clipped_sum(without, clip)).norm()) / clip

    released = direction(images, labels)  # the same v for both sets, as after a release
    assert moved(coupled) == pytest.approx(2 * batch - 1, rel=0.01)
    assert moved(sound) == pytest.approx(1, rel=1e-3)


def test_the_generator_learns_from_aggregates_with_noise_like_the_real_ones(
    tmp_path: Path,
) -> None:
    """A departure: the paper shows D single made pictures here, without AGG."""
    method, data = small(batches=1, asymmetry=1, public_steps=1, critic_steps=1), two_pictures()
    losses: list[Tensor] = []
    with gate_for(data, method.plan(data.public), ledger=Ledger(tmp_path / "l")) as gate:
        game = Game(method, gate)
        for learner in (game.head, game.generator, game.conv):
            learner.descend = losses.append  # type: ignore[assignment, method-assign]
            learner.step = lambda slopes: None  # type: ignore[assignment, method-assign]
        game.play()
        made = game._pictures(stream := stream_of_the_first_batch(method))  # the head's
        game._fake(made, stream)
        made = game._pictures(stream)
        features = game.discriminator.features(game.weights, made).view(2, 4, -1)
    noise = torch.randn(2, *game.discriminator.aggregate, generator=stream)
    aggregates = features.mean(dim=1).view_as(noise) + game.stddev * noise
    logits = game.discriminator.judge(game.head.weights, aggregates, torch.arange(2))
    assert len(losses) == 2
    assert float(game.stddev) > 0
    expected = -torch.nn.functional.logsigmoid(logits).mean()
    torch.testing.assert_close(losses[1], expected)


def stream_of_the_first_batch(method: DPAF) -> torch.Generator:
    seed = public_seed(method.seed, "batch", 0)
    return torch.Generator().manual_seed(seed)
