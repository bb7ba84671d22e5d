"""Sound methods pass, broken ones are caught, and the result reads well."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from tests.privacy import test_mutants as broken
from understudy.auditing import AuditFailed, AuditPool, AuditResult, audit
from understudy.engine import Engine
from understudy.errors import BadConfiguration, PrivacyError
from understudy.methods import LDPDC, TRAINERS, Mechanism, Method, WholeSet, registered
from understudy.methods.matching import measure_signals
from understudy.privacy import Adjacency, Budget, Gate, Release

CPU = Engine(device="cpu")
EVERY: dict[str, type[Mechanism]] = {**registered(), **{kind.name: kind for kind in TRAINERS}}
SURE = 1 - 1e-7
"""A sound method fails an audit at this confidence once in ten million."""


@pytest.fixture(scope="module")
def pool() -> AuditPool:
    bunch = load_digits()
    images = (bunch.images * (255 / 16)).round().astype(np.uint8)[:, None]
    return AuditPool.of(images, bunch.target, name="digits")


def look(method: Mechanism, pool: AuditPool, runs: int = 12, **kwargs: Any) -> AuditResult:
    settings: dict[str, Any] = {"releases": 0, "confidence": SURE, "engine": CPU, **kwargs}
    return audit(method, pool, runs=runs, strict=False, **settings)


def simple(**changes: Any) -> WholeSet:
    """One Gaussian: every record's pixels, once."""
    values: dict[str, Any] = {
        "features": "pixels",
        "clip_norm": 2.0,
        "augmentation": "",
        "expand": False,
        "queries": 1,
        "images_per_class": 1,
        "steps": 2,
    }
    return WholeSet(**{**values, **changes})


@pytest.mark.parametrize("kind", EVERY.values(), ids=EVERY)
def test_every_method_passes_a_quick_audit(kind: type[Mechanism], pool: AuditPool) -> None:
    method = kind.configured(kind.miniature)
    result = look(method, pool, runs=8, releases=4, quick=True)
    assert result.passed, str(result)
    makes_sets = issubclass(kind, Method)
    assert result.releases == 4 * makes_sets
    assert any("releases" in found.attack for found in result.evidence) == makes_sets
    if math.isfinite(result.claimed):
        assert result.lower_bound > 0.5 * result.claimed, str(result)


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize(
    "method",
    [pytest.param(LDPDC(**LDPDC.miniature), marks=pytest.mark.slow, id="sampled"), simple()],
    ids=lambda m: m.name,
)
def test_both_adjacencies_are_audited(method: Method, adjacency: Adjacency) -> None:
    random = np.random.default_rng(0)
    images = random.uniform(-1, 1, (40, 1, 8, 8)).astype(np.float32)
    pool = AuditPool.of(images, np.arange(40) % 2, adjacency=adjacency)
    result = look(method, pool)
    assert 0 < result.lower_bound <= result.claimed, str(result)


BREAKS: tuple[tuple[Callable[[pytest.MonkeyPatch], None], Method, str], ...] = (
    (broken.noise_halved, LDPDC(**LDPDC.miniature), "scale"),
    (broken.noise_halved, simple(noise_multiplier=1.0), "scale"),
    (broken.noise_a_tenth_short, simple(noise_multiplier=1.0), "scale"),
    (broken.noise_without_the_bound, LDPDC(**LDPDC.miniature), "scale"),
    (broken.noise_from_a_public_seed, simple(), "repeats"),
    (broken.noise_shared_by_queries, simple(queries=2), "repeats"),
    (broken.clip_left_out, simple(noise_multiplier=1.0, clip_norm=0.25), "mean likelihood"),
)


