"""Say what a measurement is: one cell of a table, recognised by a digest of what it declares.

A cell is plain values and imports no network, so that listing and rendering need no torch. It is
declared once, in :mod:`understudy.bench.suites`; two tables that ask for the same cell share its
measurement.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from understudy.errors import BadConfiguration, UnderstudyError, UnknownName

if TYPE_CHECKING:
    from understudy.methods import Mechanism
    from understudy.privacy.accounting import Budget
    from understudy.privacy.public import Public

Measures = Literal["accuracy", "subspace error"]

CLASS_SIZES: Mapping[str, tuple[int, ...]] = {
    "digits": (151, 161, 143, 131, 147, 154, 150, 136, 127, 138),
    "mnist": (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
    "fashion-mnist": (6000,) * 10,
    "cifar10": (5000,) * 10,
    "celeba": (6492, 3508),
    "celeba-hair": (4200, 2430, 3370),
    "adult": (24720, 7841),
    "pneumoniamnist": (1214, 3494),
}
"""Sizes of the classes in the training splits, counted, so that cells are planned without data."""

SKLEARN = ("logistic", "forest", "boosting")
"""Evaluation by scikit-learn's classifiers instead of a network; they know no protocol."""


RELEASED = "released"
"""In place of an evaluation network where a trainer's own network is tested."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Quote a published figure, in percent, and where it stands."""

    figure: float
    source: str
    spread: float | None = None
    remark: str = ""
    """What differs there, besides what the suite says of all its cells."""
    network: str | None = None
    """The evaluation network it belongs to; None: any."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Say between which figures, in percent, the mean over a cell's repeats must lie."""

    least: float | None = None
    most: float | None = None
    balanced: bool = False
    """Whether balanced accuracy is meant: the mean over the classes."""
    queries: int | None = None
    """How many answers the release must be made of, exactly."""
    epsilon: float | None = None
    """What the recorded events must cost, within one percent."""
    source: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Declare one measurement: one release, the set made from it, the networks trained on that.

    ``values`` configure what is measured, ``after`` what is made of it: cells that differ only in
    ``after`` and in how they are evaluated share a release. ``epsilon`` None keeps the
    configuration's own noise, infinity takes it away. The public seed of the method is ``repeat``.
    """

    method: str
    dataset: str
    preset: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    epsilon: float | None = None
    delta: float = 1e-5
    resize: int | None = None
    images_per_class: int | None = None
    """As the method counts them: stored images. None: the configuration's own."""
    after: Mapping[str, Any] = field(default_factory=dict)
    samples: int | None = None
    """How many records to draw from a generator, instead of images_per_class of each class."""
    protocol: str = "dm"
    training: Mapping[str, Any] = field(default_factory=dict)
    """Fields in which the training differs from the protocol."""
    flips: bool = False
    networks: tuple[str, ...] = ("convnet",)
    seeds: tuple[int, ...] = (0,)
    repeat: int = 0
    fidelity: bool = False
    """Whether to compare the set with held-out pictures, too."""
    measures: Measures = "accuracy"

    # What a table says of it; no part of its identity.
    row: str = ""
    column: str = ""
    references: tuple[Reference, ...] = ()
    bar: Bar | None = None

    TOLD = ("row", "column", "references", "bar")

    def __post_init__(self) -> None:
        if not (self.networks and self.seeds):
            raise BadConfiguration(f"{self}: give at least one network and one seed.")
        if self.epsilon is not None:  # 1 and 1.0 are the same budget
            object.__setattr__(self, "epsilon", float(self.epsilon))

    def __str__(self) -> str:
        budget = "its own noise" if self.epsilon is None else f"epsilon {self.epsilon:g}"
        told = [self.method, *([self.preset] if self.preset else []), f"on {self.dataset}", budget]
        if self.images_per_class is not None:
            told.append(f"{self.images_per_class} images per class")
        told += [f"{key}={value}" for key, value in {**self.values, **self.after}.items()]
        return f"{', '.join(told)}, repeat {self.repeat}"

    # Identity

    def to_json(self) -> dict[str, Any]:
        """Return what is declared as plain values, fields at their defaults left out."""
        plain = {}
        for own in dataclasses.fields(self):
            value = getattr(self, own.name)
            if own.name in self.TOLD or value == _default(own):
                continue
            plain[own.name] = plain_values(value)
        return plain

    @property
    def digest(self) -> str:
        """Return what this cell is recognised by, in every version.

        Fields at their defaults do not enter, so that a field added later changes no digest.
        """
        return _digest(self.to_json())

    @property
    def group(self) -> str:
        """Return what all repeats of this cell have in common."""
        return dataclasses.replace(self, repeat=0, seeds=tuple(range(len(self.seeds)))).digest

    def released(self, size_matters: bool) -> str:
        """Return what all cells have in common that can share this one's release."""
        kept = {"method", "dataset", "preset", "values", "epsilon", "delta", "resize", "repeat"}
        kept |= {"images_per_class"} if size_matters else set()
        return _digest({key: value for key, value in self.to_json().items() if key in kept})

    # What it means here

    @property
    def budget(self) -> Budget | None:
        """Return the budget the noise is found for; None for the configuration's own noise."""
        from understudy.privacy.accounting import Budget

        return None if self.epsilon is None else Budget(self.epsilon, self.delta)

    @property
    def public(self) -> Public:
        """Return the dataset's public facts, from what is declared of it. Reads no file."""
        from understudy.data.datasets import DATASETS
        from understudy.privacy.public import Public

        if self.dataset not in DATASETS:
            raise UnknownName("dataset", self.dataset, DATASETS)
        card = DATASETS[self.dataset]
        sides = (self.resize,) * 2 if self.resize else card.shape[1:]
        return Public(
            name=self.dataset,
            shape=(card.shape[0], *sides),
            classes=card.classes,
            counts=CLASS_SIZES[self.dataset],
        )

    def configured(self) -> Mechanism:
        """Build the method or trainer that is measured, before its noise is found."""
        from understudy import jobs

        sized = {} if self.images_per_class is None else {"images_per_class": self.images_per_class}
        try:
            return jobs.configure(
                self.method, {**self.values, **sized, "seed": self.repeat}, preset=self.preset
            )
        except UnderstudyError as error:
            raise BadConfiguration(f"The cell '{self}' cannot be configured: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Name some cells: a paper's table, or a table of our own."""

    name: str
    title: str
    source: str = ""
    told: str = ""
    """What a reader must know: reduced repeats, what cannot be run here, what differs."""
    cells: tuple[Cell, ...] = ()
    elsewhere: str = ""
    """The command that measures it, where a bench cell cannot."""

    def __post_init__(self) -> None:
        twice = {cell.digest for cell in self.cells}
        if len(twice) != len(self.cells):
            raise BadConfiguration(f"The suite '{self.name}' declares a cell twice.")


def repeated(repeats: int, networks_each: int, **declared: Any) -> Iterator[Cell]:
    """Declare a cell with several releases, each judged by several networks of every kind."""
    for repeat in range(repeats):
        seeds = tuple(100 * repeat + number for number in range(networks_each))
        yield Cell(repeat=repeat, seeds=seeds, **declared)


def _default(own: dataclasses.Field[Any]) -> Any:
    if own.default_factory is not dataclasses.MISSING:
        return own.default_factory()
    return own.default


def plain_values(value: Any) -> Any:
    """Return JSON types, with infinity as a word: JSON has no number for it."""
    if isinstance(value, Mapping):
        return {str(key): plain_values(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [plain_values(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _digest(plain: Mapping[str, Any]) -> str:
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
