"""Tell a neighbour's run one and the same answers, and see what is not the noise's.

Adaptive composition speaks of answers given the answers before them. So the method runs once and
its noisy answers are kept; then it runs on a neighbour, is told those very answers, and its exact
sums are laid beside the first ones. Three things must hold, and need no statistics:

* every exact sum moves by at most what the plan pays for;
* the same questions are asked in the same order;
* what is released, or kept at a checkpoint, is the same: it is made of answers, and those are.

The secret is the same on both sides, so the other records toss the same coins; the record that
differs, and one of every class, are in every batch. Noise takes no part: see :mod:`.mechanism`
for noise that is too small. Public audit records only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from understudy.auditing.mechanism import Canary, Cut, Scene
from understudy.auditing.statistics import Evidence
from understudy.engine import Progress, silent
from understudy.errors import UnderstudyError
from understudy.methods.base import Mechanism
from understudy.privacy.events import Query
from understudy.privacy.gate import ExactSum, Gate
from understudy.privacy.noise import Secret, Stream
from understudy.privacy.public import Adjacency, Public
from understudy.privacy.release import Release

ROUNDING = 1e-3
"""Share of its bound a sum may move beyond it: float32 work on batches of different sizes."""

KEPT_BYTES = 2**31
"""Length at which a transcript is cut."""

ATTACK = "one transcript told to neighbours"


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Hold what came of telling neighbours one transcript."""

    neighbours: int
    answers: int
    """Compared with one neighbour; fewer than planned where the transcript was cut."""
    planned: int
    moved: float
    """The most any exact sum moved, in units of what the plan pays for."""
    findings: tuple[str, ...]

    @property
    def evidence(self) -> Evidence:
        """Return a line for the result. It bounds no epsilon: findings decide."""
        return Evidence(
            attack=ATTACK,
            epsilon=0.0,
            confidence=1.0,
            rests_on="the same coins and answers on both sides; no statistics",
            figures={
                "neighbours": float(self.neighbours),
                "answers": float(self.answers),
                "planned": float(self.planned),
                "moved": self.moved,
            },
        )


def not_replayed(reason: str) -> Evidence:
    """Return the line of a result whose method has nothing to replay."""
    return Evidence(
        attack=f"{ATTACK}: not done, {reason}", epsilon=0.0, confidence=1.0, rests_on="nothing"
    )


