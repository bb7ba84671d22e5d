"""Turn attack scores into statements with a stated chance of being wrong. Pure functions.

Scores are real numbers, higher where the attacker leans towards "the canary was in". *Inside*
scores come from runs with it, *outside* scores from runs without.

* Error rates get Clopper-Pearson limits (Clopper and Pearson 1934).
* (epsilon, delta) from error rates: Kairouz, Oh, Viswanath 2015, Theorem 2.1, as an audit by
  Jagielski, Ullman, Oprea 2020.
* mu of Gaussian differential privacy from error rates: Nasr et al. 2023, Section 4; its epsilon at
  a delta by Dong, Roth, Su 2022, Corollary 2.13.
* Many canaries in one run: Steinke, Nasr, Jagielski 2023, Theorem 5.2, delta term included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

Scores = npt.NDArray[np.float64]

LARGEST = 200.0
"""No bound from counts reaches this epsilon; searches stop there."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Hold what one attack found: a lower bound on epsilon that errs with chance 1 - confidence.

    ``rests_on`` says what has to be true for the bound to mean what it says.
    """

    attack: str
    epsilon: float
    confidence: float
    rests_on: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Counts:
    """Count an attack's successes: ``hits`` of the inside scores, ``alarms`` of the outside."""

    hits: int
    inside: int
    alarms: int
    outside: int

    def limits(self, confidence: float) -> tuple[float, float]:
        """Return (TPR at least, FPR at most), both true with the confidence."""
        each = 1 - (1 - confidence) / 2
        return lower_limit(self.hits, self.inside, each), upper_limit(
            self.alarms, self.outside, each
        )


def lower_limit(successes: int, trials: int, confidence: float) -> float:
    """Return the one-sided lower Clopper-Pearson limit of a success probability."""
    if successes <= 0 or trials <= 0:
        return 0.0
    return float(stats.beta.ppf(1 - confidence, successes, trials - successes + 1))


def upper_limit(successes: int, trials: int, confidence: float) -> float:
    """Return the one-sided upper Clopper-Pearson limit of a success probability."""
    return 1.0 - lower_limit(trials - successes, trials, confidence)


def auroc(inside: Scores, outside: Scores) -> float:
    """Return the chance that an inside score beats an outside one, ties counted half."""
    ranks = stats.rankdata(np.concatenate([inside, outside]))
    n, m = len(inside), len(outside)
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))


def tpr_at_fpr(inside: Scores, outside: Scores, fpr: float) -> float:
    """Return the share of inside scores above a threshold that at most ``fpr`` outside pass."""
    allowed = math.floor(fpr * len(outside))
    threshold = np.sort(outside)[::-1][allowed] if allowed < len(outside) else -math.inf
    return float(np.mean(inside > threshold))


def counts_at(inside: Scores, outside: Scores, threshold: float) -> Counts:
    """Call every score above the threshold "in"."""
    return Counts(
        int(np.sum(inside > threshold)),
        len(inside),
        int(np.sum(outside > threshold)),
        len(outside),
    )


def epsilon_from_counts(counts: Counts, delta: float, confidence: float) -> float:
    """Bound epsilon from below: no (epsilon, delta)-private mechanism errs so rarely.

    Every attack has TPR <= exp(epsilon) FPR + delta and TNR <= exp(epsilon) FNR + delta. The two
    limits used serve both directions, so their confidences are split over two events, not four.
    """
    tpr, fpr = counts.limits(confidence)
    return max(0.0, _log_ratio(tpr - delta, fpr), _log_ratio(1 - fpr - delta, 1 - tpr))


def _log_ratio(above: float, below: float) -> float:
    if above <= 0:
        return -math.inf
    return math.inf if below <= 0 else math.log(above / below)


def choose_threshold(inside: Scores, outside: Scores, delta: float, confidence: float) -> float:
    """Find the threshold with the best bound on THESE scores. Count on others, never on these."""
    places = np.unique(np.concatenate([inside, outside]))
    if len(places) > 32:
        places = places[np.linspace(0, len(places) - 1, 32).astype(int)]
    return float(
        max(
            places,
            key=lambda t: epsilon_from_counts(counts_at(inside, outside, t), delta, confidence),
        )
    )


def epsilon_from_scores(
    inside: Scores, outside: Scores, delta: float, confidence: float, *, seed: int = 0
) -> float:
    """Choose a threshold on a random half of the scores; bound epsilon on the other half."""
    if min(len(inside), len(outside)) < 2:
        return 0.0
    random = np.random.default_rng(seed)
    inside, outside = random.permutation(inside), random.permutation(outside)
    i, o = len(inside) // 2, len(outside) // 2
    threshold = choose_threshold(inside[:i], outside[:o], delta, confidence)
    return epsilon_from_counts(counts_at(inside[i:], outside[o:], threshold), delta, confidence)


# Gaussian differential privacy


