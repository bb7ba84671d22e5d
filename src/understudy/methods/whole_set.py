"""Whole-set plan: few questions to all records, then any amount of optimisation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from understudy.engine import Engine
from understudy.methods.base import Preset
from understudy.methods.matching import Fit, Matching, Optimisation
from understudy.privacy.accounting import Budget
from understudy.privacy.events import Plan, Query, Step
from understudy.privacy.public import Public
from understudy.privacy.release import Release

GROUP = 50.0
"""Weight of the loss: that of NDPDC with a group of 50, so that its learning rate carries over."""

RELATIVE_NOISE = 0.2
"""Norm of the noise on a class mean, in clip norms, up to which more queries are asked."""

FEWEST, MOST = 1, 400


@dataclass(frozen=True, kw_only=True)
class WholeSet(Matching):
    """Ask I queries over ALL records (design, section 8), and match the stored answers.

    For i = 1..I, with a random network and an augmentation draw per class::

        target_i = (sum of clip(Phi_i(A_i(x))) over each class + N(0, I sigma^2 G^2)) / N_c

    then S <- S - eta grad ||mean of clip(Phi_i(A_i(s))) - target_i||^2, i drawn at random, for as
    many steps as we like. Nothing is sampled from the records, so no noise is spent on hiding who
    was asked, and the composition of I Gaussians is exact.

    ``noise_multiplier`` is that of the *whole release*: each of the I queries gets sqrt(I) times
    as much, so I Gaussians cost what one with ``noise_multiplier`` would, whatever I is.

    ``queries=None`` chooses I from public facts by :meth:`rule`.

    Guarantee: I-fold composition of the Gaussian mechanism with sensitivity 1 (one record adds
    one clipped vector to one class), which equals one Gaussian with ``noise_multiplier``.
    """

    name: ClassVar[str] = "whole-set"
    title: ClassVar[str] = "Whole-set feature matching"
    source: ClassVar[str] = (
        "understudy's own plan; loss of Zheng and Li 2024, Algorithm 2; decoupled optimisation of "
        "Dosser, Section 3.2; partition and expand of IDM (Zhao et al. 2023)"
    )
    departures: ClassVar[tuple[str, ...]] = ()
    trains_generator: ClassVar[bool] = True

    _PIXELS: ClassVar[Mapping[str, Any]] = {
        "features": "pixels",
        "clip_norm": 4.0,
        "augmentation": "",
        "queries": 1,
        "expand": False,
        "learning_rate": 0.002,
        "start": 0.5,
        "steps": 300,
    }

    presets: ClassVar[Mapping[str, Preset]] = {
        "gray": Preset(
            {"queries": 50},
            "Epsilon 1, partition-and-expand, on an H200: 97.1 % on MNIST and 81.1 % on Fashion-MNIST "
            "with 10 stored images per class, 97.3 and 81.7 % with 50 (two releases each, "
            "docs/results.md). For a GPU.",
        ),
        "color": Preset(
            {
                "queries": 100,
                "steps": 8000,
                "augmentation": "color_crop_cutout_flip_scale_rotate",
            },
            "Epsilon 1, partition-and-expand, on an H200: 49.4 % on CIFAR-10 with 10 stored images "
            "per class, 51.4 % with 50 (two releases each, docs/results.md). For a GPU.",
        ),
        "laptop": Preset(
            {"width": 32, "queries": 10, "steps": 800},
            "MNIST at epsilon 1 on two CPU cores: 95.3 % (two releases, three networks each, quick "
            "protocol; benchmarks/results/whole_set.jsonl) in 6 minutes, one network's evaluation "
            "included. Width, queries and steps were set by the time they take.",
        ),
        "small": Preset(
            _PIXELS,
            "For about a hundred 8x8 pictures a class: one noisy mean of the pixels, since noise "
            "leaves room for no more. Chosen on scikit-learn's digits, a public benchmark, by "
            "accuracy there: see benchmarks/results/whole_set.jsonl.",
        ),
        "table": Preset(
            {**_PIXELS, "images_per_class": 50},
            "The same for tables: one noisy mean of the encoded cells.",
        ),
    }
    miniature: ClassVar[Mapping[str, Any]] = {
        "queries": 2,
        "images_per_class": 2,
        "steps": 6,
        "width": 4,
    }

    noise_multiplier: float = 3.7307  # one Gaussian at epsilon 1, delta 1e-5
    queries: int | None = None  # I
    images_per_class: int = 10
    expand: bool = True
    steps: int = 4000
    start: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            self.queries is None or self.queries >= 1, f"queries is {self.queries}; at least 1"
        )
        self._require(self.steps >= 1, f"steps is {self.steps}; at least 1")
        self._require(self.start > 0, f"start must be positive: {self.start}")

    @classmethod
    def suited(cls, public: Public, budget: Budget | None, engine: Engine) -> str | None:
        """Choose by class sizes, channels and device; never by an accuracy on the records.

        Where the rule leaves no room for even one query of network features, pixels are asked
        instead. A CPU gets the laptop's network.
        """
        if public.counts is None:
            return None
        if not public.is_image:
            return "table"
        plain = cls() if budget is None else cls().calibrated(public, budget)
        if min(public.shape[1:]) < 8 or plain.reach(public) < 1:
            return "small"
        if engine.torch_device.type == "cpu":
            return "laptop"
        return "gray" if public.shape[0] == 1 else "color"

    def rule(self, public: Public) -> int:
        """Choose I: the most queries whose noise stays a fifth of what they measure.

        With I queries the noise on a class mean has norm ``sqrt(I F) sigma / N_c`` in clip norms
        (F features, N_c the smallest class), and clipped means have norm about 1. We take the
        largest I between 1 and 400 that keeps it below 0.2: for the papers' network (F = 2048) at
        epsilon 1 and 6,000 records a class, 50. The share 0.2 was set where 50 queries did well
        on MNIST and Fashion-MNIST, public benchmarks (design, section 8). On a user's records
        only the declared sizes, the network's width and the budget enter, never an accuracy.
        """
        return min(max(math.floor(self.reach(public)), FEWEST), MOST)

    def reach(self, public: Public) -> float:
        """Return how many queries keep the noise a fifth of what they measure."""
        if self.noise_multiplier == 0:
            return MOST
        share = RELATIVE_NOISE * min(public.sizes) / self.noise_multiplier
        return share**2 / self.extractor(public).features

    def query(self, public: Public) -> Query:
        """Ask for the class sums over every record."""
        count = self.queries or self.rule(public)
        return Query(
            name="feature sums of every class",
            bound=self.bound(public),
            noise_multiplier=self.noise_multiplier * math.sqrt(count),
            per_class=True,
        )

    def plan(self, public: Public) -> Plan:
        """Train the generator of auxiliary images, if there is one; ask I times."""
        times = self.queries or self.rule(public)
        return self.planned(public, Step(self.query(public), times=times))

    def fit(self, release: Release) -> Fit:
        """Match the stored means, at random, with a falling rate."""
        sizes = torch.tensor(release.public.sizes, dtype=torch.float32)
        return Fit(
            targets=release.signals["sums"] * (GROUP / sizes)[:, None],
            weight=GROUP,
            how=Optimisation(
                steps=self.steps,
                learning_rate=self.learning_rate,
                momentum=self.momentum,
                cosine=True,
                order="random",
                expand=self.expand,
                start=self.start,
            ),
        )
