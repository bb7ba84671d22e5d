"""Audit what crosses the gate: the real method, the real gate, a worst-case canary, many times.

The attacker is the one differential privacy speaks of: it knows every record but one, the coins
of those records, the method and its public seed. Whatever an answer holds besides the known
records' sum is then noise, or noise and the canary. :class:`ObservedGate` writes that down; it
answers exactly as the gate it wraps does, and is used on public audit records only.

With known contribution c, claimed noise sigma and inclusion rate q, the best test of one answer
is the likelihood ratio of the (sampled) Gaussian, and ratios of answers multiply (Neyman and
Pearson 1933; the attacker of Nasr et al. 2023 with full knowledge).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from understudy.auditing.attacks import crafted
from understudy.auditing.statistics import (
    Counts,
    Evidence,
    Scores,
    auroc,
    counts_at,
    epsilon_from_scores,
    gaussian_epsilon,
    gaussian_mu,
    gaussian_mu_of_means,
    largest_stddev,
    tpr_at_fpr,
)
from understudy.engine import Engine
from understudy.methods.base import Mechanism
from understudy.privacy.accounting import Budget, calibrate, epsilon
from understudy.privacy.events import Event, Query
from understudy.privacy.gate import (
    Contribution,
    ExactSum,
    Gate,
    PrivateDataset,
    Records,
    record_digests,
)
from understudy.privacy.ledger import Ledger
from understudy.privacy.noise import Secret
from understudy.privacy.public import Adjacency, Public
from understudy.privacy.release import Release

NEGLIGIBLE = 1e-3
"""Noise below this share of what was claimed counts as none: the bound is then infinite."""

SKETCH = 64
"""Coordinates of the noise kept to compare answers with one another."""

SKETCHED_RUNS = 6

REACH_GRID = 0.05
"""A canary's reach is rounded down to this, which can only lower a bound."""

Enough = Callable[[int], bool]
"""Says, from how many answers were heard, whether that will do."""


# Watching


class Cut(Exception):
    """A run has been listened to for long enough."""


@dataclass(frozen=True)
class Answer:
    """Hold one answer and what the attacker knows about it. Arrays are (groups, width)."""

    query: Query
    label_rates: tuple[float, ...]
    noisy: Scores
    exact: Scores
    known: Scores
    """Exact sum of the included records that the attacker knows."""
    rows: Scores | None
    """Each candidate's own contribution, clipped, (candidates, width); None for a shard query."""
    norms: Scores | None
    """Norms before clipping."""

    @property
    def claimed_stddev(self) -> float:
        """Return what the plan says, which is not always what the gate does."""
        return self.query.noise_multiplier * self.query.bound

    def placed(self, candidate: int, label: int) -> Scores:
        """Return a candidate's contribution where the answer would hold it."""
        place = np.zeros_like(self.noisy)
        if self.rows is not None:
            place[label if self.query.per_class else 0] = self.rows[candidate]
        return place


