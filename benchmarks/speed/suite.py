"""What the scripts of the speed suite share: options, records, timing, memory, lines and the table.

A *way* does the same step as another way. Ways take turns in one process, round after round, each
with the same time a round, and the median over all rounds counts: a machine that is busy, or warms
up, disturbs all alike. What is worth reading is the ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from ceilings import Ceilings, Roofline, float32_as
from counting import Counter, whole_batches
from torch import Tensor

from understudy.engine import Engine, Precision
from understudy.methods.base import Mechanism
from understudy.privacy import Budget, Gate, Ledger, PrivateDataset, Public, Records
from understudy.privacy.gate import record_digests

T = TypeVar("T")

RESULTS = Path(__file__).parents[1] / "results"

MNIST_SIZES = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
"""Records of each class in MNIST's training set (LeCun et al. 1998), 60,000 in all."""

MOST_STEPS = 400
"""Steps of a round at most: a plan of so many queries is priced in seconds."""

GPU_CHUNK = 2048
"""Records a GPU takes at a time by default (``Engine.records_at_once``)."""

Way = Callable[[int], Sequence[float]]
"""Take so many steps and return the seconds of some of them, without what precedes the first."""


# Records


@dataclass(frozen=True)
class Drawn:
    """Hold random bytes twice: behind a gate, and open, for whoever needs no gate."""

    private: PrivateDataset
    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]

    def members(self, c: int) -> npt.NDArray[np.intp]:
        """Return where the records of a class are."""
        return np.flatnonzero(self.labels == c)

    def on(self, device: torch.device) -> Tensor:
        """Return all pictures as floats in [-1, 1], as the usual code keeps them."""
        return torch.from_numpy(self.images).to(device).float().div_(127.5).sub_(1.0)


def draw_records(shape: tuple[int, ...], sizes: Sequence[int], seed: int = 0) -> Drawn:
    """Draw random pictures, so many of each class. No dataset is read."""
    random = np.random.default_rng(seed)
    labels = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
    images = random.integers(0, 256, (len(labels), *shape), np.uint8)
    names = tuple(map(str, range(len(sizes))))
    public = Public(name="random bytes", shape=shape, classes=names, counts=tuple(sizes))
    return Drawn(
        PrivateDataset(Records(images, labels, record_digests(images)), public), images, labels
    )


