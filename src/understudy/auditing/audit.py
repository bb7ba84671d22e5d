"""Audit a method: put the best lower bound on epsilon beside the claim."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from understudy.auditing.attacks import (
    crafted,
    density_ratio,
    inner_products,
    likelihood_ratio,
    nearest_distance,
)
from understudy.auditing.mechanism import (
    BOUNDS,
    Answer,
    Canary,
    Cut,
    Scene,
    Traffic,
    bounds,
    listen,
    worst_canary,
)
from understudy.auditing.replay import not_replayed, replay
from understudy.auditing.statistics import (
    Evidence,
    Scores,
    auroc,
    guess,
    one_run_epsilon,
    tpr_at_fpr,
)
from understudy.engine import Engine, Progress, silent
from understudy.errors import BadConfiguration, PrivacyError
from understudy.methods.base import Mechanism, Method
from understudy.privacy.accounting import epsilon
from understudy.privacy.public import Adjacency, Public

QUICK_SECONDS = 40.0
"""Time a quick audit gives to replays, to runs and to releases each."""

KNOWN_PER_CLASS = 4
"""Records a class behind the gate in mechanism runs: their sum is known, so few are enough."""

CANARIES = 12

RELEASE_ATTACKS = ("nearest synthetic record", "density ratio", "shadow runs", "inner product")


class AuditFailed(PrivacyError):
    """A lower bound on epsilon lies above the claim, or more was asked than planned."""

    def __init__(self, result: AuditResult) -> None:
        self.result = result
        super().__init__(str(result))


@dataclass(frozen=True)
class AuditPool:
    """Hold PUBLIC records to audit with, never the private ones.

    ``images`` float32 in [-1, 1] or uint8, shape (n, *shape); ``labels`` in 0..K-1. A class needs
    at least four records. The declared class sizes, which set sampling rates, are the pool's own
    unless ``public`` says otherwise: give the public facts of the private data to audit the very
    claim that will be made for it. ``name`` is what these records are called, which is not what
    the data of ``public`` are.
    """

    images: Tensor
    labels: Tensor
    public: Public
    name: str

    @classmethod
    def of(
        cls,
        images: Tensor | npt.NDArray[Any],
        labels: Tensor | npt.NDArray[Any] | Sequence[int],
        *,
        classes: Sequence[str] | None = None,
        name: str | None = None,
        adjacency: Adjacency = Adjacency.ADD_OR_REMOVE,
        public: Public | None = None,
    ) -> AuditPool:
        """Take arrays or tensors."""
        values = torch.as_tensor(np.asarray(images))
        if values.dtype == torch.uint8:
            values = values.float().div_(127.5).sub_(1.0)
        numbers = torch.as_tensor(np.asarray(labels)).long()
        if len(values) != len(numbers) or len(numbers) == 0:
            raise BadConfiguration(
                f"An audit pool of {len(values)} records has {len(numbers)} labels."
            )
        total = len(public.classes) if public else len(classes or range(int(numbers.max()) + 1))
        if int(numbers.min()) < 0 or int(numbers.max()) >= total:
            raise BadConfiguration(f"Labels of an audit pool must lie in 0..{total - 1}.")
        sizes = torch.bincount(numbers, minlength=total).tolist()
        if min(sizes) < KNOWN_PER_CLASS:
            raise BadConfiguration(
                f"An audit pool needs {KNOWN_PER_CLASS} records of every class; it has {sizes}."
            )
        called = name or (public.name if public else "audit pool")
        facts = public or Public(
            name=called,
            shape=tuple(values.shape[1:]),
            classes=tuple(classes or map(str, range(total))),
            counts=tuple(sizes),
            adjacency=adjacency,
        )
        if tuple(values.shape[1:]) != facts.shape:
            raise BadConfiguration(
                f"The audit pool's records have shape {tuple(values.shape[1:])}, not {facts.shape}."
            )
        if not (torch.isfinite(values).all() and values.abs().max() <= 1):
            raise BadConfiguration("The audit pool's records must lie in [-1, 1] (or be uint8).")
        return cls(values.float().contiguous(), numbers, facts, called)

    def __len__(self) -> int:
        return len(self.labels)

    def parts(self, per_class: int | None, seed: int) -> tuple[Tensor, Tensor]:
        """Split into indices of (known records, the others): so many a class, or half."""
        random = np.random.default_rng(seed)
        known, others = [], []
        for c in range(len(self.public.classes)):
            mine = random.permutation(np.flatnonzero((self.labels == c).numpy()))
            count = len(mine) // 2 if per_class is None else min(per_class, len(mine))
            known.append(mine[:count])
            others.append(mine[count:])
        return torch.from_numpy(np.concatenate(known)), torch.from_numpy(np.concatenate(others))


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """Hold the claim, the best lower bound, and what each attack found."""

    method: str
    recipe: dict[str, Any]
    pool: str
    claimed: float
    delta: float
    lower_bound: float
    confidence: float
    evidence: tuple[Evidence, ...]
    findings: tuple[str, ...]
    """What needs no statistics: more asked than planned, and what a replayed transcript shows."""
    runs: int
    releases: int
    seconds: float

    @property
    def passed(self) -> bool:
        """Tell whether the claim stands: no bound above it and nothing asked beyond the plan."""
        return self.lower_bound <= self.claimed and not self.findings

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file; infinities become strings."""
        return {
            "method": self.method,
            "recipe": self.recipe,
            "pool": self.pool,
            "claimed": _plain(self.claimed),
            "delta": self.delta,
            "lower_bound": _plain(self.lower_bound),
            "confidence": self.confidence,
            "passed": self.passed,
            "findings": list(self.findings),
            "evidence": [
                {
                    "attack": found.attack,
                    "epsilon": _plain(found.epsilon),
                    "confidence": found.confidence,
                    "rests_on": found.rests_on,
                    "figures": {name: _plain(value) for name, value in found.figures.items()},
                }
                for found in self.evidence
            ],
            "runs": self.runs,
            "releases": self.releases,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        relation = "<=" if self.lower_bound <= self.claimed else "ABOVE"
        lines = [
            f"Audit of '{self.method}' on '{self.pool}': {'passed' if self.passed else 'FAILED'}. "
            f"Lower bound {self.lower_bound:.3g} {relation} claimed epsilon {self.claimed:.4g} at "
            f"delta {self.delta:g} ({100 * self.confidence:g}% confidence; {self.runs} runs, "
            f"{self.releases} releases, {self.seconds:.0f} s)."
        ]
        lines += [f"  ! {finding}" for finding in self.findings]
        for found in self.evidence:
            figures = ", ".join(f"{name} {value:.4g}" for name, value in found.figures.items())
            told = f" ({figures})" if figures else ""
            lines.append(f"  epsilon >= {found.epsilon:<6.3g} {found.attack}{told}")
        return "\n".join(lines)


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def audit(
    method: Mechanism,
    pool: AuditPool,
    *,
    runs: int = 1000,
    releases: int = 24,
    delta: float = 1e-5,
    confidence: float = 0.95,
    seed: int = 0,
    quick: bool = False,
    strict: bool = True,
    engine: Engine | None = None,
    progress: Progress = silent,
) -> AuditResult:
    """Attack a method with public records and bound its epsilon from below.

    ``runs``: times the method is measured, half of them with the canary. ``releases``: times a
    whole synthetic set is made and attacked (0 for none; needed at least 4 to say anything; a
    trainer makes no sets). Where an epsilon is claimed, one transcript is told to two neighbours.
    ``seed`` chooses records, canaries and coins; noise is secret, as always. All bounds together
    err with chance at most 1 - confidence: so rarely does a sound method fail. Repeat a failure that
    surprises you with a higher confidence.
    ``quick``: minutes, however long the method takes. At most 200 runs and 12 releases; none begun
    after 40 s of either, and no neighbour. Runs are cut after 2 s, a transcript after 10 s, and a
    release that is not made after 40 s is given up.

    Raises AuditFailed, with the ``result``, unless ``strict`` is off.
    """
    if not 0 < confidence < 1 or not 0 < delta < 1:
        raise BadConfiguration(f"confidence {confidence} and delta {delta} must lie in (0, 1).")
    if runs < 2 or releases < 0:
        raise BadConfiguration(f"An audit needs 2 runs and no negative releases: {runs} runs.")
    if pool.public.adjacency is Adjacency.REPLACE:
        releases = 0  # fair coins add and remove records; the claim speaks of exchanged ones
    if not isinstance(method, Method):
        releases = 0
    if quick:
        runs, releases = min(runs, 200), min(releases, 12)
    began = time.monotonic()
    each = 1 - (1 - confidence) / (BOUNDS + (len(RELEASE_ATTACKS) if releases >= 4 else 0))
    engine = engine or Engine()
    public = pool.public
    claimed = method.epsilon(public, delta)
    with tempfile.TemporaryDirectory(prefix="understudy-audit-", dir=_in_memory()) as folder:
        known, others = pool.parts(KNOWN_PER_CLASS, seed)
        scene = _scene(pool, known, engine, Path(folder) / "runs", delta)
        for_runs = QUICK_SECONDS if quick else math.inf
        canary = worst_canary(method, scene, seed, seconds=for_runs / 4)
        listening = time.monotonic()
        traffic = listen(
            method,
            scene,
            canary,
            runs,
            keep_on=_clock(quick, runs, progress, "running"),
            seconds=for_runs / 20,
        )
        each_run = (time.monotonic() - listening) / (len(traffic.inside) + len(traffic.outside))
        findings: tuple[str, ...] = ()
        replayed = not_replayed("no finite epsilon is claimed")
        if quick and 2 * each_run > QUICK_SECONDS:
            replayed = not_replayed("one answer takes too long")
        elif math.isfinite(claimed):
            outcome = replay(
                method,
                scene,
                _neighbours(pool, others, canary),
                seconds=for_runs,
                progress=progress,
            )
            findings, replayed = outcome.findings, outcome.evidence
        evidence = [*bounds(traffic, public, delta, each, seed), replayed]
        done = 0
        if quick and releases >= 4 and 3 * each_run > QUICK_SECONDS:  # a release takes longer still
            evidence.append(_not_attacked(0))
        elif releases >= 4 and isinstance(method, Method):
            found, done = _attack_releases(
                method, pool, releases, Path(folder), engine, delta, each, seed, quick, progress
            )
            evidence += found
    return _judged(
        AuditResult(
            method=method.name,
            recipe=method.recipe(),
            pool=pool.name,
            claimed=claimed,
            delta=delta,
            lower_bound=max((found.epsilon for found in evidence), default=0.0),
            confidence=confidence,
            evidence=tuple(evidence),
            findings=(*_beyond_the_plan(method, traffic, public, delta), *findings),
            runs=len(traffic.inside) + len(traffic.outside),
            releases=done,
            seconds=time.monotonic() - began,
        ),
        strict,
    )


def _in_memory() -> str | None:
    """Name a folder in memory, where throw-away ledgers cost no disk writes; None for the usual."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and os.access(memory, os.W_OK) else None


def _judged(result: AuditResult, strict: bool) -> AuditResult:
    if strict and not result.passed:
        raise AuditFailed(result)
    return result


def _scene(pool: AuditPool, known: Tensor, engine: Engine, folder: Path, delta: float) -> Scene:
    return Scene(
        images=pool.images[known].numpy(),
        labels=pool.labels[known].numpy(),
        public=pool.public,
        engine=engine,
        folder=folder,
        delta=delta,
    )


def _neighbours(pool: AuditPool, others: Tensor, worst: Canary) -> list[Canary]:
    """Return the canary whose contributions are largest, and a real record of another class.

    Under *replace* the real record stands in for another one of its class.
    """
    own = others[pool.labels[others] != worst.label]
    if worst.other is None:
        return [worst, *(Canary(pool.images[i], None, int(pool.labels[i])) for i in own[:1])]
    mine = own[pool.labels[own] == pool.labels[own[:1]]][:2]
    if len(mine) < 2:
        return [worst]
    image, other = pool.images[mine]
    return [worst, Canary(image, other, int(pool.labels[mine[0]]))]


class _clock:  # noqa: N801 - used as a function
    """Say whether to go on: always, or until a quick audit's time is up. Two runs at least."""

    def __init__(self, quick: bool, total: int, progress: Progress, text: str) -> None:
        self.until = time.monotonic() + QUICK_SECONDS if quick else math.inf
        self.total, self.progress, self.text = total, progress, text

    def __call__(self, done: int) -> bool:
        self.progress(done, self.total, self.text)
        return done < 2 or not self.late(done)

    def late(self, _: object = None) -> bool:
        """Tell whether the time is up."""
        return time.monotonic() > self.until

    def hear(self, done: int, total: int, text: str) -> None:
        """Be told of progress with one release, and cut it when the time is up."""
        if self.late():
            raise Cut


def _beyond_the_plan(
    method: Mechanism, traffic: Traffic, public: Public, delta: float
) -> tuple[str, ...]:
    planned = {step.query: step.times for step in method.plan(public)}
    beyond = [
        f"'{query.name}' was answered {asked} times, planned {planned.get(query, 0)}"
        for query, asked in traffic.most_asked.items()
        if asked > planned.get(query, 0)
    ]
    if not beyond:
        return ()
    events = tuple(query.event(public, asked) for query, asked in traffic.most_asked.items())
    price = epsilon(
        events, delta, adjacency=public.adjacency, labels_fixed=public.labels == "public"
    )
    return (f"{'; '.join(beyond)}: what was asked costs epsilon {price:.4g}.",)


# Releases


def _attack_releases(
    method: Method,
    pool: AuditPool,
    releases: int,
    folder: Path,
    engine: Engine,
    delta: float,
    confidence: float,
    seed: int,
    quick: bool,
    progress: Progress,
) -> tuple[list[Evidence], int]:
    """Insert canaries by fair coins into every release, and guess the coins.

    The first third are shadow runs, whose coins the attacker knows; it guesses those of the rest.
    Coins of different runs are independent and each touches its own run alone, so all runs
    together are (epsilon, delta)-private in every coin, and the one-run bound holds for them.
    """
    known, others = pool.parts(None, seed)
    random = np.random.default_rng(seed + 1)
    own = others[torch.from_numpy(random.permutation(len(others))[: CANARIES // 2])]
    reference = others[~torch.isin(others, own)]
    made, made_labels = crafted(pool.public, CANARIES - len(own), seed + 2)
    images = torch.cat([made, pool.images[own]])
    labels = torch.cat([made_labels, pool.labels[own]])
    scene = _scene(pool, known, engine, folder / "releases", delta)
    go_on = _clock(quick, releases, progress, "making releases")

    coins: list[npt.NDArray[np.bool_]] = []
    nearest: list[Scores] = []
    ratios: list[Scores] = []
    products: list[Scores] = []
    for number in range(releases):
        if not go_on(number) or go_on.late():
            break
        coin = random.integers(0, 2, len(images)).astype(bool)
        data = scene.with_records(images[coin], labels[coin])
        product = np.zeros(len(images))

        def watch(answer: Answer, product: Scores = product) -> None:
            if answer.rows is None:
                return
            for i, label in enumerate(labels.tolist()):
                row = label if answer.query.per_class else 0
                product[i] += inner_products(
                    answer.noisy[row],
                    answer.known[row],
                    answer.rows[i : i + 1],
                    answer.claimed_stddev,
                )[0]

        release = scene.run(method, data, watch, (images, labels), number, go_on.late)
        if release is None:
            break
        try:
            synthetic = method.synthesise(release, engine=engine, progress=go_on.hear)
        except Cut:
            break
        coins.append(coin)
        nearest.append(nearest_distance(synthetic, images, labels))
        ratios.append(
            density_ratio(synthetic, pool.images[reference], pool.labels[reference], images, labels)
        )
        products.append(product)
    done = len(coins)
    shadows = done // 3
    if done < 3:
        return [_not_attacked(done)], done
    near, bits = np.stack(nearest), np.stack(coins)
    tables = {
        "nearest synthetic record": near[shadows:],
        "density ratio": np.stack(ratios)[shadows:],
        "shadow runs": likelihood_ratio(near[shadows:], near[:shadows], bits[:shadows]),
        "inner product": np.stack(products)[shadows:],
    }
    return [
        _one_run(name, scores, bits[shadows:], delta, confidence) for name, scores in tables.items()
    ], done


def _not_attacked(done: int) -> Evidence:
    """Return the line of an audit whose time was up before three releases were made."""
    return Evidence(
        attack=f"canaries in releases: not done, the time was up after {done}",
        epsilon=0.0,
        confidence=1.0,
        rests_on="nothing",
    )


def _one_run(
    name: str, scores: Scores, bits: npt.NDArray[np.bool_], delta: float, confidence: float
) -> Evidence:
    """Guess a third of each run's canaries in and a third out; bound epsilon by what was right."""
    guesses = np.stack([guess(row, scores.shape[1] // 3) for row in scores])
    made = int(np.count_nonzero(guesses))
    right = int(np.sum((guesses == 1) & bits) + np.sum((guesses == -1) & ~bits))
    inside, outside = scores[bits], scores[~bits]
    both = min(len(inside), len(outside)) > 0
    return Evidence(
        attack=f"canaries in releases: {name}",
        epsilon=one_run_epsilon(bits.size, made, right, delta, confidence),
        confidence=confidence,
        rests_on="nothing but fair coins (Steinke, Nasr, Jagielski 2023, Theorem 5.2)",
        figures={
            "right": right / made,
            "guesses": float(made),
            "auroc": auroc(inside, outside) if both else 0.5,
            "tpr_at_fpr_0.01": tpr_at_fpr(inside, outside, 0.01) if both else 0.0,
        },
    )
