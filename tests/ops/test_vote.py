from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import vmap

from understudy.errors import BadConfiguration
from understudy.ops.vote import D2PFed, FetchSGD, NormTopK, TopAgg, Vote, _public_signs, _rotated
from understudy.privacy import Accountant
from understudy.privacy.accounting import epsilon
from understudy.privacy.events import Event

DIMENSION = 24

VOTES: dict[str, Vote] = {
    "topagg": TopAgg(top_k=6),
    "without top-k": TopAgg(top_k=None),
    "plain signs": TopAgg(top_k=6, signs="plain"),
    "values": TopAgg(top_k=6, signs="none"),
    "values, shortened": TopAgg(top_k=6, signs="none", norm=1.5, clip=None, threshold=0.5),
    "without clip": TopAgg(top_k=6, clip=None),
    "d2p-fed": D2PFed(),
    "d2p-fed, two levels": D2PFed(levels=2, clip=None),
    "fetch-sgd": FetchSGD(dimension=DIMENSION, top_k=6, rows=3, columns=64),
    "by norm": NormTopK(clip_norm=0.7, keep_norm=0.6),
    "by dimension": NormTopK(clip_norm=0.7, keep_dimensions=0.3),
    "by both": NormTopK(clip_norm=0.7, keep_norm=0.6, keep_dimensions=0.3),
}
EVERY = pytest.mark.parametrize("vote", VOTES.values(), ids=VOTES)


