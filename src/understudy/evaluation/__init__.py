"""Judge a synthetic set by what it is good for. Everything here is post-processing.

The functions `ceilings` and `fidelity` are imported from the modules of the same names.
"""

from __future__ import annotations

from understudy.evaluation.ceilings import CEILINGS
from understudy.evaluation.classify import (
    PROTOCOLS,
    Protocol,
    Scores,
    judge,
    sklearn_scores,
    train_and_test,
)
from understudy.evaluation.fidelity import Fidelity

__all__ = [
    "CEILINGS",
    "PROTOCOLS",
    "Fidelity",
    "Protocol",
    "Scores",
    "judge",
    "sklearn_scores",
    "train_and_test",
]
