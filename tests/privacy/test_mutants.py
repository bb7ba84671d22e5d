"""Break the privacy core on purpose: the checks must notice.

Each mutant is a plausible mistake (several were made in published code). A check that passes on
the real code and fails on its mutant is worth something; one that passes on both is decoration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.privacy import checks
from understudy.privacy import clipping, events, gate, ledger, noise

Break = Callable[[pytest.MonkeyPatch], None]


def noise_halved(patch: pytest.MonkeyPatch) -> None:
    real = gate.grid_noise
    patch.setattr(gate, "grid_noise", lambda s, n, stddev, *on: real(s, n, stddev / 2, *on))


def noise_too_large(patch: pytest.MonkeyPatch) -> None:
    real = gate.grid_noise
    patch.setattr(gate, "grid_noise", lambda s, n, stddev, *on: real(s, n, stddev * 1.1, *on))


def noise_a_tenth_short(patch: pytest.MonkeyPatch) -> None:
    real = gate.grid_noise
    patch.setattr(gate, "grid_noise", lambda s, n, stddev, *on: real(s, n, stddev * 0.9, *on))


def noise_without_the_bound(patch: pytest.MonkeyPatch) -> None:
    """DPDC's code: sigma without the factor G."""
    patch.setattr(events.Query, "stddev", property(lambda self: self.noise_multiplier))


def clip_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        clipping,
        "clip",
        lambda rows, bound, step: torch.trunc(torch.nan_to_num(rows.double()) / step),
    )


def hostile_rows_kept(patch: pytest.MonkeyPatch) -> None:
    def clip(rows: torch.Tensor, bound: float, step: float) -> torch.Tensor:
        rows = rows.double()
        return torch.trunc(rows * (bound / rows.norm(dim=1, keepdim=True)).clamp(max=1) / step)

    patch.setattr(clipping, "clip", clip)


def lengths_never_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(clipping, "factors", lambda norms, bound, step: torch.ones_like(norms).div_(step))


def rows_scaled_up_to_the_bound(patch: pytest.MonkeyPatch) -> None:
    """Short rows made as long as the bound, and rows of no length as long as they like."""
    patch.setattr(clipping, "factors", lambda norms, bound, step: bound / norms / step)


def a_piece_measured_for_the_row(patch: pytest.MonkeyPatch) -> None:
    real = clipping.factors

    def factors(norms: torch.Tensor, bound: float, step: float) -> torch.Tensor:
        return real(norms / 2, bound, step)

    patch.setattr(clipping, "factors", factors)


def blank_rows_added(patch: pytest.MonkeyPatch) -> None:
    real = clipping.add_in_one_pass
    patch.setattr(clipping, "add_in_one_pass", lambda *given: real(*given[:4]))


def noise_from_a_public_seed(patch: pytest.MonkeyPatch) -> None:
    """DPDC's and Dosser's code: noise from the generator the augmentation reseeds."""

    def draw(stream: object, count: int, stddev: float, *on: object) -> torch.Tensor:
        torch.manual_seed(1234)
        return torch.randn(count, dtype=torch.float64) * stddev

    patch.setattr(gate, "grid_noise", draw)


def noise_shared_by_queries(patch: pytest.MonkeyPatch) -> None:
    real = noise.Secret.stream
    patch.setattr(noise.Secret, "stream", lambda self, *place: real(self, place[-1]))


def noise_redrawn_on_reuse(patch: pytest.MonkeyPatch) -> None:
    """Dosser's code: the stored sum is noised again at every use."""
    patch.setattr(ledger.Journal, "read", lambda self, turn: None)


def journal_made_anew(patch: pytest.MonkeyPatch) -> None:
    """A run whose answers were deleted is taken up all the same."""
    patch.setattr(ledger.Ledger, "_taken_up", ledger.Ledger._take_run)


def radii_of_53_bits(patch: pytest.MonkeyPatch) -> None:
    """The textbook's: one uniform number of 53 bits for a length."""
    patch.setattr(noise, "radius_of", lambda high, low: torch.log(high + 2.0**-53).mul(-2).sqrt())


def chunks_as_small_as_what_is_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gate, "_filled", lambda rows, room: rows)


def all_records_for_as_many(patch: pytest.MonkeyPatch) -> None:
    """As many as there are is taken for all of them: teachers met each other's records."""
    patch.setattr(gate, "in_turn", lambda chosen, count: len(chosen) == count)


def one_query_too_many(patch: pytest.MonkeyPatch) -> None:
    """PSG's code: one run more than was paid for."""
    real = gate.Gate._take

    def take(self: gate.Gate, query: events.Query) -> int:
        if self._left.get(query) == 0:
            self._left[query] = 1
        return real(self, query)

    patch.setattr(gate.Gate, "_take", take)


