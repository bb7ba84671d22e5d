"""Sound methods pass a replay of their transcript; what reads, or adds up, too much is caught."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.auditing.test_audit import CPU, EVERY, simple
from tests.methods.test_diffusion import SMALL
from tests.privacy import test_mutants as broken
from understudy.auditing import AuditFailed, AuditPool, audit
from understudy.auditing.mechanism import Canary, Scene
from understudy.auditing.replay import ATTACK, ROUNDING, Replayed, replay
from understudy.methods import (
    DM,
    DPAF,
    DPSGD,
    LDPDC,
    PSG,
    DataLens,
    Dosser,
    Mechanism,
    WholeSet,
    dpaf_game,
)
from understudy.methods.diffusion import Diffusion
from understudy.privacy import Adjacency, Gate, Plan, Public, Release, Step, clipping
from understudy.privacy import gate as gates

SIGNS = torch.randint(0, 2, (2, 1, 8, 8), generator=torch.Generator().manual_seed(7)) * 2.0 - 1
KNOWN = 16


def scene(folder: Path, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE, size: int = 20) -> Scene:
    images = np.random.default_rng(0).uniform(-1, 1, (KNOWN, 1, 8, 8)).astype(np.float32)
    labels = np.arange(KNOWN) % 2
    public = Public(
        name="known",
        shape=(1, 8, 8),
        classes=("0", "1"),
        counts=(size, size),
        adjacency=adjacency,
    )
    return Scene(images, labels, public, CPU, folder, 1e-5)


def told(
    method: Mechanism, folder: Path, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE, **kwargs: Any
) -> Replayed:
    """Replay on two neighbours, or on one where records are exchanged."""
    canaries = [Canary(SIGNS[0], None, 1), Canary(SIGNS[1], None, 0)]
    if adjacency is Adjacency.REPLACE:
        canaries = [Canary(SIGNS[0], -SIGNS[0], 1)]
    return replay(method, scene(folder, adjacency), canaries, **kwargs)


def small(kind: type[Mechanism], **changes: Any) -> Any:
    return kind.configured({**kind.miniature, **changes})


# Sound ones


@pytest.mark.parametrize("kind", EVERY.values(), ids=EVERY)
def test_every_method_passes(kind: type[Mechanism], tmp_path: Path) -> None:
    result = told(small(kind), tmp_path)
    assert result.findings == ()
    assert result.answers == result.planned > 0
    assert result.neighbours == 2
    assert 0.01 < result.moved <= 1 + ROUNDING / 100, "far within what is let pass"


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVERY.values(), ids=EVERY)
def test_every_method_passes_where_records_are_exchanged(
    kind: type[Mechanism], tmp_path: Path
) -> None:
    result = told(small(kind), tmp_path, Adjacency.REPLACE)
    assert result.findings == ()
    assert 0.01 < result.moved <= 1 + ROUNDING / 100


VARIANTS = {
    "dpaf transfer": small(DPAF, conv1="transfer"),
    "dpaf joint": small(DPAF, conv1="joint", keep=0.5),
    "dp-sgd keeping half the norm": small(DPSGD, keep_norm=0.5, network="linear"),
    "dp-sgd keeping some dimensions": small(DPSGD, keep_dimensions=0.25, network="linear"),
    "psg prior": small(PSG, prior=True),
    "datalens fetchsgd": small(DataLens, aggregator="fetchsgd"),
    "datalens d2p-fed": small(DataLens, aggregator="d2p-fed"),
    "dosser diffusion": small(Dosser, subspace=3, auxiliary=Diffusion(**SMALL)),
    "dosser gradients": small(Dosser, features="gradients"),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", VARIANTS.values(), ids=VARIANTS)
def test_their_variants_pass(method: Mechanism, tmp_path: Path) -> None:
    result = told(method, tmp_path)
    assert result.findings == ()
    assert result.moved <= 1 + ROUNDING / 100


def test_a_machine_that_repeats_nothing_is_not_accused(tmp_path: Path) -> None:
    """As a GPU whose sums come in any order: the same records give other numbers, too."""

    @dataclass(frozen=True, kw_only=True)
    class Unsteady(WholeSet):
        def measure(self, gate: Gate) -> Release:
            release = super().measure(gate)
            release.signals["sums"].add_(1e-6 * torch.rand(()))  # type: ignore[index]
            return release

    assert told(_as(Unsteady), tmp_path).findings == ()


# What looks past the gate


def records(gate: Gate) -> Tensor:
    """Read records as a broken method would."""
    return gate._load(np.arange(len(gate._records._labels)))[0]


@dataclass(frozen=True, kw_only=True)
class Peeking(WholeSet):
    """Begin the synthetic images at the mean of the real ones."""

    def measure(self, gate: Gate) -> Release:
        release = super().measure(gate)
        start = {"start": records(gate).mean(dim=0)}
        return dataclasses.replace(release, signals={**release.signals, **start})


@dataclass(frozen=True, kw_only=True)
class Keeping(WholeSet):
    """Leave as much in a checkpoint."""

    def measure(self, gate: Gate) -> Release:
        gate.checkpoint({"mean": records(gate).mean(dim=0)})
        return super().measure(gate)


@dataclass(frozen=True, kw_only=True)
class Telling(WholeSet):
    """Write the number of records into the release."""

    def measure(self, gate: Gate) -> Release:
        release = super().measure(gate)
        return dataclasses.replace(release, recipe={**release.recipe, "of": len(records(gate))})


@dataclass(frozen=True, kw_only=True)
class Stopping(WholeSet):
    """Ask once less for every record more."""

    def measure(self, gate: Gate) -> Release:
        for _ in range(2 + KNOWN - len(records(gate))):
            gate.noisy_sum(self.query(gate.public), lambda image, label: image.flatten())
        return gate.release(signals={}, recipe=self.recipe())


@dataclass(frozen=True, kw_only=True)
class Going(WholeSet):
    """Ask once more for every record more."""

    def measure(self, gate: Gate) -> Release:
        for _ in range(1 + len(records(gate)) - KNOWN):
            gate.noisy_sum(self.query(gate.public), lambda image, label: image.flatten())
        return gate.release(signals={}, recipe=self.recipe())


@dataclass(frozen=True, kw_only=True)
class Choosing(WholeSet):
    """Ask the other one of two planned questions first where there is a record more."""

    def plan(self, public: Public) -> Plan:
        query = self.query(public)
        return Plan(Step(query, 1), Step(dataclasses.replace(query, name="another"), 1))

    def measure(self, gate: Gate) -> Release:
        for step in self.plan(gate.public)[:: 1 if len(records(gate)) == KNOWN else -1]:
            gate.noisy_sum(step.query, lambda image, label: image.flatten())
        return gate.release(signals={}, recipe=self.recipe())


@dataclass(frozen=True, kw_only=True)
class Wandering(WholeSet):
    """Ask what was never planned where there is a record more."""

    def measure(self, gate: Gate) -> Release:
        query = self.query(gate.public)
        if len(records(gate)) > KNOWN:
            query = dataclasses.replace(query, name="another")
        gate.noisy_sum(query, lambda image, label: image.flatten())
        return gate.release(signals={}, recipe=self.recipe())


@dataclass(frozen=True, kw_only=True)
class Centring(WholeSet):
    """Subtract the mean of all records from each: a contribution that depends on the others."""

    def measure(self, gate: Gate) -> Release:
        mean = records(gate).mean(dim=0)
        answer = gate.noisy_sum(
            self.query(gate.public), lambda image, label: (image - 5 * mean).flatten()
        )
        return gate.release(signals={"sums": answer.value}, recipe=self.recipe())


def _as(kind: type[WholeSet], **changes: Any) -> WholeSet:
    return kind(**dataclasses.asdict(simple(**changes)))


@pytest.mark.parametrize(
    ("kind", "finding"),
    [
        (Peeking, "releases or keeps other numbers"),
        (Keeping, "releases or keeps other numbers"),
        (Telling, "releases or keeps other numbers"),
        (Stopping, "does otherwise with a neighbour (1 answers, not 2)"),
        (Going, "is asked after the last answer"),
        (Choosing, "'another' is asked in place of 'feature sums of every class', answer 1"),
        (Wandering, "not in the plan"),
        (Centring, "moves an exact sum ('feature sums of every class', answer 1)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_method_that_looks_past_the_gate_is_caught(
    kind: type[WholeSet], finding: str, tmp_path: Path
) -> None:
    result = told(_as(kind, queries=2), tmp_path)
    assert finding in str(result.findings)
    assert result.neighbours == 1


def test_the_published_clipping_of_dpaf_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take v at the clean aggregate, as printed, and clip each record's gradient through the gate.

    Clipped or not, every record's gradient follows v, and v follows every record.
    """

    def clean(self: Any, weights: dpaf_game.Weights) -> Tensor:
        images, labels = self.gate._load(np.arange(len(self.gate._records._labels)))
        total = torch.zeros(2, *self.discriminator.aggregate)
        total.index_add_(0, labels, self.discriminator.features(weights, images))
        return total / KNOWN

    method = small(DPAF)
    assert told(method, tmp_path / "sound").findings == ()
    monkeypatch.setattr(dpaf_game._Gated, "standing", clean)
    result = told(method, tmp_path)
    assert "moves an exact sum ('conv2 gradients'" in result.findings[0]