class ObservedGate(Gate):
    """Answer as the wrapped gate does, and show each answer to ``watch``.

    ``known`` is how many of the records, from the first, the attacker knows; ``candidates`` are
    the images and labels whose contributions it works out for itself. ``enough`` is asked, after
    each answer but the last, with how many there were: the run ends there, by :class:`Cut`.
    """

    def __init__(
        self,
        gate: Gate,
        watch: Callable[[Answer], None],
        *,
        known: int,
        candidates: tuple[Tensor, Tensor],
        enough: Enough = lambda heard: False,
    ) -> None:
        self.__dict__.update(vars(gate))
        self._watch, self._known, self._candidates = watch, known, candidates
        self._enough, self._heard = enough, 0
        self._asking: Contribution | None = None
        self._chosen: npt.NDArray[np.intp] = np.zeros(0, dtype=np.intp)

    def _ask(
        self, query: Query, contribution: Contribution, state: Mapping[str, Tensor] | None
    ) -> Tensor:
        """Ask the gate; remember what was asked of one record."""
        self._asking = contribution if state is None else functools.partial(contribution, state)
        try:
            return super()._ask(query, contribution, state)
        finally:
            self._asking = None

    def _include(self, query: Query, turn: int) -> npt.NDArray[np.intp]:
        self._chosen = super()._include(query, turn)
        return self._chosen

    def _answer(self, query: Query, total: Callable[[int], ExactSum]) -> Tensor:
        exact: list[Scores] = []

        def kept(turn: int) -> ExactSum:
            sums, shape, step = total(turn)
            exact.append(sums.cpu().numpy().copy())
            return sums, shape, step

        answer = super()._answer(query, kept)
        groups = len(self.public.classes) if query.per_class else 1
        noisy = answer.detach().cpu().double().numpy().reshape(groups, -1)
        sums = exact[0].reshape(groups, -1)
        known, rows, norms = sums, None, None
        if self._asking is not None:
            known = sums - self._unknown_part(query, self._asking).reshape(groups, -1)
            rows, norms = self._contributions(query, self._asking)
        rates = query.rates(self.public)
        self._watch(Answer(query, rates, noisy, sums, known, rows, norms))
        self._heard += 1
        # At once: what a method does before it asks again may take longer than the answer.
        if any(self._left.values()) and self._enough(self._heard):
            raise Cut
        return answer

    def _unknown_part(self, query: Query, contribution: Contribution) -> Scores:
        unknown = self._chosen[self._chosen >= self._known]
        return self._clipped_sum(query, contribution, unknown)[0].cpu().numpy()

    def _contributions(self, query: Query, contribution: Contribution) -> tuple[Scores, Scores]:
        """Work out the candidates' contributions, clipped by the attacker's own hand."""
        device = self.engine.torch_device
        images, labels = (part.to(device) for part in self._candidates)
        raw = torch.func.vmap(contribution)(images, labels).detach().cpu().double()
        rows = torch.nan_to_num(raw.reshape(len(images), -1), 0.0, 0.0, 0.0).numpy()
        norms = np.linalg.norm(rows, axis=1)
        scale = np.minimum(1.0, query.bound / np.maximum(norms, 1e-300))
        return rows * scale[:, None], norms


@dataclass(frozen=True)
class Scene:
    """Hold known public records and the facts declared of them, ready to be run."""

    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    public: Public
    engine: Engine
    folder: Path
    """For ledgers: one a run, thrown away with the folder."""
    delta: float

    def with_records(self, images: Tensor, labels: Tensor) -> PrivateDataset:
        """Put further records behind the known ones."""
        every = np.concatenate([self.images, images.numpy().astype(np.float32)])
        both = np.concatenate([self.labels, labels.numpy().astype(np.int64)])
        return PrivateDataset(Records(every, both, record_digests(every)), self.public)

    def run(
        self,
        method: Mechanism,
        data: PrivateDataset,
        watch: Callable[[Answer], None],
        candidates: tuple[Tensor, Tensor],
        number: int,
        enough: Enough = lambda heard: False,
    ) -> Release | None:
        """Measure once through the real gate, with secret noise and a ledger of its own.

        None where it was ``enough`` before the method had asked everything.
        """

        def observed(gate: Gate) -> ObservedGate:
            known = len(self.images)
            return ObservedGate(gate, watch, known=known, candidates=candidates, enough=enough)

        with contextlib.suppress(Cut):
            return self.through(observed, method, data, str(number))
        return None

    def through(
        self,
        wrap: Callable[[Gate], Gate],
        method: Mechanism,
        data: PrivateDataset,
        name: str,
        *,
        secret: Secret | None = None,
    ) -> Release:
        """Measure once through a gate that ``wrap`` makes of the real one."""
        with data.open(
            method.plan(self.public),
            by=method.name,
            recipe=method.recipe(),
            ledger=Ledger(self.folder / f"{name}.jsonl"),
            budget=Budget(math.inf, self.delta),
            secret=secret,
            engine=self.engine,
        ) as gate:
            return method.measure(wrap(gate))


# The canary


@dataclass(frozen=True)
class Canary:
    """Hold the record that is there or not; ``other`` stands in its place under *replace*."""

    image: Tensor
    other: Tensor | None
    label: int

    @property
    def candidates(self) -> tuple[Tensor, Tensor]:
        """Return the canary, and the other where there is one."""
        images = [self.image] if self.other is None else [self.image, self.other]
        return torch.stack(images), torch.full((len(images),), self.label)


