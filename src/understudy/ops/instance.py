"""Standardise every feature map of a record by itself: DPAF's simplified instance normalisation.

A map of m that has h x w pixels leaves with mean 0 and deviation at most 1, so its L2 norm is at
most sqrt(h w), and a record's m maps together have norm at most sqrt(m h w): sqrt(m) p for square
maps of side p. That is the bound a sum over records is noised by (DPAF, Equation 2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["FLOOR", "largest_norm", "simplified_instance_norm"]

FLOOR = 1e-8
"""Added to each variance. Rounding leaves a constant map with a variance of some 1e-14 of its
square, which must not be blown up into features; a deviation of 1e-4 still counts as one."""


def simplified_instance_norm(maps: Tensor) -> Tensor:
    """Subtract each map's mean and divide by its deviation (DPAF, Section 3.2: SIN).

    ``maps``: (..., height, width). Instance normalisation without the learnable scale and shift,
    and the same in training and use: nothing here sees another record.

    Guarantee: with n = h w pixels, mean a and variance v = sum (x - a)^2 / n, a map leaves as
    (x - a) / sqrt(v + floor), whose squared norm is n v / (v + floor) <= n, and 0 where v = 0. So
    the norm of m maps is at most sqrt(m n), for every input. (Float32 may overstep it by a
    millionth; the gate clips at the bound whatever it is given.)

    Departure: the paper divides by the deviation itself, which is zero for a constant map.
    """
    centred = maps - maps.mean(dim=(-2, -1), keepdim=True)
    variance = centred.square().mean(dim=(-2, -1), keepdim=True)
    return centred * torch.rsqrt(variance + FLOOR)


def largest_norm(maps: int, height: int, width: int) -> float:
    """Return the norm that :func:`simplified_instance_norm` never exceeds: sqrt(m) p."""
    return math.sqrt(maps * height * width)
