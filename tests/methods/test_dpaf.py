from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from tests.fixtures import gate_for, private
from tests.methods.test_ndpdc import CPU, MNIST, table, two_pictures
from understudy.errors import BadConfiguration, BudgetExceeded
from understudy.methods.dpaf import DPAF
from understudy.methods.dpaf_game import (
    Game,
    clipped_sum,
    features_of_one,
    largest,
    pull_of_one,
)
from understudy.nets.dpaf import Discriminator, Weights
from understudy.privacy import Accountant, Budget, Ledger, PrivateDataset, Query, Secret
from understudy.privacy.accounting import epsilon
from understudy.privacy.events import Event
from understudy.privacy.gate import Gate
from understudy.privacy.release import Release
from understudy.run import fit, synthesise


def small(**changes: Any) -> DPAF:
    return DPAF.configured({**DPAF.miniature, **changes})


def released(method: DPAF, ledger: Path, data: PrivateDataset | None = None) -> Release:
    secret = Secret.for_testing(1)
    return fit(data or two_pictures(), method, ledger=Ledger(ledger), engine=CPU, secret=secret)


EVERY_WAY = pytest.mark.parametrize(
    "how",
    [
        *({"conv1": conv1} for conv1 in ("transfer", "random", "updated", "joint")),
        {"conv1": "random", "anchor": 20.0},
    ],
    ids=["transfer", "random", "updated", "joint", "anchored"],
)


# What is asked, and what it costs


@pytest.mark.parametrize(
    ("conv1", "expected"),
    [
        ("random", {"features": 50, "conv2 gradients": 6}),
        ("joint", {"features": 50, "conv1 and conv2 gradients": 6}),
        ("updated", {"features": 50, "conv2 gradients": 6, "conv1 gradients": 6}),
        (
            "transfer",
            {
                **{"features": 50, "conv2 gradients": 6},
                **{"classifier features": 7, "classifier gradients": 7},
            },
        ),
    ],
)
def test_the_plan_is_the_count(conv1: str, expected: dict[str, int]) -> None:
    method = DPAF(batches=50, asymmetry=8, classifier_batches=7, conv1=conv1)  # type: ignore[arg-type]
    plan = method.plan(MNIST)
    assert {step.query.name: step.times for step in plan} == expected
    for step in plan:
        features = "features" in step.query.name
        assert step.query.per_class == features
        assert step.query.bound == (math.sqrt(16) * 7 if features else 1.0)


def test_gradients_come_from_a_batch_mu_times_the_size() -> None:
    features, gradients = (step.query for step in DPAF(group_size=24.0).plan(MNIST))
    assert features.rates(MNIST) == tuple(24 / count for count in MNIST.sizes)
    assert gradients.rates(MNIST) == (8 * 24 * 10 / 60_000,) * 10
    everybody = DPAF(group_size=1000.0).plan(MNIST)[1].query
    assert everybody.rates(MNIST) == (1.0,) * 10


@EVERY_WAY
def test_the_noise_multiplier_is_that_of_one_query_as_telling_as_all(how: dict[str, Any]) -> None:
    """Where every record is asked the division is exact: mu^2 = sum of times / sigma^2."""
    few = dataclasses.replace(MNIST, counts=(500,) * 10)
    method = DPAF(**how, group_size=500.0, noise_multiplier=2.0)
    steps = method.plan(few)
    assert sum(s.times / s.query.noise_multiplier**2 for s in steps) == pytest.approx(1 / 4)
    one = Event(
        name="one",
        times=1,
        noise_multiplier=2.0,
        bound=1.0,
        sampling_rate=None,
        per_class=False,
        unit="record",
    )
    for accountant in (Accountant.RDP, Accountant.PLD):
        alone = epsilon((one,), 1e-5, accountant=accountant)
        assert method.epsilon(few, 1e-5, accountant) == pytest.approx(alone, rel=0.01)


