"""Read private records. This is the only file that does.

    plan -> ledger.reserve -> Gate.noisy_sum -> ... -> Gate.release

Every answer is ``sum over included records of clip(contribution(record)) + noise``:

1. the query must be in the plan, and not asked more often than planned;
2. records are included by a secret coin each (Poisson), or all of them;
3. the contribution is a function of ONE record, vectorised here with ``torch.func.vmap``, so one
   record cannot see another; chunks have a public number of rows, blank ones at the end, so not
   even rounding depends on how many others there are; a row that is not finite counts as zero;
4. each row is clipped to the query's bound in L2, unconditionally, and truncated towards zero
   onto a public grid, so that the float64 sum is exact in any order and on any device;
5. Gaussian noise is added once, from a secret source, on the same grid;
6. the noisy answer is journalled before anybody sees it, so a run that is killed resumes without
   asking again. Answers asked for together are journalled together: none is seen before that.

Guarantee: sampled Gaussian mechanism (Mironov, Talwar, Zhang 2019; DPDC Lemma III.3) per query;
adaptive composition over the plan, whose parameters are fixed before the first answer.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from understudy.engine import Engine, Progress, captured, fetched, moved, silent
from understudy.errors import BadConfiguration, DataError, LedgerError, NotPlanned
from understudy.privacy.accounting import Budget
from understudy.privacy.clipping import add_clipped
from understudy.privacy.events import Plan, Query
from understudy.privacy.ledger import Grant, Ledger
from understudy.privacy.noise import Secret, chance, grid, grid_noise
from understudy.privacy.public import Public
from understudy.privacy.release import Release
from understudy.privacy.statement import Statement

Contribution = Callable[..., Tensor]
"""Map ONE record (its values in [-1, 1] and its label, both tensors) to a vector.

Called as ``contribution(record, label)``, or with public state as ``contribution(state, record,
label)``. State given as such, and not closed over, lets a GPU record the whole sum once.
"""

ExactSum = tuple[Tensor, tuple[int, ...], float]
"""A sum without noise, the shape of the answer, and the grid both live on."""

State = dict[str, Tensor]
"""The states of several shards, stacked along the first index; or of one, without it."""

UNDECLARED_SIZE = 2**24
"""Room for records where class sizes are private and not yet measured."""

SHARDS_ROOM = 4
"""On a GPU shards' networks, which are small, work on so many times the records of one network."""

ROWS_BYTES, CPU_ROWS_BYTES = 2**30, 2**25
"""Bound on the rows of one chunk, were they float64; on a CPU what its caches can do with."""

KEPT_SHARE = 8
"""Records stay on a GPU where they take at most one part in so many of its free memory."""

UNSEEN_SECONDS, UNSEEN_BYTES = 1.0, 2**28
"""How much may be asked before it is journalled: what a kill costs is time, never privacy."""


