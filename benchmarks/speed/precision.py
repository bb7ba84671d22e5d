"""Compare fp32, tf32 and bf16 on a GPU: what each takes and what it changes.

Usage: python benchmarks/speed/precision.py [--device cuda] [--accuracy mnist] [--out]

Times a whole-set pass, an optimisation step and an evaluation epoch in float32, with tf32 products
and convolutions (what PyTorch's convolutions do by default), and in bf16 with fused blocks, which is
what a GPU takes unless told otherwise. The effect of
a precision is how far it moves the sums of a whole-set pass, in units of the noise at epsilon 1:
far below 1 is nothing anybody could see in a release. ``--accuracy`` also runs the whole-set plan
on a named dataset in each precision, and its evaluation, three times each.

Needs CUDA; a CPU has no tf32 and no fast bf16. ``--anyway`` runs on a CPU to try the script out.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import evaluation_stack
import optimisation_step
import torch
import whole_set_pass
from ceilings import float32_as
from suite import Drawn, Suite, Way, draw_records, mnist_sizes, throw_away_gate
from torch import Tensor

from understudy import run as front
from understudy.engine import silent
from understudy.methods.whole_set import WholeSet
from understudy.privacy import Budget, Ledger

PRECISIONS = ("bf16", "tf32", "fp32")

NOISE_AT_ONE = 3.7306
"""Noise multiplier of one Gaussian at epsilon 1, delta 1e-5."""


@contextlib.contextmanager
def computed_in(suite: Suite, precision: str) -> Iterator[None]:
    """Compute in a precision for a while."""
    before, suite.precision = suite.precision, "bfloat16" if precision == "bf16" else "float32"
    try:
        with float32_as(tf32=precision != "fp32"):
            yield
    finally:
        suite.precision = before


def in_each(suite: Suite, make: Callable[[], Way]) -> dict[str, Way]:
    """Make a way of each precision."""

    def of(precision: str) -> Way:
        def run(count: int) -> Sequence[float]:
            with computed_in(suite, precision):
                return make()(count)

        return run

    return {precision: of(precision) for precision in PRECISIONS}


def effect(suite: Suite, drawn: Drawn, width: int) -> dict[str, dict[str, float]]:
    """Return how far the sums of two signals move, against float32 without tf32."""
    method = WholeSet(noise_multiplier=0.0, queries=2, width=width)
    sums: dict[str, Tensor] = {}
    for precision in PRECISIONS:
        with (
            computed_in(suite, precision),
            throw_away_gate(drawn.private, method, suite.engine, silent) as gate,
        ):
            sums[precision] = method.measure(gate).signals["sums"].double()
    noise = NOISE_AT_ONE * 2**0.5 * (method.clip_norm or 1.0)  # of each of two queries
    exact = sums["fp32"]
    return {
        precision: {
            "relative": float((some - exact).norm() / exact.norm()),
            "in_standard_deviations_of_the_noise": float(
                (some - exact).square().mean().sqrt() / noise
            ),
        }
        for precision, some in sums.items()
    }


def accuracies(suite: Suite, dataset: str, repeats: int) -> dict[str, list[float]]:
    """Run the whole-set plan at epsilon 1 and its evaluation in each precision."""
    from understudy.data.datasets import load, load_heldout

    data = load(dataset)
    test = load_heldout(dataset, like=data.public)
    found: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    for seed in range(repeats):
        for precision in PRECISIONS:
            method = WholeSet(seed=seed)
            with computed_in(suite, precision), TemporaryDirectory() as folder:
                ledger = Ledger(Path(folder) / "ledger.jsonl")
                release = front.fit(
                    data, method, budget=Budget(1.0), ledger=ledger, engine=suite.engine
                )
                made = front.synthesise(release, engine=suite.engine)
                scores = front.evaluate(
                    made, test, protocol="dm", seeds=range(3), engine=suite.engine
                )
            found[precision].append(scores.accuracy)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Time each cell in each precision, print the table and the effects."""

    def further(parser: Any) -> None:
        parser.add_argument("--anyway", action="store_true")
        parser.add_argument("--accuracy", metavar="DATASET")

    suite = Suite.of("precision", __doc__ or "", arguments, further)
    if suite.device.type != "cuda" and not suite.options.anyway:
        print("precision.py needs CUDA: a CPU has no tf32 and no fast bf16. Nothing was measured.")
        return
    width, per_class = suite.sized((128, 50), (32, 10), (4, 1))
    sizes = suite.sized(mnist_sizes(1), mnist_sizes(20), (8, 8))
    shape, classes = (1, 28, 28), len(sizes)
    drawn = draw_records(shape, sizes)
    images = torch.randn(classes * per_class, *shape, device=suite.device)
    labels = torch.arange(classes, device=suite.device).repeat_interleave(per_class)
    cells: dict[str, Callable[[], Way]] = {
        "whole-set pass": lambda: whole_set_pass.ours(suite, WholeSet(width=width), drawn),
        "optimisation step": lambda: optimisation_step.ours(
            suite,
            optimisation_step.extractor(shape, classes, width, suite.device, suite.engine.dtype),
            per_class,
            1,
        ),
        "evaluation epoch": lambda: evaluation_stack.ours(
            suite, images, labels, width, classes, evaluation_stack.NETWORKS
        ),
    }
    moved = effect(suite, drawn, width)
    for name, way in cells.items():
        precision = "bf16" if suite.device.type == "cuda" else "fp32"
        suite.measure(
            f"{name}, by precision",
            {
                "shape": shape,
                "records": len(drawn.labels),
                "images_per_class": per_class,
                "width": width,
            },
            in_each(suite, way),
            arithmetic="fp32",
            precision=precision,
            effect=moved,
        )
    if suite.options.accuracy:
        found = accuracies(suite, suite.options.accuracy, suite.sized(3, 1, 1))
        for line in suite.lines:
            line["accuracy"] = {"dataset": suite.options.accuracy, **found}
    suite.finish()
    print("\nwhat a precision moves in the sums, against fp32:")
    for precision, far in moved.items():
        noises = far["in_standard_deviations_of_the_noise"]
        told = f"{far['relative']:.1e} of the sums, {noises:.1e} standard deviations of the noise"
        if precision != "fp32" and far["relative"] == 0:
            told = "nothing: this device computed the sums in fp32 all the same"
        print(f"  {precision}: {told}")
    if suite.options.accuracy:
        for precision, each in found.items():
            print(f"  {precision}: accuracy {statistics.fmean(each):.2%}, {each}")


if __name__ == "__main__":
    main()
