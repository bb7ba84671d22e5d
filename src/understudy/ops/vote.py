"""Turn one voter's gradient into a bounded ballot, and read the noisy sum of all ballots.

A voter is a teacher, trained on one shard of the records, or a single record::

    ballot = vote.cast(gradient, coins)       one voter; private
    total  = sum of ballots + noise           the gate's business, which also clips each to the bound
    vote.read(total, voters)                  a direction; public, free

All votes of DataLens (Wang et al., CCS 2021) have this one shape: TopAgg (Algorithms 2 and 3) with
each part of Table 7 on or off, D2P-Fed and FetchSGD (Table 5, Algorithms 5 to 7), and NormTopK for
DP-SGD (Algorithm 4).

Guarantee: no ballot is longer than ``bound``. So a voter who comes or goes moves the sum by at most
``bound``, and a voter exchanged for another by at most ``2 bound``, whatever the coins: by the
triangle inequality, ``||a - b|| <= ||a|| + ||b||``. A record inside a shard exchanges that shard's
ballot: the accounting doubles the sensitivity for ``unit="shard"``. For TopAgg this is the paper's
2 sqrt(k) (Lemma 1), reached where a voter turns every one of its k signs.
"""

from __future__ import annotations

import abc
import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from understudy.errors import BadConfiguration
from understudy.ops.bound import bound as shortened

__all__ = ["D2PFed", "FetchSGD", "NormTopK", "TopAgg", "Vote"]

CLIPPED = 1e-3
"""Chance of a ballot of D2P-Fed that has to be shortened: a choice, rare enough not to matter."""


class Vote(abc.ABC):
    """Say how one gradient becomes a ballot, and what a noisy sum of ballots tells."""

    @abc.abstractmethod
    def bound(self, dimension: int) -> float:
        """Return the L2 norm no ballot exceeds: what the gate clips to."""

    @abc.abstractmethod
    def width(self, dimension: int) -> int:
        """Return the length of a ballot."""

    @abc.abstractmethod
    def coins(self, dimension: int) -> int:
        """Return how many uniform numbers from [0, 1) one ballot uses."""

    @abc.abstractmethod
    def cast(self, gradient: Tensor, coins: Tensor) -> Tensor:
        """Return the ballot (width,) of ONE gradient (dimension,).

        Made for ``torch.func.vmap``. A gradient that is not finite gives a ballot within the bound
        or one that is not finite, which the gate counts as zero.
        """

    @abc.abstractmethod
    def read(self, total: Tensor, voters: float) -> Tensor:
        """Return the direction (..., dimension) a noisy sum (..., width) of ballots points to."""


