"""`understudy bench`: the guard holds, notices what is broken, and says so by its exit code."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from understudy.bench import command, runner, suites
from understudy.bench.cells import Cell, Suite
from understudy.bench.suites import SUITES
from understudy.bench.suites.guard import MEASURED, WIDTH
from understudy.data.heldout import HeldOut
from understudy.errors import BadConfiguration, UnderstudyError, UnknownName
from understudy.methods import TRAINERS, registered

app = typer.Typer()
app.command()(command.bench)


@app.callback()
def main() -> None:
    """Make `bench` a subcommand."""


def bench(*words: str) -> Result:
    return CliRunner().invoke(app, ["bench", *words])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Suite:
    """Stand one quick cell of the guard in for all of them."""
    cells = tuple(cell for cell in SUITES["guard"].cells if cell.row == "ldpdc")
    suite = dataclasses.replace(SUITES["guard"], cells=cells)
    monkeypatch.setattr(suites, "SUITES", {"guard": suite})
    return suite


class TestGuard:
    def test_holds(self) -> None:
        done = bench("guard", "--check")
        assert done.exit_code == 0, done.output
        assert "MISSED" not in done.output

    def test_watches_every_method_with_a_band_that_was_measured(self) -> None:
        cells = SUITES["guard"].cells
        assert {cell.method for cell in cells} == {*registered(), *(t.name for t in TRAINERS)}
        assert {cell.row for cell in cells} == set(MEASURED)
        for cell in cells:
            assert cell.dataset == "digits"  # comes with scikit-learn
            assert cell.bar is not None
            assert cell.bar.queries is not None

    def test_tells_most_methods_from_guessing(self) -> None:
        # A broken method is right for one record in ten, give or take.
        blind = [row for row, (mean, deviation, *_) in MEASURED.items()
                 if mean - WIDTH * deviation < 25]  # fmt: skip
        assert len(blind) <= 2, blind

    @pytest.mark.usefixtures("small")
    def test_notices_wrong_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        honest = runner.heldout

        def shifted(cell: Cell) -> HeldOut:
            found = honest(cell)
            return dataclasses.replace(found, labels=(found.labels + 1) % 10)

        monkeypatch.setattr(runner, "heldout", shifted)
        done = bench("guard", "--check")
        assert done.exit_code == 1
        assert "MISSED" in done.output

    def test_notices_noise_that_is_halved(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cells = [cell for cell in SUITES["guard"].cells if cell.row == "ldpdc, much noise"]
        halved = tuple(
            dataclasses.replace(cell, values={**cell.values, "noise_multiplier": 6.0})
            for cell in cells
        )
        suite = dataclasses.replace(SUITES["guard"], cells=halved)
        monkeypatch.setattr(suites, "SUITES", {"guard": suite})
        done = bench("guard", "--check", "--json")
        assert done.exit_code == 1
        (found,) = json.loads(done.stdout)["checks"]
        assert "must lie between" in found["told"]  # too accurate,
        assert "must cost" in found["told"]  # and too expensive


class TestCommand:
    def test_lists_every_suite(self) -> None:
        listed = bench("--list")
        assert listed.exit_code == 0
        for name in SUITES:
            assert name in listed.output

    def test_lists_every_cell_for_machines(self) -> None:
        listing = json.loads(bench("--list", "--json").stdout)
        found = {suite["name"]: [cell["digest"] for cell in suite["cells"]] for suite in listing}
        assert found == {name: [c.digest for c in suite.cells] for name, suite in SUITES.items()}

    @pytest.mark.parametrize(
        ("words", "error", "told"),
        [
            ((), BadConfiguration, "--list"),
            (("dpdc-4",), UnknownName, "Did you mean 'dpdc-3'|Did you mean 'dpdc-1'|dpdc-2"),
            (("psg-continual", "--check"), BadConfiguration, "no bars"),
            (
                ("guard", "--only", "ldpdc", "--only", "mnist"),
                BadConfiguration,
                "'ldpdc' and 'mnist'",
            ),
        ],
    )
    def test_says_what_is_wrong(
        self, words: tuple[str, ...], error: type[UnderstudyError], told: str
    ) -> None:
        with pytest.raises(error, match=told):
            CliRunner().invoke(app, ["bench", *words], catch_exceptions=False)

    @pytest.mark.usefixtures("small")
    def test_keeps_results_where_it_is_told_and_renders_beside_them(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.jsonl"
        first = bench("guard", "--results", str(file), "--json")
        assert json.loads(first.stdout) == {
            "results": str(file), "measured": 1, "failed": 0, "measured_earlier": 0, "left": 0,
        }  # fmt: skip
        again = bench("guard", "--results", str(file), "--render")
        assert "1 measured earlier" in again.output
        assert "**" in file.with_suffix(".md").read_text()

    def test_measures_only_what_it_is_told(self) -> None:
        cells = SUITES["must-hold"].cells
        kept = command._only(["Whole-set", "mnist", "50 per"], cells)
        assert {cell.column for cell in kept} == {"mnist", "fashion-mnist"}
        assert {cell.method for cell in kept} == {"whole-set"}
        assert {cell.images_per_class for cell in kept} == {50}
        assert command._only(None, cells) == cells

    def test_looks_for_data_where_it_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UNDERSTUDY_DATA", "/before")
        command._look_in([Path("/a"), Path("/b")])
        from understudy.data.datasets import places

        assert places()[:3] == (Path("/a"), Path("/b"), Path("/before"))

    def test_imports_no_network_before_it_runs(self) -> None:
        assert printed("import understudy.bench.command; print('torch' in sys.modules)") == "False"

    def test_measures_pictures_without_what_a_gpu_machine_may_lack(self) -> None:
        lacking = ("pyarrow", "sklearn", "datasets", "diffusers", "pandas", "opacus")
        code = f"""
            sys.modules.update(dict.fromkeys({lacking}))
            from understudy.bench import render, runner
            from understudy.bench.suites import SUITES
            for suite in SUITES.values():
                for cell in suite.cells[:1]:
                    cell.configured()
            print(bool(runner.measure))
        """
        assert printed(textwrap.dedent(code)) == "True"


def printed(code: str) -> str:
    """Run code in a Python of its own and return what it prints."""
    command = [sys.executable, "-c", f"import sys\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
