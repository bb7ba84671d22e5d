"""Write docs/results.md and its figures from the lines of measurements.

Every declared cell is on the page: what was not measured says so. Nothing is chosen: a figure is
the mean over all releases of a cell, each at its last measurement.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.bench.cells import Cell, Reference, Suite
from understudy.bench.figures import Curve, Pair, curves, pairs
from understudy.bench.lines import Line, latest, read
from understudy.bench.suites import REASONS, SUITES
from understudy.privacy.durable import write_durably

WORTH_A_REASON = 2.0
"""Points from the published figure beyond which the page asks for a reason (issue 8)."""

NOISES = (4e-4, 6e-4, 9e-4)
"""Standard deviations of the noise on a class mean, low to high as in Dosser's Figure 5."""

PREAMBLE = """# Results

What was measured with this code, and the command that measured it. Rendered by `understudy bench
--render` from `benchmarks/results/*.jsonl`, where each figure stands with seeds, times, peak
memory, software versions and confusion matrices. Noise is secret, so a repeat gives other digits
within the spread.

Accuracy is in percent, on the whole real test split, after the last epoch: nothing is chosen by
test accuracy. The **bold** figure is ours, the mean over releases of the mean over networks, with
half its 95 % t interval: over releases, or over the networks of a single one; of two releases both
are given. (2 x 3) means two releases, three networks trained on each. The published figure follows,
then the gap in points. Delta is 1e-5. Epsilon is recomputed from the recorded events by privacy
loss distributions; the papers' Renyi figures are higher for the same noise. Cells may be measured
several at a time on one device, so the time a cell took is no measure of speed: that is the last
section's."""

NO_GPU = (
    "No GPU was at hand for any of these figures. What the papers report at full scale (10,000 "
    "iterations, several networks and repeats) is therefore open for most methods, and nothing is "
    "claimed about GPU speed."
)


def write(results: Path, page: Path) -> None:
    """Render a file of lines to a page and to the figures beside it."""
    drawn: dict[str, str] = {}
    memory = _others(results.with_name("gate_memory.jsonl"))
    speed = [
        line for file in sorted(results.parent.glob("speed-*.jsonl")) for line in _others(file)
    ]
    text = render(SUITES, read(results), drawn, memory, speed)
    for name, svg in drawn.items():
        write_durably(page.parent / "figures" / name, svg.encode())
    write_durably(page, text.encode())


def render(
    suites: Mapping[str, Suite],
    lines: Sequence[Line],
    drawn: dict[str, str] | None = None,
    memory: Sequence[Line] = (),
    speed: Sequence[Line] = (),
    reasons: Mapping[tuple[str, str, str], str] = REASONS,
) -> str:
    """Return the page; figures are put into ``drawn``, by file name."""
    standing = latest(lines)
    figures: dict[str, str] = {} if drawn is None else drawn
    parts = [PREAMBLE]
    done = [line for line in standing.values() if line["status"] == "done"]
    if not any("cuda" in line["machine"]["device"] for line in done):
        parts.append(_wrapped(NO_GPU))
    parts.append(_overview(suites, standing))
    for suite in suites.values():
        parts += _section(suite, standing, figures, reasons)
    if speed:
        parts += _speed_section(speed)
    if memory:
        parts += _memory_section(memory)
    return "\n\n".join(parts) + "\n"


# What a table shows


@dataclass(frozen=True)
class Entry:
    """Hold one figure of a table: the repeats of a cell, seen by one network."""

    cells: tuple[Cell, ...]
    network: str
    lines: tuple[Line | None, ...]

    @property
    def cell(self) -> Cell:
        """Return the first repeat."""
        return self.cells[0]

    @property
    def row(self) -> str:
        """Return the row it stands in."""
        return self.cell.row or self.cell.method

    @property
    def column(self) -> str:
        """Return the column: the network, where a cell has several."""
        return self.network if len(self.cell.networks) > 1 else self.cell.column

    @property
    def measured(self) -> tuple[Line, ...]:
        """Return the lines of the repeats that were measured."""
        return tuple(line for line in self.lines if line is not None and line["status"] == "done")

    @property
    def failure(self) -> str | None:
        """Return why a repeat failed, if one did."""
        failed = (line for line in self.lines if line is not None and line["status"] == "failed")
        return next((line["error"] for line in failed), None)

    def mean(self, quantity: str = "accuracy") -> float | None:
        """Return the mean over the measured releases, in percent."""
        found = self._of(quantity)
        return math.fsum(found) / len(found) if found else None

    @property
    def releases(self) -> list[float]:
        """Return the accuracy of each measured release, the mean over its networks."""
        return self._of("accuracy")

    def _of(self, quantity: str) -> list[float]:
        return [100 * line["scores"][self.network][quantity] for line in self._scored]

    @property
    def _scored(self) -> list[Line]:
        return [line for line in self.measured if self.network in line.get("scores", {})]

    @property
    def half_interval(self) -> float | None:
        """Return half the 95 % t interval over releases, or over the networks of a single one."""
        found = self.releases
        if len(found) == 1:
            found = [100 * a for a in self._scored[0]["scores"][self.network]["accuracies"]]
        if len(found) < 2:
            return None
        from scipy.stats import t  # type: ignore[import-untyped, unused-ignore]

        mean = math.fsum(found) / len(found)
        variance = math.fsum((x - mean) ** 2 for x in found) / (len(found) - 1)
        return float(t.ppf(0.975, len(found) - 1)) * math.sqrt(variance / len(found))

    @property
    def reference(self) -> Reference | None:
        """Return the published figure it is compared with: the first that fits the network."""
        fitting = (r for r in self.cell.references if r.network in (None, self.network))
        return next(fitting, None)

    @property
    def gap(self) -> float | None:
        """Return ours minus the published figure, in points."""
        ours = self.mean()
        return None if ours is None or self.reference is None else ours - self.reference.figure


