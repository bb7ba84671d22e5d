"""LDPDC: each synthetic image is a noisy mean of a random group of real ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from understudy.data.synthetic import SyntheticSet
from understudy.engine import Engine, Progress, silent
from understudy.methods.base import Method
from understudy.privacy.events import Plan, Query, Step
from understudy.privacy.gate import Gate
from understudy.privacy.public import Public
from understudy.privacy.release import Release


@dataclass(frozen=True, kw_only=True)
class LDPDC(Method):
    """Condense linearly (Zheng and Li 2024, Algorithm 1).

    For each class c and j = 1..M: draw a group from the class by Poisson inclusion at rate
    L / N_c, and release ``s = (sum of the group + N(0, sigma^2 I)) / L`` (Equation 7).

    Guarantee: Theorem III.1 with q = max L / N_c and noise multiplier sigma / (b sqrt(d)).
    """

    name: ClassVar[str] = "ldpdc"
    title: ClassVar[str] = "Linear DP dataset condensation"
    source: ClassVar[str] = "Zheng and Li, AISCC 2024, Algorithm 1, Theorem III.1"
    departures: ClassVar[tuple[str, ...]] = (
        "Every record is clipped to norm b sqrt(d) by the gate, where the paper assumes it.",
        "Epsilon is computed with privacy loss distributions; the paper's Renyi figure is higher.",
    )

    miniature: ClassVar[Mapping[str, Any]] = {"images_per_class": 4, "group_size": 5.0}

    noise_multiplier: float = 1.0  # sigma / (b sqrt(d)); the paper's default (Section V-A)
    images_per_class: int = 50  # M
    group_size: float = 50.0  # L

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            self.images_per_class >= 1, f"images_per_class is {self.images_per_class}; at least 1"
        )
        self._require(self.group_size > 0, f"group_size must be positive: {self.group_size}")

    def query(self, public: Public) -> Query:
        """Ask for the sum of one random group of each class."""
        b = 1.0  # pixels lie in [-1, 1]
        return Query(
            name="sum of a group",
            bound=b * math.sqrt(public.dimension),
            noise_multiplier=self.noise_multiplier,
            expected_batch=self.group_size,
            per_class=True,
        )

    def plan(self, public: Public) -> Plan:
        """Ask once for every image of a class; all classes answer together."""
        return Plan(Step(self.query(public), times=self.images_per_class))

    def measure(self, gate: Gate) -> Release:
        """Draw M groups of every class and keep their noisy sums."""
        query = self.query(gate.public)
        sums = [
            gate.noisy_sum(query, lambda image, label: image).value
            for _ in range(self.images_per_class)
        ]
        return gate.release(
            signals={"sums": torch.stack(sums, dim=1)},
            recipe=self.recipe(),
            assumptions=self.assumptions,
            departures=self.departures,
        )

    def synthesise(
        self, release: Release, *, engine: Engine | None = None, progress: Progress = silent
    ) -> SyntheticSet:
        """Divide the noisy sums by the expected group size (Equation 7)."""
        sums = release.signals["sums"]  # (classes, M, *shape)
        classes, images_per_class = sums.shape[:2]
        return SyntheticSet(
            images=(sums / self.group_size).flatten(0, 1),
            labels=torch.arange(classes).repeat_interleave(images_per_class),
            public=release.public,
        )
