"""What every method must keep to. Runs on each registered method unasked."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fixtures import private
from understudy.data.folder import load, save
from understudy.engine import Engine
from understudy.errors import BadConfiguration, UnknownName
from understudy.jobs import verify
from understudy.methods import Method, registered
from understudy.privacy import Accountant, Budget, Ledger, PrivateDataset, Secret
from understudy.privacy.events import Event, Query
from understudy.privacy.gate import Gate
from understudy.run import fit, synthesise

CPU = Engine(device="cpu", chunk=16)
EVERY = pytest.mark.parametrize("kind", registered().values(), ids=registered())


def few(leave_out: int | None = None) -> PrivateDataset:
    """Two classes of twenty 1 x 8 x 8 records; the class sizes stay declared."""
    random = np.random.default_rng(5)
    labels = np.arange(40) % 2
    images = random.integers(0, 256, (40, 1, 8, 8)).astype(np.uint8)
    images[labels == 1, :, :4] //= 3
    if leave_out is not None:
        images, labels = np.delete(images, leave_out, 0), np.delete(labels, leave_out)
    return private(images, labels, name="few", counts=(20, 20))


def small(kind: type[Method], **changes: Any) -> Method:
    return kind.configured({**kind.miniature, **changes})


def fixed_fit(method: Method, data: PrivateDataset, ledger: Path, seed: int = 3) -> Any:
    return fit(data, method, ledger=Ledger(ledger), engine=CPU, secret=Secret.for_testing(seed))


@EVERY
def test_it_says_what_it_is(kind: type[Method]) -> None:
    assert kind.name and kind.title and kind.source
    assert kind.__doc__ and "Guarantee" in kind.__doc__
    assert dataclasses.fields(kind)


@EVERY
def test_planning_is_a_function_of_public_facts(kind: type[Method]) -> None:
    method, public = small(kind), few().public
    assert method.plan(public) == method.plan(public)
    events = method.plan(public).events(public)
    assert tuple(Event.from_json(json.loads(json.dumps(e.to_json()))) for e in events) == events


@EVERY
def test_configuration_survives_json_and_unknown_fields_are_refused(kind: type[Method]) -> None:
    method = small(kind)
    recipe = json.loads(json.dumps(method.recipe()))
    assert kind.configured(recipe["configuration"]) == method
    with pytest.raises(UnknownName, match="noise_multiplier"):
        kind.configured({"noise_multiplyer": 1.0})
    with pytest.raises(BadConfiguration, match="seed is 'one'; it takes a whole number"):
        kind.configured({"seed": "one"})
    with pytest.raises(BadConfiguration, match="noise_multiplier is True; it takes a number"):
        kind.configured({"noise_multiplier": True})
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.seed = 1  # type: ignore[misc]


@EVERY
def test_it_asks_exactly_its_plan(
    kind: type[Method], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates: list[Gate] = []
    real = Gate.__init__

    def remember(self: Gate, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        gates.append(self)

    monkeypatch.setattr(Gate, "__init__", remember)
    method = small(kind)
    release = fixed_fit(method, few(), tmp_path / "l.jsonl")
    (gate,) = gates
    assert set(gate._left.values()) == {0}, "some planned queries were never asked"
    assert release.statement.events == method.plan(few().public).events(few().public)
    assert release.recipe == method.recipe()


@EVERY
def test_the_statement_is_the_price(kind: type[Method], tmp_path: Path) -> None:
    method, data = small(kind), few()
    release = fixed_fit(method, data, tmp_path / "l.jsonl")
    assert release.statement.epsilon == method.epsilon(data.public)
    assert release.statement.departures[: len(kind.departures)] == kind.departures
    assert release.statement.secret_known
    assert not release.statement.private


@EVERY
def test_calibration_keeps_within_the_budget(kind: type[Method]) -> None:
    public = few().public
    if small(kind).plan(public)[0].query.noise_multiplier == 0:
        assert math.isinf(small(kind).epsilon(public))
        return
    for accountant_free_budget in (Budget(1.0), Budget(8.0, 1e-6)):
        method = small(kind).calibrated(public, accountant_free_budget)
        spent = method.epsilon(public, accountant_free_budget.delta, Accountant.PLD)
        assert 0.99 * accountant_free_budget.epsilon <= spent <= accountant_free_budget.epsilon


@EVERY
def test_without_noise_nothing_is_claimed(kind: type[Method], tmp_path: Path) -> None:
    release = fit(
        few(), small(kind, noise_multiplier=0.0), ledger=Ledger(tmp_path / "l.jsonl"), engine=CPU
    )
    assert math.isinf(release.statement.epsilon)
    assert release.statement.paragraph().startswith("NOT PRIVATE")


@EVERY
def test_one_record_moves_every_answer_by_at_most_its_bound(
    kind: type[Method], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mechanism-level audit: compare exact sums on neighbours, as far as queries are the same.

    Noise is drawn from the same fixed secret on both sides, and the coins of the records that
    stay are the same, so a non-adaptive method asks the same questions on both.
    """
    sums: list[tuple[float, np.ndarray]] = []
    real = Gate._answer

    def record(self: Gate, query: Query, total: Any) -> Any:
        def remembered(turn: int) -> Any:
            answer = total(turn)
            sums.append((query.bound * (2 if query.unit == "shard" else 1), answer[0].numpy()))
            return answer

        return real(self, query, remembered)

    monkeypatch.setattr(Gate, "_answer", record)
    monkeypatch.setattr("understudy.privacy.ledger.secrets.token_hex", lambda n: "a" * (2 * n))
    method = small(kind)
    fixed_fit(method, few(), tmp_path / "l.jsonl")
    whole, sums[:] = list(sums), []
    fixed_fit(method, few(leave_out=39), tmp_path / "m.jsonl")
    assert len(whole) == len(sums)
    moved = [np.linalg.norm(a[1] - b[1]) / a[0] for a, b in zip(whole, sums, strict=True)]
    assert moved[0] <= 1 + 1e-6
    if not getattr(kind, "adaptive", False):
        assert max(moved) <= 1 + 1e-6