def entries(suite: Suite, standing: Mapping[str, Line]) -> list[Entry]:
    """Put a suite's repeats together, in the order declared."""
    groups: dict[str, list[Cell]] = {}
    for cell in suite.cells:
        groups.setdefault(cell.group, []).append(cell)
    return [
        Entry(tuple(cells), network, tuple(standing.get(cell.digest) for cell in cells))
        for cells in groups.values()
        for network in cells[0].networks
    ]


# Sections


def _overview(suites: Mapping[str, Suite], standing: Mapping[str, Line]) -> str:
    rows = ["| suite | measured | failed | of |", "| --- | ---: | ---: | ---: |"]
    for suite in suites.values():
        found = [standing.get(cell.digest) for cell in suite.cells]
        count = {
            status: sum(line is not None and line["status"] == status for line in found)
            for status in ("done", "failed")
        }
        told = [str(count["done"]), str(count["failed"]), f"{len(found)} cells"]
        if suite.elsewhere:
            told = ["", "", f"measured by `{suite.elsewhere}`"]
        rows.append(" | ".join(["| " + f"[{suite.title}](#{suite.name})", *told]) + " |")
    return "\n".join(rows)


def _section(
    suite: Suite,
    standing: Mapping[str, Line],
    drawn: dict[str, str],
    reasons: Mapping[tuple[str, str, str], str],
) -> Iterator[str]:
    yield f'<a id="{suite.name}"></a>\n\n## {suite.title}'
    if suite.told:
        yield _wrapped(suite.told)
    if suite.elsewhere:
        yield f"Measured by `python {suite.elsewhere}`, not by `understudy bench`."
        return
    shown = entries(suite, standing)
    if suite.cells[0].measures == "subspace error":
        yield _error_table(shown)
        found = _error_curves(shown)
        if found:
            drawn[f"{suite.name}.svg"] = curves(suite.title, "retained directions",
                                                "mean squared error", found)  # fmt: skip
    else:
        yield _table(shown)
        notes = dict.fromkeys(note for entry in shown for note in _notes(suite, entry, reasons))
        if notes:
            yield "\n".join(f"- {note}" for note in notes)
        found_pairs = [pair for entry in shown if (pair := _pair(entry)) is not None]
        if len(found_pairs) > 1:
            drawn[f"{suite.name}.svg"] = pairs(suite.title, found_pairs)
    if f"{suite.name}.svg" in drawn:
        yield f"![{suite.title}](figures/{suite.name}.svg)"
    yield _provenance(suite, [line for entry in shown for line in entry.measured])


