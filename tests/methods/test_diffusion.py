from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import grad

from tests.fixtures import private
from tests.methods.test_ndpdc import CPU, MNIST, table, two_pictures
from understudy.data.folder import load, save
from understudy.errors import BadConfiguration, UnknownName
from understudy.jobs import verify
from understudy.methods import DM, NDPDC, Dosser, WholeSet
from understudy.methods.diffusion import POOL, Diffusion, log_weight, noise_for
from understudy.methods.matching import PUBLIC_IMAGES, Matching, public_seed
from understudy.nets.diffusion import Denoiser
from understudy.privacy import Ledger
from understudy.privacy.accounting import epsilon
from understudy.privacy.events import Event, Query
from understudy.privacy.gate import Gate
from understudy.privacy.release import Release
from understudy.run import fit, synthesise

pytest.importorskip("diffusers")

SMALL = {
    "steps": 7,
    "expected_batch": 20.0,
    "noise_draws": 2,
    "width": 4,
    "images": 20,
    "sampling_steps": 2,
    "share": 0.3,
}
DATA = two_pictures(20)


def small(kind: type[Matching] = Dosser, **changes: Any) -> Matching:
    values = {"subspace": 3, "auxiliary": {"diffusion": SMALL}, "noise_multiplier": 2.0}
    return kind.configured({**kind.miniature, **values, **changes})  # type: ignore[return-value]


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    folder = tmp_path_factory.mktemp("ledger")
    return fit(DATA, small(), ledger=Ledger(folder / "l"), engine=CPU)


# The share


def mu_squared(event: Event) -> float:
    if event.sampling_rate is None:
        return event.times / event.noise_multiplier**2
    q = event.sampling_rate
    return event.times * q**2 * (math.exp(event.noise_multiplier**-2) - 1)


@pytest.mark.parametrize("kind", [Dosser, WholeSet])
@pytest.mark.parametrize("share", [0.06, 0.5])
@pytest.mark.parametrize("noise", [0.6, 2.0, 40.0])
def test_the_generator_takes_its_share_whatever_the_noise(
    kind: type[Matching], share: float, noise: float
) -> None:
    method = kind(subspace=100, auxiliary=Diffusion(share=share), noise_multiplier=noise)  # type: ignore[call-arg]
    ours, rest = (mu_squared(event) for event in method.plan(MNIST).events(MNIST))
    assert ours / (ours + rest) == pytest.approx(share, rel=1e-6)


def test_no_noise_is_no_noise_and_little_noise_does_not_overflow() -> None:
    for noise, expected in ((0.0, 0.0), (0.01, None), (0.02, None)):
        method = Dosser(subspace=9, auxiliary=Diffusion(), noise_multiplier=noise)
        training, main = (step.query for step in method.plan(MNIST))
        assert main.noise_multiplier == noise
        assert math.isfinite(training.noise_multiplier)
        assert training.noise_multiplier == 0.0 if expected == 0.0 else True
    asked = Query(name="q", bound=1.0, noise_multiplier=3.0, expected_batch=500.0)
    weight = log_weight(asked, 40, MNIST)
    assert noise_for(weight, asked, 40, MNIST) == pytest.approx(3.0)


def test_the_unit_of_the_share_is_the_accountants_within_a_few_percent() -> None:
    """An answer of weight mu^2 costs what one Gaussian of noise 1 / mu does."""
    asked = Query(name="q", bound=1.0, noise_multiplier=2.0, expected_batch=1000.0)
    mu = math.exp(log_weight(asked, 1000, MNIST) / 2)
    one = Query(name="q", bound=1.0, noise_multiplier=1 / mu)
    costs = [
        epsilon((asked.event(MNIST, 1000),), 1e-5),
        epsilon((one.event(MNIST, 1),), 1e-5),
    ]
    assert costs[0] == pytest.approx(costs[1], rel=0.05)