@pytest.mark.parametrize("split", [(30.0, 40.0, 30.0), (0.1, 9.8, 0.1), (20.0, 20.0, 60.0)])
def test_the_split_is_that_of_the_epsilons_they_would_cost_alone(
    split: tuple[float, float, float],
) -> None:
    """A Gaussian's mu is what epsilon grows with: divided as (x1, x2, x3), whatever the rates."""
    method = DPAF(conv1="transfer", budget_split=split, noise_multiplier=1.0)
    weights = {"classifier": 0.0, "conv2": 0.0, "features": 0.0}
    for step in method.plan(MNIST):
        query, rate = step.query, max(step.query.rates(MNIST))
        told = step.times * rate**2 * math.expm1(query.noise_multiplier**-2)
        weights[query.name.split()[0]] += told
    assert sum(weights.values()) == pytest.approx(1.0)
    mus = [math.sqrt(weight) for weight in weights.values()]
    whole = math.hypot(*split)
    assert mus == pytest.approx([part / whole for part in split])


def test_an_anchor_is_one_more_mechanism_among_them() -> None:
    method = DPAF(anchor=20.0, budget_split=(20.0, 40.0, 40.0), noise_multiplier=1.0)
    (anchor,) = (step for step in method.plan(MNIST) if step.query.name.startswith("mean"))
    assert (anchor.times, anchor.query.bound, anchor.query.expected_batch) == (1, 1.0, None)
    assert 1 / anchor.query.noise_multiplier == pytest.approx(20 / math.hypot(20, 40, 40))


def test_large_pictures_get_an_anchor_where_it_is_more_than_noise() -> None:
    faces = dataclasses.replace(MNIST, shape=(3, 64, 64), classes=("f", "m"), counts=(6492, 3508))
    asked = {e: DPAF.suited(faces, Budget(e), CPU) for e in (1.0, 10.0)}
    assert asked == {1.0: "large", 10.0: "anchored"}
    assert DPAF.suited(faces, None, CPU) == "anchored"
    assert DPAF.suited(MNIST, Budget(10.0), CPU) is None
    assert DPAF.suited(dataclasses.replace(faces, counts=(6492, 390)), None, CPU) is None


def test_one_accountant_composes_what_the_paper_adds() -> None:
    method = DPAF(conv1="transfer", budget_split=(30.0, 40.0, 30.0), noise_multiplier=0.5)
    events = method.plan(MNIST).events(MNIST)
    together = epsilon(events, 1e-5, accountant=Accountant.RDP)
    groups = [events[2:], events[1:2], events[:1]]
    alone = [epsilon(group, 1e-5, accountant=Accountant.RDP) for group in groups]
    assert max(alone) < together < 0.75 * sum(alone)


def test_senseless_fields_are_refused() -> None:
    for changes in (
        {"batches": 1, "asymmetry": 2},
        {"conv1": "none"},
        {"budget_split": (1.0, 0.0, 1.0)},
        {"budget_split": (1.0, 1.0)},
        {"keep": 0.0},
        {"clip_norm": math.nan},
        {"critic_steps": 0},
        {"momentum": 1.0},
        {"layers": (1, 1)},
    ):
        with pytest.raises(BadConfiguration):
            small(**changes).plan(two_pictures().public)
    with pytest.raises(BadConfiguration, match="pictures"):
        small().plan(table().public)
    with pytest.raises(BadConfiguration, match="60"):
        small(group_size=61.0).plan(two_pictures().public)


# One record's contribution


def players(seed: int = 3) -> tuple[Discriminator, Weights, Tensor, Tensor]:
    """A discriminator, weights, and a few records of three classes."""
    net = Discriminator(shape=(1, 8, 8), classes=3, width=4, maps=5, head=6)
    stream = torch.Generator().manual_seed(seed)
    images = torch.rand(9, 1, 8, 8, generator=stream) * 2 - 1
    return net, net.draw(seed), images, torch.arange(9) % 3


