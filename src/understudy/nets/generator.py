"""A small generator of labelled pictures in the manner of DCGAN: PSG's prior (Algorithm 2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from understudy.errors import BadConfiguration
from understudy.nets.draw import uniforms

__all__ = ["Generator", "draw_generator"]


class Generator(nn.Module):
    """Turn a latent vector and a label into a picture; no part mixes records.

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
        told = F.one_hot(labels, self.classes).to(latents.dtype)
        x = self.spread(torch.cat([latents, told], dim=1)).unflatten(1, (-1, *self.first))
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
    layers = [part for part in net.modules() if isinstance(part, nn.Linear | nn.ConvTranspose2d)]
    sizes = [value.numel() for layer in layers for value in (layer.weight, _bias(layer))]
    numbers = iter(torch.split(uniforms([seed], sum(sizes), device=device or "cpu")[0], sizes))
    for layer in layers:
        weight, bias = layer.weight, _bias(layer)
        bound = 1 / math.sqrt(weight[0].numel())
        layer.weight = nn.Parameter(next(numbers).view(weight.shape) * bound)
        layer.bias = nn.Parameter(next(numbers).view(bias.shape) * bound)
    return net


def _bias(layer: nn.Linear | nn.ConvTranspose2d) -> Tensor:
    bias = layer.bias
    assert bias is not None  # both layers are built with one
    return bias
