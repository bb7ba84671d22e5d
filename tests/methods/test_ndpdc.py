from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fixtures import private
from understudy.engine import Engine
from understudy.errors import BadConfiguration
from understudy.methods import DM, NDPDC
from understudy.privacy import Accountant, Budget, Ledger, PrivateDataset, Public
from understudy.run import fit, synthesise

CPU = Engine(device="cpu", chunk=64)
MNIST = Public(
    name="mnist",
    shape=(1, 28, 28),
    classes=tuple(map(str, range(10))),
    counts=(5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
)


def two_pictures(per_class: int = 60) -> PrivateDataset:
    """Noisy copies of a left-bright and a right-bright picture."""
    random = np.random.default_rng(2)
    labels = np.arange(2 * per_class) % 2
    images = random.normal(-0.5, 0.2, (2 * per_class, 1, 8, 8))
    images[labels == 0, :, :, :4] += 1.0
    images[labels == 1, :, :, 4:] += 1.0
    return private(images.clip(-1, 1).astype(np.float32), labels, name="two pictures")


def table(per_class: int = 200) -> PrivateDataset:
    random = np.random.default_rng(3)
    labels = np.arange(2 * per_class) % 2
    rows = random.normal(0, 0.3, (2 * per_class, 14)) + np.where(labels, 0.4, -0.4)[:, None]
    return private(rows.clip(-1, 1).astype(np.float32), labels, name="table")


def test_the_paper_configuration_costs_what_table_one_says() -> None:
    """6.114 by the paper's Renyi accounting (Theorem III.2), 5.63 by loss distributions."""
    paper = NDPDC()
    (step,) = paper.plan(MNIST)
    assert (step.times, step.query.expected_batch, step.query.bound) == (10_000, 50.0, 1.0)
    assert paper.epsilon(MNIST, 1e-5, Accountant.RDP) == pytest.approx(6.114, abs=0.01)
    assert paper.extractor(MNIST).features == 2048


def test_class_sums_move_towards_the_private_pictures(tmp_path: Path) -> None:
    method = NDPDC(
        iterations=40,
        group_size=30,
        images_per_class=2,
        width=8,
        noise_multiplier=0.5,
        augmentation="crop",
    )
    release = fit(two_pictures(), method, ledger=Ledger(tmp_path / "l"), engine=CPU)
    assert release.signals["sums"].shape == (40, 2, 32)
    losses: list[float] = []
    made = synthesise(
        release, engine=CPU, progress=lambda a, b, text: losses.append(float(text.split()[-1]))
    )
    assert made.per_class == [2, 2]
    assert np.mean(losses[-8:]) < 0.7 * np.mean(losses[:8])


def test_tables_pass_through_sixty_four_linear_features(tmp_path: Path) -> None:
    data = table()
    method = NDPDC.configured({"iterations": 60, "images_per_class": 4, "group_size": 50})
    assert method.extractor(data.public).raw_features == 64
    assert sum(p.numel() for p in method.extractor(data.public)._net.parameters()) == 14 * 64 + 64
    release = fit(data, method, ledger=Ledger(tmp_path / "l"), engine=CPU)
    made = synthesise(release, engine=CPU)
    assert made.images.shape == (8, 14)
    means = made.images.view(2, 4, 14).mean((1, 2))
    assert means[0] < -0.1
    assert means[1] > 0.1


def test_dm_goes_through_the_gate_and_promises_nothing(tmp_path: Path) -> None:
    method = DM.configured({**DM.miniature, "iterations": 30, "learning_rate": 0.1})
    release = fit(two_pictures(), method, ledger=Ledger(tmp_path / "l"), engine=CPU)
    assert math.isinf(release.statement.epsilon)
    assert release.statement.paragraph().startswith("NOT PRIVATE")
    whole = DM.configured({**DM.miniature, "group_size": None})
    whole_release = fit(two_pictures(), whole, ledger=Ledger(tmp_path / "m"), engine=CPU)
    made = synthesise(whole_release, engine=CPU)
    assert torch.isfinite(made.images).all()
    with pytest.raises(BadConfiguration, match="not private"):
        method.calibrated(MNIST, Budget(1.0))
    with pytest.raises(BadConfiguration, match="no noise"):
        DM(noise_multiplier=1.0)
    assert method.calibrated(MNIST, Budget(math.inf)) == method


def test_dm_sums_are_unclipped(tmp_path: Path) -> None:
    """The bound is a norm no feature vector has, so a class mean is the plain mean."""
    data = two_pictures()
    method = DM.configured({**DM.miniature, "group_size": None, "augmentation": ""})
    sums = fit(data, method, ledger=Ledger(tmp_path / "l"), engine=CPU).signals["sums"]
    images = torch.from_numpy(np.array(data._records._images))
    for i in range(4):
        rows = method.extractor(data.public).signal(i).embed(images)
        assert rows.norm(dim=1).max() > 1
        expected = torch.stack([rows[c::2].sum(0) for c in range(2)])
        torch.testing.assert_close(sums[i], expected, atol=1e-3, rtol=1e-4)