def _table(shown: Sequence[Entry]) -> str:
    """Return the entries as a table: rows and columns in the order in which they first appear."""
    rows = list(dict.fromkeys(entry.row for entry in shown))
    columns = list(dict.fromkeys(entry.column for entry in shown))
    at = {(entry.row, entry.column): entry for entry in shown}
    text = ["| | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    for row in rows:
        cells = [_told(at[row, c]) if (row, c) in at else "" for c in columns]
        text.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(text)


def _told(entry: Entry) -> str:
    """Say all of one figure in one table cell."""
    parts = [_ours(entry)]
    if entry.reference is not None:
        reference = entry.reference
        spread = "" if reference.spread is None else f" ± {reference.spread:g}"
        parts.append(f"paper {reference.figure:g}{spread}")
    if entry.gap is not None:
        parts.append(f"gap {entry.gap:+.1f}")
    if entry.cell.bar is not None:
        parts.append(_bar(entry))
    return "; ".join(parts)


def _ours(entry: Entry) -> str:
    ours, declared = entry.mean(), len(entry.cells)
    if ours is None:
        return "failed" if entry.failure is not None else "not measured"
    half, first, releases = entry.half_interval, entry.measured[0], entry.releases
    networks = len(first["scores"][entry.network]["seeds"])
    missing = "" if len(releases) == declared else f" of {declared}"
    count = f"{len(releases)}{missing} x {networks}"
    if len(releases) == 2:  # an interval of two says less than the two
        text = f"**{ours:.1f}** ({releases[0]:.1f} and {releases[1]:.1f}; {count})"
    else:
        text = f"**{ours:.1f}**{'' if half is None else f' ± {half:.1f}'} ({count})"
    if 1 / len(first["class_sizes"]) < first["scores"][entry.network]["chance"] - 0.1:
        text += f", balanced {entry.mean('balanced_accuracy'):.1f}"
    if entry.cell.epsilon is None and float(first["epsilon"]) < math.inf:
        text += f", epsilon {float(first['epsilon']):.3g}"
        text += f" (Renyi {float(first['epsilon_rdp']):.2f})"
    if "fidelity" in first:
        made, real = (
            first["fidelity"][which]["frechet_distance"] for which in ("synthetic", "real")
        )
        text += f", distance {made:.3g} (real against real {real:.3g})"
    return text


def _bar(entry: Entry) -> str:
    bar = entry.cell.bar
    assert bar is not None
    what = "balanced " if bar.balanced else ""
    sides = (("at least", bar.least), ("at most", bar.most))
    text = f"must be {what}" + ", ".join(f"{side} {x:g}" for side, x in sides if x is not None)
    ours = entry.mean("balanced_accuracy" if bar.balanced else "accuracy")
    if ours is None:
        return text
    short = max(0.0, (bar.least or 0.0) - ours, ours - (bar.most or 100.0))
    return text + (": holds" if short == 0 else f": **misses by {short:.1f}**")


def _notes(
    suite: Suite, entry: Entry, reasons: Mapping[tuple[str, str, str], str]
) -> Iterator[str]:
    """Explain what a table cell has no room for: gaps, failures, remarks on the reference."""
    where = ", ".join(filter(None, (entry.row, entry.column)))
    if entry.failure is not None:
        yield f"{where}: failed. {entry.failure}"
    if entry.gap is not None and abs(entry.gap) > WORTH_A_REASON:
        side = "below" if entry.gap < 0 else "above"
        reason = reasons.get((suite.name, entry.row, entry.column), "not explained yet")
        yield f"{where}: {abs(entry.gap):.1f} points {side} the paper: {reason}."
    if entry.mean() is not None and entry.reference is not None and entry.reference.remark:
        yield f"{where}, {entry.reference.source}: {entry.reference.remark}."
    for line in entry.measured:
        if line.get("note"):
            yield f"{where}: {line['note']}"


def _provenance(suite: Suite, lines: Sequence[Line]) -> str:
    """Say by which command, code and machine the figures came, and how long they took."""
    text = [f"    understudy bench {suite.name}"]
    told: dict[tuple[str, ...], list[Line]] = {}
    for line in {line["cell"]: line for line in lines}.values():
        machine = line["machine"]
        place = f"{machine['device']}, {machine['hardware']}, {_many(line['threads'], 'thread')}"
        source = _source(line)
        command = line["command"] or ""
        key = (command, source, f"{place}, torch {machine['torch']}")
        told.setdefault(key, []).append(line)
    notes = []
    for (command, source, place), found in told.items():
        days = sorted({line["finished"][:10] for line in found if line["finished"]})
        when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "date not recorded"
        notes.append(
            f"- {_many(len(found), 'cell')}: `{command}`, {source}, {place}, {when}; {_spent(found)}."
        )
    return "\n\n".join([*text, *(["\n".join(notes)] if notes else [])])


def _source(line: Line) -> str:
    if line["commit"]:
        return f"commit {line['commit']}"
    return f"source {line['source_sha256']}" if line["source_sha256"] else "source as noted"


def _spent(lines: Sequence[Line]) -> str:
    seconds = [sum(line["seconds"].values()) for line in lines]
    peaks = [line["peak_memory_bytes"] for line in lines if line.get("peak_memory_bytes")]
    text = " to ".join(dict.fromkeys(map(_time, (min(seconds), max(seconds))))) + " a cell"
    return text + (f", at most {max(peaks) / 2**20:,.0f} MiB" if peaks else "")


def _many(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False))


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _pair(entry: Entry) -> Pair | None:
    ours = entry.mean()
    if ours is None:
        return None
    paper = None if entry.reference is None else entry.reference.figure
    return Pair(f"{entry.row}, {entry.column}", ours, entry.half_interval or 0.0, paper)


