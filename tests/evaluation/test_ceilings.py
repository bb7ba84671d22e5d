"""Ceilings: what each reference is made of, their order, and what they leave behind."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.fixtures import private
from understudy.data.datasets import load_heldout, open_training
from understudy.data.heldout import HeldOut
from understudy.data.synthetic import SyntheticSet
from understudy.engine import Engine
from understudy.errors import BadConfiguration, DataError, UnknownName
from understudy.evaluation import ceilings as module
from understudy.evaluation.ceilings import CEILINGS, ceilings
from understudy.evaluation.classify import DM as DM_PROTOCOL
from understudy.evaluation.classify import QUICK, Scores, train_and_test
from understudy.methods.base import Trainer
from understudy.methods.dm import DM
from understudy.methods.topagg import DPSGD
from understudy.privacy.accounting import Budget
from understudy.privacy.events import Plan, Query, Step
from understudy.privacy.gate import Gate
from understudy.privacy.ledger import Ledger
from understudy.privacy.public import Public
from understudy.privacy.release import Release
from understudy.run import evaluate, fit, synthesise

CPU = Engine(device="cpu")
FAST = replace(QUICK, name="fast", epochs=12, lr_drop=8, augmentation="")
DIGITS = Public(
    name="digits", shape=(1, 8, 8), classes=tuple("0123456789"), counts=None, labels="public"
)


@pytest.fixture(scope="module")
def real() -> HeldOut:
    return open_training("digits", like=DIGITS)


@pytest.fixture(scope="module")
def heldout() -> HeldOut:
    return load_heldout("digits", like=DIGITS)


def like(per_class: int = 2, public: Public = DIGITS) -> SyntheticSet:
    labels = torch.arange(len(public.classes)).repeat_interleave(per_class)
    return SyntheticSet(torch.zeros(len(labels), *public.shape), labels, public)


def run(real: HeldOut, heldout: HeldOut, *which: str, **how: Any) -> dict[str, Scores]:
    given = {"like": like(), "protocol": FAST, "network": "mlp", "seeds": (0, 1), "engine": CPU}
    return ceilings(real, heldout, which=which, **{**given, **how})


@dataclass(frozen=True, kw_only=True)
class NearestMean(Trainer):
    """Answer the class whose noisy mean is nearest. Guarantee: one Gaussian."""

    name: ClassVar[str] = "nearest-mean"
    title: ClassVar[str] = "noisy class means"
    source: ClassVar[str] = "a test"

    def query(self, public: Public) -> Query:
        return Query(
            name="class sums",
            bound=math.sqrt(public.dimension),
            noise_multiplier=self.noise_multiplier,
            per_class=True,
        )

    def plan(self, public: Public) -> Plan:
        return Plan(Step(self.query(public), times=1))

    def measure(self, gate: Gate) -> Release:
        sums = gate.noisy_sum(self.query(gate.public), lambda image, label: image).value
        return gate.release(signals={"sums": sums}, recipe=self.recipe())

    def classifier(self, release: Release, *, engine: Engine | None = None) -> nn.Module:
        sizes = torch.tensor(release.public.sizes).view(-1, 1)
        means = release.signals["sums"].flatten(1) / sizes
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, len(sizes)))
        with torch.no_grad():
            net[1].weight.copy_(2 * means)
            net[1].bias.copy_(-means.square().sum(1))
        return net.eval()


def test_the_order_on_digits(real: HeldOut, heldout: HeldOut) -> None:
    """Twenty real records < all of them; private training lies below training in the open."""
    found = run(
        real,
        heldout,
        "random-real",
        "dp-sgd",
        "all-real",
        epsilon=1.0,
        trainer=NearestMean(noise_multiplier=1.0),
    )
    assert list(found) == ["random-real", "dp-sgd", "all-real"]
    accuracies = {name: scores.accuracy for name, scores in found.items()}
    assert 0.2 < accuracies["random-real"] < accuracies["all-real"] - 0.1
    assert accuracies["all-real"] > 0.9
    assert accuracies["dp-sgd"] < accuracies["all-real"]
    for name, scores in found.items():
        assert scores.seeds == (0, 1) and scores.tested == len(heldout)
        assert isinstance(json.loads(json.dumps(scores.to_json()))["settings"]["ceiling"], str), (
            name
        )


def test_random_real_is_training_on_a_draw_for_each_seed(real: HeldOut, heldout: HeldOut) -> None:
    made = like()
    found = run(real, heldout, "random-real", like=made)["random-real"]
    drawn = []
    for place, seed in enumerate((0, 1)):
        rows = module._Asked(
            real=real,
            heldout=heldout,
            like=made,
            public=DIGITS,
            protocol=FAST,
            network="mlp",
            seeds=(0, 1),
            engine=CPU,
            progress=lambda *_: None,
        )._some(seed)
        assert torch.bincount(real.labels[rows]).tolist() == [2] * 10
        assert len(set(rows.tolist())) == 20
        alone = train_and_test(
            real.images[rows],
            real.labels[rows],
            heldout.images,
            heldout.labels,
            classes=10,
            protocol=FAST,
            network="mlp",
            seeds=(seed,),
        )
        assert found.confusions[place] == alone.confusions[0]
        drawn.append(set(rows.tolist()))
    assert drawn[0] != drawn[1]
    assert "20 real records drawn at random" in found.settings["ceiling"]


def test_what_is_not_secret_repeats(real: HeldOut, heldout: HeldOut) -> None:
    before = torch.get_rng_state()
    first = run(real, heldout, "random-real", "all-real", seeds=(3,))
    assert first == run(real, heldout, "random-real", "all-real", seeds=(3,))
    assert torch.equal(before, torch.get_rng_state())


def test_a_class_too_small_is_taken_whole_and_said(real: HeldOut, heldout: HeldOut) -> None:
    nines = torch.nonzero(real.labels == 9)[1:, 0]
    keep = torch.ones(len(real), dtype=torch.bool)
    keep[nines] = False
    few = HeldOut(real.images[keep], real.labels[keep], real.classes)
    told = run(few, heldout, "random-real")["random-real"].settings["ceiling"]
    assert told.startswith("19 real records") and "the set has 20" in told


def test_dm_is_made_through_the_gate_and_leaves_no_ledger(
    real: HeldOut, heldout: HeldOut, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[tuple[Plan, Public]] = []
    opened = Gate.__init__

    def remember(self: Gate, records: Any, public: Public, plan: Plan, **kwargs: Any) -> None:
        plans.append((plan, public))
        opened(self, records, public, plan, **kwargs)

    monkeypatch.setattr(Gate, "__init__", remember)
    heard: list[str] = []
    method = DM(iterations=4, group_size=None, images_per_class=2, width=4)  # draws no coins
    found = run(
        real, heldout, "dm", dm=method, progress=lambda done, total, text: heard.append(text)
    )["dm"]
    ((plan, public),) = plans
    assert not (state / "ledgers").exists()
    assert plan == method.plan(public)
    assert public.counts == tuple(torch.bincount(real.labels).tolist())
    assert found.settings["ceiling"].startswith("20 records made by distribution matching")
    digits = private(real.images.numpy(), real.labels.numpy(), name="digits")
    release = fit(digits, method, ledger=Ledger(state / "own.jsonl"), engine=CPU)
    assert math.isinf(release.statement.epsilon)
    made = synthesise(release, engine=CPU)
    by_hand = evaluate(made, heldout, protocol=FAST, network="mlp", seeds=(0, 1), engine=CPU)
    assert found.confusions == by_hand.confusions
    assert any(text.startswith("dm: asking") for text in heard)
    assert any(text.startswith("dm: epoch") for text in heard)


def test_dm_is_chosen_by_size_protocol_and_device(real: HeldOut, heldout: HeldOut) -> None:
    def chosen(protocol: Any, counts: tuple[int, ...], per_class: int = 7) -> DM:
        return module._Asked(
            real=real,
            heldout=heldout,
            like=like(per_class),
            public=replace(DIGITS, counts=counts),
            protocol=protocol,
            network=None,
            seeds=(0,),
            engine=CPU,
            progress=lambda *_: None,
        )._dm()

    method = chosen(DM_PROTOCOL.with_flips(), (100,) * 10)
    assert (method.images_per_class, method.iterations, method.group_size) == (7, 1000, 64)
    assert "flip" in method.augmentation
    assert chosen(FAST, (100,) * 9 + (30,)).group_size is None
    assert chosen(FAST, (100,) * 10).augmentation == DM(iterations=1).augmentation


def test_dp_sgd_is_calibrated_and_noised_anew_for_each_seed(
    real: HeldOut, heldout: HeldOut, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases: list[Release] = []
    build = NearestMean.classifier

    def remember(self: NearestMean, release: Release, **how: Any) -> nn.Module:
        releases.append(release)
        return build(self, release, **how)

    monkeypatch.setattr(NearestMean, "classifier", remember)
    found = run(
        real,
        heldout,
        "dp-sgd",
        epsilon=2.0,
        delta=1e-6,
        trainer=NearestMean(noise_multiplier=99.0),
    )["dp-sgd"]
    first, second = releases
    for seed, release in enumerate(releases):
        assert 1.98 < release.statement.epsilon <= 2.0 and release.statement.delta == 1e-6
        assert release.statement.private
        assert release.recipe["configuration"]["seed"] == seed
    assert not torch.equal(first.signals["sums"], second.signals["sums"])
    assert found.protocol == "nearest-mean" and found.seeds == (0, 1)
    # The confusion matrix, from the classifier itself.
    guess = build(NearestMean(noise_multiplier=1.0), first)(heldout.images).argmax(1)
    for i in range(10):
        for j in range(10):
            both = (heldout.labels == i) & (guess == j)
            assert found.confusions[0][i][j] == int(both.sum())
    assert "epsilon 2 at delta 1e-06" in found.settings["ceiling"]
    assert not (state / "ledgers").exists()


def test_dp_sgd_is_chosen_by_its_own_rule_and_learns(real: HeldOut, heldout: HeldOut) -> None:
    found = run(real, heldout, "dp-sgd", epsilon=math.inf, seeds=(0,))["dp-sgd"]
    preset = DPSGD.suited(replace(DIGITS, counts=(140,) * 10), Budget(math.inf), CPU)
    chosen = DPSGD.configured({} if preset is None else DPSGD.presets[preset].configuration)
    used = {**found.settings["configuration"], "noise_multiplier": chosen.noise_multiplier}
    assert found.settings["method"] == found.protocol == "dp-sgd"
    assert DPSGD.configured(used) == chosen
    assert found.network == chosen.network
    assert found.accuracy > 0.6


def test_all_real_takes_no_more_steps_than_make_sense() -> None:
    stretched = module._stretched(DM_PROTOCOL, 60_000)
    assert stretched.epochs == 43  # 235 batches of 256 each
    assert stretched.lr_drop == 22  # 502 of 1001
    assert stretched.name == "dm (43 epochs)"
    assert replace(stretched, name="dm", epochs=1001, lr_drop=502) == DM_PROTOCOL
    assert module._stretched(DM_PROTOCOL, 500) == DM_PROTOCOL
    assert module._stretched(QUICK, 1438) == QUICK
    assert module._stretched(FAST, 10**9).epochs == 1
    assert module._stretched(replace(FAST, lr_drop=None), 10**9).lr_drop is None


def test_tables_are_trained_with_the_mlp() -> None:
    public = Public(name="people", shape=(4,), classes=("no", "yes"), counts=(50, 50))

    def people(count: int, seed: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(count) % 2
        noise = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
        return 0.2 * noise + labels[:, None] * 0.5, labels

    found = ceilings(
        HeldOut(*people(100, 0), public.classes),
        HeldOut(*people(60, 1), public.classes),
        like=like(5, public),
        protocol=FAST,
        seeds=(0,),
        which=("random-real", "dm", "all-real"),
        dm=DM(iterations=3, group_size=None, images_per_class=5),
        engine=CPU,
    )
    assert {scores.network for scores in found.values()} == {"mlp"}
    by_hand = train_and_test(
        *people(100, 0), *people(60, 1), classes=2, protocol=FAST, network="mlp"
    )
    assert found["all-real"].confusions == by_hand.confusions


def test_refusals_help(real: HeldOut, heldout: HeldOut) -> None:
    with pytest.raises(UnknownName, match="Did you mean 'all-real'"):
        run(real, heldout, "al-real")
    with pytest.raises(BadConfiguration, match=r"give epsilon=.*which=\('dm',\)"):
        run(real, heldout, "dp-sgd", "dm")
    with pytest.raises(BadConfiguration, match="seed"):
        run(real, heldout, "random-real", seeds=())
    with pytest.raises(UnknownName, match="quick"):
        run(real, heldout, "random-real", protocol="quik")
    for nothing in (0.0, -1.0):
        with pytest.raises(BadConfiguration, match="epsilon must be positive"):
            run(real, heldout, "all-real", "dp-sgd", epsilon=nothing)
    with pytest.raises(BadConfiguration, match="classes"):
        run(HeldOut(real.images, real.labels, tuple("abcdefghij")), heldout, "all-real")
    with pytest.raises(BadConfiguration, match="shape"):
        run(real, HeldOut(heldout.images[..., :7], heldout.labels, real.classes), "all-real")
    with pytest.raises(DataError, match="none of class '9'"):
        some = real.labels < 9
        run(HeldOut(real.images[some], real.labels[some], real.classes), heldout, "all-real")
    assert set(CEILINGS) == {"random-real", "dm", "dp-sgd", "all-real"}


# Reading training records in the open


def test_the_training_split_of_a_named_dataset_is_opened(real: HeldOut, heldout: HeldOut) -> None:
    assert (len(real), len(heldout)) == (1438, 359)
    rows = {tuple(image.flatten().tolist()) for image in real.images}
    test = [tuple(image.flatten().tolist()) for image in heldout.images]
    assert sum(row in rows for row in test) < len(test) / 10  # some digits are written alike
    assert torch.equal(open_training("digits", like=DIGITS, split="test").images, heldout.images)


def test_training_records_are_opened_from_files(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 12), ("test", 6)):
        arrays[f"{split}_images"] = random.integers(0, 256, (count, 8, 8)).astype(np.uint8)
        arrays[f"{split}_labels"] = np.arange(count) % 2
    np.savez(tmp_path / "both.npz", **arrays)
    public = Public(name="both", shape=(1, 8, 8), classes=("0", "1"))
    found = open_training(str(tmp_path / "both.npz"), like=public)
    expected = torch.from_numpy(arrays["train_images"]).float()[:, None] / 127.5 - 1
    torch.testing.assert_close(found.images, expected)
    np.savez(tmp_path / "one.npz", images=arrays["test_images"], labels=arrays["test_labels"])
    assert len(open_training(tmp_path / "one.npz", like=public)) == 6
    with pytest.raises(UnknownName, match="Did you mean 'digits'"):
        open_training("digit", like=public)
    with pytest.raises(DataError, match="shape"):
        open_training(tmp_path / "one.npz", like=replace(public, shape=(1, 9, 9)))
