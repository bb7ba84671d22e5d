"""Say what a method is: a frozen configuration that plans, measures and synthesises.

    Mechanism            plan, measure: what is asked of private records
      Method             synthesise: a set from the answers
        Generative       sample: as many records as wanted, from a generator in the answers
      Trainer            classifier: a network from the answers, and no set

Writing one: subclass :class:`Method` (or a sibling), declare the parameters as dataclass fields,
and fill in ``plan`` (which noisy sums, how often), ``measure`` (ask them) and ``synthesise`` (make
the set from the answers). Everything private happens in ``gate.noisy_sum``, which takes a function
of ONE record; the rest is free. See docs/writing-a-method.md.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import nn

from understudy.data.synthetic import SyntheticSet
from understudy.engine import Engine, Progress, silent
from understudy.errors import BadConfiguration, UnknownName
from understudy.privacy.accounting import Accountant, Budget, calibrate, epsilon
from understudy.privacy.events import Event, Plan
from understudy.privacy.gate import Gate
from understudy.privacy.public import Public
from understudy.privacy.release import Release

M = TypeVar("M", bound="Mechanism")


@dataclass(frozen=True)
class Preset:
    """Name a configuration worth starting from."""

    configuration: Mapping[str, Any]
    told: str
    """Where it comes from, what it should reach and how long it takes."""


@dataclass(frozen=True, kw_only=True)
class Mechanism(abc.ABC):
    """Turn private records into a Release.

    ``seed`` is public randomness (networks, augmentations, starting images) and is stored in the
    recipe. Noise and sampling never depend on it.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    """The paper, algorithm and theorem."""
    assumptions: ClassVar[tuple[str, ...]] = ()
    departures: ClassVar[tuple[str, ...]] = ()
    presets: ClassVar[Mapping[str, Preset]] = {}
    miniature: ClassVar[Mapping[str, Any]] = {}
    """Fields that make a run on a few tiny records take about a second: for tests and tours."""

    noise_multiplier: float
    """Standard deviation of the noise in units of the bound on one contribution."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what makes no sense. Subclasses extend it with :meth:`_require`."""
        self._require(
            math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0,
            f"noise_multiplier must be zero or more: {self.noise_multiplier}",
        )

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise BadConfiguration(f"{self.name}: {message}.")

    @abc.abstractmethod
    def plan(self, public: Public) -> Plan:
        """Say which queries will be asked, and how often. Reads nothing."""

    @abc.abstractmethod
    def measure(self, gate: Gate) -> Release:
        """Ask the planned queries. The private side ends with what this returns."""

    @classmethod
    def suited(cls, public: Public, budget: Budget | None, engine: Engine) -> str | None:
        """Name the preset that suits these public facts; None for the plain defaults."""
        return None

    def epsilon(
        self, public: Public, delta: float = 1e-5, accountant: Accountant = Accountant.PLD
    ) -> float:
        """Price this configuration on these public facts."""
        return epsilon(
            self.plan(public).events(public),
            delta,
            adjacency=public.adjacency,
            accountant=accountant,
            labels_fixed=public.labels == "public",
        )

    def calibrated(
        self: M, public: Public, budget: Budget, *, earlier: tuple[Event, ...] = ()
    ) -> M:
        """Return this method with the least noise that keeps within the budget.

        ``earlier`` are events of stages whose answers the public facts came from (measured class
        sizes); they are paid for out of the same budget, by the Renyi filter.
        """
        if math.isinf(budget.epsilon):
            return dataclasses.replace(self, noise_multiplier=0.0)

        def events_at(noise_multiplier: float) -> tuple[Event, ...]:
            method = dataclasses.replace(self, noise_multiplier=noise_multiplier)
            return (*earlier, *method.plan(public).events(public))

        noise_multiplier = calibrate(
            events_at,
            budget,
            adjacency=public.adjacency,
            accountant=Accountant.RDP if earlier else Accountant.PLD,
            labels_fixed=public.labels == "public",
            filtered=budget if earlier else None,
            start=max(self.noise_multiplier, 0.1),
        )
        return dataclasses.replace(self, noise_multiplier=noise_multiplier)

    # Configuration as plain values

    def recipe(self) -> dict[str, Any]:
        """Return the method's name and whole configuration."""
        return {"method": self.name, "configuration": dataclasses.asdict(self)}

    @classmethod
    def configured(cls: type[M], values: Mapping[str, Any]) -> M:
        """Build from plain values; an unknown field is refused with the nearest name."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        for key, value in values.items():
            if key not in known:
                raise UnknownName(f"field of {cls.name}", key, known)
            _check_kind(cls.name, key, value, known[key].default)
        try:
            return cls(**{key: _tupled(value) for key, value in values.items()})
        except TypeError as error:
            raise BadConfiguration(f"{cls.name}: {error}.") from error

    @classmethod
    def describe_fields(cls) -> dict[str, Any]:
        """Return each field's default, for `understudy methods`."""
        return {
            field.name: None if field.default is dataclasses.MISSING else field.default
            for field in dataclasses.fields(cls)
        }


@dataclass(frozen=True, kw_only=True)
class Method(Mechanism):
    """Turn private records into a Release, and a Release into a synthetic set."""

    @abc.abstractmethod
    def synthesise(
        self, release: Release, *, engine: Engine | None = None, progress: Progress = silent
    ) -> SyntheticSet:
        """Make the synthetic set. Post-processing: free, and repeatable with other settings."""


@dataclass(frozen=True, kw_only=True)
class Generative(Method):
    """Release a generator: any number of records can be drawn from it, for ever, at no cost."""

    images_per_class: int = 100
    """How many of each class the set written with the release holds."""

    @abc.abstractmethod
    def sample(
        self,
        release: Release,
        count: int,
        *,
        seed: int = 0,
        engine: Engine | None = None,
        progress: Progress = silent,
    ) -> SyntheticSet:
        """Draw ``count`` records, classes in equal shares (the first ones get the remainder).

        ``seed`` is public; another one draws other records. Post-processing: free.
        """

    def synthesise(
        self, release: Release, *, engine: Engine | None = None, progress: Progress = silent
    ) -> SyntheticSet:
        """Draw ``images_per_class`` records of each class, by the recipe's own seed."""
        count = self.images_per_class * len(release.public.classes)
        return self.sample(release, count, seed=self.seed, engine=engine, progress=progress)


@dataclass(frozen=True, kw_only=True)
class Trainer(Mechanism):
    """Release a classifier. There is no set to look at: the weights are the answer."""

    @abc.abstractmethod
    def classifier(self, release: Release, *, engine: Engine | None = None) -> nn.Module:
        """Build the trained network, in evaluation mode: records in, one logit a class out."""


_KINDS: Mapping[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a word"),
}


def _check_kind(name: str, field: str, value: Any, default: Any) -> None:
    """Refuse a value of another kind than the field's default, where that has a plain one."""
    if value is None or type(default) not in _KINDS:
        return
    allowed, told = _KINDS[type(default)]
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise BadConfiguration(f"{name}: {field} is {value!r}; it takes {told}.")


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
