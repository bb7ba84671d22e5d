"""Shared fixtures: every test gets a state folder of its own and small real data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # Triton asks, when it is imported, whether to interpret
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sklearn.datasets import load_digits

from tests.fixtures import private, shared_data_folder
from understudy.privacy import PrivateDataset

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep ledgers and keys of a test away from the user's."""
    folder = tmp_path / "state"
    monkeypatch.setenv("UNDERSTUDY_STATE", str(folder))
    return folder


@pytest.fixture
def digits() -> PrivateDataset:
    """The 1797 handwritten digits that come with scikit-learn."""
    bunch = load_digits()
    images = (bunch.images * (255 / 16)).round().astype("uint8")[:, None]
    return private(images, bunch.target, name="digits")


@pytest.fixture
def shared_data() -> Path:
    """The folder of real datasets beside the checkout, or a skip that says what is missing."""
    folder = shared_data_folder()
    if folder is None:
        pytest.skip(
            "real datasets not found: set UNDERSTUDY_DATA or put them in ../shared/data "
            f"(looked from {os.getcwd()})"
        )
    return folder
