"""Draw the curves: how time and memory grow with records, classes, picture size and set size.

Usage: python benchmarks/speed/scaling.py [--small] [--device cuda] [--axis records] [--out]

One size changes at a time. Records: a whole-set pass. Classes: an NDPDC iteration, 50 + 50 pictures
a class. Picture side and images per class: an optimisation step on rebuilt signals. The exponent
under the table is the slope of log time over log size between the two largest sizes: 1 is linear.
Teachers have a benchmark of their own, benchmarks/teachers.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import ndpdc_iteration
import optimisation_step
import whole_set_pass
from suite import Suite

from understudy.methods.ndpdc import NDPDC

AXES = ("records", "classes", "side", "images per class")


def records(suite: Suite, many: int) -> None:
    """Pass over so many records of ten classes."""
    width = suite.sized(128, 32, 4)
    name = f"whole-set pass, {many:,} records"
    groups = suite.sized(10, 10, 2)
    sizes = (many // groups,) * groups
    whole_set_pass.cell(suite, name, (1, 28, 28), sizes, width, axis="records", value=many)


def classes(suite: Suite, many: int) -> None:
    """Iterate NDPDC on so many classes, the same number of records in each."""
    method = suite.sized(
        NDPDC(),
        NDPDC(width=32, group_size=10.0, images_per_class=10),
        NDPDC(width=4, group_size=2.0, images_per_class=1),
    )
    each = suite.sized(6000, 300, 10)
    name = f"NDPDC iteration, {many} classes"
    ndpdc_iteration.cell(
        suite, name, (1, 28, 28), (each,) * many, method, axis="classes", value=many
    )


def side(suite: Suite, many: int) -> None:
    """Step on pictures of so many pixels a side, in three channels."""
    images_per_class, width = suite.sized((50, 128), (5, 32), (1, 4))
    optimisation_step.cell(
        suite, f"optimisation step, {many}x{many} pixels", (3, many, many), images_per_class,
        width, None, suite.sized(10, 10, 2), axis="side", value=many,
    )  # fmt: skip


def images_per_class(suite: Suite, many: int) -> None:
    """Step on so many pictures of each of ten classes."""
    width = suite.sized(128, 32, 4)
    optimisation_step.cell(
        suite, f"optimisation step, {many} pictures a class", (1, 28, 28), many,
        width, None, suite.sized(10, 10, 2), axis="images per class", value=many,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Time every point of every axis, print the table and the slopes."""
    suite = Suite.of(
        "scaling",
        __doc__ or "",
        arguments,
        lambda parser: parser.add_argument("--axis", action="append", choices=AXES),
    )
    suite.checked(functools.partial(optimisation_step.check, (3, 16, 16)))
    points = {
        "records": (
            records,
            ((7500, 15_000, 30_000, 60_000, 120_000), (500, 1000, 2000), (20, 40)),
        ),
        "classes": (classes, ((2, 5, 10, 20, 50, 100), (2, 5, 10, 20), (2, 3))),
        "side": (side, ((16, 28, 32, 64, 128), (16, 32, 64), (8, 16))),
        "images per class": (images_per_class, ((1, 10, 50, 100, 200), (1, 5, 20), (1, 2))),
    }
    for axis in suite.options.axis or AXES:
        run, sizes = points[axis]
        for many in suite.sized(*sizes):
            run(suite, many)
    suite.finish()
    print()
    for axis in suite.options.axis or AXES:
        (low, before), (high, after) = [
            (line["value"], line["ms"]) for line in suite.lines if line["axis"] == axis
        ][-2:]
        slopes = {way: math.log(after[way] / before[way]) / math.log(high / low) for way in before}
        told = ", ".join(f"{way} {slope:.2f}" for way, slope in slopes.items())
        print(f"time over {axis}, {low} to {high}: exponent {told}")


if __name__ == "__main__":
    main()
