"""Known answers, and calibration: a bound is wrong no more often than it says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from tests.fixtures import little
from understudy.auditing.statistics import (
    Counts,
    auroc,
    counts_at,
    epsilon_from_counts,
    epsilon_from_scores,
    gaussian_epsilon,
    gaussian_mu,
    gaussian_mu_of_means,
    guess,
    largest_stddev,
    lower_limit,
    one_run_epsilon,
    one_run_p_value,
    tpr_at_fpr,
    upper_limit,
)
from understudy.privacy.accounting import epsilon
from understudy.privacy.events import Plan, Query, Step

TRIALS = 200
ALLOWED = int(stats.binom.ppf(1 - 1e-5, TRIALS, 0.05))
"""A bound that errs with chance 5 % is wrong more often than this once in 100,000 test runs.

The tests use fixed public seeds, so they do not even do that.
"""


def test_clopper_pearson_known_answers() -> None:
    assert lower_limit(10, 10, 0.95) == pytest.approx(0.05**0.1)
    assert lower_limit(0, 10, 0.95) == 0.0
    assert upper_limit(0, 10, 0.95) == pytest.approx(1 - 0.05**0.1)
    assert upper_limit(10, 10, 0.95) == 1.0
    limit = lower_limit(7, 20, 0.975)
    assert stats.binom.sf(6, 20, limit) == pytest.approx(0.025)


def test_auroc_and_tpr_known_answers() -> None:
    inside, outside = np.array([3.0, 2.0, 1.0, 0.5]), np.array([1.0, 0.0, -1.0, -2.0])
    assert auroc(inside, outside) == pytest.approx((4 + 4 + 3.5 + 3) / 16)
    assert auroc(outside, inside) == pytest.approx(1 - auroc(inside, outside))
    assert tpr_at_fpr(inside, outside, 0.0) == 0.5
    assert tpr_at_fpr(inside, outside, 0.25) == 1.0
    assert tpr_at_fpr(np.ones(5), np.ones(5), 0.4) == 0.0


def test_epsilon_from_counts_works_in_both_directions() -> None:
    sure = Counts(1000, 1000, 0, 1000)
    limit = 0.025**0.001
    assert epsilon_from_counts(sure, 0.0, 0.95) == pytest.approx(math.log(limit / (1 - limit)))
    # Few false negatives: the other direction is the stronger one.
    few_misses = Counts(1000, 1000, 700, 1000)
    assert epsilon_from_counts(few_misses, 0.0, 0.95) > 4
    assert epsilon_from_counts(few_misses, 0.4, 0.95) == 0.0


def test_gaussian_epsilon_agrees_with_the_accountant() -> None:
    for multiplier, delta in ((3.7307, 1e-5), (1.0, 1e-5), (0.4, 1e-3)):
        plan = Plan(Step(Query(name="q", bound=1.0, noise_multiplier=multiplier), 1))
        priced = epsilon(plan.events(little(4).public), delta)
        assert gaussian_epsilon(1 / multiplier, delta) == pytest.approx(priced, rel=2e-3)
    assert gaussian_epsilon(0.0, 1e-5) == 0.0
    assert gaussian_epsilon(1e-6, 1e-5) == 0.0
    assert math.isinf(gaussian_epsilon(math.inf, 1e-5))


def test_the_one_run_p_value_is_the_theorem_s() -> None:
    """Against the formula written out, the maximum over all i = 1..m."""
    for m, r, v, e, d in ((20, 20, 15, 0.5, 0.01), (30, 12, 11, 1.0, 1e-3), (5, 3, 0, 2.0, 0.1)):

        def f(value: int, r: int = r, e: float = e) -> float:
            return float(stats.binom.sf(value - 1, r, math.exp(e) / (1 + math.exp(e))))

        term = max((f(v - i) - f(v)) / i for i in range(1, m + 1))
        expected = min(1.0, f(v) + 2 * m * d * term)
        assert one_run_p_value(m, r, v, e, d) == pytest.approx(expected)


def test_the_one_run_bound_known_answers() -> None:
    # All of r guesses right, delta 0: chance^r = 5 %.
    chance = 0.05 ** (1 / 50)
    expected = math.log(chance / (1 - chance))
    assert one_run_epsilon(50, 50, 50, 0.0, 0.95) == pytest.approx(expected, abs=1e-6)
    assert one_run_epsilon(100, 50, 50, 1e-5, 0.95) < expected
    assert one_run_epsilon(50, 50, 25, 0.0, 0.95) == 0.0
    with pytest.raises(ValueError):
        one_run_epsilon(10, 11, 5, 0.0, 0.95)


def test_a_delta_buys_certainty_about_one_bit() -> None:
    """With m delta of order one a mechanism may show a bit outright: nothing follows from it."""
    assert one_run_epsilon(1, 1, 1, 0.5, 0.95) == 0.0
    assert one_run_epsilon(1000, 20, 20, 1e-2, 0.95) == 0.0


def test_guesses_are_taken_from_both_ends() -> None:
    assert guess(np.array([0.3, -1.0, 5.0, 0.2]), 1).tolist() == [0, -1, 1, 0]
    with pytest.raises(ValueError):
        guess(np.zeros(3), 2)


def test_bounds_on_null_scores_rarely_leave_zero() -> None:
    random = np.random.default_rng(0)
    wrong = dict.fromkeys(("scores", "delta", "fixed", "means", "one run", "heavy tails"), 0)
    for trial in range(TRIALS):
        one, two = random.normal(size=(2, 60))
        wrong["scores"] += epsilon_from_scores(one, two, 0.0, 0.95, seed=trial) > 0
        wrong["delta"] += epsilon_from_scores(one, two, 1e-2, 0.95, seed=trial) > 0
        wrong["fixed"] += gaussian_mu(counts_at(one, two, 0.3), 0.95) > 0
        wrong["means"] += gaussian_mu_of_means(one, two, 0.95) > 0
        tails = random.standard_cauchy(size=(2, 60))
        wrong["heavy tails"] += epsilon_from_scores(*tails, 0.0, 0.95, seed=trial) > 0
        coins = random.integers(0, 2, 60) * 2 - 1
        guesses = guess(one, 20)
        right = int(np.sum(guesses == coins))
        wrong["one run"] += one_run_epsilon(60, 40, right, 0.0, 0.95) > 0
    assert max(wrong.values()) <= ALLOWED, wrong
    assert wrong["means"] >= 5, "the t bound should be exact, not slack"


def test_bounds_on_a_gaussian_rarely_pass_the_truth() -> None:
    """The mechanism is exactly mu-GDP: bounds on mu and on epsilon stay below, and not far."""
    random = np.random.default_rng(1)
    mu, delta = 1.5, 1e-2
    truth = gaussian_epsilon(mu, delta)
    wrong = dict.fromkeys(("counts", "means", "scores", "scale"), 0)
    found = []
    for trial in range(TRIALS):
        inside, outside = random.normal(size=300) + mu, random.normal(size=300)
        wrong["counts"] += gaussian_mu(counts_at(inside, outside, mu / 2), 0.95) > mu
        means = gaussian_mu_of_means(inside, outside, 0.95)
        wrong["means"] += means > mu
        found.append(means)
        wrong["scores"] += epsilon_from_scores(inside, outside, delta, 0.95, seed=trial) > truth
        wrong["scale"] += largest_stddev(float(outside @ outside), 300, 0.95) < 1
    assert max(wrong.values()) <= ALLOWED, wrong
    assert np.mean(found) > 0.85 * mu


def test_the_one_run_bound_on_randomised_response_rarely_passes_the_truth() -> None:
    """Randomised response shows every bit at epsilon exactly: the case the theorem is tight in."""
    random = np.random.default_rng(2)
    for truth in (0.5, 2.0):
        right = random.binomial(200, math.exp(truth) / (1 + math.exp(truth)), TRIALS)
        bounds = np.array([one_run_epsilon(200, 200, int(v), 0.0, 0.95) for v in right])
        assert np.sum(bounds > truth) <= ALLOWED
        assert bounds.mean() > truth - 0.5
        with_delta = one_run_epsilon(200, 200, int(right[0]), 1e-5, 0.95)
        assert with_delta <= bounds[0]


def test_separation_without_noise_is_infinite() -> None:
    assert math.isinf(gaussian_mu_of_means(np.ones(5), np.zeros(5), 0.95))
    assert gaussian_mu_of_means(np.zeros(5), np.ones(5), 0.95) == 0.0
    spread = np.linspace(-1, 1, 50) * 1e-3
    far = gaussian_mu_of_means(1 + spread, spread, 0.95)
    assert 1000 < far < 1 / np.std(spread, ddof=1)
