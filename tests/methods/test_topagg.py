from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from tests.fixtures import gate_for, private
from tests.methods.test_ndpdc import CPU, MNIST, two_pictures
from understudy.data.datasets import load, load_heldout
from understudy.data.folder import load as load_folder
from understudy.data.folder import save
from understudy.errors import BadConfiguration, UnknownName
from understudy.jobs import verify
from understudy.methods import TRAINERS, Trainer, mechanism_named
from understudy.methods.matching import public_seed
from understudy.methods.topagg import DPSGD
from understudy.nets.draw import draw_parameters
from understudy.ops.augment import Augmentation
from understudy.ops.augment import apply as augment
from understudy.privacy import Accountant, Budget, Ledger, PrivateDataset, Public, Release, Secret
from understudy.privacy.events import Plan, Query, Step
from understudy.privacy.gate import Gate
from understudy.run import fit

Weights = dict[str, Tensor]


def small(**changes: Any) -> DPSGD:
    return DPSGD.configured({**DPSGD.miniature, "network": "linear", **changes})


def trained(method: DPSGD, ledger: Path, data: PrivateDataset | None = None) -> Release:
    """Fit with a known secret: the same grant name gives the same coins and noise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("understudy.privacy.ledger.secrets.token_hex", lambda n: "a" * (2 * n))
        return fit(
            two_pictures() if data is None else data,
            method,
            ledger=Ledger(ledger),
            engine=CPU,
            secret=Secret.for_testing(1),
        )


def part(release: Release, kind: str) -> Weights:
    return {
        name.removeprefix(f"{kind}."): value
        for name, value in release.signals.items()
        if name.startswith(f"{kind}.")
    }


def records(data: PrivateDataset) -> list[tuple[Tensor, Tensor]]:
    images = torch.from_numpy(data._records._images)
    labels = torch.from_numpy(data._records._labels)
    return list(zip(images, labels, strict=True))


def one_gradient(
    method: DPSGD, public: Public, theta: Weights, image: Tensor, label: Tensor
) -> Any:
    """Backpropagate one record, without vmap."""
    moving = {name: value.clone().requires_grad_() for name, value in theta.items()}
    logits = functional_call(method.architecture(public), moving, (image[None],))
    slopes = torch.autograd.grad(F.cross_entropy(logits, label[None]), list(moving.values()))
    return torch.cat([slope.flatten() for slope in slopes])


# Plain DP-SGD


@pytest.mark.parametrize("network", ["linear", "mlp"])
@pytest.mark.parametrize("rate", [0.4, 1.0])
def test_with_everything_kept_it_is_plain_dp_sgd_to_the_last_bit(
    tmp_path: Path, network: str, rate: float
) -> None:
    """Abadi et al., Algorithm 1, written again from the gate up; the noise is the same."""
    method = small(
        network=network, sampling_rate=rate, learning_rate=0.7, momentum=0.8, noise_multiplier=1.3
    )
    ours = part(trained(method, tmp_path / "ours"), "weights")

    data = two_pictures()
    net = method.architecture(data.public)
    theta = draw_parameters(net, public_seed(0, "network"))
    query = Query(
        name="plain DP-SGD",
        bound=1.0,
        noise_multiplier=1.3,
        expected_batch=None if rate == 1 else rate * data.public.size,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("understudy.privacy.ledger.secrets.token_hex", lambda n: "a" * (2 * n))
        with gate_for(
            data,
            Plan(Step(query, times=4)),
            secret=Secret.for_testing(1),
            ledger=Ledger(tmp_path / "plain"),
            chunk=CPU.chunk,
        ) as gate:
            velocity: Tensor | None = None
            for _ in range(4):
                here = dict(theta)

                def gradient(image: Tensor, label: Tensor, here: Weights = here) -> Tensor:
                    def loss(weights: Weights) -> Tensor:
                        logits = functional_call(net, weights, (image[None],))
                        return F.cross_entropy(logits, label[None])

                    slopes = torch.func.grad(loss)(here)
                    return torch.cat([slopes[name].flatten() for name in here])

                mean = gate.noisy_sum(query, gradient).value / (rate * data.public.size)
                velocity = mean if velocity is None else velocity.mul(0.8).add(mean)
                at = 0
                for name, value in here.items():
                    size = value.numel()
                    theta[name] = value.add(velocity[at : at + size].view_as(value), alpha=-0.7)
                    at += size
    assert list(ours) == list(theta)
    for name, value in theta.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=0)


def test_keeping_less_is_something_else(tmp_path: Path) -> None:
    plain = part(trained(small(), tmp_path / "a"), "weights")
    for number, less in enumerate(({"keep_norm": 0.8}, {"keep_dimensions": 0.4})):
        other = part(trained(small(**less), tmp_path / str(number)), "weights")
        assert not torch.equal(other["1.weight"], plain["1.weight"])


# TopAgg


@pytest.mark.parametrize(("norm", "share"), [(0.8, 1.0), (1.0, 0.3), (0.6, 0.3)])
def test_one_step_is_algorithm_four(tmp_path: Path, norm: float, share: float) -> None:
    """No noise, every record: the step along the mean of compressed gradients, one by one."""
    method = small(
        steps=1,
        sampling_rate=1.0,
        noise_multiplier=0.0,
        clip_norm=0.5,
        keep_norm=norm,
        keep_dimensions=share,
        learning_rate=2.0,
    )
    random = np.random.default_rng(4)  # of three classes: the two rows of two classes would tie
    images = random.uniform(-1, 1, (30, 1, 8, 8)).astype(np.float32)
    data = private(images, np.arange(30) % 3)
    theta = draw_parameters(method.architecture(data.public), public_seed(0, "network"))
    total = np.zeros(sum(value.numel() for value in theta.values()))
    for image, label in records(data):
        row = one_gradient(method, data.public, theta, image, label).double().numpy()
        row = row / max(1.0, np.linalg.norm(row) / 0.5)
        order = np.argsort(-np.abs(row), kind="stable")[: max(1, int(share * len(row)))]
        if norm < 1:
            order = order[np.cumsum(row[order] ** 2) <= norm * np.sum(row**2)]
        total[order] += row[order]
    start = torch.cat([value.flatten() for value in theta.values()]).double().numpy()
    after = part(trained(method, tmp_path / "l", data), "weights")
    flat = torch.cat([value.flatten() for value in after.values()]).numpy()
    np.testing.assert_allclose(flat, start - 2.0 * total / 30, rtol=1e-4, atol=1e-6)


def test_the_noise_is_a_share_of_the_smaller_bound() -> None:
    """Algorithm 4, line 18: variance k sigma^2 C^2. By dimension the bound stays C."""
    public = two_pictures().public
    for keep, bound in (({"keep_norm": 0.64}, 0.8), ({"keep_dimensions": 0.64}, 1.0)):
        query = small(**keep, noise_multiplier=3.0).query(public)
        assert query.bound == pytest.approx(bound)
        assert query.stddev == pytest.approx(3.0 * bound)
    assert small(keep_norm=0.64).epsilon(public) == small().epsilon(public)


@pytest.mark.parametrize("keep", [{}, {"keep_norm": 0.6}, {"keep_dimensions": 0.2}])
def test_hostile_records_stay_within_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: dict[str, float]
) -> None:
    """Leave each of a few hostile records out: the exact sum of the first answer moves little."""
    rows = np.stack([np.full((1, 8, 8), value, np.float32) for value in (0, 1, -1, 1e30, np.nan)])
    rows = np.concatenate([rows, np.eye(64, dtype=np.float32)[:3].reshape(3, 1, 8, 8) * 1e20])
    labels = np.arange(8) % 2
    sums: list[np.ndarray] = []
    real = Gate._clipped_sum

    def record(self: Gate, query: Any, contribution: Any, chosen: Any, state: Any) -> Any:
        answer = real(self, query, contribution, chosen, state)
        sums.append(answer[0])
        return answer

    monkeypatch.setattr(Gate, "_clipped_sum", record)
    method = small(steps=1, sampling_rate=1.0, clip_norm=0.5, **keep)

    def asked(without: int | None) -> np.ndarray:
        sums.clear()
        left = [n for n in range(8) if n != without]
        data = private(rows[left], labels[left], counts=(4, 4))
        trained(method, tmp_path / f"l{without}", data)
        return sums[0]

    whole, bound = asked(None), method.query(two_pictures().public).bound
    moved = [float(np.linalg.norm(whole - asked(n))) for n in range(8)]
    assert max(moved) <= bound * (1 + 1e-9)
    if not keep.get("keep_norm"):
        assert max(moved) > 0.99 * bound


# Optimisers, averages, augmentations


def test_adam_takes_steps_of_its_learning_rate(tmp_path: Path) -> None:
    method = small(steps=1, optimiser="adam", learning_rate=0.01)
    after = part(trained(method, tmp_path / "l"), "weights")
    before = draw_parameters(method.architecture(two_pictures().public), public_seed(0, "network"))
    for name, value in after.items():
        torch.testing.assert_close((value - before[name]).abs(), torch.full_like(value, 0.01))


def test_the_average_warms_up_and_is_what_is_classified_with(tmp_path: Path) -> None:
    method = small(averaging=0.15, steps=2)
    release = trained(method, tmp_path / "two")
    first = part(trained(small(averaging=0.15, steps=1), tmp_path / "one"), "weights")
    last, average = part(release, "weights"), part(release, "average")
    start = draw_parameters(method.architecture(release.public), public_seed(0, "network"))
    for name in last:
        early = 0.1 * start[name] + 0.9 * first[name]  # min(0.15, 1 / 10)
        expected = 0.15 * early + 0.85 * last[name]  # min(0.15, 2 / 11)
        torch.testing.assert_close(average[name], expected)
    assert torch.equal(method.classifier(release)[1].weight, average["1.weight"])  # type: ignore[index]
    plain = small(averaging=0.0, steps=2)
    kept = trained(plain, tmp_path / "plain")
    assert not part(kept, "average")
    assert torch.equal(plain.classifier(kept)[1].weight, last["1.weight"])  # type: ignore[index]


def test_a_records_gradient_is_the_mean_over_public_draws(tmp_path: Path) -> None:
    """Each step has draws of its own; every record of the step gets the same."""
    method = small(
        steps=1,
        sampling_rate=1.0,
        noise_multiplier=0.0,
        learning_rate=1.0,
        augmentation="crop_rotate_color",
        augmentations=3,
    )
    data = two_pictures(per_class=10)
    theta = draw_parameters(method.architecture(data.public), public_seed(0, "network"))
    total = torch.zeros(sum(value.numel() for value in theta.values()), dtype=torch.float64)
    seed = public_seed(0, "augmentation", 0)
    draws = Augmentation("crop_rotate_color").draw(seed, 3, (8, 8))
    for image, label in records(data):
        views = augment(image.expand(3, 1, 8, 8), draws)
        rows = [one_gradient(method, data.public, theta, view, label) for view in views]
        row = torch.stack(rows).mean(0).double()
        total += row / max(1.0, float(row.norm()))
    after = part(trained(method, tmp_path / "l", data), "weights")
    start = torch.cat([value.flatten() for value in theta.values()])
    flat = torch.cat([value.flatten() for value in after.values()])
    torch.testing.assert_close(flat, (start - total / 20).float(), rtol=1e-4, atol=1e-5)


# As a mechanism: what the conformance suite asks of methods


def test_it_is_registered() -> None:
    assert DPSGD in TRAINERS
    assert mechanism_named("dp-sgd") is DPSGD
    assert issubclass(DPSGD, Trainer)
    assert DPSGD.adaptive
    assert DPSGD.__doc__ and "Guarantee" in DPSGD.__doc__


@pytest.mark.parametrize("preset", [*DPSGD.presets, None])
def test_configurations_survive_json_and_say_what_they_are(preset: str | None) -> None:
    values = DPSGD.presets[preset].configuration if preset else DPSGD.miniature
    method = DPSGD.configured(values)
    assert DPSGD.configured(json.loads(json.dumps(method.recipe()))["configuration"]) == method
    assert method.plan(MNIST) == method.plan(MNIST)
    if preset:
        assert len(DPSGD.presets[preset].told) > 20


def test_it_asks_exactly_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gates: list[Gate] = []
    real = Gate.__init__

    def remember(self: Gate, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        gates.append(self)

    monkeypatch.setattr(Gate, "__init__", remember)
    method, public = small(), two_pictures().public
    release = trained(method, tmp_path / "l")
    (gate,) = gates
    assert set(gate._left.values()) == {0}
    assert release.statement.events == method.plan(public).events(public)
    (event,) = release.statement.events
    assert (event.times, event.sampling_rate, event.unit) == (4, 0.5, "record")
    assert release.recipe == method.recipe()
    assert release.statement.epsilon == method.epsilon(public)
    assert release.statement.departures == DPSGD.departures


def test_the_default_costs_epsilon_one_on_mnist() -> None:
    assert 0.98 < DPSGD().epsilon(MNIST) <= 1.0
    assert DPSGD().epsilon(MNIST, accountant=Accountant.RDP) > DPSGD().epsilon(MNIST)


def test_whole_set_steps_compose_exactly() -> None:
    method = small(sampling_rate=1.0, steps=25, noise_multiplier=5 * 3.7307)
    assert method.query(MNIST).expected_batch is None
    assert method.epsilon(MNIST) == pytest.approx(1.0, rel=2e-3)


def test_calibration_keeps_within_the_budget() -> None:
    public = two_pictures().public
    method = small(sampling_rate=1.0).calibrated(public, Budget(2.0))
    assert 0.99 * 2.0 <= method.epsilon(public) <= 2.0
    assert small().calibrated(public, Budget(math.inf)).noise_multiplier == 0


def test_a_killed_run_is_taken_up_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate repeats the answers it gave; momentum and average are computed again."""
    method, ledger, drawn = small(), Ledger(tmp_path / "l.jsonl"), [0]
    answers: list[Tensor] = []
    real_sum, real_ask = Gate._clipped_sum, Gate.noisy_sum

    class Killed(BaseException):
        pass

    def count(self: Gate, *args: Any) -> Any:
        drawn[0] += 1
        if drawn[0] == 3:
            raise Killed
        return real_sum(self, *args)

    def keep(self: Gate, *args: Any) -> Any:
        answer = real_ask(self, *args)
        answers.append(answer.value.clone())
        return answer

    monkeypatch.setattr(Gate, "_clipped_sum", count)
    monkeypatch.setattr(Gate, "noisy_sum", keep)
    with pytest.raises(Killed):
        fit(two_pictures(), method, ledger=ledger, engine=CPU)
    before = list(answers)
    release = fit(two_pictures(), method, ledger=ledger, engine=CPU)
    assert drawn[0] == 5  # the one that was killed is asked again, no other
    assert torch.equal(torch.stack(answers[2:4]), torch.stack(before))
    assert len(ledger.grants()) == 1
    weights = torch.zeros_like(before[0])
    velocity = torch.zeros_like(weights)
    for answer in answers[2:]:
        velocity = 0.9 * velocity + answer / 60
        weights -= 2.5 * velocity
    start = draw_parameters(method.architecture(release.public), public_seed(0, "network"))
    moved = [value - start[name] for name, value in part(release, "weights").items()]
    torch.testing.assert_close(
        torch.cat([m.flatten() for m in moved]), weights, atol=1e-5, rtol=1e-4
    )


