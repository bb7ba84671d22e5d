"""Say why a figure is more than two points from the published one, where that is known."""

from __future__ import annotations

from collections.abc import Mapping

REASONS: Mapping[tuple[str, str, str], str] = {}
"""(suite, row, column): the reason, once it was shown. A guess is no reason."""
