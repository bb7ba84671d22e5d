"""Say how many pictures go through a network together."""

from __future__ import annotations

from torch import Tensor

__all__ = ["PIXELS", "piece"]

PIXELS = 16 * 32 * 32
"""A CPU is fastest on about sixteen 32x32 pictures at a time.

A ConvNet's largest map is then 8 MB: the allocator keeps it and the cache holds much of it.
"""


def piece(records: Tensor) -> int:
    """Return how many records to take at a time: all of them, unless pictures on a CPU."""
    if records.device.type != "cpu" or records.dim() != 4:
        return max(1, len(records))
    return max(1, PIXELS // (records.shape[-2] * records.shape[-1]))