def test_the_classifier_goes_through_a_folder(tmp_path: Path) -> None:
    method = DPSGD.configured({**DPSGD.miniature, "noise_multiplier": 2.0})  # histograms of edges
    ledger = Ledger(tmp_path / "l.jsonl")
    release = fit(two_pictures(), method, ledger=ledger, engine=CPU)
    save(tmp_path / "model", release, source=DPSGD.source)
    loaded, synthetic = load_folder(tmp_path / "model")
    assert synthetic is None
    pictures = torch.stack([image for image, _ in records(two_pictures())])
    kind = mechanism_named(loaded.recipe["method"])
    again = kind.configured(loaded.recipe["configuration"])
    assert isinstance(again, Trainer)
    net = again.classifier(loaded, engine=CPU)
    assert not net.training
    logits = net(pictures)
    assert logits.shape == (120, 2)
    assert torch.equal(logits, method.classifier(release, engine=CPU)(pictures))
    verification = verify(tmp_path / "model", ledger=ledger)
    assert verification.not_checked == ()


# Learning


def test_it_tells_two_pictures_apart(tmp_path: Path) -> None:
    data = two_pictures()
    for network in ("linear", "edges", "tanh"):
        method = DPSGD(
            network=network, steps=12, sampling_rate=1.0, learning_rate=1.0, noise_multiplier=2.0
        )
        release = fit(data, method, ledger=Ledger(tmp_path / network), engine=CPU)
        found = method.classifier(release, engine=CPU)
        images, labels = (torch.stack(column) for column in zip(*records(data), strict=True))
        assert float((found(images).argmax(1) == labels).float().mean()) > 0.9, network