@EVERY
def test_synthesis_needs_the_release_alone(kind: type[Method], tmp_path: Path) -> None:
    release = fit(few(), small(kind), ledger=Ledger(tmp_path / "l.jsonl"), engine=CPU)
    first = synthesise(release, engine=CPU)
    assert torch.equal(first.images, synthesise(release, engine=CPU).images)
    assert first.images.shape[1:] == few().public.shape
    assert torch.isfinite(first.images).all()
    assert set(first.labels.tolist()) == {0, 1}
    assert len(set(first.per_class)) == 1
    save(tmp_path / "release", release, first, source=kind.source)
    loaded, kept = load(tmp_path / "release")
    assert kept is not None
    assert torch.equal(kept.images, first.images)
    assert torch.equal(synthesise(loaded, engine=CPU).images, first.images)
    verification = verify(tmp_path / "release", ledger=Ledger(tmp_path / "l.jsonl"))
    assert verification.not_checked == ()


@EVERY
def test_an_interrupted_measurement_is_taken_up_where_it_stopped(
    kind: type[Method], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill after half the answers: the second run repeats them and pays nothing more."""
    monkeypatch.setattr("understudy.privacy.gate.UNSEEN_SECONDS", -1.0)  # journal each by itself
    method, ledger = small(kind), Ledger(tmp_path / "l.jsonl")
    total = sum(step.times for step in method.plan(few().public))
    drawn: list[int] = []
    real = Gate._answer

    class Killed(BaseException):
        pass

    def count(self: Gate, query: Query, answer: Any) -> Any:
        def counted(turn: int) -> Any:
            if len(drawn) == total // 2 and not died:
                died.append(True)
                raise Killed
            drawn.append(1)
            return answer(turn)

        return real(self, query, counted)

    died: list[bool] = []
    monkeypatch.setattr(Gate, "_answer", count)
    with pytest.raises(Killed):
        fit(few(), method, ledger=ledger, engine=CPU)
    fit(few(), method, ledger=ledger, engine=CPU)
    assert len(drawn) == total
    assert len(ledger.grants()) == 1
    assert not any((tmp_path / "l.jsonl.runs").rglob("*.safetensors"))
