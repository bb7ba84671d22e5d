"""Measure cells: fit, synthesise, train on the set, test; one JSON line for each, at once on disk.

A run that was stopped, by a time limit, a crash or Ctrl-C, is taken up by the same command: cells
that stand in the file are not measured again, and a release that was being made is taken up where it
was. A cell that fails is recorded as failed and does not stop the rest; the next run tries it again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import multiprocessing
import platform
import resource
import shutil
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from understudy import run
from understudy.bench.cells import RELEASED, SKLEARN, Cell, plain_values
from understudy.bench.estimation import subspace_error
from understudy.bench.lines import Line, append, latest, read
from understudy.data.datasets import load, load_heldout
from understudy.data.heldout import HeldOut
from understudy.data.synthetic import SyntheticSet
from understudy.engine import Engine, Progress, silent
from understudy.errors import BadConfiguration, UnknownName
from understudy.evaluation.classify import PROTOCOLS, Protocol, Scores, judge, sklearn_scores
from understudy.methods import Generative, Mechanism, Method, Trainer
from understudy.methods.matching import Matching
from understudy.privacy.accounting import Accountant
from understudy.privacy.gate import PrivateDataset
from understudy.privacy.ledger import Ledger
from understudy.privacy.release import Release

SOURCE = Path(__file__).parents[1]
"""The package's own files."""

Told = Callable[[Line], None]
"""Called with each line that was written."""


@dataclass
class Outcome:
    """Count what a run did."""

    done: int = 0
    failed: int = 0
    skipped: int = 0
    """Measured earlier."""
    left: int = 0
    """Not begun within the time limit."""


def measure(
    cells: Sequence[Cell],
    results: Path,
    *,
    device: str = "auto",
    jobs: int = 1,
    minutes: float | None = None,
    again: bool = False,
    command: str | None = None,
    told: Told = lambda line: None,
    progress: Progress = silent,
) -> Outcome:
    """Measure every cell that has no result yet, or all ``again``; append a line for each.

    ``jobs`` processes work at once, each on all cells that share a release. After ``minutes`` no
    cell is begun; the one under way is finished.
    """
    engine = Engine(device=device)
    _check_jobs(jobs, engine)
    standing = {} if again else latest(read(results))
    ends = None if minutes is None else time.time() + 60 * minutes
    outcome = Outcome()
    wanted: dict[str, Cell] = {}
    for cell in cells:
        if up_to_date(cell, standing.get(cell.digest)):
            outcome.skipped += 1
        else:
            wanted.setdefault(cell.digest, cell)
    seen = 0
    groups = families(list(wanted.values()))
    unfinished = results.with_name(f".{results.stem}-unfinished")
    if jobs == 1:
        working = _here(groups, engine, ends, unfinished, progress)
    else:
        working = _beside(groups, device, jobs, ends, unfinished)
    with contextlib.closing(working) as lines:
        for line in lines:
            line = {**line, "command": command}
            append(results, line)
            seen += 1
            outcome.done += line["status"] == "done"
            outcome.failed += line["status"] == "failed"
            told(line)
    with contextlib.suppress(OSError):  # absent, or it holds what was cut off
        unfinished.rmdir()
    outcome.left = len(wanted) - seen
    return outcome


def up_to_date(cell: Cell, line: Line | None) -> bool:
    """Tell whether a line measures what its cell means today: a preset may have changed since.

    Fields that came later count as if they had been there with their defaults. How many images are
    made of a release is declared in the cell itself.
    """
    if line is None or line["status"] != "done":
        return False
    if "configuration" not in line:
        return True
    method = cell.configured()
    now = json.loads(json.dumps(plain_values(method.recipe()["configuration"])))
    free = {"images_per_class"} | (set() if cell.epsilon is None else {"noise_multiplier"})
    fields = (own for own in dataclasses.fields(method) if own.default is not dataclasses.MISSING)
    then = {**plain_values({own.name: own.default for own in fields}), **line["configuration"]}
    return all(now.get(name) == then[name] for name in then.keys() - free)


