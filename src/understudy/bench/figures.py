"""Draw the figures of the results page as SVG: same lines, same bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, PAPER, LINE = "#2457a6", "#b4561a", "#9aa0a6"
"""Blue and orange, told apart by colour-blind readers, and by filled and open marks."""

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "understudy",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True)
class Pair:
    """Hold one measured figure beside the published one, in percent."""

    label: str
    ours: float
    half_interval: float
    paper: float | None


@dataclass(frozen=True)
class Curve:
    """Hold one curve and the level it is read against."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    level: float


def pairs(title: str, shown: Sequence[Pair]) -> str:
    """Draw measured and published accuracies, one row each."""

    def draw(axes: Axes) -> None:
        for place, pair in enumerate(reversed(shown)):
            if pair.paper is not None:
                axes.plot([pair.ours, pair.paper], [place, place], color=LINE, lw=1.2, zorder=1)
                axes.plot([pair.paper], [place], "D", mfc="white", mec=PAPER, ms=5, zorder=2)
            axes.errorbar(
                [pair.ours], [place], xerr=[pair.half_interval], fmt="o", color=OURS, ms=5, zorder=3
            )
        axes.set_yticks(range(len(shown)), [pair.label for pair in reversed(shown)])
        axes.set_xlabel("accuracy on real test records, %; filled: ours, open: published")
        axes.grid(axis="x", color=LINE, lw=0.4)

    return _svg(title, 8.0, 0.9 + 0.24 * len(shown), draw)


def curves(title: str, across: str, up: str, shown: Sequence[Curve]) -> str:
    """Draw curves, each with its level as a dashed line of the same colour."""

    def draw(axes: Axes) -> None:
        for place, curve in enumerate(shown):
            (line,) = axes.plot(curve.x, curve.y, marker="osD^v<>ph"[place % 9], ms=3.5, lw=1.2,
                                label=curve.label)  # fmt: skip
            axes.axhline(curve.level, color=line.get_color(), lw=0.9, ls=(0, (4, 3)))
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
        axes.yaxis.set_minor_formatter(lambda value, _: "")
        axes.set_xlabel(f"{across}; dashed: without a subspace")
        axes.set_ylabel(up)
        axes.legend(frameon=False, fontsize=8)

    return _svg(title, 7.0, 4.4, draw)


def _svg(title: str, width: float, height: float, draw: Callable[[Axes], None]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set_title(title, fontsize=10)
        held = io.StringIO()
        about = {"Date": None, "Creator": "understudy bench"}
        # Tight: beside long names the axes, and what is written below, may be wider than the rest.
        figure.savefig(held, format="svg", metadata=about, bbox_inches="tight")
    return held.getvalue()
