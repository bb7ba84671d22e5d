"""Restate the usual code of dataset condensation: what a step is compared with.

Written from a description of how published code goes about it (shared/methods.md, sections 1 to
4), not from that code: networks of PyTorch's modules, initialised on the CPU by PyTorch's defaults
and carried to the device; one class after the other; augmentation by one small function after
another, with a Python loop over pictures where one is usual; one operation at a time. Global
generators are seeded by the clock, as is the habit there. Nothing here is private.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from understudy.nets.convnet import default_depth
from understudy.ops.augment import FAMILIES, AugmentParams

STRATEGY = "color_crop_cutout_scale_rotate"


def clock_seed() -> int:
    """Return milliseconds modulo 100,000."""
    return int(time.time() * 1000) % 100_000


def reseed(seed: int) -> None:
    """Seed the global generators.

    Without a GPU ``torch.manual_seed`` spends most of its time noting a stack trace for one that
    may come; the code restated here runs on a GPU, so that is left out.
    """
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


# The network


class Network(nn.Module):
    """Build the condensation papers' ConvNet: blocks of modules in a row, one linear layer."""

    def __init__(self, shape: Sequence[int], classes: int, width: int = 128) -> None:
        super().__init__()
        channels, side = shape[0], shape[1]
        blocks: list[nn.Module] = []
        for block in range(default_depth(side, side)):
            padding = 3 if block == 0 and side == 28 else 1
            blocks += [
                nn.Conv2d(channels, width, 3, padding=padding),
                nn.GroupNorm(width, width),
                nn.ReLU(inplace=True),
                nn.AvgPool2d(2, 2),
            ]
            channels, side = width, (side + 2 * (padding - 1)) // 2
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(width * side * side, classes)

    def embed(self, x: Tensor) -> Tensor:
        """Return the features, flat."""
        return self.blocks(x).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.classifier(self.embed(x))


def fresh_network(
    shape: Sequence[int], classes: int, width: int, device: torch.device, *, frozen: bool = False
) -> Network:
    """Draw a network on the CPU, then carry it to the device."""
    reseed(clock_seed())
    net = Network(shape, classes, width).to(device)
    if frozen:
        for parameter in net.parameters():
            parameter.requires_grad = False
    return net


def same_network(
    shape: Sequence[int],
    classes: int,
    width: int,
    weights: Mapping[str, Tensor],
    *,
    frozen: bool = False,
) -> Network:
    """Build the network in float64 with our ConvNet's weights, to compare results."""
    net = Network(shape, classes, width).double()
    own = {}
    for name, value in weights.items():
        kind, _, rest = name.partition(".")
        if kind in ("convolutions", "norms"):
            block, _, leaf = rest.partition(".")
            name = f"blocks.{4 * int(block) + (kind == 'norms')}.{leaf}"
        own[name] = value.cpu()
    net.load_state_dict(own, strict=False)
    for parameter in net.parameters():
        parameter.requires_grad = not frozen
    return net


# Differentiable augmentation, a function each


def change_color(x: Tensor, brightness: Tensor, saturation: Tensor, contrast: Tensor) -> Tensor:
    """Brighten, then saturate about the channels' mean, then spread about the picture's mean."""
    x = x + brightness.view(-1, 1, 1, 1)
    mean = x.mean(dim=1, keepdim=True)
    x = (x - mean) * saturation.view(-1, 1, 1, 1) + mean
    mean = x.mean(dim=[1, 2, 3], keepdim=True)
    return (x - mean) * contrast.view(-1, 1, 1, 1) + mean


