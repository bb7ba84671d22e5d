from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import vmap

import understudy.privacy.gate as gate_module
from tests.fixtures import gate_for, private
from understudy.engine import Engine
from understudy.errors import BadConfiguration, DataError, ReleaseError
from understudy.methods import NDPDC, Dosser, Method, WholeSet
from understudy.methods.matching import (
    PUBLIC_IMAGES,
    Auxiliary,
    Extractor,
    Optimisation,
    measure_signals,
    optimise,
    public_seed,
)
from understudy.nets.convnet import random_convnet
from understudy.ops.augment import AugmentParams
from understudy.ops.match import matching_loss
from understudy.ops.subspace import project
from understudy.privacy import Ledger, Plan, PrivateDataset, Public, Query, Secret
from understudy.privacy.events import Step
from understudy.run import fit, synthesise

CPU = Engine(device="cpu", chunk=16)
PUBLIC = Public(name="few", shape=(1, 8, 8), classes=("a", "b", "c"), counts=(14, 13, 13))
STRATEGY = "color_crop_cutout_scale_rotate"


def few(hostile: bool = False) -> PrivateDataset:
    random = np.random.default_rng(5)
    labels = np.arange(40) % 3
    images = random.uniform(-1, 1, (40, 1, 8, 8)).astype(np.float32)
    if hostile:
        images[0], images[1], images[2, 0, 0, 0] = 1e30, -3e38, np.nan
    return private(images, labels, name="few")


def auxiliary(count: int = 30) -> torch.Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1


def extractor(**changes: Any) -> Extractor:
    values: dict[str, Any] = {"public": PUBLIC, "seed": 3, "kind": "convnet", "width": 6}
    return Extractor(**{**values, **changes})


