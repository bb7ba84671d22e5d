"""Say where work runs. An engine can never change a guarantee, only how long it takes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from understudy.errors import BadConfiguration

Progress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what is being done)."""


def silent(done: int, total: int, text: str) -> None:
    """Report progress to nobody."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Choose a device and how many records are worked on at a time.

    ``device`` "auto" takes CUDA where there is one. ``chunk`` bounds memory: at most so many
    records pass through a network at once; ``None`` picks a size for the device. Answers do not
    depend on it: private sums are exact on the gate's grid.
    """

    device: str = "auto"
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise BadConfiguration(f"chunk must be at least 1: {self.chunk}.")
        try:
            chosen = self.torch_device
        except RuntimeError as error:
            raise BadConfiguration(f"There is no device '{self.device}': {error}.") from error
        if chosen.type == "cuda" and not torch.cuda.is_available():
            raise BadConfiguration("device='cuda' was asked for, but torch sees no CUDA device.")

    @property
    def torch_device(self) -> torch.device:
        """Resolve "auto"."""
        if self.device != "auto":
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def records_at_once(self) -> int:
        """Return the chunk in force."""
        return self.chunk or (2048 if self.torch_device.type == "cuda" else 128)

    def describe(self) -> dict[str, str]:
        """Return what a report says about the machine."""
        device = self.torch_device
        name = (
            torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else f"{os.cpu_count()} CPU cores"
        )
        return {"device": str(device), "hardware": name, "torch": torch.__version__}
