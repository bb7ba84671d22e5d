"""Look at records in public ways that are rebuilt from numbers.

A *signal* is a random network with one augmentation draw per class and, optionally, a subspace to
project onto. Signal i is public and is rebuilt from the seed and i, so neither networks nor draws
are ever stored, and whoever holds a release sees the same signals as the gate did.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from understudy.engine import moved
from understudy.errors import BadConfiguration
from understudy.nets.classifiers import MLP
from understudy.nets.convnet import ConvNet
from understudy.nets.draw import Drawing, public_seed
from understudy.ops.augment import Augmentation, AugmentParams
from understudy.ops.augment import apply as augment
from understudy.ops.gradients import gradient_of_one, matched
from understudy.ops.pieces import piece
from understudy.ops.subspace import Subspace, low_frequencies, principal, project
from understudy.privacy.public import Public

__all__ = ["Extractor", "Kind", "Signal"]

Kind = Literal["convnet", "linear", "pixels", "gradients"]

CPU = torch.device("cpu")
LINEAR_FEATURES = 64  # DPDC's extractor for Adult is 14 x 64
_WEIGHTS, _DRAWS = "weights", "draws"

DRAWS_AT_ONCE = 64
"""Signals whose augmentation is drawn together."""


class Extract(Protocol):
    """Extract one vector from each record, with these weights. Only gradients look at labels."""

    def __call__(self, weights: Tensor, records: Tensor, labels: Tensor | None) -> Tensor:
        """Return (n, features)."""


class _Embedding(ConvNet):
    """A ConvNet without its last layer, called for its features."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        width: int,
        depth: int | None,
        precision: torch.dtype,
    ) -> None:
        super().__init__(shape, 1, width, depth, precision)
        del self.classifier

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x)


