"""The speed suite runs, compares before it times, and counts what it says it counts."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from understudy.nets import random_convnet
from understudy.privacy import accounting

SPEED = Path(__file__).parents[1] / "benchmarks" / "speed"
SCRIPTS = sorted(path.stem for path in SPEED.glob("*.py"))
MEASURING = [name for name in SCRIPTS if "def main(" in (SPEED / f"{name}.py").read_text()]
MEASUREMENTS = {
    "evaluation_stack": 1,
    "ndpdc_iteration": 2,
    "optimisation_step": 2,
    "precision": 3,
    "psg_step": 3,
    "scaling": 8,
    "whole_set_pass": 1,
}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scripts import their neighbours; let pricing and the disk, not looked at, cost nothing."""
    monkeypatch.syspath_prepend(str(SPEED))
    monkeypatch.setattr(accounting, "_epsilon", lambda *args: 1.0)
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def run(name: str, out: Path, *arguments: str) -> list[dict[str, Any]]:
    load(name).main(["--quick", "--small", "--device", "cpu", "--out", str(out), *arguments])
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def test_every_script_is_tested() -> None:
    assert set(MEASURING) == set(MEASUREMENTS)


@pytest.mark.parametrize("name", MEASURING)
def test_a_script_measures_both_ways(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run(name, tmp_path / "lines.jsonl", *(["--anyway"] if name == "precision" else []))
    assert len(lines) == MEASUREMENTS[name]
    printed = capsys.readouterr().out
    for line in lines:
        assert line["measurement"] in printed
        assert line["script"] == name and line["device"] == "cpu" and line["torch"]
        first, *others = line["ms"]
        assert others and all(ms > 0 for ms in line["ms"].values())
        for other in others:
            ratio = line["ms"][other] / line["ms"][first]
            assert line["times_as_fast"][other] == pytest.approx(ratio, rel=0.05)
            assert line["operations"][other] > 0 <= line["peak_memory_bytes"][other]
        roofline = line["roofline"]
        assert roofline["flop"] > 0 and roofline["bytes"] > 0 and roofline["fraction"] > 0
        assert roofline["ceilings"]["flop_per_second"]["fp32"] > 0
        assert "tf32" not in roofline["ceilings"]["flop_per_second"]


def test_precision_is_a_gpus_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("precision", tmp_path / "lines.jsonl") == []
    assert "needs CUDA" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "broken"),
    [
        ("ndpdc_iteration", "clipped"),
        ("ndpdc_iteration", "class_loss"),
        ("optimisation_step", "rotate"),
        ("optimisation_step", "crop"),
        ("whole_set_pass", "clipped"),
        ("psg_step", "gradient_distance"),
        ("psg_step", "private_gradient"),
    ],
)
def test_a_restatement_that_computes_something_else_is_refused(
    script: str, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, plain = load(script), load("plain")
    right = getattr(plain, broken)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        if broken in ("rotate", "crop"):
            return right(args[0], *(-number for number in args[1:]))
        out = right(*args, **kwargs)
        if broken == "private_gradient":
            return [part.flip(0) for part in out]
        return 1.05 * out if broken == "clipped" else out.square()

    monkeypatch.setattr(plain, broken, wrong)
    with pytest.raises(AssertionError):
        module.check((1, 28, 28), CPU)


def test_the_plain_network_is_ours() -> None:
    plain = load("plain")
    for shape in ((1, 28, 28), (3, 32, 32), (1, 8, 8), (3, 64, 64)):
        ours = random_convnet(1, shape, 4, width=3).double()
        same = plain.same_network(shape, 4, 3, dict(ours.named_parameters()))
        x = torch.randn(2, *shape, dtype=torch.float64)
        torch.testing.assert_close(same(x), ours(x))


def test_arithmetic_is_counted_as_by_hand() -> None:
    """A ConvNet of width w on 28x28: 32, 16 and 8 pixels a side, 9 taps, then a linear layer."""
    counting = load("counting")
    width, records = 4, 3
    macs = 32**2 * width * 9 + (16**2 + 8**2) * width**2 * 9 + width * 16 * 10
    net = random_convnet(0, (1, 28, 28), 10, width=width)
    x = torch.randn(records, 1, 28, 28)
    with torch.no_grad(), counting.Counter() as counted:
        net(x)
    assert counted.flop == 2 * records * macs
    with torch.no_grad(), counting.Counter() as split:
        for image in x:
            net(image[None])
    assert split.flop == counted.flop and split.operations == records * counted.operations


def test_bytes_operations_and_waits_are_counted_as_by_hand() -> None:
    counting = load("counting")
    a, b = torch.randn(6, 8), torch.randn(8, 2)
    with counting.Counter() as counted:
        c = a @ b.reshape(8, 2)
        c.T.add_(1.0)
        assert c.sum().item() != 0 and bool(c.isfinite().all())
    # a product, an addition in place, a sum, what isfinite takes, all, and two answers
    assert counted.names["aten::mm"] == counted.names["aten::add_"] == 1
    assert "aten::t" not in counted.names and "aten::view" not in counted.names
    assert counted.synchronising == counted.names["aten::_local_scalar_dense"] == 2
    assert counted.flop == 2 * 6 * 8 * 2
    with counting.Counter() as one:
        F.relu(a)
    assert (one.operations, one.moved) == (1, 2 * a.numel() * 4)


def test_whole_batches_are_put_back() -> None:
    counting = load("counting")
    kept = {(module, name): getattr(module, name) for module, name, _ in counting.PIECES}
    with pytest.raises(ZeroDivisionError), counting.whole_batches():
        assert all(getattr(m, n) != value for (m, n), value in kept.items())
        raise ZeroDivisionError
    assert all(getattr(module, name) == value for (module, name), value in kept.items())


def test_laps_leave_out_what_precedes_the_first() -> None:
    suite = load("suite")
    times = iter([10.0, 11.0, 14.0])
    laps = suite.Laps(CPU, lambda: next(times))
    for done in (2, 3, 5):
        laps(done, 5, "a step")
    assert laps.seconds == [1.0, 1.5]


def test_the_peak_is_what_was_taken_above_before() -> None:
    suite = load("suite")
    with suite.PeakMemory(CPU) as peak:
        held = torch.ones(16 * 2**20)
        held.add_(1)
    assert 60 * 2**20 < peak.bytes < 100 * 2**20


def test_the_roofline_takes_the_larger_of_two_times() -> None:
    ceilings = load("ceilings")
    machine = ceilings.Ceilings({"fp32": 100.0}, 10.0)
    by = ceilings.Roofline.of(machine, flop=50.0, moved=1.0, seconds=1.0, precision="fp32")
    assert (by.bound_by, by.fraction) == ("arithmetic", 0.5)
    by = ceilings.Roofline.of(machine, flop=50.0, moved=8.0, seconds=1.0, precision="fp32")
    assert (by.bound_by, by.fraction) == ("traffic", 0.8)
