"""Measure how well a class mean of features is estimated in a subspace (Dosser, Figures 5 to 7).

For one random network, u(x) are its features clipped to norm 1, mu_c their mean over a whole class,
and P_k the first k principal directions of the auxiliary images' clipped features, a their mean.
With noise of standard deviation s on every coordinate, the mean squared error of the estimate is

    without a subspace     F s^2
    in k directions        k s^2 + |(I - P_k P_k^T) (mu_c - a)|^2          (Theorem 1)

so it is enough to measure the residuals; the noise follows by the formula. The records are read IN
THE OPEN: this is for public benchmarks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from understudy.bench.cells import Cell
from understudy.data.datasets import open_training
from understudy.engine import Engine, Progress
from understudy.errors import BadConfiguration
from understudy.methods.matching import Matching, Signal, public_seed
from understudy.ops.bound import bound
from understudy.ops.subspace import principal, project

DIMENSIONS = (50, 100, 200, 300, 400, 500, 600, 700, 800, 900)
"""Retained directions; fewer than the 1,000 auxiliary images."""

_AT_ONCE = 512


def subspace_error(cell: Cell, engine: Engine, progress: Progress) -> dict[str, Any]:
    """Return the residuals for every network seed and dimension, averaged over the classes."""
    method = cell.configured()
    if not isinstance(method, Matching):
        raise BadConfiguration(f"'{method.name}' matches no features; 'dosser' does.")
    public = cell.public
    real = open_training(cell.dataset, like=public)
    whole = method.extractor(public, engine)
    pictures = whole.auxiliary
    if pictures is None:
        raise BadConfiguration("Declare subspace and auxiliary images: the subspace is theirs.")
    extractor = dataclasses.replace(whole, subspace=None)
    residuals, norms = [], []
    for place, seed in enumerate(cell.seeds):
        signal = extractor.signal(seed)
        auxiliary = _features(signal, pictures)
        generator = torch.Generator().manual_seed(public_seed(method.seed, "estimation", seed))
        subspace = principal(auxiliary, max(DIMENSIONS), generator)
        means = []
        for label in range(len(public.classes)):
            means.append(_features(signal, real.images[real.labels == label]).mean(0))
            done = place * len(public.classes) + label + 1
            progress(done, len(cell.seeds) * len(public.classes), "class means of features")
        away = torch.stack(means) - subspace.mean
        held = project(torch.stack(means), subspace).square().cumsum(1)
        lost = away.square().sum(1, keepdim=True) - held
        residuals.append([float(lost[:, k - 1].mean().clamp_min(0)) for k in DIMENSIONS])
        norms.append(float(torch.stack(means).square().sum(1).mean()))
    return {
        "configuration": method.recipe()["configuration"],
        "features": auxiliary.shape[1],
        "dimensions": list(DIMENSIONS),
        "residuals": residuals,
        "squared_norms": norms,
        "records": len(real),
    }


@torch.no_grad()
def _features(signal: Signal, pictures: Tensor) -> Tensor:
    """Return the unit-clipped features, whatever subspace or augmentation the signal has."""
    parts = [
        bound(signal.embed(part.to(signal.device)), 1.0).double()
        for part in torch.split(pictures, _AT_ONCE)
    ]
    return torch.cat(parts)
