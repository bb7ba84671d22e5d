from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.methods.test_ndpdc import CPU, MNIST, two_pictures
from understudy.data.datasets import load, load_heldout
from understudy.errors import ReleaseError
from understudy.methods import Dosser
from understudy.methods.matching import Auxiliary, Extractor, Optimisation, optimise, public_seed
from understudy.privacy import Accountant, Budget, Ledger
from understudy.privacy.release import Release
from understudy.run import evaluate, fit, synthesise

FIELDS = Auxiliary.of("random fields")


def small(**changes: Any) -> Dosser:
    values: dict[str, Any] = {
        "sampling_iterations": 20,
        "optimisation_iterations": 50,
        "group_size": 30.0,
        "images_per_class": 2,
        "width": 8,
        "noise_multiplier": 0.5,
    }
    return Dosser(**{**values, **changes})


@pytest.fixture
def release(tmp_path: Path) -> Release:
    method = small(subspace=6, auxiliary=FIELDS)
    return fit(two_pictures(), method, ledger=Ledger(tmp_path / "l"), engine=CPU)


def test_the_price_is_that_of_sampling_alone() -> None:
    short = small(optimisation_iterations=1)
    assert short.plan(MNIST) == small(optimisation_iterations=10**6).plan(MNIST)
    # The paper's MNIST noise at epsilon 1: 10,000 sums of 50.
    assert Dosser().epsilon(MNIST, 1e-5, Accountant.RDP) == pytest.approx(1.0, abs=0.01)


def test_only_noisy_projected_sums_are_kept(release: Release) -> None:
    assert release.signals["sums"].shape == (20, 2, 6)
    assert release.signals["subspace_marks"].shape == (3, 6)
    assert set(release.signals) == {"sums", "subspace_marks"}
    # At the paper's size: 10,000 signals, ten classes, 500 directions.
    assert 10_000 * 10 * 500 * 4 < 4 * 2**30


def test_one_release_serves_any_number_of_optimisations(release: Release) -> None:
    short = synthesise(release, engine=CPU)
    method = Dosser.configured(release.recipe["configuration"])
    assert torch.equal(short.images, synthesise(release, method, engine=CPU).images)
    longer = dataclasses.replace(
        method, optimisation_iterations=80, images_per_class=3, expand=True
    )
    made = synthesise(release, longer, engine=CPU)
    assert made.per_class == [12, 12]


def test_matching_in_the_subspace_lowers_the_loss(release: Release) -> None:
    losses: list[float] = []
    method = dataclasses.replace(
        Dosser.configured(release.recipe["configuration"]),
        optimisation_iterations=200,
        learning_rate=0.1,
    )
    synthesise(
        release,
        method,
        engine=CPU,
        progress=lambda a, b, text: losses.append(float(text.split()[-1])),
    )
    assert np.mean(losses[-20:]) < 0.7 * np.mean(losses[:5])


def test_gradients_are_signals_like_any_other(tmp_path: Path) -> None:
    """Sampled, projected, clipped, noised and matched as features are; a free choice (3.1)."""
    method = small(features="gradients", subspace=6, auxiliary=FIELDS, learning_rate=0.3)
    assert method.plan(MNIST) == small(subspace=6, auxiliary=FIELDS).plan(MNIST)
    release = fit(two_pictures(), method, ledger=Ledger(tmp_path / "l"), engine=CPU)
    assert release.signals["sums"].shape == (20, 2, 6)
    losses: list[float] = []
    made = synthesise(
        release, engine=CPU, progress=lambda a, b, text: losses.append(float(text.split()[-1]))
    )
    assert made.per_class == [2, 2]
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:5])


def test_another_subspace_is_noticed(release: Release) -> None:
    method = Dosser.configured(release.recipe["configuration"])
    other = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with pytest.raises(ReleaseError, match="other auxiliary images"):
        synthesise(release, dataclasses.replace(method, auxiliary=other), engine=CPU)  # type: ignore[arg-type]


def test_the_result_is_the_moving_average() -> None:
    public = two_pictures().public
    maker = Extractor(public=public, seed=1, kind="convnet", width=4)
    targets = torch.zeros(2, 2, maker.features)
    same: dict[str, Any] = {"images_per_class": 1, "weight": 1.0, "clip_norm": 1.0}
    path: list[torch.Tensor] = []
    optimise(
        targets,
        maker,
        Optimisation(steps=5),
        **same,
        every=1,
        watch=lambda done, made: path.append(made.images),
    )
    generator = torch.Generator().manual_seed(public_seed(1, "start"))
    average = torch.randn(2, 1, 8, 8, generator=generator)
    for images in path:
        average = 0.9 * average + 0.1 * images
    made = optimise(targets, maker, Optimisation(steps=5, average=0.9), **same)
    torch.testing.assert_close(made.images, average)


def test_random_order_uses_every_signal_about_equally_and_only_public_randomness() -> None:
    how = Optimisation(steps=4000, order="random")
    picked = how.schedule(8, seed=3)
    assert picked == how.schedule(8, seed=3)
    assert picked != how.schedule(8, seed=4)
    counts = np.bincount(picked, minlength=8)
    assert counts.min() > 400
    assert counts.max() < 600
    assert list(Optimisation(steps=5).schedule(3, seed=0)) == [0, 1, 2, 0, 1]


@pytest.mark.slow
def test_a_subspace_from_random_fields_helps_at_epsilon_one(tmp_path: Path) -> None:
    """Three releases gave 89.1 to 90.3 % with the subspace and 80.5 to 82.2 % without.

    Noise is secret, and single releases were once as near as 84.7 and 83.8: so means of three.
    """
    accuracies: list[float] = []
    plain = {"subspace": None, "auxiliary": None, "learning_rate": 1.0}
    for turn, changes in enumerate([{}] * 3 + [plain] * 3):
        method = Dosser.configured({**Dosser.presets["digits"].configuration, **changes})
        ledger = Ledger(tmp_path / str(turn))
        release = fit(load("digits"), method, budget=Budget(1.0), ledger=ledger, engine=CPU)
        assert release.statement.private
        made = synthesise(release, engine=CPU)
        scores = evaluate(made, load_heldout("digits"), protocol="quick", seeds=(0,), engine=CPU)
        accuracies.append(scores.accuracy)
    with_subspace, without = np.mean(accuracies[:3]), np.mean(accuracies[3:])
    assert with_subspace > 0.8
    assert with_subspace > without + 0.02