def record_digests(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return a 16-byte digest of each row's shape, type and bytes.

    Readers call it on records as they lie in the file, before any declared preparation, so that
    the same records meet the same ledger however they are prepared.
    """
    rows = np.asarray(rows)
    header = f"{rows.dtype.str}{rows.shape[1:]}".encode()
    return (
        np.stack(
            [
                np.frombuffer(
                    hashlib.blake2b(
                        header + np.ascontiguousarray(row).tobytes(), digest_size=16
                    ).digest(),
                    dtype=np.uint8,
                )
                for row in rows
            ]
        )
        if len(rows)
        else np.zeros((0, 16), np.uint8)
    )


class Records:
    """Carry records from a reader to the gate. Nothing else may look inside.

    ``images``: uint8 in [0, 255] or float32 in [-1, 1], of shape (N, *shape), in memory or
    memory-mapped. ``labels``: int64 of shape (N,). ``digests``: :func:`record_digests`.
    """

    __slots__ = ("_digests", "_images", "_labels")

    def __init__(
        self,
        images: npt.NDArray[Any],
        labels: npt.NDArray[np.int64],
        digests: npt.NDArray[np.uint8],
    ) -> None:
        if not len(images) == len(labels) == len(digests):
            raise DataError(
                f"{len(images)} records, {len(labels)} labels and {len(digests)} digests do not "
                "belong together."
            )
        if images.dtype not in (np.uint8, np.float32):
            raise DataError(f"Records must be uint8 or float32, not {images.dtype}.")
        self._images, self._labels, self._digests = images, labels, digests

    def _fingerprint(self) -> bytes:
        """Digest the multiset of records: order and labels do not matter."""
        total = 0
        for row in self._digests:
            wide = hashlib.blake2b(bytes(row), digest_size=64, person=b"multiset").digest()
            total += int.from_bytes(wide, "little")
        return hashlib.sha256((total % 2**512).to_bytes(64, "little")).digest()

    def __reduce__(self) -> str:
        raise TypeError("Private records are never pickled.")


class PrivateDataset:
    """Hold private records behind the gate. Only ``public`` can be looked at."""

    __slots__ = ("_records", "public")

    def __init__(self, records: Records, public: Public) -> None:
        shape, labels = tuple(records._images.shape[1:]), records._labels
        if shape != public.shape:
            raise DataError(f"Records have shape {shape}, but {public.shape} was declared.")
        if len(labels) and not (labels.min() >= 0 and labels.max() < len(public.classes)):
            raise DataError(
                f"Labels must lie in 0..{len(public.classes) - 1} for {len(public.classes)} "
                "classes, and some do not."
            )
        self._records, self.public = records, public

    def __repr__(self) -> str:
        return f"PrivateDataset({self.public!r})"

    def __reduce__(self) -> str:
        raise TypeError("A private dataset is never pickled or copied.")

    def ledger(self) -> Ledger:
        """Return the ledger these records meet by default, in the user's state folder."""
        return Ledger.for_fingerprint(self._records._fingerprint())

    def begin_ledger(self, ledger: Ledger, cap: Budget) -> None:
        """Fix the most that all runs on these records may ever spend, before the first one."""
        ledger.begin(cap, public=self.public, fingerprint=self._records._fingerprint())

    @contextlib.contextmanager
    def open(
        self,
        plan: Plan,
        *,
        by: str,
        recipe: Mapping[str, Any],
        ledger: Ledger,
        budget: Budget,
        public: Public | None = None,
        before: tuple[Grant, ...] = (),
        secret: Secret | None = None,
        engine: Engine | None = None,
        progress: Progress = silent,
    ) -> Iterator[Gate]:
        """Reserve the whole plan in the ledger, then yield a gate that can ask it and no more.

        ``recipe`` (a method and its configuration) identifies the run: if it was killed before,
        its grant is taken up again and answers already given are repeated, not asked anew.
        ``before`` names grants of earlier stages whose noisy answers ``public`` depends on.
        """
        facts = public or self.public
        with ledger.reserve(
            plan.events(facts),
            by=by,
            recipe=recipe,
            public=facts,
            budget=budget,
            fingerprint=self._records._fingerprint(),
            replayable=secret is None,
        ) as grant:
            yield Gate(
                self._records,
                facts,
                plan,
                grant=grant,
                before=before,
                secret=secret or Secret(),
                engine=engine or Engine(),
                progress=progress,
            )


@dataclass(frozen=True)
class NoisySum:
    """Give one noisy answer and the standard deviation of its noise (public).

    ``value`` has shape (classes, *contribution) where the query is per class, else
    (*contribution).
    """

    value: Tensor
    stddev: float


class Gate:
    """Answer planned queries about private records."""

    def __init__(
        self,
        records: Records,
        public: Public,
        plan: Plan,
        *,
        grant: Grant,
        before: tuple[Grant, ...],
        secret: Secret,
        engine: Engine,
        progress: Progress,
    ) -> None:
        self.public, self.engine, self.grant = public, engine, grant
        self._records, self._plan, self._before = records, plan, before
        self._secret, self._progress = secret, progress
        self._left = {step.query: step.times for step in plan}
        self._sums: dict[Query, _ClippedSum] = {}
        self._chances: dict[Query, npt.NDArray[np.uint64]] = {}
        self._unseen: dict[int, Tensor] = {}
        self._asked = 0
        self._kept = grant.journal.kept()
        self._total = sum(step.times for step in plan)

    def noisy_sum(
        self, query: Query, contribution: Contribution, state: Mapping[str, Tensor] | None = None
    ) -> NoisySum:
        """Sum clipped contributions of the included records and add noise, once."""
        value = self._ask(query, contribution, state)
        self._keep(query)
        return NoisySum(value.to(self.engine.torch_device), query.stddev)

    def noisy_sums(
        self,
        query: Query,
        contribution: Contribution,
        states: Sequence[Callable[[], Mapping[str, Tensor]]],
    ) -> NoisySum:
        """Ask a query once with each public state; the values come stacked.

        What :meth:`noisy_sum` does, so many times, for states that do not depend on the answers:
        they are made one by one, and many answers go to the journal at once. Where together they
        are large, the values lie off the device.
        """
        values: Tensor | None = None
        unseen: list[Tensor] = []
        done, since = 0, time.monotonic()
        for place, state in enumerate(states, start=1):
            unseen.append(self._ask(query, contribution, state()))
            each = unseen[0].numel() * 4
            late = time.monotonic() - since > UNSEEN_SECONDS
            first = self._asked == 1  # alone, so that progress shows at once
            if not first and place < len(states) and not late and len(unseen) * each < UNSEEN_BYTES:
                continue
            self._keep(query)
            if values is None:
                small = len(states) * each <= UNSEEN_BYTES
                where = self.engine.torch_device if small else None
                values = torch.empty(len(states), *unseen[0].shape, device=where)
            values[done:place] = torch.stack(unseen)
            unseen, done, since = [], place, time.monotonic()
        if values is None:
            raise BadConfiguration(f"Query '{query.name}' was asked with no state at all.")
        return NoisySum(values, query.stddev)

    def noisy_counts(self, query: Query) -> NoisySum:
        """Count the records of each class, noisily. Each record adds 1 to one count."""
        return self.noisy_sum(query, lambda image, label: image.new_ones(()))

    def bare_batch(self, query: Query) -> tuple[Tensor, Tensor]:
        """Hand out one planned batch as it is: for algorithms that have no proof.

        Only for a query without noise, whose plan costs infinity: a ledger with a finite cap
        refuses it before anything is read. Nothing made from such a batch claims a guarantee.
        """
        if query.noise_multiplier != 0:
            raise BadConfiguration(
                f"Query '{query.name}' is priced with noise, so its records never leave. A bare "
                "batch needs noise_multiplier 0, which costs an infinite epsilon."
            )
        turn = self._take(query)
        return self._load(self._include(query, turn))

    def shards(self, count: int, start: Callable[[Tensor], State], *, batch: int) -> Shards:
        """Deal the records to ``count`` shards, each with a private state that never leaves.

        A record's shard is a secret keyed hash of its own bytes: which shard it meets does not
        depend on any other record, so adding, removing or changing one record touches one shard
        (a changed record: the two it leaves and enters). ``start(numbers)`` makes the first
        states of the shards of these numbers, stacked, and sees no record. ``batch`` is how many
        of its own records a shard sees at a time.
        """
        dealer = self._secret.stream(self.grant.id, "shards")
        places = np.array(
            [dealer.keyed(bytes(row)) % count for row in self._records._digests], dtype=np.int64
        )
        members = [np.flatnonzero(places == shard) for shard in range(count)]
        return Shards(self, members, start, batch)

    def checkpoint(self, state: Mapping[str, Tensor]) -> None:
        """Keep public state that stands for every answer so far, and forget those answers.

        For methods whose queries depend on earlier answers over very many turns: the journal
        then holds only what came after. ``state`` must be a function of answers and public
        values alone, and a method that calls this begins with :meth:`resume`.
        """
        left = {query.name: times for query, times in self._left.items()}
        self.grant.journal.checkpoint(self._asked, left, state)

    def resume(self) -> dict[str, Tensor] | None:
        """Take up the last checkpoint of this run, if it was killed after one."""
        kept, self._kept = self._kept, None
        if kept is None:
            return None
        if self._asked:
            raise NotPlanned("A run is resumed before its first query, not in its midst.")
        left = {query: kept.left.get(query.name, -1) for query in self._left}
        if min(left.values()) < 0 or self._total - sum(left.values()) != kept.asked:
            raise LedgerError("The checkpoint of this run does not belong to its plan.")
        self._left, self._asked = left, kept.asked
        return {name: value.to(self.engine.torch_device) for name, value in kept.state.items()}

    def release(
        self,
        *,
        signals: Mapping[str, Tensor],
        recipe: Mapping[str, Any],
        assumptions: tuple[str, ...] = (),
        departures: tuple[str, ...] = (),
    ) -> Release:
        """Stamp the statement on what was measured. Nobody writes a statement by hand."""
        return Release(
            signals={
                name: tensor.detach().to("cpu", torch.float32).contiguous()
                for name, tensor in signals.items()
            },
            recipe=recipe,
            public=self.public,
            statement=Statement.stamp(
                grant=self.grant,
                before=self._before,
                public=self.public,
                assumptions=assumptions,
                departures=departures,
                secret_known=self._secret.known,
            ),
        )

    # The rest is private.

    def _ask(
        self, query: Query, contribution: Contribution, state: Mapping[str, Tensor] | None
    ) -> Tensor:
        """Answer one turn about records."""

        def total(turn: int) -> ExactSum:
            chosen = self._include(query, turn)
            return self._clipped_sum(query, contribution, chosen, state)

        return self._answer(query, total)

    def _answer(self, query: Query, total: Callable[[int], ExactSum]) -> Tensor:
        """Take a turn and return its noisy answer, which nobody may see before :meth:`_keep`."""
        turn = self._take(query)
        stored = self.grant.journal.read(turn)
        if stored is not None:
            return stored.to(self.engine.torch_device)
        sums, shape, step = total(turn)
        if query.stddev > 0:
            stream = self._secret.stream(self.grant.id, turn, "noise")
            noise = grid_noise(stream, sums.numel(), query.stddev, step, sums.device)
            sums = sums + noise.reshape(sums.shape)
        self._unseen[turn] = sums.to(torch.float32).reshape(shape)
        return self._unseen[turn]

    def _keep(self, query: Query) -> None:
        """Journal the answers nobody has seen yet: from here on they can be seen."""
        if self._unseen:
            rows = fetched(torch.stack(list(self._unseen.values())))
            self.grant.journal.write(dict(zip(self._unseen, rows)))
            self._unseen.clear()
        self._progress(self._asked, self._total, f"asking '{query.name}'")

    def _take(self, query: Query) -> int:
        """Use up one planned turn, or refuse."""
        if self._kept is not None:
            raise NotPlanned(
                "This run was killed after a checkpoint, so its first answers are no longer kept: "
                "begin with gate.resume()."
            )
        if query not in self._left:
            raise NotPlanned(
                f"Query '{query.name}' is not in the plan, which has "
                f"{', '.join(repr(step.query.name) for step in self._plan)}. A query's bound, "
                "noise and sampling are part of it: ask exactly what was planned."
            )
        if self._left[query] == 0:
            times = next(step.times for step in self._plan if step.query == query)
            raise NotPlanned(f"Query '{query.name}' was planned {times} times and all are used.")
        self.grant.still_ours()
        self._left[query] -= 1
        self._asked += 1
        return self._asked - 1

    def _include(self, query: Query, turn: int) -> npt.NDArray[np.intp]:
        """Toss one secret coin a record."""
        labels = self._records._labels
        if query.expected_batch is None:
            return np.arange(len(labels))
        if query not in self._chances:
            self._chances[query] = chance(query.rates(self.public))[labels]
        stream = self._secret.stream(self.grant.id, turn, "inclusion")
        return np.flatnonzero(stream.tosses(self._chances[query]))

    @property
    def _declared_size(self) -> int:
        """Return how many records sums must have room for: a public number."""
        return UNDECLARED_SIZE if self.public.counts is None else self.public.size

    @functools.cached_property
    def _on_device(self) -> tuple[Tensor, Tensor] | None:
        """Hold all records in a GPU's memory, as they are, where they take little of it."""
        device, images = self.engine.torch_device, self._records._images
        if device.type != "cuda" or KEPT_SHARE * images.nbytes > torch.cuda.mem_get_info(device)[0]:
            return None
        labels = torch.from_numpy(self._records._labels).to(device)
        return torch.from_numpy(np.array(images)).to(device), labels

    def _raw(self, chosen: npt.NDArray[np.intp]) -> tuple[Tensor, Tensor]:
        """Fetch records by index, bytes as bytes."""
        device = self.engine.torch_device
        if self._on_device is None:
            images = torch.from_numpy(np.array(self._records._images[chosen]))
            labels = torch.from_numpy(self._records._labels[chosen])
            return moved(images, device), moved(labels, device)
        images, labels = self._on_device
        if in_turn(chosen, len(labels)):
            return self._on_device
        places = moved(torch.from_numpy(chosen), device)
        return images[places], labels[places]

    def _load(self, chosen: npt.NDArray[np.intp]) -> tuple[Tensor, Tensor]:
        """Fetch records by index; bytes become numbers in [-1, 1]."""
        images, labels = self._raw(chosen)
        return _numbers(images), labels

    def _clipped_sum(
        self,
        query: Query,
        contribution: Contribution,
        chosen: npt.NDArray[np.intp],
        state: Mapping[str, Tensor] | None = None,
    ) -> ExactSum:
        if query.unit != "record":
            raise BadConfiguration(f"Query '{query.name}' asks shards: use Shards.noisy_sum.")
        if query not in self._sums:
            self._sums[query] = _ClippedSum(query, self.public, self.engine, self._declared_size)
        return self._sums[query].of(contribution, state, self._raw, chosen)


def _numbers(images: Tensor) -> Tensor:
    """Turn bytes into numbers in [-1, 1] by the fixed 0.5 / 0.5 rule."""
    return images.float().div_(127.5).sub_(1.0) if images.dtype == torch.uint8 else images


def _filled(rows: Tensor, room: int) -> Tensor:
    """Add blank rows until there are so many."""
    missing = room - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def in_turn(chosen: npt.NDArray[np.intp], count: int) -> bool:
    """Tell whether all records were chosen, one after the other."""
    return len(chosen) == count and np.array_equal(chosen, np.arange(count))


def recordable(device: torch.device) -> bool:
    """Tell whether work can be recorded there and replayed."""
    return device.type == "cuda"


class _ClippedSum:
    """Add up the clipped contributions of one query's records, a chunk at a time.

    Where a GPU is given public state, the work on a chunk is recorded once and replayed: records
    and state are copied to where the recording looks for them. Rows of a chunk that stand for
    nobody are left out of the sum.
    """

    def __init__(self, query: Query, public: Public, engine: Engine, room: int) -> None:
        self._query, self._public, self._engine, self._room = query, public, engine, room
        self._device = engine.torch_device
        self._groups = len(public.classes) if query.per_class else 1
        self._step = grid(query.bound, query.stddev, room)
        self._shape: tuple[int, ...] | None = None
        self._recorded: tuple[Contribution, _Recorded] | None = None

    def of(
        self,
        contribution: Contribution,
        state: Mapping[str, Tensor] | None,
        load: Callable[[npt.NDArray[np.intp]], tuple[Tensor, Tensor]],
        chosen: npt.NDArray[np.intp],
    ) -> ExactSum:
        """Return the exact sum over the chosen records."""
        query, step = self._query, self._step
        if len(chosen) * query.bound >= 2.0**53 * step:
            raise DataError(
                f"'{self._public.name}' holds many times more records than the {self._room} it "
                "declares: their sum would not be exact."
            )
        of_one = contribution if state is None else functools.partial(contribution, state)
        shape = self._probe(of_one)
        width = math.prod(shape)
        total = torch.zeros(self._groups, width, dtype=torch.float64, device=self._device)
        if state is not None and recordable(self._device):
            self._replayed(total, contribution, state, load, chosen, width)
        else:
            vectorised = torch.func.vmap(of_one, randomness="error")
            room = self._chunk(width)
            for first in range(0, len(chosen), room):
                images, labels = load(chosen[first : first + room])
                rows = vectorised(_numbers(_filled(images, room)), _filled(labels, room))
                self._add(total, rows[: len(labels)], labels)
        return total * step, ((self._groups, *shape) if query.per_class else shape), step

    def _chunk(self, width: int) -> int:
        """Return how many rows every chunk has, those that stand for nobody included.

        A public number: were a chunk as small as what is left over, one record more or less
        would change its size, and with it the last bits of everybody's rows in it. On a GPU a
        batch is mostly one chunk, on a CPU four, so that little is computed for nobody.
        """
        bytes_at_most = CPU_ROWS_BYTES if self._device.type == "cpu" else ROWS_BYTES
        most = bytes_at_most // (8 * max(width, 1))
        most = max(1, min(self._engine.records_at_once, most))
        if self._device.type == "cpu":
            quarter = 8 * math.ceil(self._expected / 32)
            return min(most, quarter) if quarter and self._engine.chunk is None else most
        hardly_more = self._expected + 3 * math.sqrt(self._expected) + 1
        hardly_more = 64 * math.ceil(hardly_more / 64)
        return math.ceil(hardly_more / math.ceil(hardly_more / most))

    def _probe(self, of_one: Contribution) -> tuple[int, ...]:
        """Learn the shape of contributions from a blank record, which is nobody's."""
        if self._shape is None:
            blank = torch.zeros(1, *self._public.shape, device=self._device)
            label = torch.zeros(1, dtype=torch.long, device=self._device)
            self._shape = tuple(torch.func.vmap(of_one)(blank, label).shape[1:])
        return self._shape

    def _add(self, total: Tensor, rows: Tensor, labels: Tensor, real: Tensor | None = None) -> None:
        """Clip rows and add them to the sums of their groups."""
        if tuple(rows.shape[1:]) != self._shape:
            raise BadConfiguration(
                f"Query '{self._query.name}' gave contributions of shape {self._shape} before and "
                f"of {tuple(rows.shape[1:])} now."
            )
        add_clipped(
            total,
            rows.reshape(len(labels), -1),
            self._query.bound,
            self._step,
            groups=labels if self._query.per_class else None,
            real=real,
        )

    def _replayed(
        self,
        total: Tensor,
        contribution: Contribution,
        state: Mapping[str, Tensor],
        load: Callable[[npt.NDArray[np.intp]], tuple[Tensor, Tensor]],
        chosen: npt.NDArray[np.intp],
        width: int,
    ) -> None:
        """Add the chosen records' rows to a total by replaying the recording."""
        room = self._chunk(width)
        for first in range(0, len(chosen), room):
            images, labels = load(chosen[first : first + room])
            if self._recorded is None or self._recorded[0] != contribution:
                blank = images.new_zeros(room, *images.shape[1:])
                add = functools.partial(self._add_recorded, contribution)
                self._recorded = contribution, _Recorded(add, state, blank, total)
            recorded = self._recorded[1]
            if first == 0:
                recorded.begin(state)
            recorded.add(images, labels)
        if self._recorded is not None and len(chosen):
            total.copy_(self._recorded[1].total)

    def _add_recorded(self, contribution: Contribution, at: _Recorded) -> None:
        vectorised = torch.func.vmap(functools.partial(contribution, at.state), randomness="error")
        self._add(at.total, vectorised(_numbers(at.images), at.labels), at.labels, at.real)

    @functools.cached_property
    def _expected(self) -> float:
        """Return how many records a batch is expected to hold."""
        if self._public.counts is None:
            return 0.0
        rates = self._query.rates(self._public)
        return sum(rate * size for rate, size in zip(rates, self._public.sizes, strict=True))


class _Recorded:
    """Hold a recorded addition and the memory it works on."""

    def __init__(
        self,
        add: Callable[[_Recorded], None],
        state: Mapping[str, Tensor],
        blank: Tensor,
        total: Tensor,
    ) -> None:
        self.state = {name: value.clone() for name, value in state.items()}
        self.images, self.total = blank, total.clone()
        self.labels = torch.zeros(len(blank), dtype=torch.long, device=blank.device)
        self.real = torch.zeros(len(blank), dtype=torch.float64, device=blank.device)
        self._go = captured(lambda: add(self), blank.device, (self.total,))

    def begin(self, state: Mapping[str, Tensor]) -> None:
        """Take up another state and start from zero."""
        torch._foreach_copy_(list(self.state.values()), [state[name] for name in self.state])
        self.total.zero_()

    def add(self, images: Tensor, labels: Tensor) -> None:
        """Add so many records, at most as many as there is room for."""
        count = len(images)
        self.images[:count].copy_(images)
        self.labels[:count].copy_(labels)
        self.real.zero_()[:count] = 1.0
        self._go()


class Shards:
    """Train one private state per shard of records and sum what the shards vote.

    States never leave: only :meth:`noisy_sum` answers, and it is planned, clipped and noised.
    ``step`` and ``vote`` are functions of ONE shard, vectorised here with ``torch.func.vmap`` over
    as many shards at a time as fit, so one shard cannot see another.
    """

    __slots__ = ("_batch", "_gate", "_members", "_states", "_trained")

    def __init__(
        self,
        gate: Gate,
        members: list[npt.NDArray[np.intp]],
        start: Callable[[Tensor], State],
        batch: int,
    ) -> None:
        if not members:
            raise BadConfiguration("There must be at least one shard.")
        if batch < 1:
            raise BadConfiguration(f"A shard must see at least one record at a time: {batch}.")
        self._gate, self._members, self._batch, self._trained = gate, members, batch, 0
        device = gate.engine.torch_device
        self._states: State = {}
        for group in self._groups():
            numbers = torch.arange(group.start, group.stop, device=device)
            for name, value in start(numbers).items():
                if len(value) != len(numbers):
                    raise BadConfiguration(
                        f"start() made {len(value)} states '{name}' for {len(numbers)} shards."
                    )
                if name not in self._states:
                    self._states[name] = value.new_empty(len(members), *value.shape[1:])
                self._states[name][group] = value

    def __len__(self) -> int:
        return len(self._members)

    def __reduce__(self) -> str:
        raise TypeError("The states of shards are private and never leave.")

    def train(self, step: Callable[[State, Tensor, Tensor], State], times: int = 1) -> None:
        """Replace each shard's state by ``step(state, some of its images, their labels)``.

        The records are drawn at random among the shard's own, without repetition where it has
        ``batch`` of them and each in turn where it has fewer; a shard without records sees zeros.

        A step may change its shard's state in place and return it: what lies in its place already
        is not copied.
        """
        vectorised = torch.func.vmap(step, randomness="error")
        for _ in range(times):
            chosen = self._draw()
            for group in self._groups():
                images, labels = self._load(chosen[group])
                changed = vectorised(self._of(group), images, labels)
                for name, value in self._states.items():
                    value[group] = changed[name].detach()  # onto itself PyTorch copies nothing

    def noisy_sum(
        self, query: Query, vote: Callable[..., Tensor], coins: tuple[int, ...] | None = None
    ) -> NoisySum:
        """Sum one clipped vote per shard and add noise, once.

        ``vote(state)``; or with ``coins``, ``vote(state, coins)`` where coins are uniform numbers
        of that shape, each shard's own. They may randomise a vote; no guarantee rests on them.
        """
        if query.unit != "shard":
            raise BadConfiguration(f"Query '{query.name}' must declare unit='shard'.")

        def total(turn: int) -> ExactSum:
            step = grid(query.bound, query.stddev, len(self))
            device = self._gate.engine.torch_device
            tosses = self._gate._secret.stream(self._gate.grant.id, turn, "coins")
            vectorised = torch.func.vmap(vote, randomness="error")
            sums: Tensor | None = None
            shape: tuple[int, ...] = ()
            for group in self._groups():
                voters = group.stop - group.start
                given: tuple[Any, ...] = (self._of(group),)
                if coins is not None:
                    given += (tosses.coins((voters, *coins), device),)
                ballots = vectorised(*given)
                shape = tuple(ballots.shape[1:])
                rows = ballots.reshape(voters, -1)
                if sums is None:
                    sums = rows.new_zeros(1, rows.shape[1], dtype=torch.float64)
                add_clipped(sums, rows, query.bound, step)
            assert sums is not None  # there is at least one shard
            return sums[0] * step, shape, step

        value = self._gate._answer(query, total)
        self._gate._keep(query)
        return NoisySum(value.to(self._gate.engine.torch_device), query.stddev)

    # The rest is private.

    def _groups(self) -> Iterator[slice]:
        """Cut the shards into groups, as many at a time as the engine works on together."""
        engine = self._gate.engine
        room = engine.records_at_once * (1 if engine.torch_device.type == "cpu" else SHARDS_ROOM)
        at_once = max(1, room // self._batch)
        for first in range(0, len(self), at_once):
            yield slice(first, min(first + at_once, len(self)))

    def _of(self, group: slice) -> State:
        return {name: value[group] for name, value in self._states.items()}

    def _draw(self) -> npt.NDArray[np.intp]:
        """Choose ``batch`` records for each shard; -1 where it has none.

        The numbers that shuffle shard s come from places r * shards + s of the stream, whatever
        the sizes of the others, so a record that comes or goes moves no other shard's draw.
        """
        sizes = np.array([len(own) for own in self._members])
        widest, turn = max(1, int(sizes.max())), self._trained
        self._trained += 1
        stream = self._gate._secret.stream(self._gate.grant.id, "shard batches", turn)
        shuffle = stream.uniform(widest * len(self)).reshape(widest, len(self)).T
        present = np.arange(widest) < sizes[:, None]
        order = np.argsort(np.where(present, shuffle, 2.0), axis=1, kind="stable")
        ranks = np.arange(self._batch) % np.maximum(sizes, 1)[:, None]
        own = np.full((len(self), widest), -1, dtype=np.intp)
        own[present] = np.concatenate(self._members)
        chosen: npt.NDArray[np.intp] = np.take_along_axis(
            own, np.take_along_axis(order, ranks, axis=1), axis=1
        )
        return chosen

    def _load(self, chosen: npt.NDArray[np.intp]) -> tuple[Tensor, Tensor]:
        """Fetch each shard's records; zeros where there are none."""
        places = np.flatnonzero(chosen.reshape(-1) >= 0)
        some, own = self._gate._load(chosen.reshape(-1)[places])
        here = moved(torch.from_numpy(places), some.device)
        images = some.new_zeros(chosen.size, *some.shape[1:]).index_copy_(0, here, some)
        labels = own.new_zeros(chosen.size).index_copy_(0, here, own)
        return images.reshape(*chosen.shape, *some.shape[1:]), labels.reshape(chosen.shape)
