"""Attacks find what is plainly there, and nothing where nothing is."""

from __future__ import annotations

import numpy as np
import torch

from tests.fixtures import little
from understudy.auditing.attacks import (
    crafted,
    density_ratio,
    inner_products,
    likelihood_ratio,
    nearest_distance,
)
from understudy.auditing.statistics import auroc
from understudy.data.synthetic import SyntheticSet

PUBLIC = little(40).public  # two classes, 1 x 4 x 4


def records(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(seed)
    images = random.uniform(-1, 1, (count, *PUBLIC.shape)).astype(np.float32)
    return torch.from_numpy(images), torch.arange(count) % 2


def test_canaries_are_corners_of_the_record_space() -> None:
    images, labels = crafted(PUBLIC, 5, 3)
    assert images.abs().eq(1).all()
    assert labels.tolist() == [0, 1, 0, 1, 0]
    assert torch.equal(images, crafted(PUBLIC, 5, 3)[0])
    assert not torch.equal(images, crafted(PUBLIC, 5, 4)[0])


def test_released_copies_are_found() -> None:
    images, labels = records(20, 0)
    reference, reference_labels = records(60, 1)
    synthetic = SyntheticSet(images[:10] + 0.01, labels[:10], PUBLIC)
    for scores in (
        nearest_distance(synthetic, images, labels),
        density_ratio(synthetic, reference, reference_labels, images, labels),
    ):
        assert auroc(scores[:10], scores[10:]) > 0.95


def test_a_class_without_synthetic_records_gives_no_score() -> None:
    images, labels = records(4, 0)
    synthetic = SyntheticSet(images[:1], labels[:1], PUBLIC)
    assert np.isneginf(nearest_distance(synthetic, images, labels)[1])
    assert density_ratio(synthetic, images, labels, images, labels)[1] == 0


def test_shadow_runs_sharpen_scores_of_different_canaries() -> None:
    """Canaries whose scores lie far apart: one threshold fails, a ratio per canary does not."""
    random = np.random.default_rng(0)
    base = random.normal(size=12) * 50
    coins = random.integers(0, 2, (60, 12)).astype(bool)
    scores = base + 2 * coins + random.normal(size=coins.shape) * 0.5
    ratio = likelihood_ratio(scores[20:], scores[:20], coins[:20])
    bits = coins[20:]
    assert auroc(scores[20:][bits], scores[20:][~bits]) < 0.65
    assert auroc(ratio[bits], ratio[~bits]) > 0.97


def test_inner_products_are_log_likelihood_ratios() -> None:
    random = np.random.default_rng(0)
    known, rows = random.normal(size=16), random.normal(size=(3, 16))
    answer = known + rows[1] + random.normal(size=16) * 0.3
    scores = inner_products(answer, known, rows, 0.3)
    rest = answer - known
    expected = [(np.sum(rest**2) - np.sum((rest - row) ** 2)) / (2 * 0.09) for row in rows]
    np.testing.assert_allclose(scores, expected)
    assert scores.argmax() == 1
