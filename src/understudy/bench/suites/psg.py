"""PSG: Chen, Kerkouche and Fritz, NeurIPS 2022, the supplement's Table 1 and continual learning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from understudy.bench.cells import Cell, Suite, repeated
from understudy.bench.suites.common import NETWORKS, REPEATS, prepared, quoted, shown

# Images per class: accuracy on CIFAR-10 without privacy, and at epsilon 10.
TABLE_1 = {1: (30.0, 28.9), 10: (48.6, 40.3), 20: (52.6, 42.6)}


def psg(dataset: str, size: int, epsilon: float, protocol: str, **told: Any) -> Iterator[Cell]:
    """Declare PSG with the preset of that epsilon; without privacy, with that of epsilon 10."""
    return repeated(
        REPEATS,
        NETWORKS,
        method="psg",
        preset="paper-eps1" if epsilon == 1 else "paper-eps10",
        epsilon=epsilon,
        images_per_class=size,
        protocol=protocol,
        **{**prepared(dataset), "flips": protocol != "psg" and prepared(dataset)["flips"]},
        **told,
    )


def _table_1() -> Iterator[Cell]:
    for size, (open_figure, private_figure) in TABLE_1.items():
        for epsilon, row, figure in (
            (float("inf"), "not private", open_figure),
            (10.0, "epsilon 10", private_figure),
        ):
            own = shown(row, f"{size} per class", quoted("PSG, supplement, Table 1", figure))
            yield from psg("cifar10", size, epsilon, "psg", **own)


SUITES = (
    Suite(
        name="psg",
        title="PSG, the supplement's Table 1: CIFAR-10",
        source="Chen, Kerkouche and Fritz, NeurIPS 2022, supplement, Table 1",
        told="Two releases, three networks on each; 301 epochs without augmentation, last epoch. "
        "PSG's figures on MNIST and Fashion-MNIST are in the suites dosser-1 and must-hold.",
        cells=tuple(_table_1()),
    ),
    Suite(
        name="psg-continual",
        title="PSG: private continual learning, five stages of two classes",
        source="Chen, Kerkouche and Fritz, NeurIPS 2022, Section 5.2 and supplement, Section C.5",
        told="Every stage has records, a budget and a release of its own, and later stages see only "
        "earlier releases, which no single cell can say.",
        elsewhere="benchmarks/continual.py mnist --methods psg dp-merf dp-sgd --epsilon 10",
    ),
)
