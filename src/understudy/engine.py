"""Say where work runs. An engine can never change a guarantee, only how long it takes."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from understudy.errors import BadConfiguration

Progress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what is being done)."""

Precision = Literal["auto", "float32", "bfloat16"]


def silent(done: int, total: int, text: str) -> None:
    """Report progress to nobody."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Choose a device and how many records are worked on at a time.

    ``device`` "auto" takes CUDA where there is one. ``chunk`` bounds memory: at most so many
    records pass through a network at once; ``None`` picks a size for the device. Answers do not
    depend on it: private sums are exact on the gate's grid.

    ``precision`` is what ConvNets are computed in: "auto" takes bfloat16 with the fused kernels of
    ``ops.fused`` on a GPU that has it, else float32 (on a GPU, TF32 as PyTorch's convolutions are by
    default). Images, sums, clipping and noise keep their own precision.
    """

    device: str = "auto"
    chunk: int | None = None
    precision: Precision = "auto"

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise BadConfiguration(
                f"precision must be auto, float32 or bfloat16, not '{self.precision}'."
            )
        if self.chunk is not None and self.chunk < 1:
            raise BadConfiguration(f"chunk must be at least 1: {self.chunk}.")
        try:
            chosen = self.torch_device
        except RuntimeError as error:
            raise BadConfiguration(
                f"There is no device '{self.device}'. Known: auto, cpu, cuda, cuda:1 and so on."
            ) from error
        if chosen.type == "cuda" and not torch.cuda.is_available():
            raise BadConfiguration("device='cuda' was asked for, but torch sees no CUDA device.")

    @property
    def torch_device(self) -> torch.device:
        """Resolve "auto"."""
        if self.device != "auto":
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Resolve the precision."""
        if self.precision == "auto":
            device = self.torch_device
            fast = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
            return torch.bfloat16 if fast else torch.float32
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32

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


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the computer's own memory on the device, without waiting for the device."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def fetched(tensor: Tensor) -> Tensor:
    """Return a tensor in the computer's own memory, by way of pages a GPU can write to at speed."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    here.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return here


def abreast(works: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Do works that do not depend on each other: on a GPU side by side, a stream each."""
    if device.type != "cuda" or len(works) == 1:
        for work in works:
            work()
        return
    here = torch.cuda.current_stream(device)
    streams = [torch.cuda.Stream(device) for _ in works]  # type: ignore[no-untyped-call, unused-ignore]
    for work, stream in zip(works, streams):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            work()
    for stream in streams:
        here.wait_stream(stream)


WARM_UPS = 3
"""Runs before a recording, in which libraries choose their kernels and Triton compiles its own."""


def captured(
    step: Callable[[], None],
    device: torch.device,
    changed: Sequence[Tensor] = (),
    generators: Sequence[torch.Generator] = (),
) -> Callable[[], None]:
    """Record a step once and return what replays it; on a CPU, the step itself.

    A replay starts hundreds of kernels at the cost of one call. ``step`` takes and returns nothing:
    it reads tensors that are filled from outside and changes, in place, tensors that stay where they
    are; it never waits for the device, nor decides by what a tensor holds. ``changed`` are the
    tensors it changes, ``generators`` those it draws from: both are put back after the runs that
    warm up, and every replay draws anew.
    """
    if device.type != "cuda":
        return step
    before = [tensor.clone() for tensor in changed]
    drawn = [generator.get_state() for generator in generators]
    aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        for _ in range(WARM_UPS):
            step()
    here = torch.cuda.current_stream(device)
    here.wait_stream(aside)
    waiting = _waits(step, aside)
    for tensor, value in zip(changed, before):
        tensor.copy_(value)
    for generator, state in zip(generators, drawn):
        generator.set_state(state)
    if waiting:
        warnings.warn(f"A step waits for the device and runs unrecorded: {waiting}", stacklevel=2)
        return step
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    replay: Callable[[], None] = graph.replay
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # freeing what belongs to another recording would spoil this one
    try:
        with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
            step()
    except RuntimeError as error:
        torch.cuda.set_stream(here)  # a recording that fails leaves its own stream in place
        warnings.warn(f"A step could not be recorded and runs unrecorded: {error}", stacklevel=2)
        replay = step
    finally:
        if collecting:
            gc.enable()
    return replay


def _waits(step: Callable[[], None], aside: torch.cuda.Stream) -> RuntimeError | None:
    """Run a step once and return what it waits for the device for, if anything.

    A recording that fails half-way can leave the process unable to make another one.
    """
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode says of itself that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        with torch.cuda.stream(aside):
            step()
    except RuntimeError as error:
        return error
    finally:
        torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.current_stream().wait_stream(aside)
    return None
