"""Learn two classes at a time under privacy, and plot accuracy over the stages.

Private continual learning (PSG, supplement C.5): the data come in five stages of two classes. Each
stage has its own records, its own ledger and the whole budget, and hands on nothing but what it
released: a synthetic set for methods, weights for DP-SGD. After each stage a classifier of all
classes seen so far is tested on their held-out records.

    python benchmarks/continual.py digits --methods whole-set dp-merf psg dp-sgd --epsilon 10 \\
        --protocol quick --out benchmarks/results/continual.jsonl --plot docs/figures/continual.png

Stages touch disjoint records, so a person with one record is protected by one stage's guarantee.
Appends one JSON line a method, stage and repeat; the plot shows every line of the file on this
dataset.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from understudy import jobs, run
from understudy.data.datasets import load_heldout
from understudy.data.heldout import HeldOut
from understudy.data.synthetic import SyntheticSet, combined
from understudy.engine import Engine
from understudy.evaluation.classify import PROTOCOLS, Scores, judge
from understudy.methods import Method
from understudy.methods.topagg import DPSGD
from understudy.privacy import Budget, Ledger, PrivateDataset, Public
from understudy.privacy.gate import Contribution, Records, record_digests

ORDER = (5, 6, 1, 2, 0, 8, 9, 3, 4, 7)
"""The class order of the published code, two at a time."""


@dataclass(frozen=True, kw_only=True)
class Continued(DPSGD):
    """Go on training a classifier of all classes on the records of two of them."""

    places: tuple[int, ...] = ()
    """Where this stage's classes stand among all."""
    classes: int = 10
    before: Mapping[str, Tensor] | None = None
    """The weights the stage before released."""

    def recipe(self) -> dict[str, Any]:
        """Leave out the weights: they are public, and no plain values."""
        return dataclasses.replace(self, before=None)._plain()

    def _plain(self) -> dict[str, Any]:
        return {"method": self.name, "configuration": dataclasses.asdict(self)}

    def architecture(self, public: Public) -> nn.Module:
        """Give the network an output for every class there will be."""
        names = tuple(map(str, range(self.classes)))
        whole = dataclasses.replace(public, classes=names, counts=None)
        return super().architecture(whole)

    def start(self, net: nn.Module, device: torch.device) -> dict[str, Tensor]:
        """Start where the stage before ended."""
        drawn = super().start(net, device)
        return drawn if self.before is None else {n: self.before[n].to(device) for n in drawn}

    def _contribution(self, net: nn.Module, layout: Mapping[str, Tensor]) -> Contribution:
        inner = super()._contribution(net, layout)
        places = torch.tensor(self.places, device=next(iter(layout.values())).device)
        return lambda state, image, label: inner(state, image, places[label])


def stage(records: HeldOut, classes: tuple[int, ...]) -> PrivateDataset:
    """Put the records of some classes behind a gate of their own."""
    chosen = torch.isin(records.labels, torch.tensor(classes))
    images = np.ascontiguousarray(records.images[chosen].numpy())
    labels = np.array([classes.index(label) for label in records.labels[chosen].tolist()])
    counts = tuple(int(count) for count in np.bincount(labels, minlength=len(classes)))
    public = Public(
        name="stage of " + ", ".join(records.classes[c] for c in classes),
        shape=tuple(images.shape[1:]),
        classes=tuple(records.classes[c] for c in classes),
        counts=counts,
    )
    return PrivateDataset(Records(images, labels, record_digests(images)), public)


def of_classes(records: HeldOut, classes: tuple[int, ...]) -> HeldOut:
    """Keep the records of some classes, numbered in their order."""
    chosen = torch.isin(records.labels, torch.tensor(classes))
    labels = torch.tensor([classes.index(label) for label in records.labels[chosen].tolist()])
    return HeldOut(records.images[chosen], labels, tuple(records.classes[c] for c in classes))


