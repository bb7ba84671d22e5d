"""Fidelity: each figure against a plain computation, and what is compared with what."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor, nn

from understudy.data.heldout import HeldOut
from understudy.data.synthetic import SyntheticSet
from understudy.engine import Engine
from understudy.errors import BadConfiguration, DataError
from understudy.evaluation import fidelity as module
from understudy.evaluation.fidelity import (
    Fidelity,
    classifier_score,
    fidelity,
    frechet_distance,
    kernel_distance,
    neighbourhoods,
)
from understudy.privacy.public import Public

CPU = Engine(device="cpu")


def normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# Each figure alone


def test_frechet_distance_is_the_closed_form() -> None:
    """Correlated Gaussians: the samples' own moments, through SciPy's matrix square root."""
    ours = normal(0, 300, 5) @ normal(1, 5, 5) + 1
    real = normal(2, 400, 5) @ normal(3, 5, 5)
    s1, s2 = np.cov(ours.numpy().T), np.cov(real.numpy().T)
    root = scipy.linalg.sqrtm(s1 @ s2).real
    plain = float((ours.mean(0) - real.mean(0)).square().sum()) + np.trace(s1 + s2 - 2 * root)
    assert frechet_distance(ours, real) == pytest.approx(plain, rel=1e-9)


def test_frechet_distance_of_large_samples_is_the_populations() -> None:
    """N(m, D^2) and N(0, I): |m|^2 + the sum of (d - 1)^2."""
    mean, deviation = torch.tensor([2.0, 0.0, -1.0]), torch.tensor([1.0, 3.0, 0.5])
    ours = normal(0, 40_000, 3) * deviation + mean
    expected = 5.0 + 4.0 + 0.25
    assert frechet_distance(ours, normal(1, 40_000, 3)) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("count", "width"), [(40, 3), (8, 20)])
def test_a_set_is_at_distance_zero_from_itself(count: int, width: int) -> None:
    same = normal(0, count, width)
    assert frechet_distance(same, same) == pytest.approx(0, abs=1e-5)
    assert neighbourhoods(same, same)[:2] == (1.0, 1.0)
    assert neighbourhoods(same, same)[3] == 1.0


def test_few_records_are_farther_than_many() -> None:
    """The bias that 'real against real' is there to show."""
    few, many, real = normal(0, 15, 10), normal(1, 1500, 10), normal(2, 1500, 10)
    assert frechet_distance(few, real) > 10 * frechet_distance(many, real)


def test_kernel_distance_is_the_unbiased_mmd() -> None:
    ours, real = normal(0, 12, 4) + 1, normal(1, 12, 4)

    def kernel(x: Tensor, y: Tensor) -> float:
        return float(x @ y / 4 + 1) ** 3

    def among(rows: Tensor) -> float:
        pairs = [(i, j) for i in range(12) for j in range(12) if i != j]
        return sum(kernel(rows[i], rows[j]) for i, j in pairs) / len(pairs)

    across = sum(kernel(x, y) for x in ours for y in real) / 144
    plain = among(ours) + among(real) - 2 * across
    assert kernel_distance(ours, real) == pytest.approx(plain, rel=1e-9)


def test_kernel_distance_repeats_and_leaves_the_global_generator_alone() -> None:
    ours, real = normal(0, 12, 4), normal(1, 60, 4)
    before = torch.get_rng_state()
    assert kernel_distance(ours, real, 5) == kernel_distance(ours, real, 5)
    assert kernel_distance(ours, real, 5) != kernel_distance(ours, real, 6)
    assert torch.equal(before, torch.get_rng_state())


def test_classifier_score() -> None:
    logs = normal(0, 50, 4).log_softmax(1)
    p, marginal = logs.exp(), logs.exp().mean(0)
    plain = math.exp(sum(float((row * (row / marginal).log()).sum()) for row in p) / 50)
    assert classifier_score(logs) == pytest.approx(plain, rel=1e-9)
    assert classifier_score(torch.full((9, 4), -math.log(4))) == pytest.approx(1)
    sure = torch.full((8, 4), -math.inf)
    sure[torch.arange(8), torch.arange(8) % 4] = 0.0
    assert classifier_score(sure) == pytest.approx(4)


def plain_neighbourhoods(ours: Tensor, real: Tensor, k: int) -> tuple[float, ...]:
    """The four definitions, one pair of points at a time."""

    def distance(x: Tensor, y: Tensor) -> float:
        return math.dist(x.tolist(), y.tolist())

    def radius(rows: Tensor, i: int) -> float:
        return sorted(distance(rows[i], rows[j]) for j in range(len(rows)) if j != i)[k - 1]

    real_radii = [radius(real, i) for i in range(len(real))]
    our_radii = [radius(ours, j) for j in range(len(ours))]
    holds = [[distance(x, y) <= r for y in ours] for x, r in zip(real, real_radii, strict=True)]
    held = [[distance(x, y) <= r for y, r in zip(ours, our_radii, strict=True)] for x in real]
    return (
        sum(any(row[j] for row in holds) for j in range(len(ours))) / len(ours),
        sum(any(row) for row in held) / len(real),
        sum(map(sum, holds)) / (k * len(ours)),
        sum(any(row) for row in holds) / len(real),
    )


@pytest.mark.parametrize("rows", [3, 1024])
@pytest.mark.parametrize("shift", [0.0, 1.0, 9.0])
def test_neighbourhoods_follow_their_definitions(
    shift: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ROWS", rows)
    ours, real = normal(0, 20, 2) + shift, normal(1, 31, 2)
    for k in (1, 3):
        assert neighbourhoods(ours, real, k) == pytest.approx(plain_neighbourhoods(ours, real, k))


def test_neighbourhoods_of_points_on_a_line() -> None:
    """Real 0 1 2 and an outlier at 10, k = 1: balls of radius 1, 1, 1 and 8.

    Ours at 9, 9.5 and 9.8 lie in the outlier's ball only: precise, not dense, a quarter covered.
    """
    real = torch.tensor([[0.0], [1.0], [2.0], [10.0]], dtype=torch.float64)
    ours = torch.tensor([[9.0], [9.5], [9.8]], dtype=torch.float64)
    # Our balls: 9 +- 0.5, 9.5 +- 0.3, 9.8 +- 0.3. The real record at 10 lies in the last.
    assert neighbourhoods(ours, real, 1) == (1.0, 0.25, 1.0, 0.25)
    assert neighbourhoods(ours + 100, real, 1) == (0.0, 0.0, 0.0, 0.0)


# Together

PUBLIC = Public(name="blobs", shape=(1, 8, 8), classes=("a", "b", "c"), counts=(100, 100, 100))


def blobs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three classes of 8x8 pictures that a glance tells apart."""
    labels = torch.arange(count) % 3
    images = 0.2 * normal(seed, count, 1, 8, 8).float() - 0.5
    for label in range(3):
        images[labels == label, :, 2 * label : 2 * label + 3] += 1
    return images, labels


