"""Pictures to write and read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.pictures import Pictures


@pytest.fixture(params=["grey", "colour"])
def pictures(tmp_path: Path, request: pytest.FixtureRequest) -> Pictures:
    return Pictures(tmp_path, request.param == "colour")


@pytest.fixture
def grey(tmp_path: Path) -> Pictures:
    return Pictures(tmp_path, False)


@pytest.fixture
def colour(tmp_path: Path) -> Pictures:
    return Pictures(tmp_path, True)
