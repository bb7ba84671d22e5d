"""Make small real releases of scikit-learn's digits, and scores that no document may quote."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from understudy.auditing import AuditResult, Evidence
from understudy.data.synthetic import SyntheticSet
from understudy.evaluation.classify import Scores
from understudy.evaluation.fidelity import Fidelity, Figures
from understudy.methods.ldpdc import LDPDC
from understudy.privacy.accounting import Budget
from understudy.privacy.gate import PrivateDataset, Records, record_digests
from understudy.privacy.ledger import Ledger
from understudy.privacy.noise import Secret
from understudy.privacy.public import Column, Public
from understudy.privacy.release import Release

NASTY = ('<script>alert("zero")</script>', "a|b & `c` *d*", "$x^2$", "猫 '\"", 'url(#p) id="r1"')


def digits(classes: tuple[str, ...] = tuple("0123456789")) -> PrivateDataset:
    """Return real digits, under whatever names the classes shall have."""
    data = load_digits()
    images = np.rint(data.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = data.target.astype(np.int64)
    public = Public(
        name="digits",
        shape=(1, 8, 8),
        classes=classes,
        counts=tuple(int(count) for count in np.bincount(labels)),
        preparation=("pixels mapped from [0, 255] to [-1, 1]",),
    )
    return PrivateDataset(Records(images, labels, record_digests(images)), public)


def table() -> PrivateDataset:
    """Return a small table of made-up cells."""
    columns = (
        Column(name="age <years>", kind="numeric", low=17, high=90),
        Column(name="sex", kind="categorical", categories=("Female", "Male")),
    )
    rng = np.random.default_rng(0)
    cells = rng.uniform(-1, 1, (400, 3)).astype(np.float32)
    labels = (np.arange(400) % 2).astype(np.int64)
    public = Public(
        name="people", shape=(3,), classes=("no", "yes"), counts=(200, 200), columns=columns
    )
    return PrivateDataset(Records(cells, labels, record_digests(cells)), public)


def measured(
    data: PrivateDataset,
    ledger: Path,
    *,
    epsilon: float = 1.0,
    images_per_class: int = 5,
    noise_multiplier: float | None = None,
    secret: Secret | None = None,
) -> tuple[Release, SyntheticSet]:
    """Run LDPDC through the gate for real."""
    method = LDPDC(images_per_class=images_per_class, group_size=40.0)
    budget = Budget(epsilon, 1e-5)
    if noise_multiplier is None:
        method = method.calibrated(data.public, budget)
    else:
        method = dataclasses.replace(method, noise_multiplier=noise_multiplier)
    with data.open(
        method.plan(data.public),
        by=method.name,
        recipe=method.recipe(),
        ledger=Ledger(ledger, cap=Budget(float("inf"), 1e-5)),
        budget=budget,
        secret=secret,
    ) as gate:
        release = method.measure(gate)
    return release, method.synthesise(release)


def scores(classes: int, *, accuracy: float = 0.8, seeds: int = 3, network: str = "ConvNet") -> Any:
    """Return plausible scores. They were not measured."""
    rng = np.random.default_rng(int(1000 * accuracy))
    confusions = []
    for _ in range(seeds):
        matrix = []
        for real in range(classes):
            share = np.full(classes, (1 - accuracy) / classes)
            share[real] += accuracy
            share = rng.dirichlet(share * 40)
            matrix.append(tuple(int(n) for n in rng.multinomial(36, share)))
        confusions.append(tuple(matrix))
    return Scores(
        protocol="dm",
        network=network,
        seeds=tuple(range(seeds)),
        confusions=tuple(confusions),
        settings={"epochs": 1000, "optimiser": {"name": "SGD", "rate": 0.01}},
    ).to_json()


def ceilings(classes: int, name: str = "random-real", told: str = "fifty real records") -> Any:
    """Return references as evaluation writes them. They were not measured."""
    found = scores(classes, accuracy=0.9)
    return {name: {**found, "settings": {**found["settings"], "ceiling": told}}}


def fidelity(features: str = "features of a ConvNet trained on test records") -> Any:
    """Return fidelity figures as evaluation writes them. They were not measured."""
    figures = Figures(
        frechet_distance=41.5,
        kernel_distance=0.25,
        classifier_score=None,
        precision=0.5,
        recall=0.25,
        density=0.75,
        coverage=0.125,
        nearest=(1.5, 2.5),
    )
    return Fidelity(
        kind="own",
        features=features,
        synthetic=figures,
        real=dataclasses.replace(figures, frechet_distance=1.25, classifier_score=8.5),
        records=50,
        compared=50,
        reference=150,
        trained_on=180,
        seed=0,
    ).to_json()


def audit(bound: float = 0.25, claimed: float = 1.0, pool: str = "digits", **changes: Any) -> Any:
    """Return an audit's result as it is kept. It was not run."""
    evidence = Evidence(
        attack="canary in the mechanism",
        epsilon=bound,
        confidence=0.99,
        rests_on="Gaussian noise",
        figures={"auroc": 0.625},
    )
    return {
        **AuditResult(
            method="ldpdc",
            recipe={},
            pool=pool,
            claimed=claimed,
            delta=1e-5,
            lower_bound=bound,
            confidence=0.95,
            evidence=(evidence,),
            findings=(),
            runs=200,
            releases=12,
            seconds=3.0,
        ).to_json(),
        **changes,
    }
