"""The ConvNet of dataset condensation: random feature extractor and reference classifier.

Blocks of convolution 3x3, instance norm, ReLU, average pool 2x2, then one linear layer
("ConvNetD3W128" in DM, NDPDC, PSG and Dosser).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from understudy.errors import BadConfiguration
from understudy.nets.draw import materialise
from understudy.ops import fused, fused_pair, opening
from understudy.ops.by_record import convolve_by_record
from understudy.ops.neighbours import neighbours

__all__ = ["ConvNet", "default_depth", "halve", "instance_norm", "random_convnet"]


def default_depth(height: int, width: int) -> int:
    """Return how many halvings bring the map nearest to 4x4, and at least two.

    8 and 16: 2; 28 and 32: 3 (the papers' network); 64: 4 (as DM does); 128: 5. So the feature
    vector keeps 2048 entries from 16 pixels upwards, instead of growing with the picture.
    """
    return max(2, round(math.log2(min(height, width) / 4)))


def instance_norm(channels: int) -> nn.GroupNorm:
    """Return the papers' "instance norm": a group norm with as many groups as channels."""
    return nn.GroupNorm(channels, channels)


def halve(x: Tensor) -> Tensor:
    """Average 2x2 neighbourhoods, as `F.avg_pool2d(x, 2)` does.

    On a CPU torch's own pooling of channels-first maps is scalar code; sums of slices take a
    fraction of the time, forward and backward.
    """
    if x.is_cuda:
        return F.avg_pool2d(x, 2)
    height, width = x.shape[-2] & ~1, x.shape[-1] & ~1
    rows = x[..., 0:height:2, :] + x[..., 1:height:2, :]
    return (rows[..., 0:width:2] + rows[..., 1:width:2]) * 0.25


def _as_product(x: Tensor, weight: Tensor, margin: int) -> Tensor:
    """Convolve few channels as one product of matrices; the result lies channels last.

    Libraries convolve one or three channels as if they were eight or more, and turn the result
    around. Neighbourhoods are padded with zeros to a multiple of eight numbers. The product is in
    the weights' precision, what goes back to a pixel is added up in the pictures'.
    """
    height, width = (side + 2 * margin - 2 for side in x.shape[-2:])
    windows = neighbours(F.pad(x, (margin,) * 4), 3).to(weight.dtype).mT
    spare = (0, -windows.shape[-1] % 8)
    product = F.pad(windows, spare) @ F.pad(weight.flatten(1), spare).T
    return product.reshape(-1, height, width, len(weight)).permute(0, 3, 1, 2)


def _of_pairs(weight: Tensor, tangent: Tensor) -> Tensor:
    """Return what takes a pair (x, x') to (w x, w x' + w' x), as w takes x to w x."""
    above = torch.cat([weight, torch.zeros_like(weight)], dim=1)
    return torch.cat([above, torch.cat([tangent, weight], dim=1)])


def _normed_with_tangents(pair: Tensor, weight: Tensor, bias: Tensor, *, halved: bool) -> Tensor:
    """Take maps through a block's norm, ReLU and pool, and their tangents through its derivative."""
    if halved and fused.available(pair):
        return fused_pair.norm_relu_halve(pair, weight, bias)

    def block(maps: Tensor) -> Tensor:
        maps = F.relu(F.group_norm(maps, maps.shape[1], weight, bias))
        return halve(maps) if halved else maps

    maps, tangents = (half.contiguous() for half in pair.float().chunk(2, dim=1))
    return torch.cat(torch.func.jvp(block, (maps,), (tangents,)), dim=1).to(pair.dtype)


class ConvNet(nn.Module):
    """Classify images; `embed` returns the features before the linear layer.

    28x28 pictures are padded to a 32x32 map by the first convolution, so that their features
    number 2048 like those of 32x32 pictures. `depth` defaults to `default_depth`; with a larger
    one the surplus blocks do not pool, since a 1x1 map has no instance norm.

    `precision` other than float32 takes fused blocks on a GPU; with `by_record` these are made for
    gradients of one record each, by the weights.

    No part mixes records: per-record gradients by `torch.func.vmap` are sound, and a batch may be
    cut into pieces at will. Both methods also take one image without a batch dimension.

    Departure: the papers' code pads only one-channel pictures to 32x32; here 28x28 colour
    pictures, which the papers do not use, are padded as well.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        width: int = 128,
        depth: int | None = None,
        precision: torch.dtype = torch.float32,
        by_record: bool = False,
    ) -> None:
        super().__init__()
        self.precision, self.by_record = precision, by_record
        if len(shape) != 3:
            raise BadConfiguration(
                f"ConvNet takes images (channels, height, width), not {tuple(shape)}. "
                "For a table use the network 'mlp'."
            )
        channels, rows, columns = shape
        if min(rows, columns) < 8:
            raise BadConfiguration(
                f"ConvNet needs images of at least 8x8 pixels, not {rows}x{columns}."
            )
        depth = default_depth(rows, columns) if depth is None else depth
        if depth < 1 or width < 1:
            raise BadConfiguration(
                f"ConvNet needs depth and width of 1 or more, not {depth}, {width}."
            )
        margin = 3 if (rows, columns) == (28, 28) else 1
        rows, columns = rows + 2 * (margin - 1), columns + 2 * (margin - 1)
        self.convolutions, self.norms = nn.ModuleList(), nn.ModuleList()
        self.pools = 0
        for block in range(depth):
            before, padding = (channels, margin) if block == 0 else (width, 1)
            self.convolutions.append(nn.Conv2d(before, width, 3, padding=padding))
            self.norms.append(instance_norm(width))
            if min(rows, columns) >= 4:
                rows, columns, self.pools = rows // 2, columns // 2, self.pools + 1
        self.features = width * rows * columns
        self.classifier = nn.Linear(self.features, classes)

    def embed(self, x: Tensor) -> Tensor:
        """Return the flattened last map: (n, features), or (features,) for one image."""
        if x.dim() == 3:
            return self.embed(x[None])[0]
        if self.is_fast(x):
            return self._embed_fast(x)
        for block, (convolution, norm) in enumerate(self._blocks()):
            x = F.relu(norm(convolution(x)), inplace=True)
            if block < self.pools:
                x = halve(x)
        return x.flatten(1)

    def is_fast(self, x: Tensor) -> bool:
        """Tell whether these pictures go through in lower precision, and have no second derivative."""
        return self.precision != torch.float32 and x.is_cuda

    def _blocks(self) -> Iterator[tuple[nn.Conv2d, nn.GroupNorm]]:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            yield cast(nn.Conv2d, convolution), cast(nn.GroupNorm, norm)

    def _embed_fast(self, x: Tensor) -> Tensor:
        """Return the same in lower precision, channels last, with fused blocks.

        The biases of the convolutions are left out: the norm takes each map's constant away.
        """
        for block, (convolution, norm) in enumerate(self._blocks()):
            margin = int(convolution.padding[0])
            if block == 0 < self.pools and opening.available(x, convolution.weight, margin):
                affine = norm.weight, norm.bias
                x = opening.convolve_norm_relu_halve(
                    x, convolution.weight, *affine, margin, self.precision
                )
                continue
            x, weight = x.to(self.precision), convolution.weight.to(self.precision)
            if block == 0:
                x = _as_product(x, weight, margin)
            elif self.by_record:
                x = convolve_by_record(x, weight)
            else:
                weight = weight.contiguous(memory_format=torch.channels_last)
                x = F.conv2d(x, weight, padding=1)
            halved = block < self.pools
            if halved and fused.available(x):
                x = fused.norm_relu_halve(x, norm.weight, norm.bias)
                continue
            x = F.relu(F.group_norm(x, norm.num_groups, norm.weight.to(x), norm.bias.to(x)))
            x = halve(x) if halved else x
        return x.flatten(1).float()

    def along(
        self, parameters: Mapping[str, Tensor], direction: Mapping[str, Tensor], x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the logits, and how fast they change as the weights go along `direction`.

        `direction` holds the weights of the convolutions and of the linear layer. Computed as
        `_embed_fast` does, every map beside its tangent. It can be differentiated by the pictures,
        once, and by nothing else.
        """
        weights = {name: (parameters[name], direction[name]) for name in direction}
        pair = x
        for block, (convolution, _) in enumerate(self._blocks()):
            both = weights[f"convolutions.{block}.weight"]
            if block == 0:  # pictures have no tangents
                weight = torch.cat(both).to(self.precision)
                pair = _as_product(x, weight, int(convolution.padding[0]))
            else:
                layout = torch.channels_last
                weight = _of_pairs(*both).to(self.precision, memory_format=layout)
                pair = F.conv2d(pair, weight, padding=1)
            affine = parameters[f"norms.{block}.weight"], parameters[f"norms.{block}.bias"]
            pair = _normed_with_tangents(pair, *affine, halved=block < self.pools)
        features = pair.flatten(1).float()
        logits, tangents = F.linear(features, _of_pairs(*weights["classifier.weight"])).chunk(2, 1)
        return logits + parameters["classifier.bias"], tangents

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.classifier(self.embed(x))
        return logits


def random_convnet(
    seed: int,
    shape: tuple[int, int, int],
    classes: int,
    *,
    device: torch.device | str | None = None,
    width: int = 128,
    depth: int | None = None,
) -> ConvNet:
    """Return the ConvNet of `seed`: the same one on every device and in every process.

    The weights are drawn on `device` itself and the global generators are not touched. For many
    networks at once see `draw_parameters`.
    """
    with torch.device("meta"):
        net = ConvNet(shape, classes, width, depth)
    return materialise(net, seed, device)