def gradients(count: int, *, seed: int = 1, scale: float = 1e-5) -> Tensor:
    """Spread sizes over several powers of ten on both sides of the clip."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (2 * torch.rand(count, DIMENSION, generator=generator) - 1)
    return torch.randn(count, DIMENSION, generator=generator) * sizes * scale


def coins(vote: Vote, count: int, *, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, vote.coins(DIMENSION), generator=generator)


def hostile() -> Tensor:
    rows = [
        torch.zeros(DIMENSION),
        torch.ones(DIMENSION),
        -torch.ones(DIMENSION) * 1e-5,
        torch.full((DIMENSION,), 1e30),
        torch.full((DIMENSION,), 1e-30),
        torch.full((DIMENSION,), 1e-44),  # subnormal
        torch.full((DIMENSION,), 3.4e38),
        torch.eye(DIMENSION)[3] * -1e30,
        torch.cat([torch.full((12,), 1e30), torch.full((12,), 1e-30)]),
        torch.linspace(-1, 1, DIMENSION),
        torch.tensor([2.0, -2.0] * 12),  # ties everywhere
        torch.cat([torch.ones(5), torch.zeros(19)]),  # fewer than k
    ]
    return torch.stack(rows)


# What every vote keeps to


@EVERY
@pytest.mark.parametrize("worst", ["drawn", "all heads", "all tails"])
def test_no_ballot_is_longer_than_the_bound(vote: Vote, worst: str) -> None:
    """NormTopK with everything kept is the exception: the gate does its clipping."""
    rows = torch.cat([hostile(), gradients(200), gradients(50, scale=1e4)])
    heads = coins(vote, len(rows))
    if worst != "drawn":
        heads = torch.full_like(heads, 0.0 if worst == "all heads" else 1 - 2**-24)
    ballots = vmap(vote.cast)(rows, heads).double()
    assert ballots.shape == (len(rows), vote.width(DIMENSION))
    assert ballots.isfinite().all()
    assert float(ballots.norm(dim=1).max()) <= vote.bound(DIMENSION) * (1 + 1e-6)


@EVERY
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_within_the_bound_or_is_left_to_the_gate(
    vote: Vote, poison: float
) -> None:
    row = gradients(1)[0]
    row[5] = poison
    ballot = vote.cast(row, coins(vote, 1)[0]).double()
    assert not ballot.isfinite().all() or float(ballot.norm()) <= vote.bound(DIMENSION) * (1 + 1e-6)
    if math.isnan(poison):
        assert ballot.isnan().any() or not ballot.any()


@EVERY
def test_a_batch_of_voters_is_a_loop_over_them(vote: Vote) -> None:
    rows = torch.cat([gradients(30), hostile()])
    heads = coins(vote, len(rows))
    together = vmap(vote.cast)(rows, heads)
    for ballot, row, own in zip(together, rows, heads, strict=True):
        torch.testing.assert_close(ballot, vote.cast(row, own), rtol=1e-5, atol=1e-7)
    nested = vmap(vmap(vote.cast))(rows.view(2, -1, DIMENSION), heads.view(2, len(rows) // 2, -1))
    torch.testing.assert_close(nested.flatten(0, 1), together, rtol=1e-5, atol=1e-7)


@EVERY
def test_randomness_is_the_coins_alone(vote: Vote) -> None:
    rows, heads, before = gradients(5, scale=2e-6), coins(vote, 5), torch.get_rng_state()
    first = vmap(vote.cast, randomness="error")(rows, heads)
    assert torch.equal(first, vmap(vote.cast, randomness="error")(rows, heads))
    assert torch.equal(before, torch.get_rng_state())
    if vote.coins(DIMENSION):
        assert not torch.equal(first, vmap(vote.cast)(rows, coins(vote, 5, seed=9)))


@EVERY
def test_many_agreeing_voters_are_read_as_what_they_agree_on(vote: Vote) -> None:
    """No noise, one gradient with six large entries: the direction finds their signs."""
    gradient = torch.full((DIMENSION,), 1e-9)
    large = torch.tensor([1, 4, 9, 10, 17, 23])
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0])
    gradient[large] = 1e-3 * signs
    count = 6000
    total = vmap(vote.cast)(gradient.expand(count, -1), coins(vote, count)).sum(0)
    direction = vote.read(total, float(count))
    assert direction.shape == (DIMENSION,)
    kept = 1 if vote in (VOTES["by norm"], VOTES["by both"]) else 6  # 60 % of equal squares: 3 of 6
    found = direction[large]
    assert int((found.sign() == signs).sum()) >= min(kept, 3)
    assert not (found.sign() == -signs).any()
    rest = direction.clone()
    rest[large] = 0.0
    assert rest.abs().max() < 0.5 * direction.abs().max()
    pair = vote.read(torch.stack([total, -total]), float(count))
    torch.testing.assert_close(pair, torch.stack([direction, -direction]))


# TopAgg


def plain_topagg(
    gradient: np.ndarray, heads: np.ndarray, k: int, clip: float | None, signs: str
) -> np.ndarray:
    """Algorithm 2 line by line, in numpy; coins belong to ranks."""
    ranks = sorted(range(len(gradient)), key=lambda j: -abs(gradient[j]))[:k]
    clipped = gradient if clip is None else np.minimum(np.maximum(gradient, -clip), clip)
    normalised = clipped / np.abs(clipped).max()
    ballot = np.zeros(len(gradient))
    for coin, j in itertools.zip_longest(heads, ranks, fillvalue=0.0):
        if signs == "stochastic":
            ballot[j] = 1.0 if coin < 0.5 + normalised[j] / 2 else -1.0
        else:
            ballot[j] = np.sign(normalised[j]) if signs == "plain" else normalised[j]
    return ballot


@pytest.mark.parametrize("k", [1, 6, 24])
@pytest.mark.parametrize("clip", [1e-5, None])
@pytest.mark.parametrize("signs", ["stochastic", "plain", "none"])
def test_ballots_are_algorithm_two(k: int, clip: float | None, signs: Any) -> None:
    vote = TopAgg(top_k=k, clip=clip, signs=signs)
    rows = gradients(40).double()
    heads = coins(vote, 40).double()
    ballots = vmap(vote.cast)(rows, heads)
    for ballot, row, own in zip(ballots.numpy(), rows.numpy(), heads.numpy(), strict=True):
        np.testing.assert_allclose(ballot, plain_topagg(row, own, k, clip, signs), rtol=1e-12)


def test_a_stochastic_sign_is_right_on_average() -> None:
    vote, count = TopAgg(top_k=None), 40_000
    gradient = torch.linspace(-2e-5, 2e-5, DIMENSION)
    mean = vmap(vote.cast)(gradient.expand(count, -1), coins(vote, count)).mean(0)
    expected = gradient.clamp(-1e-5, 1e-5) / 1e-5
    assert float((mean - expected).abs().max()) < 5 / math.sqrt(count)


def test_a_voter_uses_exactly_k_votes_also_where_entries_tie() -> None:
    vote = TopAgg(top_k=6)
    ballots = vmap(vote.cast)(hostile(), coins(vote, len(hostile())))
    assert (ballots.abs().sum(1) == 6).all()
    assert ((ballots == 0) | (ballots.abs() == 1)).all()


def test_a_gradient_of_zeros_tosses_fair_coins() -> None:
    vote = TopAgg(top_k=6)
    ballots = vmap(vote.cast)(torch.zeros(4000, DIMENSION), coins(vote, 4000))
    assert abs(float(ballots.sum())) < 5 * math.sqrt(6 * 4000)
    plain = TopAgg(top_k=6, signs="plain")
    assert not plain.cast(torch.zeros(DIMENSION), torch.empty(0)).any()


@pytest.mark.parametrize(("dimension", "k"), [(4, 1), (4, 2), (3, 3)])
def test_exchanging_a_voter_moves_the_sum_by_two_sqrt_k_and_no_more(dimension: int, k: int) -> None:
    """Lemma 1 by brute force: every pair of ballots two voters can cast, by whatever coins."""
    vote = TopAgg(top_k=k, clip=None)
    corners = itertools.product([-1.0, -0.5, 0.0, 0.5, 1.0], repeat=dimension)
    tosses = torch.tensor(list(itertools.product([0.0, 1 - 2**-24], repeat=k)))
    rows = torch.tensor(list(corners))
    ballots = vmap(lambda row: vmap(lambda own: vote.cast(row, own))(tosses))(rows).flatten(0, 1)
    distinct = ballots.unique(dim=0)
    assert len(distinct) == math.comb(dimension, k) * 2**k
    farthest = float(torch.cdist(distinct.double(), distinct.double()).max())
    assert farthest == pytest.approx(2 * math.sqrt(k))
    shard = Event(
        name="votes", times=1, noise_multiplier=1.0, bound=vote.bound(dimension),
        sampling_rate=None, per_class=False, unit="shard",
    )  # fmt: skip
    assert shard.sensitivity * shard.bound == pytest.approx(farthest)


def test_the_price_is_theorem_threes() -> None:
    """1,300 images at k 200 and sigma 5000 cost epsilon 1 by the paper's accounting."""
    vote = TopAgg(top_k=200)
    noise_multiplier = 5000 / vote.bound(784)
    event = Event(
        name="votes", times=1300, noise_multiplier=noise_multiplier, bound=vote.bound(784),
        sampling_rate=None, per_class=False, unit="shard",
    )  # fmt: skip
    orders = np.arange(2, 200)
    theorem = 1300 * 2 * 200 * orders / 5000**2 + math.log(1e5) / (orders - 1)
    ours = epsilon([event], 1e-5, accountant=Accountant.RDP_CLASSIC)
    assert ours == pytest.approx(theorem.min(), rel=1e-3)
    assert ours == pytest.approx(1.0, abs=0.001)


