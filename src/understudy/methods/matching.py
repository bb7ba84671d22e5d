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
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from understudy.data.synthetic import SyntheticSet
from understudy.engine import Engine, Progress, silent
from understudy.errors import BadConfiguration, DataError, ReleaseError, UnknownName
from understudy.methods.base import Method
from understudy.methods.diffusion import Diffusion
from understudy.nets.classifiers import MLP
from understudy.nets.convnet import ConvNet
from understudy.nets.draw import draw_parameters
from understudy.ops.augment import Augmentation, AugmentParams
from understudy.ops.augment import apply as augment
from understudy.ops.bound import bound
from understudy.ops.expand import PARTS, expand
from understudy.ops.gradients import gradient_of_one, matched
from understudy.ops.match import matching_loss
from understudy.ops.subspace import (
    Subspace,
    low_frequencies,
    principal,
    project,
    random_fields,
)
from understudy.privacy.durable import write_durably
from understudy.privacy.events import Plan, Query, Step
from understudy.privacy.gate import Gate
from understudy.privacy.public import Public
from understudy.privacy.release import Release

__all__ = [
    "Auxiliary",
    "Extractor",
    "Fit",
    "Matching",
    "Optimisation",
    "Signal",
    "measure_signals",
    "optimise",
    "public_seed",
]

Kind = Literal["convnet", "linear", "pixels", "gradients"]
Watch = Callable[[int, SyntheticSet], None]
"""Called with (steps done, the set as it is), to look at it on the way."""

CPU = torch.device("cpu")
LINEAR_FEATURES = 64  # DPDC's extractor for Adult is 14 x 64
CACHE_BYTES = 256 * 2**20
"""Rebuilt signals that may be kept at hand."""
_PIXELS_PER_PIECE = 16 * 32 * 32  # a CPU is fastest on about sixteen 32x32 pictures at a time


PUBLIC_IMAGES = "The auxiliary images are public: they contain no private record."
"""What a statement assumes where auxiliary images are given."""


def public_seed(*place: object) -> int:
    """Derive a 63-bit seed for one place from the method's seed. Public, never for noise."""
    label = "/".join(map(str, place)).encode()
    return int.from_bytes(hashlib.blake2b(label, digest_size=8).digest(), "big") >> 1


# Auxiliary images


@dataclass(frozen=True)
class Auxiliary:
    """Name public images by their hash; a recipe keeps the name, not the images.

    Two are equal if their images are. :meth:`of` takes a tensor, a file or ``"random fields"``,
    pictures drawn by a formula, for whoever has no public images.
    """

    sha256: str
    path: str | None = dataclasses.field(default=None, compare=False)
    pictures: Tensor | None = dataclasses.field(default=None, compare=False, repr=False)

    FIELDS = "random fields"

    @classmethod
    def of(
        cls, source: Auxiliary | Tensor | str | os.PathLike[str] | Mapping[str, Any]
    ) -> Auxiliary:
        """Take images (n, C, H, W), float in [-1, 1] or uint8, a file of them, or an entry."""
        if isinstance(source, Auxiliary):
            return source
        if isinstance(source, Mapping):
            return cls(str(source["sha256"]), source.get("path"))
        if isinstance(source, Tensor):
            images = _in_range(source.detach().cpu())
            return cls(_digest(images), None, images)
        if str(source) == cls.FIELDS:
            return cls(cls.FIELDS, cls.FIELDS)
        path = Path(source)
        images = _read_images(path)
        return cls(_digest(images), str(path), images)

    def images(self, public: Public) -> Tensor:
        """Return the pictures, read again from their file if need be, and check them."""
        if self.sha256 == self.FIELDS:
            seed = public_seed(self.FIELDS, *public.shape)
            return random_fields(public.shape, 1000, torch.Generator().manual_seed(seed))
        images = self.pictures
        if images is None and self.path is not None and Path(self.path).is_file():
            images = _read_images(Path(self.path))
        if images is None or _digest(images) != self.sha256:
            raise DataError(
                "This configuration needs the auxiliary images with SHA-256 "
                f"{self.sha256[:16]}..., and they are not at {self.path or 'hand'}. Give the "
                "same images again: method = dataclasses.replace(method, auxiliary=images)."
            )
        if tuple(images.shape[1:]) != public.shape:
            raise BadConfiguration(
                f"Auxiliary images have shape {tuple(images.shape[1:])}, records {public.shape}."
            )
        return images

    def to_json(self) -> dict[str, Any]:
        """Return what a recipe keeps."""
        return {"sha256": self.sha256, "path": self.path}