def gaussian_mu(counts: Counts, confidence: float) -> float:
    """Bound mu from below: under mu-GDP, FNR >= Phi(Phi^-1(1 - FPR) - mu)."""
    tpr, fpr = counts.limits(confidence)
    if tpr <= 0 or fpr >= 1:
        return 0.0
    return max(0.0, float(stats.norm.ppf(tpr) - stats.norm.ppf(fpr)))


def gaussian_mu_of_means(inside: Scores, outside: Scores, confidence: float) -> float:
    """Bound mu from below where both kinds of scores are Gaussian with one unknown deviation.

    Student's t of the two means is then noncentral, with noncentrality mu sqrt(n m / (n + m));
    the bound is the mu at which so large a t has probability 1 - confidence.
    """
    n, m = len(inside), len(outside)
    if n + m < 4 or min(n, m) == 0:
        return 0.0
    gap = float(inside.mean() - outside.mean())
    degrees = n + m - 2
    squares = float(np.square(inside - inside.mean()).sum())
    squares += float(np.square(outside - outside.mean()).sum())
    weight = math.sqrt(n * m / (n + m))
    if gap <= 0:
        return 0.0
    stddev = math.sqrt(squares / degrees)
    if stddev < 1e-9 * gap:
        return math.inf
    t = gap / stddev * weight
    if stats.t.sf(t, degrees) >= 1 - confidence:
        return 0.0
    if t > 200:  # scipy's noncentral t wants moderate numbers; t / noncentrality ~ 1 / chi
        shrink = math.sqrt(float(stats.chi2.ppf((1 - confidence) / 2, degrees)) / degrees)
        z = float(stats.norm.isf((1 - confidence) / 2))
        return max(0.0, (t * shrink - z) / weight)

    def excess(noncentrality: float) -> float:
        return float(stats.nct.sf(t, degrees, noncentrality)) - (1 - confidence)

    return float(optimize.brentq(excess, 0.0, t, xtol=1e-6)) / weight


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the least epsilon at which mu-GDP is (epsilon, delta)-private."""
    if mu <= 0:
        return 0.0
    if math.isinf(mu):
        return math.inf

    def excess(epsilon: float) -> float:
        first = stats.norm.cdf(mu / 2 - epsilon / mu)
        second = math.exp(epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu))
        return float(first - second - delta)

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(optimize.brentq(excess, 0.0, high, xtol=1e-10))


def largest_stddev(squares: float, count: int, confidence: float) -> float:
    """Bound the standard deviation of centred Gaussian numbers from above, by their squares."""
    if count == 0:
        return math.inf
    return math.sqrt(squares / float(stats.chi2.ppf(1 - confidence, count)))


# One run, many canaries


def one_run_p_value(
    examples: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Bound the chance of so many correct guesses under (epsilon, delta)-privacy.

    ``examples`` canaries m were each in or out by a fair coin of its own; the attacker guessed
    r of them and abstained on the rest. Theorem 5.2 of Steinke, Nasr, Jagielski 2023: with
    W ~ Binomial(r, e^epsilon / (1 + e^epsilon)) and f(v) = P[W >= v],

        P[correct >= v] <= f(v) + 2 m delta max over i = 1..m of (f(v - i) - f(v)) / i.
    """
    chance = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(correct - 1, guesses, chance))
    if delta > 0 and correct > 0:
        # Beyond i = v the numerator stays 1 - f(v) while i grows, so i = 1..v is enough.
        steps = np.arange(1, min(correct, examples) + 1)
        gained = np.cumsum(stats.binom.pmf(correct - steps, guesses, chance))
        tail += 2 * examples * delta * float(np.max(gained / steps))
    return min(1.0, tail)


def one_run_epsilon(
    examples: int, guesses: int, correct: int, delta: float, confidence: float
) -> float:
    """Return the largest epsilon that so many correct guesses rule out, or 0."""
    if not 0 <= correct <= guesses <= examples:
        raise ValueError(f"{correct} of {guesses} guesses on {examples} examples make no sense.")

    def excess(epsilon: float) -> float:
        value = one_run_p_value(examples, guesses, correct, epsilon, delta)
        return value - (1 - confidence)

    if excess(0.0) >= 0:
        return 0.0
    # The delta term is not monotone, so take the FIRST epsilon that is not ruled out.
    low = 0.0
    while low < LARGEST and excess(low + 0.05) < 0:
        low += 0.05
    high = low + 0.05
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return low


def guess(scores: Scores, each_side: int) -> npt.NDArray[np.int64]:
    """Guess "in" (1) for the highest scores, "out" (-1) for the lowest, abstain (0) between."""
    if 2 * each_side > len(scores):
        raise ValueError(f"{each_side} guesses on each side of {len(scores)} scores.")
    guesses = np.zeros(len(scores), dtype=np.int64)
    order = np.argsort(scores, kind="stable")
    guesses[order[:each_side]] = -1
    guesses[order[len(scores) - each_side :]] = 1
    return guesses
