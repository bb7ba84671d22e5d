"""Gather what a report says, once, as plain values; HTML, Markdown and JSON only render it.

What is said of a release is post-processing of what is already private: nothing here reads a
private record. Figures measured beforehand on real records are shown as well, where they lie beside
the release; ``Section.uncovered`` names them, because no guarantee covers them.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import io
import json
import math
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from understudy.data.layout import PARQUET, TENSORS
from understudy.data.synthetic import SyntheticSet
from understudy.errors import ReleaseError, UnknownName, UsageError
from understudy.evaluation.classify import Scores
from understudy.methods import Generative, Trainer, mechanism_named, method_named
from understudy.privacy.accounting import Accountant, epsilon
from understudy.privacy.events import Event
from understudy.privacy.public import Adjacency
from understudy.privacy.release import Release
from understudy.privacy.statement import Statement

FORMAT = 1
MOST_PICTURES = 3000
"""A page with more pictures than this opens slowly; the rest is counted, and is in the release."""
ROWS_PER_CLASS = 5
MOST_FEATURES = 12
SPENT_POINTS = 8
FALSE_ALARMS = (0.001, 0.01, 0.1)

ACCOUNTANTS = {
    Accountant.PLD: "privacy loss distributions (dp-accounting)",
    Accountant.RDP: "Rényi DP, improved conversion (dp-accounting)",
    Accountant.RDP_CLASSIC: "Rényi DP, classic conversion (dp-accounting)",
}
NEIGHBOURS = {
    Adjacency.ADD_OR_REMOVE: "one is added or removed",
    Adjacency.REPLACE: "one is exchanged for any other",
}
AT_STAKE = {
    Adjacency.ADD_OR_REMOVE: "whether that was in the data",
    Adjacency.REPLACE: "which of two candidates that was",
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Name one release to report on, with whatever was made and measured from it.

    ``scores`` holds ``Scores.to_json()`` by the name to show (a protocol or a network), the most
    important first; ``ceilings`` the same of references computed on request, explained in their
    settings. ``fidelity`` is ``Fidelity.to_json()``, ``audit`` ``AuditResult.to_json()``.
    ``baselines`` are further accuracies to stand beside, such as other methods'.
    """

    release: Release
    synthetic: SyntheticSet | None
    title: str
    scores: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ceilings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fidelity: Mapping[str, Any] | None = None
    test: str = ""
    """What the real records are called that scores, ceilings and fidelity were measured on."""
    audit: Mapping[str, Any] | None = None
    baselines: Mapping[str, float] = field(default_factory=dict)
    folder: Path | None = None


# What a report says


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Hold one synthetic image as a PNG data URI."""

    number: int
    """Its place in its class, from 1."""
    uri: str


@dataclass(frozen=True, kw_only=True)
class ClassGroup:
    """Hold what was released of one class."""

    name: str
    count: int
    pictures: tuple[Picture, ...] = field(default=(), metadata={"json": False})


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Hold the first rows of each class of a synthetic table, as text."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left_out: int
    """Columns that are not shown."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Hold one question asked of the records, and what it costs alone."""

    name: str
    stage: int
    times: int
    per_class: bool
    inclusion: str
    noise_multiplier: float
    bound: float
    unit: str
    event: str
    epsilon_alone: float


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Hold what had been spent after so many answers."""

    answers: int
    epsilon: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """Hold an earlier run on the same records."""

    time: str
    by: str
    events: str
    epsilon_alone: float


@dataclass(frozen=True, kw_only=True)
class Catch:
    """Bound the share of true members found at a share of false alarms."""

    false_alarms: float
    found_at_most: float


@dataclass(frozen=True, kw_only=True)
class Score:
    """Hold accuracy on real held-out records after training on the synthetic set."""

    name: str
    protocol: str
    network: str
    seeds: tuple[int, ...]
    accuracies: tuple[float, ...]
    accuracy: float
    low: float | None
    high: float | None
    """The 95 % interval of the mean over seeds; None with a single seed, or without any spread."""
    balanced_accuracy: float
    chance: float
    """The best constant answer: the share of the largest class of the test set."""
    tested: int
    per_class: tuple[float | None, ...]
    confusion: tuple[tuple[int, ...], ...]
    """Counts: real class by predicted class, over all seeds."""
    settings: Mapping[str, str]

    @property
    def interval(self) -> str:
        """Write the interval, or why there is none."""
        if self.low is None or self.high is None:
            return "unknown: one seed" if len(self.seeds) == 1 else "every seed gave the same"
        return f"{percent(self.low)} to {percent(self.high)}"

    @property
    def weakest(self) -> int | None:
        """Return the class that is recognised least; None where all are alike."""
        known = [share for share in self.per_class if share is not None]
        return None if len(set(known)) < 2 else self.per_class.index(min(known))

    @property
    def text(self) -> str:
        """Write the mean with its interval's half width."""
        if self.low is None or self.high is None:
            return percent(self.accuracy)
        return f"{100 * self.accuracy:.1f} ± {50 * (self.high - self.low):.1f} %"


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """Hold a reference to read a score against, and one sentence on what it is."""

    score: Score
    told: str


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """Hold one fidelity figure of the set, and of as many real records in its place."""

    title: str
    meaning: str
    synthetic: str
    real: str


