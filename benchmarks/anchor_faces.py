"""Show what an anchor does to DPAF's faces: CelebA by gender, 64x64, one release a weight.

Usage: python benchmarks/anchor_faces.py [--weights 0 10 100 1000] [--epsilon 10] [--device cpu]
           [--figure docs/figures/dpaf_anchor.png]

Two rows of pictures a weight, women above men, from a release by the preset `anchored` at that weight
(0: without an anchor). Prints the balanced accuracy on held-out faces of DataLens' network trained on
4,000 drawn ones, at 64x64 (one network) and at 32x32 (two): shorter than the `datalens` protocol, for
CPUs. A release takes about ten minutes of a CPU core, its networks three. Noise is secret, so every run
draws other faces.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from PIL import Image
from torch.nn import functional as F

from understudy import run
from understudy.data.datasets import load, load_heldout
from understudy.data.synthetic import SyntheticSet
from understudy.engine import Engine
from understudy.evaluation.classify import DATALENS, train_and_test
from understudy.jobs import configure
from understudy.methods import DPAF
from understudy.privacy import Budget, Ledger

DRAWN, SHOWN = 4000, 14
"""Faces drawn of a release; of each class, those in the figure."""

JUDGES = (
    (64, (0,), DATALENS.but(epochs=6, lr=5e-3, momentum=0.9, batch=128)),
    (32, (0, 1), DATALENS.but(epochs=20, lr=0.01, momentum=0.9, batch=128)),
)
"""Side, seeds and training of the networks."""


def pictures(weight: float, epsilon: float, engine: Engine) -> SyntheticSet:
    """Make a release with an anchor of this weight and draw from it."""
    anchor = {"anchor_weight": weight, **({} if weight else {"anchor": 0.0})}
    method = configure("dpaf", anchor, preset="anchored")
    with tempfile.TemporaryDirectory() as folder:
        release = run.fit(
            load("celeba"),
            method,
            budget=Budget(epsilon),
            ledger=Ledger(Path(folder) / "ledger.jsonl"),
            engine=engine,
        )
    calibrated = DPAF.configured(release.recipe["configuration"])
    return calibrated.sample(release, DRAWN, seed=0, engine=engine)


def judged(made: SyntheticSet, engine: Engine) -> str:
    """Say how well networks trained on drawn faces tell held-out ones apart."""
    test = load_heldout("celeba", like=made.public)
    told = []
    for side, seeds, protocol in JUDGES:
        drawn, real = (F.avg_pool2d(x, 64 // side) for x in (made.images, test.images))
        scores = train_and_test(
            drawn, made.labels, real, test.labels,
            classes=2, protocol=protocol, seeds=seeds, device=engine.torch_device,
        )  # fmt: skip
        told.append(f"{100 * scores.balanced_accuracy:.1f} % at {side}x{side}")
    return "; ".join(told)


def sheet(releases: list[SyntheticSet]) -> Image.Image:
    """Lay pictures out, a row for each class of each release."""
    rows = [
        torch.cat(list(made.images[made.labels == label][:SHOWN]), dim=2)
        for made in releases
        for label in made.labels.unique()
    ]
    whole = torch.cat(rows, dim=1).permute(1, 2, 0)
    return Image.fromarray(((whole + 1) * 127.5).clamp(0, 255).byte().numpy())


def main() -> None:
    """Make the releases and the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=float, nargs="+", default=[0.0, 10.0, 100.0, 1000.0])
    parser.add_argument("--epsilon", type=float, default=10.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--figure", type=Path, default=Path("docs/figures/dpaf_anchor.png"))
    options = parser.parse_args()
    engine = Engine(device=options.device)
    releases = []
    for weight in options.weights:
        releases.append(pictures(weight, options.epsilon, engine))
        print(f"anchor of weight {weight:g}: balanced {judged(releases[-1], engine)}", flush=True)
    sheet(releases).save(options.figure)
    print(f"Written to {options.figure}")


if __name__ == "__main__":
    main()
