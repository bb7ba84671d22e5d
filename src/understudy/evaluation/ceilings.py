"""Compute what a synthetic set's accuracy is to be read against.

    random-real   as many real records as the set has, drawn at random
    dm            distribution matching without privacy, at the same size
    dp-sgd        a classifier trained privately on all records, at the same epsilon
    all-real      all real records, no privacy

These read the real training records IN THE OPEN: :func:`ceilings` takes a HeldOut, not a
PrivateDataset. Give it a public benchmark, or the holder's own records for the holder's own eyes.
The figures that come out are not covered by any guarantee, and no ledger learns of them: dm and
dp-sgd go through the real gate, but on ledgers that are thrown away.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from understudy.data.heldout import HeldOut
from understudy.data.synthetic import SyntheticSet
from understudy.engine import Engine, Progress, silent
from understudy.errors import BadConfiguration, DataError, UnknownName
from understudy.evaluation.classify import (
    Protocol,
    Scores,
    _protocol,
    judge,
    train_and_test,
)
from understudy.evaluation.fidelity import check_alike
from understudy.methods.base import Mechanism, Trainer
from understudy.methods.dm import DM
from understudy.methods.matching import public_seed
from understudy.methods.topagg import DPSGD
from understudy.privacy.accounting import Budget
from understudy.privacy.gate import PrivateDataset, Records, record_digests
from understudy.privacy.ledger import Ledger
from understudy.privacy.public import Public
from understudy.privacy.release import Release

__all__ = ["CEILINGS", "ceilings"]

CEILINGS: Mapping[str, str] = {
    "random-real": "real records drawn at random, as many of each class as the synthetic set has",
    "dm": "distribution matching without privacy, as many records as the synthetic set has",
    "dp-sgd": "a classifier trained by DP-SGD on all records at the same epsilon: no set at all",
    "all-real": "all real training records, without privacy",
}

ALL_REAL_STEPS = 10_000
"""About fifty passes over 50,000 records in batches of 256."""

DM_ON_CPU: Mapping[str, Any] = {"iterations": 1000, "width": 32, "group_size": 64.0}
"""Minutes on a CPU, where the paper's 20,000 iterations at width 128 take half a day."""


