"""Measure what the machine can do, and place a step under it (the roofline of Williams et al. 2009).

A step must do some arithmetic and moves some bytes; neither can be done faster than the machine
does it where nothing else is in the way: a large product of matrices, a large copy. The larger of
the two times is the floor, and floor over time the fraction reached.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Ceilings:
    """Hold measured rates: arithmetic by precision, and bytes read plus written."""

    flop_per_second: dict[str, float]
    bytes_per_second: float

    @staticmethod
    @functools.cache
    def measured(device: torch.device, size: str) -> Ceilings:
        """Multiply large random matrices and copy a large random tensor."""
        on_gpu = device.type == "cuda"
        side, numbers = GPU_SIZE if on_gpu else CPU_SIZES[size]
        rates = {}
        for precision, (kind, tf32) in _PRECISIONS.items():
            if tf32 and not on_gpu:
                continue
            a, b = (torch.randn(side, side, device=device).to(kind) for _ in range(2))
            with float32_as(tf32=tf32):
                rates[precision] = (
                    2 * side**3 / _seconds(functools.partial(torch.matmul, a, b), device)
                )
        source = torch.randn(numbers, device=device)
        target = torch.empty_like(source)
        seconds = _seconds(lambda: target.copy_(source), device)
        return Ceilings(rates, 2 * source.numel() * source.element_size() / seconds)


GPU_SIZE = (8192, 2**30)
"""Side of the matrices and numbers copied: many times an H200's 60 MB of cache."""

CPU_SIZES = {"full": (2048, 2**26), "small": (1024, 2**25), "tiny": (256, 2**20)}
"""A last-level cache holds 32 MiB here, 2^23 numbers; tiny sizes are for tests only."""

_PRECISIONS = {
    "fp32": (torch.float32, False),
    "tf32": (torch.float32, True),
    "bf16": (torch.bfloat16, False),
}


@contextmanager
def float32_as(*, tf32: bool) -> Iterator[None]:
    """Let a GPU compute float32 products and convolutions in tf32, or not, for a while."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the median time of seven runs, after two."""
    times = []
    for _ in range(9):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Say how near a step comes to the machine's ceilings."""

    flop: float
    bytes: float
    precision: str
    ceilings: Ceilings
    arithmetic_ms: float
    traffic_ms: float
    bound_by: str
    fraction: float

    @classmethod
    def of(
        cls, ceilings: Ceilings, *, flop: float, moved: float, seconds: float, precision: str
    ) -> Roofline:
        """Compare a measured time with the times arithmetic and traffic need at least."""
        arithmetic = flop / ceilings.flop_per_second[precision]
        traffic = moved / ceilings.bytes_per_second
        return cls(
            flop=flop,
            bytes=moved,
            precision=precision,
            ceilings=ceilings,
            arithmetic_ms=round(1000 * arithmetic, 4),
            traffic_ms=round(1000 * traffic, 4),
            bound_by="arithmetic" if arithmetic >= traffic else "traffic",
            fraction=round(max(arithmetic, traffic) / seconds, 4),
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)