def worst_canary(
    method: Mechanism, scene: Scene, seed: int, number: int = 0, *, seconds: float = math.inf
) -> Canary:
    """Choose, in one run that is not counted, the record whose contributions are largest.

    Candidates: constant, striped and random-sign records and some of the known ones, all of the
    smallest class, which is sampled most often. Under *replace* a pair far apart. The run is cut
    after ``seconds``, and left out where only shards are asked: they show no record's contribution.
    """
    label = int(np.argmin(scene.public.sizes))
    shape = scene.public.shape
    signs, _ = crafted(scene.public, 8, seed)
    stripes = (torch.arange(math.prod(shape)) % 2 * 2.0 - 1).reshape(shape)
    own = torch.from_numpy(scene.images[scene.labels == label][:8])
    plain = torch.stack([torch.ones(shape), -torch.ones(shape), torch.zeros(shape), stripes])
    images = torch.cat([plain, signs, -signs, own])
    gram = np.zeros((len(images), len(images)))
    excess = np.zeros(len(images))

    def watch(answer: Answer) -> None:
        if answer.rows is not None and answer.norms is not None:
            rows = answer.rows / answer.query.bound
            gram[...] += rows @ rows.T
            excess[...] += np.log1p(answer.norms / answer.query.bound)

    if any(step.query.unit == "record" for step in method.plan(scene.public)):
        nobody = scene.with_records(images[:0], torch.zeros(0))
        labels = torch.full((len(images),), label)
        scene.run(method, nobody, watch, (images, labels), number, _after(seconds))
    squares = np.diag(gram)
    if scene.public.adjacency is Adjacency.ADD_OR_REMOVE:
        # Among equals, prefer one that would stand out if nothing clipped it.
        best = int(np.argmax(squares + 1e-6 * excess))
        return Canary(images[best], None, label)
    apart = squares[:, None] + squares[None, :] - 2 * gram
    one, two = np.unravel_index(int(np.argmax(apart)), apart.shape)
    return Canary(images[one], images[two], label)


def _after(seconds: float) -> Enough:
    """Let one answer be heard, and further ones for so long."""
    until = time.monotonic() + seconds
    return lambda heard: time.monotonic() > until


def log_ratio(answer: Answer, canary: Canary) -> tuple[float, float]:
    """Return (log likelihood ratio of "canary" over "no canary", reach) of one answer.

    The reach is how far the canary moves the sum, in units of what the claim allows.
    """
    if answer.rows is None:
        return 0.0, 1.0
    rest = answer.noisy - answer.known
    q = answer.label_rates[canary.label]
    here = answer.placed(0, canary.label)
    there = np.zeros_like(here) if canary.other is None else answer.placed(1, canary.label)
    stddev = max(answer.claimed_stddev, 1e-9 * answer.query.bound)

    def log_density(centre: Scores) -> float:
        shift = float(np.sum(rest * centre) - 0.5 * np.sum(np.square(centre))) / stddev**2
        if q >= 1:
            return shift
        return float(np.logaddexp(math.log1p(-q), math.log(q) + shift))

    apart = float(np.linalg.norm(here - there))
    reach = apart / answer.query.bound
    if canary.other is not None:
        reach /= 2
        if q < 1 and apart > 0:
            # dp-accounting prices two opposite contributions; take what is opposite in ours.
            along = (here - there) / apart
            reach = min(float(np.sum(along * here)), -float(np.sum(along * there)))
            reach = max(0.0, reach / answer.query.bound)
    return log_density(here) - log_density(there), min(1.0, reach)


# Traffic


