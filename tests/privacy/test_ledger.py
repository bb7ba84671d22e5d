"""The ledger: chained, locked, write-ahead, and never short of what was spent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.fixtures import REPOSITORY, little
from understudy.errors import BudgetExceeded, LedgerError
from understudy.privacy import Accountant, Budget, Event, Ledger, Plan, Query, Step
from understudy.privacy.ledger import keyed_fingerprint, total_epsilon
from understudy.privacy.public import Adjacency

PUBLIC = little(8).public
PRINT = b"some data"
ONE = Budget(1.0)


def plan(noise: float, times: int = 10) -> tuple[Event, ...]:
    query = Query(name="q", bound=1.0, noise_multiplier=noise)
    return Plan(Step(query, times)).events(PUBLIC)


def spend(ledger: Ledger, noise: float, budget: Budget = ONE, **kwargs: object) -> None:
    with ledger.reserve(
        plan(noise),
        by="test",
        recipe={"noise": noise, "n": len(ledger.grants())},
        public=PUBLIC,
        budget=budget,
        fingerprint=PRINT,
        **kwargs,  # type: ignore[arg-type]
    ):
        pass


def test_the_first_budget_is_the_cap_and_the_refusal_says_what_would_work(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.jsonl")
    spend(ledger, 20.0)
    before = ledger.entries()
    with pytest.raises(BudgetExceeded) as refused:
        spend(ledger, 2.0)
    message = str(refused.value)
    assert "asks for epsilon" in message and "of 1 left" in message
    assert "would fit" in message and "10 x Gaussian(2)" in message
    fits = float(message.split("noise_multiplier=")[1].split(" ")[0])
    assert ledger.entries() == before, "a refusal left a trace"
    spend(ledger, fits * 1.01)


def test_the_advice_for_an_empty_ledger_is_exact(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.jsonl", cap=Budget(1.0))
    with pytest.raises(BudgetExceeded, match="noise_multiplier=11.8"):
        spend(ledger, 1.0)


def test_runs_add_up_by_the_renyi_filter(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.jsonl")
    spend(ledger, 20.0, Budget(3.0))
    alone = ledger.spent()
    spend(ledger, 20.0, Budget(3.0))
    assert ledger.spent() == total_epsilon(
        [plan(20.0), plan(20.0)],
        [Accountant.PLD] * 2,
        Budget(3.0),
        adjacency=Adjacency.ADD_OR_REMOVE,
        labels_fixed=False,
    )
    assert ledger.spent() > alone


def test_raising_the_cap_is_itself_a_line(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.jsonl")
    spend(ledger, 20.0)
    ledger.raise_cap(Budget(9.0), by="the data holder")
    spend(ledger, 4.0)
    assert [e["kind"] for e in ledger.entries()] == [
        "created", "reserved", "finished", "cap", "reserved", "finished",
    ]  # fmt: skip


@pytest.mark.parametrize("where", range(0, 2000, 97))
def test_any_flipped_byte_is_noticed(tmp_path: Path, where: int) -> None:
    ledger = Ledger(tmp_path / "l.jsonl")
    spend(ledger, 40.0)
    spend(ledger, 40.0)
    content = bytearray(ledger.path.read_bytes())
    content[where % (len(content) - 1)] ^= 1
    ledger.path.write_bytes(content)
    with pytest.raises(LedgerError, match="damaged"):
        ledger.entries()


def test_a_line_cut_out_of_the_middle_is_noticed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.jsonl")
    spend(ledger, 40.0)
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    ledger.path.write_bytes(b"".join(lines[:1] + lines[2:]))
    with pytest.raises(LedgerError, match="line 2"):
        ledger.entries()


def test_a_torn_last_line_granted_nothing_and_is_dropped(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.jsonl")
    spend(ledger, 40.0)
    whole = ledger.path.read_bytes()
    for cut in (1, 20, 200):
        ledger.path.write_bytes(whole + whole.splitlines()[1][:cut])
        assert len(ledger.entries()) == 3
    spend(ledger, 40.0)
    assert len(ledger.entries()) == 5


def test_other_records_and_other_terms_are_refused(tmp_path: Path) -> None:
    import dataclasses

    ledger = Ledger(tmp_path / "l.jsonl")
    spend(ledger, 40.0)
    for changed, fingerprint, message in (
        (PUBLIC, b"other data", "belongs to other records"),
        (dataclasses.replace(PUBLIC, adjacency=Adjacency.REPLACE), PRINT, "adjacency"),
        (dataclasses.replace(PUBLIC, unit="one patient"), PRINT, "unit"),
        (dataclasses.replace(PUBLIC, labels="public"), PRINT, "labels"),
    ):
        with pytest.raises(LedgerError, match=message):
            with ledger.reserve(
                plan(40.0),
                by="test",
                recipe={},
                public=changed,
                budget=Budget(1.0),
                fingerprint=fingerprint,
            ):
                pass


def test_the_same_records_meet_the_same_ledger_whatever_order_or_labels(state: Path) -> None:
    import numpy as np

    from tests.fixtures import private

    images = np.random.default_rng(0).integers(0, 256, (20, 1, 3, 3)).astype(np.uint8)
    order = np.random.default_rng(1).permutation(20)
    first = private(images, np.arange(20) % 2).ledger().path
    assert private(images[order], np.arange(20) % 4).ledger().path == first
    assert first.is_relative_to(state)
    assert private(images[1:], np.arange(19) % 2).ledger().path != first


def test_the_fingerprint_is_keyed(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = keyed_fingerprint(PRINT)
    assert keyed_fingerprint(PRINT) == name
    assert (state / "fingerprint.key").stat().st_mode & 0o077 == 0
    monkeypatch.setenv("UNDERSTUDY_STATE", str(state / "somebody else"))
    assert keyed_fingerprint(PRINT) != name


def test_a_live_run_is_not_taken_up_by_another(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.jsonl")

    def start():  # type: ignore[no-untyped-def]
        return ledger.reserve(
            plan(60.0),
            by="t",
            recipe={},
            public=PUBLIC,
            budget=Budget(2.0),
            fingerprint=PRINT,
        )

    with start() as first, start() as second:
        assert first.id != second.id
    assert len(ledger.grants()) == 2


class LedgerMachine(RuleBasedStateMachine):
    """Random reservations against a model: a plain list of what was granted."""

    @initialize(folder=st.uuids())
    def begin(self, folder: object) -> None:
        import tempfile

        self.ledger = Ledger(Path(tempfile.mkdtemp()) / f"{folder}.jsonl", cap=Budget(2.0))
        self.granted: list[tuple[Event, ...]] = []
        self.cap = 2.0

    @rule(noise=st.sampled_from([3.0, 6.0, 12.0, 25.0, 60.0]))
    def reserve(self, noise: float) -> None:
        events = plan(noise)
        total = self.price([*self.granted, events])
        try:
            spend(self.ledger, noise)
        except BudgetExceeded:
            assert total > self.cap
        else:
            assert total <= self.cap * (1 + 1e-9)
            self.granted.append(events)

    @rule(cap=st.floats(0.5, 4.0))
    def change_cap(self, cap: float) -> None:
        if self.granted:
            self.ledger.raise_cap(Budget(cap), by="test")
            self.cap = cap

    @rule(junk=st.binary(min_size=1, max_size=40))
    def tear(self, junk: bytes) -> None:
        if self.ledger.path.exists() and b"\n" not in junk and junk.isascii():
            with open(self.ledger.path, "ab") as file:
                file.write(junk)

    @invariant()
    def never_short(self) -> None:
        if hasattr(self, "ledger"):
            assert self.ledger.spent() == pytest.approx(self.price(self.granted))

    def price(self, groups: list[tuple[Event, ...]]) -> float:
        return total_epsilon(
            groups,
            [Accountant.PLD] * len(groups),
            Budget(self.cap),
            adjacency=Adjacency.ADD_OR_REMOVE,
            labels_fixed=False,
        )


LedgerMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase


def run_script(name: str, *arguments: str) -> dict[str, object]:
    """Run a helper program that forks processes, and read its last line."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.privacy.{name}", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_killed_at_120_random_instants_nothing_is_under_recorded(tmp_path: Path) -> None:
    """See kill_at_random.py for what is checked after each kill."""
    result = run_script("kill_at_random", str(tmp_path / "l.jsonl"), "120")
    assert result["kills"] == 120
    assert int(str(result["killed while answering"])) >= 30
    assert result["violations"] == []


def test_sixteen_processes_never_overspend_one_budget(tmp_path: Path) -> None:
    """See race.py: 16 processes, a budget for exactly five runs."""
    result = run_script("race", str(tmp_path / "l.jsonl"), "16")
    assert result["granted"] == result["affordable"] == 5
    assert float(str(result["spent"])) <= float(str(result["cap"]))


def test_a_full_disk_grants_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import os

    ledger = Ledger(tmp_path / "l.jsonl")
    spend(ledger, 40.0)
    before = ledger.entries()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(LedgerError, match="No space left"):
            spend(ledger, 40.0)
    # The line may or may not have reached the disk; the run was refused either way, and what is
    # recorded is never less than what was granted.
    assert ledger.entries()[: len(before)] == before
    spend(ledger, 80.0)
