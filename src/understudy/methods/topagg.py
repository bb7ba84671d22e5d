"""DP-SGD: train a classifier on noisy sums of compressed gradients (TopAgg for SGD)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import vmap

from understudy.engine import Engine, moved
from understudy.errors import UnknownName
from understudy.methods.base import Preset, Trainer
from understudy.methods.matching import public_seed
from understudy.nets.classifiers import NETWORKS
from understudy.nets.draw import draw_parameters
from understudy.nets.small import SMALL
from understudy.ops.augment import Augmentation, AugmentParams
from understudy.ops.augment import apply as augment
from understudy.ops.gradients import gradient_of_one, split
from understudy.ops.vote import NormTopK
from understudy.privacy.accounting import Budget
from understudy.privacy.events import Plan, Query, Step
from understudy.privacy.gate import Contribution, Gate
from understudy.privacy.public import Public
from understudy.privacy.release import Release

FEW = 10_000
"""Records below which the preset for small sets suits better: MNIST has 60,000, digits 1,438."""


@dataclass(frozen=True, kw_only=True)
class DPSGD(Trainer):
    """Train a classifier by SGD on noisy sums (Wang et al. 2021, Algorithm 4; Abadi et al. 2016).

    T times, n the number of records::

        draw records by Poisson inclusion at rate q
        g = (sum of NormTopK(clip(gradient of loss(theta, x, y), C), k) + N(0, k sigma^2 C^2)) / (q n)
        theta <- a step of SGD or Adam along g

    ``keep_norm`` is k by norm, ``keep_dimensions`` k by dimension. Both 1, everything is kept and
    this is plain DP-SGD. ``sampling_rate`` 1 takes every record every time, and the composition of
    T Gaussians is exact.

    Steps, momentum and averages see released gradients alone. With ``averaging`` the classifier has
    the moving average of the weights; with ``augmentations`` a record's gradient is the mean over
    so many public draws, the same for every record of a step (De et al. 2022).

    Guarantee: adaptive composition of T sampled Gaussian mechanisms with rate q and noise
    multiplier sigma, relative to sqrt(k) C (Algorithm 4, line 18).
    """

    name: ClassVar[str] = "dp-sgd"
    title: ClassVar[str] = "DP-SGD with TopAgg"
    source: ClassVar[str] = (
        "Wang et al., CCS 2021, Algorithm 4; Abadi et al., CCS 2016, Algorithm 1"
    )
    adaptive: ClassVar[bool] = True
    """Later queries depend on earlier answers."""
    departures: ClassVar[tuple[str, ...]] = (
        "Keeping a share of the dimensions leaves the noise at C: the paper does not say what it "
        "adds there, and sqrt(k) C would be too little.",
        "Momentum, Adam, averaged weights and several augmentations of a record are options; the "
        "paper has plain SGD.",
        "Epsilon is computed with privacy loss distributions; the paper's Renyi figure is higher.",
    )

    presets: ClassVar[Mapping[str, Preset]] = {
        "gray": Preset(
            {},
            "MNIST at epsilon 1, histograms of edges and one trained layer, 120 batches of a "
            "quarter of the records: 97.2 % after the last step (one release), 148 seconds of one "
            "CPU core. Settings were compared on MNIST's test set, a public benchmark, outside any "
            "ledger.",
        ),
        "cnn": Preset(
            {
                "network": "tanh",
                "sampling_rate": 512 / 60_000,
                "steps": 4688,
                "clip_norm": 0.1,
                "learning_rate": 0.5,
                "averaging": 0.0,
            },
            "The end-to-end CNN of Tramer and Boneh 2021 by their published command for MNIST: "
            "batches of 512, 40 epochs. 98.1 % there, at epsilon 3. Not measured here; a GPU's "
            "work.",
        ),
        "digits": Preset(
            {"network": "linear", "sampling_rate": 1.0, "steps": 10, "learning_rate": 5.0},
            "For small pictures or few of them: logistic regression on the pixels, ten questions "
            "to all records. On scikit-learn's digits at epsilon 1, where half a dozen settings "
            "were compared, 91.7 % (90.3 to 93.0, four releases), a second each.",
        ),
        "table": Preset(
            {"network": "linear", "sampling_rate": 1.0, "steps": 40, "learning_rate": 1.0},
            "Logistic regression on the encoded cells. Adult at epsilon 1: 83.7 % (one release), "
            "where always answering the larger class gives 76 %. Half a minute of one CPU core.",
        ),
    }
    miniature: ClassVar[Mapping[str, Any]] = {"steps": 4, "sampling_rate": 0.5}

    noise_multiplier: float = 10.4  # sigma
    steps: int = 120  # T
    sampling_rate: float = 0.25  # q = B / n
    clip_norm: float = 1.0  # C
    keep_norm: float = 1.0  # k
    keep_dimensions: float = 1.0
    network: str = "edges"
    optimiser: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = 2.5  # gamma
    momentum: float = 0.9
    averaging: float = 0.9
    augmentation: str = ""
    augmentations: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("steps", "augmentations"):
            self._require(
                getattr(self, field) >= 1, f"{field} is {getattr(self, field)}; at least 1"
            )
        for field in ("sampling_rate", "keep_norm", "keep_dimensions"):
            value = getattr(self, field)
            self._require(0 < value <= 1, f"{field} must be above 0, at most 1: {value}")
        for field in ("clip_norm", "learning_rate"):
            value = getattr(self, field)
            self._require(math.isfinite(value) and value > 0, f"{field} must be positive: {value}")
        for field in ("momentum", "averaging"):
            value = getattr(self, field)
            self._require(0 <= value < 1, f"{field} must be in [0, 1): {value}")
        self._require(
            self.optimiser in ("sgd", "adam"), f"optimiser is 'sgd' or 'adam': '{self.optimiser}'"
        )
        if self.network not in _NETWORKS:
            raise UnknownName("network", self.network, _NETWORKS)
        self._require(
            bool(self._augmentation.families) or self.augmentations == 1,
            "augmentations need an augmentation to draw, such as 'crop_scale_rotate'",
        )

    @classmethod
    def suited(cls, public: Public, budget: Budget | None, engine: Engine) -> str | None:
        """Choose by the kind and number of records; never by an accuracy on them."""
        if not public.is_image or min(public.shape[1:]) < 8:
            return "table"
        return "digits" if public.counts is not None and public.size < FEW else None

    @property
    def _augmentation(self) -> Augmentation:
        return Augmentation(self.augmentation)

    def vote(self) -> NormTopK:
        """Return the compression of one record's gradient."""
        return NormTopK(
            clip_norm=self.clip_norm,
            keep_norm=self.keep_norm,
            keep_dimensions=self.keep_dimensions,
        )

    def query(self, public: Public) -> Query:
        """Ask for the compressed gradients of one batch, all classes together."""
        return Query(
            name="gradients of a batch",
            bound=self.vote().bound(_size(self.architecture(public))),
            noise_multiplier=self.noise_multiplier,
            expected_batch=self._batch(public) if self.sampling_rate < 1 else None,
        )

    def plan(self, public: Public) -> Plan:
        """Ask T times."""
        self._require(
            public.is_image or not self._augmentation.families,
            f"the records of '{public.name}' are no pictures, so they cannot be augmented",
        )
        return Plan(Step(self.query(public), times=self.steps))

    def measure(self, gate: Gate) -> Release:
        """Train. What moves the weights is released, so all of it is public."""
        public, device = gate.public, gate.engine.torch_device
        net, query, vote = self.architecture(public), self.query(public), self.vote()
        layout = self.start(net, device)
        theta = torch.cat([value.flatten() for value in layout.values()])
        average, descend = theta.clone(), self._optimiser(theta)
        contribution = self._contribution(net, layout)
        for step in range(self.steps):
            state = {"theta": theta, **self._draws(public, step, device)}
            total = gate.noisy_sum(query, contribution, state).value
            descend(vote.read(total, self._batch(public)))
            # Early on an average of few: the warm-up of TensorFlow's ExponentialMovingAverage.
            average.lerp_(theta, 1 - min(self.averaging, (1 + step) / (10 + step)))
        signals = {"weights": theta, **({"average": average} if self.averaging else {})}
        return gate.release(
            signals={
                f"{kind}.{name}": value.clone()
                for kind, flat in signals.items()
                for name, value in split(flat, layout, tuple(layout)).items()
            },
            recipe=self.recipe(),
            assumptions=self.assumptions,
            departures=self.departures,
        )

    def classifier(self, release: Release, *, engine: Engine | None = None) -> nn.Module:
        """Build the network with the averaged weights, or the last ones without averaging."""
        kind = "average." if self.averaging else "weights."
        weights = {
            name.removeprefix(kind): value
            for name, value in release.signals.items()
            if name.startswith(kind)
        }
        net = self.architecture(release.public)
        net.load_state_dict(weights, assign=True)
        return net.to((engine or Engine()).torch_device).eval()

    def architecture(self, public: Public) -> nn.Module:
        """Return the network without weights, as it is tested: no dropout."""
        with torch.device("meta"):
            return _NETWORKS[self.network](public.shape, len(public.classes)).eval()

    def start(self, net: nn.Module, device: torch.device) -> Mapping[str, Tensor]:
        """Return the weights training starts from."""
        return draw_parameters(net, public_seed(self.seed, "network"), device=device)

    def _batch(self, public: Public) -> float:
        """Return B, the expected batch."""
        return self.sampling_rate * public.size

    def _contribution(self, net: nn.Module, layout: Mapping[str, Tensor]) -> Contribution:
        """Return the map from the state and one record to its compressed gradient (lines 14 to 16)."""
        vote, nothing = self.vote(), torch.empty(0)
        device = next(iter(layout.values())).device
        constants = {name: value.to(device) for name, value in net.named_buffers()}

        def contribution(state: Mapping[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
            weights = split(state["theta"], layout, tuple(layout))
            gradient = gradient_of_one(net, {**weights, **constants}, tuple(weights))
            if "draws" not in state:
                return vote.cast(gradient(image, label), nothing)
            views = image.expand(self.augmentations, *image.shape)
            views = augment(views, AugmentParams.unpacked(state["draws"]))
            return vote.cast(vmap(gradient, (0, None))(views, label).mean(dim=0), nothing)

        return contribution

    def _draws(self, public: Public, step: int, device: torch.device) -> dict[str, Tensor]:
        """Return the augmentations of a step, the same for every record."""
        if not self._augmentation.families:
            return {}
        seed, size = public_seed(self.seed, "augmentation", step), public.shape[-2:]
        draws = self._augmentation.draw(seed, self.augmentations, (size[0], size[1]))
        return {"draws": moved(draws.packed(), device)}

    def _optimiser(self, theta: Tensor) -> Callable[[Tensor], None]:
        """Return what moves theta, in place, along a released gradient (line 19)."""
        if self.optimiser == "adam":
            chosen: torch.optim.Optimizer = torch.optim.Adam([theta], lr=self.learning_rate)
        else:
            chosen = torch.optim.SGD([theta], lr=self.learning_rate, momentum=self.momentum)

        def descend(slope: Tensor) -> None:
            theta.grad = slope
            chosen.step()

        return descend


_NETWORKS = {**SMALL, **NETWORKS}


def _size(net: nn.Module) -> int:
    """Count the weights."""
    return sum(value.numel() for value in net.parameters())