@dataclass
class Traffic:
    """Gather many runs' answers, boiled down to what the bounds need."""

    inside: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)
    answers_inside: dict[Query, list[float]] = field(default_factory=lambda: defaultdict(list))
    answers_outside: dict[Query, list[float]] = field(default_factory=lambda: defaultdict(list))
    squares: dict[Query, float] = field(default_factory=lambda: defaultdict(float))
    numbers: dict[Query, int] = field(default_factory=lambda: defaultdict(int))
    reaches: list[tuple[Query, float]] = field(default_factory=list)
    """For every turn, the least reach any run showed."""
    sketches: list[list[Scores]] = field(default_factory=list)
    most_asked: dict[Query, int] = field(default_factory=dict)
    planned: Mapping[Query, int] | None = None
    """How often each query would have been asked, where the runs were cut; None where not."""

    @property
    def unheard(self) -> str:
        """Say what bounds on whole runs rest on where the runs were cut."""
        return "" if self.planned is None else "; answers after the cut are like those before it"

    def times(self, query: Query) -> int:
        """Return how often a query is asked of a whole run."""
        heard = self.most_asked.get(query, 0)
        return heard if self.planned is None else max(heard, self.planned.get(query, 0))

    def add(self, answers: Sequence[tuple[Answer, float, float]], *, present: bool) -> None:
        """Take in one run: answers with their log ratios and reaches."""
        total = sum(ratio for _, ratio, _ in answers)
        (self.inside if present else self.outside).append(total)
        per_answer = self.answers_inside if present else self.answers_outside
        asked: dict[Query, int] = defaultdict(int)
        sketch = []
        for turn, (answer, ratio, reach) in enumerate(answers):
            asked[answer.query] += 1
            per_answer[answer.query].append(ratio)
            if turn >= len(self.reaches):
                self.reaches.append((answer.query, reach))
            elif reach < self.reaches[turn][1]:
                self.reaches[turn] = (answer.query, reach)
            if answer.claimed_stddev > 0:
                noise = (answer.noisy - answer.exact).reshape(-1) / answer.claimed_stddev
                self.squares[answer.query] += float(noise @ noise)
                self.numbers[answer.query] += noise.size
                if len(self.sketches) < SKETCHED_RUNS:
                    places = np.linspace(0, noise.size - 1, min(SKETCH, noise.size)).astype(int)
                    sketch.append(noise[places])
        if len(self.sketches) < SKETCHED_RUNS:
            self.sketches.append(sketch)
        for query, times in asked.items():
            self.most_asked[query] = max(times, self.most_asked.get(query, 0))

    def events(self, public: Public, *, whole: bool = False) -> tuple[Event, ...]:
        """Return what was heard as events, with the canary's reach.

        ``whole``: with the rest of runs that were cut, as if the canary reached as far there.
        """
        times: dict[tuple[Query, float], int] = defaultdict(int)
        for query, reach in self.reaches:
            steps = math.floor(reach / REACH_GRID + 1e-3)
            if steps:
                times[query, steps * REACH_GRID] += 1
        return tuple(
            _louder(
                query.event(
                    public, count * self.times(query) // self.most_asked[query] if whole else count
                ),
                1 / min(reach, 1.0),
            )
            for (query, reach), count in times.items()
        )


def listen(
    method: Mechanism,
    scene: Scene,
    canary: Canary,
    runs: int,
    *,
    keep_on: Callable[[int], bool] = lambda done: True,
    seconds: float = math.inf,
) -> Traffic:
    """Run the method ``runs`` times, in turn without and with the canary, and take notes.

    The first run is cut after ``seconds``, and all others after as many answers.
    """
    images, labels = canary.candidates
    without = scene.with_records(images[1:], labels[1:])
    with_it = scene.with_records(images[:1], labels[:1])
    traffic = Traffic()
    enough = _after(seconds)
    for number in range(runs):
        if not keep_on(number):
            break
        present = bool(number % 2)
        answers: list[tuple[Answer, float, float]] = []

        def watch(answer: Answer, answers: list[tuple[Answer, float, float]] = answers) -> None:
            ratio, reach = log_ratio(answer, canary)
            answers.append((answer, ratio, reach))

        data = with_it if present else without
        told = scene.run(method, data, watch, canary.candidates, number + 1, enough)
        traffic.add(answers, present=present)
        if number == 0:
            length = math.inf if told is not None else len(answers)
            enough = functools.partial(operator.le, length)
        if told is None:
            traffic.planned = {step.query: step.times for step in method.plan(scene.public)}
    return traffic


# Bounds


def _louder(event: Event, factor: float) -> Event:
    return dataclasses.replace(event, noise_multiplier=event.noise_multiplier * factor)