# Errors of a mean


def _error_table(shown: Sequence[Entry]) -> str:
    text = ["| | noise on the mean | without a subspace | best with one | at directions |",
            "| --- | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for entry in shown:
        if not entry.measured:
            word = "failed" if entry.failure else "not measured"
            text.append(f"| {entry.column} | | {word} | {word} | |")
            continue
        for noise in NOISES:
            plain, errors, dimensions = _errors(entry.measured[0], noise)
            best = min(errors)
            where = dimensions[errors.index(best)]
            text.append(f"| {entry.column} | {noise:g} | {plain:.3g} | {best:.3g} | {where} |")
    return "\n".join(text)


def _errors(line: Line, noise: float) -> tuple[float, list[float], list[int]]:
    """Return the mean squared error a coordinate, without and with a subspace."""
    features, dimensions = line["features"], line["dimensions"]
    lost = [math.fsum(column) / len(column) for column in zip(*line["residuals"])]
    errors = [(k * noise**2 + rest) / features for k, rest in zip(dimensions, lost)]
    return noise**2, errors, dimensions


def _error_curves(shown: Sequence[Entry]) -> list[Curve]:
    found = []
    for entry in shown:
        for noise in NOISES if entry.measured else ():
            plain, errors, dimensions = _errors(entry.measured[0], noise)
            name = f"{entry.column}, noise {noise:g}"
            found.append(Curve(name, tuple(dimensions), tuple(errors), plain))
    return found


# Speed and memory


def _others(file: Path) -> list[Line]:
    """Read the lines of a benchmark that is no cell."""
    if not file.exists():
        return []
    return [json.loads(text) for text in file.read_text("utf-8").splitlines() if text.strip()]


SPEED = (
    "Medians of one process on one machine, in which the ways took turns; benchmarks/speed/README.md "
    "says what each is. *Plain* is the usual code restated: a loop over classes, one operation at a "
    "time, networks initialised on the CPU. What is worth reading is the ratio within a row. The last "
    "column is the larger of the two least times, for the arithmetic and for the bytes moved, over "
    "the time taken; both ceilings were measured in the same run."
)


def _speed_section(lines: Sequence[Line]) -> Iterator[str]:
    """Show each measurement of the speed suite at its last time on each machine."""
    yield '<a id="speed"></a>\n\n## Speed\n\n' + _wrapped(SPEED)
    last = {(line["hardware"], line["measurement"]): line for line in lines}
    for hardware in dict.fromkeys(hardware for hardware, _ in last):
        own = [line for (where, _), line in last.items() if where == hardware]
        rows = [
            f"| {hardware} | ours | beside it | times as fast | peak memory | of the ceiling |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for line in own:
            first, *others = line["ms"]
            peaks, roofline = line["peak_memory_bytes"], line["roofline"]
            for other in others:
                both = " / ".join(f"{peaks[way] / 2**20:,.0f}" for way in (first, other))
                rows.append(
                    f"| {line['measurement']} | {line['ms'][first]:.3g} ms | "
                    f"{other}: {line['ms'][other]:.4g} ms | {line['times_as_fast'][other]:.1f} | "
                    f"{both} MiB | {roofline['fraction']:.0%} of {roofline['bound_by']} |"
                )
        yield "\n".join(rows)
        told = {f"torch {line['torch']}, {line['command']}": None for line in own}
        yield "\n".join(f"- {text}" for text in told)


def _memory_section(lines: Sequence[Line]) -> Iterator[str]:
    yield "## The gate's memory"
    yield (
        "A memory-mapped dataset of 32x32 colour images; peak anonymous memory of the process above "
        f"what it held before, for a whole-set and a Poisson query in chunks of {_chunk(lines)}."
    )
    rows = ["| records | data on disk | peak |", "| ---: | ---: | ---: |"]
    for line in lines:
        sizes = (line["data_bytes"], line["peak_bytes"])
        rows.append(
            f"| {line['records']:,} | " + " | ".join(f"{x / 2**20:.0f} MiB" for x in sizes) + " |"
        )
    yield "\n".join(rows)
    yield "    python benchmarks/gate_memory.py --out benchmarks/results/gate_memory.jsonl"
    yield "What grows is labels, digests and coins: some tens of bytes a record."


def _chunk(lines: Sequence[Line]) -> Any:
    return lines[0]["chunk"]