@dataclass(frozen=True, kw_only=True)
class Resemblance:
    """Hold how near the set is to held-out real records."""

    features: str
    compared: int
    records: int
    reference: int
    caution: str
    figures: tuple[Likeness, ...]


@dataclass(frozen=True, kw_only=True)
class Attack:
    """Hold what one attack of an audit proves."""

    name: str
    epsilon: float
    confidence: float
    rests_on: str
    figures: str


@dataclass(frozen=True, kw_only=True)
class Audited:
    """Hold an audit of the recipe a release was made by."""

    pool: str
    claimed: float
    delta: float
    lower_bound: float
    confidence: float
    passed: bool
    runs: int
    releases: int
    findings: tuple[str, ...]
    attacks: tuple[Attack, ...]

    @property
    def strongest(self) -> Attack | None:
        """Return the attack with the largest bound, if any attack has one."""
        best = max(self.attacks, key=lambda attack: attack.epsilon, default=None)
        return best if best is not None and best.epsilon > 0 else None


@dataclass(frozen=True, kw_only=True)
class Snippet:
    """Hold a few lines that load the set."""

    name: str
    code: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """Hold everything a report says about one release."""

    title: str
    dataset: str
    fingerprint: str
    method: str
    method_title: str
    private: bool
    paragraph: str
    epsilon: float
    delta: float
    total_epsilon: float
    unit: str
    size: int
    images_per_class: float
    real_size: int | None
    shape: tuple[int, ...]
    is_image: bool
    channels_note: str
    groups: tuple[ClassGroup, ...]
    rows: Rows | None
    facts: Mapping[str, str]
    questions: tuple[Question, ...]
    stages: int
    spent: tuple[Spent, ...]
    """Epsilon as the answers came in; empty where there was one answer, or no guarantee."""
    catches: tuple[Catch, ...]
    at_stake: str
    """What an attacker wants to learn, for these neighbours."""
    best_guess: float
    earlier: tuple[Run, ...]
    made: str
    chance: float
    """What the best constant answer reaches; 1 / classes where nothing was tested."""
    scores: tuple[Score, ...]
    ceilings: tuple[Ceiling, ...]
    resemblance: Resemblance | None
    audited: Audited | None
    test: str
    """What the real records are called that figures were measured on; empty where unknown."""
    uncovered: tuple[str, ...]
    """What was measured on real records without noise, a sentence each."""
    baselines: Mapping[str, float]
    endless: bool
    """Whether the release holds a generator, from which any number of records can be drawn."""
    snippets: tuple[Snippet, ...]
    configuration: Mapping[str, str]
    preparation: tuple[str, ...]
    environment: Mapping[str, str]
    assumptions: tuple[str, ...]
    departures: tuple[str, ...]

    @property
    def pictured(self) -> int:
        """Count the pictures embedded."""
        return sum(len(group.pictures) for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Hold what several releases say side by side."""

    score: str | None
    """The name of the score the figures show: the one most releases have."""
    names: tuple[str, ...]
    """Every score some release has."""
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Hold a whole report. Plain values only."""

    title: str
    made: str
    software: str
    sections: tuple[Section, ...]
    comparison: Comparison | None

    def to_json(self) -> dict[str, Any]:
        """Return plain values for report.json. Pictures stay in the release itself."""
        return {"format": FORMAT, **_plain(self)}


def gather(entries: Sequence[Entry]) -> Report:
    """Gather the content of a report on one release or on several."""
    if not entries:
        raise UsageError("There is no release to report on. Name at least one release folder.")
    sections = tuple(_section(entry) for entry in entries)
    several = len(sections) > 1
    return Report(
        title=f"{len(sections)} releases compared" if several else sections[0].title,
        made=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        software=f"understudy {metadata.version('understudy')}",
        sections=sections,
        comparison=_compare(sections, entries) if several else None,
    )


# One release


def _section(entry: Entry) -> Section:
    release, synthetic = entry.release, entry.synthetic
    if _is_of(release, Trainer):
        raise ReleaseError(
            f"'{entry.title}' holds a classifier, and a report is about synthetic sets. `understudy "
            "evaluate` tests it and `understudy verify` recomputes its guarantee."
        )
    if synthetic is None or len(synthetic) == 0:
        raise ReleaseError(
            f"'{entry.title}' has no synthetic set yet. If its run is still going, wait for it; if "
            "it stopped half way, give the same `understudy synth` command again: it goes on where "
            "it stopped and pays for nothing twice. If it holds noisy answers only, `understudy "
            "synthesise` makes a set from them, for free."
        )
    statement, public = release.statement, release.public
    if synthetic.public.classes != public.classes or synthetic.public.shape != public.shape:
        raise ReleaseError(
            f"'{entry.title}': the synthetic set has other classes or another shape than its "
            "release, so they do not belong together. Make the set from this release again."
        )
    classes = tuple(map(printable, public.classes))
    scores = tuple(
        _score(printable(name), data, classes, entry.title) for name, data in entry.scores.items()
    )
    return Section(
        title=printable(entry.title),
        dataset=printable(public.name),
        fingerprint=statement.fingerprint,
        method=printable(str(release.recipe["method"])),
        method_title=printable(_method_title(str(release.recipe["method"]))),
        private=statement.private,
        paragraph=printable(statement.paragraph()),
        epsilon=statement.epsilon,
        delta=statement.delta,
        total_epsilon=statement.total_epsilon,
        unit=printable(public.unit),
        size=len(synthetic),
        images_per_class=len(synthetic) / len(classes),
        real_size=None if public.counts is None else public.size,
        shape=public.shape,
        is_image=public.is_image,
        channels_note=_channels_note(public.shape),
        groups=_groups(synthetic, classes),
        rows=None if public.is_image else _rows(synthetic, classes),
        facts=_facts(statement),
        questions=_questions(statement),
        stages=len(statement.stages),
        spent=_spent(statement),
        catches=tuple(
            Catch(
                false_alarms=share,
                found_at_most=attack_bound(share, _known(statement), statement.delta),
            )
            for share in FALSE_ALARMS
        ),
        at_stake=AT_STAKE[statement.adjacency],
        best_guess=_best_guess(_known(statement), statement.delta),
        earlier=_earlier(statement),
        made=statement.made,
        chance=scores[0].chance if scores else 1 / len(classes),
        scores=scores,
        ceilings=tuple(
            Ceiling(
                score=_score(printable(name), data, classes, entry.title),
                told=printable(str(data.get("settings", {}).get("ceiling", ""))),
            )
            for name, data in entry.ceilings.items()
        ),
        resemblance=None if entry.fidelity is None else _resemblance(entry.fidelity, entry.title),
        audited=None if entry.audit is None else _audited(entry.audit, entry.title),
        test=printable(entry.test),
        uncovered=_uncovered(entry),
        baselines={printable(name): float(value) for name, value in entry.baselines.items()},
        endless=_is_of(release, Generative),
        snippets=_snippets(entry, synthetic),
        configuration={
            printable(key): printable(_value(value))
            for key, value in _flat(release.recipe.get("configuration", {}))
        },
        preparation=tuple(map(printable, public.preparation)),
        environment=_environment(statement),
        assumptions=tuple(map(printable, statement.assumptions)),
        departures=tuple(map(printable, statement.departures)),
    )


def _uncovered(entry: Entry) -> tuple[str, ...]:
    """Say which figures were measured on real records, which no noise stands before."""
    test = f" ({printable(entry.test)})" if entry.test else ""
    told = (
        (entry.scores, f"Accuracy was measured on real test records{test}."),
        (entry.ceilings, "The references were computed from real training records, read openly."),
        (entry.fidelity, f"Fidelity compares the set with real test records{test}."),
        (entry.baselines, "The baselines were given by whoever made this report."),
    )
    return tuple(sentence for figures, sentence in told if figures)


def _known(statement: Statement) -> float:
    """Return the epsilon that holds: none does where the secret is known."""
    return statement.epsilon if statement.private else math.inf


def _method_title(name: str) -> str:
    try:
        return method_named(name).title
    except UnknownName:  # a method of a package that is not installed here
        return name


def _is_of(release: Release, kind: type[Any]) -> bool:
    try:
        return issubclass(mechanism_named(str(release.recipe["method"])), kind)
    except UnknownName:  # a method of a package that is not installed here
        return False


def _groups(synthetic: SyntheticSet, classes: Sequence[str]) -> tuple[ClassGroup, ...]:
    """Sort the set by class, and embed pictures evenly where they are too many."""
    labels = synthetic.labels.numpy()
    most = max(1, MOST_PICTURES // len(classes))
    pixels = synthetic.pixels().numpy() if synthetic.public.is_image else None
    groups = []
    for place, name in enumerate(classes):
        members = np.flatnonzero(labels == place)
        shown = members[:most] if pixels is not None else members[:0]
        groups.append(
            ClassGroup(
                name=name,
                count=len(members),
                pictures=tuple(
                    Picture(number=number, uri=_png(pixels[index]))
                    for number, index in enumerate(shown, start=1)
                    if pixels is not None
                ),
            )
        )
    return tuple(groups)


def _png(pixels: np.ndarray[Any, Any]) -> str:
    channels = pixels.shape[0]
    picture = Image.fromarray(np.moveaxis(pixels, 0, 2) if channels == 3 else pixels[0])
    file = io.BytesIO()
    picture.save(file, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def _channels_note(shape: tuple[int, ...]) -> str:
    if len(shape) != 3 or shape[0] in (1, 3):
        return ""
    return f"Records have {shape[0]} channels; the pictures show the first."


def _rows(synthetic: SyntheticSet, classes: Sequence[str]) -> Rows:
    """Return the first rows of each class, with declared columns decoded."""
    labels = synthetic.labels.numpy()
    chosen = np.concatenate(
        [np.flatnonzero(labels == place)[:ROWS_PER_CLASS] for place in range(len(classes))]
    )
    values = synthetic.images.numpy()[chosen]
    named = [classes[label] for label in labels[chosen]]
    if synthetic.public.columns:
        from understudy.data.tables import decode_table

        table = decode_table(values, synthetic.public.columns)
        names = [printable(name) for name in table.column_names]
        cells = [[_cell(value) for value in column.to_pylist()] for column in table.columns]
    else:
        names = [f"feature {place}" for place in range(values.shape[1])]
        cells = [[f"{value:.3g}" for value in column] for column in values.T]
    kept = slice(MOST_FEATURES)
    return Rows(
        columns=("class", *names[kept]),
        rows=tuple(
            (name, *row) for name, row in zip(named, zip(*cells[kept], strict=True), strict=True)
        ),
        left_out=max(0, len(names) - MOST_FEATURES),
    )


def _cell(value: object) -> str:
    if value is None:
        return "(missing)"
    return f"{value:.6g}" if isinstance(value, float) else printable(str(value))


def _facts(statement: Statement) -> dict[str, str]:
    facts = {
        "epsilon": number(statement.epsilon),
        "delta": f"{statement.delta:g}",
        "epsilon of everything from these records": number(statement.total_epsilon),
        "accountant": ACCOUNTANTS[statement.accountant],
        "what is protected": f"{statement.unit}, when {NEIGHBOURS[statement.adjacency]}",
        "each record's label": statement.labels,
        "class sizes": statement.class_sizes,
        "dataset": f"{statement.dataset} (keyed fingerprint {statement.fingerprint})",
        "ledger line": statement.ledger_line,
        "made": statement.made,
    }
    return {key: printable(value) for key, value in facts.items()}


def _questions(statement: Statement) -> tuple[Question, ...]:
    stages = [place for place, count in enumerate(statement.stages, 1) for _ in range(count)]
    return tuple(
        Question(
            name=printable(event.name),
            stage=stages[place] if place < len(stages) else 1,
            times=event.times,
            per_class=event.per_class,
            inclusion="every record"
            if event.sampling_rate is None
            else f"each record with probability {event.sampling_rate:.4g}",
            noise_multiplier=event.noise_multiplier,
            bound=event.bound,
            unit=event.unit,
            event=event.describe(),
            epsilon_alone=_price((event,), statement, statement.accountant),
        )
        for place, event in enumerate(statement.events)
    )


def _spent(statement: Statement) -> tuple[Spent, ...]:
    """Price what had been asked at some points on the way; a stage's questions take turns."""
    if not statement.private or sum(event.times for event in statement.events) < 2:
        return ()
    events, before, first = statement.events, 0, 0
    alone = _price((dataclasses.replace(events[0], times=1),), statement, statement.accountant)
    points = [Spent(answers=1, epsilon=alone)]
    for count in statement.stages:
        stage = events[first : first + count]
        answers = sum(event.times for event in stage)
        marks = math.ceil(SPENT_POINTS * answers / sum(event.times for event in events))
        for mark in range(1, marks + 1):
            part = [
                dataclasses.replace(event, times=event.times * mark // marks) for event in stage
            ]
            asked = (*events[:first], *(event for event in part if event.times))
            answered = before + sum(event.times for event in part)
            if answered > points[-1].answers:
                paid = _price(asked, statement, statement.accountant)
                points.append(Spent(answers=answered, epsilon=paid))
        before, first = before + answers, first + count
    return tuple(points)


def _earlier(statement: Statement) -> tuple[Run, ...]:
    runs = []
    for run in statement.earlier:
        events = tuple(Event.from_json(event) for event in run["events"])
        runs.append(
            Run(
                time=printable(str(run["time"])),
                by=printable(str(run["by"])),
                events="; ".join(f"{event.name}: {event.describe()}" for event in events),
                epsilon_alone=_price(events, statement, Accountant(run["accountant"])),
            )
        )
    return tuple(runs)


def _price(events: tuple[Event, ...], statement: Statement, accountant: Accountant) -> float:
    return epsilon(
        events,
        statement.delta,
        adjacency=statement.adjacency,
        accountant=accountant,
        labels_fixed=statement.labels == "public",
    )


def attack_bound(false_alarms: float, epsilon: float, delta: float) -> float:
    """Bound the true positive rate of any test at a false positive rate.

    Kairouz, Oh, Viswanath 2015, Theorem 2.1: ``fpr + e^eps * fnr >= 1 - delta`` and the same with
    the two exchanged.
    """
    if math.isinf(epsilon):
        return 1.0
    factor = math.exp(min(epsilon, 700.0))
    return max(
        0.0,
        min(1.0, factor * false_alarms + delta, 1 - (1 - delta - false_alarms) / factor),
    )


def _best_guess(epsilon: float, delta: float) -> float:
    """Bound how often a guess between two equally likely neighbours is right."""
    return min(1.0, 1 - (1 - delta) / (1 + math.exp(min(epsilon, 700.0))))


def _environment(statement: Statement) -> dict[str, str]:
    software = ", ".join(
        f"{name} {version}" for name, version in sorted(statement.software.items())
    )
    return {
        "release made with": printable(software),
        "report made with": f"Python {platform.python_version()} on {platform.system()}",
    }


# Scores


def _score(name: str, data: Mapping[str, Any], classes: Sequence[str], title: str) -> Score:
    """Read ``Scores.to_json()``. Figures are computed again from its confusion matrices."""

    def wrong(reason: str) -> ReleaseError:
        return ReleaseError(
            f"The scores '{name}' of '{title}' {reason}. Evaluate the release again."
        )

    try:
        confusions = tuple(
            tuple(tuple(int(cell) for cell in row) for row in matrix)
            for matrix in data["confusions"]
        )
        scores = Scores(
            protocol=str(data["protocol"]),
            network=str(data["network"]),
            seeds=tuple(int(seed) for seed in data["seeds"]),
            confusions=confusions,
            settings=dict(data.get("settings", {})),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise wrong(f"cannot be read ({type(error).__name__}: {error})") from error
    k = len(classes)
    if any(len(matrix) != k or any(len(row) != k for row in matrix) for matrix in confusions):
        raise wrong(f"are not about its {k} classes")
    if not confusions or len(confusions) != len(scores.seeds) or not scores.tested:
        raise wrong("hold no test records, or not one result a seed")
    # What comes out the same with every seed tells nothing of the spread.
    low, high = scores.interval or (None, None)
    if len(set(scores.accuracies)) == 1:
        low = high = None
    return Score(
        name=name,
        protocol=printable(scores.protocol),
        network=printable(scores.network),
        seeds=scores.seeds,
        accuracies=scores.accuracies,
        accuracy=scores.accuracy,
        low=low,
        high=high,
        balanced_accuracy=scores.balanced_accuracy,
        chance=scores.chance,
        tested=scores.tested,
        per_class=scores.per_class,
        confusion=scores.confusion,
        settings={
            printable(key): printable(_value(value)) for key, value in _flat(scores.settings)
        },
    )


# Fidelity and audit

MEANINGS = {
    "frechet_distance": "distance of two bell curves fitted to the features; 0 is alike",
    "kernel_distance": "distance of the two sets of features themselves; 0 is alike",
    "classifier_score": "how sure of a class each record is while all classes occur; more is better",
    "precision": "share of synthetic records that fall among real ones",
    "recall": "share of real records that fall among synthetic ones",
    "density": "how deep among real ones the synthetic records fall; 1 is as deep as real ones",
    "coverage": "share of real records with a synthetic one in their neighbourhood",
    "nearest": "distance to the nearest held-out record; far below the reference would be a copy",
}


def _resemblance(data: Mapping[str, Any], title: str) -> Resemblance:
    """Read ``Fidelity.to_json()``."""
    try:
        return Resemblance(
            features=printable(str(data["features"])),
            compared=int(data["compared"]),
            records=int(data["records"]),
            reference=int(data["reference"]),
            caution=printable(str(data["caution"])),
            figures=tuple(
                Likeness(
                    title=printable(str(name)),
                    meaning=MEANINGS.get(key, ""),
                    synthetic=_figure(data["synthetic"][key]),
                    real=_figure(data["real"][key]),
                )
                for key, name in data["titles"].items()
            ),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReleaseError(
            f"The fidelity figures of '{title}' cannot be read ({type(error).__name__}: {error}). "
            "Evaluate the release again."
        ) from error


def _figure(value: Any) -> str:
    if value is None:
        return "–"
    parts = value if isinstance(value, list | tuple) else (value,)
    return ", ".join(f"{float(part):.4g}" for part in parts)


def _audited(data: Mapping[str, Any], title: str) -> Audited:
    """Read ``AuditResult.to_json()``; whether it passed is found again from its numbers."""
    try:
        claimed, bound = float(data["claimed"]), float(data["lower_bound"])
        findings = tuple(printable(str(finding)) for finding in data["findings"])
        return Audited(
            pool=printable(str(data["pool"])),
            claimed=claimed,
            delta=float(data["delta"]),
            lower_bound=bound,
            confidence=float(data["confidence"]),
            passed=bound <= claimed and not findings,
            runs=int(data["runs"]),
            releases=int(data["releases"]),
            findings=findings,
            attacks=tuple(
                Attack(
                    name=printable(str(found["attack"])),
                    epsilon=float(found["epsilon"]),
                    confidence=float(found["confidence"]),
                    rests_on=printable(str(found["rests_on"])),
                    figures=printable(
                        ", ".join(f"{k} {_figure(float(v))}" for k, v in found["figures"].items())
                    ),
                )
                for found in data["evidence"]
            ),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReleaseError(
            f"The audit of '{title}' cannot be read ({type(error).__name__}: {error}). Audit it "
            "again."
        ) from error


# Loading


def _snippets(entry: Entry, synthetic: SyntheticSet) -> tuple[Snippet, ...]:
    """Write loading examples. Only the folder's own name appears: where it lies is nobody's."""
    folder = printable(entry.folder.resolve().name) if entry.folder is not None else "release"
    tensors = _quoted(f"{folder}/{TENSORS}")
    parquet = _quoted(f"{folder}/{PARQUET}")
    shape = ", ".join(map(str, synthetic.images.shape))
    return (
        Snippet(
            name="PyTorch",
            code="from safetensors.torch import load_file\n\n"
            f"data = load_file({tensors})\n"
            'images, labels = data["images"], data["labels"]'
            f"  # float32 ({shape}), int64 ({len(synthetic)},)",
        ),
        Snippet(
            name="scikit-learn",
            code="from safetensors.numpy import load_file\n"
            "from sklearn.linear_model import LogisticRegression\n\n"
            f"data = load_file({tensors})\n"
            f'X, y = data["images"].reshape({len(synthetic)}, -1), data["labels"]\n'
            "model = LogisticRegression(max_iter=1000).fit(X, y)",
        ),
        Snippet(
            name="Hugging Face",
            code="from datasets import load_dataset\n\n"
            f'data = load_dataset("parquet", data_files={parquet}, split="train")',
        ),
    )


def _quoted(text: str) -> str:
    """Write a Python string; JSON's are a subset."""
    return json.dumps(text, ensure_ascii=False)


# Several releases


def _compare(sections: Sequence[Section], entries: Sequence[Entry]) -> Comparison:
    counts = Counter(score.name for section in sections for score in section.scores)
    notes = []
    for what, values in (
        ("datasets", {section.dataset for section in sections}),
        (
            "test sets",
            {
                f"{section.test or 'unknown'}, {section.scores[0].tested:,} records"
                for section in sections
                if section.scores
            },
        ),
        ("deltas", {f"{section.delta:g}" for section in sections}),
        ("units or adjacencies", {section.facts["what is protected"] for section in sections}),
        ("accountants", {section.facts["accountant"] for section in sections}),
        ("kinds of labels", {section.facts["each record's label"] for section in sections}),
    ):
        if len(values) > 1:
            notes.append(
                f"These releases have different {what} ({'; '.join(sorted(values))}): compare "
                "their numbers with care."
            )
    public = [section.title for section in sections if not section.private]
    if public:
        notes.append(f"Not private, and only here for comparison: {', '.join(public)}.")
    notes += _shared_records(sections, entries)
    return Comparison(
        score=counts.most_common(1)[0][0] if counts else None,
        names=tuple(counts),
        notes=tuple(notes),
    )


def _shared_records(sections: Sequence[Section], entries: Sequence[Entry]) -> Iterator[str]:
    """Say what releases of the same records add up to, where one ledger has seen them all."""
    by_records: dict[str, list[int]] = {}
    for place, section in enumerate(sections):
        by_records.setdefault(section.fingerprint, []).append(place)
    for places in by_records.values():
        lines = {entries[place].release.statement.ledger_line for place in places}
        if len(lines) < 2:
            continue
        titles = ", ".join(sections[place].title for place in places)
        statements = [entries[place].release.statement for place in places]
        last = max(statements, key=lambda statement: len(statement.earlier))
        seen = Counter(
            Event.from_json(event) for run in last.earlier for event in run["events"]
        ) + Counter(last.events)
        made = {statement.ledger_line: statement for statement in statements}
        asked = Counter(event for statement in made.values() for event in statement.events)
        if asked <= seen and all(statement.private for statement in statements):
            yield (
                f"Made from the same records: {titles}. Somebody who sees them all has the "
                f"guarantee of all together, epsilon {number(last.total_epsilon)} at delta "
                f"{last.delta:g}, not that of each."
            )
        else:
            yield (
                f"Made from the same records: {titles}. Somebody who sees them all has less than "
                "each guarantee alone, and no single ledger here has counted them all."
            )


# Plain text


def printable(text: str) -> str:
    """Replace what no HTML or XML may hold: control characters and lone surrogates."""
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", text)


def number(value: float) -> str:
    """Write an epsilon."""
    return "infinite (not private)" if math.isinf(value) else f"{value:.4g}"


def percent(share: float | None) -> str:
    """Write a share."""
    return "–" if share is None else f"{100 * share:.1f} %"


def _value(value: object) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        elif isinstance(value, list | tuple):
            yield f"{before}{key}", ", ".join(map(_value, value))
        else:
            yield f"{before}{key}", value


def _plain(value: Any) -> Any:
    """Turn dataclasses into JSON values; what is not finite becomes text or null."""
    if dataclasses.is_dataclass(value):
        return {
            part.name: _plain(getattr(value, part.name))
            for part in dataclasses.fields(value)
            if part.metadata.get("json", True)
        }
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value