def test_bounds_of_the_ablations() -> None:
    assert TopAgg(top_k=200).bound(784) == math.sqrt(200)
    assert TopAgg(top_k=200).bound(64) == 8.0  # never more votes than coordinates
    assert TopAgg(top_k=None).bound(784) == 28.0
    assert TopAgg(top_k=200, signs="none").bound(784) == math.sqrt(200)
    assert TopAgg(top_k=200, signs="none", norm=3.0).bound(784) == 3.0
    assert TopAgg(top_k=4, signs="none", norm=3.0).bound(784) == 2.0
    assert [TopAgg(top_k=6, signs=s).coins(24) for s in ("stochastic", "plain", "none")] == [
        6, 0, 0,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (0.7, [1.0, 1.0, 0.0, 0.0, 0.0, -1.0, -1.0]),
        (0.0, [1.0, 1.0, 1.0, 0.0, -1.0, -1.0, -1.0]),
        (None, [1.0, 0.75, 0.5, 0.0, -0.5, -0.75, -1.0]),
    ],
)
def test_reading_a_total_made_by_hand(threshold: float | None, expected: list[float]) -> None:
    total = torch.tensor([40.0, 30.0, 20.0, 0.0, -20.0, -30.0, -40.0])
    assert TopAgg(threshold=threshold).read(total, 40.0).tolist() == expected


