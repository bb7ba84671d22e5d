"""A small, shareable, differentially private stand-in for a sensitive dataset.

    import understudy as us

    data = us.open_data("my_images/")                # behind the gate: only data.public can be seen
    method = us.configure(preset="auto", public=data.public)
    release = us.fit(data, method, budget=us.Budget(1.0))    # spends, and says what
    synthetic = us.synthesise(release)               # free, as often as you like
    us.save("release/", release, synthetic)
    print(release.statement.paragraph())

Names are imported when they are first used, so that ``understudy --help`` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy.data import HeldOut, open_data, open_heldout, read, read_heldout
    from understudy.data.folder import load, save
    from understudy.data.synthetic import SyntheticSet
    from understudy.engine import Engine
    from understudy.errors import UnderstudyError
    from understudy.evaluation.classify import Protocol, Scores
    from understudy.jobs import account, configure, plan, report, synth, verify
    from understudy.methods import DM, LDPDC, NDPDC, Dosser, Method, WholeSet
    from understudy.privacy import (
        Accountant,
        Adjacency,
        Budget,
        Ledger,
        PrivateDataset,
        Public,
        Release,
        Statement,
    )
    from understudy.run import evaluate, fit, synthesise

_HOMES = {
    "understudy.data": ("HeldOut", "open_data", "open_heldout", "read", "read_heldout"),
    "understudy.data.folder": ("load", "save"),
    "understudy.data.synthetic": ("SyntheticSet",),
    "understudy.engine": ("Engine",),
    "understudy.errors": ("UnderstudyError",),
    "understudy.evaluation.classify": ("Protocol", "Scores"),
    "understudy.jobs": ("account", "configure", "plan", "report", "synth", "verify"),
    "understudy.methods": ("DM", "LDPDC", "NDPDC", "Dosser", "Method", "WholeSet"),
    "understudy.privacy": (
        "Accountant",
        "Adjacency",
        "Budget",
        "Ledger",
        "PrivateDataset",
        "Public",
        "Release",
        "Statement",
    ),
    "understudy.run": ("evaluate", "fit", "synthesise"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "DM",
    "LDPDC",
    "NDPDC",
    "Accountant",
    "Adjacency",
    "Budget",
    "Dosser",
    "Engine",
    "HeldOut",
    "Ledger",
    "Method",
    "PrivateDataset",
    "Protocol",
    "Public",
    "Release",
    "Scores",
    "Statement",
    "SyntheticSet",
    "UnderstudyError",
    "WholeSet",
    "account",
    "configure",
    "evaluate",
    "fit",
    "load",
    "open_data",
    "open_heldout",
    "plan",
    "read",
    "read_heldout",
    "report",
    "save",
    "synth",
    "synthesise",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'understudy' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
