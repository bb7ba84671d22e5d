"""Price events. The arithmetic is ``dp_accounting``'s; which theorem applies is decided here.

* *Add or remove*: one record meets one class only, so per-class sums compose in parallel (DPDC
  Lemma II.8) and the class sampled most often bounds them all (DPDC Corollary III.5).
* *Replace*: a whole-set sum moves by twice the bound; a sampled sum is priced by
  ``dp_accounting``'s replacement relation. Where a replacement may also change a private label
  of a sampled per-class sum, two classes move: the plan is then priced by group privacy, two
  changes of one record each (Dwork and Roth, Theorem 2.2 in its (epsilon, delta) form).
* Renyi accounting of a sampled sum under *replace* uses Mironov 2017, Proposition 2: order
  alpha / 2 at three times the divergence.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import RdpAccountant, compute_epsilon

from understudy.errors import BadConfiguration
from understudy.privacy.events import Event
from understudy.privacy.public import Adjacency

ORDERS: tuple[float, ...] = (
    *(1 + step / 10 for step in range(1, 100)),
    *(float(order) for order in range(11, 64)),
    *(float(order) for order in (72, 80, 96, 112, 128, 160, 192, 256, 384, 512, 768, 1024)),
)

FAVOURED = 0.9
"""Share of delta that a filter gives to the order that serves its cap best; the others share the
rest."""

MESH = 1e-4
"""Width of the privacy loss mesh; dp_accounting's own default."""


class Accountant(str, enum.Enum):
    """Which analysis turns events into epsilon."""

    PLD = "pld"
    """Privacy loss distributions: the tightest; for plans fixed before the first answer."""
    RDP = "rdp"
    """Renyi DP, converted as in Balle et al. 2020 and Canonne et al. 2020 (DPDC Lemma II.4)."""
    RDP_CLASSIC = "rdp-classic"
    """Renyi DP, converted as in Mironov 2017, Proposition 3 (DataLens, PSG's supplement)."""


