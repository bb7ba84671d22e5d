"""DM: distribution matching, without privacy, as the yardstick of the private methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from understudy.errors import BadConfiguration
from understudy.methods.base import Preset
from understudy.methods.matching import Fit, Matching, Optimisation
from understudy.privacy.accounting import Budget
from understudy.privacy.events import Event, Plan, Query, Step
from understudy.privacy.public import Public
from understudy.privacy.release import Release


@dataclass(frozen=True, kw_only=True)
class DM(Matching):
    """Match distributions (Zhao and Bilen, WACV 2023, Algorithm 1). NOT private.

    For i = 1..I: the mean of Phi_i(A_wic(x)) over a random group of each class, and one step of
    ``S <- S - eta grad sum_c ||mean of Phi_i(A_wic(s)) - mean of Phi_i(A_wic(x))||^2``.

    It takes the same path through the gate as the private methods, with no noise and with a bound
    that no feature vector can exceed, so its release says what it is: epsilon infinite.

    Guarantee: none.
    """

    name: ClassVar[str] = "dm"
    title: ClassVar[str] = "Distribution matching (not private)"
    source: ClassVar[str] = "Zhao and Bilen, WACV 2023, Algorithm 1"
    departures: ClassVar[tuple[str, ...]] = (
        "Groups are drawn by Poisson inclusion and divided by their expected size; the paper "
        "draws 256 of each class.",
        "Images start as noise, never as real records.",
    )

    presets: ClassVar[Mapping[str, Preset]] = {
        "paper": Preset(
            {},
            "Zhao and Bilen's defaults, 50 images per class, from noise: 98.4 % on MNIST, 86.9 % "
            "on Fashion-MNIST; 59.7 % on CIFAR-10 (add flips). Its sums take 1.6 GB for ten "
            "classes. About half a day on two CPU cores.",
        )
    }
    miniature: ClassVar[Mapping[str, Any]] = {
        "iterations": 4,
        "group_size": 5.0,
        "images_per_class": 2,
        "width": 4,
    }

    noise_multiplier: float = 0.0
    clip_norm: float | None = None
    iterations: int = 20_000
    group_size: float | None = 256.0  # None: the whole class every time

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.noise_multiplier == 0, "it adds no noise; for privacy choose 'ndpdc'")
        self._require(self.iterations >= 1, f"iterations is {self.iterations}; at least 1")
        self._require(
            self.group_size is None or self.group_size > 0,
            f"group_size must be positive: {self.group_size}",
        )

    def calibrated(self, public: Public, budget: Budget, *, earlier: tuple[Event, ...] = ()) -> DM:
        """Return itself for an infinite budget; no other can be met."""
        if budget.epsilon != float("inf"):
            raise BadConfiguration(
                f"DM is not private, so no noise makes it meet {budget}. Choose 'ndpdc', "
                "'whole-set' or 'dosser', or give epsilon=inf and keep the result to yourself."
            )
        return self

    def query(self, public: Public) -> Query:
        """Ask for the feature sum of a random group, or all, of each class."""
        return Query(
            name="feature sums, not private",
            bound=self.bound(public),
            noise_multiplier=0.0,
            expected_batch=self.group_size,
            per_class=True,
        )

    def plan(self, public: Public) -> Plan:
        """Ask once an iteration."""
        return Plan(Step(self.query(public), times=self.iterations))

    def fit(self, release: Release) -> Fit:
        """Match the means, once through, in order."""
        sums, sizes = release.signals["sums"], torch.tensor(release.public.sizes)
        expected = sizes.float() if self.group_size is None else self.group_size * sizes.sign()
        return Fit(
            targets=sums / expected[:, None],
            weight=1.0,
            how=Optimisation(
                steps=len(sums),
                learning_rate=self.learning_rate,
                momentum=self.momentum,
                expand=self.expand,
            ),
        )