@pytest.mark.parametrize(
    ("breaking", "method", "by"), BREAKS, ids=[f"{b.__name__}-{m.name}" for b, m, _ in BREAKS]
)
def test_a_broken_gate_is_caught(
    breaking: Callable[[pytest.MonkeyPatch], None],
    method: Method,
    by: str,
    pool: AuditPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claimed = method.epsilon(pool.public)
    breaking(monkeypatch)
    result = look(method, pool)
    assert result.claimed == claimed, "the claim must be the honest one"
    assert result.lower_bound > result.claimed, str(result)
    (evidence,) = [found for found in result.evidence if by in found.attack]
    assert evidence.epsilon > result.claimed, str(result)
    if by == "repeats":
        assert math.isinf(result.lower_bound)


@dataclass(frozen=True, kw_only=True)
class Twice(WholeSet):
    """Ask one query more than planned (PSG's code: one run more than was paid for)."""

    def measure(self, gate: Gate) -> Release:
        extractor = self.extractor(gate.public, gate.engine)
        sums = measure_signals(gate, self.query(gate.public), extractor, 2)
        return self.released(gate, sums, extractor, None)


def twice() -> Twice:
    return Twice(**{**dataclasses.asdict(simple(noise_multiplier=1.0))})


def test_one_query_too_many_is_caught(pool: AuditPool, monkeypatch: pytest.MonkeyPatch) -> None:
    broken.one_query_too_many(monkeypatch)
    with pytest.raises(AuditFailed, match="answered 2 times, planned 1") as caught:
        audit(twice(), pool, runs=12, releases=0, confidence=SURE, engine=CPU)
    result = caught.value.result
    assert isinstance(caught.value, PrivacyError)
    assert not result.passed
    assert result.lower_bound > result.claimed, "the noise's scale, priced as asked, shows it too"


@pytest.mark.slow
def test_statistics_alone_see_one_query_too_many(
    pool: AuditPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken.one_query_too_many(monkeypatch)
    result = look(twice(), pool, runs=1500, confidence=0.999)
    means = [found for found in result.evidence if "mean likelihood" in found.attack]
    assert means[0].epsilon > result.claimed, str(result)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["noise_halved", "noise_a_tenth_short"])
@pytest.mark.parametrize("kind", EVERY.values(), ids=EVERY)
def test_every_method_with_too_little_noise_is_caught(
    kind: type[Mechanism], name: str, pool: AuditPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = kind.configured(kind.miniature)
    if math.isinf(method.epsilon(pool.public)):
        pytest.skip("claims nothing")
    getattr(broken, name)(monkeypatch)
    assert not look(method, pool, runs=60).passed


def test_a_quick_audit_takes_minutes_however_long_the_method(
    pool: AuditPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runs are cut, and what was heard still tells the noise of the whole."""
    monkeypatch.setattr(import_module("understudy.auditing.audit"), "QUICK_SECONDS", 1.0)
    method = simple(queries=1000, noise_multiplier=100.0, steps=10**7)
    result = look(method, pool, runs=8, releases=4, quick=True)
    assert result.passed and result.releases == 0, str(result)
    assert result.seconds < 60
    by = {found.attack: found for found in result.evidence}
    assert "canaries in releases: not done, the time was up after 0" in by
    assert 0 < by["likelihood ratio of a run, any mechanism"].figures["answers"] < 1000
    assert "are like those before it" in by["scale of the noise"].rests_on
    assert result.lower_bound > 0.9 * result.claimed
    monkeypatch.setattr(import_module("understudy.auditing.audit"), "QUICK_SECONDS", 1e-3)
    result = look(method, pool, runs=8, releases=4, quick=True)
    assert "one transcript told to neighbours: not done, one answer takes too long" in str(result)
    assert "not done, the time was up after 0" in str(result)
    assert result.passed and result.runs == 2, "two runs are always made"
    assert result.lower_bound > 0.8 * result.claimed
    broken.noise_halved(monkeypatch)
    assert not look(method, pool, runs=8, quick=True).passed


@pytest.mark.slow
def test_a_whole_set_gaussian_at_epsilon_4_shows_more_than_half_of_it(pool: AuditPool) -> None:
    """By the canary's own direction alone: without the scale of all the noise."""
    method = simple(queries=2).calibrated(pool.public, Budget(4.0))
    result = look(method, pool, runs=1000, confidence=0.95)
    assert result.passed, str(result)
    (means,) = [found for found in result.evidence if "mean likelihood" in found.attack]
    assert 2.0 < means.epsilon <= 4.0, str(result)


def test_a_release_without_noise_gives_its_canaries_away(pool: AuditPool) -> None:
    """The white-box attack on releases has power: no noise, nothing sampled."""
    method = simple(noise_multiplier=0.0)
    result = look(method, pool, runs=2, releases=6, confidence=0.95)
    (white,) = [found for found in result.evidence if "inner product" in found.attack]
    assert white.epsilon > 1 and white.figures["right"] > 0.9, str(result)
    assert math.isinf(result.claimed) and result.passed


def test_the_result_reads_and_stores_well(pool: AuditPool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int, str]] = []
    broken.noise_from_a_public_seed(monkeypatch)
    result = look(simple(), pool, runs=8, progress=lambda *step: told.append(step))
    stored = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert stored["lower_bound"] == "inf"
    assert stored["passed"] is False
    assert stored["claimed"] == pytest.approx(1.0, abs=0.01)
    assert "FAILED" in str(result) and "ABOVE" in str(result)
    assert [step for step in told if step[2] == "running"][-1] == (7, 8, "running")


def test_the_claim_may_be_that_of_other_public_facts(pool: AuditPool) -> None:
    """An audit for a private dataset ten times larger prices its rates, not the pool's."""
    public = dataclasses.replace(pool.public, counts=(1500,) * 10, name="mine")
    other = AuditPool.of(pool.images, pool.labels, public=public)
    result = look(LDPDC(**LDPDC.miniature), other, runs=4)
    assert result.claimed == LDPDC(**LDPDC.miniature).epsilon(public)
    assert result.pool == "mine"
    assert result.passed


def test_bad_pools_are_refused() -> None:
    images = torch.zeros(8, 1, 4, 4)
    labels = torch.arange(8) % 2
    assert len(AuditPool.of(images, labels)) == 8
    for bad, message in (
        ((images, labels[:7]), "8 records has 7 labels"),
        ((images, torch.zeros(8).long()), "class"),
        ((images * 0 + 3, labels), r"\[-1, 1\]"),
        ((images, torch.arange(8) % 3), "4 records of every class"),
        ((images, labels - 1), "0..0"),
    ):
        with pytest.raises(BadConfiguration, match=message):
            AuditPool.of(*bad)
    with pytest.raises(BadConfiguration, match="confidence"):
        audit(simple(), AuditPool.of(images, labels), confidence=1.0)