def _auxiliary(source: Any) -> Auxiliary | Diffusion:
    """Take a generator's configuration, its name, or whatever names images."""
    if isinstance(source, Diffusion):
        return source
    if isinstance(source, str) and source == Diffusion.NAME:
        return Diffusion()
    if isinstance(source, Mapping):
        if Diffusion.NAME in source:
            return Diffusion.of(source[Diffusion.NAME])
        if "sha256" not in source:
            raise UnknownName("auxiliary", next(iter(source), ""), (Diffusion.NAME, "sha256"))
    return Auxiliary.of(source)


def _read_images(path: Path) -> Tensor:
    try:
        if path.suffix == ".safetensors":
            with safe_open(str(path), framework="pt") as file:
                return _in_range(file.get_tensor("images"))
        return _in_range(torch.from_numpy(np.load(path, allow_pickle=False)))
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise DataError(
            f"No auxiliary images in {path}: {error}. Give a .npy file, or a .safetensors file "
            "with a tensor 'images'."
        ) from error


def _in_range(images: Tensor) -> Tensor:
    if images.dtype == torch.uint8:
        return images.float().div_(127.5).sub_(1.0)
    if not images.is_floating_point():
        raise DataError(f"Auxiliary images must be uint8 or floating point, not {images.dtype}.")
    return images.float()


def _digest(images: Tensor) -> str:
    values = np.ascontiguousarray(images.numpy(), dtype="<f4")
    return hashlib.sha256(str(values.shape).encode() + values.tobytes()).hexdigest()


# Signals


