"""Carry what left the private side: noisy signals, how they were asked, what is guaranteed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from understudy.privacy.public import Public
from understudy.privacy.statement import Statement


@dataclass(frozen=True)
class Release:
    """Hold the outcome of one fit. Everything made from it is post-processing, and free.

    ``signals`` are the noisy answers, ``recipe`` the method and its whole configuration (public
    seed included), ``statement`` the guarantee stamped by the gate.
    """

    signals: Mapping[str, Tensor]
    recipe: Mapping[str, Any]
    public: Public
    statement: Statement
