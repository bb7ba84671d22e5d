"""Match noisy feature sums: the engine DM, NDPDC, Dosser and the whole-set plan share.

A *signal* is a random network with one augmentation draw per class and, optionally, a subspace to
project onto. Signal i is public and is rebuilt from numbers, the seed and i, so neither networks
nor draws are ever stored. Two steps use it::

    measure_signals(gate, query, extractor, I)   noisy class sums of signal i's features, each once
    optimise(targets, extractor, ...)            images whose features have those sums: free

Sampling plan, features, augmentation, projection, loss weights and optimiser are separate choices;
a method is a point among them.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import os
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from understudy.data.synthetic import SyntheticSet
from understudy.engine import Engine, Progress, silent
from understudy.errors import BadConfiguration, ReleaseError
from understudy.methods.auxiliary import PUBLIC_IMAGES, Auxiliary, auxiliary
from understudy.methods.base import Method
from understudy.methods.diffusion import Diffusion
from understudy.methods.optimisation import Fit, Optimisation, Watch, optimise
from understudy.methods.signals import Extractor, Kind, Signal
from understudy.nets.draw import public_seed
from understudy.ops.augment import Augmentation
from understudy.privacy.events import Plan, Query, Step
from understudy.privacy.gate import Gate
from understudy.privacy.public import Public
from understudy.privacy.release import Release

__all__ = [
    "PUBLIC_IMAGES",
    "Auxiliary",
    "Extractor",
    "Fit",
    "Matching",
    "Optimisation",
    "Signal",
    "Watch",
    "measure_signals",
    "optimise",
    "public_seed",
]


def measure_signals(gate: Gate, query: Query, extractor: Extractor, count: int) -> Tensor:
    """Ask for the class sums of signals 0 .. count - 1: (count, classes, features), noisy.

    Each is asked, and noised, once. The gate journals every answer, so a run that was killed
    is taken up at the signal it had reached.
    """
    states = [functools.partial(extractor.state, i) for i in range(count)]
    return gate.noisy_sums(query, extractor.contribution, states).value


@dataclass(frozen=True, kw_only=True)
class Matching(Method):
    """Declare what every matching method can choose. ``images_per_class`` counts stored images.

    ``class_shares``: "equal" gives every class that many; "declared" splits images_per_class x
    classes between them as the public class sizes do, with one at least, so that a classifier
    trained on the set meets each class as often as the records do. With ``expand`` (PEA) the
    synthetic set holds four enlarged quadrants of every stored image, so that any trainer can use
    it as it is. Tables never expand.

    ``auxiliary``: :class:`Auxiliary` images (a tensor, a file, "random fields"), or a
    :class:`~understudy.methods.diffusion.Diffusion` generator ("diffusion" for its defaults, or
    {"diffusion": {"share": 0.1}}) that is trained on a share of the budget first.
    """

    trains_generator: ClassVar[bool] = False
    """Whether its plan makes room for the training of a generator of auxiliary images."""

    images_per_class: int = 50  # M, spc, IPC
    class_shares: Literal["equal", "declared"] = "equal"
    clip_norm: float | None = 1.0  # G, K
    features: Literal["auto", "convnet", "linear", "pixels", "gradients"] = "auto"
    width: int = 128
    depth: int | None = None
    augmentation: str = "color_crop_cutout_scale_rotate"
    learning_rate: float = 1.0
    momentum: float = 0.5
    subspace: int | None = None
    auxiliary: Auxiliary | Diffusion | None = None
    expand: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.auxiliary is not None:
            object.__setattr__(self, "auxiliary", auxiliary(self.auxiliary))
        Augmentation(self.augmentation)
        self._require(
            self.images_per_class >= 1, f"images_per_class is {self.images_per_class}; at least 1"
        )
        self._require(
            self.clip_norm is None or (math.isfinite(self.clip_norm) and self.clip_norm > 0),
            f"clip_norm must be positive: {self.clip_norm}",
        )
        self._require(
            self.features in ("auto", "convnet", "linear", "pixels", "gradients"),
            f"features must be auto, convnet, linear, pixels or gradients, not '{self.features}'",
        )
        self._require(
            self.class_shares in ("equal", "declared"),
            f"class_shares must be equal or declared, not '{self.class_shares}'",
        )
        self._require(self.width >= 1, f"width is {self.width}; at least 1")
        self._require(self.learning_rate > 0, f"learning_rate is {self.learning_rate}")
        self._require(0 <= self.momentum < 1, f"momentum must be in [0, 1): {self.momentum}")
        self._require(
            self.subspace is None or self.subspace >= 1, f"subspace is {self.subspace}; at least 1"
        )
        self._require(
            self.subspace is None or self.auxiliary is not None or self.features == "pixels",
            "a subspace of network features needs auxiliary images: give auxiliary=images, a "
            f"file, or '{Auxiliary.FIELDS}'",
        )
        if isinstance(self.auxiliary, Diffusion):
            self._require(
                self.trains_generator, "it trains no generator; 'dosser' and 'whole-set' do"
            )
            self._require(
                self.subspace is not None,
                "a generator takes its share of the budget for the sake of a subspace: set one",
            )

    @abc.abstractmethod
    def fit(self, release: Release) -> Fit:
        """Say what the images are fitted to and how. Post-processing of the release."""

    def planned(self, public: Public, main: Step) -> Plan:
        """Plan the training of the generator of auxiliary images, if there is one, then this."""
        if isinstance(self.auxiliary, Diffusion):
            return Plan(self.auxiliary.training(public, main), main)
        return Plan(main)

    def measure(self, gate: Gate) -> Release:
        """Ask for the class sums of every planned signal, each once."""
        *training, main = self.plan(gate.public)
        made = None
        if isinstance(self.auxiliary, Diffusion):
            seed = functools.partial(public_seed, self.seed)
            made = self.auxiliary.pictures(gate, training[0].query, seed)
        extractor = self.extractor(gate.public, gate.engine, made)
        sums = measure_signals(gate, main.query, extractor, main.times)
        return self.released(gate, sums, extractor, made)

    def synthesise(
        self,
        release: Release,
        *,
        engine: Engine | None = None,
        progress: Progress = silent,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int = 1000,
        watch: Watch | None = None,
    ) -> SyntheticSet:
        """Fit images to the stored sums; see :func:`optimise` for checkpoints and watching."""
        fit = self.fit(release)
        return optimise(
            fit.targets,
            self.signals_of(release, engine),
            fit.how,
            images_per_class=self.counts(release.public),
            weight=fit.weight,
            clip_norm=self.clip_norm,
            progress=progress,
            checkpoint=checkpoint,
            every=every,
            watch=watch,
        )

    def counts(self, public: Public) -> tuple[int, ...]:
        """Return how many images of each class are stored (largest remainders, one at least)."""
        classes = len(public.classes)
        if self.class_shares == "equal":
            return (self.images_per_class,) * classes
        total = classes * self.images_per_class
        exact = [total * size / sum(public.sizes) for size in public.sizes]
        counts = [math.floor(share) for share in exact]
        by_remainder = sorted(range(classes), key=lambda c: counts[c] - exact[c])
        for c in by_remainder[: total - sum(counts)]:
            counts[c] += 1
        for c in range(classes):
            if counts[c] == 0:
                counts[counts.index(max(counts))] -= 1
                counts[c] = 1
        return tuple(counts)

    def extractor(
        self, public: Public, engine: Engine | None = None, made: Tensor | None = None
    ) -> Extractor:
        """Return the maker of this configuration's signals.

        ``made`` are the pictures of a trained generator; plans and prices do without.
        """
        if self.subspace is not None and isinstance(self.auxiliary, Auxiliary):
            made = self.auxiliary.images(public)
        engine = engine or Engine(device="cpu")
        # A ConvNet needs 8x8 pixels.
        kind: Kind = "convnet" if public.is_image and min(public.shape[1:]) >= 8 else "linear"
        if self.features != "auto":
            kind = self.features
        return Extractor(
            public=public,
            seed=self.seed,
            kind=kind,
            width=self.width,
            depth=self.depth,
            augmentation=self.augmentation,
            subspace=self.subspace,
            auxiliary=made,
            device=engine.torch_device,
            precision=engine.dtype,
        )

    def bound(self, public: Public) -> float:
        """Return the norm contributions are clipped to; without one, a norm none can exceed."""
        return self.clip_norm or self.extractor(public).largest_norm

    def recipe(self) -> dict[str, Any]:
        """Return the configuration, auxiliary images by their hash."""
        plain = dataclasses.replace(self, auxiliary=None, subspace=None)
        values = dataclasses.asdict(plain) | {"subspace": self.subspace}
        values["auxiliary"] = None if self.auxiliary is None else self.auxiliary.to_json()
        return {"method": self.name, "configuration": values}

    def released(
        self, gate: Gate, sums: Tensor, extractor: Extractor, made: Tensor | None
    ) -> Release:
        """Release noisy sums, with marks by which a rebuilt subspace is recognised.

        Pictures of a generator are stored themselves, not its weights: a subspace turns with
        the rounding of the device that samples, and whoever synthesises needs no diffusers.
        """
        signals = {"sums": sums}
        if made is not None:
            signals["auxiliary"] = made
        if self.subspace is not None:
            signals["subspace_marks"] = extractor.marks(len(sums))
        source, used = self.auxiliary, extractor.auxiliary is not None
        given = used and isinstance(source, Auxiliary) and source.sha256 != Auxiliary.FIELDS
        trained = isinstance(source, Diffusion)
        return gate.release(
            signals=signals,
            recipe=self.recipe(),
            assumptions=(*self.assumptions, *((PUBLIC_IMAGES,) if given else ())),
            departures=(*self.departures, *(Diffusion.DEPARTURES if trained else ())),
        )

    def signals_of(self, release: Release, engine: Engine | None) -> Extractor:
        """Rebuild what a release's signals were measured with, and make sure it is the same."""
        made, sums = release.signals.get("auxiliary"), release.signals["sums"]
        extractor = self.extractor(release.public, engine, made)
        if sums.shape[1:] != (len(release.public.classes), extractor.features):
            raise BadConfiguration(
                f"{self.name}: the release holds {sums.shape[-1]} features a signal and this "
                f"configuration makes {extractor.features}. Features, width, depth, subspace and "
                "seed must be those of the release's recipe."
            )
        measured = dict(release.recipe["configuration"])
        fixed = ("seed", "features", "width", "depth", "augmentation", "clip_norm", "group_size")
        for field in fixed:
            if field in measured and measured[field] != getattr(self, field):
                raise BadConfiguration(
                    f"{self.name}: the signals were measured with {field}={measured[field]!r}, "
                    f"not {getattr(self, field)!r}."
                )
        if "subspace_marks" in release.signals:
            marks = release.signals["subspace_marks"]
            if not torch.allclose(extractor.marks(len(marks)), marks, atol=1e-2):
                raise ReleaseError(
                    "The subspaces rebuilt here are not those the signals were measured in: "
                    "other auxiliary images, or a device or torch version whose rounding turns "
                    "nearly equal directions. Synthesise where the release was measured."
                )
        return extractor