# D2P-Fed


@pytest.mark.parametrize("dimension", [1, 2, 3, 16, 24, 31, 784])
def test_the_rotation_turns_and_turns_back(dimension: int) -> None:
    matrix = _rotated(torch.eye(dimension, dtype=torch.float64), 3)
    identity = torch.eye(dimension, dtype=torch.float64)
    torch.testing.assert_close(matrix @ matrix.T, identity)
    torch.testing.assert_close(_rotated(matrix, 3, back=True), identity)
    if dimension > 2:
        assert not torch.equal(matrix, _rotated(identity, 4))
    power = 2 ** int(math.log2(dimension))
    flat = 1 if power == dimension else 3  # two blocks that overlap: no entry is large
    assert float(matrix.abs().max()) <= flat / math.sqrt(power) + 1e-12


def test_the_rotation_is_hadamards() -> None:
    """Against the recursive definition, one block."""
    hadamard = np.ones((1, 1))
    while len(hadamard) < 16:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    signs = _public_signs(16, "rotation", 5, 0).double().numpy()
    assert set(signs) == {-1.0, 1.0}
    expected = np.diag(signs) @ hadamard / 4  # rows are rotated unit vectors
    got = _rotated(torch.eye(16, dtype=torch.float64), 5).numpy()
    np.testing.assert_allclose(got, expected)


def test_public_randomness_never_changes() -> None:
    """A release made today is read by its seed for ever: these numbers are part of the format."""
    assert _public_signs(12, "rotation", 0, 0).int().tolist() == [
        1,
        1,
        1,
        1,
        -1,
        1,
        -1,
        1,
        -1,
        -1,
        1,
        1,
    ]
    cells, _ = FetchSGD(dimension=4, rows=1, columns=512)._hashes(torch.zeros(1))
    assert cells.tolist() == [[191, 241, 181, 170]]


def test_rounding_lies_on_the_levels_and_is_right_on_average() -> None:
    vote, count = D2PFed(levels=8, clip=None, threshold=None), 20_000
    gradient = gradients(1)[0]
    ballots = vmap(vote.cast)(gradient.expand(count, -1), coins(vote, count))
    step, end = vote._step(DIMENSION), vote._end(DIMENSION)
    levels = ((ballots + end) / step).double()
    torch.testing.assert_close(levels, levels.round(), atol=1e-4, rtol=0.0)
    assert levels.round().min() >= 0 and levels.round().max() <= 7
    unit = gradient / gradient.norm()
    rotated = _rotated(unit, 0)
    assert rotated.abs().max() < end
    assert float((ballots.mean(0) - rotated).abs().max()) < 5 * step / math.sqrt(count)
    read = vote.read(ballots.sum(0), float(count))
    torch.testing.assert_close(read, unit * math.sqrt(DIMENSION), atol=0.1, rtol=0.0)


@pytest.mark.parametrize("levels", [2, 4, 16, 256])
def test_rounding_seldom_reaches_the_bound(levels: int) -> None:
    """The bound is tight enough to be worth something, and shortens less than one in a thousand."""
    vote, dimension = D2PFed(levels=levels, clip=None), 784
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3000, dimension, generator=generator) ** 3
    heads = torch.rand(3000, dimension, generator=generator)
    lengths = vmap(vote.cast)(rows, heads).norm(dim=1)
    assert int((lengths > vote.bound(dimension) * (1 - 1e-6)).sum()) <= 3
    assert float(lengths.mean()) > 0.75 * vote.bound(dimension)


