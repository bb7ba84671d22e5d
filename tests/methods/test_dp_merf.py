from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.methods.test_ndpdc import CPU, MNIST, table, two_pictures
from understudy.data.datasets import load, load_heldout
from understudy.errors import BadConfiguration
from understudy.evaluation.classify import sklearn_scores
from understudy.methods import dp_merf
from understudy.methods.dp_merf import DPMERF
from understudy.nets import generator as generators
from understudy.nets.generator import draw_table_generator, draw_upsampling_generator
from understudy.privacy import Budget, Ledger, Public, Secret
from understudy.privacy.public import Adjacency, Column
from understudy.privacy.release import Release
from understudy.run import fit, synthesise

DEVICE = torch.device("cpu")
PEOPLE = (
    Column(name="age", kind="numeric", low=17, high=90),
    Column(name="sex", kind="categorical", categories=("Female", "Male")),
    Column(name="hours", kind="numeric", low=1, high=99),
    Column(name="race", kind="categorical", categories=("a", "b", "c", "d", "e")),
)
ROWS = Public(name="people", shape=(9,), classes=("poor", "rich"), counts=(30, 10), columns=PEOPLE)


def small(**changes: Any) -> DPMERF:
    return DPMERF.configured({**DPMERF.miniature, **changes})


def released(method: DPMERF, ledger: Path, data: Any = None) -> Release:
    secret = Secret.for_testing(1)
    return fit(data or two_pictures(), method, ledger=Ledger(ledger), engine=CPU, secret=secret)


def frequencies_of(method: DPMERF, public: Public) -> np.ndarray:
    """Read the frequencies off the features of unit vectors, whose angles they are."""
    features = method.features(public, DEVICE)(torch.eye(public.dimension)).double().numpy()
    cosines, sines = np.split(features, 2, axis=1)
    return np.arctan2(sines, cosines)  # (dimension, D); all angles lie far inside (-pi, pi)


def test_one_release_costs_one_gaussian() -> None:
    assert DPMERF().epsilon(MNIST) == pytest.approx(1.0, abs=2e-3)
    (step,) = DPMERF().plan(MNIST)
    assert (step.times, step.query.bound, step.query.expected_batch) == (1, 1.0, None)
    replaced = dataclasses.replace(MNIST, adjacency=Adjacency.REPLACE)
    assert DPMERF(noise_multiplier=2 * 3.7307).epsilon(replaced) == pytest.approx(1.0, abs=2e-3)


def test_features_have_norm_one_and_are_bounded_for_any_finite_record() -> None:
    features = DPMERF(frequencies=77).features(MNIST, DEVICE)
    records = torch.cat([torch.rand(20, 784) * 2 - 1, torch.zeros(1, 784), torch.ones(1, 784) * 50])
    rows = features(records)
    assert rows.shape == (22, 2 * 77)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(22), rtol=0, atol=1e-6)


def test_inner_products_are_the_gaussian_kernel_on_average() -> None:
    """The error of D frequencies has deviation (1 - k^2) / sqrt(2 D): here for 40 x 500."""
    x, step = torch.zeros(1, 64), torch.linspace(0, 1, 64)
    public = dataclasses.replace(MNIST, shape=(1, 8, 8))
    scale = DPMERF().scale(public)
    for distance in (0.3, 1.0, 2.0):
        y = x + step / step.norm() * distance * scale
        kernel = math.exp(-(distance**2) / 2)
        estimates = []
        for seed in range(40):
            features = DPMERF(frequencies=500, seed=seed).features(public, DEVICE)
            estimates.append(float((features(x) * features(y)).sum()))
        error = (1 - kernel**2) / math.sqrt(2 * 40 * 500)
        assert abs(np.mean(estimates) - kernel) < 4 * error
        assert np.std(estimates) == pytest.approx(error * math.sqrt(40), rel=0.5)


