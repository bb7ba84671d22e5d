"""Checks of the privacy core, as plain functions.

The tests run them on the real code; ``test_mutants.py`` runs the same functions on broken code
and demands that they fail. Each statistical check states its error rates.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import understudy.privacy.clipping as clipping
import understudy.privacy.gate as gate_module
import understudy.privacy.noise as noise_module
from tests.fixtures import gate_for, little, private
from understudy.errors import BadConfiguration, LedgerError, NotPlanned
from understudy.privacy import Ledger, Plan, Query, Secret, Step
from understudy.privacy.accounting import epsilon


def flat(image: Tensor, label: Tensor) -> Tensor:
    """Contribute the record itself."""
    return image.reshape(-1)


def whole(noise: float, bound: float = 1.0, **kwargs: object) -> Query:
    """Ask every record."""
    return Query(name="whole", bound=bound, noise_multiplier=noise, **kwargs)  # type: ignore[arg-type]


def fresh_ledger() -> Ledger:
    """A ledger nobody else uses."""
    return Ledger(Path(tempfile.mkdtemp(dir=os.environ["UNDERSTUDY_STATE_ROOT"])) / "l.jsonl")


def noise_has_its_scale() -> None:
    """20,000 noise values have the planned standard deviation, from both sides.

    The sample deviation of n = 20,000 Gaussians has relative error 1 / sqrt(2 n) = 0.5 %. The
    band of 3 % is 6 of these: a false alarm has probability 2e-9, and a scale wrong by 10 % is
    missed with probability below 1e-40. The Kolmogorov-Smirnov distance is compared with 2.2 /
    sqrt(n), passed by chance with probability 1e-4 on the other side: 2 exp(-2 * 2.2^2) = 1.3e-4.
    """
    data = little(4)
    query = whole(2.5, bound=2.0)
    with gate_for(data, Plan(Step(query, 1)), ledger=fresh_ledger()) as gate:
        answer = gate.noisy_sum(query, lambda image, label: torch.zeros(20_000))
    values = answer.value.double().numpy()
    assert answer.stddev == 5.0
    ratio = values.std() / answer.stddev
    assert 0.97 < ratio < 1.03, f"noise deviates from its scale: {ratio:.3f}"
    ordered = np.sort(values) / 5.0
    normal = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in ordered])
    distance = np.abs(normal - (np.arange(len(ordered)) + 0.5) / len(ordered)).max()
    assert distance < 2.2 / math.sqrt(len(ordered)), f"noise is not Gaussian: {distance:.4f}"


def every_contribution_is_bounded() -> None:
    """Adding one record, however hostile, moves the exact sum by at most the bound."""
    base = np.random.default_rng(0).uniform(-1, 1, (6, 1, 4, 4)).astype(np.float32)
    hostile = [1e30, -1e30, np.nan, np.inf, -np.inf, 3.0e38, 1e-30, 0.0]
    query = whole(0.0, bound=1.5)
    blank = np.zeros((1, 1, 4, 4), dtype=np.float32)

    def total(extra: float | None) -> np.ndarray:
        rows = base if extra is None else np.concatenate([base, blank])
        data = private(rows, np.zeros(len(rows), int), classes=2, counts=(7, 1))
        mark = torch.tensor(0.0 if extra is None else extra)

        def contribution(image: Tensor, label: Tensor) -> Tensor:
            ours = (image == 0).all()
            return torch.where(ours, mark, image * 10).reshape(-1)

        with gate_for(data, Plan(Step(query, 1)), ledger=fresh_ledger()) as gate:
            return gate.noisy_sum(query, contribution).value.double().numpy()

    without = total(None)
    assert np.isfinite(without).all()
    for value in hostile:
        moved = np.linalg.norm(total(value) - without)
        assert moved <= query.bound * (1 + 1e-5), f"a record of {value} moved the sum by {moved}"


def removing_any_record_moves_one_bound() -> None:
    """Brute force over all neighbours, global and per class, on the exact sums."""
    random = np.random.default_rng(1)
    images = random.uniform(-1, 1, (12, 1, 4, 4)).astype(np.float32)
    labels = np.arange(12) % 3
    for per_class in (False, True):
        query = whole(0.0, bound=0.7, per_class=per_class)

        def total(keep: np.ndarray, query: Query = query) -> np.ndarray:
            data = private(images[keep], labels[keep], classes=3, counts=(4, 4, 4))
            with gate_for(data, Plan(Step(query, 1)), ledger=fresh_ledger()) as gate:
                return gate.noisy_sum(query, lambda x, y: 3 * x.reshape(-1)).value.double().numpy()

        full = total(np.arange(12))
        for left_out in range(12):
            moved = np.linalg.norm(full - total(np.delete(np.arange(12), left_out)))
            assert moved <= 0.7 * (1 + 1e-5)


def noise_is_secret() -> None:
    """No seed a user can set repeats the noise, and no two answers share it."""
    data = little(4)
    query = whole(1.0)

    def draw() -> list[Tensor]:
        torch.manual_seed(0)
        np.random.seed(0)
        with gate_for(data, Plan(Step(query, 3)), ledger=fresh_ledger()) as gate:
            return [
                gate.noisy_sum(query, lambda x, y: torch.zeros(64)).value.clone() for _ in range(3)
            ]

    answers = [*draw(), *draw()]
    for i, first in enumerate(answers):
        for second in answers[i + 1 :]:
            assert not torch.equal(first, second), "two answers share their noise"
            assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.75


def inclusion_is_independent() -> None:
    """Poisson inclusion: every record's coin is its own, at the planned rate, per class.

    600 records in two classes of 200 and 400, expected batch 40 each, 150 draws. Batch sizes are
    sums of independent coins, so their variance is sum of q (1 - q); a fixed batch size has none.
    The bands are 6 standard errors wide: false alarms below 1e-8 each.
    """
    images = np.ones((600, 1, 1, 1), dtype=np.float32)
    labels = (np.arange(600) >= 200).astype(int)
    data = private(images, labels)
    query = Query(name="batch", bound=1.0, noise_multiplier=0.0, expected_batch=40, per_class=True)
    with gate_for(data, Plan(Step(query, 150)), ledger=fresh_ledger()) as gate:
        sizes = torch.stack(
            [gate.noisy_sum(query, lambda x, y: torch.ones(())).value for _ in range(150)]
        ).double()
    for label, q in ((0, 0.2), (1, 0.1)):
        variance = 40 * (1 - q)
        error = math.sqrt(variance / 150)
        assert abs(sizes[:, label].mean() - 40) < 6 * error, "records are not included at the rate"
        ratio = sizes[:, label].var() / variance
        assert 0.35 < ratio < 1.7, f"batch sizes do not vary as independent coins do: {ratio:.2f}"


def the_plan_is_enforced() -> None:
    """Neither one query too many nor another query than planned is answered."""
    data = little(8)
    query = whole(1.0)
    with gate_for(data, Plan(Step(query, 2)), ledger=fresh_ledger()) as gate:
        for _ in range(2):
            gate.noisy_sum(query, flat)
        with pytest.raises(NotPlanned):
            gate.noisy_sum(query, flat)
    for other in (whole(0.5), whole(1.0, bound=2.0), whole(1.0, per_class=True)):
        with gate_for(data, Plan(Step(query, 2)), ledger=fresh_ledger()) as gate:
            with pytest.raises(NotPlanned):
                gate.noisy_sum(other, flat)


class Tripwire(np.ndarray):
    """Records that note whether the ledger had the reservation when they were read."""

    ledger: Path
    reads: list[bool]

    def __getitem__(self, key: object) -> object:
        if hasattr(self, "ledger"):
            written = self.ledger.exists() and b'"reserved"' in self.ledger.read_bytes()
            self.reads.append(written)
        return np.asarray(super().__getitem__(key))  # type: ignore[index]


def charge_comes_before_reading() -> None:
    """The reservation is on disk before the first record is touched."""
    data = little(8)
    ledger = fresh_ledger()
    wired = data._records._images.view(Tripwire)
    wired.ledger, wired.reads = ledger.path, []
    data._records._images = wired
    query = whole(1.0)
    with gate_for(data, Plan(Step(query, 1)), ledger=ledger) as gate:
        assert wired.reads == [], "opening the gate read records"
        gate.noisy_sum(query, flat)
    assert wired.reads and all(wired.reads), "records were read before the charge was on disk"


def an_answer_is_drawn_once() -> None:
    """A run that dies and is taken up again repeats the answers it gave, noise and all."""
    data = little(8)
    ledger = fresh_ledger()
    query = whole(3.0)
    first: list[Tensor] = []

    class Died(Exception):
        pass

    with pytest.raises(Died):
        with gate_for(data, Plan(Step(query, 3)), ledger=ledger) as gate:
            first += [gate.noisy_sum(query, flat).value for _ in range(2)]
            raise Died
    with gate_for(data, Plan(Step(query, 3)), ledger=ledger) as gate:
        again = [gate.noisy_sum(query, flat).value for _ in range(3)]
    assert len(ledger.grants()) == 1, "the killed run was paid for twice"
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1]), (
        "an answer was drawn a second time: averaging the two would remove noise for free"
    )


def answers_that_are_gone_are_not_drawn_again() -> None:
    """An unfinished run whose journal is lost is refused, not answered with a second noise."""
    data = little(8)
    ledger = fresh_ledger()
    query = whole(3.0)

    class Died(Exception):
        pass

    with pytest.raises(Died), gate_for(data, Plan(Step(query, 3)), ledger=ledger) as gate:
        gate.noisy_sum(query, flat)
        raise Died
    shutil.rmtree(ledger._runs)
    with pytest.raises(LedgerError, match="answers it was given are gone"):
        with gate_for(data, Plan(Step(query, 3)), ledger=ledger) as gate:
            pytest.fail("the run was taken up, and would draw another noise on the same sum")
    other = {"seed": 1}
    with gate_for(data, Plan(Step(query, 3)), ledger=ledger, recipe=other) as gate:
        gate.noisy_sum(query, flat)
    assert len(ledger.grants()) == 2, "another seed is another run, and paid for"


def noise_has_no_holes() -> None:
    """Lengths that can come out lie closer than the grid, up to ten standard deviations.

    Where they lie further apart, a rounded answer gives away which sums it can be made of. Neighbours are
    compared where the uniform number behind a length changes by its last bit.
    """
    for deviations in (1.0, 4.0, 6.5, 7.0, 8.0, 10.0):
        goal = math.exp(-(deviations**2) / 2)
        high = math.floor(goal * 2.0**53) * 2.0**-53
        low = math.floor((goal - high) * 2.0**106) * 2.0**-53
        here = torch.tensor([[high, low], [high, low + 2.0**-53]], dtype=torch.float64)
        length, next_one = noise_module.radius_of(here[:, 0], here[:, 1]).tolist()
        assert abs(length - deviations) < 1e-6
        assert abs(length - next_one) < 2.0**-28 / 100, f"a hole at {deviations} deviations"
    longest = noise_module.radius_of(torch.zeros(1).double(), torch.zeros(1).double())
    assert 12 < float(longest) < 12.5


def one_record_touches_one_shard() -> None:
    """Perturb, remove or relabel one record: every other shard's state is the same bit for bit.

    Shards see three of their seven or so records at a time and keep a moment beside their weights,
    as teachers do.
    """
    random = np.random.default_rng(2)
    images = random.uniform(-1, 1, (60, 1, 2, 2)).astype(np.float32)
    labels = np.arange(60) % 3

    def start(numbers: Tensor) -> dict[str, Tensor]:
        return {"weights": torch.zeros(len(numbers), 5), "moment": torch.zeros(len(numbers), 5)}

    def step(state: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        slope = torch.cat([x.sum(0).reshape(-1), y.sum()[None]])
        moment = 0.5 * state["moment"] + slope
        return {"weights": state["weights"] * 0.9 + moment, "moment": moment}

    def states(images: np.ndarray, labels: np.ndarray) -> Tensor:
        data = private(images, labels, classes=3, counts=(20, 20, 20))
        query = Query(name="votes", bound=1.0, noise_multiplier=1.0, unit="shard")
        with gate_for(
            data, Plan(Step(query, 1)), secret=Secret.for_testing(7), ledger=fresh_ledger()
        ) as gate:
            gate.grant.__dict__["id"] = "fixed"
            shards = gate.shards(8, start, batch=3)
            shards.train(step, times=3)
            return torch.cat(list(shards._states.values()), dim=1)

    before = states(images, labels)
    for name, at_most, (other_images, other_labels) in (
        ("removed", 1, (np.delete(images, 17, 0), np.delete(labels, 17))),
        ("relabelled", 1, (images, np.where(np.arange(60) == 17, 0, labels))),
        ("changed", 2, (np.where(np.arange(60)[:, None, None, None] == 17, 0.5, images), labels)),
    ):
        after = states(other_images.astype(np.float32), other_labels)
        touched = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert touched <= at_most, f"one {name} record touched {touched} shards"


def a_state_is_what_its_step_returns() -> None:
    """Shards hold what one alone computes from its own; in place or not, the same bit for bit.

    Groups of two shards and a last one of one. States begin with their shard's number, so that
    one which lands with another shard, or nowhere, is seen.
    """
    data = little(40)
    query = Query(name="votes", bound=1.0, noise_multiplier=1.0, unit="shard")

    def start(numbers: Tensor) -> dict[str, Tensor]:
        own = numbers[:, None] + torch.zeros(len(numbers), 3)
        return {"weights": own, "moment": -own, "steps": torch.zeros(len(numbers))}

    def anew(state: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        moment = state["moment"] * 0.5 + x.sum() + y.sum()
        weights = state["weights"] * 0.9 + moment
        return {"weights": weights, "moment": moment, "steps": state["steps"] + 1}

    def in_place(state: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        state["moment"].mul_(0.5).add_(x.sum()).add_(y.sum())
        state["weights"].mul_(0.9).add_(state["moment"])
        state["steps"].add_(1)
        return state

    def by_halves(state: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        after = anew(state, x, y)
        state["moment"].copy_(after["moment"])
        state["weights"].zero_()  # a place to work in: what is returned is another
        return {**after, "moment": state["moment"]}

    def trained(step: Callable[..., dict[str, Tensor]]) -> dict[str, Tensor]:
        with gate_for(
            data, Plan(Step(query, 1)), secret=Secret.for_testing(7), ledger=fresh_ledger(), chunk=6
        ) as gate:
            gate.grant.__dict__["id"] = "fixed"
            shards = gate.shards(5, start, batch=3)
            expected = start(torch.arange(5))
            for _ in range(3):
                images, labels = shards._load(shards._draw())
                shards._trained -= 1
                each = [
                    anew({n: v[which] for n, v in expected.items()}, images[which], labels[which])
                    for which in range(5)
                ]
                expected = {name: torch.stack([one[name] for one in each]) for name in expected}
                shards.train(step)
            for name, value in expected.items():
                torch.testing.assert_close(shards._states[name], value, rtol=1e-5, atol=1e-5)
            return shards._states

    reference = trained(anew)
    for step in (in_place, by_halves):
        for name, value in trained(step).items():
            assert torch.equal(value, reference[name]), f"{step.__name__}: other states '{name}'"


def bare_records_cost_infinity() -> None:
    """Records leave as they are only where the plan says noise 0, which costs infinity."""
    noisy = Query(name="noisy", bound=1.0, noise_multiplier=1.0, expected_batch=4.0)
    bare = Query(name="bare", bound=1.0, noise_multiplier=0.0, expected_batch=4.0)
    data = little(8)
    assert math.isinf(epsilon(Plan(Step(bare, 1)).events(data.public), 1e-5))
    with gate_for(data, Plan(Step(noisy, 1)), ledger=fresh_ledger()) as gate:
        with pytest.raises(BadConfiguration, match="never leave"):
            gate.bare_batch(noisy)
    with gate_for(data, Plan(Step(bare, 1)), ledger=fresh_ledger()) as gate:
        images, labels = gate.bare_batch(bare)
        assert len(images) == len(labels)
        with pytest.raises(NotPlanned):
            gate.bare_batch(bare)


def a_checkpoint_stands_for_its_answers() -> None:
    """A run killed after a checkpoint asks the rest of its plan, and not one answer more."""

    class Died(BaseException):
        pass

    data, query, ledger = little(8), whole(1.0), fresh_ledger()
    plan = Plan(Step(query, 5))
    with pytest.raises(Died):
        with gate_for(data, plan, ledger=ledger) as gate:
            assert gate.resume() is None
            total = sum(gate.noisy_sum(query, flat).value for _ in range(3))
            gate.checkpoint({"total": total})
            fourth = gate.noisy_sum(query, flat).value
            raise Died
    with gate_for(data, plan, ledger=ledger) as gate:
        with pytest.raises(NotPlanned, match="resume"):
            gate.noisy_sum(query, flat)
        state = gate.resume()
        assert state is not None and torch.equal(state["total"], total)
        assert torch.equal(gate.noisy_sum(query, flat).value, fourth)
        gate.noisy_sum(query, flat)
        with pytest.raises(NotPlanned):
            gate.noisy_sum(query, flat)
    assert len(ledger.grants()) == 1


def a_shard_costs_double() -> None:
    """Adding a record exchanges its shard's vote, which moves the sum by twice the bound."""
    plan = Plan(Step(Query(name="v", bound=1.0, noise_multiplier=8.0, unit="shard"), 10))
    record = Plan(Step(Query(name="v", bound=1.0, noise_multiplier=4.0), 10))
    public = little(8).public
    assert epsilon(plan.events(public), 1e-5) == pytest.approx(epsilon(record.events(public), 1e-5))