def test_the_papers_split_is_six_percent_of_the_variance() -> None:
    """(0.2 epsilon, 0.2 delta) beside (0.8 epsilon, 0.8 delta), at epsilon 1 and delta 1e-5."""

    def gaussian(noise: float) -> tuple[Event, ...]:
        return (Query(name="q", bound=1.0, noise_multiplier=noise).event(MNIST, 1),)

    weights = []
    for part, noise in ((0.2, 18.21), (0.8, 4.636)):
        assert epsilon(gaussian(noise), part * 1e-5) == pytest.approx(part, rel=0.002)
        weights.append(noise**-2)
    assert weights[0] / sum(weights) == pytest.approx(Diffusion().share, abs=0.002)


def test_a_share_costs_as_much_noise_as_it_says() -> None:
    """With a share s the rest has the noise that 1 - s of the budget would give it alone."""
    share = 0.3
    both = WholeSet(queries=50, subspace=100, auxiliary=Diffusion(share=share), noise_multiplier=4)
    alone = WholeSet(queries=50, noise_multiplier=4 * math.sqrt(1 - share))
    assert both.epsilon(MNIST) == pytest.approx(alone.epsilon(MNIST), rel=0.03)


# The run


def test_the_training_is_planned_asked_and_stated_first(release: Release) -> None:
    method = small()
    training, sums = release.statement.events
    assert release.statement.events == method.plan(DATA.public).events(DATA.public)
    assert (training.times, training.bound, training.sampling_rate) == (7, 1.0, 0.5)
    assert sums.times == 4
    assert release.statement.epsilon == method.epsilon(DATA.public)
    assert release.statement.departures == (*Dosser.departures, *Diffusion.DEPARTURES)
    assert PUBLIC_IMAGES not in release.statement.assumptions
    made = release.signals["auxiliary"]
    assert made.shape == (20, 1, 8, 8)
    assert made.abs().max() <= 1
    assert release.signals["sums"].shape == (4, 2, 3)


def test_the_recipe_survives_json_and_keeps_the_generators_fields(release: Release) -> None:
    recipe = json.loads(json.dumps(release.recipe))
    again = Dosser.configured(recipe["configuration"])
    assert again == small()
    assert again.auxiliary == Diffusion.of(SMALL)
    assert Dosser(subspace=5, auxiliary="diffusion").auxiliary == Diffusion()  # type: ignore[arg-type]


