"""Name what may be asked of private records, without asking it.

A :class:`Query` is one noisy sum of bounded contributions; a :class:`Plan` says how often each
query will be asked; an :class:`Event` is a planned query resolved against the public facts, the
plain record that is priced, reserved, stated and verified. All three are inert values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from understudy.errors import BadConfiguration
from understudy.privacy.public import Public


@dataclass(frozen=True, kw_only=True)
class Query:
    """Describe one noisy sum: ``sum of clip(contribution(record), bound) + noise``.

    ``bound`` is the L2 norm every contribution is clipped to and ``noise_multiplier`` the noise's
    standard deviation in units of it. ``expected_batch`` asks for Poisson inclusion: each record
    enters by itself with probability expected_batch / N (N: the public size, of the record's own
    class where ``per_class``); ``None`` takes every record. ``per_class`` gives one sum a class.
    ``unit`` is "record", or "shard" where contributions come from shards of records.
    """

    name: str
    bound: float
    noise_multiplier: float
    expected_batch: float | None = None
    per_class: bool = False
    unit: Literal["record", "shard"] = "record"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bound) and self.bound > 0):
            raise BadConfiguration(f"Query '{self.name}': bound must be positive: {self.bound}.")
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise BadConfiguration(
                f"Query '{self.name}': noise_multiplier must be zero or more: "
                f"{self.noise_multiplier}."
            )
        if self.expected_batch is not None and not self.expected_batch > 0:
            raise BadConfiguration(
                f"Query '{self.name}': expected_batch must be positive: {self.expected_batch}."
            )
        if self.unit == "shard" and (self.per_class or self.expected_batch is not None):
            raise BadConfiguration(f"Query '{self.name}': shards are neither sampled nor classed.")

    @property
    def stddev(self) -> float:
        """Return the absolute standard deviation of the noise."""
        return self.noise_multiplier * self.bound

    def rates(self, public: Public) -> tuple[float, ...]:
        """Return the inclusion probability of each class's records (1 where all are taken)."""
        if self.expected_batch is None:
            return (1.0,) * len(public.classes)
        if not self.per_class:
            if self.expected_batch > public.size:
                raise BadConfiguration(
                    f"Query '{self.name}' expects {self.expected_batch:g} records a batch, but "
                    f"'{public.name}' has {public.size}."
                )
            return (self.expected_batch / public.size,) * len(public.classes)
        for name, count in zip(public.classes, public.sizes, strict=True):
            if self.expected_batch > count:
                raise BadConfiguration(
                    f"Query '{self.name}' expects {self.expected_batch:g} records of each class, "
                    f"but class '{name}' of '{public.name}' has {count}. A group size of at most "
                    f"{min(public.sizes)} would fit."
                )
        return tuple(self.expected_batch / count for count in public.sizes)

    def event(self, public: Public, times: int) -> Event:
        """Resolve against the public facts; the class sampled most often sets the rate."""
        return Event(
            name=self.name,
            times=times,
            noise_multiplier=self.noise_multiplier,
            bound=self.bound,
            sampling_rate=None if self.expected_batch is None else max(self.rates(public)),
            per_class=self.per_class,
            unit=self.unit,
        )


@dataclass(frozen=True)
class Step:
    """Ask one query a number of times."""

    query: Query
    times: int

    def __post_init__(self) -> None:
        if self.times < 1:
            raise BadConfiguration(f"Query '{self.query.name}' is planned {self.times} times.")


class Plan(tuple[Step, ...]):
    """List every step a method will take. Query names are unique."""

    def __new__(cls, *steps: Step) -> Plan:
        """Collect the steps."""
        names = [step.query.name for step in steps]
        if len(set(names)) != len(names):
            raise BadConfiguration(f"A plan names a query twice: {names}.")
        return super().__new__(cls, steps)

    def events(self, public: Public) -> tuple[Event, ...]:
        """Resolve every step."""
        return tuple(step.query.event(public, step.times) for step in self)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Record what a planned step is to an accountant. Plain values, fit for JSON."""

    name: str
    times: int
    noise_multiplier: float
    bound: float
    sampling_rate: float | None
    per_class: bool
    unit: Literal["record", "shard"]

    @property
    def sensitivity(self) -> float:
        """Return how far one added or removed unit moves the sum, in bounds.

        A record brings or takes away one contribution (1). A record inside a shard exchanges
        that shard's contribution for another (2).
        """
        return 2.0 if self.unit == "shard" else 1.0

    def describe(self) -> str:
        """Write the event the way an accountant would."""
        gaussian = f"Gaussian({self.noise_multiplier / self.sensitivity:.4g})"
        if self.sampling_rate is not None:
            gaussian = f"Sampled({self.sampling_rate:.4g}, {gaussian})"
        return f"{self.times} x {gaussian}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Event:
        """Rebuild from :meth:`to_json`."""
        return cls(**data)
