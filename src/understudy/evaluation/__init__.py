"""Judge a synthetic set by what it is good for. Everything here is post-processing."""

from __future__ import annotations

from understudy.evaluation.ceilings import CEILINGS, ceilings
from understudy.evaluation.classify import (
    PROTOCOLS,
    Protocol,
    Scores,
    judge,
    sklearn_scores,
    train_and_test,
)
from understudy.evaluation.fidelity import Fidelity, fidelity

__all__ = [
    "CEILINGS",
    "PROTOCOLS",
    "Fidelity",
    "Protocol",
    "Scores",
    "ceilings",
    "fidelity",
    "judge",
    "sklearn_scores",
    "train_and_test",
]