def sets_over_stages(
    name: str, options: argparse.Namespace, train: HeldOut, test: HeldOut, repeat: int
) -> list[tuple[Scores, float]]:
    """Release one set a stage; train anew on all sets so far."""
    engine, budget = Engine(device=options.device), Budget(options.epsilon)
    found: list[tuple[Scores, float]] = []
    sets: list[SyntheticSet] = []
    for number in range(len(ORDER) // 2):
        began = time.perf_counter()
        data = stage(train, ORDER[2 * number : 2 * number + 2])
        method = jobs.configure(
            name,
            {"seed": 10 * repeat + number},
            preset=options.preset.get(name, "auto"),
            public=data.public,
            budget=budget,
            engine=engine,
        )
        assert isinstance(method, Method)
        if "images_per_class" in {field.name for field in dataclasses.fields(method)}:
            method = dataclasses.replace(method, images_per_class=options.images_per_class)  # type: ignore[call-arg]
        with tempfile.TemporaryDirectory() as folder:
            ledger = Ledger(Path(folder) / "l.jsonl")
            release = run.fit(data, method, budget=budget, ledger=ledger, engine=engine)
        sets.append(run.synthesise(release, engine=engine))
        scores = run.evaluate(
            combined(sets),
            of_classes(test, ORDER[: 2 * number + 2]),
            protocol=PROTOCOLS[options.protocol],
            seeds=tuple(range(options.seeds)),
            engine=engine,
        )
        found.append((scores, time.perf_counter() - began))
    return found


def weights_over_stages(
    options: argparse.Namespace, train: HeldOut, test: HeldOut, repeat: int
) -> list[tuple[Scores, float]]:
    """Fine-tune one classifier by DP-SGD, stage after stage."""
    engine, budget = Engine(device=options.device), Budget(options.epsilon)
    found: list[tuple[Scores, float]] = []
    weights: dict[str, Tensor] | None = None
    for number in range(len(ORDER) // 2):
        began = time.perf_counter()
        classes = ORDER[2 * number : 2 * number + 2]
        data = stage(train, classes)
        preset = DPSGD.suited(data.public, budget, engine)
        values = {} if preset is None else DPSGD.presets[preset].configuration
        trainer = Continued(
            **{**values, "seed": repeat}, places=classes, classes=len(ORDER), before=weights
        )
        with tempfile.TemporaryDirectory() as folder:
            ledger = Ledger(Path(folder) / "l.jsonl")
            release = run.fit(data, trainer, budget=budget, ledger=ledger, engine=engine)
        weights = {
            name.removeprefix("weights."): value
            for name, value in release.signals.items()
            if name.startswith("weights.")
        }
        seen = torch.isin(test.labels, torch.tensor(ORDER[: 2 * number + 2]))
        scores = judge(
            trainer.classifier(release, engine=engine),
            test.images[seen],
            test.labels[seen],
            classes=len(ORDER),
            told=trainer.network,
        )
        found.append((scores, time.perf_counter() - began))
    return found


def plot(lines: list[dict[str, Any]], dataset: str, picture: Path) -> None:
    """Draw accuracy over stages, the mean of what was repeated."""
    from matplotlib.figure import Figure

    curves: dict[tuple[str, float], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line["dataset"] == dataset:
            curves[line["method"], line["epsilon"]][line["stage"]].append(line["accuracy"])
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for (method, epsilon), stages in sorted(curves.items()):
        places = sorted(stages)
        means = [100 * sum(stages[place]) / len(stages[place]) for place in places]
        axes.plot(places, means, marker="o", label=f"{method}, epsilon {epsilon:g}")
    axes.set(xlabel="classes seen", ylabel="accuracy on them, %", ylim=(0, 100))
    axes.set_xticks(sorted({place for stages in curves.values() for place in stages}))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150)


def main() -> None:
    """Run the asked methods, append their lines, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("dataset", help="digits, mnist, fashion-mnist")
    parser.add_argument("--methods", nargs="+", default=["whole-set", "dp-merf", "psg", "dp-sgd"])
    parser.add_argument("--epsilon", type=float, default=10.0, help="of every stage")
    parser.add_argument("--images-per-class", type=int, default=10)
    parser.add_argument("--preset", nargs="*", default=[], help="METHOD=PRESET; auto otherwise")
    parser.add_argument("--protocol", default="quick", choices=sorted(PROTOCOLS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    options.preset = dict(pair.split("=", 1) for pair in options.preset)
    train = load_heldout(options.dataset, split="train")
    test = load_heldout(options.dataset)
    lines = []
    for method in options.methods:
        for repeat in range(options.repeats):
            found = (
                weights_over_stages(options, train, test, repeat)
                if method == "dp-sgd"
                else sets_over_stages(method, options, train, test, repeat)
            )
            for number, (scores, seconds) in enumerate(found, 1):
                lines.append(
                    {
                        "dataset": options.dataset,
                        "method": method,
                        "epsilon": options.epsilon,
                        "stage": 2 * number,
                        "repeat": repeat,
                        "accuracy": scores.accuracy,
                        "accuracies": list(scores.accuracies),
                        "images_per_class": None
                        if method == "dp-sgd"
                        else options.images_per_class,
                        "protocol": scores.protocol,
                        "network": scores.network,
                        "seconds": round(seconds, 1),
                        "version": metadata.version("understudy"),
                        **Engine(device=options.device).describe(),
                    }
                )
                print(f"{method:10} repeat {repeat}  {2 * number:2} classes  {scores}")
    if options.out:
        with open(options.out, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        lines = [json.loads(text) for text in options.out.read_text().splitlines()]
    if options.plot:
        plot(lines, options.dataset, options.plot)


if __name__ == "__main__":
    main()
