"""DPAF (under review at ICLR): Tables 1, 2 and 4 to 8 on the data at hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from understudy.bench.cells import Cell, Suite
from understudy.bench.suites.common import judged, quoted, shown

BUDGETS = (1.0, 10.0)
FACES = ("celeba", "celeba-hair")

# Accuracy at epsilon 1 and 10.
TABLE_1 = {
    "mnist": (50.1, 74.8),
    "fashion-mnist": (54.3, 64.0),
    "celeba": (80.2, 82.6),
    "celeba-hair": (67.5, 67.1),
}
CANONICAL: Mapping[float, tuple[float, ...]] = {1.0: (0.1, 0.8, 0.1), 10.0: (0.1, 9.8, 0.1)}
"""(x1, x2, x3) of the paper's "(0.1, x, 0.1)": the rest of epsilon to conv2."""


def _rest(first: float, last: float) -> Mapping[float, tuple[float, ...]]:
    return {epsilon: (first, epsilon - first - last, last) for epsilon in BUDGETS}


def _percent(*parts: float) -> Mapping[float, tuple[float, ...]]:
    return dict.fromkeys(BUDGETS, parts)


# Row: (conv1, split by epsilon), accuracy of gender at epsilon 1 and 10, of hair at 1 and 10.
# A random conv1 has no part in the budget, so its first part is not counted.
TABLE_4 = {
    "random conv1, (x, 0.5)": ("random", {1.0: (1.0, 0.5, 0.5), 10.0: (1.0, 9.5, 0.5)},
                               (75.2, 79.3, 63.5, 68.1)),
    "random conv1, (x, 0.2)": ("random", {1.0: (1.0, 0.8, 0.2), 10.0: (1.0, 9.8, 0.2)},
                               (77.4, 70.0, 66.7, 67.0)),
}  # fmt: skip
TABLE_5 = {
    "updated conv1, (0.1, x, 0.1)": ("updated", _rest(0.1, 0.1), (59.4, 74.7, 42.4, 59.9)),
    "updated conv1, (33%, 34%, 33%)": ("updated", _percent(33, 34, 33), (72.7, 81.7, 64.2, 68.5)),
}
# One query for conv1 and conv2 takes the second part; the first is not counted.
TABLE_6 = {
    "joint, (50%, 50%)": ("joint", _percent(50, 50, 50), (76.8, 75.9, 66.1, 64.8)),
    "joint, (x, 0.1)": ("joint", {1.0: (1.0, 0.9, 0.1), 10.0: (1.0, 9.9, 0.1)},
                        (74.8, 79.0, 64.3, 66.0)),
}  # fmt: skip
TABLE_7 = {
    (20, 20, 60): (74.1, 78.7, 57.0, 63.9),
    (20, 60, 20): (80.1, 82.0, 66.3, 61.9),
    (20, 40, 40): (79.3, 79.0, 65.7, 65.9),
    (30, 20, 50): (77.1, 76.7, 64.3, 59.8),
    (30, 50, 20): (79.5, 81.3, 66.6, 57.7),
    (30, 40, 30): (79.1, 79.9, 67.7, 61.0),
    (30, 30, 40): (70.4, 79.9, 65.3, 64.3),
    (40, 30, 30): (74.5, 79.7, 64.6, 62.8),
    (40, 20, 40): (75.9, 78.2, 45.4, 63.4),
    (40, 40, 20): (76.3, 79.8, 64.1, 64.5),
}
TABLE_8 = {
    2: (77.5, 66.5, 57.8, 67.0),
    4: (68.8, 81.9, 64.2, 66.6),
    10: (77.2, 74.5, 65.6, 67.0),
    20: (77.3, 73.5, 64.8, 66.8),
}
# FID of gender at epsilon 1 and 10, of hair at 1 and 10.
TABLE_2 = (285, 298, 301, 298)

SOUND = (
    "The published algorithm has no proven epsilon (docs/methods/dpaf.md); these cells run the "
    "sound one at the stated epsilon, composed by one accountant. The paper adds the epsilons of "
    "its three mechanisms, so equal splits are not equal shares. CelebA here has 10,000 training "
    "faces instead of 162,770, 65 % of them women; read balanced accuracy beside accuracy."
)
JUDGED = (
    "Two releases, 10,000 records drawn from each, one DataLens network trained on them, last "
    "epoch; the paper does not say how many runs its deviations are over."
)


def dpaf(
    dataset: str,
    epsilon: float | None,
    values: Mapping[str, Any] | None = None,
    *,
    repeats: int = 2,
    **told: Any,
) -> Iterator[Cell]:
    """Declare DPAF, judged as DataLens is. By default its own preset for the kind of pictures."""
    return judged(
        repeats,
        method="dpaf",
        dataset=dataset,
        preset="large" if dataset in FACES else None,
        values=dict(values or {}),
        epsilon=epsilon,
        **told,
    )


ANCHOR: Mapping[str, Any] = {"anchor": 20.0, "anchor_weight": 1000.0}
"""As in the preset `anchored`."""


def anchored(dataset: str, epsilon: float, **told: Any) -> Iterator[Cell]:
    """Declare DPAF with an anchor."""
    yield from dpaf(dataset, epsilon, ANCHOR, fidelity=True, **told)


CLAIMED: Mapping[tuple[str, float], float] = {
    ("mnist", 10.0): 0.52944,
    ("fashion-mnist", 10.0): 0.53229,
    ("celeba", 10.0): 0.50477,
    ("celeba", 1.0): 3.7432,
}
"""Noise multiplier with which the sound variant costs an epsilon, and the published one claims it."""


