"""Draw the report's charts as inline SVG whose colours are CSS variables.

matplotlib draws through its object API, with stand-in colours that are then replaced by
``var(--name)``, so one drawing serves light, dark and print. Text stays text: it can be selected,
searched and takes the page's font.
"""

from __future__ import annotations

import html
import io
import math
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from understudy.report.content import attack_bound

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMES = ("ink", "muted", "line", "paper", "c1", "c2", "c3", "c4", "c5", "c6")
COLOUR = {name: f"#0101{place:02x}" for place, name in enumerate(_NAMES, start=16)}
"""Stand-ins matplotlib accepts, none of which it would choose itself."""
SERIES = ("c1", "c2", "c3", "c4", "c5", "c6")
MARKERS = "osD^vPX*"

_LOCK = threading.Lock()  # rc_context changes settings that all threads share
_DASHES = (0, (4, 3))
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "understudy",
    "text.parse_math": False,
    "font.size": 10.0,
    "axes.labelsize": 10.0,
    "text.color": COLOUR["ink"],
    "axes.labelcolor": COLOUR["muted"],
    "axes.edgecolor": COLOUR["line"],
    "axes.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": False,
    "xtick.color": COLOUR["line"],
    "xtick.labelcolor": COLOUR["muted"],
    "ytick.color": COLOUR["line"],
    "ytick.labelcolor": COLOUR["ink"],
    "ytick.major.size": 0.0,
    "grid.color": COLOUR["line"],
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Hold one bar: what, how much, its interval, and a colour by name."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    colour: str = "c1"