def plain_features(weights: Weights, images: Tensor) -> Tensor:
    """SIN(conv2(conv1(x))), written out for 8x8 pictures."""
    x = F.conv2d(images, weights["conv1.0.weight"], weights["conv1.0.bias"], stride=2, padding=2)
    x = F.leaky_relu(F.conv2d(F.leaky_relu(x, 0.2), weights["conv2.0.weight"], padding=2), 0.2)
    x = x - x.mean((2, 3), keepdim=True)
    return x / torch.sqrt(x.square().mean((2, 3), keepdim=True) + 1e-8)


def plain_loss(net: Discriminator, weights: Weights, aggregates: Tensor) -> Tensor:
    """BCE of D where all are real."""
    logits = net.judge(weights, aggregates, torch.arange(3))
    return F.binary_cross_entropy_with_logits(logits, torch.ones(3))


@pytest.mark.parametrize("parts", [("conv2",), ("conv1", "conv2")])
def test_a_pull_is_the_slope_of_the_loss_through_one_record(parts: tuple[str, ...]) -> None:
    """Against autograd of the whole plain loss, with the other records' features held fixed."""
    net, weights, images, labels = players()
    names, noise = net.names(*parts), 0.3 * torch.randn(3, *net.aggregate)
    moving = {name: weights[name].clone().requires_grad_() for name in names}
    features = plain_features({**weights, **moving}, images)

    def loss(features: Tensor) -> Tensor:
        sums = torch.zeros(3, *net.aggregate).index_add(0, labels, features)
        return plain_loss(net, weights, (sums + noise) / 2.0)

    released = (torch.zeros(3, *net.aggregate).index_add(0, labels, features) + noise).detach()
    aggregate = (released / 2.0).requires_grad_()
    (v,) = torch.autograd.grad(plain_loss(net, weights, aggregate), aggregate)
    pull = pull_of_one(net, weights, names, v / 2.0)
    for record, (image, label) in enumerate(zip(images, labels, strict=True)):
        others = features.detach().clone()
        mask = (torch.arange(len(images)) == record).float()[:, None, None, None]
        own = torch.autograd.grad(
            loss(features * mask + others * (1 - mask)), list(moving.values()), retain_graph=True
        )
        expected = torch.cat([slope.flatten() for slope in own])
        torch.testing.assert_close(pull(image, label), expected, rtol=1e-3, atol=1e-5)
    everybody = torch.autograd.grad(loss(features), list(moving.values()))
    rows = vmap(pull)(images, labels)
    whole = torch.cat([slope.flatten() for slope in everybody])
    torch.testing.assert_close(rows.sum(0), whole, rtol=1e-3, atol=1e-5)


def test_contributions_see_their_own_record_only() -> None:
    net, weights, images, labels = players()
    directions = torch.randn(3, *net.aggregate)
    for contribution in (
        features_of_one(net, weights),
        pull_of_one(net, weights, net.names("conv2"), directions, keep=0.9),
    ):
        together = vmap(contribution)(images, labels)
        changed = images.clone()
        changed[1:] = 1e30
        beside = vmap(contribution)(changed, labels)
        torch.testing.assert_close(together[0], beside[0], rtol=1e-4, atol=1e-5)
        norms = vmap(features_of_one(net, weights))(changed, labels).flatten(1).norm(dim=1)
        assert norms[torch.isfinite(norms)].max() <= net.bound * (1 + 1e-5)


def test_a_pull_takes_the_direction_of_its_own_class() -> None:
    net, weights, images, _ = players()
    directions = torch.randn(3, *net.aggregate)
    pull = pull_of_one(net, weights, net.names("conv2"), directions)
    own = pull(images[0], torch.tensor(1))
    directions[0] = directions[2] = 0
    torch.testing.assert_close(pull(images[0], torch.tensor(1)), own)
    assert not pull(images[0], torch.tensor(0)).any()


