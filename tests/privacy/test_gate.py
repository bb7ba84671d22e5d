"""The gate beyond the checks: what it refuses, what it hides, how it scales."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fixtures import gate_for, little, private
from tests.privacy.checks import flat, whole
from understudy.engine import Engine
from understudy.errors import BadConfiguration, DataError, LedgerError
from understudy.privacy import Budget, Ledger, Plan, Query, Secret, Step
from understudy.privacy.clipping import clip
from understudy.privacy.gate import Records, Shards, record_digests


def test_a_private_dataset_shows_its_public_facts_and_nothing_else() -> None:
    data = little(8)
    assert "Public(name='test data'" in repr(data)
    for attempt in (len, iter, pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            attempt(data)  # type: ignore[operator]
    with pytest.raises(TypeError):
        data[0]  # type: ignore[index]
    with pytest.raises(TypeError):
        pickle.dumps(data._records)
    with pytest.raises(AttributeError):
        data.extra = 1  # type: ignore[attr-defined]


def test_a_contribution_cannot_mix_records_or_branch_on_them() -> None:
    data = little(8)
    query = whole(1.0)
    attempts = (
        lambda image, label: image.reshape(-1) * image.sum().item(),
        lambda image, label: image.reshape(-1) if image.sum() > 0 else -image.reshape(-1),
        lambda image, label: torch.rand(3) + image.sum(),
        lambda image, label: torch.nn.functional.batch_norm(
            image[None], torch.zeros(1), torch.ones(1), training=True
        ).reshape(-1),
    )
    for attempt in attempts[:3]:
        with (
            gate_for(data, Plan(Step(query, 1)), ledger=Ledger(_fresh())) as gate,
            pytest.raises(RuntimeError),
        ):
            gate.noisy_sum(query, attempt)
    # Batch norm sees one record only, so its statistics are that record's own.
    with (
        gate_for(data, Plan(Step(whole(0.0), 1)), ledger=Ledger(_fresh()), chunk=8) as gate,
        gate_for(data, Plan(Step(whole(0.0), 1)), ledger=Ledger(_fresh()), chunk=1) as one,
    ):
        together = gate.noisy_sum(whole(0.0), lambda x, y: x.reshape(-1) - x.mean())
        apart = one.noisy_sum(whole(0.0), lambda x, y: x.reshape(-1) - x.mean())
    assert torch.equal(together.value, apart.value)


_count = 0


def _fresh() -> Path:
    global _count
    _count += 1
    return Path(os.environ["UNDERSTUDY_STATE_ROOT"]) / f"ledger-{_count}.jsonl"


def test_sums_are_right() -> None:
    images = np.random.default_rng(0).integers(0, 256, (30, 1, 3, 3)).astype(np.uint8)
    labels = np.arange(30) % 3
    data = private(images, labels)
    scaled = images.astype(np.float64) / 127.5 - 1
    query = whole(0.0, bound=100.0, per_class=True)
    with gate_for(data, Plan(Step(query, 1)), chunk=7) as gate:
        answer = gate.noisy_sum(query, lambda x, y: x)
    assert answer.value.shape == (3, 1, 3, 3)
    for label in range(3):
        np.testing.assert_allclose(
            answer.value[label], scaled[labels == label].sum(0), rtol=1e-5, atol=1e-5
        )


def test_a_query_keeps_the_shape_of_its_contributions() -> None:
    query = whole(1.0)
    with gate_for(little(8), Plan(Step(query, 2))) as gate:
        gate.noisy_sum(query, flat)
        with pytest.raises(BadConfiguration, match="contributions of shape"):
            gate.noisy_sum(query, lambda x, y: x.reshape(-1)[:3])


def test_an_empty_batch_is_answered_like_any_other() -> None:
    data = private(np.zeros((4, 1, 2, 2), np.uint8), np.arange(4) % 2, counts=(10**6, 10**6))
    query = Query(name="rare", bound=1.0, noise_multiplier=1.0, expected_batch=1, per_class=True)
    with gate_for(data, Plan(Step(query, 1))) as gate:
        assert gate.noisy_sum(query, flat).value.shape == (2, 4)


def test_measured_counts() -> None:
    data = little(300, classes=3)
    query = whole(2.0, per_class=True)
    with gate_for(data, Plan(Step(query, 1))) as gate:
        counts = gate.noisy_counts(query).value
    assert counts.shape == (3,)
    assert torch.all((counts - 100).abs() < 2.0 * 7)


def test_clip_handles_every_float() -> None:
    rows = torch.tensor(
        [[3e38, 3e38], [1e-45, 0], [float("nan"), 1], [float("inf"), 1], [0.3, 0.4], [0, 0]]
    )
    step = 2.0**-30
    clipped = clip(rows, 1.0, step) * step
    assert torch.all(clipped.norm(dim=1) <= 1.0)
    assert torch.equal(clipped[2:4], torch.zeros(2, 2, dtype=torch.float64))
    torch.testing.assert_close(clipped[4].float(), rows[4], atol=1e-8, rtol=0)
    huge = clip(torch.tensor([[1e300, 1e300]], dtype=torch.float64), 1.0, step) * step
    assert 0.99 < huge.norm() <= 1.0


def test_a_fixed_secret_repeats_and_is_declared(tmp_path: Path) -> None:
    data = little(8)

    def answer(number: int) -> torch.Tensor:
        with gate_for(
            data,
            Plan(Step(whole(1.0), 1)),
            secret=Secret.for_testing(4),
            ledger=Ledger(tmp_path / f"{number}.jsonl"),
        ) as gate:
            gate.grant.__dict__["id"] = "same"
            value = gate.noisy_sum(whole(1.0), flat).value
            statement = gate.release(signals={}, recipe={}).statement
        assert statement.secret_known and not statement.private
        assert statement.paragraph().startswith("NOT PRIVATE")
        return value

    assert torch.equal(answer(1), answer(2))


def test_a_forked_gate_refuses() -> None:
    data = little(8)
    with gate_for(data, Plan(Step(whole(1.0), 2))) as gate:
        gate.grant.__dict__["pid"] = os.getpid() + 1
        with pytest.raises(LedgerError, match="another process"):
            gate.noisy_sum(whole(1.0), flat)


def test_records_must_belong_together() -> None:
    images = np.zeros((3, 1, 2, 2), np.uint8)
    with pytest.raises(DataError, match="do not belong together"):
        Records(images, np.zeros(2, np.int64), record_digests(images))
    with pytest.raises(DataError, match="uint8 or float32"):
        Records(images.astype(np.float64), np.zeros(3, np.int64), record_digests(images))
    with pytest.raises(DataError, match="Labels must lie in 0..1"):
        private(images, np.array([0, 1, 5]), classes=2, counts=(2, 1))


def test_a_group_larger_than_its_class_is_refused_with_what_would_fit() -> None:
    public = little(8).public
    query = Query(name="g", bound=1.0, noise_multiplier=1.0, expected_batch=9, per_class=True)
    with pytest.raises(BadConfiguration, match="at most 4 would fit"):
        Plan(Step(query, 1)).events(public)


def test_memory_mapped_records_give_the_same_answer(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (50, 1, 4, 4)).astype(np.uint8)
    np.save(tmp_path / "images.npy", images)
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    answers = []
    for number, source in enumerate((images, mapped)):
        data = private(source, np.arange(50) % 2)
        query = whole(0.0, bound=3.0)
        ledger = Ledger(tmp_path / f"{number}.jsonl")
        with gate_for(data, Plan(Step(query, 1)), chunk=8, ledger=ledger) as gate:
            answers.append(gate.noisy_sum(query, flat).value)
    assert torch.equal(*answers)


def test_shards_vote_with_private_states() -> None:
    data = little(60, seed=3)
    query = Query(name="votes", bound=2.0, noise_multiplier=0.0, unit="shard")

    def start(numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"seen": torch.zeros(len(numbers), 4), "number": numbers.float()}

    def step(state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return {**state, "seen": state["seen"] + len(x)}

    with gate_for(data, Plan(Step(query, 4)), chunk=6) as gate:
        shards = gate.shards(5, start, batch=3)
        shards.train(step, times=2)
        assert len(shards) == 5
        seen = shards.noisy_sum(query, lambda state: state["seen"][:1] / 10)
        assert seen.value.item() == pytest.approx(3.0, abs=1e-6)
        clipped = shards.noisy_sum(query, lambda state: state["seen"] * 1e6)
        assert clipped.value.norm() <= 5 * 2.0 + 1e-6
        numbers = shards.noisy_sum(query, lambda state: state["number"] / 4)
        assert numbers.value.item() == pytest.approx(2.5, abs=1e-6)
        tossed = shards.noisy_sum(query, lambda state, coins: coins, coins=(2,))
        assert tossed.value.min() > 0 and tossed.value.max() < 5
        with pytest.raises(TypeError):
            pickle.dumps(shards)
    with gate_for(data, Plan(Step(query, 1)), recipe={"other": 1}) as gate:
        with pytest.raises(BadConfiguration, match="asks shards"):
            gate.noisy_sum(query, flat)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_cuda_gives_the_same_exact_sum(tmp_path: Path) -> None:
    data = little(500)
    query = whole(0.0)
    answers = []
    for device in ("cpu", "cuda"):
        with data.open(
            Plan(Step(query, 1)),
            by="test",
            recipe={},
            ledger=Ledger(tmp_path / f"{device}.jsonl"),
            budget=Budget(float("inf")),
            engine=Engine(device=device),
        ) as gate:
            answers.append(gate.noisy_sum(query, flat).value.cpu())
    torch.testing.assert_close(*answers)


def test_a_shard_draws_its_own_records() -> None:
    """Without repetition where there are enough, in turn where there are fewer, zeros for none."""
    images = np.arange(1, 13, dtype=np.float32).reshape(12, 1, 1, 1) / 20
    data = private(images, np.arange(12) % 2)
    query = Query(name="votes", bound=1.0, noise_multiplier=1.0, unit="shard")
    with gate_for(data, Plan(Step(query, 1))) as gate:
        members = [np.array([0, 3, 5, 7, 9]), np.array([2, 4]), np.array([], dtype=np.intp)]
        shards = Shards(gate, members, lambda n: {"x": torch.zeros(len(n), 4)}, 4)
        kept = []
        for _ in range(20):
            shards.train(lambda state, x, y: {"x": x.reshape(-1)})
            kept.append(torch.round(shards._states["x"] * 20).long() - 1)
        drawn = torch.stack(kept)
        assert all(len(set(row.tolist())) == 4 for row in drawn[:, 0])
        assert set(drawn[:, 0].flatten().tolist()) == {0, 3, 5, 7, 9}
        assert all(sorted(row.tolist()) == [2, 2, 4, 4] for row in drawn[:, 1])
        assert (drawn[:, 2] == -1).all()
        assert len({tuple(row.tolist()) for row in drawn[:, 0]}) > 10
