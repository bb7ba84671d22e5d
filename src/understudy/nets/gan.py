"""DataLens' conditional generator and its discriminators, thousands of them at a time.

Both are functions of a dictionary of weights, so one call of ``torch.func.vmap`` runs, trains or
questions a whole stack of networks. The layers are those of the published MNIST setting (a DCGAN
told the label at every layer); other sides take the same layers on maps of a half and a quarter of
the side. Pixels lie in [0, 1] here, as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from understudy.errors import BadConfiguration
from understudy.nets.draw import uniforms
from understudy.ops.columns import columns

__all__ = ["Discriminator", "Generator", "Weights"]

Weights = dict[str, Tensor]
Shape = tuple[int, int, int]

DEVIATION = 0.02  # of the initial weights, as published
SLOPE = 0.2  # of the leaky ReLU
EPSILON = 1e-5  # of the batch norms
KERNEL = 5
MARGIN = (1, 2)  # zeros before and after, so that a convolution leaves half the side


class Discriminator:
    """Tell real pictures from made ones, given their labels.

    Convolution 5x5 stride 2 to ``widths[0]`` channels, leaky ReLU; another to ``widths[1]``, batch
    norm, leaky ReLU; linear to ``widths[2]``, batch norm, leaky ReLU; linear to one logit. The
    one-hot label is joined to the input of each of the four, as constant planes where it is a
    map. Batch norms use the statistics of the batch they are given, always.

    The published widths are (channels + classes, 32 + classes, 256): for 28x28 grey pictures of
    ten classes 555,655 weights.
    """

    def __init__(
        self, shape: Shape, classes: int, *, widths: tuple[int, int, int] | None = None
    ) -> None:
        channels, side = _square(shape)
        first, second, hidden = widths or (channels + classes, 32 + classes, 256)
        if min(first, second, hidden) < 1:
            raise BadConfiguration(f"A discriminator needs widths of 1 or more: {widths}.")
        self.shape, self.classes = shape, classes
        self.shapes: dict[str, tuple[int, ...]] = {
            "first.weight": (first, channels + classes, KERNEL, KERNEL),
            "first.bias": (first,),
            "second.weight": (second, first + classes, KERNEL, KERNEL),
            "second.bias": (second,),
            "second.scale": (second,),
            "second.shift": (second,),
            "third.weight": (hidden, second * (side // 4) ** 2 + classes),
            "third.bias": (hidden,),
            "third.scale": (hidden,),
            "third.shift": (hidden,),
            "last.weight": (1, hidden + classes),
            "last.bias": (1,),
        }

    def draw(self, seeds: Sequence[int], *, device: torch.device | str | None = None) -> Weights:
        """Return the first weights of many discriminators, stacked: row i is that of seeds[i]."""
        return _draw(self.shapes, seeds, device)

    def __call__(
        self, weights: Mapping[str, Tensor], images: Tensor, labels: Tensor, *, batches: int = 1
    ) -> Tensor:
        """Return one logit a picture: above zero for real ones.

        ``batches`` says how many batches of equal size lie end to end: norms keep them apart.
        """
        told = _one_hot(labels, self.classes, images.dtype)
        x = _leaky(_strided(images, told, weights["first.weight"], weights["first.bias"]))
        x = _strided(x, told, weights["second.weight"], weights["second.bias"])
        x = _leaky(_normed(x, weights, "second", batches)).flatten(1)
        x = F.linear(torch.cat([x, told], 1), weights["third.weight"], weights["third.bias"])
        x = _leaky(_normed(x, weights, "third", batches))
        logits = F.linear(torch.cat([x, told], 1), weights["last.weight"], weights["last.bias"])
        return logits[:, 0]


class Generator:
    """Make pictures from latent vectors and labels.

    Linear to ``hidden``, batch norm, ReLU; linear to a map of 2 ``width`` channels and a quarter
    of the side, batch norm, ReLU; transposed convolution 5x5 stride 2 to as many channels, batch
    norm, ReLU; another to the picture, sigmoid. The one-hot label is joined to the input of each.
    Published: hidden 1024, width 64.

    Batch norms use the batch's statistics while the generator learns and, where
    ``statistics`` are given, those: a picture then depends on its own latent and label only.
    """

    def __init__(
        self, shape: Shape, classes: int, *, latent: int = 50, hidden: int = 1024, width: int = 64
    ) -> None:
        channels, side = _square(shape)
        if min(latent, hidden, width) < 1:
            raise BadConfiguration(
                f"A generator needs latent, hidden and width of 1 or more: {latent}, {hidden}, "
                f"{width}."
            )
        self.shape, self.classes, self.latent = shape, classes, latent
        self.maps, self.side = 2 * width, side // 4
        flat = self.maps * self.side**2
        self.shapes: dict[str, tuple[int, ...]] = {
            "first.weight": (hidden, latent + classes),
            "first.bias": (hidden,),
            "first.scale": (hidden,),
            "first.shift": (hidden,),
            "second.weight": (flat, hidden + classes),
            "second.bias": (flat,),
            "second.scale": (flat,),
            "second.shift": (flat,),
            "third.weight": (self.maps + classes, self.maps, KERNEL, KERNEL),
            "third.bias": (self.maps,),
            "third.scale": (self.maps,),
            "third.shift": (self.maps,),
            "last.weight": (self.maps + classes, channels, KERNEL, KERNEL),
            "last.bias": (channels,),
        }

    def draw(self, seed: int, *, device: torch.device | str | None = None) -> Weights:
        """Return the first weights of `seed`."""
        return {name: value[0] for name, value in _draw(self.shapes, [seed], device).items()}

    def __call__(
        self,
        weights: Mapping[str, Tensor],
        latents: Tensor,
        labels: Tensor,
        *,
        statistics: Mapping[str, Tensor] | None = None,
        seen: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Return one picture in [0, 1] for each latent and label.

        Where ``seen`` is given, the batch's own statistics are put into it.
        """
        told = _one_hot(labels, self.classes, latents.dtype)

        def norm(x: Tensor, name: str) -> Tensor:
            return F.relu(_normed(x, weights, name, 1, statistics, seen))

        x = F.linear(torch.cat([latents, told], 1), weights["first.weight"], weights["first.bias"])
        x = torch.cat([norm(x, "first"), told], 1)
        x = norm(F.linear(x, weights["second.weight"], weights["second.bias"]), "second")
        x = x.view(-1, self.maps, self.side, self.side)
        x = norm(_enlarged(x, told, weights["third.weight"], weights["third.bias"]), "third")
        return torch.sigmoid(_enlarged(x, told, weights["last.weight"], weights["last.bias"]))

    def statistics(
        self, weights: Mapping[str, Tensor], latents: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Return the batch norms' means and variances on one large batch of made pictures."""
        seen: dict[str, Tensor] = {}
        self(weights, latents, labels, seen=seen)
        return seen


def _square(shape: Shape) -> tuple[int, int]:
    """Return channels and side, or say which pictures these networks take."""
    if len(shape) != 3 or shape[1] != shape[2] or shape[1] < 8 or shape[1] % 4:
        raise BadConfiguration(
            "DataLens' networks take square pictures whose side is a multiple of 4 and at least "
            f"8, not records of shape {tuple(shape)}."
        )
    return shape[0], shape[1]


def _draw(
    shapes: Mapping[str, tuple[int, ...]], seeds: Sequence[int], device: torch.device | str | None
) -> Weights:
    """Draw normal weights, biases and shifts of zero and scales of one, stacked over the seeds."""
    drawn = [name for name in shapes if name.endswith(".weight")]
    sizes = [math.prod(shapes[name]) for name in drawn]
    # Half a step up, which is exact: no uniform is then -1, whose normal would be infinite.
    flat = uniforms(list(seeds), sum(sizes), device=device).add_(2.0**-24)
    flat = flat.erfinv_().mul_(DEVIATION * math.sqrt(2.0))
    pieces = dict(zip(drawn, torch.split(flat, sizes, dim=1), strict=True))
    weights = {}
    for name, shape in shapes.items():
        stacked = (len(seeds), *shape)
        if name in pieces:
            weights[name] = pieces[name].reshape(stacked)
        else:
            weights[name] = torch.full(stacked, float(name.endswith(".scale")), device=device)
    return weights


def _one_hot(labels: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Return one-hot rows; unlike F.one_hot it looks at no value, so vmap takes it."""
    return (labels[:, None] == torch.arange(classes, device=labels.device)).to(dtype)


def _leaky(x: Tensor) -> Tensor:
    return F.leaky_relu(x, SLOPE)


def _normed(
    x: Tensor,
    weights: Mapping[str, Tensor],
    name: str,
    batches: int,
    statistics: Mapping[str, Tensor] | None = None,
    seen: dict[str, Tensor] | None = None,
) -> Tensor:
    """Give each channel of each batch its learnt scale and shift."""
    apart = x.view(batches, -1, *x.shape[1:])
    if statistics is None:
        over = [1, *range(3, apart.dim())]
        variance, mean = torch.var_mean(apart, dim=over, correction=0)
    else:
        mean, variance = statistics[f"{name}.mean"][None], statistics[f"{name}.variance"][None]
    if seen is not None:
        seen[f"{name}.mean"], seen[f"{name}.variance"] = mean[0].detach(), variance[0].detach()
    scale = weights[f"{name}.scale"] * torch.rsqrt(variance + EPSILON)
    shift = weights[f"{name}.shift"] - mean * scale
    along = (batches, 1, -1, *[1] * (x.dim() - 2))
    return (apart * scale.view(along) + shift.view(along)).view_as(x)


def _strided(x: Tensor, told: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve the map and its label planes, 5x5 with stride 2, to half the side.

    The planes are constant, so what they add to the map is computed once a class and looked up:
    half of the published network's arithmetic.
    """
    channels, side, half = x.shape[1], x.shape[2], x.shape[2] // 2
    filters, classes = len(weight), told.shape[1]
    taps = _patches(torch.ones(1, 1, side, side, dtype=x.dtype, device=x.device))
    planes = weight[:, channels:].reshape(filters * classes, KERNEL**2) @ taps
    planes = planes.view(filters, classes, half**2).transpose(0, 1).reshape(classes, -1)
    lookup = (told @ planes).view(len(x), filters, half, half)
    # Under vmap F.conv2d is one convolution with as many groups as there are networks: on a CPU
    # the faster way from a few channels upwards, on a GPU a slow one (benchmarks/teachers.py).
    convolve = by_patches if x.is_cuda or channels == 1 else by_convolution
    return convolve(x, weight[:, :channels]) + lookup + bias[:, None, None]


def by_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve, 5x5 with stride 2."""
    return F.conv2d(F.pad(x, MARGIN * 2), weight, stride=2)


def by_patches(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve by one matrix product: under vmap, one batched product for all networks."""
    made = weight.reshape(len(weight), -1) @ _patches(x)
    half = x.shape[-1] // 2
    return made.view(len(weight), len(x), half, half).transpose(0, 1)


def _patches(x: Tensor) -> Tensor:
    """Return the 5x5 patches a stride of 2 meets, as columns (channels x 25, pictures x places)."""
    return columns(x, KERNEL, 2, *MARGIN)


def _enlarged(x: Tensor, told: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Join label planes and convolve transposed, 5x5 with stride 2, to twice the side."""
    planes = told[:, :, None, None].expand(-1, -1, *x.shape[2:])
    x = torch.cat([x, planes], 1)
    return F.conv_transpose2d(x, weight, bias, stride=2, padding=2, output_padding=1)