def _price(events: tuple[Event, ...], public: Public, delta: float) -> float:
    return epsilon(
        events, delta, adjacency=public.adjacency, labels_fixed=public.labels == "public"
    )


def _sampled(events: Sequence[Event]) -> bool:
    return any(e.sampling_rate is not None and e.sampling_rate < 1 for e in events)


def noise_factor(
    counts: Counts, events: tuple[Event, ...], public: Public, confidence: float
) -> float:
    """Return the most noise, relative to these events', that leaves error rates so low possible.

    Without sampling the events are one Gaussian and mu answers at once. With it: (TPR, FPR) rule
    out every factor whose guarantee (e, d) has TPR > exp(e) FPR + d. We take d halfway to
    TPR - FPR, and the accountant finds the factor that just gives e.
    """
    if not events:
        return math.inf
    if not _sampled(events):
        mu = gaussian_mu(counts, confidence)
        return math.inf if mu == 0 else _mu(events, public) / mu
    tpr, fpr = counts.limits(confidence)
    d = (tpr - fpr) / 2
    if not 0 < d < 1:
        return math.inf
    e = max(math.log((tpr - d) / fpr), math.log((1 - fpr - d) / max(1 - tpr, 1e-300)))
    if e <= 1e-3:
        return math.inf
    return calibrate(
        lambda factor: tuple(_louder(event, factor) for event in events),
        Budget(e, d),
        adjacency=public.adjacency,
        labels_fixed=public.labels == "public",
    )


def _mu(events: Sequence[Event], public: Public) -> float:
    moved = 2.0 if public.adjacency is Adjacency.REPLACE else 1.0
    return math.sqrt(
        sum(e.times * (moved * e.sensitivity / e.noise_multiplier) ** 2 for e in events)
    )


FAMILY = "the noise is the plan's, but for an unknown factor"

BOUNDS = 5
"""How many bounds :func:`bounds` gives that can err: their confidences are to be split."""


def bounds(
    traffic: Traffic, public: Public, delta: float, confidence: float, seed: int
) -> list[Evidence]:
    """Turn traffic into lower bounds on epsilon, each with the confidence."""
    inside, outside = np.array(traffic.inside), np.array(traffic.outside)
    if min(len(inside), len(outside)) == 0:
        return []
    plain = Evidence(
        attack="likelihood ratio of a run, any mechanism",
        epsilon=epsilon_from_scores(inside, outside, delta, confidence, seed=seed),
        confidence=confidence,
        rests_on="nothing but independent runs",
        figures={
            "auroc": auroc(inside, outside),
            "tpr_at_fpr_0.01": tpr_at_fpr(inside, outside, 0.01),
            "runs": float(len(inside) + len(outside)),
            "answers": float(len(traffic.reaches)),
        },
    )
    events = traffic.events(public)
    if not events or any(event.noise_multiplier == 0 for event in events):
        return [plain]
    return [
        plain,
        _of_runs(traffic, public, delta, confidence),
        _of_means(inside, outside, events, delta, confidence),
        _of_answers(traffic, public, delta, confidence),
        _of_scale(traffic, public, delta, confidence),
        _of_repetition(traffic),
    ]


def _of_runs(traffic: Traffic, public: Public, delta: float, confidence: float) -> Evidence:
    # The ratio's own zero is a threshold known beforehand, so no scores are spent on choosing.
    counts = counts_at(np.array(traffic.inside), np.array(traffic.outside), 0.0)
    factor = noise_factor(counts, traffic.events(public), public, confidence)
    return Evidence(
        attack="likelihood ratio of a run",
        epsilon=_at_factor(traffic.events(public, whole=True), factor, public, delta),
        confidence=confidence,
        rests_on=FAMILY + traffic.unheard,
        figures={
            "noise_factor_at_most": factor,
            "tpr": counts.hits / counts.inside,
            "fpr": counts.alarms / counts.outside,
        },
    )


def _of_means(
    inside: Scores, outside: Scores, events: tuple[Event, ...], delta: float, confidence: float
) -> Evidence:
    """Compare mean ratios: Gaussian where nothing is sampled, and silent where something is."""
    mu = 0.0 if _sampled(events) else gaussian_mu_of_means(inside, outside, confidence)
    return Evidence(
        attack="mean likelihood ratio of a run",
        epsilon=gaussian_epsilon(mu, delta),
        confidence=confidence,
        rests_on="the noise is Gaussian, no query is sampled, the canary moves every run alike",
        figures={"mu_at_least": mu},
    )