@dataclass(frozen=True, kw_only=True)
class Dot:
    """Hold one point of a series."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


def accuracy_bars(name: str, title: str, bars: Sequence[Bar], chance: float | None) -> str:
    """Draw accuracies as horizontal bars with their intervals, against chance."""

    def draw(axes: Axes) -> None:
        for place, bar in enumerate(bars):
            axes.barh(place, 100 * bar.value, height=0.62, color=COLOUR[bar.colour])
            text = f"{100 * bar.value:.1f}"
            if bar.low is not None and bar.high is not None:
                low, high = max(0.0, bar.low), min(1.0, bar.high)
                text += f" ± {50 * (bar.high - bar.low):.1f}"
                # Drawn twice: a rim of the page's colour keeps the line visible on any bar.
                for shade, width in (("paper", 4.0), ("ink", 1.5)):
                    axes.plot([100 * low, 100 * high], [place] * 2, color=COLOUR[shade], lw=width)
                    for side in (low, high):
                        axes.plot(
                            [100 * side] * 2,
                            [place - 0.16, place + 0.16],
                            color=COLOUR[shade],
                            lw=width,
                        )
            axes.text(103, place, text, va="center")
        _label_rows(axes, [bar.label for bar in bars])
        _share_axis(axes, "accuracy on real test records, %")
        if chance is not None:
            _upright(axes, chance, f"chance {100 * chance:.0f} %")

    told = "; ".join(f"{bar.label}: {100 * bar.value:.1f} %" for bar in bars)
    if chance is not None:
        told += f"; chance: {100 * chance:.1f} %"
    return _svg(name, title, told, 5.6, 0.95 + 0.36 * len(bars), draw)


def class_bars(
    name: str, title: str, classes: Sequence[str], shares: Sequence[float | None], mean: float
) -> str:
    """Draw the accuracy within each class; many classes become a sorted profile."""
    known = [share for share in shares if share is not None]

    def rows(axes: Axes) -> None:
        for place, share in enumerate(shares):
            if share is None:
                axes.text(1.2, place, "not in the test set", va="center", color=COLOUR["muted"])
                continue
            axes.barh(place, 100 * share, height=0.62, color=COLOUR["c1"])
            axes.text(103, place, f"{100 * share:.0f}", va="center")
        _label_rows(axes, classes, most=20)
        _share_axis(axes, "recognised, % of the class")
        _upright(axes, mean, "mean")

    def profile(axes: Axes) -> None:
        heights = [100 * share for share in sorted(known)]
        axes.bar(range(len(heights)), heights, width=1.0, color=COLOUR["c1"])
        axes.set_ylim(0, 100)
        axes.set_xlim(-0.5, len(heights) - 0.5)
        axes.set_xticks([])
        axes.set_xlabel(f"{len(heights)} classes, worst to best")
        axes.set_ylabel("recognised, %")

    if len(classes) > 30:
        told = f"{len(known)} classes between {100 * min(known):.0f} and {100 * max(known):.0f} %"
        return _svg(name, title, told, 4.6, 2.6, profile)
    told = "; ".join(
        f"{label}: {'not tested' if share is None else f'{100 * share:.0f} %'}"
        for label, share in zip(classes, shares, strict=True)
    )
    return _svg(name, title, told, 4.6, 0.95 + 0.3 * len(classes), rows)


def confusion_map(
    name: str, title: str, classes: Sequence[str], counts: Sequence[Sequence[int]]
) -> str:
    """Draw the confusion matrix, each row as shares of the real class."""
    shares = [[cell / max(1, sum(row)) for cell in row] for row in counts]
    size = len(classes)
    numbered = size <= 12
    deepest = 0.5 if numbered else 1.0  # so that a number is read on any shade, in both themes

    def draw(axes: Axes) -> None:
        from matplotlib.patches import Rectangle

        for i, row in enumerate(shares):
            for j, share in enumerate(row):
                if share >= 0.004:
                    axes.add_patch(
                        Rectangle(
                            (j - 0.5, i - 0.5),
                            1,
                            1,
                            facecolor=COLOUR["c1"],
                            alpha=deepest * (0.06 + 0.94 * share),
                            linewidth=0,
                        )
                    )
                if numbered and share >= 0.005:
                    axes.text(j, i, f"{100 * share:.0f}", ha="center", va="center")
        axes.set_xlim(-0.5, size - 0.5)
        axes.set_ylim(size - 0.5, -0.5)
        axes.set_aspect("equal")
        for side in ("top", "right"):
            axes.spines[side].set_visible(True)
        axes.tick_params(length=0)
        if size <= 30:
            names = [_short(label, 18) for label in classes]
            long = max(map(len, names)) > 2
            axes.set_xticks(range(size), names, rotation=45 if long else 0)
            if long:
                for tick in axes.get_xticklabels():
                    tick.set_horizontalalignment("right")
                    tick.set_rotation_mode("anchor")
            axes.set_yticks(range(size), names)
        else:
            axes.set_xticks([])
            axes.set_yticks([])
        axes.set_xlabel("taken for")
        axes.set_ylabel("really")

    worst = max(
        ((row[j], i, j) for i, row in enumerate(shares) for j in range(size) if i != j),
        default=(0.0, 0, 0),
    )
    told = "Rows are real classes, columns what the network took them for. "
    if worst[0] > 0:
        told += (
            f"The commonest mistake: {100 * worst[0]:.0f} % of '{classes[worst[1]]}' "
            f"taken for '{classes[worst[2]]}'."
        )
    side = min(5.2, 1.5 + 0.34 * min(size, 12))
    return _svg(name, title, told, side, side * 0.92, draw)


def epsilon_bars(name: str, title: str, alone: Sequence[tuple[str, float]], together: float) -> str:
    """Draw what each event costs alone, and all together, which is not their sum."""
    rows = [*alone, ("all together", together)]
    most = max((value for _, value in rows if math.isfinite(value)), default=1.0) or 1.0

    def draw(axes: Axes) -> None:
        for place, (_, value) in enumerate(rows):
            last = place == len(rows) - 1
            finite = math.isfinite(value)
            axes.barh(
                place,
                value if finite else 1.08 * most,
                height=0.62,
                color=COLOUR["c1" if last else "c6"],
            )
            text = f"{value:.4g}" if finite else "infinite"
            axes.text((value if finite else 1.08 * most) + 0.012 * most, place, text, va="center")
        _label_rows(axes, [label for label, _ in rows])
        axes.set_xlim(0, 1.22 * most)
        if not any(math.isfinite(value) for _, value in rows):
            axes.set_xticks([])
        axes.grid(axis="x")
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("epsilon at the release's delta (prices do not add up)")

    told = "; ".join(
        f"{label}: {value:.4g}" if math.isfinite(value) else f"{label}: infinite"
        for label, value in rows
    )
    return _svg(name, title, told, 5.0, 0.95 + 0.36 * len(rows), draw)


def spent_curve(name: str, title: str, points: Sequence[tuple[int, float]]) -> str:
    """Draw epsilon of all answers so far over their number."""

    def draw(axes: Axes) -> None:
        answers, spent = zip(*points, strict=True)
        axes.plot(answers, spent, color=COLOUR["c1"], marker="o", markersize=5, lw=2)
        axes.text(
            answers[-1], spent[-1], f"{spent[-1]:.4g}  ", ha="right", va="bottom", fontweight="bold"
        )
        axes.set_xlim(0, 1.04 * answers[-1])
        axes.set_ylim(0, 1.15 * max(spent))
        axes.locator_params(axis="x", integer=True, nbins=6)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.grid(axis="y")
        axes.tick_params(axis="y", labelcolor=COLOUR["muted"])
        axes.set_xlabel("answers so far")
        axes.set_ylabel("epsilon so far")

    told = "; ".join(f"after {answers:,}: {value:.4g}" for answers, value in points)
    return _svg(name, title, told, 4.4, 3.0, draw)


def audit_bars(name: str, title: str, bounds: Sequence[tuple[str, float]], claimed: float) -> str:
    """Draw what each attack proves epsilon to be at least, against the claim."""
    finite = [value for _, value in bounds if math.isfinite(value)]
    most = max([*finite, claimed if math.isfinite(claimed) else 0.0]) or 1.0

    def draw(axes: Axes) -> None:
        for place, (_, value) in enumerate(bounds):
            length = value if math.isfinite(value) else 1.08 * most
            axes.barh(place, length, height=0.62, color=COLOUR["c2" if value > claimed else "c1"])
            text = f"{value:.3g}" if math.isfinite(value) else "infinite"
            axes.text(1.15 * most, place, text, va="center")  # clear of the line of the claim
        _label_rows(axes, [label for label, _ in bounds], most=54)
        axes.set_xlim(0, 1.12 * most)
        axes.grid(axis="x")
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("epsilon is at least")
        if math.isfinite(claimed):
            axes.axvline(claimed, color=COLOUR["ink"], lw=1.4, ls=_DASHES)
            axes.text(
                claimed, 1.0, f"claimed {claimed:.4g}", color=COLOUR["ink"], ha="center",
                va="bottom", fontsize=9, transform=axes.get_xaxis_transform(),
            )  # fmt: skip

    told = "; ".join(f"{label}: at least {value:.3g}" for label, value in bounds)
    told += f"; claimed: {claimed:.4g}"
    return _svg(name, title, told, 4.4, 0.95 + 0.36 * len(bounds), draw)


def attack_curve(
    name: str, title: str, epsilon: float, delta: float, total: float | None = None
) -> str:
    """Draw the best that any attacker can do: true members found over false alarms."""
    grid = [10 ** (-4 + 4 * step / 160) for step in range(161)]
    grid = sorted({0.0, *grid, *(step / 200 for step in range(201))})

    def draw(axes: Axes) -> None:
        axes.plot(
            [0, 100], [0, 100], color=COLOUR["muted"], lw=1, ls=_DASHES, label="blind guessing"
        )
        if math.isfinite(epsilon):
            best = [100 * attack_bound(share, epsilon, delta) for share in grid]
            share_of = [100 * share for share in grid]
            axes.fill_between(share_of, share_of, best, color=COLOUR["c1"], alpha=0.12, linewidth=0)
            axes.plot(share_of, best, color=COLOUR["c1"], lw=2, label="bound: this release")
            if total is not None and math.isfinite(total):
                curve = [100 * attack_bound(share, total, delta) for share in grid]
                axes.plot(
                    share_of,
                    curve,
                    color=COLOUR["c2"],
                    lw=1.6,
                    ls=(0, (6, 2)),
                    label="bound: with all earlier runs",
                )
        axes.set_xlim(0, 100)
        axes.set_ylim(0, 101)
        axes.set_aspect("equal")
        axes.grid()
        axes.tick_params(axis="y", labelcolor=COLOUR["muted"])
        axes.set_xlabel("false alarms, % of outsiders")
        axes.set_ylabel("found at most, % of members")
        axes.legend(loc="lower right", fontsize=9)

    told = (
        "No bound holds."
        if math.isinf(epsilon)
        else "At most "
        + "; ".join(
            f"{100 * attack_bound(share, epsilon, delta):.3g} % found at {100 * share:g} % false "
            "alarms"
            for share in (0.001, 0.01, 0.1)
        )
    )
    return _svg(name, title, told, 4.4, 4.2, draw)


def trend(
    name: str,
    title: str,
    series: Mapping[str, Sequence[Dot]],
    *,
    x_label: str,
    chance: float | None,
    colours: Mapping[str, str],
) -> str:
    """Draw accuracy over a positive quantity, one line for releases alike in all else.

    Lines of one colour are told apart by their marks. What lies at one place is drawn side by side.
    """
    everywhere = sorted({dot.x for dots in series.values() for dot in dots if math.isfinite(dot.x)})

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import FuncFormatter, NullLocator

        # A step aside is less than the width of a mark, whatever the axis spans.
        aside = (everywhere[-1] / everywhere[0] * 2.25) ** 0.025 if everywhere else 1.0
        shared = Counter(_place(dot.x) for dots in series.values() for dot in dots)
        taken: Counter[str] = Counter()
        drawn: Counter[str] = Counter()
        for label, dots in series.items():
            colour, mark = COLOUR[colours[label]], MARKERS[drawn[colours[label]] % len(MARKERS)]
            drawn[colours[label]] += 1
            finite = sorted((dot for dot in dots if math.isfinite(dot.x)), key=lambda dot: dot.x)
            beside = []
            for dot in finite:
                place = _place(dot.x)
                beside.append(dot.x * aside ** (taken[place] - (shared[place] - 1) / 2))
                taken[place] += 1
            axes.plot(
                beside,
                [100 * dot.y for dot in finite],
                color=colour,
                marker=mark,
                markersize=6,
                lw=1.4,
                label=_short(label, 40),
            )
            for x, dot in zip(beside, finite, strict=True):
                if dot.low is not None and dot.high is not None:
                    ends = [100 * max(0.0, dot.low), 100 * min(1.0, dot.high)]
                    axes.plot([x] * 2, ends, color=colour, lw=1.4)
        if chance is not None:
            axes.axhline(100 * chance, color=COLOUR["muted"], lw=1, ls=_DASHES, label="chance")
        if everywhere:
            axes.set_xscale("log")
            axes.set_xlim(everywhere[0] / 1.5, everywhere[-1] * 1.5)
            ticks = [everywhere[0]]
            for x in everywhere[1:]:
                if x > 1.3 * ticks[-1]:
                    ticks.append(x)
            axes.set_xticks(ticks[:: max(1, math.ceil(len(ticks) / 8))])
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.3g}"))
            axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(0, 102)
        axes.grid(axis="y")
        axes.tick_params(axis="y", labelcolor=COLOUR["muted"])
        axes.set_xlabel(x_label)
        axes.set_ylabel("accuracy, %")
        # Two columns where they fit: a legend wider than the axes would shrink the whole drawing.
        columns = 2 if max(map(len, series), default=0) <= 22 else 1
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=columns, fontsize=9)

    told = "; ".join(
        f"{label}: " + ", ".join(f"{100 * dot.y:.1f} % at {dot.x:.4g}" for dot in dots)
        for label, dots in series.items()
    )
    return _svg(name, title, told, 4.8, 3.6, draw)


def _place(x: float) -> str:
    """Name a place on the axis; calibrated 0.9998 and 0.9999 are at one."""
    return f"{x:.2g}"


# Shared


def _label_rows(axes: Axes, labels: Sequence[str], most: int = 28) -> None:
    axes.set_yticks(range(len(labels)), [_short(label, most) for label in labels])
    axes.set_ylim(len(labels) - 0.4, -0.75)


def _share_axis(axes: Axes, label: str) -> None:
    axes.set_xlim(0, 100)
    axes.set_xticks(range(0, 101, 20))
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(label)


def _upright(axes: Axes, share: float, label: str) -> None:
    axes.axvline(100 * share, color=COLOUR["c2"], lw=1.4, ls=_DASHES)
    axes.text(
        100 * share, 1.0, label, color=COLOUR["c2"], ha="center", va="bottom", fontsize=9,
        transform=axes.get_xaxis_transform(),
    )  # fmt: skip


def _short(text: str, most: int) -> str:
    """Shorten in the middle: names of one family mostly differ at the end."""
    if len(text) <= most:
        return text
    end = most // 2
    return f"{text[: most - 1 - end]}…{text[-end:]}"


def _svg(
    name: str, title: str, told: str, width: float, height: float, draw: Callable[[Axes], None]
) -> str:
    """Draw and return an ``<svg>`` that is named for screen readers. ``name`` is unique."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    file = io.StringIO()
    with _LOCK, warnings.catch_warnings(), matplotlib.rc_context(_STYLE):
        # Names may be in a script that matplotlib's own font lacks; the page's fonts have it.
        warnings.filterwarnings("ignore", message="Glyph")
        figure = Figure(figsize=(width, height))
        FigureCanvasSVG(figure)
        figure.patch.set_visible(False)
        axes = figure.add_subplot()
        axes.patch.set_visible(False)
        draw(axes)
        figure.savefig(
            file, format="svg", bbox_inches="tight", pad_inches=0.04, metadata={"Date": None}
        )
    return _inline(file.getvalue(), name, title, told)


