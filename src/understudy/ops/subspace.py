"""Find a subspace of features and project onto it (Dosser Section 3.3, SER).

The subspace comes from public images or from none at all, never from private records.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from understudy.errors import BadConfiguration

__all__ = ["Subspace", "low_frequencies", "principal", "project", "random_fields"]

_OVERSAMPLING = 8
_POWER_ITERATIONS = 2  # as in Dosser's code


class Subspace(NamedTuple):
    """Hold an affine subspace: a mean (F,) and orthonormal columns (F, k)."""

    mean: Tensor
    components: Tensor


def project(features: Tensor, subspace: Subspace) -> Tensor:
    """Return the coordinates of (..., F) in the subspace: P^T (r - mean), shape (..., k)."""
    return (features - subspace.mean) @ subspace.components


def principal(features: Tensor, count: int, generator: torch.Generator) -> Subspace:
    """Return the mean and the first `count` principal directions of the rows (n, F).

    Randomised low-rank SVD (Halko, Martinsson and Tropp 2011, Algorithms 4.4 and 5.1) in float64.
    `generator`, a local one on the CPU, makes the test matrix. The sign of each direction is
    fixed: its largest entry is positive.
    """
    n, width = features.shape
    if not 1 <= count <= min(n, width):
        raise BadConfiguration(f"{n} vectors of {width} features do not span {count} directions.")
    rows = features.double()
    mean = rows.mean(0)
    rows = rows - mean
    probes = min(count + _OVERSAMPLING, n, width)
    test = torch.randn(width, probes, generator=generator, dtype=torch.float64).to(rows.device)
    basis = torch.linalg.qr(rows @ test).Q
    for _ in range(_POWER_ITERATIONS):
        basis = torch.linalg.qr(rows.T @ basis).Q
        basis = torch.linalg.qr(rows @ basis).Q
    directions = torch.linalg.svd(basis.T @ rows, full_matrices=False).Vh[:count]
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    components = (directions * largest.sign()).T.contiguous()
    return Subspace(mean.to(features.dtype), components.to(features.dtype))


def low_frequencies(shape: tuple[int, ...], count: int) -> Tensor:
    """Return the `count` lowest cosine patterns of pictures (C, H, W) as columns (C H W, count).

    The orthonormal two-dimensional DCT-II, ordered by squared frequency relative to the side, each
    channel in turn. A fixed public subspace: it knows only that pictures are smooth.
    """
    channels, height, width = shape
    if not 1 <= count <= channels * height * width:
        raise BadConfiguration(f"Pictures {shape} have no {count} directions.")
    grid = (torch.arange(height)[:, None] / height) ** 2 + (torch.arange(width) / width) ** 2
    order = grid.flatten().argsort(stable=True)
    flat = torch.kron(_cosines(height), _cosines(width))[order]  # (H W, H W), a pattern a row
    spread = torch.kron(flat, torch.eye(channels, dtype=flat.dtype))
    # Row (pattern, channel), column (pixel, channel): bring the channel of the column first.
    spread = spread.view(-1, height * width, channels).transpose(1, 2).flatten(1)
    return spread[:count].T.contiguous().float()


def _cosines(side: int) -> Tensor:
    """Return the orthonormal DCT-II matrix, a frequency a row."""
    place = torch.arange(side, dtype=torch.float64)
    table = torch.cos(math.pi / side * (place[None] + 0.5) * place[:, None])
    table[0] *= math.sqrt(0.5)
    return table * math.sqrt(2 / side)


def random_fields(shape: tuple[int, ...], count: int, generator: torch.Generator) -> Tensor:
    """Return pictures (count, C, H, W) in [-1, 1] that nobody took: smooth random blots.

    Gaussian noise with amplitude falling as 1 / frequency, as in natural images (Field 1987),
    pushed towards black and white. They serve as auxiliary images where there are none.
    """
    channels, height, width = shape
    noise = torch.randn(count, channels, height, width, generator=generator)
    down = torch.fft.fftfreq(height)[:, None] * height
    across = torch.fft.rfftfreq(width)[None] * width
    frequency = torch.sqrt(down**2 + across**2).clamp_min(1.0)
    fields = torch.fft.irfft2(torch.fft.rfft2(noise) / frequency, s=(height, width))
    center, spread = fields.mean((-2, -1), keepdim=True), fields.std((-2, -1), keepdim=True)
    level = torch.randn(count, 1, 1, 1, generator=generator)
    return torch.tanh(2 * ((fields - center) / spread.clamp_min(1e-6) + level))
