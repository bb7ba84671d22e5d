"""Fixtures of the privacy tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from understudy.privacy import accounting


@pytest.fixture(autouse=True)
def ledger_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the checks a place for throw-away ledgers."""
    monkeypatch.setenv("UNDERSTUDY_STATE_ROOT", str(tmp_path))


@pytest.fixture(autouse=True)
def forget_prices() -> Iterator[None]:
    """Price afresh, so that a price computed by broken code does not outlive its test."""
    accounting._epsilon.cache_clear()
    yield
    accounting._epsilon.cache_clear()
