"""Clip feature vectors of synthetic images: r~ = min(1, G / ||r||) r (DPDC Algorithm 2)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["bound"]


def bound(rows: Tensor, norm: float, *, detach: bool = True) -> Tensor:
    """Shorten the vectors of the last dimension that are longer than `norm`.

    With `detach` the factor counts as a constant in the gradient, as in the published code of
    NDPDC and Dosser: the gradient then may also change a vector's length. Real records are
    clipped by the gate, not here.
    """
    lengths = torch.linalg.vector_norm(rows.detach() if detach else rows, dim=-1, keepdim=True)
    factor: Tensor = norm / lengths.clamp_min(norm)
    return rows * factor