@dataclass(frozen=True, kw_only=True)
class TopAgg(Vote):
    """Vote for the sign of the largest coordinates (DataLens, Algorithms 2 and 3).

    With h the k coordinates largest in size and b = min(max_j |g_j|, c)::

        g^_j = min(max(g_j, -c), c) / b                          in [-1, 1]       (lines 3 and 4)
        ballot_j = +1 with probability (1 + g^_j) / 2, else -1   for j in h       (Equation 1)
        ballot_j = 0                                             for the others
        direction_j = +1 if total_j >= beta N, -1 if total_j <= -beta N, else 0   (Algorithm 3)

    The parts of Table 7, each off by itself: ``top_k=None`` (every coordinate votes);
    ``signs="plain"`` (the sign itself) or ``"none"`` (the value g^_j, and with ``norm`` no longer
    than that); ``clip=None`` (b is the largest coordinate); ``threshold=0.0`` (the sign of the noisy
    sum: Tables 4 and 7 of the paper give this the same figures as "without thresholding") or
    ``None`` (the noisy mean vote).

    Guarantee: at most k entries, each in [-1, 1], so ``||ballot|| <= sqrt(k)``; without top-k
    sqrt(dimension); values with ``norm``: that norm, if smaller.

    Departures: a gradient of zeros has no largest coordinate to divide by; its values are zeros, so
    stochastic signs are fair coins and plain signs are zeros.
    """

    top_k: int | None = 200  # k
    clip: float | None = 1e-5  # c
    signs: Literal["stochastic", "plain", "none"] = "stochastic"
    norm: float | None = None
    threshold: float | None = 0.7  # beta

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        _positive(top_k=self.top_k, clip=self.clip, norm=self.norm)
        _not_negative(threshold=self.threshold)
        if self.signs not in ("stochastic", "plain", "none"):
            raise BadConfiguration(f"signs are 'stochastic', 'plain' or 'none': '{self.signs}'.")
        if self.norm is not None and self.signs != "none":
            raise BadConfiguration("norm shortens values; signs all have the same length.")

    def bound(self, dimension: int) -> float:
        """Return sqrt(k): k entries of at most 1."""
        most = math.sqrt(self._chosen(dimension))
        return most if self.norm is None else min(self.norm, most)

    def width(self, dimension: int) -> int:
        """Return the dimension: a coordinate nobody chose has a vote of zero."""
        return dimension

    def coins(self, dimension: int) -> int:
        """Return one for each coordinate that is chosen, if signs are stochastic."""
        return self._chosen(dimension) if self.signs == "stochastic" else 0

    def cast(self, gradient: Tensor, coins: Tensor) -> Tensor:
        """Choose, clip, normalise and draw signs (Algorithm 2)."""
        chosen = gradient.abs().topk(self._chosen(gradient.shape[-1])).indices  # h
        values = gradient.gather(0, chosen)
        if self.clip is not None:
            values = values.clamp(-self.clip, self.clip)
        values = _over_largest(values)  # g^
        if self.signs == "stochastic":
            ballot = torch.where(coins < (1 + values) / 2, 1.0, -1.0).to(values)
        elif self.signs == "plain":
            ballot = values.sign()
        else:
            ballot = values if self.norm is None else shortened(values, self.norm)
        ballot = torch.where(values.isnan(), values, ballot)  # a sign would hide it from the gate
        return torch.zeros_like(gradient).scatter(0, chosen, ballot)

    def read(self, total: Tensor, voters: float) -> Tensor:
        """Keep the coordinates many voters agree on (Algorithm 3, phase III)."""
        return _agreed(total / voters, self.threshold)

    def _chosen(self, dimension: int) -> int:
        return dimension if self.top_k is None else min(self.top_k, dimension)


