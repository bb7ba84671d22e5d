"""Partition and expand (IDM, Zhao et al., CVPR 2023; "PEA" in Dosser).

One stored image carries four: its quadrants, each enlarged to the full size. At the same number of
stored pixels a class is described by four times as many, coarser, pictures.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["PARTS", "expand"]

PARTS = 4


def expand(images: Tensor) -> Tensor:
    """Return the quadrants of (n, C, H, W), enlarged x2 bilinearly: (4 n, C, H, W).

    Those of image i are rows 4i to 4i + 3: top left, bottom left, top right, bottom right. Of an
    odd side the middle line belongs to both halves.
    """
    n, channels, height, width = images.shape
    rows, columns = (height + 1) // 2, (width + 1) // 2
    quadrants = torch.stack(
        [
            images[..., top : top + rows, left : left + columns]
            for left in (0, width - columns)
            for top in (0, height - rows)
        ],
        dim=1,
    )
    # Enlarging is linear in each direction: two products of matrices, which unlike
    # F.interpolate have a gradient that is the same at every run on a GPU.
    larger = _enlargement(rows, height, images) @ quadrants
    larger = larger @ _enlargement(columns, width, images).T
    return larger.reshape(PARTS * n, channels, height, width)


def _enlargement(short: int, long: int, like: Tensor) -> Tensor:
    """Return the (long, short) matrix of linear interpolation (align_corners=False)."""
    unit = torch.eye(short, dtype=like.dtype, device=like.device)
    return F.interpolate(unit[None], size=long, mode="linear")[0].T
