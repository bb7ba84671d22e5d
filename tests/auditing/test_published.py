"""Audit private algorithms as their papers or their code have them: each is caught.

The claims are those of the sound methods, so it is the departure that fails, not the price.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.auditing.test_audit import look
from tests.privacy import test_mutants as broken
from understudy.auditing import AuditPool
from understudy.methods import DPAF, Dosser, dpaf_game
from understudy.privacy import Budget, Public, Secret, gate

pytestmark = pytest.mark.slow

REPEATS = 50
"""Times a stored sum is noised: 200,000 steps on 10,000 sums are 20, of every class."""


@pytest.fixture(scope="module")
def pool() -> AuditPool:
    images = np.random.default_rng(0).integers(0, 256, (40, 1, 8, 8)).astype(np.uint8)
    return AuditPool.of(images, np.arange(40) % 2, name="noise")


def noise_once_per_step_from_a_known_seed(patch: pytest.MonkeyPatch) -> None:
    """Reseed with the number stored for a signal, then draw: step by step the same noise."""
    real, known = Secret.stream, Secret.for_testing(1234)
    # A place begins with the number of the grant, which alone is another in every run.
    patch.setattr(Secret, "stream", lambda self, *place: real(known, *place[1:]))


def noise_once_per_step_afresh(patch: pytest.MonkeyPatch) -> None:
    """Keep the clean sum and noise it at every step: optimisation sees the mean of the draws."""
    real = gate.grid_noise

    def mean(*place: Any) -> Tensor:
        return torch.stack([real(*place) for _ in range(REPEATS)]).double().mean(0).round()

    patch.setattr(gate, "grid_noise", mean)


@pytest.mark.parametrize(
    ("breaking", "by"),
    [
        (noise_once_per_step_from_a_known_seed, "noise that repeats itself"),
        (noise_once_per_step_afresh, "scale of the noise"),
        (broken.noise_from_a_public_seed, "noise that repeats itself"),
        (broken.noise_halved, "scale of the noise"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_dosser_as_its_code_has_it_is_caught(
    breaking: Callable[[pytest.MonkeyPatch], None],
    by: str,
    pool: AuditPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = Dosser(**Dosser.miniature).calibrated(pool.public, Budget(1.0))
    assert look(method, pool, runs=20).passed
    breaking(monkeypatch)
    result = look(method, pool, runs=20)
    (evidence,) = [found for found in result.evidence if found.attack == by]
    assert evidence.epsilon > 2 * result.claimed, str(result)
    assert not result.passed


@dataclass(frozen=True, kw_only=True)
class Claimed(DPAF):
    """Take the printed algorithm at its word: it claims what the sound one pays for."""

    def epsilon(self, public: Public, delta: float = 1e-5) -> float:
        sound = DPAF(**{**dataclasses.asdict(self), "published": False})
        return sound.epsilon(public, delta)


@pytest.mark.parametrize("conv1", ["random", "transfer"])
def test_dpaf_as_published_is_caught(conv1: Any, pool: AuditPool) -> None:
    sound = Claimed(**{**DPAF.miniature, "conv1": conv1}).calibrated(pool.public, Budget(4.0))
    assert look(sound, pool).passed
    result = look(dataclasses.replace(sound, published=True), pool)
    assert math.isfinite(result.claimed) and not result.passed
    assert "looks at records past the gate" in str(result.findings)


def test_the_clipping_of_dpaf_as_published_is_caught(
    pool: AuditPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let it ask the gate, at a v taken from the clean aggregate: clipping does not bound that."""
    method = DPAF(**DPAF.miniature).calibrated(pool.public, Budget(4.0))

    def clean(self: Any, weights: dpaf_game.Weights) -> Tensor:
        images, labels = self.gate._load(np.arange(len(self.gate._records._labels)))
        total = torch.zeros(2, *self.discriminator.aggregate)
        total.index_add_(0, labels, self.discriminator.features(weights, images))
        return total / len(labels)

    monkeypatch.setattr(dpaf_game._Gated, "standing", clean)
    result = look(method, pool)
    assert not result.passed and "moves an exact sum" in str(result.findings)