def heldout(count: int = 120, seed: int = 0) -> HeldOut:
    return HeldOut(*blobs(count, seed), PUBLIC.classes)


def synthetic(count: int = 30, seed: int = 1) -> SyntheticSet:
    return SyntheticSet(*blobs(count, seed), PUBLIC)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train the feature network for an instant."""
    monkeypatch.setattr(module, "FEATURE_STEPS", 30)


@pytest.mark.usefixtures("quick")
def test_real_looks_more_real_than_noise() -> None:
    good = fidelity(synthetic(), heldout(), engine=CPU)
    noise = SyntheticSet(normal(7, 30, 1, 8, 8).float(), torch.arange(30) % 3, PUBLIC)
    bad = fidelity(noise, heldout(), engine=CPU)
    assert good.synthetic.frechet_distance < 2 * good.real.frechet_distance
    assert bad.synthetic.frechet_distance > 5 * good.synthetic.frechet_distance
    assert bad.synthetic.kernel_distance > good.synthetic.kernel_distance
    assert bad.synthetic.coverage < 0.2 < 0.6 < good.synthetic.coverage
    assert bad.synthetic.nearest[0] > good.synthetic.nearest[1]
    assert good.synthetic.classifier_score is not None
    assert 1 <= good.synthetic.classifier_score <= 3 + 1e-9
    assert good.details["accuracy"] > 0.9
    # Neither the network nor the reference line asks the synthetic set anything.
    assert bad.real == good.real
    assert bad.details == good.details


@pytest.mark.usefixtures("quick")
def test_figures_repeat_whatever_the_chunk() -> None:
    before = torch.get_rng_state()
    first = fidelity(synthetic(), heldout(), engine=CPU)
    again = fidelity(synthetic(), heldout(), engine=Engine(device="cpu", chunk=7))
    for part in ("synthetic", "real"):
        one, other = getattr(first, part), getattr(again, part)
        assert one.frechet_distance == pytest.approx(other.frechet_distance, rel=1e-4)
        assert (one.precision, one.recall) == (other.precision, other.recall)
    assert first == fidelity(synthetic(), heldout(), engine=CPU)
    assert first != fidelity(synthetic(), heldout(), engine=CPU, seed=1)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.usefixtures("quick")
def test_it_is_named_by_its_features() -> None:
    found = fidelity(synthetic(), heldout(), engine=CPU)
    assert (found.kind, found.trained_on, found.compared, found.records) == ("own", 39, 30, 30)
    assert "trained on 39 held-out real records" in found.features
    assert (
        "not Inception" in found.caution
        and found.features in found.caution
        and "real against real" in found.caution
    )
    assert found.titles["frechet_distance"] == "Fréchet distance (not FID)"
    assert not any(title.startswith("Inception") for title in found.titles.values())
    told = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert told["synthetic"]["frechet_distance"] == found.synthetic.frechet_distance
    assert told["real"]["nearest"] == list(found.real.nearest)
    assert told["seed"] == 0 and told["caution"] == found.caution
    assert "30 of 30 synthetic records against 39 real ones" in str(found)


def test_thirds_share_no_record() -> None:
    data = heldout(121)
    deal = torch.Generator().manual_seed(0)
    training, reference, pool = module._deal(data, 3, deal)
    assert sorted(torch.cat([training, reference, pool]).tolist()) == list(range(121))
    sizes = [torch.bincount(data.labels[part]).tolist() for part in (pool, reference, training)]
    assert sizes == [[14, 14, 14], [14, 13, 13], [13, 13, 13]]  # of 41, 40 and 40
    assert len(module._deal(data, 2, deal)[0]) == 0


def test_the_same_number_of_each_class_is_compared() -> None:
    deal = torch.Generator().manual_seed(0)
    pool = torch.tensor([0] * 10 + [1] * 4 + [2] * 9)
    few = torch.tensor([0, 0, 1, 2, 2, 2])
    ours, theirs = module._matched(few, pool, PUBLIC.classes, deal)
    assert sorted(ours.tolist()) == list(range(6))
    assert torch.bincount(pool[theirs]).tolist() == [2, 1, 3]
    # Eight of the second class, four to be had: half of everything.
    many = torch.tensor([0] * 4 + [1] * 8 + [2] * 6)
    ours, theirs = module._matched(many, pool, PUBLIC.classes, deal)
    assert torch.bincount(many[ours]).tolist() == [2, 4, 3]
    assert torch.bincount(pool[theirs]).tolist() == [2, 4, 3]
    assert len(set(ours.tolist())) == len(set(theirs.tolist())) == 9


@pytest.mark.usefixtures("quick")
def test_pictures_are_judged_as_people_see_them() -> None:
    """Beyond [-1, 1] a pixel is cut."""
    made = synthetic()
    cut = SyntheticSet(made.images.clamp(-1, 1), made.labels, PUBLIC)
    loud = SyntheticSet(torch.where(cut.images.abs() == 1, 5 * cut.images, cut.images), made.labels, PUBLIC)  # fmt: skip
    assert not torch.equal(cut.images, loud.images)
    assert fidelity(cut, heldout(), engine=CPU) == fidelity(loud, heldout(), engine=CPU)


def table(count: int, seed: int, width: int = 4) -> tuple[Tensor, Tensor]:
    labels = torch.arange(count) % 2
    records = 0.1 * normal(seed, count, width).float() + labels[:, None] * 0.3
    records[:, -1] = 0.25  # a category nobody has
    return records, labels


def test_tables_are_compared_by_their_standardised_columns() -> None:
    public = Public(name="people", shape=(4,), classes=("no", "yes"), counts=(50, 50))
    made = SyntheticSet(*table(20, 1), public)
    real = HeldOut(*table(90, 0), public.classes)
    found = fidelity(made, real, engine=CPU)
    assert (found.kind, found.trained_on, found.reference) == ("columns", 0, 44)
    assert "columns" in found.features
    assert found.synthetic.classifier_score is None
    assert found.synthetic.coverage > 0.5
    # Units do not matter: a column measured in other ones gives the same figures.
    scale = torch.tensor([0.5, 0.01, 1.0, 1.0])
    other = fidelity(
        SyntheticSet(made.images * scale, made.labels, public),
        HeldOut(real.images * scale, real.labels, public.classes),
        engine=CPU,
    )
    assert other.synthetic.frechet_distance == pytest.approx(
        found.synthetic.frechet_distance, rel=1e-4
    )
    assert other.synthetic.nearest == pytest.approx(found.synthetic.nearest, rel=1e-4)


def test_small_pictures_are_compared_by_their_pixels() -> None:
    public = Public(name="tiny", shape=(1, 4, 4), classes=("a", "b"), counts=(50, 50))
    made = SyntheticSet(0.1 * normal(0, 20, 1, 4, 4).float(), torch.arange(20) % 2, public)
    real = HeldOut(0.1 * normal(1, 80, 1, 4, 4).float(), torch.arange(80) % 2, public.classes)
    assert fidelity(made, real, engine=CPU).kind == "columns"


# Inception


class Lookalike(nn.Module):
    """Take what NVIDIA's Inception takes; say of a picture what is easy to work out by hand."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.features, self.classes = features, classes

    def forward(
        self,
        img: Tensor,
        return_features: bool = False,
        use_fp16: bool = False,
        no_output_bias: bool = False,
    ) -> Tensor:
        assert img.dtype == torch.uint8 and img.shape[1] == 3
        x = img.to(torch.float32)
        assert bool((x[:, 0] == x[:, 2]).all())
        x = x.flatten(1)
        if return_features:
            return x[:, : self.features]
        chances = torch.zeros(x.shape[0], self.classes)
        chances[:, 0] = 1.0
        return chances