class Embed(Protocol):
    """Extract one vector from each record. Only gradients look at the labels."""

    def __call__(self, records: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return (n, features)."""


class _Embedding(ConvNet):
    """A ConvNet without its last layer, called for its features."""

    def __init__(self, shape: tuple[int, int, int], width: int, depth: int | None) -> None:
        super().__init__(shape, 1, width, depth)
        del self.classifier

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x)


@dataclass(frozen=True)
class Signal:
    """Look at records in one public way: augment by class, extract features, project."""

    embed: Embed
    draws: AugmentParams | None  # one a class, on the CPU
    subspace: Subspace | None
    device: torch.device

    def features(
        self, records: Tensor, draws: AugmentParams | None, labels: Tensor | None = None
    ) -> Tensor:
        """Return P^T Phi(A_w(x)) for records (n, *shape), given one draw each."""
        if draws is not None:
            records = augment(records, draws)
        features = self.embed(records, labels)
        return features if self.subspace is None else project(features, self.subspace)

    def per_image(self, images_per_class: int | Tensor) -> AugmentParams | None:
        """Return the draws for a set kept class by class: one number, or one a class.

        Families stay on the CPU, where they are read; the numbers go where the images are.
        """
        if self.draws is None:
            return None
        each = AugmentParams(*(p.repeat_interleave(images_per_class, 0) for p in self.draws))
        return each.to(self.device)._replace(family=each.family)

    def contribution(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the function of ONE record the gate vectorises. It clips what this returns."""
        draws = None if self.draws is None else self.draws.to(self.device)

        def of_one(record: Tensor, label: Tensor) -> Tensor:
            own = None if draws is None else AugmentParams(*(part[label][None] for part in draws))
            return self.features(record[None], own, label[None])[0]

        return of_one


@dataclass(frozen=True, kw_only=True, eq=False)
class Extractor:
    """Rebuild signal i from numbers. Everything here is public.

    ``kind``: a random ConvNet; a random linear map to 64 features; the record itself, brought
    to [0, 1] so that a dark background is zero (``pixels``); or the gradient of a random
    classifier's loss on this record, by its weights (``gradients``, as in PSG). ``subspace``: how
    many directions to project onto; the principal ones of the auxiliary images' features
    (Dosser's SER), or for pixels without auxiliary images the lowest frequencies. Where labels
    matter, auxiliary image j counts as one of class j mod classes.
    """

    public: Public
    seed: int
    kind: Kind
    width: int = 128
    depth: int | None = None
    augmentation: str = ""
    subspace: int | None = None
    auxiliary: Tensor | None = None
    device: torch.device = CPU

    @functools.cached_property
    def _net(self) -> nn.Module:
        shape, classes = self.public.shape, len(self.public.classes)
        with torch.device("meta"):
            if self.kind == "linear":
                return nn.Sequential(
                    nn.Flatten(), nn.Linear(self.public.dimension, LINEAR_FEATURES)
                )
            if self.kind == "gradients":
                if len(shape) == 3 and min(shape[1:]) >= 8:
                    return ConvNet((shape[0], *shape[1:]), classes, self.width, self.depth)
                return MLP(shape, classes)
            if len(self.public.shape) != 3:
                raise BadConfiguration(
                    f"A convnet needs images; '{self.public.name}' has records of shape "
                    f"{self.public.shape}. Use features='linear'."
                )
            return _Embedding(self.public.shape, self.width, self.depth)

    @functools.cached_property
    def _pictures(self) -> Tensor | None:
        return None if self.auxiliary is None else self.auxiliary.to(self.device)

    @functools.cached_property
    def _frequencies(self) -> Subspace:
        if self.kind != "pixels" or self.subspace is None:
            raise BadConfiguration("A subspace of network features needs auxiliary images.")
        components = low_frequencies(self.public.shape, self.subspace).to(self.device)
        return Subspace(components.new_zeros(()), components)

    @functools.cached_property
    def raw_features(self) -> int:
        """Count the features before projection."""
        if self.kind == "pixels":
            return self.public.dimension
        if self.kind == "gradients":
            weights = dict(self._net.named_parameters())
            return sum(weights[name].numel() for name in matched(weights))
        return LINEAR_FEATURES if self.kind == "linear" else int(self._net.features)  # type: ignore[arg-type]

    @property
    def features(self) -> int:
        """Count the numbers of one contribution."""
        return self.raw_features if self.subspace is None else self.subspace

    @property
    def largest_norm(self) -> float:
        """Bound the norm any record's features can have, whatever the network.

        A ConvNet's last block standardises each map, and neither ReLU nor averaging raises the
        mean square above 1. Linear: |w x + b| <= (d + 1) / sqrt(d) for entries in [-1, 1].
        """
        if self.kind == "gradients":
            raise BadConfiguration("Nothing bounds the norm of a gradient: set clip_norm.")
        if self.kind == "linear":
            d = self.public.dimension
            return math.sqrt(LINEAR_FEATURES) * (d + 1) / math.sqrt(d)
        return math.sqrt(self.raw_features)

    @property
    def bytes_each(self) -> int:
        """Estimate what one rebuilt signal takes."""
        weights = 0 if self.kind == "pixels" else sum(p.numel() for p in self._net.parameters())
        return 4 * (weights + (self.subspace or 0) * self.raw_features) + 4096

    def signal(self, i: int) -> Signal:
        """Rebuild signal i on the device: the same in every process."""
        draws = None
        if self.public.is_image and Augmentation(self.augmentation).families:
            _, height, width = self.public.shape
            draws = Augmentation(self.augmentation).draw(
                public_seed(self.seed, "augmentation", i),
                len(self.public.classes),
                (height, width),
            )
        embed = self._embed(i)
        return Signal(embed, draws, self._subspace(i, embed), self.device)

    def marks(self, signals: int) -> Tensor:
        """Return one number per direction of the first few subspaces, to recognise them by."""
        probe = torch.arange(self.raw_features, device=self.device).cos()
        rows = [self.signal(i).subspace for i in range(min(signals, 3))]
        return torch.stack([probe @ row.components for row in rows if row is not None]).cpu()

    def _embed(self, i: int) -> Embed:
        if self.kind == "pixels":
            return _scaled
        net, seed = self._net, public_seed(self.seed, "network", i)
        parameters = draw_parameters(net, seed, device=self.device)
        if self.kind == "gradients":
            return _gradients(net, parameters)

        def embed(records: Tensor, labels: Tensor | None = None) -> Tensor:
            features: Tensor = functional_call(net, parameters, (records,))
            return features

        return embed

    @torch.no_grad()
    def _subspace(self, i: int, embed: Embed) -> Subspace | None:
        if self.subspace is None:
            return None
        pictures = self._pictures
        if pictures is None:
            return self._frequencies
        labels = torch.arange(len(pictures), device=self.device) % len(self.public.classes)
        pieces = zip(*(torch.split(x, _piece(pictures)) for x in (pictures, labels)), strict=True)
        features = torch.cat([embed(*piece) for piece in pieces])
        generator = torch.Generator().manual_seed(public_seed(self.seed, "subspace", i))
        return principal(features, self.subspace, generator)


def _scaled(records: Tensor, labels: Tensor | None = None) -> Tensor:
    """Flatten records and bring them from [-1, 1] to [0, 1]."""
    return (records.flatten(1) + 1) / 2


def _gradients(net: nn.Module, parameters: Mapping[str, Tensor]) -> Embed:
    """Return the map from records to the gradients of their losses, by the matched weights."""
    of_each = vmap(gradient_of_one(net, parameters, matched(parameters)))

    def embed(records: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            raise BadConfiguration("The gradient of a loss needs the record's label.")
        return of_each(records, labels)

    return embed


def _piece(records: Tensor) -> int:
    if records.device.type != "cpu" or records.dim() != 4:
        return max(1, len(records))
    return max(1, _PIXELS_PER_PIECE // (records.shape[-2] * records.shape[-1]))


def measure_signals(gate: Gate, query: Query, extractor: Extractor, count: int) -> Tensor:
    """Ask for the class sums of signals 0 .. count - 1: (count, classes, features), noisy.

    Each is asked, and noised, once. The gate journals every answer, so a run that was killed
    is taken up at the signal it had reached.
    """
    sums: Tensor | None = None
    for i in range(count):
        answer = gate.noisy_sum(query, extractor.signal(i).contribution()).value
        if sums is None:
            sums = torch.empty(count, *answer.shape)
        sums[i] = answer
    if sums is None:
        raise BadConfiguration(f"'{query.name}' must be asked at least once, not {count} times.")
    return sums


# Optimisation


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
    at_hand = max(1, min(len(targets), CACHE_BYTES // extractor.bytes_each))

    @functools.lru_cache(maxsize=at_hand)
    def look(i: int) -> tuple[Signal, AugmentParams | None]:
        signal = extractor.signal(i)
        return signal, signal.per_image(shown)

    schedule = how.schedule(len(targets), extractor.seed)
    targets, own = targets.to(device), labels.to(device)
    members = F.one_hot(own).T.to(targets.dtype)  # (classes, images): adds up each class
    sizes = shown.to(device)[:, None]
    report = max(1, how.steps // 100)

    for step in range(state.step, how.steps):
        (signal, draws), images = look(schedule[step]), state.images.requires_grad_()
        pictures = expand(images) if how.expand else images
        features = _in_pieces(signal, pictures, draws, own)
        if clip_norm is not None:
            features = bound(features, clip_norm)
        means = members @ features / sizes
        loss = matching_loss(means[:, None], targets[schedule[step]], weight)
        (gradient,) = torch.autograd.grad(loss, images)
        state.advance(gradient, how)
        done = state.step
        if done % report == 0 or done == how.steps:
            progress(done, how.steps, f"matching loss {loss.item():.4g}")
        if done % every == 0 or done == how.steps:
            if file is not None:
                state.write(file, identity)
            if watch is not None:
                watch(done, state.show(public, how, labels))
    return state.show(public, how, labels)


def _in_pieces(
    signal: Signal, pictures: Tensor, draws: AugmentParams | None, labels: Tensor
) -> Tensor:
    """Extract features a few pictures at a time on a CPU, all at once elsewhere."""
    size = _piece(pictures)
    if size >= len(pictures):
        return signal.features(pictures, draws, labels)
    parts = []
    for start in range(0, len(pictures), size):
        cut = slice(start, start + size)
        own = None if draws is None else AugmentParams(*(part[cut] for part in draws))
        parts.append(signal.features(pictures[cut], own, labels[cut]))
    return torch.cat(parts)


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
    """Hold all an optimisation needs to go on: images, velocity, average, steps done."""

    images: Tensor
    velocity: Tensor
    average: Tensor
    step: int

    @classmethod
    def first(
        cls, public: Public, count: int, how: Optimisation, seed: int, device: torch.device
    ) -> _State:
        generator = torch.Generator().manual_seed(public_seed(seed, "start"))
        images = torch.randn(count, *public.shape, generator=generator).mul_(how.start).to(device)
        return cls(images, torch.zeros_like(images), images.clone(), 0)

    @torch.no_grad()
    def advance(self, gradient: Tensor, how: Optimisation) -> None:
        self.images = self.images.detach()
        self.velocity.mul_(how.momentum).add_(gradient)
        self.images.sub_(self.velocity, alpha=how.rate(self.step))
        if how.average > 0:
            self.average.lerp_(self.images, 1 - how.average)
        self.step += 1

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
            if field.name not in ("auxiliary", "device")
        },
        "auxiliary": None if extractor.auxiliary is None else _digest(extractor.auxiliary.cpu()),
        "how": dataclasses.asdict(how),
        "rest": [repr(value) for value in rest],
        "targets": _digest(targets.cpu()),
    }
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


# What the methods have in common


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
            object.__setattr__(self, "auxiliary", _auxiliary(self.auxiliary))
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
            device=(engine or Engine(device="cpu")).torch_device,
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
