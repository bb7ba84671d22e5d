"""Small generators of labelled records: PSG's prior, and DP-MERF's for pictures and for tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from understudy.errors import BadConfiguration
from understudy.nets.draw import uniforms
from understudy.privacy.public import Column

__all__ = [
    "Generator",
    "TableGenerator",
    "UpsamplingGenerator",
    "draw_generator",
    "draw_table_generator",
    "draw_upsampling_generator",
]

N = TypeVar("N", bound=nn.Module)

HIDDEN = 200
"""Width of the hidden layer in DP-MERF's code for pictures; taken for tables too."""


class Generator(nn.Module):
    """Turn a latent vector and a label into a picture, as DCGAN does; no part mixes records.

    A linear layer makes a small map of 4 x width channels; transposed convolutions 5x5, 5x5 and
    8x8 with stride 2 (4, 2, 1 x width channels going in) enlarge it, each cut to the middle of
    what is needed. Every layer but the last is followed by a pixel norm and ReLU; the last is
    linear, so values are not bounded. For 28x28 the maps are 4, 7, 11 and 28 pixels wide.
    """

    def __init__(
        self, shape: tuple[int, int, int], classes: int, *, width: int = 64, latent: int = 10
    ) -> None:
        super().__init__()
        if len(shape) != 3:
            raise BadConfiguration(
                f"A generator makes pictures, not records of shape {tuple(shape)}."
            )
        if width < 1 or latent < 1:
            raise BadConfiguration(
                f"A generator needs width and latent of 1 or more: {width}, {latent}."
            )
        channels, *sides = shape
        self.sides = tuple(sides)
        # A map of b pixels ends as 2 (b + 3) + 8; one of a pixels becomes a + 4, cut to b.
        self.middle = tuple(max(2, math.ceil((side - 14) / 2)) for side in sides)
        self.first = tuple(max(2, b - 3) for b in self.middle)
        self.classes, self.latent = classes, latent
        self.spread = nn.Linear(latent + classes, 4 * width * math.prod(self.first))
        self.enlarge = nn.ModuleList(
            [
                nn.ConvTranspose2d(4 * width, 2 * width, 5),
                nn.ConvTranspose2d(2 * width, width, 5),
                nn.ConvTranspose2d(width, channels, 8, stride=2),
            ]
        )

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        """Return one picture for each latent and label."""
        x = self.spread(_told(latents, labels, self.classes)).unflatten(1, (-1, *self.first))
        first, second, last = self.enlarge
        x = _middle(first(_normed(x)), self.middle)
        x = last(_normed(second(_normed(x))))
        return _middle(x, self.sides)


def _normed(x: Tensor) -> Tensor:
    """Give the channels of each pixel a mean square of one, then ReLU."""
    return F.relu(x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 1e-8))


def _middle(x: Tensor, sides: tuple[int, ...]) -> Tensor:
    height, width = sides
    top, left = (x.shape[-2] - height) // 2, (x.shape[-1] - width) // 2
    return x[..., top : top + height, left : left + width]


class UpsamplingGenerator(nn.Module):
    """Turn a latent vector and a label into a picture as DP-MERF's does.

    Two linear layers with batch norm (200 wide, then 16 maps of a quarter of the sides), twice
    enlarged bilinearly and convolved 5x5 (to 8 maps, to the channels). A sigmoid, stretched,
    keeps values in [-1, 1]. In training mode a batch is normalised by its own statistics, in
    evaluation mode by their running averages, and then no part mixes records.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, *, latent: int = 5) -> None:
        super().__init__()
        channels, *sides = shape
        self.classes, self.latent = classes, latent
        self.maps = tuple(
            (math.ceil(side / 4), math.ceil(side / 2), side) for side in sides
        )  # of the height, of the width
        first = math.prod(side[0] for side in self.maps)
        self.spread = nn.Sequential(
            nn.Linear(latent + classes, HIDDEN),
            nn.BatchNorm1d(HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 16 * first),
            nn.BatchNorm1d(16 * first),
        )
        self.shape = nn.ModuleList(
            [nn.Conv2d(16, 8, 5, padding=2), nn.Conv2d(8, channels, 5, padding=2)]
        )

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        """Return one picture for each latent and label."""
        (height, *heights), (width, *widths) = self.maps
        x = self.spread(_told(latents, labels, self.classes)).unflatten(1, (16, height, width))
        first, second = self.shape
        x = F.relu(first(_enlarged(x, heights[0], widths[0])))
        return torch.tanh(second(_enlarged(x, heights[1], widths[1])) / 2)  # 2 sigmoid - 1


class TableGenerator(nn.Module):
    """Turn a latent vector and a label into an encoded row.

    Two hidden layers with batch norm, 200 wide; a number is squeezed into [-1, 1], the categories
    of a column share out one by softmax. A table without declared columns holds numbers.
    """

    def __init__(
        self, dimension: int, columns: Sequence[Column], classes: int, *, latent: int = 5
    ) -> None:
        super().__init__()
        self.classes, self.latent = classes, latent
        self.widths = [column.width for column in columns] or [1] * dimension
        self.softly = [column.kind == "categorical" for column in columns] or [False] * dimension
        self.layers = nn.Sequential(
            nn.Linear(latent + classes, HIDDEN),
            nn.BatchNorm1d(HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.BatchNorm1d(HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, dimension),
        )

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        """Return one row for each latent and label."""
        cells = torch.split(self.layers(_told(latents, labels, self.classes)), self.widths, dim=1)
        made = [
            cell.softmax(dim=1) if softly else torch.tanh(cell / 2)
            for cell, softly in zip(cells, self.softly, strict=True)
        ]
        return torch.cat(made, dim=1)


def _told(latents: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Append the label, one-hot."""
    return torch.cat([latents, F.one_hot(labels, classes).to(latents.dtype)], dim=1)


