"""`understudy bench`: measure declared cells, check them, render the page of results."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from understudy.errors import BadConfiguration, UnknownName

if TYPE_CHECKING:
    from understudy.bench.cells import Cell
    from understudy.bench.lines import Line
    from understudy.engine import Progress

errors = Console(stderr=True, highlight=False, soft_wrap=True)
out = Console(highlight=False, soft_wrap=True)

Suites = Annotated[
    list[str] | None, typer.Argument(metavar="[SUITE]...", help="See --list. 'all' is every suite.")
]
List = Annotated[bool, typer.Option("--list", help="List the suites and stop.")]
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="Only cells whose row, column or description (see --list --json) contains this text. "
        "Repeatable: each narrows further.",
    ),
]
Data = Annotated[
    list[Path] | None,
    typer.Option(help="A folder that holds named datasets, before the usual ones; repeatable."),
]
Results = Annotated[
    Path | None,
    typer.Option(
        help="The file of JSON lines. Default: benchmarks/results/bench.jsonl of the checkout."
    ),
]
Minutes = Annotated[
    float | None, typer.Option(help="Begin no cell after so many; the one under way is finished.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")]
Jobs = Annotated[int, typer.Option(help="Processes that measure at once.")]
Again = Annotated[bool, typer.Option(help="Measure cells anew that have a result already.")]
Render = Annotated[
    bool,
    typer.Option(
        "--render",
        help="Write docs/results.md and its figures; beside --results, where that is given.",
    ),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="End with exit code 1 where a declared bar is not met. Measures afresh and keeps "
        "nothing, unless --results says where.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines.")]


def bench(
    suites: Suites = None,
    list_: List = False,
    only: Only = None,
    data: Data = None,
    results: Results = None,
    minutes: Minutes = None,
    device: Device = "auto",
    jobs: Jobs = 1,
    again: Again = False,
    render: Render = False,
    check: Check = False,
    as_json: AsJson = False,
) -> None:
    """Measure the papers' tables, cell by cell, on public benchmarks; the same command resumes.

    Each cell is a release, a set made from it and networks trained on the set; its result is one
    JSON line with provenance. A run that stopped, or whose --minutes were over, is taken up by the
    same command, in the midst of a release, too. Ledgers are thrown away: these are no private
    records.

    Examples:
        understudy bench --list

        understudy bench must-hold dpdc-1 --device cuda --minutes 25

        understudy bench must-hold --only whole-set --only mnist

        understudy bench guard --check

        understudy bench --render
    """
    from understudy.bench.suites import SUITES

    if list_:
        return _list(as_json)
    if not suites and not render:
        raise BadConfiguration("Name suites to measure, or give --list or --render.")
    for name in suites or ():
        if name != "all" and name not in SUITES:
            raise UnknownName("suite", name, SUITES)
    wanted = list(SUITES) if "all" in (suites or ()) else list(suites or ())
    cells = _only(only, (cell for name in wanted for cell in SUITES[name].cells))
    with ExitStack() as stack:
        file = results or home() / "benchmarks" / "results" / "bench.jsonl"
        if check and results is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="understudy-bench-"))
            file = Path(folder) / "bench.jsonl"
        told: dict[str, Any] = {"results": str(file)}
        if wanted:
            _look_in(data)
            told |= _measure(wanted, cells, file, minutes, device, jobs, again, as_json)
        met = True
        if check:
            met = _check(cells, file, told, as_json)
        if render:
            told["page"] = str(_render(file, results is None))
    if as_json:
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    if not met:
        raise typer.Exit(1)


def _only(only: Sequence[str] | None, cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """Keep the cells that every text names."""

    def told(cell: Cell) -> str:
        return f"{cell.row}; {cell.column}; {cell}".casefold()

    kept = tuple(c for c in cells if all(text.casefold() in told(c) for text in only or ()))
    if only and not kept:
        raise BadConfiguration(f"No cell of these suites matches {' and '.join(map(repr, only))}.")
    return kept


def home() -> Path:
    """Return the checkout this package runs from; the working folder for an installed one."""
    checkout = Path(__file__).parents[3]
    return checkout if (checkout / "benchmarks").is_dir() else Path.cwd()


def _look_in(data: Sequence[Path] | None) -> None:
    """Put folders in front of the places where named datasets are looked for."""
    from understudy.data.datasets import VARIABLE

    if data:
        places = [*map(str, data), *filter(None, [os.environ.get(VARIABLE)])]
        os.environ[VARIABLE] = os.pathsep.join(places)  # worker processes inherit it


def _measure(
    names: Sequence[str],
    cells: Sequence[Cell],
    file: Path,
    minutes: float | None,
    device: str,
    jobs: int,
    again: bool,
    quiet: bool,
) -> dict[str, Any]:
    from understudy.bench.runner import measure
    from understudy.bench.suites import SUITES

    for name in names:
        if not SUITES[name].cells and not quiet:
            out.print(f"'{name}' is measured elsewhere: python {SUITES[name].elsewhere}")
    named = {cell.digest: str(cell) for cell in cells}

    def told(line: Line) -> None:
        if not quiet:
            out.print(f"{_short(line)}  {named[line['cell']]}", markup=False)

    with _watching(quiet) as progress:
        outcome = measure(
            cells,
            file,
            device=device,
            jobs=jobs,
            minutes=minutes,
            again=again,
            command="understudy bench " + " ".join(names),
            told=told,
            progress=progress,
        )
    if not quiet:
        out.print(
            f"{outcome.done} measured, {outcome.failed} failed, {outcome.skipped} measured "
            f"earlier, {outcome.left} left."
        )
    return {"measured": outcome.done, "failed": outcome.failed, "measured_earlier": outcome.skipped,
            "left": outcome.left}  # fmt: skip


def _short(line: Line) -> str:
    """Say in a word how a cell went."""
    if line["status"] != "done":
        return f"failed ({line['error']})"
    scores = [f"{100 * score['accuracy']:.1f} %" for score in line.get("scores", {}).values()]
    return ", ".join(scores) or "done"


@contextmanager
def _watching(quiet: bool) -> Iterator[Progress]:
    """Show what is being done on one line of a terminal."""
    if quiet or not errors.is_terminal:
        yield lambda done, total, text: None
        return
    with errors.status("") as status:
        yield lambda done, total, text: status.update(f"{done}/{total} {text}")


def _check(cells: Sequence[Cell], file: Path, told: dict[str, Any], quiet: bool) -> bool:
    from understudy.bench.checks import check
    from understudy.bench.lines import latest, read

    found = check(cells, latest(read(file)))
    if not found:
        raise BadConfiguration("These suites declare no bars, so there is nothing to check.")
    told["checks"] = [{"cell": str(one.cell), "met": one.met, "told": one.told} for one in found]
    for one in found:
        if not quiet:
            word = {True: "ok", False: "MISSED", None: "not measured"}[one.met]
            out.print(f"{word:>12}  {one.cell.row or one.cell}: {one.told}", markup=False)
    return all(one.met for one in found)


def _render(file: Path, ours: bool) -> Path:
    from understudy.bench.render import write

    page = home() / "docs" / "results.md" if ours else file.with_suffix(".md")
    write(file, page)
    out.print(f"Written to {page}", soft_wrap=True)
    return page


def _list(as_json: bool) -> None:
    from understudy.bench.suites import SUITES

    if as_json:
        listing = [
            {
                "name": suite.name,
                "title": suite.title,
                "source": suite.source,
                "told": suite.told,
                "cells": [{"digest": c.digest, **c.to_json()} for c in suite.cells],
                "elsewhere": suite.elsewhere,
            }
            for suite in SUITES.values()
        ]
        sys.stdout.write(json.dumps(listing, indent=2) + "\n")
        return
    table = Table("suite", "cells", "what", box=None, pad_edge=False)
    for suite in SUITES.values():
        cells = str(len(suite.cells)) if suite.cells else "elsewhere"
        table.add_row(suite.name, cells, suite.title)
    out.print(table)
