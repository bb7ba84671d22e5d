"""Judge a synthetic set by what it is good for. Everything here is post-processing."""

from __future__ import annotations

from understudy.evaluation.classify import (
    PROTOCOLS,
    Protocol,
    Scores,
    judge,
    sklearn_scores,
    train_and_test,
)

__all__ = ["PROTOCOLS", "Protocol", "Scores", "judge", "sklearn_scores", "train_and_test"]