def _check_jobs(jobs: int, engine: Engine) -> None:
    if jobs < 1:
        raise BadConfiguration(f"--jobs must be at least 1: {jobs}.")
    threads = torch.get_num_threads()
    if engine.torch_device.type == "cpu" and jobs > threads:
        raise BadConfiguration(f"--jobs {jobs}: this CPU has {threads} threads to share.")


def families(cells: Sequence[Cell]) -> list[tuple[Cell, ...]]:
    """Put cells that can share a release together, in the order in which each family begins."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        try:
            size_matters = not isinstance(cell.configured(), Matching | Generative | Trainer)
        except BadConfiguration:
            size_matters = True
        found.setdefault(cell.released(size_matters), []).append(cell)
    return [tuple(family) for family in found.values()]


# One after the other, here


def _here(
    groups: Sequence[tuple[Cell, ...]],
    engine: Engine,
    ends: float | None,
    unfinished: Path,
    progress: Progress,
) -> Generator[Line, None, None]:
    for family in groups:
        yield from _measured(family, engine, ends, unfinished, progress)


def _measured(
    family: Sequence[Cell],
    engine: Engine,
    ends: float | None,
    unfinished: Path,
    progress: Progress = silent,
) -> Iterator[Line]:
    """Measure cells that share a release; what goes wrong is recorded for each."""
    shop = _Workshop(engine, unfinished, progress)
    for cell in family:
        if ends is not None and time.time() >= ends:
            return
        started = _now()
        try:
            line = {"status": "done", **shop.measure(cell)}
        except Exception as error:  # whatever a method may do, the other cells go on
            line = {"status": "failed", **_failure(error)}
        yield {**_about(cell, engine), "started": started, "finished": _now(), **line}


def _failure(error: Exception) -> dict[str, Any]:
    return {
        "error": f"{type(error).__name__}: {error}",
        "where": "".join(traceback.format_tb(error.__traceback__)[-3:]),
    }


@dataclass
class _Fitted:
    """Hold a release and what making it took."""

    release: Release
    method: Mechanism
    seconds: float
    by: str


@dataclass
class _Workshop:
    """Measure the cells of one family, one after the other; keep the release they share."""

    engine: Engine
    unfinished: Path
    """Where the ledgers of releases that are being made lie: thrown away with each."""
    progress: Progress
    fitted: _Fitted | None = None
    broken: Exception | None = None

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Return what was measured of a cell."""
        if cell.measures == "subspace error":
            return self._subspace_error(cell)
        self._reset_peak()
        fitted = self._release(cell)
        test = heldout(cell)
        begun = self._clock()
        made = self._made(cell, fitted)
        ready = self._clock()
        scores = self._scores(cell, fitted, made, test)
        likeness = self._likeness(cell, made, test)
        done = self._clock()
        statement, recipe = fitted.release.statement, fitted.release.recipe
        return {
            "configuration": recipe["configuration"],
            "configuration_sha256": hashlib.sha256(
                json.dumps(recipe, sort_keys=True, default=str).encode()
            ).hexdigest(),
            "records": fitted.release.public.size,
            "class_sizes": list(fitted.release.public.sizes),
            "synthetic_records": None if made is None else len(made),
            "epsilon": statement.recompute(),
            "epsilon_rdp": statement.recompute(Accountant.RDP),
            "accountant": statement.accountant.value,
            "delta": statement.delta,
            "events": [event.to_json() for event in statement.events],
            "queries": sum(event.times for event in statement.events),
            "scores": {network: score.to_json() for network, score in scores.items()},
            **likeness,
            "seconds": {
                "fit": round(fitted.seconds, 2),
                "synthesise": round(ready - begun, 2),
                "evaluate": round(done - ready, 2),
            },
            "release_of": fitted.by,
            **self._peak(),
        }

    def _release(self, cell: Cell) -> _Fitted:
        """Fit, or take the release another cell of the family was measured with."""
        if self.broken is not None:
            raise self.broken
        if self.fitted is None:
            try:
                self.fitted = self._fit(cell)
            except Exception as error:
                self.broken = error
                raise
        return self.fitted

    def _fit(self, cell: Cell) -> _Fitted:
        method, data = cell.configured(), records(cell.dataset, cell.resize)
        begun = self._clock()
        folder = self.unfinished / f"{cell.digest}-{source_digest()}"
        try:
            release = run.fit(
                data,
                method,
                budget=cell.budget,
                delta=cell.delta,
                ledger=Ledger(folder / "ledger.jsonl"),
                engine=self.engine,
                progress=self.progress,
            )
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder)
        return _Fitted(release, method, self._clock() - begun, cell.digest)

    def _made(self, cell: Cell, fitted: _Fitted) -> SyntheticSet | None:
        """Make this cell's set from the release; a trainer makes none."""
        kind, recipe = type(fitted.method), fitted.release.recipe
        if issubclass(kind, Trainer):
            return None
        size = {} if cell.images_per_class is None else {"images_per_class": cell.images_per_class}
        method = kind.configured({**recipe["configuration"], **size, **cell.after})
        if cell.samples is not None:
            if not isinstance(method, Generative):
                raise BadConfiguration(f"'{method.name}' releases no generator to draw from.")
            return method.sample(
                fitted.release,
                cell.samples,
                seed=cell.repeat,
                engine=self.engine,
                progress=self.progress,
            )
        assert isinstance(method, Method)
        return run.synthesise(fitted.release, method, engine=self.engine, progress=self.progress)

    def _scores(
        self, cell: Cell, fitted: _Fitted, made: SyntheticSet | None, test: HeldOut
    ) -> dict[str, Scores]:
        if made is None:
            net = run.classifier(fitted.release, engine=self.engine)
            net = net.to(self.engine.torch_device)
            told = f"the released classifier ({fitted.method.name})"
            classes = len(test.classes)
            return {RELEASED: judge(net, test.images, test.labels, classes=classes, told=told)}
        return {network: self._trained(cell, network, made, test) for network in cell.networks}

    def _trained(self, cell: Cell, network: str, made: SyntheticSet, test: HeldOut) -> Scores:
        if network in SKLEARN:
            return sklearn_scores(
                made.images,
                made.labels,
                test.images,
                test.labels,
                classes=len(test.classes),
                models=(network,),
                seeds=cell.seeds,
            )[network]
        return run.evaluate(
            made,
            test,
            protocol=protocol(cell),
            network=network,
            seeds=cell.seeds,
            engine=self.engine,
            progress=self.progress,
        )

    def _likeness(self, cell: Cell, made: SyntheticSet | None, test: HeldOut) -> dict[str, Any]:
        if not cell.fidelity or made is None:
            return {}
        from understudy.evaluation.fidelity import fidelity

        figures = fidelity(made, test, engine=self.engine, progress=self.progress)
        return {"fidelity": figures.to_json()}

    def _subspace_error(self, cell: Cell) -> dict[str, Any]:
        self._reset_peak()
        begun = self._clock()
        found = subspace_error(cell, self.engine, self.progress)
        seconds = {"measure": round(self._clock() - begun, 2)}
        return {**found, "seconds": seconds, **self._peak()}

    # Time and memory

    def _clock(self) -> float:
        """Return the time when the device has done all it was told to."""
        if self.engine.torch_device.type == "cuda":
            torch.cuda.synchronize(self.engine.torch_device)
        return time.perf_counter()

    def _reset_peak(self) -> None:
        if self.engine.torch_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.engine.torch_device)
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak

    def _peak(self) -> dict[str, Any]:
        """Return the most memory held: on the device, or resident in this process.

        Where the system cannot forget an earlier peak (no /proc), a figure of a CPU is that of
        the process so far.
        """
        if self.engine.torch_device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.engine.torch_device)
            return {"peak_memory_bytes": peak, "peak_memory_of": "device, this cell"}
        with contextlib.suppress(OSError, StopIteration):
            lines = Path("/proc/self/status").read_text().splitlines()
            text = next(line for line in lines if line.startswith("VmHWM"))
            return {
                "peak_memory_bytes": int(text.split()[1]) * 1024,
                "peak_memory_of": "process, this cell",
            }
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"peak_memory_bytes": peak, "peak_memory_of": "process, so far"}


