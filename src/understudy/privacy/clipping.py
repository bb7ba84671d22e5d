"""Clip rows to a bound, put them onto a grid and add them up: exactly, whatever the order.

The sensitivity of a sum rests on this file (Mironov, Talwar, Zhang 2019 price noise in units of the
bound): a row, as it is added, is never longer than the bound, and one that is not finite is zero.
Rows become whole numbers of the grid's step below 2^53, so their float64 sum is exact.

On a GPU with Triton a kernel reads wide rows twice, once for their lengths and once to add them; one
operation after the other reads and writes them, in float64, about eight times.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without
    triton = None

__all__ = ["add_clipped", "add_in_one_pass", "clip", "factors"]

SHORT = 1 - 2.0**-30
"""Rows are clipped this much short of the bound: more than a float64 norm can be wrong by."""

CACHED_NUMBERS = 2**18

BLOCK, PIECE, ROWS, PROGRAMS = 256, 2**14, 16, 1024
"""Columns and rows a program works on at a time, columns it measures, programs there should be."""


def add_clipped(
    total: Tensor,
    rows: Tensor,
    bound: float,
    step: float,
    *,
    groups: Tensor | None = None,
    real: Tensor | None = None,
) -> None:
    """Add clipped rows to the sums of their groups, in whole numbers of the step.

    ``total`` (float64) has a row for each group; without ``groups`` there is one. ``real`` is 0 for
    rows that stand for nobody.
    """
    rows = rows.detach()
    if len(total) == 1 and triton is not None and rows.is_cuda and rows.dtype == torch.float32:
        add_in_one_pass(total[0], rows.contiguous(), bound, step, real)
        return
    if groups is None:
        groups = rows.new_zeros(len(rows), dtype=torch.long)
    if real is not None or rows.is_cuda:
        # Whole numbers below 2^53: a product of matrices adds them exactly, in any order.
        members = (groups == torch.arange(len(total), device=rows.device)[:, None]).double()
        members = members if real is None else members * real
        total.addmm_(members, clip(rows, bound, step))
        return
    # Few rows at a time, so that their float64 copies stay in the cache.
    at_once = max(1, CACHED_NUMBERS // max(rows.shape[1], 1))
    for some, places in zip(torch.split(rows, at_once), torch.split(groups, at_once)):
        total.index_add_(0, places, clip(some, bound, step))


def clip(rows: Tensor, bound: float, step: float) -> Tensor:
    """Bound each row's L2 norm, drop rows whose norm is not finite, truncate onto the grid.

    Returns whole numbers of ``step``, in float64. Truncation towards zero never lengthens a row.
    """
    rows = rows.detach()
    if rows.dtype == torch.float64:  # squares of huge numbers overflow: shorten those rows first
        largest = rows.abs().amax(dim=1, keepdim=True)
        rows = torch.where(largest > 1e100, rows * 1e-200, rows)
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)
    finite = torch.isfinite(norms)
    if rows.is_cuda or not finite.all():  # to ask a GPU would be to wait for it
        rows = rows.masked_fill(~finite, 0.0)
    return rows.mul(factors(norms, bound, step)).trunc_()  # in float64, as the factors are


def factors(norms: Tensor, bound: float, step: float) -> Tensor:
    """Return what a row of each norm is multiplied by: 0 for one that is not finite."""
    scale = torch.where(norms > bound * SHORT, bound * SHORT / norms, 1.0)
    return torch.where(torch.isfinite(norms), scale / step, 0.0)


def add_in_one_pass(
    total: Tensor, rows: Tensor, bound: float, step: float, real: Tensor | None = None
) -> None:
    """Add clipped float32 rows to one sum by Triton's kernels."""
    count, width = rows.shape
    if not rows.numel():
        return
    pieces = triton.cdiv(width, PIECE)
    squares = torch.empty(count, pieces, dtype=torch.float64, device=rows.device)
    _squares_kernel[(count, pieces)](rows, squares, width, pieces, PIECE=PIECE, BLOCK=4 * BLOCK)
    scale = factors(squares.sum(dim=1).sqrt(), bound, step)
    if real is not None:
        scale = scale * real
    blocks = triton.cdiv(width, BLOCK)
    each = triton.cdiv(triton.cdiv(count * blocks, PROGRAMS), ROWS) * ROWS
    _add_kernel[(blocks, triton.cdiv(count, each))](
        rows, scale, total, count, width, EACH=each, ROWS=ROWS, BLOCK=BLOCK
    )


if triton is not None:

    @triton.jit
    def _squares_kernel(
        rows, squares, width, pieces, PIECE: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        """Add up the squares of a piece of a row, in float64."""
        row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
        total = tl.zeros((BLOCK,), tl.float64)
        for first in range(0, PIECE, BLOCK):
            column = piece * PIECE + first + tl.arange(0, BLOCK)
            value = tl.load(rows + row * width + column, mask=column < width, other=0.0)
            value = value.to(tl.float64)
            total += value * value
        tl.store(squares + row * pieces + piece, tl.sum(total, axis=0))

    @triton.jit
    def _add_kernel(
        rows, scale, total, count, width,
        EACH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Scale, truncate and add some columns of some rows; sums of whole numbers meet exactly."""
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        sums = tl.zeros((BLOCK,), tl.int64)
        for first in range(0, EACH, ROWS):
            row = tl.program_id(1) * EACH + first + tl.arange(0, ROWS)
            factor = tl.load(scale + row, mask=row < count, other=0.0)
            # A row whose factor is zero is not even looked at: it may hold what is no number.
            here = (factor > 0)[:, None] & (column < width)[None, :]
            at = row[:, None].to(tl.int64) * width + column[None, :]
            value = tl.load(rows + at, mask=here, other=0.0).to(tl.float64) * factor[:, None]
            sums += tl.sum(value.to(tl.int64), axis=0)  # a conversion truncates towards zero
        tl.atomic_add(total + column, sums.to(tl.float64), mask=column < width)