def test_another_synthesis_needs_neither_diffusers_nor_another_training(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = synthesise(release, engine=CPU)
    save(tmp_path / "release", release, before, source=Dosser.source)
    real = importlib.import_module

    def absent(name: str, *rest: Any) -> Any:
        if name.startswith("diffusers"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", absent)
    loaded, _ = load(tmp_path / "release")
    assert torch.equal(before.images, synthesise(loaded, engine=CPU).images)
    verify(tmp_path / "release")
    assert small().plan(DATA.public).events(DATA.public) == release.statement.events


def test_a_killed_run_ends_where_the_plain_algorithm_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill twice, with checkpoints between; then redo the training from the answers alone."""
    method, ledger = small(seed=3), Ledger(tmp_path / "l")
    answers: dict[int, torch.Tensor] = {}
    real = Gate._answer

    class Killed(BaseException):
        pass

    def noted(self: Gate, query: Query, total: Any) -> Any:
        if self._asked in deaths:
            deaths.remove(self._asked)
            raise Killed
        answer = real(self, query, total)
        answers.setdefault(self._asked - 1, answer.clone())
        assert torch.equal(answers[self._asked - 1], answer)  # repeated, never redrawn
        return answer

    deaths = [5, 9]
    monkeypatch.setattr(Gate, "_answer", noted)
    monkeypatch.setattr("understudy.methods.diffusion.EVERY", 3)
    monkeypatch.setattr("understudy.privacy.gate.UNSEEN_SECONDS", -1.0)  # journal each by itself
    for _ in range(2):
        with pytest.raises(Killed):
            fit(DATA, method, ledger=ledger, engine=CPU)
    release = fit(DATA, method, ledger=ledger, engine=CPU)
    assert len(answers) == 11
    assert len(ledger.grants()) == 1

    net = Denoiser((1, 8, 8), 2, width=4)
    first = net.draw(public_seed(3, "denoiser"), torch.device("cpu"))
    names = list(first)
    weights = [value.clone().requires_grad_() for value in first.values()]
    averages = [value.clone() for value in first.values()]
    adam = torch.optim.Adam(weights, lr=1e-3)
    for t in range(7):
        parts = answers[t].split([value.numel() for value in weights])
        for value, part in zip(weights, parts, strict=True):
            value.grad = part.view(value.shape) / 20
        adam.step()
        decay = min(0.99, (1 + t) / (10 + t))
        averages = [
            decay * a + (1 - decay) * value.detach()
            for a, value in zip(averages, weights, strict=True)
        ]
    made = net.sample(
        dict(zip(names, averages, strict=True)),
        torch.arange(20) % 2,
        public_seed(3, "auxiliary pictures"),
        2,
    )
    torch.testing.assert_close(release.signals["auxiliary"], made, atol=1e-4, rtol=1e-4)


def test_an_answer_is_the_sum_of_clipped_denoising_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without noise and with every record in the batch the first answer is known."""
    answers: list[torch.Tensor] = []
    real = Gate._answer

    def noted(self: Gate, query: Query, total: Any) -> Any:
        answer = real(self, query, total)
        answers.append(answer)
        return answer

    monkeypatch.setattr(Gate, "_answer", noted)
    values = {**SMALL, "expected_batch": 8.0, "clip_norm": 0.7, "steps": 1}
    records, labels = DATA._records._images[:8], DATA._records._labels[:8]
    data = private(records, labels)
    method = small(noise_multiplier=0.0, group_size=2.0, seed=3, auxiliary={"diffusion": values})
    fit(data, method, ledger=Ledger(tmp_path / "l"), engine=CPU)

    net = Denoiser((1, 8, 8), 2, width=4)
    weights = net.draw(public_seed(3, "denoiser"), torch.device("cpu"))
    draws = net.pool(public_seed(3, "denoising noise", 0), POOL, torch.device("cpu"))
    expected, clipped = torch.zeros(sum(v.numel() for v in weights.values())), 0
    for record, label in zip(torch.from_numpy(records), torch.from_numpy(labels), strict=True):
        slopes = grad(lambda w, x=record, y=label: net.loss(w, x, y, draws, 2))(weights)
        row = torch.cat([slopes[name].flatten() for name in weights])
        clipped += int(row.norm() > 0.7)
        expected += row * min(1.0, 0.7 / float(row.norm()))
    assert clipped > 0
    torch.testing.assert_close(answers[0], expected, atol=1e-5, rtol=1e-3)


def test_the_whole_set_plan_uses_the_same_generator(tmp_path: Path) -> None:
    method = small(WholeSet, noise_multiplier=1.0)
    release = fit(DATA, method, ledger=Ledger(tmp_path / "l"), engine=CPU)
    assert release.signals["auxiliary"].shape == (20, 1, 8, 8)
    made = synthesise(release, engine=CPU)
    assert made.per_class == [8, 8]
    assert torch.isfinite(made.images).all()


# What is refused


@pytest.mark.parametrize(
    "changes",
    [
        {"share": 0.0},
        {"share": 1.0},
        {"steps": 0},
        {"images": 0},
        {"width": 6},
        {"noise_draws": POOL + 1},
        {"expected_batch": 0.0},
        {"clip_norm": math.inf},
        {"learning_rate": -1.0},
        {"average": 1.0},
    ],
)
def test_senseless_generators_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadConfiguration, match="generator"):
        Diffusion(**changes)


def test_generators_that_would_be_of_no_use_are_refused() -> None:
    with pytest.raises(UnknownName, match="share"):
        Dosser(subspace=5, auxiliary={"diffusion": {"shair": 0.1}})  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="Did you mean 'diffusion'"):
        Dosser(subspace=5, auxiliary={"difusion": {}})  # type: ignore[arg-type]
    with pytest.raises(BadConfiguration, match="subspace"):
        Dosser(auxiliary=Diffusion())
    for kind in (NDPDC, DM):
        with pytest.raises(BadConfiguration, match="trains no generator"):
            kind(subspace=5, auxiliary=Diffusion())
    with pytest.raises(BadConfiguration, match="makes pictures"):
        Dosser(subspace=5, auxiliary=Diffusion()).plan(table().public)
