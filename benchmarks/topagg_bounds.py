"""Compare DataLens' data-dependent bound (Theorems 4, 5) with the data-independent one (Theorem 3).

Usage: python benchmarks/topagg_bounds.py [--voters 4000] [--releases 1300]
           [--figure docs/figures/topagg_bounds.png]

The votes are simulated: every voter sees a common gradient, alone ("unanimous") or with noise of
its own of the same size ("divided": the median of five such votes), and casts TopAgg's ballot. Cases of d coordinates keep the
privacy of the paper's MNIST setting, where 784 coordinates get k = 200 and sigma = 5000: k is the
same share of d, and sigma the same multiple of 2 sqrt(k), so the data-independent bound is the same
for all of them. Draws the figure and prints its numbers.

This is an analysis. The data-dependent epsilon depends on the private votes and is itself private;
no release states it, or could.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy.stats import norm
from torch.func import vmap

from understudy.ops.vote import TopAgg
from understudy.privacy.accounting import Accountant, epsilon
from understudy.privacy.events import Event

Floats = npt.NDArray[np.float64]

DIMENSION, TOP_K, SIGMA, BETA = 784, 200, 5000.0, 0.7  # MNIST at epsilon 1 (section 5.1)
IMAGES = 15  # an iteration (published code)
DELTA = 1e-5
ORDERS = np.array([1.1, *range(2, 200)])  # as in the published code
COORDINATES = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 56, 64, 96, 128, 256, 512, 784)
SHOWN = (8, 16, 32)
MESH = 250  # trial values of mu_1 and of mu_2, each


def likely(votes: Floats, sigma: float, line: float) -> tuple[float, float]:
    """Return log q~ and log (1 - q~) of Theorem 5, for the likeliest outcome.

    Coordinates get independent noise, so the probability of an outcome is a product, and the
    likeliest takes the likeliest of +1, 0 and -1 in each.
    """
    above, below = norm.sf((line - votes) / sigma), norm.cdf((-line - votes) / sigma)
    same = float(np.log(np.maximum(np.maximum(above, below), 1 - above - below)).sum())
    other = -math.expm1(same)
    return (math.log(other) if other > 0 else -math.inf), same


def dependent(log_other: float, log_same: float, rate: float) -> Floats:
    """Return the bound of Theorem 4 at every order, with the best mu_1 and mu_2 found.

    The Gaussian mechanism has alpha_i = ``rate`` mu_i. Where no pair of them meets the theorem's
    conditions it says nothing: infinity. A needs q~ e^alpha_2 < 1, which the theorem leaves unsaid.
    """
    second = 1 + np.geomspace(1e-3, 1e6, MESH)
    found = np.full(len(ORDERS), np.inf)
    for place, order in enumerate(ORDERS):
        first = (order + np.concatenate([[0.0], np.geomspace(1e-3, 1e6, MESH)]))[:, None]
        one, two = rate * first, rate * second
        parts = np.log(first / (first - 1)) + np.log(second / (second - 1))
        valid = (log_other <= (second - 1) * two - second * parts) & (log_other + two < 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            a = log_same - np.log1p(-np.exp((log_other + two) * (second - 1) / second))
            b = one - log_other / (first - 1)
            both = np.logaddexp(log_same + (order - 1) * a, log_other + (order - 1) * b)
        found[place] = np.where(valid, both / (order - 1), np.inf).min()
    return found


def converted(rdp: Floats, releases: npt.ArrayLike) -> Floats:
    """Return epsilon after so many releases, by the paper's Theorem 1."""
    total = np.multiply.outer(np.asarray(releases, dtype=float), rdp)
    least: Floats = (total + math.log(1 / DELTA) / (ORDERS - 1)).min(axis=-1)
    return least


def cast(dimension: int, top_k: int, voters: int, *, divided: bool, seed: int) -> Floats:
    """Return the exact sum of simulated ballots."""
    stream = torch.Generator().manual_seed(seed)
    vote = TopAgg(top_k=top_k)
    common = torch.randn(dimension, generator=stream)
    own = torch.randn(voters, dimension, generator=stream) if divided else torch.zeros(voters, 1)
    coins = torch.rand(voters, vote.coins(dimension), generator=stream)
    ballots: torch.Tensor = vmap(vote.cast)(common + own, coins)
    return ballots.sum(0).double().numpy()


