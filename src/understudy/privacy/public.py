"""Declare what is public about a private dataset.

Everything a plan, a price or a synthetic set may depend on, besides noisy answers, is in
:class:`Public`. It is declared by the data holder (or read off the files and *declared* public,
as the papers do with class sizes) and is printed in the statement.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from understudy.errors import BadConfiguration


class Adjacency(str, enum.Enum):
    """What "two datasets that differ in one unit" means."""

    ADD_OR_REMOVE = "add-or-remove"
    """One dataset has one unit more than the other."""
    REPLACE = "replace"
    """Both have the same size and one unit is exchanged for any other."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One declared column of a table: a numeric range or a list of categories."""

    name: str
    kind: Literal["numeric", "categorical"]
    low: float | None = None
    high: float | None = None
    categories: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind == "numeric" and not (
            self.low is not None and self.high is not None and self.low < self.high
        ):
            raise BadConfiguration(f"Column '{self.name}' is numeric: it needs low < high.")
        if self.kind == "categorical" and not self.categories:
            raise BadConfiguration(f"Column '{self.name}' is categorical: it needs categories.")

    @property
    def width(self) -> int:
        """Count the numbers one cell is encoded into."""
        return 1 if self.kind == "numeric" else len(self.categories)


@dataclass(frozen=True, kw_only=True)
class Public:
    """Hold every public fact about a private dataset.

    ``counts`` are class sizes *declared public*; ``None`` means they are private and will be
    measured by a noisy count that is paid for. ``counts_measured`` marks counts that came from
    such a measurement. ``labels`` says whether each record's own label is public (then a
    replacement keeps it) or private.
    """

    name: str
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    counts: tuple[int, ...] | None = None
    counts_measured: bool = False
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE
    unit: str = "one record"
    labels: Literal["private", "public"] = "private"
    preparation: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()

    def __post_init__(self) -> None:
        if len(self.classes) < 2:
            raise BadConfiguration(
                f"'{self.name}' has {len(self.classes)} class. A labelled stand-in needs at "
                "least two: put each class in a folder of its own, or name the label column."
            )
        if len(set(self.classes)) != len(self.classes):
            raise BadConfiguration(f"'{self.name}' names a class twice: {self.classes}.")
        if len(self.shape) not in (1, 3) or min(self.shape) < 1:
            raise BadConfiguration(
                f"'{self.name}' has record shape {self.shape}; expected (channels, height, width) "
                "for images or (features,) for tables."
            )
        if self.counts is not None:
            if len(self.counts) != len(self.classes):
                raise BadConfiguration(
                    f"'{self.name}' declares {len(self.counts)} class sizes for "
                    f"{len(self.classes)} classes."
                )
            for name, count in zip(self.classes, self.counts, strict=True):
                if count < 1:
                    raise BadConfiguration(
                        f"Class '{name}' of '{self.name}' is empty. Drop it from the classes, or "
                        "add records to it."
                    )

    @property
    def dimension(self) -> int:
        """Count the numbers in one record."""
        size = 1
        for side in self.shape:
            size *= side
        return size

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the class sizes, or explain that they are not known yet."""
        if self.counts is None:
            raise BadConfiguration(
                f"The class sizes of '{self.name}' are private and not yet measured, so a plan "
                "cannot be priced. Declare them public (counts=...) or let `fit` measure them."
            )
        return self.counts

    @property
    def size(self) -> int:
        """Return the number of records all classes have together."""
        return sum(self.sizes)

    @property
    def is_image(self) -> bool:
        """Tell images from tables."""
        return len(self.shape) == 3

    def measured(self, counts: tuple[int, ...]) -> Public:
        """Return these facts with noisy class sizes filled in."""
        return dataclasses.replace(self, counts=counts, counts_measured=True)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        data = dataclasses.asdict(self)
        data["adjacency"] = self.adjacency.value
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Public:
        """Rebuild from :meth:`to_json`."""
        fields = dict(data)
        for key in ("shape", "classes", "preparation"):
            fields[key] = tuple(fields[key])
        if fields.get("counts") is not None:
            fields["counts"] = tuple(fields["counts"])
        fields["adjacency"] = Adjacency(fields["adjacency"])
        fields["columns"] = tuple(
            Column(**{**column, "categories": tuple(column["categories"])})
            for column in fields["columns"]
        )
        return cls(**fields)
