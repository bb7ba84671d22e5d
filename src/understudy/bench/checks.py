"""Compare measurements with the bars declared for them, as CI does with the guard."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from understudy.bench.cells import Cell
from understudy.bench.lines import Line


@dataclass(frozen=True)
class Checked:
    """Say how one declared bar was met. ``met`` is None where cells are not measured."""

    cell: Cell
    met: bool | None
    told: str


def check(cells: Sequence[Cell], lines: Mapping[str, Line]) -> list[Checked]:
    """Compare the mean over each cell's repeats with its declared bar."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.bar is not None:
            groups.setdefault(cell.group, []).append(cell)
    return [_checked(group, lines) for group in groups.values()]


def _checked(group: Sequence[Cell], lines: Mapping[str, Line]) -> Checked:
    cell = group[0]
    assert cell.bar is not None
    found = [lines.get(one.digest, {"status": "not measured"}) for one in group]
    missing = [line for line in found if line["status"] != "done"]
    if missing:
        told = missing[0].get("error", "not measured")
        failed = any(line["status"] == "failed" for line in missing)
        return Checked(cell, False if failed else None, told)
    quantity = "balanced_accuracy" if cell.bar.balanced else "accuracy"
    ours = 100 * sum(line["scores"][cell.networks[0]][quantity] for line in found) / len(found)
    least, most = cell.bar.least, cell.bar.most
    inside = (least is None or ours >= least) and (most is None or ours <= most)
    asked = {line["queries"] for line in found}
    counted = cell.bar.queries is None or asked == {cell.bar.queries}
    spent = [float(line["epsilon"]) for line in found]
    kept = cell.epsilon is None or max(spent) <= cell.epsilon
    priced = cell.bar.epsilon is None or all(
        math.isclose(epsilon, cell.bar.epsilon, rel_tol=0.01) for epsilon in spent
    )
    told = f"{ours:.1f} %, asked {' or '.join(map(str, sorted(asked)))} queries"
    for holds, why in (
        (inside, f"must lie between {_or_any(least)} and {_or_any(most)} %"),
        (counted, f"must ask {cell.bar.queries}"),
        (kept, f"spent {max(spent):.4g}, more than epsilon {cell.epsilon}"),
        (priced, f"spent {max(spent):.4g}, must cost {cell.bar.epsilon}"),
    ):
        told += "" if holds else f"; {why}"
    return Checked(cell, inside and counted and kept and priced, told)


def _or_any(value: float | None) -> str:
    return "any" if value is None else f"{value:g}"