def test_compression_keeps_the_largest_entries_of_its_own_row() -> None:
    row = torch.tensor([0.5, -3.0, 0.1, 2.0, -0.2, 1.0, 0.0, 4.0, -0.05, 0.3])
    kept = torch.tensor([0.5, -3.0, 0.0, 2.0, 0.0, 1.0, 0.0, 4.0, 0.0, 0.0])
    assert torch.equal(largest(row, 0.5), kept)
    assert torch.equal(largest(row, 1.0), row)
    assert int((largest(row, 0.9) != 0).sum()) == 9
    assert torch.equal(vmap(lambda r: largest(r, 0.5))(torch.stack([row, -row]))[1], -kept)
    assert not largest(torch.zeros(10), 0.9).any()


# Soundness


@EVERY_WAY
def test_the_release_is_a_function_of_the_answers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    """Put the same answers in place of the gate's, on different records: nothing else gets out."""
    stream = torch.Generator()

    def made_up(self: Gate, query: Query, contribution: Any, state: Any) -> Tensor:
        self._take(query)
        _, shape, _ = self._clipped_sum(query, contribution, np.arange(0), state)
        return torch.randn(shape, generator=stream) * query.bound

    monkeypatch.setattr(Gate, "_ask", made_up)
    random = np.random.default_rng(0)
    images = random.uniform(-1, 1, (120, 1, 8, 8)).astype(np.float32)
    signals = []
    for data in (two_pictures(), private(images, np.arange(120) % 2, name="two pictures")):
        stream.manual_seed(5)
        ledger = tmp_path / f"{len(signals)}"
        method = small(**how, noise_multiplier=0.0)
        signals.append(released(method, ledger, data).signals)
    for name, value in signals[0].items():
        assert torch.equal(value, signals[1][name]), name


@EVERY_WAY
def test_every_sum_keeps_to_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    """Hostile records in the set: every exact sum is as long as its batch at most."""
    seen: dict[str, list[tuple[float, int]]] = {}
    real = Gate._clipped_sum

    def record(self: Gate, query: Any, contribution: Any, chosen: Any, state: Any) -> Any:
        answer = real(self, query, contribution, chosen, state)
        norm = float(answer[0].double().norm()) / query.bound
        seen.setdefault(query.name, []).append((norm, len(chosen)))
        return answer

    monkeypatch.setattr(Gate, "_clipped_sum", record)
    random = np.random.default_rng(0)
    images = random.uniform(-1, 1, (120, 1, 8, 8)).astype(np.float32)
    images[3], images[4], images[5, 0, 0, 0], images[6] = 1e30, np.nan, np.inf, 0.0
    data = private(images, np.arange(120) % 2)
    method = small(**how, group_size=60.0, noise_multiplier=0.0)
    signals = released(method, tmp_path / "l", data).signals
    assert all(torch.isfinite(value).all() for value in signals.values())
    assert set(seen) == {step.query.name for step in method.plan(data.public)}
    for name, sums in seen.items():
        assert all(norm <= count for norm, count in sums), name
        assert max(norm for norm, _ in sums) > 1, name


def test_a_run_killed_after_a_checkpoint_keeps_its_anchor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    monkeypatch.setattr("understudy.methods.dpaf_game.CHECKPOINT", 1)
    method, asked = small(anchor=20.0, noise_multiplier=0.0, group_size=60.0), []
    real = Gate._answer

    def answer(self: Gate, query: Query, total: Any) -> Any:
        if len(asked) == 5 and not again:
            raise Killed
        asked.append(query.name)
        return real(self, query, total)

    again: list[bool] = []
    monkeypatch.setattr(Gate, "_answer", answer)
    with pytest.raises(Killed):
        released(method, tmp_path / "a")
    again.append(True)
    resumed = fit(two_pictures(), method, ledger=Ledger(tmp_path / "a"), engine=CPU)
    assert sum(name.startswith("mean") for name in asked) == 1
    whole = fit(two_pictures(), method, ledger=Ledger(tmp_path / "b"), engine=CPU)
    for name, value in whole.signals.items():
        assert torch.equal(value, resumed.signals[name]), name