def _of_answers(traffic: Traffic, public: Public, delta: float, confidence: float) -> Evidence:
    each = 1 - (1 - confidence) / len(traffic.most_asked)
    events: list[Event] = []
    smallest = math.inf
    trials = 0
    for query in traffic.most_asked:
        inside = np.array(traffic.answers_inside[query])
        outside = np.array(traffic.answers_outside[query])
        trials += len(inside) + len(outside)
        if not len(inside) or not len(outside) or not np.any(inside):
            continue
        single = query.event(public, 1)
        factor = noise_factor(counts_at(inside, outside, 0.0), (single,), public, each)
        smallest = min(smallest, factor)
        if math.isfinite(factor):
            events.append(_louder(query.event(public, traffic.times(query)), factor))
    return Evidence(
        attack="likelihood ratio of an answer",
        epsilon=_at_factor(tuple(events), 1.0 if smallest >= NEGLIGIBLE else 0.0, public, delta),
        confidence=confidence,
        rests_on=f"{FAMILY}, and is drawn anew for every answer{traffic.unheard}",
        figures={"noise_factor_at_most": smallest, "answers": float(trials)},
    )


def _of_scale(traffic: Traffic, public: Public, delta: float, confidence: float) -> Evidence:
    # Thousands of numbers go into this bound. It takes a hundredth of its share of the permitted
    # error, at the price of a fraction of a percent, so that a sound method hardly ever fails it.
    confidence = 1 - (1 - confidence) / 100
    each = 1 - (1 - confidence) / len(traffic.numbers)
    factors = [
        largest_stddev(traffic.squares[query], traffic.numbers[query], each)
        for query in traffic.numbers
    ]
    # One factor for all answers: the largest, which can only lower the bound. No noise at all in
    # any of them decides by itself.
    used = min(factors) if min(factors) < NEGLIGIBLE else max(factors)
    return Evidence(
        attack="scale of the noise",
        epsilon=_at_factor(traffic.events(public, whole=True), used, public, delta),
        confidence=confidence,
        rests_on="the noise is Gaussian, the same in every direction, and independent"
        + traffic.unheard,
        figures={
            "noise_factor_at_most": used,
            "numbers": float(sum(traffic.numbers.values())),
        },
    )


def _of_repetition(traffic: Traffic) -> Evidence:
    """Look for noise that an attacker can know: the same in two runs, or in two answers."""
    between_runs, between_answers = math.inf, math.inf
    for one, two in zip(traffic.sketches[::2], traffic.sketches[1::2]):
        for a, b in zip(one, two):
            between_runs = min(between_runs, _difference(a, b))
    for run in traffic.sketches:
        for a, b in itertools.pairwise(run):
            between_answers = min(between_answers, _difference(a, b))
    found = min(between_runs, between_answers) < NEGLIGIBLE
    moved = any(reach > 0 for _, reach in traffic.reaches)
    return Evidence(
        attack="noise that repeats itself",
        epsilon=math.inf if found and moved else 0.0,
        # Eight Gaussian differences below a thousandth: chance under 1e-22, beside the others.
        confidence=1.0,
        rests_on="whoever runs the same program, or compares two answers, takes the noise off",
        figures={"between_runs": between_runs, "between_answers": between_answers},
    )


def _difference(a: Scores, b: Scores) -> float:
    """Return the root mean square difference of two noises; inf if there is too little of them."""
    if len(a) != len(b) or len(a) < 8:
        return math.inf
    return float(np.sqrt(np.mean(np.square(a - b)) / 2))


def _at_factor(events: tuple[Event, ...], factor: float, public: Public, delta: float) -> float:
    if not events or math.isinf(factor):
        return 0.0
    if factor < NEGLIGIBLE:
        return math.inf
    louder = tuple(_louder(event, factor) for event in events)
    if not _sampled(louder):
        return gaussian_epsilon(_mu(louder, public), delta)
    return _price(louder, public, delta)
