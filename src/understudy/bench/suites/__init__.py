"""Every suite, by name: ``SUITES``. Each module declares a paper's tables, or ours."""

from __future__ import annotations

from collections.abc import Mapping

from understudy.bench.cells import Suite
from understudy.bench.suites import datalens, dosser, dpaf, dpdc, guard, ours, psg
from understudy.bench.suites.reasons import REASONS

SUITES: Mapping[str, Suite] = {
    suite.name: suite
    for suite in (
        *ours.SUITES,
        *dpdc.SUITES,
        *dosser.SUITES,
        *psg.SUITES,
        *datalens.SUITES,
        *dpaf.SUITES,
        *guard.SUITES,
    )
}

__all__ = ["REASONS", "SUITES"]