@functools.lru_cache(maxsize=1)
def records(name: str, resize: int | None) -> PrivateDataset:
    """Open a named dataset's training split behind the gate; the last one is kept at hand."""
    return load(name, resize=resize)


@functools.lru_cache(maxsize=1)
def _test(name: str, resize: int | None) -> HeldOut:
    return load_heldout(name, like=records(name, resize).public)


def heldout(cell: Cell) -> HeldOut:
    """Open the test split a cell is judged on."""
    return _test(cell.dataset, cell.resize)


def protocol(cell: Cell) -> Protocol:
    """Return how a cell's networks are trained."""
    if cell.protocol not in PROTOCOLS:
        raise UnknownName("protocol", cell.protocol, PROTOCOLS)
    chosen = PROTOCOLS[cell.protocol]
    chosen = chosen.but(**cell.training) if cell.training else chosen
    return chosen.with_flips() if cell.flips else chosen


# Side by side


def _beside(
    groups: Sequence[tuple[Cell, ...]],
    device: str,
    jobs: int,
    ends: float | None,
    unfinished: Path,
) -> Generator[Line, None, None]:
    """Give every family a process of its own, ``jobs`` at a time.

    A process that dies, for want of memory say, is a failure of the cells it had not reported.
    """
    context = multiprocessing.get_context("spawn")
    engine = Engine(device=device)
    threads = max(1, torch.get_num_threads() // jobs)
    waiting = deque(groups)
    at_work: dict[Any, tuple[multiprocessing.process.BaseProcess, list[Cell]]] = {}
    try:
        while waiting or at_work:
            while waiting and len(at_work) < jobs and not (ends and time.time() >= ends):
                family = waiting.popleft()
                ours, theirs = context.Pipe(duplex=False)
                given = (theirs, family, device, ends, unfinished, threads)
                fresh = context.Process(target=_work, args=given)
                fresh.start()
                theirs.close()
                at_work[ours] = (fresh, list(family))
            if not at_work:
                return
            for connection in wait(list(at_work)):
                assert isinstance(connection, Connection)
                process, unreported = at_work[connection]
                try:
                    line = connection.recv()
                except EOFError:
                    process.join()
                    del at_work[connection]
                    if process.exitcode:
                        for cell in unreported:
                            yield _died(cell, engine, process.exitcode)
                    continue
                del unreported[0]
                yield line
    finally:
        for left, _ in at_work.values():
            left.terminate()
            left.join()


def _work(
    connection: Connection,
    family: Sequence[Cell],
    device: str,
    ends: float | None,
    unfinished: Path,
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    for line in _measured(family, Engine(device=device), ends, unfinished):
        connection.send(line)
    connection.close()


def _died(cell: Cell, engine: Engine, code: int) -> Line:
    died = f"the process ended with code {code}" + (", killed" if code == -9 else "")
    told = {"status": "failed", "error": f"{died}.", "where": "", "finished": _now()}
    return {**_about(cell, engine), "started": None, **told}


# Provenance


def _about(cell: Cell, engine: Engine) -> dict[str, Any]:
    """Say which cell, which code and which machine."""
    return {
        "cell": cell.digest,
        "declared": cell.to_json(),
        "version": metadata.version("understudy"),
        "commit": commit(),
        "source_sha256": source_digest(),
        "machine": engine.describe(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }


@functools.lru_cache(maxsize=1)
def commit() -> str | None:
    """Return the commit this code is from, marked where the tree differs; None if not known."""
    try:
        top = _git("rev-parse", "--show-toplevel")
        if Path(top) / "src" / "understudy" != SOURCE:
            return None  # installed below somebody else's repository
        return _git("describe", "--always", "--dirty", "--abbrev=12")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=SOURCE, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@functools.lru_cache(maxsize=1)
def source_digest() -> str:
    """Digest the package's own source, which says what ran where no commit does."""
    found = hashlib.sha256()
    for file in sorted(SOURCE.rglob("*.py")):
        found.update(file.relative_to(SOURCE).as_posix().encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:16]


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
