"""The guard: scikit-learn's digits, a second a cell, for CI. No time is checked.

Most cells have little noise, so that what they watch is the method and not the luck of a release:
were a network, a gradient, a label or a loss wrong, accuracy would fall towards the 10 of guessing.
One cell has so much noise that accuracy would rise if noise were missing or halved.

**False alarms.** A band is the mean over ``RUNS`` honest runs plus and minus ``WIDTH`` of their
standard deviations. For figures that are roughly normal an honest run falls outside with
probability 5e-7 (Student's t, 23 degrees of freedom, for one more run than those the band was made
from), so 7e-6 for all twelve rows together. For any distribution with one peak it is at most
4 / (9 WIDTH^2) = 0.9 % a cell (Vysochanskij and Petunin 1980), were mean and deviation known. Query
counts and epsilon follow from the plan and never vary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from understudy.bench.cells import RELEASED, Bar, Cell, Suite, repeated

RUNS, WIDTH = 24, 7.0

_BY_LOGISTIC: Mapping[str, Any] = {"networks": ("logistic",)}
_BY_CONVNET: Mapping[str, Any] = {
    "protocol": "quick",
    "training": {"epochs": 20, "lr_drop": 14, "augmentation": ""},
}
_SMALL: Mapping[str, Any] = {"group_size": 50.0, "width": 16, "augmentation": ""}

# Row: (mean, standard deviation) of one cell's accuracy over RUNS runs; queries; epsilon.
MEASURED: Mapping[str, tuple[float, float, int, float]] = {
    "whole-set, pixels": (81.8, 2.34, 1, 0.99995),  # 77.2 to 86.7
    "whole-set": (84.3, 2.81, 6, 19.131),  # 79.1 to 88.3
    "ldpdc": (89.3, 0.78, 10, 17.172),  # 88.0 to 90.8
    "ldpdc, much noise": (55.4, 2.61, 10, 0.2875),  # 49.4 to 58.9
    "dm": (86.9, 1.69, 20, float("inf")),  # 83.6 to 90.3
    "ndpdc": (88.6, 1.31, 20, 874.6),  # 86.6 to 91.6
    "dosser, SER": (80.2, 3.69, 5, 91.365),  # 71.9 to 86.1
    "psg": (68.5, 2.53, 30, 3123.3),  # 61.4 to 72.6
    "dp-merf": (82.4, 2.01, 1, 4.3772),  # 78.2 to 85.9
    "datalens": (46.1, 2.52, 40, 2.027e05),  # 40.9 to 50.6
    "dpaf": (57.4, 3.14, 72, 831.27),  # 51.3 to 63.2
    "dp-sgd": (90.4, 1.35, 10, 0.98147),  # 87.2 to 92.5
}


def _cells() -> Iterator[Cell]:
    yield from _one(
        "whole-set, pixels", _BY_LOGISTIC, 4, method="whole-set", preset="small", epsilon=1.0
    )
    yield from _one(
        "whole-set",
        _BY_CONVNET,
        method="whole-set",
        values={
            "noise_multiplier": 0.3,
            "queries": 6,
            "width": 16,
            "steps": 120,
            "start": 0.3,
            "augmentation": "",
            "expand": False,
            "learning_rate": 0.1,
        },
        images_per_class=5,
    )
    for row, noise, repeats in (("ldpdc", 0.6, 1), ("ldpdc, much noise", 12.0, 8)):
        yield from _one(
            row,
            _BY_LOGISTIC,
            repeats,
            method="ldpdc",
            values={"noise_multiplier": noise, "group_size": 40.0},
            images_per_class=10,
        )
    yield from _one(
        "dm",
        _BY_CONVNET,
        method="dm",
        values={**_SMALL, "iterations": 20, "learning_rate": 3.0},
        epsilon=float("inf"),
        images_per_class=5,
    )
    yield from _one(
        "ndpdc",
        _BY_CONVNET,
        method="ndpdc",
        values={**_SMALL, "iterations": 20, "noise_multiplier": 0.1, "learning_rate": 0.1},
        images_per_class=5,
    )
    yield from _one(
        "dosser, SER",
        _BY_CONVNET,
        method="dosser",
        values={
            **_SMALL,
            "augmentation": "crop",
            "sampling_iterations": 5,
            "noise_multiplier": 0.2,
            "learning_rate": 0.05,
            "subspace": 16,
            "auxiliary": "random fields",
        },
        after={"optimisation_iterations": 80, "average": 0.5},
        images_per_class=5,
    )
    yield from _one(
        "psg",
        _BY_CONVNET,
        4,
        method="psg",
        values={
            "runs": 10,
            "outer_steps": 1,
            "inner_epochs": 0,
            "repeats": 3,
            "expected_batch": 256.0,
            "width": 16,
            "noise_multiplier": 0.05,
            "learning_rate": 10.0,
        },
        images_per_class=2,
    )
    yield from _one(
        "dp-merf",
        _BY_LOGISTIC,
        4,
        method="dp-merf",
        values={"prior": False, "steps": 80, "frequencies": 300, "noise_multiplier": 1.0},
        images_per_class=5,
    )
    yield from _one(
        "datalens",
        _BY_LOGISTIC,
        8,
        method="datalens",
        values={
            "noise_multiplier": 0.02,
            "teachers": 8,
            "top_k": 64,
            "threshold": None,
            "iterations": 40,
            "images_per_iteration": 40,
            "batch": 16,
            "first_steps": 10,
            "latent": 4,
            "teacher_widths": (8, 16, 32),
            "generator_hidden": 32,
            "generator_width": 8,
            "step": 0.1,
            "generator_learning_rate": 0.005,
            "teacher_learning_rate": 0.003,
        },
        samples=300,
    )
    yield from _one(
        "dpaf",
        _BY_LOGISTIC,
        8,
        method="dpaf",
        values={
            "noise_multiplier": 0.02,
            "batches": 64,
            "group_size": 60.0,
            "asymmetry": 8,
            "fakes_per_class": 8,
            "width": 8,
            "maps": 8,
            "head": 32,
            "generator_width": 8,
            "latent": 8,
            "generator_learning_rate": 0.005,
            "head_learning_rate": 0.005,
            "learning_rate": 0.005,
        },
        samples=300,
    )
    yield from _one(
        "dp-sgd",
        {"networks": (RELEASED,)},
        method="dp-sgd",
        values={
            "network": "linear",
            "sampling_rate": 1.0,
            "steps": 10,
            "learning_rate": 5.0,
            "noise_multiplier": 12.0,
        },
    )


def _one(row: str, judged: Mapping[str, Any], repeats: int = 1, **declared: Any) -> Iterator[Cell]:
    """Declare a cell with the band that was measured for it."""
    bar = None
    if row in MEASURED:
        mean, deviation, queries, epsilon = MEASURED[row]
        bar = Bar(
            least=round(max(0.0, mean - WIDTH * deviation), 1),
            most=round(min(100.0, mean + WIDTH * deviation), 1),
            queries=queries,
            epsilon=epsilon,
            source=f"{RUNS} runs",
        )
    return repeated(repeats, 1, dataset="digits", row=row, bar=bar, **judged, **declared)


SUITES = (
    Suite(
        name="guard",
        title="The guard: does every method still work?",
        told="Tiny configurations on scikit-learn's digits, most with little noise, chosen to take a "
        "second. Their accuracy says nothing about the methods. `understudy bench guard --check` "
        "measures them afresh and compares.",
        cells=tuple(_cells()),
    ),
)