def crop(x: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Shift by whole pixels; zeros come in."""
    reach_y, reach_x = int(x.size(2) * 0.125 + 0.5), int(x.size(3) * 0.125 + 0.5)
    picture, row, column = torch.meshgrid(
        torch.arange(x.size(0), device=x.device),
        torch.arange(x.size(2), device=x.device),
        torch.arange(x.size(3), device=x.device),
        indexing="ij",
    )
    row, column = row + down.view(-1, 1, 1) + reach_y, column + across.view(-1, 1, 1) + reach_x
    padded = F.pad(x, [reach_x, reach_x, reach_y, reach_y])
    return padded.permute(0, 2, 3, 1).contiguous()[picture, row, column].permute(0, 3, 1, 2)


def cut_out(x: Tensor, top: Tensor, left: Tensor) -> Tensor:
    """Blacken a square of half the side whose corner is given; part of it may lie outside."""
    high, wide = int(x.size(2) * 0.5 + 0.5), int(x.size(3) * 0.5 + 0.5)
    mask = torch.ones(x.size(0), x.size(2), x.size(3), dtype=x.dtype, device=x.device)
    picture, row, column = torch.meshgrid(
        torch.arange(x.size(0), device=x.device),
        torch.arange(high, device=x.device),
        torch.arange(wide, device=x.device),
        indexing="ij",
    )
    row, column = row + top.view(-1, 1, 1), column + left.view(-1, 1, 1)
    inside = (row >= 0) & (row < x.size(2)) & (column >= 0) & (column < x.size(3))
    mask[picture[inside], row[inside], column[inside]] = 0
    return x * mask.unsqueeze(1)


def flip(x: Tensor, mirrored: Tensor) -> Tensor:
    """Mirror some of the pictures."""
    return torch.where(mirrored.view(-1, 1, 1, 1), x.flip(3), x)


def scale(x: Tensor, wide: Tensor, high: Tensor) -> Tensor:
    """Stretch along both axes: one matrix after the other, then one resampling."""
    theta = [[[wide[i], 0, 0], [0, high[i], 0]] for i in range(x.size(0))]
    return _resample(x, torch.tensor(theta, dtype=x.dtype))


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Turn about the middle: one matrix after the other, then one resampling."""
    theta = [[[torch.cos(a), torch.sin(-a), 0], [torch.sin(a), torch.cos(a), 0]] for a in angle]
    return _resample(x, torch.tensor(theta, dtype=x.dtype))


def _resample(x: Tensor, theta: Tensor) -> Tensor:
    grid = F.affine_grid(theta.to(x.device), list(x.shape), align_corners=True)
    return F.grid_sample(x, grid, align_corners=True)


def augment(x: Tensor, strategy: str = STRATEGY, seed: int | None = None) -> Tensor:
    """Draw one family for the batch, and numbers for each picture, or with a seed one for all."""
    if not strategy or not len(x):
        return x
    families = strategy.split("_")
    if seed is not None:
        reseed(seed)
    family = families[int(torch.randint(len(families), (1,)))]
    places = itertools.count(1)

    def between(low: float, high: float) -> Tensor:
        if seed is not None:
            reseed(seed + next(places))
        numbers = torch.rand(x.size(0), device=x.device) * (high - low) + low
        if seed is not None:
            numbers[:] = numbers[0]
        return numbers

    def among(low: int, high: int) -> Tensor:
        return between(low, high + 1).floor().long().clamp(max=high)

    side = x.size(2)
    if family == "color":
        return change_color(x, between(-0.5, 0.5), between(0, 2), between(0.5, 1.5))
    if family == "crop":
        reach = int(side * 0.125 + 0.5)
        return crop(x, among(-reach, reach), among(-reach, reach))
    if family == "cutout":
        hole = int(side * 0.5 + 0.5)
        return cut_out(x, *(among(0, side - hole % 2) - hole // 2 for _ in range(2)))
    if family == "flip":
        return flip(x, between(0, 1) < 0.5)
    if family == "scale":
        return scale(x, between(1 / 1.2, 1.2), between(1 / 1.2, 1.2))
    return rotate(x, between(-15, 15) * float(np.pi) / 180)


def augment_as(x: Tensor, draws: AugmentParams, which: int) -> Tensor:
    """Apply one of our draws by the functions above, to compare results."""
    family = FAMILIES[int(draws.family[which])]
    color, affine, hole = (p[which].double() for p in draws[1:])
    many, side = len(x), x.size(2)

    def same(number: Tensor) -> Tensor:
        return number.expand(many)

    if family == "color":
        return change_color(x, *(same(number) for number in color))
    if family == "crop":
        pixels = (affine[:, 2] * (side - 1) / 2).round().long()
        return crop(x, same(pixels[1]), same(pixels[0]))
    if family == "cutout":
        return cut_out(x, same(hole[0].long()), same(hole[2].long()))
    if family == "flip":
        return flip(x, same(affine[0, 0] < 0))
    if family == "scale":
        return scale(x, same(affine[0, 0]), same(affine[1, 1]))
    if family == "rotate":
        return rotate(x, same(torch.atan2(affine[1, 0], affine[0, 0])))
    return x


# Condensing, class by class


def poisson(members: npt.NDArray[np.intp], expected: float) -> npt.NDArray[np.intp]:
    """Include each of a class's records with probability expected / their number."""
    members = np.random.permutation(members)
    return members[np.random.uniform(size=len(members)) < expected / len(members)]


def clipped(features: Tensor, bound: float) -> Tensor:
    """Shorten long rows; the factor counts as a constant."""
    norms = features.detach().norm(dim=1, keepdim=True)
    return features * torch.minimum(torch.ones_like(norms), bound / norms)


@torch.no_grad()
def noisy_sum(features: Tensor, bound: float, noise_multiplier: float) -> Tensor:
    """Add up clipped rows and add noise from the global generator."""
    total = clipped(features, bound).sum(dim=0)
    return total + noise_multiplier * bound * torch.randn_like(total)


def class_loss(features: Tensor, target: Tensor, bound: float, group: float) -> Tensor:
    """Return ||group / M x sum of clipped rows - target||^2."""
    return ((group / len(features) * clipped(features, bound).sum(dim=0) - target) ** 2).sum()


# Matching gradients


def weights_of(net: nn.Module) -> list[nn.Parameter]:
    """Return the tensors a gradient is matched by: of two dimensions or more."""
    return [p for p in net.parameters() if p.dim() >= 2]


def one_by_one(net: nn.Module, images: Tensor, labels: Tensor) -> Iterator[list[Tensor]]:
    """Yield each record's gradient, by a backward pass of its own."""
    for i in range(len(images)):
        loss = F.cross_entropy(net(images[i : i + 1]), labels[i : i + 1])
        yield list(torch.autograd.grad(loss, weights_of(net)))


def private_gradient(
    net: nn.Module,
    images: Tensor,
    labels: Tensor,
    bound: float,
    noise_multiplier: float,
) -> list[Tensor]:
    """Clip each record's gradient, add them up, add noise."""
    total = [torch.zeros_like(p) for p in weights_of(net)]
    for gradient in one_by_one(net, images, labels):
        norm = torch.stack([part.norm() for part in gradient]).norm()
        factor = torch.clamp(bound / norm, max=1.0)
        for held, part in zip(total, gradient, strict=True):
            held += part * factor
    return [held + noise_multiplier * bound * torch.randn_like(held) for held in total]


def gradient_distance(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor:
    """Add up 1 - cosine over the rows of each layer."""
    total = torch.zeros((), dtype=ours[0].dtype, device=ours[0].device)
    for a, b in zip(ours, theirs, strict=True):
        a, b = a.reshape(a.size(0), -1), b.reshape(b.size(0), -1)
        cosine = (a * b).sum(dim=1) / (a.norm(dim=1) * b.norm(dim=1) + 1e-6)
        total = total + (1 - cosine).sum()
    return total
