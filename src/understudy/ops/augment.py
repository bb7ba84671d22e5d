"""Differentiable Siamese augmentation (Zhao and Bilen, ICML 2021), as the condensation papers use.

One family of transformation is drawn, then its parameters. Every draw is written in one neutral
form: a colour map, an affine map and a hole, each the identity unless its family was drawn. So any
mixture of draws is one pass over the batch without a loop or a branch, and a single picture under
`torch.func.vmap` goes through the same arithmetic.

Draws come from a seed alone (public randomness) and are made on the CPU, so they are the same
whatever the device; no global generator is touched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from understudy.errors import BadConfiguration, UnknownName

__all__ = ["FAMILIES", "AugmentParams", "Augmentation", "apply"]

Numbers = npt.NDArray[np.float64]

FAMILIES = ("none", "color", "crop", "cutout", "flip", "scale", "rotate")
_AFFINE = frozenset({"crop", "flip", "scale", "rotate"})

# The magnitudes of the DSA code, used unchanged by DM, NDPDC and Dosser.
_BRIGHTNESS = 0.5  # added: uniform on +-0.5
_SATURATION = (0.0, 2.0)  # factor about the mean over channels of each pixel
_CONTRAST = (0.5, 1.5)  # factor about the mean of the picture
_CROP = 0.125  # shift by up to this part of the side, zeros come in
_CUTOUT = 0.5  # side of the hole, as part of the picture's
_FLIP = 0.5  # probability
_SCALE = 1.2  # each axis by a factor uniform on [1/1.2, 1.2]
_ROTATE = math.radians(15)  # uniform on +-15 degrees

_NUMBERS = 10  # uniform numbers that one draw takes


class AugmentParams(NamedTuple):
    """Hold n draws. Under `vmap(in_dims=0)` each call sees one draw, without the leading n."""

    family: Tensor  # (n,) index into FAMILIES; a whole number of any type
    color: Tensor  # (n, 3) brightness, saturation, contrast; neutral 0, 1, 1
    affine: Tensor  # (n, 2, 3) from output to input, coordinates in [-1, 1]; neutral [I | 0]
    hole: Tensor  # (n, 4) top, bottom, left, right in pixels, ends excluded; neutral 0, 0, 0, 0

    def to(self, device: torch.device | str) -> AugmentParams:
        """Return the same draws on another device."""
        return AugmentParams(*(part.to(device, non_blocking=True) for part in self))

    def packed(self) -> Tensor:
        """Return the draws side by side in one tensor, (n, 14)."""
        parts = self.family[..., None], self.color, self.affine.flatten(-2), self.hole
        return torch.cat([part.float() for part in parts], dim=-1)

    @classmethod
    def unpacked(cls, packed: Tensor) -> AugmentParams:
        """Return the draws that are packed, as views of it; the family as a float."""
        family, color, affine, hole = torch.split(packed, [1, 3, 6, 4], dim=-1)
        return cls(family.squeeze(-1), color, affine.reshape(*affine.shape[:-1], 2, 3), hole)


@dataclass(frozen=True)
class Augmentation:
    """Name the families to choose from, as the papers write them: "color_crop_cutout_flip".

    Empty or "none" is the identity. Flips are for data that may be mirrored: not for digits.
    """

    strategy: str

    def __post_init__(self) -> None:
        for name in self.families:
            if name not in FAMILIES[1:]:
                raise UnknownName("augmentation family", name, FAMILIES[1:])
        if len(set(self.families)) != len(self.families):
            raise BadConfiguration(f"The strategy '{self.strategy}' names a family twice.")

    @property
    def families(self) -> tuple[str, ...]:
        """Return the families in the order of the strategy; () for the identity."""
        if self.strategy.lower() in ("", "none"):
            return ()
        return tuple(self.strategy.lower().split("_"))

    def draw(
        self,
        seed: int | torch.Generator,
        n: int,
        size: tuple[int, int],
        *,
        one_family: bool = False,
    ) -> AugmentParams:
        """Draw n times for pictures of `size` (height, width), each family equally likely.

        n = 1 is the Siamese draw that `apply` shares among a batch. `one_family` gives all n
        draws the same family with parameters of their own: what the papers' code does to a batch
        when it trains a classifier. A generator must live on the CPU; it is advanced.
        """
        if not isinstance(seed, torch.Generator):
            seed = torch.Generator().manual_seed(seed)
        made = self.draw_batches([seed], [n], size, one_family=one_family)
        return AugmentParams(*(part[0] for part in made))

    def draw_batches(
        self,
        generators: Sequence[torch.Generator],
        counts: Sequence[int],
        size: tuple[int, int],
        *,
        one_family: bool = False,
    ) -> AugmentParams:
        """Draw batches of these sizes with each generator, in one go: (generators, draws, ...).

        What :meth:`draw` gives batch by batch; `one_family` is one a batch.
        """
        height, width = size
        if min(height, width) < 2:
            raise BadConfiguration(
                f"Augmentation needs pictures of at least 2x2 pixels, not {size}."
            )
        rows = [
            torch.rand(_NUMBERS, count, generator=generator, dtype=torch.float64).numpy()
            for generator in generators
            for count in counts
        ]
        alike = list(counts) * len(generators) if one_family else None
        made = self._made(np.concatenate(rows, axis=1), size, alike)
        shared = len(generators), sum(counts)
        return AugmentParams(*(part.reshape(*shared, *part.shape[1:]) for part in made))

    def _made(
        self, numbers: Numbers, size: tuple[int, int], alike: Sequence[int] | None
    ) -> AugmentParams:
        """Make draws of uniform numbers, a column each; so many in a row have the same family."""
        height, width = size
        # Always the same numbers for a draw, whichever family uses them. They are few, and NumPy
        # starts an operation several times sooner than torch.
        choice, *u = numbers
        n = len(choice)

        offered = np.array([FAMILIES.index(name) for name in self.families or ("none",)])
        family = offered[(choice * len(offered)).astype(np.int64)]
        if alike is not None:
            family = np.repeat(family[np.cumsum([0, *alike[:-1]])], alike)

        def is_drawn(name: str) -> npt.NDArray[np.bool_]:
            drawn: npt.NDArray[np.bool_] = family == FAMILIES.index(name)
            return drawn

        def between(number: Numbers, low: float, high: float) -> Numbers:
            return low + (high - low) * number

        def among(number: Numbers, low: int, high: int) -> Numbers:
            return low + np.floor(number * (high - low + 1))

        color = np.empty((n, 3), np.float32)
        drawn = is_drawn("color")
        color[:, 0] = np.where(drawn, between(u[0], -_BRIGHTNESS, _BRIGHTNESS), 0.0)
        color[:, 1] = np.where(drawn, between(u[1], *_SATURATION), 1.0)
        color[:, 2] = np.where(drawn, between(u[2], *_CONTRAST), 1.0)

        # x_in = xx x_out + xy y_out + shift_x, and likewise for y.
        affine = np.empty((n, 2, 3), np.float32)
        scaled, shifted = is_drawn("scale"), is_drawn("crop")
        angle = np.where(is_drawn("rotate"), between(u[5], -_ROTATE, _ROTATE), 0.0)
        aspect = (height - 1) / (width - 1)
        straight, turned = np.cos(angle), np.sin(angle)
        xx = np.where(scaled, between(u[3], 1 / _SCALE, _SCALE), straight)
        affine[:, 0, 0] = np.where(is_drawn("flip") & (u[6] < _FLIP), -1.0, xx)
        affine[:, 0, 1] = -turned * aspect
        affine[:, 1, 0] = turned / aspect
        affine[:, 1, 1] = np.where(scaled, between(u[4], 1 / _SCALE, _SCALE), straight)
        pad_y, pad_x = (int(_CROP * side + 0.5) for side in size)
        affine[:, 0, 2] = np.where(shifted, among(u[7], -pad_x, pad_x) * 2 / (width - 1), 0.0)
        affine[:, 1, 2] = np.where(shifted, among(u[8], -pad_y, pad_y) * 2 / (height - 1), 0.0)

        # The centre of the hole is uniform, so part of it may lie outside.
        hole = np.empty((n, 4), np.float32)
        cut = is_drawn("cutout")
        for edge, side, number in ((0, height, u[7]), (2, width, u[8])):
            hole_side = int(_CUTOUT * side + 0.5)
            start = among(number, 0, side - hole_side % 2) - hole_side // 2
            hole[:, edge], hole[:, edge + 1] = start * cut, (start + hole_side) * cut

        return AugmentParams(*map(torch.from_numpy, (family, color, affine, hole)))

    def apply(self, images: Tensor, params: AugmentParams) -> Tensor:
        """Transform the pictures; see `apply` of this module."""
        return apply(images, params) if self.families else images


def _families_in(params: AugmentParams) -> frozenset[str]:
    """Return the families that occur; all of them where vmap hides the values or a GPU has them."""
    if params.family.is_cuda:  # reading would wait until the device has caught up
        return frozenset(FAMILIES)
    try:
        return frozenset(FAMILIES[int(index)] for index in set(params.family.reshape(-1).tolist()))
    except RuntimeError:
        return frozenset(FAMILIES)


def apply(images: Tensor, params: AugmentParams) -> Tensor:
    """Transform pictures (n, C, H, W) by one draw each, or all of them by a single draw.

    One picture (C, H, W) with one draw is taken as well, also under `torch.func.vmap`, where the
    draw may be shared or mapped. Differentiable in the pictures. Families that nobody drew cost
    nothing where the draws can be read (keep them on the CPU); under vmap over the draws
    everything is computed, with neutral parameters. Affine families are resampled, also where only
    whole pixels move, so they are exact to rounding; torch has no second derivative for them.
    """
    if images.dim() == 3:
        one = AugmentParams(*(p.reshape(1, *s) for p, s in zip(params, _ONE, strict=True)))
        return apply(images[None], one)[0]
    n, draws = images.shape[0], params.color.shape[0]
    if draws not in (1, n):
        raise BadConfiguration(
            f"{draws} draws for {n} pictures: give one for all, or one for each."
        )
    occurring = _families_in(params)
    if occurring <= {"none"}:
        return images
    if "color" in occurring:
        images = _change_color(images, params.color.to(images, non_blocking=True))
    if occurring & _AFFINE:
        images = _warp(images, params.affine.to(images, non_blocking=True))
    if "cutout" in occurring:
        images = _cut_out(images, params.hole.to(images, non_blocking=True))
    return images


_ONE: tuple[tuple[int, ...], ...] = ((), (3,), (2, 3), (4,))


def _change_color(images: Tensor, color: Tensor) -> Tensor:
    """Apply brightness b, saturation s, contrast c, in this order, in one expression.

    With the pixel's mean over channels m and the picture's mean M (neither moved by the other
    steps except for b): c (s (x - m) + m - M) + M + b.
    """
    brightness, saturation, contrast = color[:, :, None, None, None].unbind(1)
    center = images.mean((1, 2, 3), keepdim=True)
    offset = (1 - contrast) * center + brightness
    if images.shape[1] == 1:
        return torch.addcmul(offset, images, contrast)
    gray = images.mean(1, keepdim=True)
    return contrast * saturation * images + (contrast * (1 - saturation) * gray + offset)


def _warp(images: Tensor, affine: Tensor) -> Tensor:
    """Resample bilinearly at affinely moved positions, zeros outside (align_corners=True)."""
    n, (height, width) = images.shape[0], images.shape[-2:]
    y = torch.linspace(-1, 1, height, dtype=images.dtype, device=images.device)
    x = torch.linspace(-1, 1, width, dtype=images.dtype, device=images.device)
    horizontal = affine[:, None, :, 0] * x[:, None]  # (n, W, 2)
    vertical = affine[:, None, :, 1] * y[:, None] + affine[:, None, :, 2]  # (n, H, 2)
    grid = horizontal[:, None] + vertical[:, :, None]
    return F.grid_sample(images, grid.expand(n, -1, -1, -1), align_corners=True)


def _cut_out(images: Tensor, hole: Tensor) -> Tensor:
    """Set the pixels of the hole to zero."""
    y = torch.arange(images.shape[-2], device=images.device)
    x = torch.arange(images.shape[-1], device=images.device)
    top, bottom, left, right = hole[:, :, None].unbind(1)
    rows, columns = (y >= top) & (y < bottom), (x >= left) & (x < right)
    inside = rows[:, None, :, None] & columns[:, None, None, :]
    return images * ~inside
