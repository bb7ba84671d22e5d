"""Render a report's content as one self-contained page, as Markdown and as JSON."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from understudy.errors import ReleaseError, UsageError
from understudy.privacy.durable import write_durably
from understudy.report import figures
from understudy.report.content import Report, Score, Section, number, percent


def render_html(report: Report) -> str:
    """Return one page that needs nothing else: styles, script, charts and pictures are inside."""
    environment = _environment(autoescape=True)
    script = environment.get_template("report.js").render()
    return environment.get_template("report.html").render(
        report=report,
        style=Markup(environment.get_template("report.css").render()),
        script=Markup(script),
        # The page may run this one script and load nothing, whatever a class is called.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
        charts=[_charts(section, f"r{place}") for place, section in enumerate(report.sections, 1)],
        compared=_compared(report),
    )


def render_markdown(report: Report) -> str:
    """Return the same content as Markdown; charts become tables."""
    text = _environment(autoescape=False).get_template("report.md.j2").render(report=report)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def render_json(report: Report) -> str:
    """Return the same content as strict JSON."""
    return json.dumps(report.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write(report: Report, folder: str | Path, *, name: str = "report") -> Path:
    """Write ``name``.html, .md and .json, each whole or not at all, and return the page's path."""
    if not name or Path(name).name != name:
        raise UsageError(f"'{name}' is not a plain file name. Name the folder separately.")
    page = Path(folder) / f"{name}.html"
    contents = {
        page.with_name(f"{name}.json"): render_json(report),
        page.with_name(f"{name}.md"): render_markdown(report),
        page: render_html(report),
    }
    try:
        for path, text in contents.items():
            write_durably(path, text.encode("utf-8"))
    except OSError as error:
        raise ReleaseError(
            f"The report cannot be written to {folder}: {error.strerror or error}. Choose another "
            "folder, or make room there."
        ) from error
    return page


# Charts


def _charts(section: Section, name: str) -> dict[str, Any]:
    """Draw the charts of one release."""
    charts: dict[str, Any] = {}
    if len(section.questions) > 1:
        charts["questions"] = figures.epsilon_bars(
            f"{name}-questions",
            "Epsilon of each question alone and of all together",
            [(question.name, question.epsilon_alone) for question in section.questions],
            section.epsilon,
        )
    if section.spent:
        charts["spent"] = figures.spent_curve(
            f"{name}-spent",
            "Epsilon spent as the answers came in",
            [(point.answers, point.epsilon) for point in section.spent],
        )
    if section.private:
        charts["attack"] = figures.attack_curve(
            f"{name}-attack",
            "The most that any attacker can gain",
            section.epsilon,
            section.delta,
            section.total_epsilon if section.earlier else None,
        )
    if section.scores:
        charts["accuracy"] = figures.accuracy_bars(
            f"{name}-accuracy",
            "Accuracy on real test records",
            [
                *(_bar(score.name, score) for score in section.scores),
                *(_bar(one.score.name, one.score, "c6") for one in section.ceilings),
                *(
                    figures.Bar(label=label, value=value, colour="c6")
                    for label, value in section.baselines.items()
                ),
            ],
            section.chance,
        )
        classes = [group.name for group in section.groups]
        charts["scores"] = [
            {
                "classes": figures.class_bars(
                    f"{name}-classes{place}",
                    f"Accuracy within each class, {score.name}",
                    classes,
                    score.per_class,
                    score.accuracy,
                ),
                "confusion": figures.confusion_map(
                    f"{name}-confusion{place}",
                    f"Confusion matrix, {score.name}",
                    classes,
                    score.confusion,
                ),
            }
            for place, score in enumerate(section.scores)
        ]
    if section.audited is not None and section.audited.attacks:
        charts["audit"] = figures.audit_bars(
            f"{name}-audit",
            "Lower bounds on epsilon from attacks, beside the claim",
            [(attack.name, attack.epsilon) for attack in section.audited.attacks],
            section.audited.claimed,
        )
    return {key: _safe(value) for key, value in charts.items()}