def test_an_anchor_keeps_made_pictures_near_the_records_mean(tmp_path: Path) -> None:
    """SIN takes brightness and contrast away, so little else tells the generator of them."""
    images = np.full((120, 1, 8, 8), -0.8, np.float32)
    images[::2, :, 2:6, 2:6] = 0.8
    images[1::2, :, 3:5, :] = -0.2
    data = private(images, np.arange(120) % 2, counts=(60, 60))
    gaps = []
    for anchor in (0.0, 20.0):
        method = small(
            batches=60,
            public_steps=9,
            noise_multiplier=0.0,
            group_size=60.0,
            generator_learning_rate=1e-2,
            anchor=anchor,
            anchor_weight=100.0,
        )
        release = released(method, tmp_path / str(anchor), data)
        made = method.sample(release, 40, engine=CPU)
        apart = [
            made.images[made.labels == c].mean(0) - torch.from_numpy(images[c]) for c in (0, 1)
        ]
        gaps.append(float(torch.cat(apart).square().mean()))
    assert gaps[1] < gaps[0] / 4


def test_conv1_moves_only_where_it_is_told_to(tmp_path: Path) -> None:
    data = two_pictures()
    for conv1, moves in (
        ("random", False),
        ("transfer", True),
        ("updated", True),
        ("joint", True),
    ):
        method = small(conv1=conv1, noise_multiplier=0.0)
        with gate_for(data, method.plan(data.public), ledger=Ledger(tmp_path / conv1)) as gate:
            game = Game(method, gate)
            before = {name: value.clone() for name, value in game.weights.items()}
            game.play()
            for name, value in game.weights.items():
                moved = not torch.equal(before[name], value)
                assert moved == (moves or name.startswith("conv2")), (conv1, name)


def test_a_step_of_conv2_is_the_clipped_pulls_of_both_sides(tmp_path: Path) -> None:
    """Without noise and with everybody in the batch: the first update, restated."""
    data = two_pictures(12)
    method = small(
        batches=1, asymmetry=1, group_size=12.0, noise_multiplier=0.0, keep=1.0, clip_norm=0.5
    )
    images = torch.from_numpy(data._records._images)
    labels = torch.from_numpy(data._records._labels)
    with gate_for(data, method.plan(data.public), ledger=Ledger(tmp_path / "l")) as gate:
        game = Game(method, gate)
        stepped: list[Weights] = []
        game.conv.step = stepped.append  # type: ignore[assignment, method-assign]
        stream, first = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
        game.records.aggregate("features", game.weights)
        pictures = game._pictures(first)
        game._update(stream)
    weights, told = game.weights, torch.arange(2).repeat_interleave(4)

    def aggregate(pictures: Tensor, labels: Tensor) -> Tensor:
        features = game.discriminator.features(weights, pictures)
        return torch.stack([features[labels == c].mean(0) for c in range(2)]).requires_grad_()

    real, fake = aggregate(images, labels), aggregate(pictures, told)
    logits = [game.discriminator.judge(game.head.weights, a, torch.arange(2)) for a in (real, fake)]
    loss = F.binary_cross_entropy_with_logits(logits[0], torch.ones(2))
    loss = loss + F.binary_cross_entropy_with_logits(logits[1], torch.zeros(2))
    directions = [2 * v for v in torch.autograd.grad(loss, [real, fake])]
    size = max(float(v[c].norm()) for v in directions for c in range(2))
    expected = torch.zeros(weights["conv2.0.weight"].numel())
    for v, (records, classes) in zip(directions, ((images, labels), (pictures, told)), strict=True):
        rows = []
        for image, label in zip(records, classes, strict=True):
            own = {**weights, "conv2.0.weight": weights["conv2.0.weight"].clone().requires_grad_()}
            along = (plain_features(own, image[None])[0] * v[label] / size).sum()
            (slope,) = torch.autograd.grad(along, own["conv2.0.weight"])
            rows.append(slope.flatten() * min(1.0, 0.5 / float(slope.norm())))
        expected += torch.stack(rows).mean(0)
    (slopes,) = stepped
    torch.testing.assert_close(slopes["conv2.0.weight"].flatten(), expected, rtol=1e-3, atol=1e-5)


