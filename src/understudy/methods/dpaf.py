"""DPAF: a conditional GAN whose discriminator sees noisy sums of features instead of pictures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from understudy.data.synthetic import SyntheticSet
from understudy.engine import Engine, Progress, silent
from understudy.methods.base import Generative, Preset
from understudy.methods.dp_merf import DPMERF
from understudy.methods.dpaf_game import AT_ONCE, Game
from understudy.nets.dpaf import Discriminator, Generator
from understudy.nets.draw import public_seed
from understudy.privacy.accounting import Budget
from understudy.privacy.events import Event, Plan, Query, Step
from understudy.privacy.gate import Gate
from understudy.privacy.public import Public
from understudy.privacy.release import Release

CLEAR = 0.1
"""Noise on an anchor, as long as which it is not worth following; its own length is at most 1."""


@dataclass(frozen=True, kw_only=True)
class DPAF(Generative):
    """Aggregate in the forward phase (DPAF, Section 3 and Figure 1), made sound.

    D is conv1, conv2, SIN, AGG, conv3, FC. For t = 1..T, A[c] the aggregate of class c::

        A <- (sum over a Poisson batch of SIN(conv2(conv1(x))) + N(0, sigma_3^2 m p^2)) / L
        n_public times:  conv3, FC <- a step on BCE(D(A), 1) + BCE(D(A_fake), 0)
                         every n_critic-th time: G <- a step on BCE(D(A_fake), 1)
        every mu-th t:   v <- d BCE / d A at the mean of the last mu aggregates     public
                         conv2 <- a step along sum of clip(J(x)^T v, C) + N(0, sigma_2^2 C^2)

    J(x) is the Jacobian of ONE record's features by conv2's weights, A_fake the aggregate of made
    pictures, with the same noise. Before that, with conv1 "transfer", a classifier of aggregates
    gives conv1, by the same construction: :meth:`_transferred`.

    ``conv1``: "transfer" (Section 3.1); "random" and never updated (Table 4); "updated" by a query
    of its own whenever conv2 is (Table 5); "joint", one query and one clipping with conv2 (Table
    6). ``layers`` moves AGG. ``budget_split`` are (x1, x2, x3), the epsilon each of classifier
    phase, conv2 and DPAGG would cost alone, up to a common factor: the paper's (30%, 40%, 30%) is
    (30, 40, 30), its (0.1, x, 0.1) at epsilon 10 is (0.1, 9.8, 0.1). Unused parts do not count.

    ``noise_multiplier`` is that of one query of all records as telling as the whole plan: each
    query's own follows from it, the split, its rate and its count (:meth:`noise`).

    ``published`` takes the printed route to conv: v at the clean aggregate of the batch, and a
    classifier phase partly by plain SGD, on bare batches. No guarantee, epsilon infinity.

    Guarantee: adaptive composition of the plan's sampled Gaussian mechanisms, on one accountant.
    One record adds one vector of norm at most sqrt(m) p to one class sum of features, and one of
    norm at most C to one sum of gradients, since v is a function of answers already given: see
    docs/methods/dpaf.md for the proof.
    """

    name: ClassVar[str] = "dpaf"
    title: ClassVar[str] = "DP aggregation in the forward phase"
    source: ClassVar[str] = "Anonymous, DPAF (under review), Sections 3.1 and 3.2, Equation 2"
    adaptive: ClassVar[bool] = True
    """Later queries depend on earlier answers."""
    departures: ClassVar[tuple[str, ...]] = (
        "conv2 (and conv1) follow clipped vector-Jacobian products of one record at the released "
        "noisy aggregate; the paper clips gradients that other records in the batch shape, and "
        "trains parts of the classifier by plain SGD on records, which has no guarantee.",
        "One accountant composes all queries; the paper adds the epsilons of three mechanisms.",
        "One aggregate a class, and the class enters the last layer; the paper leaves open how "
        "labels enter.",
        "The classifier predicts the shares of public mixtures of released class aggregates, so "
        "no class share of a private batch is used.",
        "The gradients of conv2 come from a Poisson batch of mu times the size, not from the "
        "union of the last mu batches.",
        "The generator learns from aggregates of made pictures, with noise like that of the real "
        "ones; the paper leaves the aggregation out there.",
        "SIN adds 1e-8 to each variance, so a constant map becomes zero.",
        "Widths, rates, clip norm and batch sizes are ours: the paper's appendix is missing.",
    )

    _LARGE: ClassVar[Mapping[str, Any]] = {"group_size": 400.0, "public_steps": 9}

    presets: ClassVar[Mapping[str, Preset]] = {
        "large": Preset(
            _LARGE,
            "For pictures of 64 pixels and more in classes of 400 and more: a larger generator needs "
            "more public steps, which cost nothing but time. Chosen on CelebA's gender, a public "
            "benchmark: balanced 55.3 and 65.2 % there at epsilon 10, 63.8 at epsilon 1 (three "
            "releases, H200). Ten minutes of a CPU core.",
        ),
        "anchored": Preset(
            {**_LARGE, "anchor": 20.0, "anchor_weight": 1000.0},
            "The same, with a fifth of the budget's parts for an anchor: pictures keep the records' light and "
            "colours. Chosen on CelebA's gender: balanced 76 to 78 % at epsilon 10 by small "
            "classifiers that give 62 to 63 without (one release each, two CPU cores).",
        ),
    }
    miniature: ClassVar[Mapping[str, Any]] = {
        "batches": 4,
        "asymmetry": 2,
        "group_size": 10.0,
        "classifier_batches": 2,
        "fakes_per_class": 4,
        "images_per_class": 2,
        "width": 4,
        "maps": 4,
        "head": 8,
        "generator_width": 4,
        "latent": 8,
    }

    noise_multiplier: float = 0.57  # one query of all records: epsilon 8.5 at delta 1e-5
    batches: int = 400  # T
    group_size: float = 200.0  # L: records of each class expected in a batch
    asymmetry: int = 8  # mu
    conv1: Literal["transfer", "random", "updated", "joint"] = "random"
    classifier_batches: int = 40
    budget_split: tuple[float, float, float] = (20.0, 40.0, 40.0)  # x1, x2, x3
    clip_norm: float = 1.0  # C, where the largest class pull has norm 1
    keep: float = 0.9  # share of a record's own gradient that is kept, largest first
    public_steps: int = 3
    critic_steps: int = 3  # n_critic
    fakes_per_class: int = 16
    learning_rate: float = 1e-3  # of conv1 and conv2
    head_learning_rate: float = 1e-3  # of conv3 and FC
    generator_learning_rate: float = 1e-3
    momentum: float = 0.5  # Adam's first; DCGAN's
    width: int = 16
    maps: int = 16  # m
    head: int = 64
    layers: tuple[int, int, int] | None = None
    generator_width: int = 32
    latent: int = 100
    anchor: float = 0.0  # x0, in the units of budget_split
    anchor_weight: float = 10.0
    published: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in (
            *("asymmetry", "classifier_batches", "public_steps", "critic_steps"),
            *("fakes_per_class", "width", "maps", "head", "generator_width", "latent"),
        ):
            value = getattr(self, field)
            self._require(value >= 1, f"{field} is {value}; at least 1")
        self._require(
            self.batches >= self.asymmetry,
            f"batches is {self.batches}; at least the asymmetry, {self.asymmetry}, or conv2 is "
            "never updated",
        )
        for field in (
            *("group_size", "clip_norm", "learning_rate", "head_learning_rate"),
            "generator_learning_rate",
        ):
            value = getattr(self, field)
            self._require(math.isfinite(value) and value > 0, f"{field} must be positive: {value}")
        self._require(
            self.conv1 in ("transfer", "random", "updated", "joint"),
            f"conv1 must be transfer, random, updated or joint, not '{self.conv1}'",
        )
        self._require(
            len(self.budget_split) == 3
            and all(math.isfinite(part) and part > 0 for part in self.budget_split),
            f"budget_split must be three positive numbers: {self.budget_split}",
        )
        for field in ("anchor", "anchor_weight"):
            value = getattr(self, field)
            self._require(math.isfinite(value) and value >= 0, f"{field} is {value}; at least 0")
        self._require(0 < self.keep <= 1, f"keep must be in (0, 1]: {self.keep}")
        self._require(0 <= self.momentum < 1, f"momentum must be in [0, 1): {self.momentum}")

    @classmethod
    def suited(cls, public: Public, budget: Budget | None, engine: Engine) -> str | None:
        """Choose by the side of a picture, the smallest class, and how noisy an anchor would be."""
        large = len(public.shape) == 3 and min(public.shape[1:]) >= 64
        if not large or public.counts is None or min(public.sizes) < 400:
            return None
        anchored = cls.configured(cls.presets["anchored"].configuration)
        if budget is not None:
            anchored = anchored.calibrated(public, budget)
        return "anchored" if anchored.anchor_noise(public) < CLEAR else "large"

    # What is asked

    def discriminator(self, public: Public) -> Discriminator:
        """Return D's architecture. C's is the same."""
        return Discriminator(
            shape=public.shape,
            classes=len(public.classes),
            width=self.width,
            maps=self.maps,
            head=self.head,
            layers=self.layers,
        )

    def generator(self, public: Public) -> Generator:
        """Return G's architecture."""
        return Generator(
            shape=public.shape,
            classes=len(public.classes),
            width=self.generator_width,
            latent=self.latent,
        )

    def noise(self, public: Public) -> dict[str, float]:
        """Return each query's noise multiplier, by name.

        T queries of rate q and multiplier sigma are together about as telling as one Gaussian of
        multiplier 1 / mu, mu^2 = T q^2 (exp(1 / sigma^2) - 1), or T / sigma^2 where all records
        are asked (the central limit of Bu, Dong, Long and Su 2020). mu^2 adds up, and for one
        mechanism epsilon grows with mu: so mu is divided as the split says. It only divides; the
        price is the accountant's, whatever the division.
        """
        asked = self._asked(public)
        whole = math.hypot(*(part for _, part in asked))
        noises = {}
        for step, part in asked:
            rate = max(step.query.rates(public))
            stddev = self.noise_multiplier * whole / part  # 1 / mu
            if rate == 1 or stddev == 0:
                noises[step.query.name] = stddev * math.sqrt(step.times)
            else:
                noises[step.query.name] = (
                    math.log1p(1 / (step.times * (stddev * rate) ** 2)) ** -0.5
                )
        return noises

    def plan(self, public: Public) -> Plan:
        """Ask for T aggregates, floor(T / mu) gradients of conv2 and what conv1 takes."""
        if self.published:
            return self._published_plan()
        noises = self.noise(public)
        return Plan(
            *(
                Step(dataclasses.replace(query, noise_multiplier=noises[query.name]), times)
                for query, times in ((step.query, step.times) for step, _ in self._asked(public))
            )
        )

    def _asked(self, public: Public) -> list[tuple[Step, float]]:
        """Return every step, without its noise, and its part of the budget."""
        classifier, second, aggregation = self.budget_split
        everybody = self.group_size * len(public.classes)

        def features(name: str) -> Query:
            return Query(
                name=name,
                bound=self.discriminator(public).bound,  # sqrt(m) p
                noise_multiplier=0.0,
                expected_batch=self.group_size,
                per_class=True,
            )

        def gradients(name: str, batches: int = 1) -> Query:
            return Query(
                name=name,
                bound=self.clip_norm,
                noise_multiplier=0.0,
                expected_batch=min(batches * everybody, public.size),
            )

        asked = [(Step(features("features"), self.batches), aggregation)]
        updates = self.batches // self.asymmetry
        for name, _ in self.updated:
            part = classifier if name == "conv1 gradients" else second
            asked.append((Step(gradients(name, self.asymmetry), updates), part))
        if self.conv1 == "transfer":
            half, times = classifier / math.sqrt(2), self.classifier_batches
            asked.append((Step(features("classifier features"), times), half))
            asked.append((Step(gradients("classifier gradients"), times), half))
        if self.anchor:
            asked.append((Step(DPMERF().query(), times=1), self.anchor))
        return asked

    def anchor_noise(self, public: Public) -> float:
        """Return the length of the noise on the anchor of the smallest class, whose own is 1 at most."""
        anchor = self.embedding(public)
        return anchor.noise_multiplier / min(public.sizes) * math.sqrt(2 * anchor.frequencies)

    def embedding(self, public: Public) -> DPMERF:
        """Return what an anchor is made of: the mean embedding of every class."""
        noise = self.noise(public)[DPMERF().query().name]
        return DPMERF(seed=self.seed, noise_multiplier=noise)

    @property
    def updated(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return the gradient queries of the game and the parts each is about."""
        if self.conv1 == "joint":
            return [("conv1 and conv2 gradients", ("conv1", "conv2"))]
        asked: list[tuple[str, tuple[str, ...]]] = [("conv2 gradients", ("conv2",))]
        if self.conv1 == "updated":
            asked.append(("conv1 gradients", ("conv1",)))
        return asked

    def _published_plan(self) -> Plan:
        def bare(name: str) -> Query:
            return Query(
                name=name,
                bound=1.0,
                noise_multiplier=0.0,
                expected_batch=self.group_size,
                per_class=True,
            )

        steps = [Step(bare("batches"), self.batches)]
        if self.conv1 == "transfer":
            steps.append(Step(bare("classifier batches"), self.classifier_batches))
        return Plan(*steps)

    def calibrated(
        self, public: Public, budget: Budget, *, earlier: tuple[Event, ...] = ()
    ) -> DPAF:
        """Return this method with the least noise that keeps within the budget."""
        self._require(
            not self.published or math.isinf(budget.epsilon),
            "as published it has no finite epsilon. claiming(public, budget) gives it the noise "
            "it would claim the budget with, for comparison on public data",
        )
        return super().calibrated(public, budget, earlier=earlier)

    def claiming(self, public: Public, budget: Budget) -> DPAF:
        """Return the published algorithm with the noise the sound one has at this budget."""
        sound = dataclasses.replace(self, published=False).calibrated(public, budget)
        return dataclasses.replace(sound, published=True)

    # The private side

    def measure(self, gate: Gate) -> Release:
        """Play the whole game: what is trained between queries is public."""
        game = Game(self, gate)
        game.play()
        return gate.release(
            signals=game.generator.weights,
            recipe=self.recipe(),
            assumptions=self.assumptions,
            departures=self.departures,
        )

    # The public side

    def sample(
        self,
        release: Release,
        count: int,
        *,
        seed: int = 0,
        engine: Engine | None = None,
        progress: Progress = silent,
    ) -> SyntheticSet:
        """Draw records from the released generator, classes in equal shares."""
        public, device = release.public, (engine or Engine()).torch_device
        generator, classes = self.generator(public), len(public.classes)
        weights = {name: value.to(device) for name, value in release.signals.items()}
        sizes = torch.tensor([len(range(c, count, classes)) for c in range(classes)])
        labels = torch.arange(classes).repeat_interleave(sizes)
        stream = torch.Generator().manual_seed(public_seed(seed, "sample"))
        images = []
        with torch.no_grad():
            for start in range(0, count, AT_ONCE):
                told = labels[start : start + AT_ONCE]
                latents = torch.randn(len(told), self.latent, generator=stream)
                images.append(generator.make(weights, latents.to(device), told.to(device)).cpu())
                progress(start + len(told), count, "drawing pictures")
        made = torch.cat(images) if images else torch.zeros(0, *public.shape)
        return SyntheticSet(images=made, labels=labels, public=public)
