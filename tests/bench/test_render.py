"""The page shows every declared cell, explains gaps and says where figures come from."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from understudy.bench.cells import Bar, Cell, Reference, Suite, repeated
from understudy.bench.figures import Curve, Pair, curves, pairs
from understudy.bench.lines import append, latest, read
from understudy.bench.render import Entry, entries, render, write
from understudy.bench.runner import up_to_date
from understudy.bench.suites import SUITES
from understudy.privacy.accounting import Accountant

PAPER = Reference(figure=90.0, source="Paper, Table 1", spread=0.5)
CELLS = tuple(
    repeated(2, 3, method="ldpdc", dataset="mnist", row="ours", column="mnist", references=(PAPER,))
)
SUITE = Suite(name="s", title="A table", told="Two releases.", cells=CELLS)


def line(cell: Cell, *accuracies: float, **more: Any) -> dict[str, Any]:
    score = {
        "accuracy": sum(accuracies) / len(accuracies),
        "accuracies": list(accuracies),
        "balanced_accuracy": 0.5,
        "chance": 0.1,
        "seeds": list(range(len(accuracies))),
    }
    return {
        "cell": cell.digest,
        "status": "done",
        "scores": dict.fromkeys(cell.networks, score),
        "class_sizes": [10] * 10,
        "epsilon": 0.5,
        "epsilon_rdp": 1.1,
        "seconds": {"fit": 1.0, "evaluate": 2.0},
        "peak_memory_bytes": 2**20,
        "machine": {"device": "cuda:0", "hardware": "a card", "torch": "2.13"},
        "threads": 1,
        "commit": "abc123",
        "source_sha256": "ffff",
        "command": "understudy bench s",
        "finished": "2026-11-18T10:00:00+00:00",
        **more,
    }


def failed(cell: Cell, error: str) -> dict[str, Any]:
    return {**line(cell, 0.5), "status": "failed", "error": error}


def page(*lines: dict[str, Any], suite: Suite = SUITE, **more: Any) -> str:
    return render({suite.name: suite}, lines, **more)


class TestNotMeasured:
    def test_is_said_of_every_cell_of_every_suite(self) -> None:
        text = render(SUITES, [])
        for suite in SUITES.values():
            assert suite.title in text
            for entry in entries(suite, {}):
                assert f"| {entry.row} |" in text or entry.cell.measures != "accuracy"
        declared = sum(len(entries(suite, {})) for suite in SUITES.values())
        assert text.count("not measured") >= declared

    def test_names_the_published_figure_and_the_bar_all_the_same(self) -> None:
        suite = dataclasses.replace(
            SUITE, cells=(dataclasses.replace(CELLS[0], bar=Bar(least=80.0, source="x")),)
        )
        assert "not measured; paper 90 ± 0.5; must be at least 80" in page(suite=suite)

    def test_says_where_else_a_table_is_measured(self) -> None:
        suite = Suite(name="e", title="Elsewhere", told="x", elsewhere="benchmarks/other.py")
        assert "Measured by `python benchmarks/other.py`" in page(suite=suite)

    def test_a_release_that_is_missing_is_counted(self) -> None:
        assert "**88.0** ± 2.5 (1 of 2 x 3)" in page(line(CELLS[0], 0.87, 0.88, 0.89))


class TestFigure:
    def test_of_two_releases_shows_both(self) -> None:
        text = page(line(CELLS[0], 0.88), line(CELLS[1], 0.90))
        assert "**89.0** (88.0 and 90.0; 2 x 1)" in text

    def test_has_the_interval_over_releases(self) -> None:
        cells = tuple(repeated(4, 2, method="ldpdc", dataset="mnist", row="r"))
        accuracies = (0.90, 0.91, 0.93, 0.94)
        lines = [line(c, a - 0.02, a + 0.02) for c, a in zip(cells, accuracies)]
        (entry,) = entries(Suite(name="s", title="t", cells=cells), {x["cell"]: x for x in lines})
        low, high = stats.t.interval(
            0.95, 3, loc=92.0, scale=stats.sem([100 * a for a in accuracies])
        )
        assert entry.mean() == pytest.approx(92.0)
        assert entry.half_interval == pytest.approx((high - low) / 2)

    def test_is_the_last_measurement(self) -> None:
        text = page(line(CELLS[0], 0.99), line(CELLS[0], 0.88))
        assert "**88.0**" in text
        assert "99.0" not in text

    def test_shows_what_the_papers_noise_costs_here(self) -> None:
        assert "epsilon 0.5 (Renyi 1.10)" in page(line(CELLS[0], 0.9))

    def test_shows_balanced_accuracy_where_classes_are_uneven(self) -> None:
        uneven = line(CELLS[0], 0.9, class_sizes=[65, 35])
        uneven["scores"]["convnet"]["chance"] = 0.65
        assert "balanced 50.0" in page(uneven)
        assert "balanced" not in page(line(CELLS[0], 0.9))

    def test_of_a_cell_with_several_networks_has_a_column_each(self) -> None:
        cell = dataclasses.replace(
            CELLS[0],
            networks=("mlp", "lenet"),
            references=(Reference(figure=70.0, source="p", network="lenet"),),
        )
        text = page(suite=dataclasses.replace(SUITE, cells=(cell,)))
        assert "| | mlp | lenet |" in text
        assert "| ours | not measured | not measured; paper 70 |" in text

    def test_a_failure_is_shown_with_its_error(self) -> None:
        text = page(failed(CELLS[0], "OutOfMemoryError: 80 GiB"))
        assert "| ours | failed; paper 90 ± 0.5 |" in text
        assert "OutOfMemoryError: 80 GiB" in text


class TestGap:
    @pytest.mark.parametrize(("accuracy", "side"), [(0.85, "below"), (0.95, "above")])
    def test_over_two_points_asks_for_a_reason(self, accuracy: float, side: str) -> None:
        text = page(line(CELLS[0], accuracy))
        assert f"ours, mnist: 5.0 points {side} the paper: not explained yet." in text

    def test_over_two_points_has_the_declared_reason(self) -> None:
        reasons = {("s", "ours", "mnist"): "fewer iterations, as measured in x"}
        text = page(line(CELLS[0], 0.85), reasons=reasons)
        assert "5.0 points below the paper: fewer iterations, as measured in x." in text
        assert "not explained yet" not in text

    def test_of_two_points_needs_none(self) -> None:
        text = page(line(CELLS[0], 0.881))
        assert "gap -1.9" in text
        assert "not explained" not in text

    def test_below_a_bar_is_told(self) -> None:
        cell = dataclasses.replace(CELLS[0], bar=Bar(least=90.0, source="x"))
        suite = dataclasses.replace(SUITE, cells=(cell,))
        assert "must be at least 90: **misses by 1.5**" in page(line(cell, 0.885), suite=suite)
        assert "must be at least 90: holds" in page(line(cell, 0.91), suite=suite)

    def test_bars_of_balanced_accuracy_are_held_to_it(self) -> None:
        cell = dataclasses.replace(CELLS[0], bar=Bar(least=60.0, balanced=True, source="x"))
        suite = dataclasses.replace(SUITE, cells=(cell,))
        text = page(line(cell, 0.9), suite=suite)
        assert "must be balanced at least 60: **misses by 10.0**" in text


def test_provenance_is_told_once_for_what_was_measured_together() -> None:
    text = page(line(CELLS[0], 0.9), line(CELLS[1], 0.9, seconds={"fit": 300.0}))
    assert "    understudy bench s" in text
    assert (
        "- 2 cells: `understudy bench s`, commit abc123, cuda:0, a card, 1 thread, torch 2.13, "
        "2026-11-18; 3 s to 5 min a cell, at most 1 MiB."
    ) in text


def test_code_without_a_commit_is_told_by_its_digest() -> None:
    assert "source ffff" in page(line(CELLS[0], 0.9, commit=None))


def test_no_gpu_is_told_until_there_was_one() -> None:
    cpu = line(CELLS[0], 0.9)
    cpu["machine"] = {**cpu["machine"], "device": "cpu"}
    assert "No GPU was at hand" in page(cpu)
    assert "No GPU was at hand" not in page(cpu, line(CELLS[1], 0.9))


class TestErrorCurves:
    cell = Cell(method="dosser", dataset="mnist", measures="subspace error", row="r", column="m")
    suite = Suite(name="f", title="Curves", told="x", cells=(cell,))

    def measured(self) -> dict[str, Any]:
        return {
            **line(self.cell, 0.9),
            "features": 100,
            "dimensions": [10, 50],
            "residuals": [[3e-6, 1e-6], [5e-6, 1e-6]],
        }

    def test_add_the_noise_of_the_directions_that_are_kept(self) -> None:
        text = page(self.measured(), suite=self.suite)
        # Noise 4e-4: alone 1.6e-7 a coordinate; in 10 directions (10 x 1.6e-7 + 4e-6) / 100,
        # in 50 (50 x 1.6e-7 + 1e-6) / 100 = 9e-8.
        assert "| m | 0.0004 | 1.6e-07 | 5.6e-08 | 10 |" in text

    def test_are_drawn_and_missing_ones_said_to_be(self) -> None:
        drawn: dict[str, str] = {}
        page(self.measured(), suite=self.suite, drawn=drawn)
        assert set(drawn) == {"f.svg"}
        assert "| m | | not measured | not measured | |" in page(suite=self.suite)


class TestDrawing:
    def test_gives_the_same_bytes_again(self) -> None:
        shown = [Pair("a & <b>", 90.0, 1.0, 88.0), Pair("c", 80.0, 0.0, None)]
        assert pairs("t", shown) == pairs("t", shown)

    @pytest.mark.parametrize(
        "svg",
        [
            pairs("t", [Pair("a & <b>", 90.0, 1.0, 88.0)]),
            curves("t", "x", "y", [Curve("c", (1.0, 2.0), (1e-4, 1e-5), 1e-3)]),
        ],
    )
    def test_is_a_well_formed_picture(self, svg: str) -> None:
        assert ElementTree.fromstring(svg).tag.endswith("svg")


def test_writes_the_page_and_its_figures(tmp_path: Path) -> None:
    cells = [cell for cell in SUITES["dpdc-1"].cells if cell.method == "ldpdc"]
    for cell in cells[:6]:
        append(tmp_path / "results" / "bench.jsonl", line(cell, 0.85))
    write(tmp_path / "results" / "bench.jsonl", tmp_path / "docs" / "results.md")
    text = (tmp_path / "docs" / "results.md").read_text()
    assert "](figures/dpdc-1.svg)" in text
    assert (tmp_path / "docs" / "figures" / "dpdc-1.svg").stat().st_size > 1000


def test_shows_the_last_time_of_each_measurement_beside_the_plain_one() -> None:
    def timed(ours: float) -> dict[str, Any]:
        return {
            "measurement": "a step",
            "hardware": "a card",
            "ms": {"ours": ours, "plain": 60.0},
            "times_as_fast": {"plain": 60.0 / ours},
            "peak_memory_bytes": {"ours": 2**20, "plain": 2**21},
            "roofline": {"fraction": 0.25, "bound_by": "traffic"},
            "torch": "2",
            "command": "python step.py",
        }

    text = render({}, [], speed=[timed(4.0), timed(2.0)])
    assert "| a step | 2 ms | plain: 60 ms | 30.0 | 1 / 2 MiB | 25% of traffic |" in text
    assert "- torch 2, python step.py" in text
    assert "4 ms" not in text


class TestCommitted:
    root = Path(__file__).parents[2]
    results = root / "benchmarks" / "results" / "bench.jsonl"

    def test_page_is_what_the_lines_say(self, tmp_path: Path) -> None:
        page = tmp_path / "results.md"
        # The file of the gate's memory lies beside the lines.
        write(self.results, page)
        committed = (self.root / "docs" / "results.md").read_text()
        assert page.read_text() == committed, "run: understudy bench --render"

    def test_lines_measure_what_their_cells_mean_today(self) -> None:
        declared = {cell.digest: cell for suite in SUITES.values() for cell in suite.cells}
        for digest, row in latest(read(self.results)).items():
            assert row["status"] == "failed" or up_to_date(declared[digest], row), row["declared"]

    def test_lines_belong_to_declared_cells_and_hold_together(self) -> None:
        declared = {cell.digest: cell for suite in SUITES.values() for cell in suite.cells}
        for row in read(self.results):
            assert row["cell"] in declared
            assert row["declared"] == declared[row["cell"]].to_json()
            if row["status"] == "done" and "events" in row:
                assert row["queries"] == sum(event["times"] for event in row["events"])
                assert row["accountant"] in [a.value for a in Accountant]
            for score in row.get("scores", {}).values():
                for accuracy, matrix in zip(score["accuracies"], score["confusions"]):
                    right = sum(matrix[i][i] for i in range(len(matrix)))
                    assert accuracy == pytest.approx(right / score["tested"])


def test_an_entry_without_lines_has_no_figure() -> None:
    entry = Entry(CELLS, "convnet", (None, None))
    assert entry.mean() is None
    assert entry.gap is None
    assert entry.half_interval is None