def _beside_the_published() -> Iterator[Cell]:
    for (dataset, epsilon), noise in CLAIMED.items():
        sound = shown(f"sound, epsilon {epsilon:g}", dataset)
        yield from dpaf(dataset, epsilon, fidelity=True, **sound)
        if epsilon == 10.0:  # at 1 an anchor is all noise
            row = f"sound, anchored, epsilon {epsilon:g}"
            yield from anchored(dataset, epsilon, **shown(row, dataset))
        merf = shown(f"DP-MERF: all of the budget for an anchor, epsilon {epsilon:g}", dataset)
        yield from judged(2, method="dp-merf", dataset=dataset, epsilon=epsilon, **merf)
        values = {"published": True, "noise_multiplier": noise}
        claim = shown(f"as published, same noise, epsilon {epsilon:g} claimed", dataset)
        yield from dpaf(dataset, None, values, fidelity=True, **claim)


def _larger() -> Iterator[Cell]:
    yield from dpaf(
        "celeba",
        10.0,
        repeats=1,
        resize=128,
        samples=2000,
        protocol="quick",
        networks=("convnet",),
        flips=True,
        **shown("sound, epsilon 10, pictures of 128x128", "celeba"),
    )


def _canonical(epsilon: float, **values: Any) -> dict[str, Any]:
    return {"conv1": "transfer", "budget_split": CANONICAL[epsilon], **values}


def _table_1() -> Iterator[Cell]:
    for dataset, figures in TABLE_1.items():
        for epsilon, figure in zip(BUDGETS, figures):
            told = shown(f"epsilon {epsilon:g}", dataset, quoted("DPAF, Table 1", figure))
            yield from dpaf(dataset, epsilon, fidelity=True, **told)


def _on_faces(row: str, table: int, figures: tuple[float, ...]) -> Iterator[tuple[str, float, Any]]:
    settings = ((dataset, epsilon) for dataset in FACES for epsilon in BUDGETS)
    for (dataset, epsilon), figure in zip(settings, figures):
        quotes = quoted(f"DPAF, Table {table}", figure)
        yield dataset, epsilon, shown(row, f"{dataset}, epsilon {epsilon:g}", quotes)


def _table_2() -> Iterator[Cell]:
    for dataset, epsilon, told in _on_faces("distance to real pictures", 2, TABLE_2):
        told = {**told, "references": ()}
        yield from dpaf(dataset, epsilon, fidelity=True, **told)


def _tables_4_to_6() -> Iterator[Cell]:
    for table, rows in ((4, TABLE_4), (5, TABLE_5), (6, TABLE_6)):
        for row, (conv1, splits, figures) in rows.items():
            for dataset, epsilon, told in _on_faces(row, table, figures):
                values = {"conv1": conv1, "budget_split": splits[epsilon]}
                yield from dpaf(dataset, epsilon, values, **told)


def _table_7() -> Iterator[Cell]:
    canonical = (*TABLE_1["celeba"], *TABLE_1["celeba-hair"])
    for dataset, epsilon, told in _on_faces("(0.1, x, 0.1), canonical", 7, canonical):
        yield from dpaf(dataset, epsilon, _canonical(epsilon), **told)
    for split, figures in TABLE_7.items():
        row = "({}%, {}%, {}%)".format(*split)
        for dataset, epsilon, told in _on_faces(row, 7, figures):
            values = {"conv1": "transfer", "budget_split": tuple(map(float, split))}
            yield from dpaf(dataset, epsilon, values, **told)


def _table_8() -> Iterator[Cell]:
    for asymmetry, figures in TABLE_8.items():
        for dataset, epsilon, told in _on_faces(f"mu {asymmetry}", 8, figures):
            yield from dpaf(dataset, epsilon, _canonical(epsilon, asymmetry=asymmetry), **told)


SUITES = (
    Suite(
        name="dpaf-1",
        title="DPAF, Table 1: accuracy at epsilon 1 and 10",
        source="DPAF, Table 1",
        told=f"{SOUND} {JUDGED}",
        cells=tuple(_table_1()),
    ),
    Suite(
        name="dpaf-2",
        title="DPAF, Table 2: likeness to real faces",
        source="DPAF, Table 2",
        told="The paper gives FID by the standard Inception network, which is not at hand: 285 and "
        "298 for gender at epsilon 1 and 10, 301 and 298 for hair. Our distances are on features "
        "of a network trained on held-out faces and cannot be compared with those.",
        cells=tuple(_table_2()),
    ),
    Suite(
        name="dpaf-sound",
        title="DPAF, sound and as published",
        told="The same networks, rounds and noise, once by the sound route and once by the published "
        "one, which claims an epsilon that it does not have: it costs infinity "
        "(docs/methods/dpaf.md, 'Why the published bound fails'). Two releases of each, judged as in "
        "Table 1. An anchor is ours: a noisy mean embedding of every class. And one release of faces "
        "enlarged to 128x128 pixels, 2,000 records drawn, a ConvNet under the quick protocol: it works "
        "there, too.",
        cells=(*_beside_the_published(), *_larger()),
    ),
    Suite(
        name="dpaf-4-6",
        title="DPAF, Tables 4 to 6: conv1 random, updated, or joint with conv2",
        source="DPAF, Tables 4 to 6",
        told=f"{SOUND} {JUDGED}",
        cells=tuple(_tables_4_to_6()),
    ),
    Suite(
        name="dpaf-7",
        title="DPAF, Table 7: how the budget is split, with transfer",
        source="DPAF, Table 7",
        told=f"{SOUND} {JUDGED}",
        cells=tuple(_table_7()),
    ),
    Suite(
        name="dpaf-8",
        title="DPAF, Table 8: the asymmetry mu, with transfer",
        source="DPAF, Table 8",
        told=f"{SOUND} {JUDGED} mu 8 is the canonical row of Table 7.",
        cells=tuple(_table_8()),
    ),
)