class _OneKey(Secret):
    """Give every run the streams of one key: a grant's own number, first of a place, is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.known = True

    def stream(self, *place: object) -> Stream:
        return super().stream(*place[1:])


class _Strayed(UnderstudyError):
    """A run asked something else than the one before it."""


@dataclass
class Transcript:
    """Hold what one run asked, what it was told, and what it kept."""

    queries: list[Query] = field(default_factory=list)
    exact: list[Tensor] = field(default_factory=list)
    told: list[Tensor] = field(default_factory=list)
    checkpoints: list[dict[str, Tensor]] = field(default_factory=list)
    nbytes: int = 0
    cut: bool = False
    release: Release | None = None
    """None where the transcript was cut."""
    moved: float = 0.0
    """The most an exact sum was off the earlier transcript's, in units of what is paid for."""
    most_moved: str = ""

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a copy off the device, and count its bytes."""
        copy = tensor.detach().to("cpu", copy=True)
        self.nbytes += copy.nbytes
        return copy


class ReplayedGate(Gate):
    """Write a transcript; or tell the answers of an earlier one, and compare exact sums.

    ``always`` are the records drawn into every batch; ``go_on`` says whether to write more.
    """

    def __init__(
        self,
        gate: Gate,
        transcript: Transcript,
        earlier: Transcript | None,
        *,
        always: npt.NDArray[np.intp],
        go_on: Callable[[], bool],
    ) -> None:
        self.__dict__.update(vars(gate))
        self._transcript, self._earlier = transcript, earlier
        self._always, self._go_on = always, go_on

    def checkpoint(self, state: Mapping[str, Tensor]) -> None:
        """Write down what is kept."""
        kept = {name: self._transcript.keep(value) for name, value in state.items()}
        self._transcript.checkpoints.append(kept)
        super().checkpoint(state)

    def _include(self, query: Query, turn: int) -> npt.NDArray[np.intp]:
        return np.union1d(super()._include(query, turn), self._always)

    def _answer(self, query: Query, total: Callable[[int], ExactSum]) -> Tensor:
        answer = super()._answer(query, functools.partial(self._sum, query, total))
        mine, earlier = self._transcript, self._earlier
        if earlier is None:
            mine.told.append(mine.keep(answer))
            enough = mine.nbytes > KEPT_BYTES or not self._go_on()
            mine.cut = enough and any(self._left.values())
            if mine.cut:
                raise Cut
            return answer
        if earlier.cut and len(mine.queries) == len(earlier.queries):
            raise Cut
        return earlier.told[len(mine.queries) - 1].to(answer.device, copy=True)

    def _sum(self, query: Query, total: Callable[[int], ExactSum], turn: int) -> ExactSum:
        """Work out an exact sum, if it is the one that is due; write it down or compare it."""
        mine, earlier = self._transcript, self._earlier
        place = len(mine.queries)
        if earlier is not None and place == len(earlier.queries):
            raise _Strayed(f"'{query.name}' is asked after the last answer")
        if earlier is not None and query != earlier.queries[place]:
            due = earlier.queries[place].name
            raise _Strayed(f"'{query.name}' is asked in place of '{due}', answer {place + 1}")
        exact = total(turn)
        sums = exact[0].detach().reshape(-1)
        if earlier is None:
            mine.exact.append(mine.keep(sums.float()))
        else:
            apart = sums.cpu().double() - earlier.exact[place].double()
            norm = torch.linalg.vector_norm(apart).nan_to_num(nan=math.inf)
            moved = float(norm) / _paid(query, self.public)
            if moved > mine.moved:
                mine.moved, mine.most_moved = moved, f"'{query.name}', answer {place + 1}"
        mine.queries.append(query)
        return exact


def replay(
    method: Mechanism,
    scene: Scene,
    neighbours: Sequence[Canary],
    *,
    seconds: float = math.inf,
    progress: Progress = silent,
) -> Replayed:
    """Run once, and once more with each neighbour's canary there (or exchanged), told the same.

    After ``seconds`` no further neighbour is begun; a quarter of them, and the transcript is cut.
    All records fit one chunk here, so that whatever a gate does to a chunk, the canary is in it.
    """
    everybody = len(scene.labels) + max(len(canary.candidates[1]) for canary in neighbours)
    chunk = max(everybody, scene.engine.records_at_once)
    scene = dataclasses.replace(scene, engine=dataclasses.replace(scene.engine, chunk=chunk))
    key, until = _OneKey(), time.monotonic() + seconds
    known, firsts = len(scene.labels), np.unique(scene.labels, return_index=True)[1]

    def run(
        images: Tensor, labels: Tensor, name: str, earlier: Transcript | None = None
    ) -> Transcript:
        transcript, late = Transcript(), time.monotonic() + seconds / 4
        always = np.concatenate([firsts, np.arange(known, known + len(labels))])

        def wrap(gate: Gate) -> Gate:
            return ReplayedGate(
                gate,
                transcript,
                earlier,
                always=always,
                go_on=lambda: time.monotonic() < late,
            )

        with contextlib.suppress(Cut):
            data = scene.with_records(images, labels)
            transcript.release = scene.through(wrap, method, data, f"replay-{name}", secret=key)
            if earlier is not None and len(transcript.queries) < len(earlier.queries):
                raise _Strayed(f"{len(transcript.queries)} answers, not {len(earlier.queries)}")
        return transcript

    first: Transcript | None = None
    done, moved, findings = 0, 0.0, []
    for canary in neighbours:
        if done and time.monotonic() > until:
            break
        progress(done, len(neighbours), "replaying")
        images, labels = canary.candidates
        if first is None or canary.other is not None:
            first = run(images[1:], labels[1:], f"first-{done}")
        done += 1
        try:
            second = run(images[:1], labels[:1], f"second-{done}", first)
        except UnderstudyError as error:
            findings.append(
                f"Told the same answers, the method does otherwise with a neighbour ({error}): it "
                "looks at records past the gate."
            )
            break
        moved = max(moved, second.moved)
        if second.moved > 1 + ROUNDING:
            findings.append(
                f"One record moves an exact sum ({second.most_moved}) by {second.moved:.4g} times "
                "what the plan pays for."
            )
        apart = _apart(first, second)
        # Where something differs: is it the record, or a machine that repeats nothing?
        if apart > 0:
            again = run(images[1:], labels[1:], f"again-{done}", first)
            if apart > 10 * _apart(first, again):
                findings.append(
                    "Told the same answers, the method releases or keeps other numbers of a "
                    f"neighbour (by up to {apart:.3g}): it looks at records past the gate."
                )
        if findings:
            break
    return Replayed(
        neighbours=done,
        answers=0 if first is None else len(first.queries),
        planned=sum(step.times for step in method.plan(scene.public)),
        moved=moved,
        findings=tuple(findings),
    )


def _paid(query: Query, public: Public) -> float:
    """Return how far the plan lets one record move a sum."""
    exchanged = 2.0 if public.adjacency is Adjacency.REPLACE else 1.0
    return exchanged * query.event(public, 1).sensitivity * query.bound


def _apart(one: Transcript, two: Transcript) -> float:
    """Return how far apart two runs' checkpoints and releases are; inf where they differ in kind."""
    if len(one.checkpoints) != len(two.checkpoints):
        return math.inf
    pairs: list[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]
    pairs = list(zip(one.checkpoints, two.checkpoints))
    if one.release is not None and two.release is not None:
        if _said(one.release) != _said(two.release):
            return math.inf
        pairs.append((one.release.signals, two.release.signals))
    return max((_between(*pair) for pair in pairs), default=0.0)


def _said(release: Release) -> tuple[object, ...]:
    """Return what a release holds besides numbers, of the method's own making."""
    statement = release.statement
    return release.recipe, statement.assumptions, statement.departures


def _between(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    if one.keys() != two.keys():
        return math.inf
    largest = 0.0
    for name, value in one.items():
        other = two[name]
        if value.shape != other.shape:
            return math.inf
        if value.numel() and not torch.equal(value, other):
            apart = (value.double() - other.double()).abs().nan_to_num(nan=math.inf)
            largest = max(largest, float(apart.max()))
    return largest
