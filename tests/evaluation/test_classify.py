from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from understudy.errors import BadConfiguration, UnknownName
from understudy.evaluation.classify import (
    DM,
    PROTOCOLS,
    PSG,
    QUICK,
    Protocol,
    Scores,
    _train,
    sklearn_scores,
    train_and_test,
)
from understudy.nets import ConvNet, build
from understudy.nets.draw import materialise

TINY = Protocol(
    name="tiny",
    epochs=4,
    lr=0.05,
    momentum=0.9,
    weight_decay=5e-3,
    batch=7,
    lr_drop=2,
    augmentation="color_crop_cutout_scale_rotate",
)


def blobs(n: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Three classes of 8x8 pictures that a glance tells apart."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 3
    images = 0.3 * torch.randn(n, 1, 8, 8, generator=generator, dtype=dtype)
    for label in range(3):
        images[labels == label, :, 2 * label : 2 * label + 3] += 2
    return images, labels


def small(seed: int) -> nn.Module:
    with torch.device("meta"):
        net = ConvNet((1, 8, 8), 3, width=6)
    return materialise(net, seed, "cpu")


def test_dm_schedule_is_the_published_loop() -> None:
    """Loop over 0..1000; after epoch 501 a tenth of the rate and a fresh optimiser."""
    rate, rates = 0.01, []
    for epoch in range(1000 + 1):
        rates.append(rate)
        if epoch == 1000 // 2 + 1:
            rate *= 0.1
    assert [DM.rate(epoch) for epoch in range(DM.epochs)] == rates
    assert (DM.momentum, DM.weight_decay, DM.batch) == (0.9, 5e-4, 256)
    assert (PSG.epochs, PSG.lr_drop, PSG.augmentation) == (301, 152, "")


def test_protocols_know_their_names_and_never_flip_unasked() -> None:
    assert set(PROTOCOLS) == {"dm", "psg", "datalens", "quick"}
    for name, protocol in PROTOCOLS.items():
        assert protocol.name == name
        assert "flip" not in protocol.augmentation
    assert DM.with_flips().augmentation == "color_crop_cutout_scale_rotate_flip"
    assert DM.with_flips().with_flips() == DM.with_flips()
    assert PSG.with_flips() == PSG
    assert DM.but(epochs=3).name == "dm (epochs=3)"


@pytest.mark.parametrize(
    "wrong", [{"epochs": 0}, {"lr": 0.0}, {"momentum": 1.0}, {"weight_decay": -1.0}]
)
def test_senseless_protocols_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadConfiguration, match="quick"):
        replace(QUICK, **wrong)
    with pytest.raises(UnknownName, match="cutout"):
        replace(QUICK, augmentation="cutut")


def test_training_is_torchs_sgd() -> None:
    images, labels = blobs(20, 0, torch.float64)
    protocol = replace(TINY, augmentation="")
    ours = _train([small(3).double()], [3], images, labels, protocol, lambda *_: None)[0]
    net, stream = small(3).double(), torch.Generator().manual_seed(3)
    for epoch in range(4):
        if epoch in (0, 2):
            optimiser = torch.optim.SGD(
                net.parameters(), lr=0.05 if epoch == 0 else 0.005, momentum=0.9, weight_decay=5e-3
            )
        for batch in torch.randperm(20, generator=stream).split(7):
            optimiser.zero_grad()
            F.cross_entropy(net(images[batch]), labels[batch]).backward()
            optimiser.step()
    torch.testing.assert_close(ours, nn.utils.parameters_to_vector(net.parameters()).detach())


@pytest.mark.parametrize("one_family", [True, False])
def test_a_stack_trains_as_each_alone(one_family: bool) -> None:
    images, labels = blobs(20, 0, torch.float64)
    protocol = replace(TINY, one_family=one_family)
    seeds = [1, 2, 3]

    def nets() -> list[nn.Module]:
        return [small(seed).double() for seed in seeds]

    stacked = _train(nets(), seeds, images, labels, protocol, lambda *_: None)
    for row, seed, net in zip(stacked, seeds, nets(), strict=True):
        alone = _train([net], [seed], images, labels, protocol, lambda *_: None)[0]
        torch.testing.assert_close(row, alone)
    assert not torch.allclose(stacked[0], stacked[1])


def test_side_by_side_gives_the_same_scores() -> None:
    images, labels = blobs(20, 0, torch.float64)
    test_images, test_labels = blobs(31, 1, torch.float64)
    scores = [
        train_and_test(
            images,
            labels,
            test_images,
            test_labels,
            classes=3,
            protocol=TINY,
            network=small,
            seeds=(0, 1, 2),
            side_by_side=width,
        )
        for width in (1, 2, 3)
    ]
    assert scores[0] == scores[1] == scores[2]


def test_pieces_of_a_batch_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = blobs(20, 0, torch.float64)
    whole = _train([small(0).double()], [0], images, labels, TINY, lambda *_: None)
    monkeypatch.setattr("understudy.ops.pieces.PIXELS", 2 * 64)
    pieces = _train([small(0).double()], [0], images, labels, TINY, lambda *_: None)
    torch.testing.assert_close(whole, pieces)