def test_frequencies_are_normal_public_and_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = dp_merf._normals(range(200), 1000, DEVICE).double().numpy()
    assert np.mean(draws) == pytest.approx(0, abs=0.01)
    assert np.var(draws) == pytest.approx(1, abs=0.02)
    assert np.mean(draws**4) == pytest.approx(3, abs=0.15)
    ends = torch.tensor([[-1.0, 1 - 2.0**-23, 0.0]])
    monkeypatch.setattr(dp_merf, "uniforms", lambda *args, **kwargs: ends)
    low, high, middle = dp_merf._normals([3], 3, DEVICE)[0].tolist()
    assert -6 < low == -high and abs(middle) < 1e-6


def test_frequencies_do_not_depend_on_how_many_are_drawn_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, many = (frequencies_of(DPMERF(frequencies=n), ROWS) for n in (10, 30))
    np.testing.assert_allclose(few, many[:, :10], atol=1e-6)
    assert np.abs(few - frequencies_of(DPMERF(frequencies=10, seed=1), ROWS)).min() > 1e-6
    assert np.unique(many.round(6)).size == many.size
    monkeypatch.setattr(dp_merf, "DRAWN_AT_ONCE", 9 * 7)
    np.testing.assert_array_equal(many, frequencies_of(DPMERF(frequencies=30), ROWS))


def test_without_noise_the_release_is_the_class_sums_of_plain_numpy(tmp_path: Path) -> None:
    method, data = small(noise_multiplier=0.0), two_pictures()
    sums = released(method, tmp_path / "l", data).signals["sums"]
    angles = data._records._images.reshape(120, -1) @ frequencies_of(method, data.public)
    rows = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) / math.sqrt(50)
    wanted = np.stack([rows[data._records._labels == c].sum(axis=0) for c in (0, 1)])
    np.testing.assert_allclose(sums.numpy(), wanted, atol=2e-4)


@pytest.mark.parametrize("public", [MNIST, ROWS, dataclasses.replace(ROWS, columns=())])
def test_the_length_scale_is_how_far_apart_uniform_records_are(public: Public) -> None:
    random = np.random.default_rng(0)

    def draw() -> np.ndarray:
        if not public.columns:
            return random.uniform(-1, 1, (4000, public.dimension))
        cells = [
            random.uniform(-1, 1, (4000, 1))
            if column.kind == "numeric"
            else np.eye(column.width)[random.integers(0, column.width, 4000)]
            for column in public.columns
        ]
        return np.concatenate(cells, axis=1)

    apart = np.mean(np.sum((draw() - draw()) ** 2, axis=1))
    assert DPMERF().scale(public) == pytest.approx(math.sqrt(apart), rel=0.02)
    assert DPMERF(length_scale=3.0).scale(public) == 3.0


def test_the_rule_comes_near_the_published_medians() -> None:
    """105 and 127 are squared distances of pixels in [0, 1]: four times as much in [-1, 1]."""
    ours = DPMERF().scale(MNIST)
    assert ours == pytest.approx(22.9, abs=0.05)
    assert 1 < ours / math.sqrt(4 * 127) < ours / math.sqrt(4 * 105) < 1.12


def test_the_loss_is_the_papers_by_hand(tmp_path: Path) -> None:
    method, data = small(), two_pictures()
    release = released(method, tmp_path / "l", data)
    records, labels = torch.rand(5, 1, 8, 8) * 2 - 1, torch.tensor([0, 0, 1, 0, 1])
    ours = method._match(release, DEVICE)(records, labels)
    angles = records.reshape(5, 64).double().numpy() @ frequencies_of(method, data.public)
    rows = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) / math.sqrt(50)
    wanted = 0.0
    for c in (0, 1):
        goal = release.signals["sums"][c].double().numpy() / 60
        wanted += float(np.sum((rows[labels.numpy() == c].mean(axis=0) - goal) ** 2))
    assert float(ours) == pytest.approx(wanted, rel=1e-4)
    # A class with no record yet counts as zero, not as nan.
    assert torch.isfinite(method._match(release, DEVICE)(records[:2], labels[:2]))