def another_query_than_planned(patch: pytest.MonkeyPatch) -> None:
    real = gate.Gate._take

    def take(self: gate.Gate, query: events.Query) -> int:
        self._left.setdefault(query, 1)
        return real(self, query)

    patch.setattr(gate.Gate, "_take", take)


def fixed_batches(patch: pytest.MonkeyPatch) -> None:
    """Shuffled batches priced as Poisson samples (DP-KIP and many others)."""

    def include(self: gate.Gate, query: events.Query, turn: int) -> np.ndarray:
        labels = self._records._labels
        if query.expected_batch is None:
            return np.arange(len(labels))
        chosen = [
            np.random.default_rng().permutation(np.flatnonzero(labels == c))[
                : int(query.expected_batch)
            ]
            for c in range(len(self.public.classes))
        ]
        return np.sort(np.concatenate(chosen))

    patch.setattr(gate.Gate, "_include", include)


def read_before_charge(patch: pytest.MonkeyPatch) -> None:
    """A ledger that is kept in memory and written when the run has ended."""

    def append(self: ledger.Ledger, entries: Any, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "seq": len(entries), "hash": "x" * 64, "time": "", "previous": ""}

    patch.setattr(ledger.Ledger, "_append", append)


def equal_split_of_shards(patch: pytest.MonkeyPatch) -> None:
    """DataLens' code: records dealt by rank, so one record moves everybody else."""

    def shards(self: gate.Gate, count: int, start: Any, *, batch: int) -> gate.Shards:
        members = np.array_split(np.arange(len(self._records._labels)), count)
        return gate.Shards(self, list(members), start, batch)

    patch.setattr(gate.Gate, "shards", shards)


def round_robin_by_class(patch: pytest.MonkeyPatch) -> None:
    def shards(self: gate.Gate, count: int, start: Any, *, batch: int) -> gate.Shards:
        order = np.argsort(self._records._labels, kind="stable")
        return gate.Shards(self, [order[i::count] for i in range(count)], start, batch)

    patch.setattr(gate.Gate, "shards", shards)


def shards_shuffled_by_one_stream(patch: pytest.MonkeyPatch) -> None:
    """Draws come one shard after the other, so a shard's size moves the draws of the next."""

    def draw(self: gate.Shards) -> np.ndarray:
        stream = self._gate._secret.stream("all shards", self._trained)
        self._trained += 1
        rows = []
        for own in self._members:
            order = own[np.argsort(stream.uniform(len(own)))] if len(own) else np.array([-1])
            rows.append(np.resize(order, self._batch))
        return np.stack(rows)

    patch.setattr(gate.Shards, "_draw", draw)


def shards_share_moments(patch: pytest.MonkeyPatch) -> None:
    """DataLens' code: teachers in one slot share their optimiser's state (fault U3)."""
    real = gate.Shards.train

    def train(self: gate.Shards, step: Any, times: int = 1) -> None:
        for _ in range(times):
            real(self, step)
            self._states["moment"][:] = self._states["moment"].mean(0)

    patch.setattr(gate.Shards, "train", train)


def steps_taken_to_be_in_place(patch: pytest.MonkeyPatch) -> None:
    """What a step returns is not looked at, as if every step left it in the stack."""

    def train(self: gate.Shards, step: Any, times: int = 1) -> None:
        for _ in range(times):
            chosen = self._draw()
            for group in self._groups():
                torch.func.vmap(step)(self._of(group), *self._load(chosen[group]))

    patch.setattr(gate.Shards, "train", train)


def states_put_back_at_the_front(patch: pytest.MonkeyPatch) -> None:
    """Every group's states are put where the first group's lie."""

    def train(self: gate.Shards, step: Any, times: int = 1) -> None:
        for _ in range(times):
            chosen = self._draw()
            for group in self._groups():
                changed = torch.func.vmap(step)(self._of(group), *self._load(chosen[group]))
                for name, value in self._states.items():
                    value[: len(changed[name])] = changed[name].detach()

    patch.setattr(gate.Shards, "train", train)


def bare_batches_at_any_price(patch: pytest.MonkeyPatch) -> None:
    def bare_batch(self: gate.Gate, query: events.Query) -> Any:
        return self._load(self._include(query, self._take(query)))

    patch.setattr(gate.Gate, "bare_batch", bare_batch)


def checkpoint_without_the_count(patch: pytest.MonkeyPatch) -> None:
    """The state is taken up, and the whole plan may be asked again."""

    def resume(self: gate.Gate) -> Any:
        kept, self._kept = self._kept, None
        return None if kept is None else dict(kept.state)

    patch.setattr(gate.Gate, "resume", resume)


def checkpoint_passed_over(patch: pytest.MonkeyPatch) -> None:
    """A run that never looks at its checkpoint draws forgotten answers a second time."""
    patch.setattr(ledger.Journal, "kept", lambda self: None)