def mnist_sizes(part: int) -> tuple[int, ...]:
    """Return MNIST's class sizes, divided."""
    return tuple(size // part for size in MNIST_SIZES)


@contextlib.contextmanager
def throw_away_gate(
    data: PrivateDataset,
    method: Mechanism,
    engine: Engine,
    progress: Callable[[int, int, str], None],
    folder: Path | None = None,
) -> Iterator[Gate]:
    """Open a gate as ``run.fit`` does, with a ledger that is forgotten."""
    with (
        tempfile.TemporaryDirectory(dir=folder) as place,
        data.open(
            method.plan(data.public),
            by="benchmark",
            recipe=method.recipe(),
            ledger=Ledger(Path(place) / "ledger.jsonl"),
            budget=Budget(float("inf")),
            engine=engine,
            progress=progress,
        ) as gate,
    ):
        yield gate


def assert_same_pictures(ours: Tensor, theirs: Tensor, start: Tensor) -> None:
    """Refuse pictures, in float32 and in float64, that did not go the same way from the start.

    Rounding moves them 1e-6 of the way apart. Where it turns a ReLU's sign, a picture moves a few
    thousandths more; a mistake moves every picture it concerns by about the whole way.
    """
    theirs, start = theirs.detach().cpu().double(), start.cpu().double()
    gap = (ours.detach().cpu().double() - theirs).flatten(1).norm(dim=1)
    gap = gap / (theirs - start).flatten(1).norm(dim=1)
    assert gap.median() < 1e-4, f"pictures end {gap.median():.2g} of their way apart"
    assert gap.max() < 0.1, f"a picture ends {gap.max():.2g} of its way apart"


# Time and memory


@dataclass
class Laps:
    """Take the time wherever a method reports progress; a lap is one step between two reports."""

    device: torch.device
    clock: Callable[[], float]
    times: list[tuple[int, float]] = field(default_factory=list)

    def __call__(self, done: int, total: int = 0, text: str = "") -> None:
        """Note that so many steps are done, once the device has really done them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.times.append((done, self.clock()))

    @property
    def seconds(self) -> list[float]:
        """Return what a step took, between each two reports."""
        return [(b - a) / (n - m) for (m, a), (n, b) in itertools.pairwise(self.times)]


class PeakMemory:
    """Watch how much memory is taken above what was held before.

    On a GPU the allocator's own peak; on a CPU the process's anonymous pages, every 2 ms.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, 0

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
            return self
        with contextlib.suppress(OSError, AttributeError):  # give back what is free: glibc only
            ctypes.CDLL(None).malloc_trim(0)
        self._before = self._peak = _anonymous()
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self._peak = max(self._peak, _anonymous())

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._before
            return
        self._done.set()
        self._watcher.join()
        self.bytes = self._peak - self._before


def _anonymous() -> int:
    """Return this process's anonymous resident bytes; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
    return 0


# The suite


@dataclass
class Suite:
    """Run one script's measurements, then print the table and write the lines."""

    script: str
    options: argparse.Namespace
    device: torch.device
    lines: list[dict[str, Any]] = field(default_factory=list)
    chunk: int | None = None
    precision: Precision = "auto"

    @classmethod
    def of(
        cls,
        script: str,
        told: str,
        arguments: Sequence[str] | None,
        further: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
    ) -> Suite:
        """Read the options every script takes, and ``further`` ones."""
        parser = argparse.ArgumentParser(
            description=told, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--device", default="auto")
        parser.add_argument("--small", action="store_true", help="sizes for a CPU")
        parser.add_argument("--quick", action="store_true", help="tiny sizes, one round: a test")
        parser.add_argument("--rounds", type=int, default=5)
        parser.add_argument("--seconds", type=float, help="a way and a round; 2, or 0.5 if small")
        parser.add_argument("--threads", type=int)
        parser.add_argument(
            "--clock", choices=("wall", "process"), default="wall",
            help="'process' counts CPU time: for one thread on a machine shared with other work",
        )  # fmt: skip
        parser.add_argument("--ledger", type=Path, help="folder for throw-away ledgers")
        parser.add_argument(
            "--out", type=Path, nargs="?", const=Path(),
            help="append lines to this file (results/speed-<device>.jsonl if none is named)",
        )  # fmt: skip
        further(parser)
        options = parser.parse_args(arguments)
        options.command = " ".join(
            [f"python benchmarks/speed/{script}.py", *(arguments or sys.argv[1:])]
        )
        if options.seconds is None:
            options.seconds = 0.5 if options.small else 2.0
        if options.quick:
            options.rounds, options.seconds = 1, 0.0
        if options.threads:
            torch.set_num_threads(options.threads)
        return cls(script, options, Engine(device=options.device).torch_device)

    def sized(self, full: T, small: T, tiny: T) -> T:
        """Choose a size: the paper's, one for a CPU, or one for a test."""
        return tiny if self.options.quick else small if self.options.small else full

    @property
    def engine(self) -> Engine:
        """Return the engine all ways of ours run on."""
        return Engine(device=str(self.device), chunk=self.chunk, precision=self.precision)

    def laps(self) -> Laps:
        """Start taking times."""
        process = self.options.clock == "process"
        return Laps(self.device, time.process_time if process else time.perf_counter)

    def gate(
        self, data: PrivateDataset, method: Mechanism, laps: Laps
    ) -> contextlib.AbstractContextManager[Gate]:
        """Open a gate whose every answer ends a lap."""
        return throw_away_gate(data, method, self.engine, laps, self.options.ledger)

    def repeated(self, step: Callable[[], object]) -> Way:
        """Make a way of a function that takes one step. The device is waited for now and then."""

        def run(count: int) -> Sequence[float]:
            laps, every = self.laps(), max(1, count // 100)
            laps(0)
            for done in range(1, count + 1):
                step()
                if done % every == 0 or done == count:
                    laps(done)
            return laps.seconds

        return run

    def checked(self, check: Callable[[torch.device], object]) -> None:
        """Compare ours, on the device, with the plain way, before anything is timed."""
        with float32_as(tf32=False):
            check(self.device)

    def ceilings(self) -> Ceilings:
        """Measure what this machine can do, once a process and size."""
        return Ceilings.measured(self.device, self.sized("full", "small", "tiny"))

    def measure(
        self,
        name: str,
        sizes: Mapping[str, Any],
        ways: Mapping[str, Way],
        *,
        arithmetic: str = "plain",
        precision: str | None = None,
        settle: int = 0,
        **more: Any,
    ) -> dict[str, Any]:
        """Time the ways in turns and keep the line. The first way is the one under test.

        ``arithmetic`` names the way whose operations are counted as the arithmetic that is
        necessary; bytes are those the first way moves. ``settle`` steps come before one that is
        like all later ones.
        """
        first = next(iter(ways))
        counts = {}
        for way, run in ways.items():  # warms up, and chooses how many steps a round takes
            typical = statistics.median(run(1 if self.device.type == "cpu" else 3))
            counts[way] = min(max(1, round(self.options.seconds / typical)), MOST_STEPS)
        laps: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(self.options.rounds):
            for way, run in ways.items():
                laps[way] += run(counts[way])
        ms = {way: 1000 * statistics.median(some) for way, some in laps.items()}
        peaks = {}
        for way, run in ways.items():
            with PeakMemory(self.device) as peak:
                run(1)
            peaks[way] = peak.bytes
        counted = {way: self._counted(run, settle) for way, run in ways.items()}
        roofline = Roofline.of(
            self.ceilings(),
            flop=counted[arithmetic].flop,
            moved=counted[first].moved,
            seconds=ms[first] / 1000,
            precision=precision or conv_precision(self.engine),
        )
        line = {
            "benchmark": "speed",
            "script": self.script,
            "measurement": name,
            "sizes": dict(sizes),
            "ms": {way: round(value, 4) for way, value in ms.items()},
            "quartiles_ms": {way: _quartiles(some) for way, some in laps.items()},
            "laps": {way: len(some) for way, some in laps.items()},
            "times_as_fast": {w: round(ms[w] / ms[first], 3) for w in ways if w != first},
            "peak_memory_bytes": peaks,
            "roofline": roofline.to_json(),
            "operations": {way: round(some.operations) for way, some in counted.items()},
            "synchronising": {way: round(some.synchronising) for way, some in counted.items()},
            **more,
            **self.engine.describe(),
            "threads": torch.get_num_threads(),
            "clock": self.options.clock,
            "python": platform.python_version(),
            "revision": revision(),
            "command": self.options.command,
        }
        self.lines.append(line)
        return line

    def _counted(self, run: Way, settle: int) -> Counter:
        """Count what one step does, as a GPU would be given it: set-up cancels out."""
        self.chunk = GPU_CHUNK
        with whole_batches():
            with Counter() as few:
                run(settle + 1)
            with Counter() as more:
                run(settle + 3)
        self.chunk = None
        return more.less(few, steps=2)

    def finish(self) -> None:
        """Write the lines and print the table."""
        if self.options.out is not None:
            named = self.options.out != Path()
            file = self.options.out if named else RESULTS / f"speed-{self.device.type}.jsonl"
            with file.open("a") as stream:
                stream.writelines(json.dumps(line) + "\n" for line in self.lines)
        print(table(self.lines))


def conv_precision(engine: Engine, *, fused: bool = True) -> str:
    """Say in what numbers a ConvNet's convolutions are computed; ``fused``: where it may be bf16."""
    if fused and engine.dtype == torch.bfloat16:
        return "bf16"
    on_gpu = engine.torch_device.type == "cuda"
    return "tf32" if on_gpu and torch.backends.cudnn.allow_tf32 else "fp32"


def _quartiles(some: Sequence[float]) -> list[float]:
    if len(some) < 2:
        return [round(1000 * some[0], 4)] * 2
    low, _, high = statistics.quantiles(some, n=4, method="inclusive")
    return [round(1000 * low, 4), round(1000 * high, 4)]


def revision() -> str:
    """Return the commit this runs from, marked where the tree differs from it."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return found.stdout.strip() or "unknown"


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Write the lines as a table: ours, the others, and how near ours comes to the machine."""
    head = ("measurement", "ours", "the other way", "times as fast", "peak", "operations",
            "waits", "GFLOP", "GB moved", "of the ceiling")  # fmt: skip
    rows = [head, ("---", *["---:"] * (len(head) - 1))]
    for line in lines:
        first, *others = line["ms"]
        roofline, peaks = line["roofline"], line["peak_memory_bytes"]
        for other in others or [first]:
            both = (first, other)
            rows.append(
                (
                    line["measurement"],
                    f"{line['ms'][first]:.4g} ms",
                    f"{other}: {line['ms'][other]:.4g} ms",
                    f"{line['ms'][other] / line['ms'][first]:.2f}",
                    " / ".join(f"{peaks[way] / 2**20:.0f}" for way in both) + " MiB",
                    " / ".join(f"{line['operations'][way]:,}" for way in both),
                    " / ".join(f"{line['synchronising'][way]}" for way in both),
                    f"{roofline['flop'] / 1e9:.3g}",
                    f"{roofline['bytes'] / 1e9:.3g}",
                    f"{roofline['fraction']:.0%} of {roofline['bound_by']}",
                )
            )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
