"""Train a small diffusion model through the gate, for pictures that resemble the private ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad

from understudy.errors import BadConfiguration, UnknownName
from understudy.nets.diffusion import GROUPS, Denoiser, Draws
from understudy.ops.gradients import split
from understudy.privacy.events import Query, Step
from understudy.privacy.gate import Contribution, Gate
from understudy.privacy.public import Public

__all__ = ["Diffusion"]

Seed = Callable[..., int]
"""Derive a public seed for a place named by words and numbers."""

POOL = 512
"""Public noise pictures a step draws from: many more than a record looks at, and little memory."""

EVERY = 50
"""Steps between checkpoints, which take the place of as many journalled gradients."""


@dataclass(frozen=True, kw_only=True)
class Diffusion:
    """Make auxiliary pictures by a diffusion model trained with DP-SGD (Dosser, Sections 3.3, D.2).

    The model is DPDM's in small (Dockhorn et al., TMLR 2023). For t = 1..T draw B records by
    Poisson inclusion at rate B / N and release::

        g = (sum of clip(gradient of loss(w, record), C) + N(0, sigma^2 C^2)) / B

    where the loss is the denoising error of ONE record, averaged over K noisy versions of it
    (their "noise multiplicity"), and move w by Adam. A moving average of w then makes ``images``
    pictures by DDIM, picture j of class j mod classes. The method that asked for them journals,
    stores and uses them like public ones.

    ``share`` is the part of the budget the training takes, in units of inverse noise variance
    (mu^2 of Gaussian differential privacy, which adds up): see :func:`log_weight`.

    Defaults: clip norm, optimiser and sampler as in DPDM's published MNIST configuration
    (4,096 records, 300 epochs, 32 noisy versions, rate 3e-4, average 0.999). The work is a
    seventieth of theirs, since pictures that only span a subspace need not look right: fewer
    records, versions and steps, and so a larger rate and a shorter average.

    Guarantee: adaptive composition of T sampled Gaussian mechanisms with q = B / N and noise
    multiplier sigma; what follows is post-processing.
    """

    share: float = 0.06  # epsilon 0.2 : 0.8, as in Dosser, Section 4.1: mu^2 is 0.0030 : 0.0465
    steps: int = 1000  # T
    expected_batch: float = 1024.0  # B, of all classes together
    noise_draws: int = 8  # K
    clip_norm: float = 1.0  # C
    learning_rate: float = 1e-3
    average: float = 0.99
    width: int = 16
    images: int = 1000  # Dosser, Section 4.1
    sampling_steps: int = 50

    NAME = "diffusion"
    DEPARTURES = (
        "The generator's share of the budget is declared in units of inverse noise variance, and "
        "one accountant composes the whole; Theorem 2 adds up (epsilon, delta) of the two parts.",
        "The generator is a small U-Net with the cosine noise schedule and fewer steps; the paper "
        "trains NCSN++.",
    )

    def __post_init__(self) -> None:
        _require(0 < self.share < 1, f"share lies between 0 and 1, not at {self.share}")
        for field in ("steps", "noise_draws", "width", "images", "sampling_steps"):
            value = getattr(self, field)
            _require(value >= 1, f"{field} is {value}; at least 1")
        for field in ("expected_batch", "clip_norm", "learning_rate"):
            value = getattr(self, field)
            _require(math.isfinite(value) and value > 0, f"{field} must be positive: {value}")
        _require(self.width % GROUPS == 0, f"width is a multiple of {GROUPS}, not {self.width}")
        _require(self.noise_draws <= POOL, f"noise_draws is {self.noise_draws}; at most {POOL}")
        _require(0 <= self.average < 1, f"average must be in [0, 1): {self.average}")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Diffusion:
        """Build from plain values; an unknown field is refused with the nearest name."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise UnknownName("field of the auxiliary generator", key, known)
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Return what a recipe keeps."""
        return {self.NAME: dataclasses.asdict(self)}

    def training(self, public: Public, main: Step) -> Step:
        """Plan T sampled gradients, with the noise that gives them their share beside ``main``."""
        if not public.is_image:
            raise BadConfiguration(
                f"A diffusion model makes pictures; '{public.name}' has records of shape "
                f"{public.shape}. Leave auxiliary out, or give records of your own."
            )
        asked = Query(
            name="denoising gradients of a batch",
            bound=self.clip_norm,
            noise_multiplier=0.0,
            expected_batch=self.expected_batch,
        )
        ours = self.share / (1 - self.share)
        target = log_weight(main.query, main.times, public) + math.log(ours)
        noise = noise_for(target, asked, self.steps, public)
        return Step(dataclasses.replace(asked, noise_multiplier=noise), times=self.steps)

    def pictures(self, gate: Gate, query: Query, seed: Seed) -> Tensor:
        """Train on the records, through the gate, and make the pictures. Resumes a killed run."""
        public, device = gate.public, gate.engine.torch_device
        kept = gate.resume() or {}
        if "pictures" in kept:
            return kept["pictures"]
        net = Denoiser(public.shape, len(public.classes), self.width)
        training = _Training(net.draw(seed("denoiser"), device), self, kept)
        contribution = denoising_gradient(net, training.parameters(), self.noise_draws)
        for t in range(training.done, self.steps):
            draws = net.pool(seed("denoising noise", t), POOL, device)
            state = {"weights": training.weights, **draws._asdict()}
            answer = gate.noisy_sum(query, contribution, state).value
            training.step(answer / self.expected_batch)
            if training.done % EVERY == 0:
                gate.checkpoint(training.state())
        labels = torch.arange(self.images) % len(public.classes)
        weights = training.parameters(averaged=True)
        made = net.sample(weights, labels, seed("auxiliary pictures"), self.sampling_steps)
        gate.checkpoint({"pictures": made})
        return made


def denoising_gradient(net: Denoiser, like: Mapping[str, Tensor], count: int) -> Contribution:
    """Return the map from the state and ONE record to the gradient of its denoising error.

    The state holds the weights, as one vector cut up as ``like`` is, and a pool of draws.
    """
    names = tuple(like)

    def gradient(state: Mapping[str, Tensor], record: Tensor, label: Tensor) -> Tensor:
        draws = Draws(*(state[name] for name in Draws._fields))
        values = split(state["weights"], like, names)
        parts = grad(net.loss)(values, record, label, draws, count)
        return torch.cat([parts[name].flatten() for name in names])

    return gradient


class _Training:
    """Hold the weights as one vector, their moving average and Adam's moments."""

    def __init__(
        self, first: Mapping[str, Tensor], how: Diffusion, kept: Mapping[str, Tensor]
    ) -> None:
        self._like, self._names, self._how = first, tuple(first), how
        drawn = torch.cat([value.flatten() for value in first.values()])
        self.weights = kept.get("weights", drawn).clone()
        self._average = kept.get("average", drawn).clone()
        self._adam = torch.optim.Adam([self.weights], lr=how.learning_rate)
        if kept:
            moments = {name: kept[name] for name in ("step", "exp_avg", "exp_avg_sq")}
            moments["step"] = moments["step"].cpu()
            self._adam.state[self.weights] = moments
        self.done = int(kept["step"]) if kept else 0

    def parameters(self, *, averaged: bool = False) -> dict[str, Tensor]:
        """Return the weights by name."""
        return split(self._average if averaged else self.weights, self._like, self._names)

    def step(self, gradient: Tensor) -> None:
        """Move by Adam. The average follows faster at first, so that it forgets the start."""
        self.weights.grad = gradient
        self._adam.step()
        self.done += 1
        decay = min(self._how.average, self.done / (self.done + 9))
        self._average.lerp_(self.weights, 1 - decay)

    def state(self) -> dict[str, Tensor]:
        """Return all it takes to go on: a function of answers and public values."""
        moments = self._adam.state[self.weights]
        return {"weights": self.weights, "average": self._average, **moments}


# Shares


def log_weight(query: Query, times: int, public: Public) -> float:
    """Return log mu^2, where the answers together are about as telling as one N(mu, 1) for N(0, 1).

    mu^2 = times / sigma^2 for queries of all records. For sampled ones mu^2 = times q^2
    (exp(1 / sigma^2) - 1), the central limit of Bu, Dong, Long and Su, "Deep Learning with
    Gaussian Differential Privacy", 2020. It only divides a budget: the price is the accountant's.
    """
    if query.noise_multiplier == 0:
        return math.inf
    each = query.noise_multiplier**-2
    if query.expected_batch is None:
        return math.log(times) + math.log(each)
    rate = max(query.rates(public))
    return math.log(times) + 2 * math.log(rate) + each + math.log(-math.expm1(-each))


def noise_for(log_weight: float, query: Query, times: int, public: Public) -> float:
    """Return the noise multiplier that gives a sampled query this weight."""
    if math.isinf(log_weight):
        return 0.0
    spread = log_weight - math.log(times) - 2 * math.log(max(query.rates(public)))
    return float(np.logaddexp(0.0, spread) ** -0.5)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise BadConfiguration(f"The generator of auxiliary pictures: {message}.")