LOOKS: dict[str, dict[str, Any]] = {
    "convnet": {},
    "augmented": {"augmentation": STRATEGY},
    "subspace": {"augmentation": STRATEGY, "subspace": 4, "auxiliary": auxiliary()},
    "linear": {"kind": "linear"},
    "pixels": {"kind": "pixels", "augmentation": STRATEGY},
    "frequencies": {"kind": "pixels", "subspace": 9},
    "gradients": {"kind": "gradients", "augmentation": STRATEGY},
    "gradients in a subspace": {"kind": "gradients", "subspace": 4, "auxiliary": auxiliary()},
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_one_records_contribution_is_its_row_of_the_batch(look: dict[str, Any]) -> None:
    torch.manual_seed(0)
    images, labels = torch.rand(9, 1, 8, 8) * 2 - 1, torch.arange(9) // 3
    maker = extractor(**look)
    for i in range(3):
        signal = maker.signal(i)
        batch = signal.features(images, signal.draws_of(labels), labels)
        assert batch.shape == (9, maker.features)
        contribution = functools.partial(maker.contribution, maker.state(i))
        rows = vmap(contribution, randomness="error")(images, labels)
        torch.testing.assert_close(rows, batch, atol=1e-5, rtol=1e-4)
        alone = contribution(images[4], labels[4])
        torch.testing.assert_close(alone, batch[4], atol=1e-5, rtol=1e-4)
        if maker.kind != "gradients" and not maker.subspace:
            assert batch.norm(dim=1).max() <= maker.largest_norm


def test_signals_come_from_numbers_alone_and_differ() -> None:
    images = torch.rand(4, 1, 8, 8)
    first, again, other = (extractor(seed=s).signal(2).embed(images) for s in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert not torch.allclose(first, extractor().signal(1).embed(images))
    net = random_convnet(public_seed(3, "network", 2), (1, 8, 8), 3, width=6)
    assert torch.equal(first, net.embed(images))
    # Seeds of neighbouring signals and methods must not meet: seed + i would.
    places = {public_seed(seed, "network", i) for seed in range(30) for i in range(30)}
    assert len(places) == 900


def test_no_feature_vector_exceeds_the_bound_of_an_unclipped_query() -> None:
    for look in ({}, {"depth": 3}, {"kind": "linear"}, {"kind": "pixels"}):
        maker = extractor(**look)
        wild = torch.cat([torch.randn(20, 1, 8, 8).sign(), torch.randn(20, 1, 8, 8).clamp(-1, 1)])
        assert max(maker.signal(i).embed(wild).norm(dim=1).max() for i in range(5)) <= (
            maker.largest_norm
        )


def test_the_gate_clips_after_the_projection() -> None:
    """Every record's vector, hostile ones included, moves a projected sum by at most K."""
    maker, norm = extractor(**LOOKS["subspace"]), 0.05
    for record in range(8):
        keep = np.array([record])
        whole = few(hostile=True)
        one = private(
            whole._records._images[keep],
            whole._records._labels[keep],
            classes=3,
            counts=(1, 1, 1),
        )
        query = Query(name="q", bound=norm, noise_multiplier=0.0, per_class=True)
        with gate_for(one, Plan(Step(query, times=1))) as gate:
            value = gate.noisy_sum(query, maker.contribution, maker.state(0)).value
        assert value.shape == (3, 4)
        assert float(value.norm()) <= norm * (1 + 1e-6)
        image, label = torch.from_numpy(one._records._images[0]), torch.tensor(record % 3)
        raw = maker.contribution(maker.state(0), image, label).norm()
        if record > 2:
            assert raw > norm  # so it is the clip that bounded it
            assert float(value.norm()) >= norm * 0.999


def test_measured_sums_are_the_sums_of_clipped_features() -> None:
    data, maker = few(), extractor(augmentation=STRATEGY)
    query = Query(name="q", bound=1.0, noise_multiplier=0.0, per_class=True)
    with gate_for(data, Plan(Step(query, times=3)), chunk=7) as gate:
        sums = measure_signals(gate, query, maker, 3)
    images = torch.from_numpy(np.array(data._records._images))
    labels = torch.from_numpy(data._records._labels)
    for i in range(3):
        signal = maker.signal(i)
        assert signal.draws is not None
        rows = signal.features(images, AugmentParams(*(part[labels] for part in signal.draws)))
        rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(1)
        expected = torch.stack([rows[labels == c].sum(0) for c in range(3)])
        torch.testing.assert_close(sums[i], expected, atol=1e-4, rtol=1e-4)


def test_a_gradient_signal_is_the_gradient_of_one_records_loss() -> None:
    """Restate it: a random classifier, plain autograd, the weights but not the biases."""
    maker, images, labels = extractor(kind="gradients"), auxiliary(4), torch.tensor([2, 0, 1, 1])
    net = random_convnet(public_seed(3, "network", 1), (1, 8, 8), 3, width=6)
    weights = [value for value in net.parameters() if value.dim() > 1]
    assert maker.features == sum(value.numel() for value in weights)
    rows = maker.signal(1).embed(images, labels)
    for j in range(4):
        loss = torch.nn.functional.cross_entropy(net(images[j : j + 1]), labels[j : j + 1])
        expected = torch.cat([part.flatten() for part in torch.autograd.grad(loss, weights)])
        torch.testing.assert_close(rows[j], expected, atol=1e-6, rtol=1e-4)
    with pytest.raises(BadConfiguration, match="label"):
        maker.signal(1).embed(images)
    with pytest.raises(BadConfiguration, match="clip_norm"):
        _ = maker.largest_norm


def test_gradients_in_a_subspace_take_auxiliary_image_j_for_class_j_mod_classes() -> None:
    maker = extractor(kind="gradients", subspace=4, auxiliary=auxiliary(), width=4)
    signal = maker.signal(0)
    assert signal.subspace is not None
    rows = signal.embed(auxiliary(), torch.arange(30) % 3)
    torch.testing.assert_close(signal.subspace.mean, rows.mean(0), atol=1e-6, rtol=1e-4)
    exact = torch.linalg.svd((rows - rows.mean(0)).double(), full_matrices=False).Vh[0]
    assert abs(float(exact @ signal.subspace.components[:, 0].double())) > 0.999


def test_tables_have_gradients_too() -> None:
    public = dataclasses.replace(PUBLIC, shape=(14,))
    maker = extractor(kind="gradients", public=public)
    assert maker.features == 14 * 128 + 128 * 128 + 128 * 3
    assert (
        maker.signal(0).embed(torch.zeros(2, 14), torch.tensor([0, 2])).shape[1] == maker.features
    )


@pytest.mark.parametrize("each", [(2, 2, 2), (3, 1, 2)])
@pytest.mark.parametrize("kind", ["convnet", "gradients"])
@pytest.mark.parametrize("expanded", [False, True])
def test_optimising_is_the_papers_loop(
    expanded: bool, kind: Any, each: tuple[int, int, int]
) -> None:
    """Restate it plainly: a loop over classes, torch.optim.SGD, one image's draw at a time."""
    maker = extractor(augmentation=STRATEGY, kind=kind)
    targets = torch.randn(4, 3, maker.features, generator=torch.Generator().manual_seed(2))
    how = Optimisation(steps=4, learning_rate=0.5, expand=expanded)
    stored = 2 if each == (2, 2, 2) else each
    done = optimise(targets, maker, how, images_per_class=stored, weight=10.0, clip_norm=1.0)

    generator = torch.Generator().manual_seed(public_seed(3, "start"))
    images = torch.randn(6, 1, 8, 8, generator=generator).requires_grad_()
    sgd = torch.optim.SGD([images], lr=0.5, momentum=0.5)
    up = torch.nn.Upsample(scale_factor=2, mode="bilinear")
    for i in range(4):
        signal, loss = maker.signal(i), torch.zeros(())
        assert signal.draws is not None
        for c in range(3):
            own, total = images.split(each)[c], torch.zeros(maker.features)
            if expanded:
                halves = [half for row in own.split(4, 2) for half in row.split(4, 3)]
                own = up(torch.cat(halves))
            draw = AugmentParams(*(part[c : c + 1] for part in signal.draws))
            for j in range(len(own)):
                row = signal.features(own[j : j + 1], draw, torch.tensor([c]))[0]
                total = total + row * min(1.0, 1 / float(row.detach().norm()))
            loss = loss + (10.0 / len(own) * total - targets[i, c]).square().sum()
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    final = images.detach()
    if expanded:
        assert len(done) == 24
        assert done.per_class == [4 * count for count in each]
        torch.testing.assert_close(done.images[:1], up(final[:1, :, :4, :4]), atol=1e-3, rtol=1e-3)
    else:
        assert done.per_class == list(each)
        torch.testing.assert_close(done.images, final, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("sizes", "each", "expected"),
    [
        ((24720, 7841), 50, (76, 24)),  # Adult
        ((10, 10, 10), 5, (5, 5, 5)),
        ((1, 1, 1), 1, (1, 1, 1)),
        ((1000, 1, 1), 2, (4, 1, 1)),  # nobody is left out
        ((5, 3, 2), 4, (6, 4, 2)),  # 6.0, 3.6, 2.4
    ],
)
def test_declared_shares_follow_the_class_sizes(
    sizes: tuple[int, ...], each: int, expected: tuple[int, ...]
) -> None:
    classes = tuple(map(str, range(len(sizes))))
    public = dataclasses.replace(PUBLIC, classes=classes, counts=sizes)
    declared = NDPDC(images_per_class=each, class_shares="declared")
    assert declared.counts(public) == expected
    assert sum(expected) == each * len(sizes)
    assert NDPDC(images_per_class=each).counts(public) == (each,) * len(sizes)


def test_a_set_in_declared_shares_comes_from_any_release(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).uniform(-1, 1, (40, 5)).astype(np.float32)
    labels = (np.arange(40) % 4 == 0).astype(np.int64)
    method = NDPDC.configured({"iterations": 4, "group_size": 5.0, "images_per_class": 4})
    release = fit(private(rows, labels), method, ledger=Ledger(tmp_path / "l"), engine=CPU)
    assert synthesise(release, engine=CPU).per_class == [4, 4]
    shares = dataclasses.replace(method, class_shares="declared")
    made = synthesise(release, shares, engine=CPU)
    assert made.per_class == [6, 2]
    assert made.labels.tolist() == [0] * 6 + [1] * 2


def test_noise_is_drawn_once_a_signal_and_never_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    real = gate_module.grid_noise

    def counted(*args: Any) -> Any:
        drawn.append(1)
        return real(*args)

    monkeypatch.setattr(gate_module, "grid_noise", counted)
    method = Dosser.configured({**Dosser.miniature, "optimisation_iterations": 30})
    release = fit(few(), method, ledger=Ledger(tmp_path / "l"), engine=CPU, secret=Secret())
    assert len(drawn) == 4
    kept = release.signals["sums"].clone()
    seen: list[torch.Tensor] = []

    def remember(features: torch.Tensor, target: torch.Tensor, scale: float) -> torch.Tensor:
        seen.append(target.clone())
        return matching_loss(features, target, scale)

    monkeypatch.setattr("understudy.methods.optimisation.matching_loss", remember)
    first = synthesise(release, engine=CPU)
    second = synthesise(release, engine=CPU)
    assert len(drawn) == 4
    assert torch.equal(kept, release.signals["sums"])
    assert torch.equal(first.images, second.images)
    assert all(any(torch.equal(target, row) for row in kept) for target in seen)
    assert len(seen) == 60


def stopped_at(step: int) -> Any:
    def watch(done: int, synthetic: Any) -> None:
        if done == step:
            raise KeyboardInterrupt

    return watch


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_resumed_optimisation_ends_where_an_uninterrupted_one_does(
    stop: int, tmp_path: Path
) -> None:
    maker, file = extractor(augmentation=STRATEGY), tmp_path / "optimisation.safetensors"
    targets = torch.randn(3, 3, maker.features, generator=torch.Generator().manual_seed(2))
    how = Optimisation(steps=9, cosine=True, average=0.9, order="random", expand=True)
    same: dict[str, Any] = {"images_per_class": 2, "weight": 10.0, "clip_norm": 1.0, "every": 1}
    whole = optimise(targets, maker, how, **same)
    with pytest.raises(KeyboardInterrupt):
        optimise(targets, maker, how, **same, checkpoint=file, watch=stopped_at(stop))
    steps: list[int] = []
    resumed = optimise(
        targets, maker, how, **same, checkpoint=file, watch=lambda done, _: steps.append(done)
    )
    assert steps == list(range(stop + 1, 10))
    assert torch.equal(whole.images, resumed.images)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    with pytest.raises(ReleaseError, match="another optimisation"):
        optimise(targets + 1, maker, how, **same, checkpoint=file)
    file.write_bytes(b"half")
    with pytest.raises(ReleaseError, match="not a whole checkpoint"):
        optimise(targets, maker, how, **same, checkpoint=file)


def test_progress_tells_the_loss_and_the_watcher_sees_the_set() -> None:
    maker = extractor()
    told: list[tuple[int, int, str]] = []
    sheets: list[torch.Size] = []
    optimise(
        torch.zeros(2, 3, maker.features),
        maker,
        Optimisation(steps=4),
        images_per_class=1,
        weight=1.0,
        clip_norm=None,
        progress=lambda *news: told.append(news),
        every=2,
        watch=lambda done, synthetic: sheets.append(synthetic.images.shape),
    )
    assert [news[:2] for news in told] == [(k, 4) for k in (1, 2, 3, 4)]
    assert all("matching loss" in news[2] for news in told)
    assert sheets == [(3, 1, 8, 8)] * 2


def test_auxiliary_images_are_named_by_their_hash(tmp_path: Path) -> None:
    images, file = auxiliary(), tmp_path / "images.npy"
    np.save(file, images.numpy())
    of_tensor = Dosser(subspace=4, auxiliary=images)  # type: ignore[arg-type]
    of_file = Dosser(subspace=4, auxiliary=file)  # type: ignore[arg-type]
    assert of_tensor == of_file
    recipe = json.loads(json.dumps(of_file.recipe()))
    assert len(recipe["configuration"]["auxiliary"]["sha256"]) == 64
    again = Dosser.configured(recipe["configuration"])
    assert again == of_file
    assert again.auxiliary is not None
    assert torch.equal(again.auxiliary.images(PUBLIC), images)
    np.save(file, images.numpy()[::-1])
    with pytest.raises(DataError, match="Give the same images"):
        again.auxiliary.images(PUBLIC)
    file.unlink()
    with pytest.raises(DataError, match="Give the same images"):
        again.auxiliary.images(PUBLIC)
    with pytest.raises(DataError, match="No auxiliary images in"):
        Auxiliary.of(file)
    with pytest.raises(BadConfiguration, match="shape"):
        Auxiliary.of(torch.zeros(3, 1, 9, 9)).images(PUBLIC)
    uint8 = ((images + 1) * 127.5).round().to(torch.uint8)
    assert Auxiliary.of(uint8).images(PUBLIC).abs().max() <= 1


def test_a_statement_assumes_that_given_images_are_public_and_no_more(tmp_path: Path) -> None:
    for turn, (source, told) in enumerate(
        ((None, False), (Auxiliary.FIELDS, False), (auxiliary(), True))
    ):
        subspace = None if source is None else 4
        values = {**NDPDC.miniature, "auxiliary": source, "subspace": subspace}
        release = fit(
            few(), NDPDC.configured(values), ledger=Ledger(tmp_path / str(turn)), engine=CPU
        )
        assert (PUBLIC_IMAGES in release.statement.assumptions) is told


def test_signals_are_not_read_with_another_configuration(tmp_path: Path) -> None:
    method = NDPDC.configured(NDPDC.miniature)
    release = fit(few(), method, ledger=Ledger(tmp_path / "l"), engine=CPU)
    for changes in ({"width": 5}, {"seed": 1}, {"augmentation": ""}, {"group_size": 2.0}):
        with pytest.raises(BadConfiguration, match=r"features|measured with"):
            synthesise(release, dataclasses.replace(method, **changes), engine=CPU)
    more = synthesise(release, dataclasses.replace(method, images_per_class=3), engine=CPU)
    assert more.per_class == [3, 3, 3]


@pytest.mark.parametrize(
    "changes",
    [
        {"images_per_class": 0},
        {"clip_norm": 0.0},
        {"clip_norm": float("inf")},
        {"width": 0},
        {"learning_rate": 0.0},
        {"momentum": 1.0},
        {"features": "vgg"},
        {"class_shares": "private"},
        {"subspace": 0, "features": "pixels"},
        {"subspace": 5},
    ],
)
@pytest.mark.parametrize("kind", [NDPDC, WholeSet])
def test_senseless_configurations_are_refused(kind: type[Method], changes: dict[str, Any]) -> None:
    with pytest.raises(BadConfiguration):
        kind.configured(changes)


def test_projection_uses_the_mean_and_directions_of_the_auxiliary_images() -> None:
    maker = extractor(**LOOKS["subspace"])
    signal = maker.signal(0)
    assert signal.subspace is not None
    features = signal.embed(auxiliary())
    torch.testing.assert_close(
        project(features, signal.subspace).mean(0), torch.zeros(4), atol=1e-4, rtol=0
    )
    assert maker.marks(9).shape == (3, 4)