def ceilings(
    real: HeldOut,
    heldout: HeldOut,
    *,
    like: SyntheticSet,
    protocol: Protocol | str = "dm",
    network: str | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    epsilon: float | None = None,
    delta: float = 1e-5,
    which: Sequence[str] = tuple(CEILINGS),
    dm: DM | None = None,
    trainer: Trainer | None = None,
    engine: Engine | None = None,
    progress: Progress = silent,
) -> dict[str, Scores]:
    """Score references for ``like`` on the same test records, by the same protocol.

    ``real``: the training records, read openly (:func:`~understudy.data.datasets.open_training`).
    ``epsilon`` and ``delta``: the guarantee of ``like``; dp-sgd needs them. ``dm`` and ``trainer``
    replace the configurations chosen here by size and device. Each Scores says in
    ``settings["ceiling"]`` what it is, in one sentence.

    random-real and all-real repeat themselves; dm and dp-sgd draw secret coins and noise, as every
    release does.
    """
    for name in which:
        if name not in CEILINGS:
            raise UnknownName("ceiling", name, CEILINGS)
    if "dp-sgd" in which and epsilon is None:
        raise BadConfiguration(
            "The ceiling 'dp-sgd' is trained at the epsilon of the release: give epsilon=..., or "
            f"leave it out: which={tuple(name for name in which if name != 'dp-sgd')}."
        )
    budget = Budget(math.inf if epsilon is None else epsilon, delta)
    if not seeds:
        raise BadConfiguration("Give at least one seed.")
    check_alike(like, heldout)
    check_alike(like, real)
    asked = _Asked(
        real=real,
        heldout=heldout,
        like=like,
        public=_facts(real, like.public),
        protocol=_protocol(protocol),
        network="mlp" if network is None and not like.public.is_image else network,
        seeds=tuple(seeds),
        engine=engine or Engine(),
        progress=progress,
    )
    makers: dict[str, Callable[[], tuple[Scores, str]]] = {
        "random-real": asked.random_real,
        "dm": lambda: asked.distribution_matching(dm),
        "dp-sgd": lambda: asked.private_training(trainer, budget),
        "all-real": asked.all_real,
    }
    found = {}
    for name in which:
        scores, told = makers[name]()
        settings = {**scores.settings, "ceiling": told}
        found[name] = dataclasses.replace(scores, settings=settings)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """Hold one request, checked; each method computes one ceiling and says what it is."""

    real: HeldOut
    heldout: HeldOut
    like: SyntheticSet
    public: Public
    protocol: Protocol
    network: str | None
    seeds: tuple[int, ...]
    engine: Engine
    progress: Progress

    def random_real(self) -> tuple[Scores, str]:
        """Draw anew for every seed: with few records the draw matters more than the training."""
        drawn = []
        for place, seed in enumerate(self.seeds):
            rows = self._some(seed)
            images, labels = self.real.images[rows], self.real.labels[rows]
            name = f"random-real, draw {place + 1} of {len(self.seeds)}"
            drawn.append(self._scored(images, labels, (seed,), self.protocol, name))
        scores = self._together(drawn)
        short = "" if len(rows) == len(self.like) else f", the set has {len(self.like)}"
        return scores, (
            f"{len(rows)} real records drawn at random, anew for each seed, by class as in the "
            f"synthetic set{short}; not private."
        )

    def distribution_matching(self, method: DM | None) -> tuple[Scores, str]:
        """Make one set by DM, through the gate with epsilon infinite."""
        method = method or self._dm()
        with tempfile.TemporaryDirectory(prefix="understudy-ceiling-") as folder:
            release = self._measured(method, Budget(math.inf), Path(folder), "dm")
            made = method.synthesise(release, engine=self.engine, progress=self._under("dm"))
        scores = self._scored(made.images, made.labels, self.seeds, self.protocol, "dm")
        return scores, (
            f"{len(made)} records made by distribution matching (Zhao and Bilen 2023) from all "
            f"{len(self.real)} real ones, {method.iterations} iterations at width "
            f"{method.width}; not private."
        )

    def private_training(self, trainer: Trainer | None, budget: Budget) -> tuple[Scores, str]:
        """Train by DP-SGD once for each seed, each time with its own noise, and test."""
        trainer = (trainer or self._trainer(budget)).calibrated(self.public, budget)
        found = []
        for place, seed in enumerate(self.seeds):
            seeded = dataclasses.replace(trainer, seed=seed)
            name = f"dp-sgd, run {place + 1} of {len(self.seeds)}"
            with tempfile.TemporaryDirectory(prefix="understudy-ceiling-") as folder:
                release = self._measured(seeded, budget, Path(folder), name)
            net = seeded.classifier(release, engine=self.engine)
            found.append(
                judge(
                    net.to(self.engine.torch_device),
                    self.heldout.images,
                    self.heldout.labels,
                    classes=len(self.public.classes),
                    told=getattr(trainer, "network", type(net).__name__),
                )
            )
        scores = dataclasses.replace(
            self._together(found), protocol=trainer.name, settings=trainer.recipe()
        )
        return scores, (
            f"A classifier trained by {trainer.title} ({trainer.source}) on all {len(self.real)} "
            f"real records at {budget}: what the budget buys where nobody needs a set."
        )

    def all_real(self) -> tuple[Scores, str]:
        """Train on everything, with passes as in :func:`_stretched`."""
        protocol = _stretched(self.protocol, len(self.real))
        real = self.real
        scores = self._scored(real.images, real.labels, self.seeds, protocol, "all-real")
        return scores, (
            f"All {len(self.real)} real training records, {protocol.epochs} passes instead of "
            f"{self.protocol.epochs}; not private."
            if protocol.epochs != self.protocol.epochs
            else f"All {len(self.real)} real training records; not private."
        )

    # What they have in common

    def _under(self, name: str) -> Progress:
        return lambda done, total, text: self.progress(done, total, f"{name}: {text}")

    def _together(self, found: Sequence[Scores]) -> Scores:
        """Join scores of one seed each."""
        matrices = tuple(matrix for one in found for matrix in one.confusions)
        return dataclasses.replace(found[0], seeds=self.seeds, confusions=matrices)

    def _scored(
        self,
        images: Tensor,
        labels: Tensor,
        seeds: Sequence[int],
        protocol: Protocol,
        name: str,
    ) -> Scores:
        return train_and_test(
            images,
            labels,
            self.heldout.images,
            self.heldout.labels,
            classes=len(self.public.classes),
            protocol=protocol,
            network=self.network,
            seeds=seeds,
            device=self.engine.torch_device,
            precision=self.engine.dtype,
            progress=self._under(name),
        )

    def _some(self, seed: int) -> Tensor:
        """Draw rows of the real set, by class as many as the synthetic set has, if there are."""
        draw = torch.Generator().manual_seed(public_seed(seed, "random real"))
        rows = []
        for label, count in enumerate(self.like.per_class):
            own = torch.nonzero(self.real.labels == label)[:, 0]
            rows.append(own[torch.randperm(len(own), generator=draw)[:count]])
        return torch.cat(rows)

    def _measured(self, mechanism: Mechanism, budget: Budget, folder: Path, name: str) -> Release:
        """Take the real gate, on a ledger of its own that nobody keeps."""
        images = np.ascontiguousarray(self.real.images.numpy(), dtype=np.float32)
        records = Records(images, self.real.labels.numpy(), record_digests(images))
        with PrivateDataset(records, self.public).open(
            mechanism.plan(self.public),
            by=mechanism.name,
            recipe=mechanism.recipe(),
            ledger=Ledger(folder / "ledger.jsonl"),
            budget=budget,
            engine=self.engine,
            progress=self._under(name),
        ) as gate:
            return mechanism.measure(gate)

    def _dm(self) -> DM:
        """Choose the paper's DM, or less of it on a CPU; whole classes where they are small."""
        method = DM(images_per_class=max(1, round(len(self.like) / len(self.public.classes))))
        if self.engine.torch_device.type == "cpu":
            method = dataclasses.replace(method, **DM_ON_CPU)
        if method.group_size is not None and min(self.public.sizes) < method.group_size:
            method = dataclasses.replace(method, group_size=None)
        if self.protocol.augmentation:  # where training may mirror, matching may
            method = dataclasses.replace(method, augmentation=self.protocol.augmentation)
        return method

    def _trainer(self, budget: Budget) -> Trainer:
        """Choose DP-SGD as its own rule suits these facts, this budget and this device."""
        preset = DPSGD.suited(self.public, budget, self.engine)
        return DPSGD.configured({} if preset is None else DPSGD.presets[preset].configuration)


def _facts(real: HeldOut, public: Public) -> Public:
    """Return the public facts with the class sizes that are really there."""
    counts = torch.bincount(real.labels, minlength=len(public.classes)).tolist()
    for name, count in zip(public.classes, counts, strict=True):
        if count == 0:
            raise DataError(f"The real training records have none of class '{name}'.")
    return dataclasses.replace(public, counts=tuple(counts), counts_measured=False)


def _stretched(protocol: Protocol, records: int) -> Protocol:
    """Return the protocol with as many passes as make ALL_REAL_STEPS steps, never more than it has.

    Passes that suit a few hundred records would take days on tens of thousands, and need not: what
    trains a network is steps. The rate drops at the same share of the passes.
    """
    epochs = math.ceil(ALL_REAL_STEPS / math.ceil(records / protocol.batch))
    if epochs >= protocol.epochs:
        return protocol
    drop = protocol.lr_drop
    return protocol.but(
        name=f"{protocol.name} ({epochs} epochs)",
        epochs=epochs,
        lr_drop=None if drop is None else math.ceil(drop * epochs / protocol.epochs),
    )