def test_a_rounded_ballot_beyond_the_bound_is_shortened() -> None:
    """Coins that push every coordinate away from zero: by Chernoff nobody tosses them."""
    vote, dimension = D2PFed(levels=16, clip=None), 784
    flat = _public_signs(dimension, "any signs")
    away = torch.where(flat > 0, 0.0, 1 - 2**-24)
    ballot = vote.cast(_rotated(flat, vote.seed, back=True), away)
    assert torch.equal(ballot.sign(), flat)
    step = vote._step(dimension)
    assert 1.5 * step * math.sqrt(dimension) > 1.1 * vote.bound(dimension)  # without shortening
    assert float(ballot.double().norm()) == pytest.approx(vote.bound(dimension), rel=1e-5)


# FetchSGD


def test_a_sketch_is_the_sum_over_its_cells() -> None:
    vote = FetchSGD(dimension=DIMENSION, top_k=6, rows=3, columns=40, seed=7)
    gradient, heads = gradients(1)[0], coins(vote, 1)[0]
    ballot = TopAgg(top_k=6).cast(gradient, heads)
    cells, signs = vote._hashes(gradient)
    expected = np.zeros((3, 40))
    for row in range(3):
        for j in range(DIMENSION):
            expected[row, int(cells[row, j]) - 40 * row] += float(signs[row, j] * ballot[j])
    assert np.linalg.norm(expected) < vote.bound(DIMENSION)
    np.testing.assert_allclose(vote.cast(gradient, heads).view(3, 40).numpy(), expected)


def test_cells_lie_in_their_row_and_both_signs_occur() -> None:
    cells, signs = FetchSGD(dimension=784)._hashes(torch.zeros(1))
    assert cells.shape == signs.shape == (5, 784)
    for row in range(5):
        assert 512 * row <= int(cells[row].min()) and int(cells[row].max()) < 512 * (row + 1)
        assert len(cells[row].unique()) > 350  # 784 balls in 512 cells: 401 on average
        assert abs(float(signs[row].mean())) < 0.15
    assert not torch.equal(cells[0], cells[1] - 512)


def test_decoding_takes_the_middle_row_and_the_largest_estimates() -> None:
    vote = FetchSGD(dimension=DIMENSION, top_k=3, rows=5, columns=512)
    cells, signs = vote._hashes(torch.zeros(1))
    total = torch.zeros(5 * 512)
    truth = torch.zeros(DIMENSION)
    truth[[2, 7, 11]] = torch.tensor([30.0, -20.0, 10.0])
    total.scatter_add_(0, cells.flatten(), (signs * truth).flatten())
    total[int(cells[1, 2])] += 1e6  # one row is spoilt where coordinate 2 lies
    direction = vote.read(total, 10.0)
    torch.testing.assert_close(direction[[2, 7, 11]], torch.tensor([3.0, -2.0, 1.0]))
    assert int((direction != 0).sum()) == 3
    signed = FetchSGD(dimension=DIMENSION, top_k=3, rows=5, columns=512, threshold=1.5)
    assert signed.read(total, 10.0)[[2, 7, 11]].tolist() == [1.0, -1.0, 0.0]


def test_sketches_seldom_reach_the_bound() -> None:
    vote = FetchSGD(dimension=784)
    generator = torch.Generator().manual_seed(0)
    rows, heads = (torch.rand(2000, size, generator=generator) for size in (784, 200))
    lengths = vmap(vote.cast)(rows - 0.5, heads).norm(dim=1)
    assert int((lengths > vote.bound(784) * (1 - 1e-6)).sum()) <= 2
    assert float(lengths.mean()) > 0.9 * vote.bound(784)