def _inline(svg: str, name: str, title: str, told: str) -> str:
    """Make matplotlib's SVG document fit for a page: no prolog, own ids, CSS colours."""
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    body = re.search(r"<svg[^>]*>(.*)</svg>", svg, re.DOTALL)
    if size is None or body is None:
        raise AssertionError("matplotlib wrote an SVG of another form")
    inner = re.sub(
        r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body[1], flags=re.S
    )
    used = set(re.findall(r"""<[^>]*(?:url\(#|href="#)([^)"]+)""", inner))

    def keep(match: re.Match[str]) -> str:
        return f' id="{name}-{match[1]}"' if match[1] in used else ""

    def clean(match: re.Match[str]) -> str:
        # Inside tags only: words of the same look in somebody's class name stay as they are.
        tag = re.sub(r'\sid="([^"]*)"', keep, match[0])
        tag = tag.replace("url(#", f"url(#{name}-").replace('xlink:href="#', f'href="#{name}-')
        tag = re.sub(r"font-family: [^;\"]*;?", "", tag)
        for key, colour in COLOUR.items():
            tag = re.sub(rf"((?:fill|stroke): ){colour}\b", rf"\1var(--{key})", tag)
        return re.sub(r"\s*\n\s*", " ", tag)

    inner = re.sub(r"<[^>]+>", clean, inner)
    inner = re.sub(r"\s*\n\s*", "\n", inner)
    wide = float(size[1]) * 96 / 72
    head: dict[str, Any] = {
        "class": "chart",
        "viewBox": f"0 0 {size[1]} {size[2]}",
        "role": "img",
        "aria-labelledby": f"{name}-title {name}-told",
        "style": f"max-width: {wide:.0f}px; min-width: {0.62 * wide:.0f}px",
    }
    attributes = " ".join(f'{key}="{value}"' for key, value in head.items())
    return (
        f'<svg {attributes}><title id="{name}-title">{html.escape(title)}</title>'
        f'<desc id="{name}-told">{html.escape(told)}</desc>{inner}</svg>'
    )