def shards_priced_as_records(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(events.Event, "sensitivity", property(lambda self: 1.0))


def the_largest_class_sets_the_price(patch: pytest.MonkeyPatch) -> None:
    real = events.Query.rates
    patch.setattr(events.Query, "rates", lambda self, public: (min(real(self, public)),) * 2)


def floats_summed_without_a_grid(patch: pytest.MonkeyPatch) -> None:
    def clip(rows: torch.Tensor, bound: float, step: float) -> torch.Tensor:
        rows = rows.double()
        return rows * (bound / rows.norm(dim=1, keepdim=True)).clamp(max=1) / step

    patch.setattr(clipping, "clip", clip)


def rows_of_an_earlier_batch(patch: pytest.MonkeyPatch) -> None:
    """A recorded chunk that does not fill its memory adds what was left there."""
    real = gate._Recorded.add

    def add(self: gate._Recorded, images: torch.Tensor, labels: torch.Tensor) -> None:
        go = self._go
        self._go = lambda: (self.real.fill_(1.0), go())  # type: ignore[assignment, return-value]
        real(self, images, labels)
        self._go = go

    patch.setattr(gate._Recorded, "add", add)


def an_earlier_total_kept(patch: pytest.MonkeyPatch) -> None:
    real = gate._Recorded.begin

    def begin(self: gate._Recorded, state: Any) -> None:
        before = self.total.clone()
        real(self, state)
        self.total.copy_(before)

    patch.setattr(gate._Recorded, "begin", begin)


def answers_seen_before_the_journal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gate.Gate, "_keep", lambda self, query: self._unseen.clear())


MUTANTS: tuple[tuple[Break, Callable[[], None]], ...] = (
    (noise_halved, checks.noise_has_its_scale),
    (noise_too_large, checks.noise_has_its_scale),
    (noise_a_tenth_short, checks.noise_has_its_scale),
    (noise_without_the_bound, checks.noise_has_its_scale),
    (clip_left_out, checks.every_contribution_is_bounded),
    (clip_left_out, checks.removing_any_record_moves_one_bound),
    (hostile_rows_kept, checks.every_contribution_is_bounded),
    (lengths_never_looked_at, checks.a_kernel_adds_what_is_clipped),
    (rows_scaled_up_to_the_bound, checks.a_kernel_adds_what_is_clipped),
    (a_piece_measured_for_the_row, checks.a_kernel_adds_what_is_clipped),
    (blank_rows_added, checks.a_kernel_adds_what_is_clipped),
    (noise_from_a_public_seed, checks.noise_is_secret),
    (noise_shared_by_queries, checks.noise_is_secret),
    (noise_redrawn_on_reuse, checks.an_answer_is_drawn_once),
    (journal_made_anew, checks.answers_that_are_gone_are_not_drawn_again),
    (radii_of_53_bits, checks.noise_has_no_holes),
    (chunks_as_small_as_what_is_left, checks.a_row_is_the_same_whoever_else_is_there),
    (all_records_for_as_many, checks.records_on_a_device_are_those_chosen),
    (one_query_too_many, checks.the_plan_is_enforced),
    (another_query_than_planned, checks.the_plan_is_enforced),
    (fixed_batches, checks.inclusion_is_independent),
    (read_before_charge, checks.charge_comes_before_reading),
    (equal_split_of_shards, checks.one_record_touches_one_shard),
    (round_robin_by_class, checks.one_record_touches_one_shard),
    (shards_shuffled_by_one_stream, checks.one_record_touches_one_shard),
    (shards_share_moments, checks.one_record_touches_one_shard),
    (steps_taken_to_be_in_place, checks.a_state_is_what_its_step_returns),
    (states_put_back_at_the_front, checks.a_state_is_what_its_step_returns),
    (bare_batches_at_any_price, checks.bare_records_cost_infinity),
    (checkpoint_without_the_count, checks.a_checkpoint_stands_for_its_answers),
    (checkpoint_passed_over, checks.a_checkpoint_stands_for_its_answers),
    (shards_priced_as_records, checks.a_shard_costs_double),
    (the_largest_class_sets_the_price, checks.the_smallest_class_sets_the_price),
    (floats_summed_without_a_grid, checks.the_sum_is_exact),
    (rows_of_an_earlier_batch, checks.a_recorded_sum_counts_each_record_once),
    (an_earlier_total_kept, checks.a_recorded_sum_counts_each_record_once),
    (answers_seen_before_the_journal, checks.what_is_seen_is_journalled),
)


@pytest.mark.parametrize("check", checks.ALL, ids=lambda check: check.__name__)
def test_the_real_code_passes(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(
    ("mutant", "check"), MUTANTS, ids=[f"{m.__name__}-{c.__name__}" for m, c in MUTANTS]
)
def test_the_mutant_is_caught(
    mutant: Break, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check()


def test_every_check_has_a_mutant() -> None:
    assert {check for _, check in MUTANTS} == set(checks.ALL)