@dataclass(frozen=True)
class Signal:
    """Look at records in one public way: augment by class, extract features, project.

    All that differs between signals of one extractor are a row of weights, a row of augmentation
    draws for each class, and the subspace.
    """

    extract: Extract
    weights: Tensor  # (weights,)
    packed: Tensor | None  # (classes, 14): draws
    subspace: Subspace | None
    device: torch.device

    @property
    def draws(self) -> AugmentParams | None:
        """Return the draws of the classes."""
        return None if self.packed is None else AugmentParams.unpacked(self.packed)

    def embed(self, records: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return Phi(x) for records as they are: before augmentation and projection."""
        return self.extract(self.weights, records, labels)

    def features(
        self, records: Tensor, draws: AugmentParams | None, labels: Tensor | None = None
    ) -> Tensor:
        """Return P^T Phi(A_w(x)) for records (n, *shape), given one draw each."""
        if draws is not None:
            records = augment(records, draws)
        features = self.embed(records, labels)
        return features if self.subspace is None else project(features, self.subspace)

    def draws_of(self, labels: Tensor) -> AugmentParams | None:
        """Return each record's draw: that of its class."""
        return None if self.packed is None else AugmentParams.unpacked(self.packed[labels])

    def state(self) -> dict[str, Tensor]:
        """Return all that differs between signals of one extractor, by name."""
        state = {_WEIGHTS: self.weights}
        if self.packed is not None:
            state[_DRAWS] = self.packed
        return state if self.subspace is None else state | self.subspace._asdict()

    @classmethod
    def of(cls, extract: Extract, state: Mapping[str, Tensor], device: torch.device) -> Signal:
        """Return the signal that has this state."""
        subspace = None
        if state.keys() >= set(Subspace._fields):
            subspace = Subspace(*(state[name] for name in Subspace._fields))
        return cls(extract, state[_WEIGHTS], state.get(_DRAWS), subspace, device)

    def own_copy(self) -> Signal:
        """Return the same signal in memory of its own, for another one to be copied into."""
        state = {name: value.clone() for name, value in self.state().items()}
        return Signal.of(self.extract, state, self.device)

    def become(self, other: Signal) -> None:
        """Copy another signal of the same extractor into this one's memory."""
        torch._foreach_copy_(list(self.state().values()), list(other.state().values()))


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
    precision: torch.dtype = torch.float32

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
            return _Embedding(self.public.shape, self.width, self.depth, self.precision)

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
        weights = torch.zeros(0, device=self.device)
        if self.kind != "pixels":
            weights = self._drawing.rows([public_seed(self.seed, "network", i)])[0]
        block, place = divmod(i, DRAWS_AT_ONCE)
        draws = self._draws(block)
        packed = None if draws is None else draws[place]
        signal = Signal(self._extract, weights, packed, None, self.device)
        return dataclasses.replace(signal, subspace=self._subspace(i, signal))

    @functools.cached_property
    def _drawing(self) -> Drawing:
        return Drawing(self._net, self.device, recorded=True)

    @functools.cached_property
    def _draws(self) -> Callable[[int], Tensor | None]:
        """Return what makes a block of signals' draws: (signals, classes, 14)."""
        augmentation = Augmentation(self.augmentation)
        if not self.public.is_image or not augmentation.families:
            return lambda block: None
        _, height, width = self.public.shape

        @functools.lru_cache(maxsize=1024)
        def drawn(block: int) -> Tensor:
            signals = range(block * DRAWS_AT_ONCE, (block + 1) * DRAWS_AT_ONCE)
            generators = [
                torch.Generator().manual_seed(public_seed(self.seed, "augmentation", i))
                for i in signals
            ]
            classes = len(self.public.classes)
            draws = augmentation.draw_batches(generators, [classes], (height, width))
            return moved(draws.packed(), self.device)

        return drawn

    def state(self, i: int) -> dict[str, Tensor]:
        """Return what signal i looks at records with: what :meth:`contribution` is given."""
        return self.signal(i).state()

    def contribution(self, state: Mapping[str, Tensor], record: Tensor, label: Tensor) -> Tensor:
        """Return what a signal sees in ONE record. The gate vectorises this, and clips it."""
        signal = Signal.of(self._extract, state, self.device)
        return signal.features(record[None], signal.draws_of(label[None]), label[None])[0]

    def marks(self, signals: int) -> Tensor:
        """Return one number per direction of the first few subspaces, to recognise them by."""
        probe = torch.arange(self.raw_features, device=self.device).cos()
        rows = [self.signal(i).subspace for i in range(min(signals, 3))]
        return torch.stack([probe @ row.components for row in rows if row is not None]).cpu()

    @functools.cached_property
    def _extract(self) -> Extract:
        if self.kind == "pixels":
            return _scaled
        if self.kind == "gradients":
            return functools.partial(_gradients, self._net, self._drawing)
        return functools.partial(_features, self._net, self._drawing)

    @torch.no_grad()
    def _subspace(self, i: int, signal: Signal) -> Subspace | None:
        if self.subspace is None:
            return None
        pictures = self._pictures
        if pictures is None:
            return self._frequencies
        labels = torch.arange(len(pictures), device=self.device) % len(self.public.classes)
        pieces = zip(*(torch.split(x, piece(pictures)) for x in (pictures, labels)), strict=True)
        features = torch.cat([signal.embed(*some) for some in pieces])
        generator = torch.Generator().manual_seed(public_seed(self.seed, "subspace", i))
        return principal(features, self.subspace, generator)


def _scaled(weights: Tensor, records: Tensor, labels: Tensor | None) -> Tensor:
    """Flatten records and bring them from [-1, 1] to [0, 1]."""
    return (records.flatten(1) + 1) / 2


def _features(
    net: nn.Module, drawing: Drawing, weights: Tensor, records: Tensor, labels: Tensor | None
) -> Tensor:
    """Return what a network makes of records."""
    features: Tensor = functional_call(net, drawing.split(weights), (records,), tie_weights=False)
    return features


def _gradients(
    net: nn.Module, drawing: Drawing, weights: Tensor, records: Tensor, labels: Tensor | None
) -> Tensor:
    """Return the gradients of records' losses, by the matched weights."""
    if labels is None:
        raise BadConfiguration("The gradient of a loss needs the record's label.")
    parameters = drawing.split(weights)
    return vmap(gradient_of_one(net, parameters, matched(parameters)))(records, labels)