@pytest.mark.parametrize("prior", [True, False])
def test_what_is_made_has_the_mean_embedding_of_its_class(tmp_path: Path, prior: bool) -> None:
    """From 0.5 and more to a small share of what separates the two classes."""
    changes = {"steps": 120, "batch": 40, "images_per_class": 30, "learning_rate": 0.03}
    method = small(prior=prior, noise_multiplier=0.0, frequencies=300, **changes)
    release = released(method, tmp_path / "l")
    made, match = synthesise(release, method, engine=CPU), method._match(release, DEVICE)
    apart = float((release.signals["sums"] / 60).diff(dim=0).square().sum())
    assert float(match(made.images, made.labels)) < 0.1 * apart
    assert float(match(made.images, 1 - made.labels)) > 1.5 * apart
    left, right = made.images[..., :4].mean((1, 2, 3)), made.images[..., 4:].mean((1, 2, 3))
    assert float(((left > right) == (made.labels == 0)).float().mean()) > 0.95


@pytest.mark.parametrize("prior", [True, False])
def test_any_number_is_drawn_in_equal_shares(
    tmp_path: Path, prior: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = small(prior=prior)
    release = released(method, tmp_path / "l")
    for count, shares in ((7, [4, 3]), (1, [1, 0]), (4, [2, 2])):
        made = method.sample(release, count, engine=CPU)
        assert made.per_class == shares
        assert made.labels.tolist() == sorted(made.labels.tolist())
        assert torch.isfinite(made.images).all()
    monkeypatch.setattr(dp_merf, "MADE_AT_ONCE", 4)
    assert method.sample(release, 11, engine=CPU).per_class == [6, 5]
    with pytest.raises(BadConfiguration, match="at least 1"):
        method.sample(release, 0)


@pytest.mark.parametrize("prior", [True, False])
def test_draws_follow_from_their_seed_and_the_generator_from_the_methods(
    tmp_path: Path, prior: bool
) -> None:
    method = small(prior=prior)
    release = released(method, tmp_path / "l")
    state = torch.random.get_rng_state()
    first = method.sample(release, 6, seed=3, engine=CPU).images
    assert torch.equal(first, method.sample(release, 6, seed=3, engine=CPU).images)
    assert torch.equal(state, torch.random.get_rng_state()), "the global generator was used"
    assert not torch.equal(first, method.sample(release, 6, seed=4, engine=CPU).images)
    other = dataclasses.replace(method, seed=1)  # the frequencies stay those that were asked
    assert torch.equal(other.sample(release, 6, seed=3, engine=CPU).images, first) != prior


def test_another_embedding_than_the_measured_one_is_refused(tmp_path: Path) -> None:
    release = released(small(), tmp_path / "l")
    for changes in ({"frequencies": 60}, {"length_scale": 2.0}):
        with pytest.raises(BadConfiguration, match="measured with"):
            small(**changes).sample(release, 4)
    assert len(small(steps=3, latent=2, batch=2).sample(release, 4)) == 4


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (2, 9, 13), (1, 1, 3)])
def test_the_generator_makes_any_picture(shape: tuple[int, int, int]) -> None:
    generator = draw_upsampling_generator(3, shape, 4).eval()
    latents, labels = torch.randn(6, 5), torch.arange(6) % 4
    made = generator(latents, labels)
    assert made.shape == (6, *shape)
    assert made.abs().max() <= 1
    torch.testing.assert_close(made[2:3], generator(latents[2:3], labels[2:3]))
    again = draw_upsampling_generator(3, shape, 4).eval()
    assert torch.equal(made, again(latents, labels))
    assert not torch.equal(made, draw_upsampling_generator(4, shape, 4).eval()(latents, labels))