def test_a_crowded_cell_is_shortened() -> None:
    """Every vote in one cell, all of one sign: far beyond the bound, and cut to it."""
    vote = FetchSGD(dimension=DIMENSION, top_k=24, rows=1, columns=1)
    _, signs = vote._hashes(torch.zeros(1))
    ballot = vote.cast(signs[0], torch.zeros(24))
    aligned = TopAgg(top_k=24, clip=1e-5).cast(signs[0], torch.full((24,), 0.5))
    assert float((signs[0] * aligned).sum()) == 24.0
    sketch = vote.cast(signs[0], torch.full((24,), 0.5))
    assert float(sketch) == pytest.approx(vote.bound(24))
    assert float(ballot.abs()) <= vote.bound(24) * (1 + 1e-6) < 24


# NormTopK


def plain_norm_top_k(gradient: np.ndarray, clip: float, norm: float, share: float) -> np.ndarray:
    """Algorithm 4, lines 2 to 8 and 15, in numpy; then the rule by dimension."""
    clipped = gradient / max(1.0, float(np.linalg.norm(gradient)) / clip)
    target = float(np.sum(clipped**2)) * norm
    kept, spent = np.zeros(len(clipped)), 0.0
    for place, j in enumerate(sorted(range(len(clipped)), key=lambda j: -abs(clipped[j]))):
        if place >= max(1, int(share * len(clipped))):
            break
        spent += clipped[j] ** 2
        if norm < 1 and spent > target:
            break
        kept[j] = clipped[j]
    return kept


@pytest.mark.parametrize("norm", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("share", [0.01, 0.4, 1.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_compressed_gradients_are_algorithm_four(norm: float, share: float, scale: float) -> None:
    vote = NormTopK(clip_norm=0.7, keep_norm=norm, keep_dimensions=share)
    rows = gradients(30, scale=scale).double()
    ballots = vmap(vote.cast)(rows, torch.empty(30, 0))
    for ballot, row in zip(ballots.numpy(), rows.numpy(), strict=True):
        if norm == share == 1:
            np.testing.assert_array_equal(ballot, row)  # the gate clips it
        else:
            np.testing.assert_allclose(ballot, plain_norm_top_k(row, 0.7, norm, share))


def test_a_share_of_the_dimensions_may_hold_the_whole_norm() -> None:
    """Noise of sqrt(share) C would hide it too little: the bound stays C."""
    vote = NormTopK(clip_norm=1.0, keep_dimensions=0.1)
    sparse = torch.eye(DIMENSION)[0] * 50
    assert float(vote.cast(sparse, torch.empty(0)).norm()) == pytest.approx(vote.bound(DIMENSION))


def test_one_entry_above_the_target_leaves_nothing() -> None:
    """As printed, "right below target": the largest entry alone is too much."""
    vote = NormTopK(clip_norm=1.0, keep_norm=0.5)
    assert not vote.cast(torch.tensor([3.0, 0.1, 0.0]), torch.empty(0)).any()


# Refusals


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (TopAgg, {"top_k": 0}),
        (TopAgg, {"clip": -1.0}),
        (TopAgg, {"clip": math.inf}),
        (TopAgg, {"signs": "maybe"}),
        (TopAgg, {"threshold": -0.1}),
        (TopAgg, {"threshold": math.nan}),
        (TopAgg, {"norm": 1.0}),
        (D2PFed, {"levels": 1}),
        (FetchSGD, {"dimension": 784, "rows": 4}),
        (FetchSGD, {"dimension": 784, "columns": 0}),
        (NormTopK, {"clip_norm": 0.0}),
        (NormTopK, {"clip_norm": 1.0, "keep_norm": 0.0}),
        (NormTopK, {"clip_norm": 1.0, "keep_dimensions": 1.5}),
    ],
)
def test_nonsense_is_refused(kind: Any, values: dict[str, Any]) -> None:
    with pytest.raises(BadConfiguration):
        kind(**values)


def test_a_sketch_knows_its_dimension() -> None:
    vote = FetchSGD(dimension=784)
    for ask in (vote.bound, vote.width):
        with pytest.raises(BadConfiguration, match="784 numbers; a gradient has 64"):
            ask(64)
    with pytest.raises(BadConfiguration, match="784"):
        vote.cast(torch.zeros(64), torch.zeros(200))
