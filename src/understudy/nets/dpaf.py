"""DPAF's conditional generator and its discriminator in parts: conv1, conv2, SIN, then conv3, FC.

Networks are plain functions of a dictionary of weights, drawn from a public seed. Depth follows
the size of the picture, 8 to 128 pixels and more, one or three channels. The paper gives neither
widths nor kernels nor initial weights (its appendix is missing); what is chosen here is DCGAN's
where DCGAN says it (Radford et al. 2016: strides for pooling, leaky ReLU of 0.2, N(0, 0.02)).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from understudy.errors import BadConfiguration
from understudy.ops.instance import largest_norm, simplified_instance_norm

__all__ = ["Discriminator", "Generator", "Weights", "halved"]

Weights = dict[str, Tensor]
Sides = tuple[int, int]

DEVIATION = 0.02
"""Of initial convolutions: DCGAN's, and the paper's for a random conv1 (Section 4.2.4)."""
SLOPE = 0.2  # of the leaky ReLU
KERNEL = 5  # 3 made fainter digits at equal cost in privacy
SMALLEST = 4  # pixels: DCGAN's innermost map


def halved(side: int) -> int:
    """Return the side of the next map: half, rounded up, while more than 4 pixels are left."""
    return (side + 1) // 2 if side > SMALLEST else side


@dataclass(frozen=True, kw_only=True)
class Discriminator:
    """Say whether an *aggregate* of pictures of one class is real (DPAF, Figure 1, D and C).

    A picture goes through conv1 (``width`` channels), conv2 (``maps`` channels) and SIN:
    :meth:`features`, m maps whose norm is at most :attr:`bound`. Whoever holds many pictures
    averages their features (AGG). :meth:`judge` puts such aggregates, of known classes, through
    conv3 (``head`` channels) and FC; :meth:`shares` is the classifier C, told no class, which
    predicts the class shares of an aggregate. Every convolution is 5x5, halves the map until 4
    pixels are left, and is followed by a leaky ReLU.

    ``layers`` are the numbers of convolutions in conv1, conv2, conv3: the position of AGG. The
    default is one, all but two, one, of as many as bring the map to 4x4, and at least three: (1,
    1, 1) up to 32 pixels, (1, 2, 1) at 64, (1, 3, 1) at 128.

    conv1 has a bias of about the size of its output and conv2 has none: SIN undoes any scale, so
    without the first bias a picture and its fainter copy would have the same features.

    The class enters FC as a term of its own, logit = h . (w + w_class) + b, as in a projection
    discriminator (Miyato and Koyama 2018): what an aggregate of one class should look like is
    then learnt class by class. Label planes beside the aggregate did far worse.
    """

    shape: tuple[int, ...]
    classes: int
    width: int = 16
    maps: int = 16
    head: int = 64
    layers: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or min(self.shape[1:]) < SMALLEST:
            raise BadConfiguration(
                f"DPAF makes pictures of at least {SMALLEST}x{SMALLEST} pixels, not records of "
                f"shape {tuple(self.shape)}."
            )
        if min(self.width, self.maps, self.head) < 1:
            raise BadConfiguration(
                f"A discriminator needs width, maps and head of 1 or more: {self.width}, "
                f"{self.maps}, {self.head}."
            )
        if self.layers is not None and (len(self.layers) != 3 or min(self.layers) < 1):
            raise BadConfiguration(
                f"layers are the convolutions of conv1, conv2 and conv3, one each at least: "
                f"{self.layers}."
            )

    @property
    def depths(self) -> tuple[int, int, int]:
        """Return the numbers of convolutions of the three parts."""
        if self.layers is not None:
            return self.layers
        depth = max(3, round(math.log2(min(self.shape[1:]) / SMALLEST)))
        return 1, depth - 2, 1

    @property
    def sides(self) -> tuple[Sides, ...]:
        """Return height and width of the picture and of the map after each convolution."""
        sides = [(self.shape[1], self.shape[2])]
        for _ in range(sum(self.depths)):
            sides.append((halved(sides[-1][0]), halved(sides[-1][1])))
        return tuple(sides)

    @property
    def aggregate(self) -> tuple[int, int, int]:
        """Return the shape of one record's features, and of an aggregate."""
        first, second, _ = self.depths
        return (self.maps, *self.sides[first + second])

    @property
    def bound(self) -> float:
        """Return sqrt(m) p: no record's features are longer."""
        return largest_norm(*self.aggregate)

    def names(self, *parts: str) -> tuple[str, ...]:
        """Name the weights of the given parts, in order: "conv1", "conv2", "conv3", "fc"."""
        return tuple(name for name in self._shapes(1) if name.split(".")[0] in parts)

    def draw(self, seed: int, *, outputs: int = 1, device: torch.device | None = None) -> Weights:
        """Return the first weights of a seed; C has as many ``outputs`` as classes, D one."""
        stream, weights = torch.Generator().manual_seed(seed), {}
        for name, shape in self._shapes(outputs).items():
            part = name.split(".")[0]
            normal = torch.randn(shape, generator=stream)
            if part in ("conv1", "conv2"):
                inputs = self.shape[0] * KERNEL**2
                scale = DEVIATION * (math.sqrt(inputs) if name.endswith("bias") else 1.0)
            elif name.endswith("weight"):
                # After SIN values are of size one; conv3 and FC keep them so (He et al. 2015).
                scale = 1 / math.sqrt(math.prod(shape[1:]))
            else:
                scale = 0.0
            weights[name] = (normal * scale).to(device)
        return weights

    def features(self, weights: Mapping[str, Tensor], pictures: Tensor) -> Tensor:
        """Return SIN(conv2(conv1(picture))) of each picture: (n, m, p, p)."""
        x = pictures
        first, second, _ = self.depths
        for place in range(first):
            x = _leaky(self._convolve(x, weights, f"conv1.{place}", place))
        for place in range(second):
            x = _leaky(self._convolve(x, weights, f"conv2.{place}", first + place))
        return simplified_instance_norm(x)

    def judge(self, weights: Mapping[str, Tensor], aggregates: Tensor, labels: Tensor) -> Tensor:
        """Return one logit an aggregate: above zero for real ones."""
        x = self._flat(weights, aggregates)
        told = (x * weights["fc.class"][labels]).sum(dim=1)
        logits = F.linear(x, weights["fc.weight"], weights["fc.bias"])
        return logits[:, 0] + told

    def shares(self, weights: Mapping[str, Tensor], aggregates: Tensor) -> Tensor:
        """Return the predicted class shares of each aggregate (the classifier C)."""
        x = self._flat(weights, aggregates)
        return F.linear(x, weights["fc.weight"], weights["fc.bias"]).softmax(dim=1)

    def _flat(self, weights: Mapping[str, Tensor], aggregates: Tensor) -> Tensor:
        x, (first, second, third) = aggregates, self.depths
        for place in range(third):
            x = _leaky(self._convolve(x, weights, f"conv3.{place}", first + second + place))
        return x.flatten(1)

    def _convolve(self, x: Tensor, weights: Mapping[str, Tensor], name: str, place: int) -> Tensor:
        pairs = zip(*self.sides[place : place + 2], strict=True)
        strides = tuple(2 if after < before else 1 for before, after in pairs)
        bias = weights.get(f"{name}.bias")
        return F.conv2d(x, weights[f"{name}.weight"], bias, strides, padding=KERNEL // 2)

    def _shapes(self, outputs: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        before = self.shape[0]
        widths = (self.width, self.maps, self.head)
        for part, (depth, width) in enumerate(zip(self.depths, widths, strict=True), 1):
            for place in range(depth):
                shapes[f"conv{part}.{place}.weight"] = (width, before, KERNEL, KERNEL)
                if part != 2:
                    shapes[f"conv{part}.{place}.bias"] = (width,)
                before = width
        flat = self.head * math.prod(self.sides[-1])
        shapes |= {"fc.weight": (outputs, flat), "fc.bias": (outputs,)}
        return shapes if outputs > 1 else {**shapes, "fc.class": (self.classes, flat)}


@dataclass(frozen=True, kw_only=True)
class Generator:
    """Turn latents and labels into pictures: the discriminator's sides backwards, as in DCGAN.

    A linear layer makes the smallest map; each pixel is repeated until the map has the next of the
    sides the discriminator goes through (4, 7, 14, 28 pixels for 28), and a convolution 3x3
    follows. (Transposed convolutions left checkerboards on faces, which the features, being
    coarse, did not see.) ``width`` channels go into the last one and twice as many into each
    before. Between layers ReLU, at the end tanh.

    Departure: DCGAN normalises by the batch; here the channels of each pixel are brought to a mean
    square of one (Karras et al. 2018), scaled and shifted, so that a picture depends on its own
    latent and label alone, whatever it is drawn together with.
    """

    shape: tuple[int, ...]
    classes: int
    width: int = 32
    latent: int = 100

    def __post_init__(self) -> None:
        if min(self.width, self.latent) < 1:
            raise BadConfiguration(
                f"A generator needs width and latent of 1 or more: {self.width}, {self.latent}."
            )

    @property
    def sides(self) -> tuple[Sides, ...]:
        """Return the sides of the maps, smallest first."""
        sides = [(self.shape[1], self.shape[2])]
        while max(sides[-1]) > SMALLEST:
            sides.append((halved(sides[-1][0]), halved(sides[-1][1])))
        return tuple(reversed(sides))

    @property
    def channels(self) -> tuple[int, ...]:
        """Return the channels of the maps, smallest map first."""
        doublings = len(self.sides) - 2
        return (*(self.width * 2**i for i in range(doublings, -1, -1)), self.shape[0])

    def draw(self, seed: int, *, device: torch.device | None = None) -> Weights:
        """Return the first weights of a seed."""
        stream, weights = torch.Generator().manual_seed(seed), {}
        spread = self.channels[0] * math.prod(self.sides[0])

        def normal(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=stream) * DEVIATION).to(device)

        weights["spread.weight"] = normal(spread, self.latent + self.classes)
        weights["spread.bias"] = torch.zeros(spread, device=device)
        for place, (before, after) in enumerate(itertools.pairwise(self.channels)):
            weights[f"enlarge.{place}.scale"] = torch.ones(before, 1, 1, device=device)
            weights[f"enlarge.{place}.shift"] = torch.zeros(before, 1, 1, device=device)
            weights[f"enlarge.{place}.weight"] = normal(after, before, 3, 3)
            weights[f"enlarge.{place}.bias"] = torch.zeros(after, device=device)
        return weights

    def make(self, weights: Mapping[str, Tensor], latents: Tensor, labels: Tensor) -> Tensor:
        """Return one picture in [-1, 1] for each latent and label."""
        told = F.one_hot(labels, self.classes).to(latents.dtype)
        x = F.linear(
            torch.cat([latents, told], dim=1), weights["spread.weight"], weights["spread.bias"]
        ).view(-1, self.channels[0], *self.sides[0])
        for place, after in enumerate(self.sides[1:]):
            name = f"enlarge.{place}"
            x = x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 1e-8)
            x = F.relu(x * weights[f"{name}.scale"] + weights[f"{name}.shift"])
            x = F.interpolate(x, size=after, mode="nearest")
            x = F.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], padding=1)
        return torch.tanh(x)


def _leaky(x: Tensor) -> Tensor:
    return F.leaky_relu(x, SLOPE)
