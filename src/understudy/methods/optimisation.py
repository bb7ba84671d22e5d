"""Fit images to noisy class sums, on a GPU as one recorded graph a step. Post-processing: free."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from understudy.data.synthetic import SyntheticSet
from understudy.engine import Progress, captured, silent
from understudy.errors import ReleaseError
from understudy.methods.auxiliary import digest
from understudy.methods.signals import Extractor, Signal
from understudy.nets.draw import public_seed
from understudy.ops.bound import bound
from understudy.ops.expand import PARTS, expand
from understudy.ops.match import matching_loss
from understudy.ops.pieces import piece
from understudy.privacy.durable import write_durably
from understudy.privacy.public import Public

__all__ = ["Fit", "Optimisation", "Watch", "optimise"]

Watch = Callable[[int, SyntheticSet], None]
"""Called with (steps done, the set as it is), to look at it on the way."""


CPU_CACHE_BYTES = 256 * 2**20
"""Rebuilt signals that may be kept at hand in a computer's own memory."""


@dataclass(frozen=True, kw_only=True)
class Optimisation:
    """Say how images are fitted to the signals: SGD with momentum on the pixels.

    ``order``: stored signals one after the other (from the first again at the end), or at random.
    ``average``: decay of the exponential moving average that is returned instead of the last
    images; 0 for none. ``start``: standard deviation of the first images.
    """

    steps: int
    learning_rate: float = 1.0
    momentum: float = 0.5
    cosine: bool = False
    average: float = 0.0
    order: Literal["in turn", "random"] = "in turn"
    expand: bool = False
    start: float = 1.0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from zero."""
        fall = 0.5 * (1 + math.cos(math.pi * step / self.steps)) if self.cosine else 1.0
        return self.learning_rate * fall

    def schedule(self, signals: int, seed: int) -> Sequence[int]:
        """Return which signal each step looks at."""
        if self.order == "in turn":
            return [step % signals for step in range(self.steps)]
        generator = torch.Generator().manual_seed(public_seed(seed, "order"))
        picked: list[int] = torch.randint(signals, (self.steps,), generator=generator).tolist()
        return picked


def optimise(
    targets: Tensor,
    extractor: Extractor,
    how: Optimisation,
    *,
    images_per_class: int | Sequence[int],
    weight: float,
    clip_norm: float | None,
    progress: Progress = silent,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = 1000,
    watch: Watch | None = None,
) -> SyntheticSet:
    """Fit images to noisy class sums and return them, class by class.

    ``images_per_class`` is one number M, or one M_c for each class. Per step, with one signal i
    and all classes at once: loss = sum over c of
    ``||weight / M_c x sum_j clip(features_i(s_j)) - targets[i, c]||^2``. With a ``checkpoint``
    file the state is written every so many steps; a later call with the same arguments goes on
    from there, to the same result as an uninterrupted one. ``watch`` sees the set as often.
    """
    public, device = extractor.public, extractor.device
    how = dataclasses.replace(how, expand=how.expand and public.is_image)
    classes = len(public.classes)
    counts = torch.tensor(images_per_class).expand(classes)
    shown = counts * (PARTS if how.expand else 1)
    labels = torch.arange(classes).repeat_interleave(shown)
    state = _State.first(public, int(counts.sum()), how, extractor.seed, device)
    identity = _identity(targets, extractor, how, counts.tolist(), weight, clip_norm)
    file = None if checkpoint is None else Path(checkpoint)
    if file is not None:
        state = _State.read(file, identity, state)
    at_hand = max(1, min(len(targets), cache_bytes(device) // extractor.bytes_each))
    look = functools.lru_cache(maxsize=at_hand)(extractor.signal)

    schedule = how.schedule(len(targets), extractor.seed)
    targets, own = targets.to(device), labels.to(device)
    members = F.one_hot(own).T.to(targets.dtype)  # (classes, images): adds up each class
    sizes = shown.to(device)[:, None]
    report = max(1, how.steps // 100)
    at = _Place(look(schedule[0]), targets[schedule[0]], device)

    def step() -> None:
        images = state.images.detach().requires_grad_()
        pictures = expand(images) if how.expand else images
        features = _in_pieces(at.signal, pictures, own)
        if clip_norm is not None:
            features = bound(features, clip_norm)
        means = members @ features / sizes
        loss = matching_loss(means[:, None], at.target, weight)
        (gradient,) = torch.autograd.grad(loss, images)
        state.advance(gradient, loss, how)

    go = captured(step, device, state.tensors())
    for done in range(state.step + 1, how.steps + 1):
        at.move(look(schedule[done - 1]), targets[schedule[done - 1]])
        state.rate.fill_(how.rate(done - 1))
        go()
        state.step = done
        if done % report == 0 or done == how.steps:
            progress(done, how.steps, f"matching loss {state.loss.item():.4g}")
        if done % every == 0 or done == how.steps:
            if file is not None:
                state.write(file, identity)
            if watch is not None:
                watch(done, state.show(public, how, labels))
    return state.show(public, how, labels)


class _Place:
    """Hold the signal and the target a step looks at: on a GPU always in the same memory."""

    def __init__(self, signal: Signal, target: Tensor, device: torch.device) -> None:
        self._fixed = device.type == "cuda"
        self.signal = signal.own_copy() if self._fixed else signal
        self.target = target.clone() if self._fixed else target

    def move(self, signal: Signal, target: Tensor) -> None:
        if self._fixed:
            self.signal.become(signal)
            self.target.copy_(target)
        else:
            self.signal, self.target = signal, target


def cache_bytes(device: torch.device) -> int:
    """Return how much memory rebuilt signals may take to be kept at hand."""
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    return torch.cuda.mem_get_info(device)[0] // 4


def _in_pieces(signal: Signal, pictures: Tensor, labels: Tensor) -> Tensor:
    """Extract features a few pictures at a time on a CPU, all at once elsewhere."""
    some = zip(torch.split(pictures, piece(pictures)), torch.split(labels, piece(pictures)))
    return torch.cat([signal.features(x, signal.draws_of(y), y) for x, y in some])


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Say what images are fitted to: noisy class sums (signals, classes, features), and how.

    ``weight`` is the number of records a target sums up, in the scale of the loss.
    """

    targets: Tensor
    weight: float
    how: Optimisation