def test_it_learns_digits(tmp_path: Path) -> None:
    data = load("digits")
    test = load_heldout("digits", like=data.public)
    for keep in ({}, {"keep_norm": 0.8}):
        values = {**DPSGD.presets["digits"].configuration, "noise_multiplier": 2.0, **keep}
        method = DPSGD.configured(values)
        release = fit(data, method, ledger=Ledger(tmp_path / str(keep)))
        assert release.statement.epsilon < 10
        found = method.classifier(release)
        accuracy = float((found(test.images).argmax(1) == test.labels).float().mean())
        assert accuracy > 0.8


# Choosing and refusing


def test_presets_suit_public_facts() -> None:
    def suited(**facts: Any) -> str | None:
        return DPSGD.suited(dataclasses.replace(MNIST, **facts), Budget(1.0), CPU)

    assert suited() is None
    assert suited(counts=None) is None
    assert suited(counts=(140,) * 10) == "digits"
    assert suited(shape=(14,)) == "table"
    assert suited(shape=(1, 4, 4)) == "table"
    for name in ("digits", "table"):
        method = DPSGD.configured(DPSGD.presets[name].configuration)
        method.plan(dataclasses.replace(MNIST, shape=(14,), counts=(30,) * 10))


@pytest.mark.parametrize(
    "values",
    [
        {"steps": 0},
        {"sampling_rate": 0.0},
        {"sampling_rate": 1.5},
        {"clip_norm": 0.0},
        {"keep_norm": 0.0},
        {"keep_dimensions": 1.1},
        {"learning_rate": math.nan},
        {"momentum": 1.0},
        {"averaging": -0.1},
        {"optimiser": "lion"},
        {"augmentations": 4},
        {"augmentation": "crop", "augmentations": 0},
        {"noise_multiplier": -1.0},
    ],
)
def test_nonsense_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(BadConfiguration, match="dp-sgd"):
        DPSGD(**values)


def test_refusals_help() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'edges'"):
        DPSGD(network="edge")
    with pytest.raises(UnknownName, match="augmentation family"):
        DPSGD(augmentation="blur")
    table = dataclasses.replace(MNIST, shape=(14,))
    with pytest.raises(BadConfiguration, match="no pictures"):
        small(augmentation="crop").plan(table)
    with pytest.raises(BadConfiguration, match="'mlp'"):
        DPSGD().plan(table)