# What is broken in the gate


def scaled_by_the_longest(patch: pytest.MonkeyPatch) -> None:
    """Bound the rows of a chunk by the norm of its longest, instead of each by its own."""
    real = clipping.clip

    def clip(rows: Tensor, bound: float, step: float) -> Tensor:
        return real(rows * bound / rows.norm(dim=1).max(), bound, step)

    patch.setattr(clipping, "clip", clip)


def batches_of_a_fixed_size(patch: pytest.MonkeyPatch) -> None:
    """Take those whose coins are smallest, secretly, so that one record drives another out."""

    def include(self: Gate, query: Any, turn: int) -> np.ndarray:
        coins = self._secret.stream(self.grant.id, turn, "inclusion").uniform(
            len(self._records._labels)
        )
        return np.sort(np.argsort(coins)[: int(query.expected_batch)])

    patch.setattr(Gate, "_include", include)


def shared_moments(patch: pytest.MonkeyPatch) -> None:
    """DataLens' code (fault U3): teachers in one slot share their optimiser's moments."""
    real = gates.Shards.train

    def train(self: gates.Shards, step: Any, times: int = 1) -> None:
        for _ in range(times):
            real(self, step)
            for name, value in self._states.items():
                if name.startswith(("mean.", "square.")):
                    value[:] = value.mean(dim=0)

    patch.setattr(gates.Shards, "train", train)