def _compared(report: Report) -> dict[str, Markup] | None:
    """Draw the charts that set releases side by side, for the score most of them have."""
    if report.comparison is None or report.comparison.score is None:
        return None
    scored = [
        (section, score)
        for section in report.sections
        for score in section.scores
        if score.name == report.comparison.score
    ]
    several = len({section.dataset for section, _ in scored}) > 1

    def method(section: Section) -> str:
        return f"{section.method}, {section.dataset}" if several else section.method

    methods = list(dict.fromkeys(method(section) for section, _ in scored))
    colour = {
        label: figures.SERIES[place % len(figures.SERIES)] for place, label in enumerate(methods)
    }
    colours: dict[str, str] = {}
    chances = {score.chance for _, score in scored}
    chance = chances.pop() if len(chances) == 1 else None

    def lines(x: str, held: Callable[[Section], str]) -> dict[str, list[figures.Dot]]:
        """Join releases that differ in ``x`` alone: what is ``held`` names the line."""
        found: dict[str, list[figures.Dot]] = {}
        for section, score in scored:
            at = getattr(section, x)
            if math.isfinite(at):
                dot = figures.Dot(x=at, y=score.accuracy, low=score.low, high=score.high)
                label = f"{method(section)}, {held(section)}"
                found.setdefault(label, []).append(dot)
                colours[label] = colour[method(section)]
        return found

    drawn = {
        "methods": figures.accuracy_bars(
            "c-methods",
            f"Accuracy of every release, {report.comparison.score}",
            [
                _bar(section.title, score, colour[method(section)])
                for section, score in sorted(scored, key=lambda one: methods.index(method(one[0])))
            ],
            chance,
        ),
        "sizes": figures.trend(
            "c-sizes",
            "Accuracy over records per class",
            lines("images_per_class", _rounded_epsilon),
            x_label="synthetic records per class",
            chance=chance,
            colours=colours,
        ),
    }
    private = lines("epsilon", lambda section: f"{section.images_per_class:.4g} per class")
    if private:
        drawn["epsilons"] = figures.trend(
            "c-epsilons",
            "Accuracy over epsilon",
            private,
            x_label="epsilon",
            chance=chance,
            colours=colours,
        )
    return {key: Markup(value) for key, value in drawn.items()}


def _rounded_epsilon(section: Section) -> str:
    """Name a guarantee so that calibrated 0.9998 and 0.9999 are alike."""
    return f"ε {float(f'{section.epsilon:.2g}'):g}" if section.private else "not private"


def _bar(label: str, score: Score, colour: str = "c1") -> figures.Bar:
    return figures.Bar(
        label=label, value=score.accuracy, low=score.low, high=score.high, colour=colour
    )


def _safe(value: Any) -> Any:
    """Mark drawings as markup; figures.py has escaped every name in them."""
    if isinstance(value, str):
        return Markup(value)
    return [{key: Markup(item) for key, item in entry.items()} for entry in value]


# Text


@functools.cache
def _environment(*, autoescape: bool) -> Environment:
    environment = Environment(
        loader=PackageLoader("understudy.report"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        percent=percent, number=number, big=_big, power=_power, md=_markdown, tile=_tile,
        long=_long, combine=_combine, percents=_percents, score=_score_named,
        when=_when,
    )  # fmt: skip
    return environment


def _big(value: float) -> str:
    """Write an epsilon in large type."""
    return "∞" if math.isinf(value) else f"{value:.4g}"


def _power(value: float) -> Markup:
    """Write a delta with a power of ten."""
    mantissa, exponent = f"{value:.3e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    power = Markup("10<sup>{}</sup>").format(str(int(exponent)).replace("-", "−"))
    return power if mantissa == "1" else Markup("{} × {}").format(mantissa, power)


def _when(time: str) -> str:
    """Write a time to the minute."""
    return re.sub(r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d):\d\d\+00:00$", r"\1 \2 UTC", time)


def _long(value: str) -> bool:
    """Tell whether a value is better wrapped anywhere, such as a hash."""
    return max(map(len, value.split()), default=0) > 30


def _combine(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, str]:
    return {**first, **second}


def _percents(shares: Mapping[str, float]) -> dict[str, str]:
    return {name: percent(share) for name, share in shares.items()}


def _score_named(section: Section, name: str) -> str:
    """Write one score of a release for the table that compares several."""
    return next((score.text for score in section.scores if score.name == name), "–")


def _tile(shape: Sequence[int]) -> int:
    """Choose the width of a picture on the page, in pixels."""
    side = max(shape[1:])
    return next((tile for limit, tile in ((16, 40), (40, 52), (80, 80)) if side <= limit), 120)


def _markdown(value: object) -> str:
    """Escape text for a line or a table cell of Markdown."""
    text = re.sub(r"\s+", " ", str(value))
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", html.escape(text, quote=False))