def test_the_generator_is_the_published_one_for_28_pixels() -> None:
    """(5 + 10) x 200, 200 x 784, two norms, 16 -> 8 -> 1 maps by 5 x 5."""
    generator = draw_upsampling_generator(0, (1, 28, 28), 10)
    layers = (15 + 1) * 200 + (200 + 1) * 784 + (16 * 25 + 1) * 8 + (8 * 25 + 1)
    norms = 2 * (200 + 784)
    assert sum(p.numel() for p in generator.parameters()) == layers + norms
    assert generator.maps == ((7, 14, 28), (7, 14, 28))


def test_enlarging_is_bilinear_interpolation() -> None:
    x = torch.randn(2, 3, 4, 5)
    wanted = F.interpolate(x, size=(8, 11), mode="bilinear", align_corners=True)
    torch.testing.assert_close(generators._enlarged(x, 8, 11), wanted)


def test_a_generated_row_obeys_its_columns() -> None:
    generator = draw_table_generator(2, 9, PEOPLE, 2).eval()
    rows = generator(torch.randn(50, 5), torch.arange(50) % 2)
    assert rows.shape == (50, 9)
    assert rows[:, [0, 3]].abs().max() <= 1
    for block in (rows[:, 1:3], rows[:, 4:9]):
        assert (block >= 0).all()
        torch.testing.assert_close(block.sum(1), torch.ones(50))
    plain = draw_table_generator(2, 9, (), 2).eval()(torch.randn(50, 5), torch.arange(50) % 2)
    assert plain.shape == (50, 9) and plain.abs().max() <= 1


@pytest.mark.parametrize("prior", [True, False])
def test_tables_are_made_too(tmp_path: Path, prior: bool) -> None:
    method = small(prior=prior, steps=60, frequencies=200, noise_multiplier=1.0, batch=40)
    assert DPMERF.suited(table().public, None, CPU) == "table"
    assert DPMERF.suited(MNIST, None, CPU) is None
    made = synthesise(released(method, tmp_path / "l", table()), engine=CPU)
    assert made.images.shape == (6, 14)
    assert made.images[made.labels == 1].mean() > made.images[made.labels == 0].mean()


def test_class_sizes_weigh_nothing(tmp_path: Path) -> None:
    """Only noise does: sums are divided by the declared sizes before they are matched."""
    method = small(noise_multiplier=0.0)
    release = released(method, tmp_path / "l")
    doubled = dataclasses.replace(
        release,
        public=dataclasses.replace(release.public, counts=(60, 120)),
        signals={"sums": release.signals["sums"] * torch.tensor([[1.0], [2.0]])},
    )
    images = [method.sample(one, 6, engine=CPU).images for one in (release, doubled)]
    torch.testing.assert_close(*images)


@pytest.mark.parametrize(
    "changes",
    [
        {"frequencies": 0},
        {"length_scale": 0.0},
        {"length_scale": float("inf")},
        {"latent": 0},
        {"steps": 0},
        {"batch": 0},
        {"images_per_class": 0},
        {"learning_rate": float("nan")},
    ],
)
def test_senseless_fields_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadConfiguration):
        small(**changes)


@pytest.mark.parametrize("preset", DPMERF.presets)
def test_presets_can_be_built(preset: str) -> None:
    DPMERF.configured(DPMERF.presets[preset].configuration)


def test_the_digits_preset_trains_a_useful_classifier_at_epsilon_one(tmp_path: Path) -> None:
    method = DPMERF.configured(DPMERF.presets["digits"].configuration)
    release = fit(
        load("digits"), method, budget=Budget(1.0), ledger=Ledger(tmp_path / "l"), engine=CPU
    )
    assert release.statement.private
    assert 0.99 < release.statement.epsilon <= 1.0
    made = synthesise(release, engine=CPU)
    assert made.per_class == [10] * 10
    test = load_heldout("digits")
    scores = sklearn_scores(
        made.images, made.labels, test.images, test.labels, classes=10, models=("logistic",)
    )
    assert 0.7 <= scores["logistic"].accuracy <= 0.96