def the_smallest_class_sets_the_price() -> None:
    """With classes of different sizes the one sampled most often is priced."""
    images = np.zeros((1000, 1, 2, 2), dtype=np.float32)
    labels = (np.arange(1000) >= 100).astype(int)
    public = private(images, labels).public
    query = Query(name="g", bound=1.0, noise_multiplier=1.0, expected_batch=10, per_class=True)
    (event,) = Plan(Step(query, 50)).events(public)
    assert event.sampling_rate == pytest.approx(10 / 100)


def the_sum_is_exact() -> None:
    """The sum before noise is the same bit for bit in any order and any chunk size.

    Float sums are not associative, which by itself breaks sensitivity proofs (Casacuberta et al.
    2022); on the grid they are exact integers.
    """
    random = np.random.default_rng(3)
    images = random.normal(size=(500, 1, 4, 4)) * 10.0 ** random.integers(-6, 1, (500, 1, 1, 1))
    images = np.clip(images, -1, 1).astype(np.float32)
    query = whole(1.0)

    def total(order: np.ndarray, chunk: int) -> Tensor:
        data = private(images[order], np.zeros(500, int), classes=2, counts=(500, 1))
        with gate_for(
            data,
            Plan(Step(query, 1)),
            secret=Secret.for_testing(1),
            chunk=chunk,
            ledger=fresh_ledger(),
        ) as gate:
            gate.grant.__dict__["id"] = "fixed"
            sums, _, _ = gate._clipped_sum(query, flat, np.arange(500))
            return sums

    reference = total(np.arange(500), 500)
    for chunk in (1, 7, 64):
        assert torch.equal(reference, total(random.permutation(500), chunk))