VOTES: dict[str, Any] = {
    **DataLens.miniature,
    "teachers": 12,
    "batch": 2,
    "teacher_learning_rate": 0.05,
    "signs": "plain",
}

GATES: dict[Callable[[pytest.MonkeyPatch], None], Mechanism] = {
    broken.clip_left_out: simple(clip_norm=0.25),
    scaled_by_the_longest: simple(),
    batches_of_a_fixed_size: LDPDC(images_per_class=8, group_size=5.0),
    broken.fixed_batches: LDPDC(images_per_class=8, group_size=5.0),
    broken.shards_priced_as_records: DataLens(**VOTES),
    broken.equal_split_of_shards: DataLens(**VOTES),
    broken.round_robin_by_class: DataLens(**VOTES),
    broken.shards_shuffled_by_one_stream: DataLens(**VOTES),
    shared_moments: DataLens(**VOTES),
}


@pytest.mark.parametrize(
    ("breaking", "method"), GATES.items(), ids=[breaking.__name__ for breaking in GATES]
)
def test_a_broken_gate_is_caught(
    breaking: Callable[[pytest.MonkeyPatch], None],
    method: Mechanism,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("understudy.privacy.noise.secrets.token_bytes", lambda count: b"4" * count)
    breaking(monkeypatch)
    assert "moves an exact sum" in str(told(method, tmp_path).findings)


@pytest.mark.parametrize(
    "breaking",
    [broken.noise_halved, broken.noise_from_a_public_seed, broken.one_query_too_many],
    ids=lambda breaking: breaking.__name__,
)
def test_noise_and_numbers_of_questions_are_left_to_others(
    breaking: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits that docs/audit.md names."""
    breaking(monkeypatch)
    assert told(simple(), tmp_path).findings == ()


# Long transcripts


def test_a_long_transcript_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.auditing.replay.KEPT_BYTES", 2 * 4 * 2 * 2 * 64)
    result = told(_as(Centring, queries=9), tmp_path / "moved")
    assert "moves an exact sum" in str(result.findings)
    result = told(_as(Peeking, queries=9), tmp_path / "peeks")
    assert (result.answers, result.planned, result.neighbours) == (3, 9, 2)
    assert result.findings == (), "what is released comes after the cut"


def test_with_no_time_left_one_answer_is_compared_with_one_neighbour(tmp_path: Path) -> None:
    result = told(simple(queries=9), tmp_path, seconds=0.0)
    assert (result.answers, result.neighbours) == (1, 1)
    assert result.moved == pytest.approx(1.0)


# In an audit


@pytest.fixture(scope="module")
def pool() -> AuditPool:
    images = np.random.default_rng(0).integers(0, 256, (40, 1, 8, 8)).astype(np.uint8)
    return AuditPool.of(images, np.arange(40) % 2, name="noise")


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_an_audit_fails_by_it(pool: AuditPool, adjacency: Adjacency) -> None:
    pool = AuditPool.of(pool.images, pool.labels, adjacency=adjacency)
    with pytest.raises(AuditFailed, match="past the gate") as caught:
        audit(_as(Peeking), pool, runs=4, releases=0, confidence=1 - 1e-7, engine=CPU)
    result = caught.value.result
    assert result.lower_bound <= result.claimed, "nothing else sees it"
    assert result.to_json()["findings"] == list(result.findings)
    result = audit(simple(), pool, runs=4, releases=0, confidence=1 - 1e-7, engine=CPU)
    (line,) = [found for found in result.evidence if found.attack == ATTACK]
    assert line.figures["neighbours"] == 2
    # White for black, in numbers from 0 to 1, is not the opposite of black for white.
    farthest = 1.0 if adjacency is Adjacency.ADD_OR_REMOVE else 0.5**0.5
    assert line.figures["moved"] == pytest.approx(farthest, abs=0.01)
    assert f"{ATTACK} (neighbours 2, answers 1, planned 1, moved" in str(result)


@pytest.mark.parametrize(
    "method", [small(DM), small(DPAF, published=True)], ids=["dm", "dpaf as published"]
)
def test_what_claims_nothing_is_not_replayed(method: Mechanism, pool: AuditPool) -> None:
    """The published DPAF takes bare batches, which cost infinity and pass no sum through the gate."""
    result = audit(method, pool, runs=2, releases=0, engine=CPU)
    assert math.isinf(result.claimed) and result.passed
    line = result.to_json()["evidence"][-1]
    assert line["attack"] == f"{ATTACK}: not done, no finite epsilon is claimed"
    assert str(result).endswith("is claimed"), "no empty brackets"
