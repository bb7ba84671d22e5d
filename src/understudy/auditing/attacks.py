"""Attack what was released. Each attack returns one score a candidate, higher for "it was in".

Black box, on a synthetic set: :func:`nearest_distance`, :func:`density_ratio`. With shadow runs
on top: :func:`likelihood_ratio`. White box, on the noisy sums themselves:
:func:`inner_products`. :func:`crafted` makes canaries.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import logsumexp
from torch import Tensor

from understudy.auditing.statistics import Scores
from understudy.data.synthetic import SyntheticSet
from understudy.privacy.public import Public


def crafted(public: Public, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Make canaries at the corners of the record space: random signs, labels in turn.

    They have the largest norm a record can have, are nearly orthogonal to one another, and look
    like no real record.
    """
    random = np.random.default_rng(seed)
    signs = random.integers(0, 2, (count, *public.shape)) * 2 - 1
    labels = torch.arange(count) % len(public.classes)
    return torch.from_numpy(signs.astype(np.float32)), labels


def nearest_distance(synthetic: SyntheticSet, records: Tensor, labels: Tensor) -> Scores:
    """Score by closeness to the nearest synthetic record of the same class."""
    scores = np.full(len(records), -np.inf)
    for c in np.unique(labels.numpy()).tolist():
        released = synthetic.images[synthetic.labels == c].flatten(1).double()
        if len(released):
            mine = (labels == c).numpy()
            distances = torch.cdist(records[labels == c].flatten(1).double(), released)
            scores[mine] = -distances.amin(1).numpy()
    return scores


def density_ratio(
    synthetic: SyntheticSet,
    reference: Tensor,
    reference_labels: Tensor,
    records: Tensor,
    labels: Tensor,
) -> Scores:
    """Score by log density under the synthetic set less that under public reference records.

    Gaussian kernels, one bandwidth a class: the median distance from a reference record to its
    nearest other.
    """
    scores = np.zeros(len(records))
    for c in np.unique(labels.numpy()).tolist():
        released = synthetic.images[synthetic.labels == c].flatten(1).double()
        known = reference[reference_labels == c].flatten(1).double()
        if len(released) == 0 or len(known) < 2:
            continue
        mine = records[labels == c].flatten(1).double()
        apart = torch.cdist(known, known).fill_diagonal_(math.inf)
        bandwidth = max(float(apart.amin(1).median()), 1e-9)
        scores[(labels == c).numpy()] = _log_density(mine, released, bandwidth) - _log_density(
            mine, known, bandwidth
        )
    return scores


def _log_density(points: Tensor, centres: Tensor, bandwidth: float) -> Scores:
    squares = (torch.cdist(points, centres) / bandwidth).square().numpy() / 2
    density: Scores = logsumexp(-squares, axis=1) - math.log(len(centres))
    return density


def likelihood_ratio(scores: Scores, shadows: Scores, was_in: npt.NDArray[np.bool_]) -> Scores:
    """Score by log likelihood ratio of Gaussians fitted to shadow runs (Carlini et al. 2022).

    ``scores``: (runs, canaries) under attack. ``shadows``: (shadow runs, canaries), with
    ``was_in`` saying which canary was in which. Each canary has means of its own; with few shadow
    runs one variance serves all.
    """
    inside = _mean(shadows, was_in)
    outside = _mean(shadows, ~was_in)
    centred = shadows - np.where(was_in, inside, outside)
    variance = max(float(np.mean(np.square(centred))), 1e-12)
    ratio: Scores = (np.square(scores - outside) - np.square(scores - inside)) / (2 * variance)
    return np.where(np.isfinite(ratio), ratio, 0.0)


def _mean(values: Scores, mask: npt.NDArray[np.bool_]) -> Scores:
    """Average each column over its mask; the column's own mean where the mask is empty."""
    weight = mask.sum(0)
    total = np.where(mask, values, 0.0).sum(0)
    mean: Scores = np.where(weight > 0, total / np.maximum(weight, 1), values.mean(0))
    return mean


def inner_products(answer: Scores, known: Scores, contributions: Scores, stddev: float) -> Scores:
    """Score canaries by what one noisy sum holds in the direction of their own contribution.

    ``answer`` less ``known`` (what the attacker expects of the records it knows) against each row
    of ``contributions``, in units of the noise: the Neyman-Pearson statistic of a Gaussian sum.
    Scores of several answers add up.
    """
    rest = (answer - known).reshape(-1)
    rows = contributions.reshape(len(contributions), -1)
    scale = max(stddev, 1e-12) ** 2
    scores: Scores = (rows @ rest - 0.5 * np.square(rows).sum(1)) / scale
    return scores