def main() -> None:
    """Compute both bounds, print them and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--voters", type=int, default=4000)
    parser.add_argument("--releases", type=int, default=1300)
    parser.add_argument("--figure", type=Path, default=Path("docs/figures/topagg_bounds.png"))
    options = parser.parse_args()

    scale = SIGMA / (2 * math.sqrt(TOP_K))
    rate = 1 / (2 * scale**2)  # of the Renyi divergence in the order: 2 k / sigma^2 (Theorem 3)
    independent = converted(rate * ORDERS, options.releases)
    event = Event(
        name="votes",
        times=options.releases,
        noise_multiplier=2 * scale,
        bound=math.sqrt(TOP_K),
        sampling_rate=None,
        per_class=False,
        unit="shard",
    )
    stated = epsilon([event], DELTA)
    classic = epsilon([event], DELTA, accountant=Accountant.RDP_CLASSIC)
    print(f"{options.releases} images, data-independent: epsilon {independent:.4f} by Theorem 3")
    print(f"({classic:.4f} by the ledger's orders; {stated:.4f} by loss distributions)\n")
    print("| coordinates | k | votes | another outcome has probability | epsilon by Theorem 4 |")
    print("| ---: | ---: | --- | ---: | ---: |")
    curves: dict[str, list[float]] = {"unanimous": [], "divided": []}
    rdp: dict[int, Floats] = {}
    for dimension in COORDINATES:
        top_k = max(1, round(TOP_K * dimension / DIMENSION))
        sigma = scale * 2 * math.sqrt(top_k)
        for votes in curves:
            divided = votes == "divided"
            cases = []
            for seed in range(5 if divided else 1):
                total = cast(dimension, top_k, options.voters, divided=divided, seed=seed)
                cases.append(likely(total, sigma, BETA * options.voters))
            # The bound falls with the chance of the likeliest outcome: so the median case's.
            log_other, log_same = sorted(cases)[len(cases) // 2]
            found = dependent(log_other, log_same, rate)
            value = float(converted(found, options.releases))
            curves[votes].append(value)
            if votes == "unanimous" and dimension in SHOWN:
                rdp[dimension] = found
            chance = (
                f"1 - 10^{log_same / math.log(10):.0f}"
                if log_same < -7
                else f"{math.exp(log_other):.3g}"
            )
            said = "says nothing" if math.isinf(value) else f"{value:.3f}"
            print(f"| {dimension} | {top_k} | {votes} | {chance} | {said} |")
    draw(options, rate, stated, curves, rdp)


def draw(
    options: argparse.Namespace,
    rate: float,
    stated: float,
    curves: dict[str, list[float]],
    rdp: dict[int, Floats],
) -> None:
    """Draw epsilon over iterations, as the paper's Figure 2, and over coordinates."""
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)

    iterations = np.arange(1, options.releases // IMAGES + 1)
    releases = IMAGES * iterations
    left.plot(iterations, converted(rate * ORDERS, releases), color="C0", label="any number")
    for dimension, colour in zip(SHOWN, ("C1", "C3", "C4"), strict=True):
        values = converted(rdp[dimension], releases)
        left.plot(iterations, values, "--", color=colour, label=f"{dimension} coordinates")
    left.set_title("solid: data-independent\ndashed: data-dependent, unanimous votes", fontsize=9)
    left.set_xlabel(f"iterations ({IMAGES} images each)")
    left.text(0.97, 0.04, f"{DIMENSION} coordinates: the data-dependent\nbound says nothing",
              transform=left.transAxes, ha="right", fontsize=8)  # fmt: skip

    level = float(converted(rate * ORDERS, options.releases))
    right.axhline(level, color="C0", label="data-independent (Theorem 3)")
    right.axhline(stated, color="C0", linestyle=":", label="as a release states it (PLD)")
    top = 60.0
    for (votes, values), colour, mark in zip(curves.items(), ("C1", "C2"), "os", strict=True):
        heights = np.array(values)
        finite = np.isfinite(heights)
        places = np.array(COORDINATES)
        right.plot(places[finite], heights[finite], f"--{mark}", color=colour, markersize=4,
                   label=f"data-dependent, {votes}")  # fmt: skip
        right.plot(places[~finite], np.full((~finite).sum(), top), "^", color=colour, markersize=4)
    right.text(DIMENSION, 0.6 * top, "says nothing", ha="right", fontsize=8)
    right.set_xscale("log")
    right.set_title(f"after {options.releases} images", fontsize=9)
    right.set_xlabel("coordinates that are released at once")
    for axes in (left, right):
        axes.set_yscale("log")
        axes.set_ylabel(f"epsilon at delta {DELTA:g}")
        axes.legend(fontsize=7, loc="upper left" if axes is left else "lower right")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    options.figure.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.figure, dpi=130, metadata={"Software": None})
    print(f"\nWritten to {options.figure}")


if __name__ == "__main__":
    main()
