"""The observer changes nothing, the statistic is the right one, the factors are the accountant's."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fixtures import gate_for, little
from understudy.auditing.mechanism import (
    Answer,
    Canary,
    ObservedGate,
    Scene,
    log_ratio,
    noise_factor,
    worst_canary,
)
from understudy.auditing.statistics import Counts
from understudy.engine import Engine
from understudy.methods import LDPDC
from understudy.privacy import Adjacency, Ledger, Plan, Query, Secret, Step
from understudy.privacy.events import Event

QUERY = Query(name="q", bound=2.0, noise_multiplier=1.5, expected_batch=8, per_class=True)


def scene(folder: Path, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE) -> Scene:
    random = np.random.default_rng(0)
    images = random.uniform(-1, 1, (8, 1, 4, 4)).astype(np.float32)
    public = dataclasses.replace(little(40).public, adjacency=adjacency, labels="public")
    return Scene(images, np.arange(8) % 2, public, Engine(device="cpu"), folder, 1e-5)


def test_the_observed_gate_answers_as_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.privacy.ledger.secrets.token_hex", lambda n: "a" * (2 * n))
    data, plan = little(20, counts=(10, 10)), Plan(Step(QUERY, 3))
    seen: list[Answer] = []

    def ask(observed: bool) -> list[torch.Tensor]:
        ledger = Ledger(tmp_path / f"{observed}.jsonl")
        with gate_for(data, plan, secret=Secret.for_testing(1), ledger=ledger) as gate:
            asked = gate
            if observed:
                candidates = (torch.ones(1, 1, 4, 4), torch.zeros(1, dtype=torch.long))
                asked = ObservedGate(gate, seen.append, known=19, candidates=candidates)
            return [asked.noisy_sum(QUERY, lambda x, y: x.reshape(-1)).value for _ in range(3)]

    for plain, watched in zip(ask(False), ask(True), strict=True):
        assert torch.equal(plain, watched)
    assert len(seen) == 3
    last = data._records._images[19].reshape(-1).astype(float)
    last *= min(1.0, 2.0 / np.linalg.norm(last))
    differences = [answer.exact - answer.known for answer in seen]
    for difference in differences:
        included = np.abs(difference).sum() > 0
        expected = last if included else 0 * last
        np.testing.assert_allclose(difference[1], expected, atol=1e-6)
        assert not difference[0].any()
    assert all(np.linalg.norm(a.rows[0]) == pytest.approx(2.0) for a in seen if a.rows is not None)


def answer(noisy: np.ndarray, rows: np.ndarray, rate: float) -> Answer:
    return Answer(
        query=QUERY,
        label_rates=(rate, rate),
        noisy=noisy,
        exact=np.zeros_like(noisy),
        known=np.zeros_like(noisy),
        rows=rows,
        norms=np.linalg.norm(rows, axis=1),
    )


@pytest.mark.parametrize("rate", [1.0, 0.2])
def test_the_statistic_is_the_log_likelihood_ratio(rate: float) -> None:
    random = np.random.default_rng(0)
    noisy, rows = random.normal(size=(2, 5)) * 3, random.normal(size=(2, 5))
    blank = torch.zeros(1)

    def density(centre: np.ndarray) -> float:
        def normal(shift: np.ndarray) -> float:
            return math.exp(-float(np.sum((noisy[1] - shift) ** 2)) / (2 * 3.0**2))

        return (1 - rate) * normal(0 * centre) + rate * normal(centre)

    ratio, reach = log_ratio(answer(noisy, rows, rate), Canary(blank, None, 1))
    assert ratio == pytest.approx(math.log(density(rows[0]) / density(0 * rows[0])))
    assert reach == pytest.approx(min(1.0, np.linalg.norm(rows[0]) / 2))
    ratio, _ = log_ratio(answer(noisy, rows, rate), Canary(blank, blank, 1))
    assert ratio == pytest.approx(math.log(density(rows[0]) / density(rows[1])))


def test_opposite_records_reach_the_whole_of_a_replacement() -> None:
    rows = np.array([[2.0, 0, 0], [-2.0, 0, 0]])
    for rate in (1.0, 0.2):
        _, reach = log_ratio(
            answer(np.zeros((2, 3)), rows, rate), Canary(torch.zeros(1), torch.zeros(1), 0)
        )
        assert reach == pytest.approx(1.0)


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_the_worst_canary_of_ldpdc_has_the_full_norm(tmp_path: Path, adjacency: Adjacency) -> None:
    method = LDPDC(images_per_class=2, group_size=5.0)
    canary = worst_canary(method, scene(tmp_path, adjacency), seed=0)
    assert canary.image.norm() == pytest.approx(4.0)
    if adjacency is Adjacency.REPLACE:
        assert canary.other is not None
        assert torch.equal(canary.other, -canary.image)


def event(rate: float | None, multiplier: float = 1.0) -> Event:
    return Event(
        name="q",
        times=1,
        noise_multiplier=multiplier,
        bound=1.0,
        sampling_rate=rate,
        per_class=False,
        unit="record",
    )


def test_noise_factors_never_fall_below_the_truth_and_come_near() -> None:
    """Exact error rates of a (sampled) Gaussian, counted on a million runs each."""
    n, public = 1_000_000, little(4).public
    norm = torch.distributions.Normal(0.0, 1.0)

    def tail(x: float) -> float:
        return float(1 - norm.cdf(torch.tensor(x, dtype=torch.float64)))

    for rate in (None, 0.5):
        q = rate or 1.0
        fpr = tail(0.5)
        tpr = (1 - q) * fpr + q * tail(-0.5)
        counts = Counts(round(n * tpr), n, round(n * fpr), n)
        factor = noise_factor(counts, (event(rate),), public, 0.95)
        assert 1.0 <= factor < 1.2  # one (e, d) stands for a whole curve, so not 1.0
    blind = Counts(n // 2, n, n // 2, n)
    for rate in (None, 0.5):
        assert math.isinf(noise_factor(blind, (event(rate),), public, 0.95))