def _enlarged(x: Tensor, height: int, width: int) -> Tensor:
    """Interpolate bilinearly, corners on corners.

    As two matrix products: the gradient of PyTorch's interpolation adds in no fixed order on a
    GPU, and a generator should come out the same twice.
    """
    return _stretch(x.shape[-2], height, x) @ x @ _stretch(x.shape[-1], width, x).mT


def _stretch(before: int, after: int, like: Tensor) -> Tensor:
    """Return the matrix of linear interpolation from `before` to `after` evenly spread points."""
    places = torch.linspace(0, before - 1, after, device=like.device, dtype=like.dtype)
    points = torch.arange(before, device=like.device, dtype=like.dtype)
    return F.relu(1 - (places[:, None] - points).abs())


def draw_generator(
    seed: int,
    shape: tuple[int, int, int],
    classes: int,
    *,
    width: int = 64,
    latent: int = 10,
    device: torch.device | str | None = None,
) -> Generator:
    """Return the generator of `seed`, with PyTorch's default distribution: the same everywhere."""
    with torch.device("meta"):
        net = Generator(shape, classes, width=width, latent=latent)
    return _drawn(net, seed, device)


def draw_upsampling_generator(
    seed: int,
    shape: tuple[int, int, int],
    classes: int,
    *,
    latent: int = 5,
    device: torch.device | str | None = None,
) -> UpsamplingGenerator:
    """Return DP-MERF's generator of pictures with the weights of `seed`."""
    with torch.device("meta"):
        net = UpsamplingGenerator(shape, classes, latent=latent)
    return _drawn(net, seed, device)


def draw_table_generator(
    seed: int,
    dimension: int,
    columns: Sequence[Column],
    classes: int,
    *,
    latent: int = 5,
    device: torch.device | str | None = None,
) -> TableGenerator:
    """Return the generator of encoded rows with the weights of `seed`."""
    with torch.device("meta"):
        net = TableGenerator(dimension, columns, classes, latent=latent)
    return _drawn(net, seed, device)


def _drawn(net: N, seed: int, device: torch.device | str | None) -> N:
    """Give a network built on the meta device its seeded weights, on `device`."""
    layers = [
        part
        for part in net.modules()
        if isinstance(part, nn.Linear | nn.Conv2d | nn.ConvTranspose2d)
    ]
    sizes = [value.numel() for layer in layers for value in (layer.weight, _bias(layer))]
    numbers = iter(torch.split(uniforms([seed], sum(sizes), device=device or "cpu")[0], sizes))
    for layer in layers:
        weight, bias = layer.weight, _bias(layer)
        bound = 1 / math.sqrt(weight[0].numel())
        layer.weight = nn.Parameter(next(numbers).view(weight.shape) * bound)
        layer.bias = nn.Parameter(next(numbers).view(bias.shape) * bound)
    for part in net.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.to_empty(device=device or "cpu")
            part.reset_parameters()  # ones and zeros
    return net


def _bias(layer: nn.Linear | nn.Conv2d | nn.ConvTranspose2d) -> Tensor:
    bias = layer.bias
    assert bias is not None  # all layers are built with one
    return bias
