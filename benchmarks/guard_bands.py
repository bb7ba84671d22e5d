"""Measure the bands of the guard: many honest runs of each of its cells.

Usage: python benchmarks/guard_bands.py [--runs 24] [--rows ROW ...] [--out FILE]

Prints the entries of MEASURED in `understudy/bench/suites/guard.py`: mean and standard deviation of
what `understudy bench guard --check` compares, the mean over a cell's repeats. Puts the figures
they are of, with their provenance, into `benchmarks/results/guard_bands.jsonl`. A stop costs
nothing: give the same --out again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

from understudy.bench.cells import Cell
from understudy.bench.lines import Line, latest, read
from understudy.bench.runner import measure
from understudy.bench.suites import SUITES

KEPT = Path(__file__).parent / "results" / "guard_bands.jsonl"


def another(cell: Cell, run: int, repeats: int) -> Cell:
    """Return the same cell with another public seed, other networks and, always, other noise."""
    repeat = run * repeats + cell.repeat
    return dataclasses.replace(cell, repeat=repeat, seeds=(100 * repeat,), bar=None)


def measured(row: str, cells: list[Cell], runs: int, out: Path) -> dict[str, Any]:
    """Run a row's cells many times over and return what came out, and of what code."""
    found = [[another(cell, run, len(cells)) for cell in cells] for run in range(runs)]
    measure([cell for run in found for cell in run], out, device="cpu")
    lines = latest(read(out))
    first, last = lines[found[0][0].digest], lines[found[-1][-1].digest]
    return {
        "benchmark": "guard band",
        "row": row,
        "repeats": len(cells),
        "accuracies": [round(mean_accuracy([lines[c.digest] for c in run]), 3) for run in found],
        "queries": first["queries"],
        "epsilon": first["epsilon"],
        "declared": cells[0].to_json(),
        **{key: last[key] for key in ("version", "commit", "source_sha256", "machine", "python")},
        "finished": last["finished"],
        "command": f"python benchmarks/guard_bands.py --runs {runs}",
    }


def mean_accuracy(lines: list[Line]) -> float:
    """Return the mean over repeats, in percent, as the check takes it."""
    return statistics.fmean(
        100 * score["accuracy"] for line in lines for score in line["scores"].values()
    )


def main() -> None:
    """Measure, keep, and print one line a row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--rows", nargs="*", help="Only these; the others stay as they are.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: dict[str, list[Cell]] = {}
    for cell in SUITES["guard"].cells:
        rows.setdefault(cell.row, []).append(cell)
    kept = {}
    if KEPT.exists():
        kept = {line["row"]: line for line in map(json.loads, KEPT.read_text().splitlines())}
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder) / "guard.jsonl"
        for row in options.rows or rows:
            line = kept[row] = measured(row, rows[row], options.runs, out)
            found = line["accuracies"]
            epsilon = float(line["epsilon"])
            price = 'float("inf")' if math.isinf(epsilon) else f"{epsilon:.5g}"
            print(
                f'    "{row}": ({statistics.fmean(found):.1f}, {statistics.stdev(found):.2f}, '
                f"{line['queries']}, {price}),  # {min(found):.1f} to {max(found):.1f}",
                flush=True,
            )
    lines = [json.dumps(kept[row], allow_nan=False) + "\n" for row in rows if row in kept]
    KEPT.write_text("".join(lines))


if __name__ == "__main__":
    main()