@dataclass(frozen=True, kw_only=True)
class D2PFed(Vote):
    """Vote with a rotated gradient, rounded at random (DataLens, Algorithms 5 and 6).

    After Wang, Jia and Song 2020 (D2P-Fed). With R a public rotation (signs and Hadamard matrices
    from ``seed``) and m levels evenly spaced over [-h, h]::

        u = clip(g, c), scaled to length 1
        ballot_j = one of the two levels around (R u)_j, at random, right on average
        direction = R^-1 total sqrt(d) / N, then the threshold as in TopAgg

    sqrt(d) makes the mean square of a voter's coordinates 1, as for signs.

    Guarantee: a rotation keeps the length 1; rounding adds d D^2 / 4 to its square on average at
    most, D the step between levels. With the deviation of Kairouz, Liu and Steinke 2021
    (Proposition 22) a ballot stays under ``bound`` except once in a thousand, when it is
    shortened. h is where coordinates of a rotated unit vector end, except once in a thousand
    (Hoeffding); those beyond are moved to it, which shortens.

    Departures: as printed, levels are numbered to 3k/2 - 2 and the published code neither rotates
    nor turns the sum back. Each voter's rotated gradient is printed as divided by its own largest
    coordinate, which would make the bound sqrt(d) and hide that a rotation keeps the length.
    Noise is the gate's Gaussian, not a discrete one, so rounding buys no privacy here: it stays
    for comparison.
    """

    levels: int = 16  # the method's k; four bits a coordinate, our choice: the paper names none
    clip: float | None = 1e-5  # c
    threshold: float | None = 0.7  # beta
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        _positive(clip=self.clip)
        _not_negative(threshold=self.threshold)
        if self.levels < 2:
            raise BadConfiguration(f"levels must be 2 or more: {self.levels}.")

    def bound(self, dimension: int) -> float:
        """Return what a unit vector's rounding stays under, but for one in a thousand.

        Proposition 22 of Kairouz, Liu and Steinke with c = 1 and gamma = D; never more than
        1 + D sqrt(d), which no rounding passes.
        """
        step, spread = self._step(dimension), math.sqrt(dimension)
        usual = 1 + (step * spread) ** 2 / 4
        usual += math.sqrt(2 * math.log(1 / CLIPPED)) * step * (1 + step * spread / 2)
        return min(math.sqrt(usual), 1 + step * spread)

    def width(self, dimension: int) -> int:
        """Return the dimension: this rotation needs no padding."""
        return dimension

    def coins(self, dimension: int) -> int:
        """Return one a coordinate."""
        return dimension

    def cast(self, gradient: Tensor, coins: Tensor) -> Tensor:
        """Clip, rotate and round (Algorithm 5)."""
        dimension = gradient.shape[-1]
        if self.clip is not None:
            gradient = gradient.clamp(-self.clip, self.clip)
        unit = _over_largest(gradient)
        unit = unit / torch.linalg.vector_norm(unit).clamp_min(1.0)  # at least 1, or all zeros
        end, step = self._end(dimension), self._step(dimension)
        place = (_rotated(unit, self.seed).clamp(-end, end) + end) / step
        below = place.floor().clamp(0, self.levels - 2)
        rounded = below + (coins < place - below).to(place)
        rounded = torch.where(place.isnan(), place, rounded)
        return shortened(rounded * step - end, self.bound(dimension))

    def read(self, total: Tensor, voters: float) -> Tensor:
        """Turn the sum back and keep what many voters agree on (Algorithm 6, phase III)."""
        mean = _rotated(total, self.seed, back=True) * math.sqrt(total.shape[-1]) / voters
        return _agreed(mean, self.threshold)

    def _end(self, dimension: int) -> float:
        """Return h: a coordinate of R u is a sum of signs with squares adding to 1 / p at most."""
        return math.sqrt(2 * math.log(2 * dimension / CLIPPED) / _power(dimension))

    def _step(self, dimension: int) -> float:
        """Return D."""
        return 2 * self._end(dimension) / (self.levels - 1)


