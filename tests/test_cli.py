"""The command line, from a folder of images to a verified release with a report."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.fixtures import REPOSITORY
from understudy import cli
from understudy.data.folder import load
from understudy.methods import optimisation
from understudy.methods.dosser import Dosser

Run = Callable[..., tuple[int, str, str]]
SMALL = ("--method", "ldpdc", "--set", "images_per_class=3", "--set", "group_size=10")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call a command as the console script does; give exit code, output and errors."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["understudy", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """A folder with two subfolders of thirty small pictures each."""
    random = np.random.default_rng(0)
    for name, level in (("healthy", 60), ("ill", 170)):
        (tmp_path / "scans" / name).mkdir(parents=True)
        for number in range(30):
            pixels = np.clip(random.normal(level, 40, (8, 8)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "scans" / name / f"{number:03d}.png")
    return tmp_path / "scans"


def test_from_a_folder_of_images_to_a_verified_release(
    run: Run, scans: Path, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    code, out, _ = run("synth", scans, *SMALL, "-e", 1, "-o", release, "--unit", "one scan")
    assert code == 0
    assert "differentially private" in out and "one scan" in out
    assert (release / "contact_sheet.png").exists()
    code, out, _ = run("verify", release)
    assert code == 0 and "ok  epsilon" in out
    code, out, _ = run(
        "evaluate", release, "--test", scans, "--network", "mlp", "--seeds", 2, "--json"
    )
    assert code == 0
    (score,) = json.loads(out)["scores"].values()
    assert score["tested"] == 60 and len(score["accuracies"]) == 2
    code, out, _ = run("report", release)
    assert code == 0
    page = tmp_path / "release.report.html"
    assert str(page) in out.replace("\n", "")
    assert "healthy" in page.read_text()
    code, _, _ = run("verify", release)
    assert code == 0, "evaluating or reporting disturbed the release"


def test_signals_first_sets_later(run: Run, scans: Path, tmp_path: Path) -> None:
    assert run("fit", scans, *SMALL, "-e", 1, "-o", tmp_path / "signals")[0] == 0
    for number in range(2):
        code, _, _ = run("synthesise", tmp_path / "signals", "-o", tmp_path / f"set{number}")
        assert code == 0
    code, out, _ = run("ledger", scans, "--json")
    assert code == 0 and len(json.loads(out)["runs"]) == 1, "synthesising cost something"


def test_a_second_run_is_refused_until_the_cap_is_raised(
    run: Run, scans: Path, tmp_path: Path
) -> None:
    assert run("synth", scans, *SMALL, "-e", 1, "-o", tmp_path / "a")[0] == 0
    code, _, err = run("synth", scans, *SMALL, "-e", 1, "-o", tmp_path / "b", "--set", "seed=1")
    assert code == 4
    assert "BudgetExceeded" in err and "0.00 of 1 left" in err and "--cap" in err
    assert not (tmp_path / "b").exists()
    assert run("ledger", scans, "--cap", 3)[0] == 0
    code, out, _ = run("synth", scans, *SMALL, "-e", 1, "-o", tmp_path / "b", "--set", "seed=1")
    assert code == 0 and "1 earlier run" in out


def test_the_cap_can_be_fixed_before_the_first_run(run: Run, scans: Path, tmp_path: Path) -> None:
    code, out, _ = run("ledger", scans, "--cap", 1.5)
    assert code == 0 and "At most epsilon 1.5 may ever be" in out
    book = tmp_path / "other.jsonl"
    assert run("ledger", scans, "--ledger", book, "--cap", 2, "--delta", 1e-6)[0] == 0
    assert run("ledger", scans, "--ledger", book, "--cap", 9)[0] == 2, "one has begun"
    found = json.loads(run("ledger", "--ledger", book, "--json")[1])
    assert (found["cap"], found["delta"], found["runs"]) == (2, 1e-6, [])
    assert run("synth", scans, *SMALL, "-e", 1, "-o", tmp_path / "a")[0] == 0
    code, _, err = run("synth", scans, *SMALL, "-e", 1, "-o", tmp_path / "b", "--set", "seed=1")
    assert code == 4 and "of 1.5 left" in err
    statement = json.loads((tmp_path / "a" / "statement.json").read_text())
    assert statement["cap"]["epsilon"] == 1.5 and statement["budget"]["epsilon"] == 1.0


def test_prices(run: Run) -> None:
    code, out, _ = run("plan", "digits", *SMALL, "-e", 1, "--json")
    assert code == 0
    assert 0.99 < json.loads(out)["epsilon"]["pld"] <= 1
    code, out, _ = run(
        "plan", "--shape", "1x28x28", "--class-sizes", "5421,6000", "--method", "ldpdc", "--json"
    )
    assert json.loads(out)["epsilon"]["rdp"] == pytest.approx(1.100, abs=0.002)
    code, out, _ = run("account", "--noise", 1, "--steps", 50, "--rate", 50 / 5421, "--json")
    assert json.loads(out)["epsilon (rdp)"] == pytest.approx(1.100, abs=0.002)
    code, out, _ = run("account", "--epsilon", 1, "--steps", 1, "--json")
    assert json.loads(out)["noise_multiplier"] == pytest.approx(3.7306, rel=1e-3)
    code, out, _ = run("account", "--epsilon", 1, "--noise", 26.38, "--json")
    assert json.loads(out)["steps"] in (49, 50)


def test_listings(run: Run) -> None:
    assert "ldpdc" in run("methods")[1]
    assert "group_size" in run("methods", "ldpdc")[1]
    assert "digits" in run("datasets")[1]
    for command in ("methods", "datasets"):
        assert json.loads(run(command, "--json")[1])


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["synth", "digits", "--method", "ldpd", "-e", "1", "-o", "x"], 2, "mean 'ldpdc'"),
        (["synth", "digits", "--set", "group_sice=3", "-e", "1", "-o", "x"], 2, "'group_size'"),
        (["synth", "digits", "--set", "group_size=0", "-e", "1", "-o", "x"], 2, "positive"),
        (["synth", "digits", "--set", "group_size=9999", "-e", "1", "-o", "x"], 2, "would fit"),
        (["synth", "digits", "-e", "-1", "-o", "x"], 2, "must be positive"),
        (["synth", "digits", "-e", "1", "--adjacency", "swap", "-o", "x"], 2, "replace"),
        (["synth", "digits", "-e", "1", "--device", "cuda:99", "-o", "x"], 2, "device"),
        (["synth", "no/such/folder", "-e", "1", "-o", "x"], 3, "no/such/folder"),
        (["synth", "digits"], 2, "output"),
        (["verify", "no-release"], 5, "no-release"),
        (["report", "no-release"], 5, "A run that is still going makes it"),
        (["audit", "--label", "income", "-e", "1"], 2, "give --release too"),
        (["account", "--noise", "1"], 2, "exactly two"),
        (["ledger"], 2, "Give DATA"),
        (["ledger", "--ledger", "nowhere.jsonl"], 2, "There is no ledger nowhere.jsonl"),
        (["plan", "--shape", "1x8x8", "-e", "1"], 2, "give them, as in --class-sizes 500,400"),
        (["plan", "digits", "--device", "gpu"], 2, "Known: auto, cpu, cuda, cuda:1"),
        (["frobnicate"], 2, "frobnicate"),
    ],
)
def test_errors_say_what_is_wrong_and_end_with_their_code(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str],
    code: int, told: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "synth" and "--method" not in arguments:
        arguments = [*arguments, "--method", "ldpdc"]
    ended, _, err = run(*arguments)
    assert ended == code, err
    assert told in err
    assert "Traceback" not in err
    assert not (tmp_path / "x").exists()


def test_a_folder_in_use_is_noticed_before_anything_is_spent(
    run: Run, scans: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    for extra in ((), ("--overwrite",)):
        code, _, _ = run("synth", scans, *SMALL, "-e", 1, "-o", tmp_path / "mine", *extra)
        assert code == 5
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"
    assert json.loads(run("ledger", scans, "--json")[1])["runs"] == []


def test_an_edited_release_fails_verification(run: Run, scans: Path, tmp_path: Path) -> None:
    run("synth", scans, *SMALL, "-e", 1, "-o", tmp_path / "r")
    path = tmp_path / "r" / "statement.json"
    path.write_text(re.sub(r'"epsilon": 0\.\d+', '"epsilon": 0.1', path.read_text(), count=1))
    code, _, err = run("verify", tmp_path / "r")
    assert code == 5 and "statement.json" in err


def test_delta_above_one_over_n_is_warned_about(run: Run, scans: Path, tmp_path: Path) -> None:
    code, _, err = run("synth", scans, *SMALL, "-e", 1, "--delta", 0.02, "-o", tmp_path / "r")
    assert code == 0
    assert "DeltaTooLarge" in err and "not below 1/N" in err


def test_every_command_teaches(run: Run) -> None:
    code, out, _ = run("--help")
    commands = re.findall(r"^│ (\w+) ", out, flags=re.M)
    assert {"synth", "plan", "fit", "synthesise", "evaluate", "verify", "ledger"} <= set(commands)
    for command in (
        "synth", "fit", "train", "sample", "synthesise", "plan", "evaluate", "report", "verify",
        "audit",
    ):  # fmt: skip
        code, out, _ = run(command, "--help")
        assert code == 0
        assert f"understudy {command}" in out, f"{command} --help has no example"


def test_references_fidelity_and_an_audit_reach_the_report(
    run: Run, scans: Path, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    assert run("synth", scans, *SMALL, "-e", 1, "-o", release)[0] == 0
    code, out, err = run(
        "evaluate", release, "--test", scans, "--network", "mlp", "--seeds", 1, "--fidelity",
        "--ceilings", scans, "--ceiling", "random-real", "--json",
    )  # fmt: skip
    assert code == 0, err
    told = json.loads(out)
    assert (
        "6 real records drawn at random" in (told["ceilings"]["random-real"]["settings"]["ceiling"])
    )
    assert told["fidelity"]["compared"] == 6
    code, _, err = run("evaluate", release, "--test", scans, "--ceiling", "dm")
    assert code == 2 and "say which" in err
    code, out, err = run("audit", "--release", release, "--pool", scans, "--quick", "--runs", 8)
    assert code == 0, err
    assert "passed" in out
    assert run("report", release)[0] == 0
    page = (tmp_path / "release.report.html").read_text()
    for words in ("real records drawn at random", "real against real", "prove that epsilon is"):
        assert words in page, words
    other = tmp_path / "other"
    assert run("synth", scans, *SMALL, "-e", 1, "-o", other, "--ledger", tmp_path / "l")[0] == 0
    for ending in ("scores", "audit"):
        (tmp_path / f"release.{ending}.json").rename(tmp_path / f"other.{ending}.json")
    assert run("report", other)[0] == 0
    page = (tmp_path / "other.report.html").read_text()
    assert "Not audited." in page and "Not measured." in page, "another release's results"
    (tmp_path / "other.audit.json").write_text("{")
    code, _, err = run("report", other)
    assert code == 5 and "cannot be read" in err


@pytest.mark.skipif(os.name != "posix", reason="signals are sent the POSIX way")
def test_ctrl_c_leaves_nothing_half_written_and_the_same_command_resumes(
    scans: Path, tmp_path: Path, run: Run
) -> None:
    state = os.environ["UNDERSTUDY_STATE"]
    command = [
        sys.executable, "-m", "understudy", "synth", str(scans), "--method", "ldpdc",
        "--set", "group_size=10", "--set", "images_per_class=600", "--set",
        "noise_multiplier=400", "-o", str(tmp_path / "r"),
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
        # A background job may have been started with Ctrl-C ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    journal = Path(state) / "ledgers"
    deadline = time.monotonic() + 60
    while not list(journal.rglob("answer-*")):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Interrupted" in err and "Traceback" not in err
    assert not (tmp_path / "r").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    answered = len(list(journal.rglob("answer-*")))
    assert 0 < answered < 600
    code, out, _ = run("ledger", scans, "--json")
    assert [r["finished"] for r in json.loads(out)["runs"]] == [False]
    code, out, err = run(*command[3:])
    assert code == 0, err
    code, out, _ = run("ledger", scans, "--json")
    assert [r["finished"] for r in json.loads(out)["runs"]] == [True]


def test_a_run_killed_while_optimising_loses_nothing_it_paid_for(
    scans: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [
        "synth", str(scans), "--method", "dosser", "--preset", "none", "--epsilon", "2",
        "--every", "5", "--pictures", str(tmp_path / "sheets"), "-o", str(tmp_path / "r"),
    ]  # fmt: skip
    for field, value in {**Dosser.miniature, "optimisation_iterations": 20}.items():
        command += ["--set", f"{field}={json.dumps(value)}"]
    real, steps = optimisation.matching_loss, []

    def loss(*args: Any) -> Any:
        steps.append(1)
        if len(steps) == 13:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(optimisation, "matching_loss", loss)
    code, _, err = run(*command)
    assert code == 130, err
    assert load(tmp_path / "r")[1] is None, "the signals are safe before the optimisation begins"
    assert [p.name for p in sorted((tmp_path / "sheets").iterdir())] == [
        "step-000005.png", "step-000010.png",
    ]  # fmt: skip
    code, _, err = run(*command)
    assert code == 0, err
    assert len(steps) == 13 + 10, "ten steps come from the checkpoint"
    code, out, _ = run("ledger", scans, "--json")
    assert len(json.loads(out)["runs"]) == 1
    assert load(tmp_path / "r")[1] is not None
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    code, _, err = run(*command)
    assert code == 5 and "not empty" in err and "--overwrite" in err


def test_progress_counts_up_and_starts_anew_for_each_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rich.console import Console

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    monkeypatch.setattr(cli, "errors", Console(file=screen, force_terminal=True, width=120))
    clock = iter(range(0, 10_000, 3))
    monkeypatch.setattr(cli.time, "monotonic", lambda: next(clock))
    with cli._progress(quiet=False) as progress:
        for done in range(1, 41):
            progress(done, 40, f"matching loss {done}")
            time.sleep(0.01)
        for done in range(1, 11):
            progress(done, 10, "saving")
    shown = screen.getvalue()
    counted = [int(number) for number in re.findall(r"(\d+)/40", shown)]
    assert counted == sorted(counted)
    assert max(counted) >= 20
    with cli._progress(quiet=True) as progress:
        progress(1, 2, "silent")
    assert screen.getvalue() == shown
