"""The statement: true to the ledger, readable, and reproducible from its own numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.fixtures import little
from understudy.methods import LDPDC
from understudy.privacy import Accountant, Budget, Ledger, Statement
from understudy.run import fit

SMALL = LDPDC(images_per_class=3, group_size=5.0)


def test_it_survives_json_and_recomputes(tmp_path: Path) -> None:
    statement = fit(
        little(), SMALL, budget=Budget(1.0), ledger=Ledger(tmp_path / "l.jsonl")
    ).statement
    again = Statement.from_json(json.loads(json.dumps(statement.to_json())))
    assert again.to_json() == statement.to_json()
    assert again.markdown() == statement.markdown()
    assert again.recompute() == statement.epsilon <= 1.0
    assert again.recompute(Accountant.RDP) > statement.epsilon
    assert statement.private


def test_it_explains_itself(tmp_path: Path) -> None:
    statement = fit(
        little(), SMALL, budget=Budget(1.0), ledger=Ledger(tmp_path / "l.jsonl")
    ).statement
    words = statement.paragraph()
    for part in ("differentially private", "2.72", "1e-05", "3 noisy answers", "one record"):
        assert part in words
    page = statement.markdown()
    for part in (statement.ledger_line, "add-or-remove", "sum of a group", "declared public"):
        assert part in page
    for departure in LDPDC.departures:
        assert departure in page


def test_earlier_runs_are_told_and_added_up(tmp_path: Path) -> None:
    data, ledger = little(), Ledger(tmp_path / "l.jsonl", cap=Budget(10.0))
    first = fit(data, SMALL, budget=Budget(1.0), ledger=ledger).statement
    second = fit(data, SMALL, budget=Budget(1.0), ledger=ledger).statement
    assert first.total_epsilon == first.epsilon
    assert len(second.earlier) == 1
    assert second.total_epsilon == pytest.approx(ledger.spent())
    assert second.total_epsilon > 1.2
    assert "1 earlier run" in second.paragraph()


def test_private_class_sizes_are_measured_and_paid_for(tmp_path: Path) -> None:
    data = little(400, counts=None)
    release = fit(data, SMALL, budget=Budget(2.0), ledger=Ledger(tmp_path / "l.jsonl"))
    statement = release.statement
    assert statement.class_sizes == "measured"
    assert [event.name for event in statement.events] == ["class sizes", "sum of a group"]
    assert statement.stages == (1, 1)
    assert statement.accountant is Accountant.RDP
    assert 1.9 < statement.epsilon <= 2.0
    assert statement.earlier == ()
    assert statement.total_epsilon == statement.epsilon
    assert all(abs(count - 200) < 200 for count in release.public.sizes)


def test_a_huge_epsilon_can_still_be_told(tmp_path: Path) -> None:
    statement = fit(
        little(),
        LDPDC(noise_multiplier=0.01, images_per_class=3, group_size=5.0),
        ledger=Ledger(tmp_path / "l.jsonl"),
    ).statement
    assert statement.epsilon > 700
    assert math.isfinite(statement.epsilon)
    assert "1e+" in statement.paragraph()


@pytest.mark.parametrize(
    ("epsilon", "told"), [(0.001, "1.00101"), (0.05, "1.0513"), (1.0, "2.72"), (8.0, "2,981")]
)
def test_the_factor_is_told_in_full_and_never_below_itself(epsilon: float, told: str) -> None:
    from understudy.privacy.statement import _factor

    assert _factor(epsilon) == told
    assert float(told.replace(",", "")) >= math.exp(epsilon)