@pytest.fixture
def script(tmp_path: Path) -> Callable[[int, int], Path]:
    def write(features: int, classes: int) -> Path:
        path = tmp_path / "inception.pt"
        torch.jit.script(Lookalike(features, classes)).save(str(path))
        return path

    return write


def test_inception_is_named_when_its_file_is_given(
    script: Callable[[int, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INCEPTION_FEATURES", 6)
    monkeypatch.setattr(module, "INCEPTION_CLASSES", 4)
    found = fidelity(synthetic(), heldout(), features=script(6, 4), engine=CPU)
    assert (found.kind, found.trained_on, found.reference) == ("inception", 0, 60)
    assert found.titles["frechet_distance"] == "Inception FID"
    assert "Inception FID" in str(found)
    assert len(found.details["weights_sha256"]) == 64
    assert found.synthetic.classifier_score == pytest.approx(1)
    # The features are the first six bytes of each picture.
    grey = module._inception(script(6, 4), CPU).of(torch.tensor([[-1.0, 0.0, 1.0] * 3] * 2).view(2, 1, 3, 3))  # fmt: skip
    assert grey[0].tolist() == [[0, 128, 255, 0, 128, 255]] * 2


def test_another_network_is_not_taken_for_inception(
    script: Callable[[int, int], Path], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="2048 features and 1008 probabilities"):
        fidelity(synthetic(), heldout(), features=script(6, 4), engine=CPU)
    other = tmp_path / "other.pt"
    torch.jit.script(nn.Flatten()).save(str(other))
    with pytest.raises(DataError, match="interface of inception-2015-12-05"):
        fidelity(synthetic(), heldout(), features=str(other), engine=CPU)
    other.write_bytes(b"no network")
    with pytest.raises(DataError, match="not a TorchScript file"):
        fidelity(synthetic(), heldout(), features=other, engine=CPU)


def test_refusals_help(tmp_path: Path) -> None:
    def run(made: SyntheticSet | None = None, real: HeldOut | None = None, **how: str) -> Fidelity:
        return fidelity(made or synthetic(), real or heldout(), engine=CPU, **how)  # type: ignore[arg-type]

    with pytest.raises(DataError, match="3 synthetic and 39 real records"):
        run(synthetic(3))
    with pytest.raises(DataError, match="more held-out records than 12"):
        run(real=heldout(12))
    with pytest.raises(DataError, match="no records of class 'c'"):
        images, labels = blobs(90, 0)
        run(real=HeldOut(images[labels < 2], labels[labels < 2], PUBLIC.classes))
    with pytest.raises(BadConfiguration, match=r"shape \(1, 8, 7\)"):
        run(real=HeldOut(heldout().images[..., :7], heldout().labels, PUBLIC.classes))
    with pytest.raises(BadConfiguration, match="classes"):
        run(real=HeldOut(*blobs(90, 0), ("x", "y", "z")))
    with pytest.raises(BadConfiguration, match="not finite"):
        run(SyntheticSet(synthetic().images / 0, synthetic().labels, PUBLIC))
    with pytest.raises(BadConfiguration, match="no file 'incption.pt'"):
        run(features="incption.pt")
    with pytest.raises(BadConfiguration, match="grey or colour"):
        public = Public(name="people", shape=(4,), classes=("no", "yes"), counts=(50, 50))
        (tmp_path / "some.pt").touch()
        fidelity(
            SyntheticSet(*table(20, 1), public),
            HeldOut(*table(90, 0), public.classes),
            features=tmp_path / "some.pt",
        )