@dataclass(frozen=True)
class Budget:
    """Set the most that may be spent: (epsilon, delta)."""

    epsilon: float
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise BadConfiguration(f"epsilon must be positive: {self.epsilon}.")
        if not 0 < self.delta < 1:
            raise BadConfiguration(f"delta must lie between 0 and 1: {self.delta}.")

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g} at delta {self.delta:g}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values: JSON has no number for infinity."""
        return {"epsilon": "inf" if math.isinf(self.epsilon) else self.epsilon, "delta": self.delta}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Budget:
        """Rebuild from :meth:`to_json`."""
        return cls(float(data["epsilon"]), float(data["delta"]))


def epsilon(
    events: Sequence[Event],
    delta: float,
    *,
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE,
    accountant: Accountant = Accountant.PLD,
    labels_fixed: bool = False,
    filtered: Budget | None = None,
) -> float:
    """Return the epsilon of all events together. ``inf`` where any of them has no noise.

    ``labels_fixed`` says that a replacement keeps the record's label (public labels).
    ``filtered`` adds up as a privacy filter with that cap does: for events whose parameters were
    chosen after looking at earlier answers, by Renyi accounting.
    """
    return _epsilon(
        tuple(events), delta, Adjacency(adjacency), Accountant(accountant), labels_fixed, filtered
    )


@functools.lru_cache(maxsize=256)
def favourite(cap: Budget) -> float | None:
    """Return the Renyi order that serves a Gaussian mechanism best whose price is the cap."""
    if math.isinf(cap.epsilon):
        return None
    orders = np.array(ORDERS)

    def priced(stddev: float) -> tuple[float, float]:
        price, best = compute_epsilon(orders, orders / (2 * stddev**2), cap.delta)
        return float(price), float(best)

    low, high = 1e-3, 1e6  # far too little noise, and far too much
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if priced(middle)[0] <= cap.epsilon else (middle, high)
    return priced(high)[1]


@functools.lru_cache(maxsize=4096)
def _epsilon(
    events: tuple[Event, ...],
    delta: float,
    adjacency: Adjacency,
    accountant: Accountant,
    labels_fixed: bool,
    filtered: Budget | None,
) -> float:
    if not events:
        return 0.0
    if any(event.noise_multiplier == 0 for event in events):
        return math.inf
    two_classes_move = (
        adjacency is Adjacency.REPLACE
        and not labels_fixed
        and any(event.per_class and event.sampling_rate is not None for event in events)
    )
    if two_classes_move:
        return _group_of_two(events, delta, accountant, filtered)
    if accountant is Accountant.PLD:
        return _pld_epsilon(events, delta, adjacency)
    orders, rdp = _rdp(events, adjacency)
    if accountant is Accountant.RDP and filtered is not None:
        return _filter_epsilon(orders, rdp, delta, filtered)
    if accountant is Accountant.RDP:
        return float(max(0.0, compute_epsilon(orders, rdp, delta)[0]))
    return float(max(0.0, np.min(rdp + math.log(1 / delta) / (orders - 1))))


def _gaussian(event: Event, scale: float = 1.0) -> dp_event.DpEvent:
    gaussian = dp_event.GaussianDpEvent(event.noise_multiplier / (event.sensitivity * scale))
    if event.sampling_rate is not None and event.sampling_rate < 1:
        return dp_event.SelfComposedDpEvent(
            dp_event.PoissonSampledDpEvent(event.sampling_rate, gaussian), event.times
        )
    return dp_event.SelfComposedDpEvent(gaussian, event.times)


def _pld_epsilon(events: Sequence[Event], delta: float, adjacency: Adjacency) -> float:
    relation = {
        Adjacency.ADD_OR_REMOVE: NeighboringRelation.ADD_OR_REMOVE_ONE,
        Adjacency.REPLACE: NeighboringRelation.REPLACE_ONE,
    }[adjacency]
    # The loss is discretised from above, so a coarser mesh stays a valid bound. Beyond epsilon 20
    # the mesh grows with the Renyi answer, or a price nobody would pay takes minutes and gigabytes.
    orders, rdp = _rdp(events, adjacency)
    renyi = float(compute_epsilon(orders, rdp, delta)[0])
    accountant = PLDAccountant(relation, MESH * max(1.0, renyi / 20))
    for event in events:
        accountant.compose(_gaussian(event))
    return float(accountant.get_epsilon(delta))


def _rdp(events: Sequence[Event], adjacency: Adjacency) -> tuple[np.ndarray, np.ndarray]:
    orders = np.array(ORDERS)
    total = np.zeros(len(orders))
    for event in events:
        sampled = event.sampling_rate is not None and event.sampling_rate < 1
        if adjacency is Adjacency.ADD_OR_REMOVE:
            total += _event_rdp(_gaussian(event), ORDERS)
        elif not sampled:
            total += _event_rdp(_gaussian(event, scale=2.0), ORDERS)
        else:
            doubled = tuple(2 * order for order in ORDERS)
            total += 3 * _event_rdp(_gaussian(event), doubled)
            # Proposition 2 of Mironov 2017 asks for a doubled order of at least 4.
            total[orders < 2] = math.inf
    return orders, total


def _filter_epsilon(orders: np.ndarray, rdp: np.ndarray, delta: float, cap: Budget) -> float:
    """Convert Renyi divergences of adaptively chosen events.

    A Renyi filter is proven for an order fixed beforehand (Feldman and Zrnic 2021, Theorem 4.3).
    Which of many orders turns out best depends on the answers, so each has a share of delta of its
    own, fixed by the cap alone, and the shares add up to delta (docs/guarantee.md, "Many runs").
    """
    best = orders == favourite(cap)
    if not best.any():
        return float(max(0.0, compute_epsilon(orders, rdp, delta / len(orders))[0]))
    rest = delta * (1 - FAVOURED) / (len(orders) - 1)
    ours = compute_epsilon(orders[best], rdp[best], delta * FAVOURED)[0]
    others = compute_epsilon(orders[~best], rdp[~best], rest)[0]
    return float(max(0.0, min(ours, others)))


@functools.lru_cache(maxsize=4096)
def _event_rdp(event: dp_event.DpEvent, orders: tuple[float, ...]) -> np.ndarray:
    accountant = RdpAccountant(orders)
    with _without_remarks_on_orders():
        accountant.compose(event)
    return np.asarray(accountant.rdp, dtype=float)


@contextlib.contextmanager
def _without_remarks_on_orders() -> Iterator[None]:
    """Keep quiet about single orders that do not converge: they count as infinite."""
    logger = logging.getLogger("absl")
    logger.addFilter(_remark_on_orders)
    try:
        yield
    finally:
        logger.removeFilter(_remark_on_orders)


def _remark_on_orders(record: logging.LogRecord) -> bool:
    return "Excluding this order" not in str(record.msg)


def _group_of_two(
    events: tuple[Event, ...], delta: float, accountant: Accountant, filtered: Budget | None
) -> float:
    """Price a replacement as a removal and an addition.

    An (e, d) guarantee for one added or removed record gives (2e, (1 + exp(e)) d) for two. We
    look for the largest d with (1 + exp(e(d))) d <= delta; any such d gives a valid bound.
    """

    def single(small: float) -> float:
        return _epsilon(events, small, Adjacency.ADD_OR_REMOVE, accountant, False, filtered)

    small = delta / 2
    for _ in range(30):
        value = single(small)
        if (1 + math.exp(min(value, 700.0))) * small <= delta:
            return 2 * value
        small = min(small / 2, delta / (1 + math.exp(min(value, 700.0))))
        if small < 1e-300:
            break
    return math.inf


def calibrate(
    events_at: Callable[[float], Sequence[Event]],
    budget: Budget,
    *,
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE,
    accountant: Accountant = Accountant.PLD,
    labels_fixed: bool = False,
    filtered: Budget | None = None,
    start: float = 1.0,
    increasing: bool = False,
    integer: bool = False,
    tolerance: float = 1e-3,
) -> float:
    """Find the parameter whose events spend the budget: never more, at most 0.1 % less.

    Epsilon must be monotone in the parameter: falling (a noise multiplier) or, with
    ``increasing``, rising (a number of steps, a sampling rate). The Renyi accountant, quick and
    never below PLD's answer by much, brackets the root; the accountant asked for refines it.
    """
    if math.isinf(budget.epsilon):
        raise BadConfiguration("An infinite budget calibrates nothing: choose the parameter.")

    def price(value: float, by: Accountant) -> float:
        value = max(1, math.floor(value)) if integer else value
        return epsilon(
            events_at(value),
            budget.delta,
            adjacency=adjacency,
            accountant=by,
            labels_fixed=labels_fixed,
            filtered=filtered,
        )

    rough = Accountant.RDP if accountant is Accountant.PLD else accountant
    cheap, dear = _bracket(lambda v: price(v, rough), budget.epsilon, start, increasing)
    cheap, dear = _shrink(
        lambda v: price(v, rough), budget.epsilon, cheap, dear, integer, 10 * tolerance
    )
    if accountant is not rough:
        cheap, dear = _bracket(
            lambda v: price(v, accountant), budget.epsilon, cheap, increasing, growth=1.1
        )
    cheap, _ = _shrink(
        lambda v: price(v, accountant), budget.epsilon, cheap, dear, integer, tolerance
    )
    return float(max(1, math.floor(cheap))) if integer else cheap


def _bracket(
    price: Callable[[float], float],
    target: float,
    start: float,
    increasing: bool,
    growth: float = 4.0,
) -> tuple[float, float]:
    """Return (cheap, dear): a parameter within the target and one above it."""
    step = 1 / growth if increasing else growth
    cheap = dear = start
    if price(start) <= target:
        for _ in range(80):
            dear = cheap / step
            if price(dear) > target:
                return cheap, dear
            cheap = dear
        return cheap, dear
    for _ in range(80):
        cheap = dear * step
        if increasing and cheap < 1e-12:
            break
        if price(cheap) <= target:
            return cheap, dear
        dear = cheap
    raise BadConfiguration(
        f"No value keeps epsilon within {target:g}: even {cheap:.3g} spends {price(cheap):.3g}."
    )


def _shrink(
    price: Callable[[float], float],
    target: float,
    cheap: float,
    dear: float,
    integer: bool,
    tolerance: float,
) -> tuple[float, float]:
    """Close the bracket until the cheap end spends the target, by secants on a log-log scale."""
    low, high = price(cheap), price(dear)
    for turn in range(60):
        if low >= target * (1 - tolerance) or (integer and abs(dear - cheap) <= 1):
            break
        if turn % 3 != 2 and 0 < low < math.inf and math.isfinite(high):
            share = math.log(target / low) / math.log(high / low)
            share = min(max(share, 0.02), 0.98)
            # Aim a little inside, so that the cheap end moves and the search can stop.
            share *= 1 - tolerance / 2
        else:
            share = 0.5
        middle = math.exp(math.log(cheap) + share * (math.log(dear) - math.log(cheap)))
        value = price(middle)
        if value <= target:
            cheap, low = middle, value
        else:
            dear, high = middle, value
    return cheap, dear