def a_row_is_the_same_whoever_else_is_there() -> None:
    """One record more moves the exact sum by its own row, to the last bit, whatever its place.

    Libraries choose the order of their additions by the size of a batch. Were the last chunk as
    small as what is left over, everybody in it would have other last bits.
    """
    random = np.random.default_rng(5)
    images = random.uniform(-1, 1, (40, 1, 4, 4)).astype(np.float32)
    data = private(images, np.zeros(40, int), classes=2, counts=(40, 1))
    query = whole(1.0, bound=100.0)
    dense = torch.from_numpy(random.normal(size=(64, 16)).astype(np.float32))
    filters = torch.from_numpy(random.normal(size=(8, 1, 3, 3)).astype(np.float32))

    def contribution(image: Tensor, label: Tensor) -> Tensor:
        return torch.cat([dense @ image.flatten(), torch.conv2d(image, filters).flatten()])

    with gate_for(data, Plan(Step(query, 1)), chunk=16, ledger=fresh_ledger()) as gate:

        def total(chosen: np.ndarray) -> Tensor:
            return gate._clipped_sum(query, contribution, chosen)[0]

        for present in range(1, 40):
            before, after = total(np.arange(present)), total(np.arange(present + 1))
            assert torch.equal(after - before, total(np.array([present]))), present