def test_training_is_repeatable_and_leaves_the_global_generator_alone() -> None:
    images, labels = blobs(20, 0)
    before, copy = torch.get_rng_state(), images.clone()
    one, same = (
        train_and_test(
            images, labels, *blobs(9, 1), classes=3, protocol=TINY, network="datalens", seeds=(4, 5)
        )
        for _ in range(2)
    )
    assert one == same
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(images, copy)


def test_progress_hears_every_epoch() -> None:
    heard: list[tuple[int, int]] = []
    train_and_test(
        *blobs(9, 0),
        *blobs(9, 1),
        classes=3,
        protocol=TINY,
        network="mlp",
        seeds=(0, 1),
        progress=lambda done, total, text: heard.append((done, total)),
    )
    assert heard == [(done, 8) for done in range(1, 9)]


def test_tables_are_trained_without_augmentation() -> None:
    images, labels = blobs(60, 0)
    test_images, test_labels = blobs(30, 1)
    scores = train_and_test(
        images.flatten(1),
        labels,
        test_images.flatten(1),
        test_labels,
        classes=3,
        protocol="quick",
        network="mlp",
    )
    assert scores.accuracy == 1
    assert scores.settings["augmentation"] == ""


def test_a_network_with_batch_norm_can_be_brought_along() -> None:
    def own(seed: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    scores = train_and_test(
        *blobs(21, 0), *blobs(9, 1), classes=3, protocol=TINY, network=own, seeds=(0, 1)
    )
    assert scores.network == "own"
    assert scores.tested == 9


def test_scores_follow_from_the_confusion_matrices() -> None:
    scores = Scores(
        protocol="p",
        network="n",
        seeds=(0, 1),
        confusions=(((6, 2, 0), (1, 1, 0), (0, 0, 0)), ((8, 0, 0), (2, 0, 0), (0, 0, 0))),
        settings={},
    )
    assert scores.accuracies == (0.7, 0.8)
    assert scores.accuracy == pytest.approx(0.75)
    # t quantile 12.706 with one degree of freedom, standard error 0.05; no accuracy is above one.
    assert scores.interval == pytest.approx((0.75 - 0.6353, 1.0), abs=1e-4)
    assert scores.confusion == ((14, 2, 0), (3, 1, 0), (0, 0, 0))
    assert scores.per_class == (0.875, 0.25, None)
    assert scores.balanced_accuracy == pytest.approx(0.5625)
    assert scores.chance == 0.8
    told = json.loads(json.dumps(scores.to_json(), allow_nan=False))
    assert told["accuracies"] == [0.7, 0.8]
    assert told["per_class"][2] is None
    assert "2 seeds" in str(scores)


def test_one_seed_has_no_interval() -> None:
    scores = train_and_test(*blobs(9, 0), *blobs(9, 1), classes=3, protocol=TINY, network="mlp")
    assert scores.interval is None
    assert scores.to_json()["interval_95"] is None
    assert "one seed" in str(scores)


def test_refusals_help() -> None:
    images, labels = blobs(9, 0)

    def run(
        images: Tensor = images,
        labels: Tensor = labels,
        classes: int = 3,
        protocol: str | Protocol = TINY,
        seeds: tuple[int, ...] = (0,),
    ) -> Scores:
        return train_and_test(
            images, labels, *blobs(9, 1), classes=classes, protocol=protocol, seeds=seeds
        )

    with pytest.raises(UnknownName, match="Did you mean 'quick'"):
        run(protocol="quik")
    with pytest.raises(ValueError, match="floating point"):
        run(images=images.byte())
    with pytest.raises(ValueError, match="0 to 1"):
        run(classes=2)
    with pytest.raises(ValueError, match="9 integers"):
        run(labels=labels[:5])
    with pytest.raises(ValueError, match="not finite"):
        run(images=images / 0)
    with pytest.raises(ValueError, match="have shape"):
        run(images=images[..., :7])
    with pytest.raises(ValueError, match="empty"):
        run(images=images[:0], labels=labels[:0])
    with pytest.raises(BadConfiguration, match="seed"):
        run(seeds=())


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    datasets = pytest.importorskip("sklearn.datasets")
    data = datasets.load_digits()
    images = torch.as_tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.as_tensor(data.target)
    return images[:500], labels[:500], images[500:], labels[500:]


def test_digits_are_learnt() -> None:
    scores = train_and_test(*digits(), classes=10, protocol="quick")
    assert scores.accuracy > 0.9
    assert scores.balanced_accuracy > 0.9
    assert scores.chance < 0.11


def test_scikit_learn_learns_digits() -> None:
    heard: list[int] = []
    scores = sklearn_scores(
        *digits(), classes=10, seeds=(0,), progress=lambda done, total, text: heard.append(done)
    )
    assert heard == [1, 2, 3]
    assert all(score.accuracy > 0.75 for score in scores.values())
    assert scores["forest"].accuracy > 0.85


def test_scikit_learn_bears_a_single_class() -> None:
    images, labels = (
        build("mlp", (4,), 2, seed=0)[1].weight[:6, :4].detach(),
        torch.zeros(6).long(),
    )
    scores = sklearn_scores(images, labels, images, labels, classes=2, models=("logistic",))
    assert scores["logistic"].accuracy == 1
    with pytest.raises(UnknownName, match="Did you mean 'forest'"):
        sklearn_scores(images, labels, images, labels, classes=2, models=("forst",))
