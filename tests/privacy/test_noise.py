"""The secret source: distribution, independence, and the grid."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from understudy.privacy.noise import GRID_BITS, Secret, chance, grid, grid_noise

CPU = torch.device("cpu")


def test_normals_are_normal_in_the_middle_and_in_the_tails() -> None:
    """One million draws. Kolmogorov-Smirnov p-value above 1e-6, so one false alarm in a million;
    a tail count beyond 4 within 6 standard deviations of its expectation 63.3."""
    draws = Secret().stream("test").normal(1_000_000, CPU).numpy()
    assert stats.kstest(draws, "norm").pvalue > 1e-6
    beyond = int((np.abs(draws) > 4).sum())
    expected = 1_000_000 * 2 * stats.norm.sf(4)
    assert abs(beyond - expected) < 6 * math.sqrt(expected)


def test_uniforms_are_uniform_and_below_one() -> None:
    draws = Secret().stream("test").uniform(1_000_000)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert stats.kstest(draws, "uniform").pvalue > 1e-6


def test_tosses_come_up_where_the_same_uniform_number_lies_below_the_rate() -> None:
    rates = np.random.default_rng(0).uniform(size=10_000)
    rates[:3] = 0.0, 1.0, 2.0**-53
    secret = Secret.for_testing(0)
    tossed = secret.stream("test").tosses(chance(rates.tolist()))
    assert np.array_equal(tossed, secret.stream("test").uniform(len(rates)) < rates)
    sure = secret.stream("test").tosses(chance([1.0] * 1000))
    never = secret.stream("test").tosses(chance([0.0] * 1000))
    assert sure.all() and not never.any()


def test_coins_are_uniform_below_one_and_the_same_however_they_are_grouped() -> None:
    secret, device = Secret(), torch.device("cpu")
    draws = secret.stream("c").coins((1000, 1000), device)
    assert draws.dtype == torch.float32
    assert draws.min() >= 0
    assert draws.max() < 1
    assert stats.kstest(draws.double().flatten().numpy(), "uniform").pvalue > 1e-6
    stream = secret.stream("c")
    parts = [stream.coins((500, 1000), device) for _ in range(2)]
    assert torch.equal(torch.cat(parts), draws)


def test_streams_are_independent_and_repeatable() -> None:
    secret = Secret()
    first, again, other = (
        secret.stream(*p).normal(50_000, CPU).numpy() for p in (("a", 1), ("a", 1), ("a", 2))
    )
    assert np.array_equal(first, again)
    for stranger in (other, Secret().stream("a", 1).normal(50_000, CPU).numpy()):
        assert abs(np.corrcoef(first, stranger)[0, 1]) < 6 / math.sqrt(50_000)


def test_a_stream_does_not_repeat_itself() -> None:
    stream = Secret().stream("x")
    assert not np.array_equal(stream.bits(64), stream.bits(64))


def test_odd_counts_and_none() -> None:
    stream = Secret().stream("x")
    assert [len(stream.normal(n, CPU)) for n in (0, 1, 2, 7)] == [0, 1, 2, 7]


@pytest.mark.parametrize("stddev", [1e-6, 0.3, 1.0, 7.5, 1e4])
def test_noise_lies_on_a_grid_much_finer_than_itself(stddev: float) -> None:
    step = grid(stddev, stddev, 100)
    assert math.log2(step) == int(math.log2(step))
    assert step <= stddev * 2.0**-GRID_BITS
    draws = grid_noise(Secret().stream("n"), 10_000, stddev, step, CPU).numpy()
    assert np.array_equal(np.rint(draws / step), draws / step)
    assert draws.std() == pytest.approx(stddev, rel=0.05)


def test_the_grid_leaves_room_for_exact_sums() -> None:
    for records in (1, 10**3, 10**9):
        for bound, stddev in ((1.0, 1e-3), (28.0, 28.0), (1.0, 0.0)):
            assert records * bound / grid(bound, stddev, records) <= 2.0**52


def test_secrets_are_not_stored_or_shown() -> None:
    secret = Secret()
    assert "key" not in repr(secret).lower()
    with pytest.raises(TypeError):
        pickle.dumps(secret)