def a_kernel_adds_what_is_clipped() -> None:
    """What the GPU's kernel adds of a row is its clipped row: no longer, and nothing of a bad one."""
    if clipping.triton is None:
        pytest.skip("needs Triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random, bound, step = torch.Generator().manual_seed(7), 0.7, 2.0**-40
    for count, width in ((1, 1), (5, 300), (37, clipping.PIECE + 77)):
        rows = torch.randn(count, width, generator=random)
        rows *= 10.0 ** torch.randint(-4, 5, (count, 1), generator=random)
        real = torch.ones(count, dtype=torch.float64)
        if count > 4:
            rows[0, -1], rows[1, 0], rows[2], real[4] = torch.nan, torch.inf, 3e38, 0.0
        rows, real = rows.to(device), real.to(device)

        def added(*which: int, rows: Tensor = rows, real: Tensor = real) -> Tensor:
            total = torch.zeros(rows.shape[1], dtype=torch.float64, device=device)
            some = list(which)
            clipping.add_in_one_pass(total, rows[some].contiguous(), bound, step, real[some])
            return total

        each = [added(place) for place in range(count)]
        clipped = clipping.clip(rows, bound, step) * real[:, None]
        for place in range(count):
            assert (each[place] * step).norm() <= bound, place
            assert (each[place] - clipped[place]).abs().max() <= 1, place
        assert torch.equal(added(*range(count)), torch.stack(each).sum(dim=0))


def records_on_a_device_are_those_chosen() -> None:
    """As many records as there are, in another order or repeated, are not all of them in turn."""
    data = little(12)
    with gate_for(data, Plan(Step(whole(1.0), 1)), ledger=fresh_ledger()) as gate:
        images = torch.from_numpy(data._records._images)
        vars(gate)["_on_device"] = images, torch.from_numpy(data._records._labels)
        random = np.random.default_rng(6)
        for chosen in (np.arange(12), random.permutation(12), random.integers(0, 12, 12)):
            assert torch.equal(gate._raw(chosen)[0], images[chosen]), chosen


def a_recorded_sum_counts_each_record_once() -> None:
    """What a GPU replays is the sum a CPU takes, bit for bit: nobody's rows, nor anybody's twice.

    Batches of all sizes follow each other, so that rows of an earlier one are still there.
    """
    random = np.random.default_rng(4)
    images = random.uniform(-1, 1, (150, 1, 2, 2)).astype(np.float32)
    images[7], images[11] = np.nan, 1e30
    data = private(images, np.arange(150) % 3, counts=(50, 50, 50))
    query = Query(name="r", bound=1.5, noise_multiplier=1.0, per_class=True)

    def scaled(state: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return image.reshape(-1) * state["scale"] + state["shift"]

    batches = [np.sort(random.permutation(150)[:size]) for size in (150, 40, 0, 64, 65, 1)]

    def totals() -> list[Tensor]:
        with gate_for(data, Plan(Step(query, 1)), chunk=64, ledger=fresh_ledger()) as gate:
            return [
                gate._clipped_sum(
                    query,
                    scaled,
                    batch,
                    {"scale": torch.tensor(1.0 + place), "shift": torch.full((4,), 0.1 * place)},
                )[0]
                for place, batch in enumerate(batches)
            ]

    expected = totals()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate_module, "recordable", lambda device: True)
        for sums, one in zip(totals(), expected, strict=True):
            assert torch.equal(sums, one)


def what_is_seen_is_journalled() -> None:
    """Answers asked for together: a kill forgets those nobody saw, and repeats the others."""
    plan, ledger = Plan(Step(whole(1.0), 6)), fresh_ledger()
    seen: list[Tensor] = []

    def scaled(state: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return image.reshape(-1) * state["scale"]

    def state() -> dict[str, Tensor]:
        return {"scale": torch.ones(())}

    def killed() -> dict[str, Tensor]:
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt), gate_for(little(4), plan, ledger=ledger) as gate:
        seen.append(gate.noisy_sum(whole(1.0), scaled, state()).value)
        seen.extend(gate.noisy_sums(whole(1.0), scaled, [state, state]).value)
        gate.noisy_sums(whole(1.0), scaled, [state, state, killed])
    with gate_for(little(4), plan, ledger=ledger) as gate:
        again = gate.noisy_sums(whole(1.0), scaled, [state] * 6).value
        assert torch.equal(again[:3], torch.stack(seen)), "an answer that was seen is drawn anew"
        assert len({tuple(row.flatten().tolist()) for row in again}) == 6
    assert len(ledger.grants()) == 1


ALL = (
    noise_has_its_scale,
    every_contribution_is_bounded,
    removing_any_record_moves_one_bound,
    a_kernel_adds_what_is_clipped,
    noise_is_secret,
    inclusion_is_independent,
    the_plan_is_enforced,
    charge_comes_before_reading,
    an_answer_is_drawn_once,
    answers_that_are_gone_are_not_drawn_again,
    noise_has_no_holes,
    one_record_touches_one_shard,
    a_state_is_what_its_step_returns,
    a_shard_costs_double,
    bare_records_cost_infinity,
    a_checkpoint_stands_for_its_answers,
    the_smallest_class_sets_the_price,
    the_sum_is_exact,
    a_row_is_the_same_whoever_else_is_there,
    records_on_a_device_are_those_chosen,
    a_recorded_sum_counts_each_record_once,
    what_is_seen_is_journalled,
)