@dataclass(frozen=True, kw_only=True)
class FetchSGD(Vote):
    """Vote with a count sketch of TopAgg's ballot (DataLens, Algorithm 7).

    After Rothchild et al. 2020 (FetchSGD); count sketch of Charikar, Chen and Farach-Colton 2002.
    Row r sends coordinate j to cell h_r(j) with sign s_r(j), both public, from ``seed``::

        ballot[r, h_r(j)] += s_r(j) v_j             v: TopAgg's signs
        estimate_j = median over r of s_r(j) total[r, h_r(j)] / N
        direction = the k estimates largest in size (or their signs, above a threshold), else 0

    Guarantee: the gate adds noise to the summed SKETCH; decoding and the choice of k coordinates
    see the noisy sketch alone, so they are post-processing. A sketched sign ballot has squared
    length R k on average over hashes, with deviation k sqrt(2 R / C): ``bound`` is four deviations
    above, and the rare ballot beyond it (where many votes fell into one cell) is shortened.

    Departures: Algorithm 7 as printed decodes and picks the k largest of the exact sum, and adds
    noise to those. Which coordinates are picked then depends on the votes without any noise, and no
    noise on their values hides it: epsilon infinite. The published code's sketch has 20 rows of
    10,000 cells for 784 pixels.
    """

    dimension: int
    top_k: int = 200  # k
    clip: float | None = 1e-5  # c
    rows: int = 5  # R; odd, so that there is a middle one
    columns: int = 512  # C; more cells a row than votes, so that most votes lie alone
    threshold: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        _positive(dimension=self.dimension, top_k=self.top_k, clip=self.clip, columns=self.columns)
        _not_negative(threshold=self.threshold)
        if self.rows < 1 or self.rows % 2 == 0:
            raise BadConfiguration(f"rows must be odd, to have a middle one: {self.rows}.")

    def bound(self, dimension: int) -> float:
        """Return sqrt(R k) and four deviations of the squared length."""
        self._check(dimension)
        chosen = self._ballot().bound(dimension)
        return math.sqrt(self.rows * (1 + 4 * math.sqrt(2 / (self.rows * self.columns)))) * chosen

    def width(self, dimension: int) -> int:
        """Return the number of cells."""
        self._check(dimension)
        return self.rows * self.columns

    def coins(self, dimension: int) -> int:
        """Return one for each coordinate that is chosen."""
        return self._ballot().coins(dimension)

    def cast(self, gradient: Tensor, coins: Tensor) -> Tensor:
        """Draw signs, then add them up in the cells."""
        self._check(gradient.shape[-1])
        cells, signs = self._hashes(gradient)
        votes = (signs * self._ballot().cast(gradient, coins)).flatten()
        sketch = gradient.new_zeros(self.rows * self.columns)
        return shortened(sketch.scatter_add(0, cells.flatten(), votes), self.bound(self.dimension))

    def read(self, total: Tensor, voters: float) -> Tensor:
        """Decode every coordinate and keep the k largest."""
        cells, signs = self._hashes(total)
        estimates = (signs * total[..., cells]).median(dim=-2).values / voters
        kept = estimates.abs().topk(min(self.top_k, self.dimension)).indices
        largest = torch.zeros_like(estimates).scatter(-1, kept, estimates.gather(-1, kept))
        return _agreed(largest, self.threshold)

    def _ballot(self) -> TopAgg:
        return TopAgg(top_k=self.top_k, clip=self.clip)

    def _hashes(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cell and the sign of each coordinate in each row: (rows, dimension)."""
        size = (self.rows, self.dimension)
        words = np.frombuffer(_public_bytes(4 * math.prod(size), "cells", self.seed), "<u4")
        cells = (words % self.columns).astype(np.int64).reshape(size)
        cells += self.columns * np.arange(self.rows)[:, None]
        signs = _public_signs(math.prod(size), "signs of cells", self.seed).view(size)
        return torch.from_numpy(cells).to(like.device), signs.to(like)

    def _check(self, dimension: int) -> None:
        if dimension != self.dimension:
            raise BadConfiguration(
                f"This sketch is of {self.dimension} numbers; a gradient has {dimension}."
            )


@dataclass(frozen=True, kw_only=True)
class NormTopK(Vote):
    """Keep the largest coordinates of one record's gradient, for DP-SGD (DataLens, Algorithm 4).

    Clip to C, then, going through the coordinates from the largest down, keep them

    - by norm: while their squares add up to at most ``keep_norm`` (k) of the squared norm;
    - by dimension (Table 9): the ``keep_dimensions`` share of them.

    With both at 1 the ballot is the gradient itself, which the gate clips to C: plain DP-SGD.

    Guarantee: ``||ballot|| <= sqrt(keep_norm) C``. A share of the *dimensions* leaves the bound at
    C: the gradient may have its whole norm in them.

    Departures: none in the rule by norm. For the rule by dimension the paper does not say what noise
    it adds; noise of ``sqrt(k) C`` would be too little.
    """

    clip_norm: float  # C
    keep_norm: float = 1.0  # k
    keep_dimensions: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        _positive(clip_norm=self.clip_norm)
        for name in ("keep_norm", "keep_dimensions"):
            if not 0 < getattr(self, name) <= 1:
                raise BadConfiguration(f"{name} must be above 0, at most 1: {getattr(self, name)}.")

    def bound(self, dimension: int) -> float:
        """Return sqrt(k) C (appendix A.1)."""
        return math.sqrt(self.keep_norm) * self.clip_norm

    def width(self, dimension: int) -> int:
        """Return the dimension: what is dropped counts zero."""
        return dimension

    def coins(self, dimension: int) -> int:
        """Return none: nothing is drawn."""
        return 0

    def cast(self, gradient: Tensor, coins: Tensor) -> Tensor:
        """Clip and drop (lines 15 and 16)."""
        if self.keep_norm == self.keep_dimensions == 1:
            return gradient
        clipped = shortened(gradient.double(), self.clip_norm)
        squares, order = clipped.square().sort(descending=True, stable=True)
        rank = torch.arange(len(order), device=order.device)
        kept = rank < max(1, math.floor(self.keep_dimensions * len(order)))
        if self.keep_norm < 1:
            sums = squares.cumsum(0)
            kept = kept & (sums <= self.keep_norm * sums[-1])
        largest = torch.where(kept, clipped.gather(0, order), 0.0)
        return torch.zeros_like(clipped).scatter(0, order, largest).to(gradient)

    def read(self, total: Tensor, voters: float) -> Tensor:
        """Return the mean over the expected batch (line 18)."""
        return total / voters


def _over_largest(values: Tensor) -> Tensor:
    """Divide by the largest entry in size; zeros stay zeros (Algorithm 2, line 4)."""
    largest = values.abs().amax()
    return values / torch.where(largest == 0, 1.0, largest)


def _agreed(mean: Tensor, threshold: float | None) -> Tensor:
    """Return the signs of means of at least the threshold in size, else 0; the means for None."""
    if threshold is None:
        return mean
    return (mean >= threshold).to(mean) - (mean <= -threshold).to(mean)


# Public rotations and hashes


def _public_bytes(count: int, *place: object) -> bytes:
    """Stretch a seed: the same bytes everywhere and for ever. Public, never for noise."""
    return hashlib.shake_256("/".join(map(str, ("vote", *place))).encode()).digest(count)


def _public_signs(count: int, *place: object) -> Tensor:
    bits = np.unpackbits(np.frombuffer(_public_bytes(-(-count // 8), *place), np.uint8))[:count]
    return torch.from_numpy(bits.astype(np.float32) * 2 - 1)


def _power(dimension: int) -> int:
    """Return p, the largest power of two within the dimension."""
    return 1 << (dimension.bit_length() - 1)


def _rotated(x: Tensor, seed: int, *, back: bool = False) -> Tensor:
    """Turn the last dimension by signs and Hadamard matrices from a seed, or back.

    The first p coordinates are mixed, then the last p, with p the largest power of two that fits:
    an orthogonal map that needs no padding, under which every coordinate is spread over p others.
    """
    dimension = x.shape[-1]
    power = _power(dimension)
    starts = (0,) if power == dimension else (0, dimension - power)
    turns = list(enumerate(starts))
    for number, start in reversed(turns) if back else turns:
        signs = _public_signs(power, "rotation", seed, number).to(x)
        block = x[..., start : start + power]
        block = _hadamard(block) * signs if back else _hadamard(block * signs)
        x = torch.cat([x[..., :start], block, x[..., start + power :]], dim=-1)
    return x


def _hadamard(x: Tensor) -> Tensor:
    """Multiply by the orthonormal Hadamard matrix, its own inverse, in log2(p) steps."""
    size, half = x.shape[-1], 1
    while half < size:
        first, second = x.reshape(*x.shape[:-1], -1, 2, half).unbind(-2)
        x = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        half *= 2
    return x / math.sqrt(size)


# Checks


def _positive(**fields: float | None) -> None:
    for name, value in fields.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise BadConfiguration(f"{name} must be positive: {value}.")


def _not_negative(**fields: float | None) -> None:
    for name, value in fields.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise BadConfiguration(f"{name} must be zero or more: {value}.")
