"""Show what an anchor does to DPAF's faces: CelebA by gender, 64x64, one release a weight.

Usage: python benchmarks/anchor_faces.py [--weights 0 10 100 1000] [--epsilon 10] [--device cpu]
           [--figure docs/figures/dpaf_anchor.png]

Two rows of pictures a weight, women above men, from a release by the preset `anchored` at that weight
(0: without an anchor). A release takes about ten minutes of a CPU core. Noise is secret, so every
run draws other faces.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from understudy import run
from understudy.data.datasets import load
from understudy.engine import Engine
from understudy.jobs import configure
from understudy.methods import DPAF
from understudy.privacy import Budget, Ledger

SHOWN = 14


def pictures(weight: float, epsilon: float, engine: Engine) -> tuple[Tensor, Tensor]:
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
    drawn = calibrated.sample(release, 2 * SHOWN, seed=0, engine=engine)
    return drawn.images, drawn.labels


def sheet(releases: list[tuple[Tensor, Tensor]]) -> Image.Image:
    """Lay pictures out, a row for each class of each release."""
    rows = [
        torch.cat(list(images[labels == label][:SHOWN].float()), dim=2)
        for images, labels in releases
        for label in labels.unique()
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
        print(f"anchor of weight {weight:g}: done", flush=True)
    sheet(releases).save(options.figure)
    print(f"Written to {options.figure}")


if __name__ == "__main__":
    main()
