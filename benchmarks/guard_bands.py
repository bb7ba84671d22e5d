"""Measure the bands of the guard: many honest runs of each of its cells.

Usage: python benchmarks/guard_bands.py [--runs 24] [--out FILE]

Prints the entries of MEASURED in `understudy/bench/suites/guard.py`: mean and standard deviation of
what `understudy bench guard --check` compares, the mean over a cell's repeats. Give the same --out
again to go on after a stop.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from pathlib import Path

from understudy.bench.cells import Cell
from understudy.bench.lines import latest, read
from understudy.bench.runner import measure
from understudy.bench.suites import SUITES


def another(cell: Cell, run: int, repeats: int) -> Cell:
    """Return the same cell with another public seed, other networks and, always, other noise."""
    repeat = run * repeats + cell.repeat
    return dataclasses.replace(cell, repeat=repeat, seeds=(100 * repeat,), bar=None)


def main() -> None:
    """Measure, and print one line a row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: dict[str, list[Cell]] = {}
    for cell in SUITES["guard"].cells:
        rows.setdefault(cell.row, []).append(cell)
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder) / "guard.jsonl"
        for row, cells in rows.items():
            runs = [[another(c, run, len(cells)) for c in cells] for run in range(options.runs)]
            measure([cell for run in runs for cell in run], out, device="cpu")
            lines = latest(read(out))
            found = [
                statistics.fmean(
                    100 * lines[c.digest]["scores"][c.networks[0]]["accuracy"] for c in run
                )
                for run in runs
            ]
            line = lines[runs[0][0].digest]
            mean, deviation = statistics.fmean(found), statistics.stdev(found)
            epsilon = float(line["epsilon"])
            print(
                f'    "{row}": ({mean:.1f}, {deviation:.2f}, {line["queries"]}, {epsilon:.5g}),'
                f"  # {min(found):.1f} to {max(found):.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
