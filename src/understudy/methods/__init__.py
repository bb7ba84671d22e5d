"""The methods and trainers, by name. Explicit tuples; other packages add theirs by entry point.

A package registers its own with an entry point in the group ``understudy.methods`` whose value
is a subclass of :class:`~understudy.methods.base.Method`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import TypeVar

from understudy.errors import UnknownName
from understudy.methods.base import Generative, Mechanism, Method, Trainer
from understudy.methods.datalens import DataLens
from understudy.methods.dm import DM
from understudy.methods.dosser import Dosser
from understudy.methods.dp_merf import DPMERF
from understudy.methods.dpaf import DPAF
from understudy.methods.ldpdc import LDPDC
from understudy.methods.ndpdc import NDPDC
from understudy.methods.psg import PSG
from understudy.methods.topagg import DPSGD
from understudy.methods.whole_set import WholeSet

M = TypeVar("M", bound=Mechanism)

BUILT_IN: tuple[type[Method], ...] = (
    LDPDC,
    DM,
    NDPDC,
    Dosser,
    PSG,
    DataLens,
    DPAF,
    DPMERF,
    WholeSet,
)

TRAINERS: tuple[type[Trainer], ...] = (DPSGD,)


def registered() -> dict[str, type[Method]]:
    """Return every method by name."""
    methods = {method.name: method for method in BUILT_IN}
    for point in metadata.entry_points(group="understudy.methods"):
        methods.setdefault(point.name, point.load())
    return methods


def method_named(name: str) -> type[Method]:
    """Return the method of that name, or offer the nearest."""
    return _named(name, registered())


def mechanism_named(name: str) -> type[Mechanism]:
    """Return the method or trainer of that name, or offer the nearest."""
    return _named(name, {**registered(), **{trainer.name: trainer for trainer in TRAINERS}})


def _named(name: str, known: Mapping[str, type[M]]) -> type[M]:
    if name not in known:
        raise UnknownName("method", name, known)
    return known[name]


__all__ = [
    "BUILT_IN",
    "DM",
    "DPAF",
    "DPMERF",
    "DPSGD",
    "LDPDC",
    "NDPDC",
    "PSG",
    "TRAINERS",
    "DataLens",
    "Dosser",
    "Generative",
    "Mechanism",
    "Method",
    "Trainer",
    "WholeSet",
    "mechanism_named",
    "method_named",
    "registered",
]