def test_rare_classes_count_as_much_as_common_ones(tmp_path: Path) -> None:
    """A batch has few of them, so each one's v is longer: in expectation the classes are even."""
    images = np.zeros((40, 1, 8, 8), dtype=np.float32)
    data = private(images, np.arange(40) % 10 == 0)
    method = small(group_size=4.0, noise_multiplier=0.0)
    with gate_for(data, method.plan(data.public), ledger=Ledger(tmp_path / "l")) as gate:
        weight = Game(method, gate).weight.flatten()
    assert weight.tolist() == pytest.approx([40 / 36, 10.0])


# As published


@pytest.mark.parametrize("conv1", ["random", "transfer"])
def test_empty_batches_pull_at_nothing(tmp_path: Path, conv1: str) -> None:
    method = small(published=True, conv1=conv1, group_size=0.02, noise_multiplier=0.0)
    signals = released(method, tmp_path / "l").signals
    assert all(bool(value.isfinite().all()) for value in signals.values())


def test_the_published_algorithm_costs_infinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ledger, "_advice", lambda *rest: "")  # it tries noises for seconds
    published = small(published=True, conv1="transfer", group_size=60.0)
    data = two_pictures()
    assert math.isinf(published.epsilon(data.public))
    with pytest.raises(BadConfiguration, match="claiming"):
        published.calibrated(data.public, Budget(10.0))
    with pytest.raises(BudgetExceeded):
        with data.open(
            published.plan(data.public),
            by="dpaf",
            recipe=published.recipe(),
            ledger=Ledger(tmp_path / "capped"),
            budget=Budget(10.0),
        ):
            pytest.fail("the gate opened")
    release = released(published, tmp_path / "l")
    assert math.isinf(release.statement.epsilon)
    assert release.statement.paragraph().startswith("NOT PRIVATE")
    assert synthesise(release, engine=CPU).per_class == [2, 2]


def test_as_published_it_claims_with_the_noise_the_sound_one_pays_for() -> None:
    sound, public = small(conv1="transfer", group_size=60.0), two_pictures().public
    claiming = sound.claiming(public, Budget(10.0))
    assert claiming.published
    paid = sound.calibrated(public, Budget(10.0))
    assert claiming.noise(public) == paid.noise(public)
    assert {step.query.noise_multiplier for step in claiming.plan(public)} == {0.0}


def per_sample_gradients(
    net: Discriminator, weights: Weights, images: Tensor, labels: Tensor
) -> Tensor:
    """The printed DP-SGD of conv2: gradients of one loss of the batch, sample by sample.

    Restated with autograd alone: every sample has a copy of conv2 of its own, and the loss is that
    of the mean of all their features.
    """
    copies = weights["conv2.0.weight"].expand(len(images), -1, -1, -1, -1).clone().requires_grad_()
    features = torch.cat(
        [
            plain_features({**weights, "conv2.0.weight": copy}, image[None])
            for copy, image in zip(copies, images, strict=True)
        ]
    )
    sums = torch.zeros(3, *net.aggregate).index_add(0, labels, features)
    loss = plain_loss(net, weights, sums / 3.0)
    (slopes,) = torch.autograd.grad(loss, copies)
    return slopes.flatten(1)


def test_the_published_per_sample_bound_fails() -> None:
    """One record changes every clipped row, and the sum by several times the clip norm."""
    net, weights, images, labels = players()
    images, labels = images.repeat(8, 1, 1, 1), labels.repeat(8)
    images = images + 0.3 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    other = images.clone()
    other[0] = -other[0]
    before, after = (per_sample_gradients(net, weights, x, labels) for x in (images, other))
    assert not torch.allclose(before[1:], after[1:], rtol=1e-3), "others' gradients stay"
    clip = 0.1 * float(before.norm(dim=1).min())
    moved = (clipped_sum(before, clip) - clipped_sum(after, clip)).norm()
    assert moved > 2 * clip, "a replaced record may move a sum of bounded rows by 2 C"