@dataclass
class _State:
    """Hold all an optimisation needs to go on: images, velocity, average, steps done.

    Tensors are changed in place and never replaced: a recorded step knows them by their memory.
    """

    images: Tensor
    velocity: Tensor
    average: Tensor
    step: int
    rate: Tensor = dataclasses.field(init=False)
    loss: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.rate, self.loss = (torch.zeros((), device=self.images.device) for _ in range(2))

    @classmethod
    def first(
        cls, public: Public, count: int, how: Optimisation, seed: int, device: torch.device
    ) -> _State:
        generator = torch.Generator().manual_seed(public_seed(seed, "start"))
        images = torch.randn(count, *public.shape, generator=generator).mul_(how.start).to(device)
        return cls(images, torch.zeros_like(images), images.clone(), 0)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return what a step changes."""
        return self.images, self.velocity, self.average, self.loss

    @torch.no_grad()
    def advance(self, gradient: Tensor, loss: Tensor, how: Optimisation) -> None:
        """Take one step of SGD with momentum, at the rate that was set."""
        self.velocity.mul_(how.momentum).add_(gradient)
        self.images.sub_(self.rate * self.velocity)
        if how.average > 0:
            self.average.lerp_(self.images, 1 - how.average)
        self.loss.copy_(loss)

    def show(self, public: Public, how: Optimisation, labels: Tensor) -> SyntheticSet:
        """Return the set as it is now; expanded images are emitted, four for each stored one."""
        images = (self.average if how.average > 0 else self.images).detach().cpu().clone()
        return SyntheticSet(expand(images) if how.expand else images, labels, public)

    def write(self, file: Path, identity: str) -> None:
        """Replace the checkpoint in one step, so that there is always a whole one."""
        tensors = {"images": self.images, "velocity": self.velocity, "average": self.average}
        content = save(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            metadata={"identity": identity, "step": str(self.step)},
        )
        write_durably(file, content)

    @classmethod
    def read(cls, file: Path, identity: str, first: _State) -> _State:
        """Take up a checkpoint of the same optimisation, or start at the first state."""
        if not file.exists():
            return first
        try:
            with safe_open(str(file), framework="pt") as stored:
                metadata = stored.metadata() or {}
                if metadata.get("identity") != identity:
                    raise ReleaseError(
                        f"{file} is a checkpoint of another optimisation (other signals or "
                        "settings). Remove it, or name another file."
                    )
                names = ("images", "velocity", "average")
                images, velocity, average = (
                    stored.get_tensor(name).to(first.images.device) for name in names
                )
                return cls(images, velocity, average, int(metadata["step"]))
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise ReleaseError(f"{file} is not a whole checkpoint: {error}. Remove it.") from error


def _identity(targets: Tensor, extractor: Extractor, how: Optimisation, *rest: object) -> str:
    """Digest all an optimisation depends on."""
    plain = {
        "extractor": {
            field.name: repr(getattr(extractor, field.name))
            for field in dataclasses.fields(extractor)
            if field.name not in ("auxiliary", "device", "precision")
        },
        "auxiliary": None if extractor.auxiliary is None else digest(extractor.auxiliary.cpu()),
        "how": dataclasses.asdict(how),
        "rest": [repr(value) for value in rest],
        "targets": digest(targets.cpu()),
    }
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
