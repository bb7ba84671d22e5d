"""A run resumes, records failures, keeps to its time and says where figures come from."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from tests.bench import dying
from understudy.bench import runner
from understudy.bench.cells import RELEASED, Bar, Cell
from understudy.bench.checks import check
from understudy.bench.lines import append, latest, read
from understudy.bench.runner import families, measure, up_to_date
from understudy.engine import Engine
from understudy.errors import BadConfiguration, DataError
from understudy.methods import LDPDC, PSG
from understudy.privacy.accounting import Accountant, Budget, epsilon
from understudy.privacy.events import Event
from understudy.privacy.gate import Gate
from understudy.privacy.public import Adjacency

QUICK = Cell(
    method="ldpdc",
    dataset="digits",
    values={"noise_multiplier": 2.0, "group_size": 40.0},
    images_per_class=3,
    networks=("logistic",),
)
OTHER = dataclasses.replace(QUICK, repeat=1)
BROKEN = dataclasses.replace(QUICK, values={"group_size": -1.0})


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "bench.jsonl"


def digests(results: Path) -> list[str]:
    return [line["cell"] for line in read(results)]


class TestResume:
    def test_measures_what_is_missing_and_nothing_else(self, results: Path) -> None:
        assert measure([QUICK], results, device="cpu").done == 1
        outcome = measure([QUICK, OTHER], results, device="cpu")
        assert (outcome.done, outcome.skipped) == (1, 1)
        assert digests(results) == [QUICK.digest, OTHER.digest]
        outcome = measure([QUICK, OTHER], results, device="cpu")
        assert (outcome.done, outcome.skipped, outcome.failed, outcome.left) == (0, 2, 0, 0)

    def test_measures_anew_when_told_to(self, results: Path) -> None:
        measure([QUICK], results, device="cpu")
        outcome = measure([QUICK], results, device="cpu", again=True)
        assert (outcome.done, outcome.skipped) == (1, 0)
        assert digests(results) == [QUICK.digest] * 2

    def test_measures_anew_what_a_preset_has_changed(
        self, results: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        measure([QUICK], results, device="cpu")
        changed = LDPDC(**{**QUICK.values, "images_per_class": 3, "group_size": 30.0})
        monkeypatch.setattr(Cell, "configured", lambda cell: changed)
        assert measure([QUICK], results, device="cpu").done == 1
        rows = read(results)
        assert [row["configuration"]["group_size"] for row in rows] == [40.0, 30.0]
        assert up_to_date(QUICK, rows[1]) and not up_to_date(QUICK, rows[0])

    def test_a_field_that_came_later_counts_as_if_it_had_had_its_default(
        self, results: Path
    ) -> None:
        measure([QUICK], results, device="cpu")
        (row,) = read(results)
        assert up_to_date(QUICK, row)
        defaults = LDPDC()
        for name, value in row["configuration"].items():
            earlier = {**row, "configuration": {**row["configuration"]}}
            del earlier["configuration"][name]
            same = name == "images_per_class" or getattr(defaults, name) == value
            assert up_to_date(QUICK, earlier) == same, name

    def test_measures_a_cell_of_two_suites_once(self, results: Path) -> None:
        again = dataclasses.replace(QUICK, row="in another table")
        assert measure([QUICK, again], results, device="cpu").done == 1

    def test_lines_are_there_before_the_next_cell_begins(self, results: Path) -> None:
        seen = []

        def told(line: Any) -> None:
            seen.append(digests(results))
            if len(seen) == 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            measure([QUICK, OTHER], results, device="cpu", told=told)
        assert seen == [[QUICK.digest]]
        assert measure([QUICK, OTHER], results, device="cpu").done == 1

    def test_a_release_that_was_killed_is_taken_up_where_it_was(
        self, results: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        values = {k: v for k, v in PSG.miniature.items() if k != "images_per_class"}
        cell = dataclasses.replace(QUICK, method="psg", values=values, images_per_class=2)
        asked: list[int] = []
        real = Gate._answer

        def answer(self: Gate, query: Any, total: Any) -> Any:
            def counted(turn: int) -> Any:
                asked.append(turn)
                if len(asked) == 6:
                    raise KeyboardInterrupt
                return total(turn)

            return real(self, query, counted)

        monkeypatch.setattr(Gate, "_answer", answer)
        with pytest.raises(KeyboardInterrupt):
            measure([cell], results, device="cpu")
        assert measure([cell], results, device="cpu").done == 1
        assert sorted(set(asked)) == list(range(8)) and len(asked) <= 10, asked
        assert list(results.parent.iterdir()) == [results], "nothing is left of the ledger"


class TestFailure:
    def test_is_recorded_and_stops_nothing(self, results: Path) -> None:
        outcome = measure([BROKEN, QUICK], results, device="cpu")
        assert (outcome.failed, outcome.done) == (1, 1)
        failed, done = read(results)
        assert failed["status"] == "failed"
        assert "group_size must be positive" in failed["error"]
        assert failed["declared"] == BROKEN.to_json()
        assert done["status"] == "done"

    def test_is_tried_again(self, results: Path) -> None:
        measure([BROKEN], results, device="cpu")
        assert measure([BROKEN], results, device="cpu").failed == 1

    def test_of_a_fit_is_not_repeated_for_cells_that_share_it(
        self, results: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fits = []

        def fit(*_: Any, **__: Any) -> None:
            fits.append(1)
            raise MemoryError("too large")

        monkeypatch.setattr(runner.run, "fit", fit)
        cells = [dataclasses.replace(QUICK, seeds=(seed,)) for seed in range(3)]
        assert measure(cells, results, device="cpu").failed == 3
        assert len(fits) == 1
        assert {line["error"] for line in read(results)} == {"MemoryError: too large"}

    def test_says_that_a_method_is_missing(self, results: Path) -> None:
        measure([dataclasses.replace(QUICK, method="dp-gan")], results, device="cpu")
        (line,) = read(results)
        assert "There is no method 'dp-gan'" in line["error"]


def test_after_the_time_no_cell_is_begun(results: Path) -> None:
    outcome = measure([QUICK, OTHER], results, device="cpu", minutes=0)
    assert (outcome.done, outcome.left) == (0, 2)
    assert read(results) == []
    assert measure([QUICK, OTHER], results, device="cpu", minutes=60).done == 2


class TestLine:
    def test_says_what_was_measured_where_and_how(self, results: Path, state: Path) -> None:
        cell = dataclasses.replace(QUICK, networks=("logistic", "mlp"), seeds=(4, 5),
                                   protocol="quick", training={"epochs": 2, "lr_drop": 1})  # fmt: skip
        measure([cell], results, device="cpu", command="understudy bench x")
        (line,) = read(results)
        assert line["cell"] == cell.digest
        assert line["declared"] == json.loads(json.dumps(cell.to_json()))
        assert line["command"] == "understudy bench x"
        assert line["configuration"]["group_size"] == 40.0
        assert line["records"] == sum(line["class_sizes"]) == 1438
        assert line["synthetic_records"] == 30
        assert line["machine"]["device"] == "cpu"
        told = {"version", "commit", "source_sha256", "python", "threads", "configuration_sha256"}
        assert told <= set(line)
        assert line["started"] <= line["finished"]
        assert line["peak_memory_bytes"] > 50 * 2**20
        assert set(line["scores"]) == {"logistic", "mlp"}
        for score in line["scores"].values():
            assert score["seeds"] == [4, 5]
            right = [sum(m[i][i] for i in range(10)) / 359 for m in score["confusions"]]
            assert score["accuracies"] == pytest.approx(right)
        assert line["scores"]["mlp"]["settings"]["epochs"] == 2
        assert not list(state.rglob("*ledger*"))  # it was thrown away

    def test_prices_the_recorded_events(self, results: Path) -> None:
        measure([QUICK], results, device="cpu")
        (line,) = read(results)
        events = [Event.from_json(event) for event in line["events"]]
        assert line["queries"] == sum(event.times for event in events) == 3
        for key, accountant in (("epsilon", Accountant.PLD), ("epsilon_rdp", Accountant.RDP)):
            price = epsilon(events, 1e-5, adjacency=Adjacency.ADD_OR_REMOVE, accountant=accountant)
            assert line[key] == pytest.approx(price)

    def test_keeps_to_the_budget(self, results: Path) -> None:
        cell = Cell(method="whole-set", dataset="digits", preset="small", epsilon=2.0,
                    networks=("logistic",), after={"steps": 5})  # fmt: skip
        measure([cell], results, device="cpu")
        (line,) = read(results)
        assert 1.99 < line["epsilon"] <= 2.0
        assert line["configuration"]["noise_multiplier"] < 3.7307  # that of epsilon 1

    def test_writes_infinity_as_a_word(self, results: Path) -> None:
        measure([dataclasses.replace(QUICK, epsilon=math.inf)], results, device="cpu")
        (line,) = read(results)
        assert line["epsilon"] == "inf"
        assert line["declared"]["epsilon"] == "inf"

    def test_tests_the_network_a_trainer_released(self, results: Path) -> None:
        cell = Cell(
            method="dp-sgd",
            dataset="digits",
            values={
                "network": "linear",
                "sampling_rate": 1.0,
                "steps": 2,
                "noise_multiplier": 12.0,
            },
            networks=(RELEASED,),
        )
        measure([cell], results, device="cpu")
        (line,) = read(results)
        assert line["status"] == "done", line["error"]
        assert line["synthetic_records"] is None
        assert line["scores"][RELEASED]["tested"] == 359


class TestSharedRelease:
    def test_sizes_of_a_matching_method_come_from_one_measurement(
        self, results: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fits = []
        fit = runner.run.fit
        monkeypatch.setattr(runner.run, "fit", lambda *a, **k: fits.append(1) or fit(*a, **k))
        small = Cell(
            method="whole-set",
            dataset="digits",
            preset="small",
            values={"noise_multiplier": 1.0},
            networks=("logistic",),
            images_per_class=2,
            after={"steps": 20},
        )
        large = dataclasses.replace(small, images_per_class=4)
        measure([small, large], results, device="cpu")
        first, second = read(results)
        assert len(fits) == 1
        assert (first["synthetic_records"], second["synthetic_records"]) == (20, 40)
        assert first["release_of"] == second["release_of"] == small.digest
        assert first["events"] == second["events"]

    def test_sets_that_are_measured_themselves_are_not_shared(self) -> None:
        larger = dataclasses.replace(QUICK, images_per_class=4)
        other_judge = dataclasses.replace(QUICK, networks=("mlp",))
        assert families([QUICK, larger, other_judge]) == [(QUICK, other_judge), (larger,)]


class TestProcesses:
    def test_refuses_more_than_the_cpu_has_threads(self, results: Path) -> None:
        with pytest.raises(BadConfiguration, match="threads to share"):
            measure([QUICK], results, device="cpu", jobs=1000)

    def test_work_beside_each_other(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runner, "_work", dying.reports_all)
        lines = list(runner._beside([(QUICK,), (OTHER,)], "cpu", 2, None, tmp_path))
        assert {line["cell"] for line in lines} == {QUICK.digest, OTHER.digest}
        assert len({line["process"] for line in lines} - {os.getpid()}) == 2

    def test_that_die_are_failures_of_what_they_had_not_reported(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(runner, "_work", dying.reports_one_then_is_killed)
        lines = list(runner._beside([(QUICK, OTHER)], "cpu", 1, None, tmp_path))
        assert [line["status"] for line in lines] == ["done", "failed"]
        assert lines[1]["cell"] == OTHER.digest
        assert "killed" in lines[1]["error"]

    def test_begin_nothing_after_the_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(runner, "_work", dying.reports_all)
        assert list(runner._beside([(QUICK,)], "cpu", 1, 1.0, tmp_path)) == []

    def test_send_what_they_measure(self, tmp_path: Path) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        runner._work(theirs, [QUICK], "cpu", None, tmp_path, 1)
        assert ours.recv()["status"] == "done"


class TestLines:
    def test_cut_short_by_a_crash_cost_one_line(self, results: Path) -> None:
        append(results, {"cell": "a", "status": "done"})
        append(results, {"cell": "b", "status": "done", "long": "x" * 100})
        whole = results.read_bytes()
        results.write_bytes(whole[:-20])
        assert digests(results) == ["a"]
        append(results, {"cell": "c", "status": "done"})
        assert digests(results) == ["a", "c"]

    def test_that_were_edited_into_nonsense_are_refused(self, results: Path) -> None:
        append(results, {"cell": "a", "status": "done"})
        results.write_text('{"cell": a}\n' + results.read_text())
        with pytest.raises(DataError, match="line 1"):
            read(results)

    def test_of_other_benchmarks_are_passed_over(self, results: Path) -> None:
        append(results, {"cell": "a", "status": "done"})
        with results.open("a") as file:
            file.write('{"benchmark": "gate_memory"}\n')
        assert digests(results) == ["a"]

    def test_the_last_measurement_stands_and_not_the_best(self) -> None:
        lines = [
            {"cell": "a", "status": "done", "accuracy": 90},
            {"cell": "a", "status": "done", "accuracy": 80},
            {"cell": "b", "status": "failed"},
            {"cell": "a", "status": "failed"},
        ]
        standing = latest(lines)
        assert standing["a"]["accuracy"] == 80
        assert standing["b"]["status"] == "failed"


def scored(cell: Cell, accuracy: float, **more: Any) -> dict[str, Any]:
    scores = {cell.networks[0]: {"accuracy": accuracy, "balanced_accuracy": accuracy / 2}}
    return {"status": "done", "scores": scores, "queries": 3, "epsilon": 1.0, **more}


class TestCheck:
    @pytest.mark.parametrize(
        ("bar", "line", "met"),
        [
            ({"least": 80.0}, {}, True),
            ({"least": 90.1}, {}, False),
            ({"most": 89.9}, {}, False),
            ({"least": 44.0, "most": 46.0, "balanced": True}, {}, True),
            ({"queries": 3}, {}, True),
            ({"queries": 3}, {"queries": 4}, False),
            ({"epsilon": 1.005}, {}, True),
            ({"epsilon": 1.02}, {}, False),
            ({}, {"epsilon": 1.01}, False),
            ({}, {"epsilon": "inf"}, False),
        ],
        ids=str,
    )
    def test_holds_figures_queries_and_price_to_the_bar(
        self, bar: dict[str, Any], line: dict[str, Any], met: bool
    ) -> None:
        cell = dataclasses.replace(QUICK, epsilon=1.0, bar=bar_of(**bar))
        (found,) = check([cell], {cell.digest: scored(cell, 0.9, **line)})
        assert found.met is met

    def test_takes_the_mean_over_repeats(self) -> None:
        cells = [dataclasses.replace(c, bar=bar_of(least=80.0)) for c in (QUICK, OTHER)]
        lines = {cells[0].digest: scored(cells[0], 0.85), cells[1].digest: scored(cells[1], 0.76)}
        (found,) = check(cells, lines)
        assert found.met
        lines[cells[1].digest] = scored(cells[1], 0.74)
        (found,) = check(cells, lines)
        assert not found.met

    def test_a_failure_is_a_miss_and_a_gap_is_none(self) -> None:
        cell = dataclasses.replace(QUICK, bar=bar_of(least=1.0))
        (found,) = check([cell], {cell.digest: {"status": "failed", "error": "E: x"}})
        assert found.met is False
        (found,) = check([cell], {})
        assert found.met is None


def bar_of(**declared: Any) -> Bar:
    return Bar(source="a test", **declared)


def test_the_budget_is_none_without_an_epsilon() -> None:
    assert QUICK.budget is None
    assert dataclasses.replace(QUICK, epsilon=1).budget == Budget(1.0, 1e-5)


def test_an_engine_is_asked_before_anything_runs(results: Path) -> None:
    with pytest.raises(BadConfiguration):
        measure([QUICK], results, device="no such device")
    assert Engine(device="cpu")
    assert not results.exists()
