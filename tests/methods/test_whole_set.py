from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from tests.methods.test_ndpdc import CPU, MNIST, two_pictures
from understudy.data.datasets import load, load_heldout
from understudy.errors import BadConfiguration
from understudy.methods import WholeSet
from understudy.privacy import Budget, Ledger
from understudy.privacy.accounting import epsilon
from understudy.privacy.events import Event
from understudy.run import evaluate, fit, synthesise


def test_the_number_of_queries_follows_from_public_facts() -> None:
    """50 for the papers' network and 6,000 a class, where 50 was measured to be good."""
    even = dataclasses.replace(MNIST, counts=(6000,) * 10)
    assert WholeSet().rule(even) == 50
    assert WholeSet(width=32).rule(even) == 4 * 50 + 2
    assert WholeSet(noise_multiplier=0.5).rule(even) == 400
    assert WholeSet(noise_multiplier=0.0).rule(even) == 400
    assert WholeSet().rule(dataclasses.replace(MNIST, counts=(6000,) * 9 + (100,))) == 1
    method = WholeSet()
    assert method.plan(even)[0].times == method.rule(even)
    noise = method.plan(even)[0].query.stddev * math.sqrt(2048) / 6000
    assert 0.19 < noise <= 0.2


def test_the_price_does_not_depend_on_the_number_of_queries() -> None:
    one = Event(
        name="one",
        times=1,
        noise_multiplier=3.7306,
        bound=1.0,
        sampling_rate=None,
        per_class=True,
        unit="record",
    )
    alone = epsilon((one,), 1e-5)
    assert alone == pytest.approx(1.0, abs=2e-3)
    for queries in (1, 20, 50):
        assert WholeSet(queries=queries).epsilon(MNIST) == pytest.approx(alone, rel=2e-3)


def test_every_record_is_in_every_sum(tmp_path: Path) -> None:
    data = two_pictures()
    method = WholeSet.configured({**WholeSet.miniature, "noise_multiplier": 0.0})
    release = fit(data, method, ledger=Ledger(tmp_path / "l"), engine=CPU)
    # Unit-clipped features of positive entries: the sum of 60 has norm near 60, never above.
    norms = release.signals["sums"].norm(dim=-1)
    assert norms.shape == (2, 2)
    assert (norms <= 60.001).all()
    assert (norms > 30).all()


def test_the_set_counts_expanded_images_and_the_field_stored_ones(tmp_path: Path) -> None:
    method = WholeSet.configured({**WholeSet.miniature, "images_per_class": 3})
    release = fit(two_pictures(), method, ledger=Ledger(tmp_path / "l"), engine=CPU)
    assert synthesise(release, engine=CPU).per_class == [12, 12]
    plain = dataclasses.replace(method, expand=False)
    assert synthesise(release, plain, engine=CPU).per_class == [3, 3]


def test_checkpoints_reach_the_optimisation(tmp_path: Path) -> None:
    method = WholeSet.configured(WholeSet.miniature)
    release = fit(two_pictures(), method, ledger=Ledger(tmp_path / "l"), engine=CPU)
    file = tmp_path / "state.safetensors"
    first = method.synthesise(release, engine=CPU, checkpoint=file)
    assert file.is_file()
    again = method.synthesise(release, engine=CPU, checkpoint=file)
    assert torch.equal(first.images, again.images)


@pytest.mark.parametrize("changes", [{"queries": 0}, {"steps": 0}, {"start": 0.0}])
def test_senseless_fields_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(BadConfiguration):
        WholeSet.configured(changes)


def test_the_digits_preset_trains_a_useful_classifier_at_epsilon_one(tmp_path: Path) -> None:
    """Four releases gave 86.4 to 90.0 %; the records number about 144 a class."""
    method = WholeSet.configured(WholeSet.presets["small"].configuration)
    release = fit(
        load("digits"), method, budget=Budget(1.0), ledger=Ledger(tmp_path / "l"), engine=CPU
    )
    assert release.statement.private
    assert 0.99 < release.statement.epsilon <= 1.0
    made = synthesise(release, engine=CPU)
    assert made.per_class == [10] * 10
    scores = evaluate(made, load_heldout("digits"), protocol="quick", seeds=(0,), engine=CPU)
    assert 0.78 <= scores.accuracy <= 0.96


@pytest.mark.slow
def test_network_features_work_on_digits_too(tmp_path: Path) -> None:
    method = WholeSet(
        width=16, queries=20, expand=False, augmentation="crop", steps=600, noise_multiplier=0.3
    )
    release = fit(load("digits"), method, ledger=Ledger(tmp_path / "l"), engine=CPU)
    made = synthesise(release, engine=CPU)
    scores = evaluate(made, load_heldout("digits"), protocol="quick", seeds=(0,), engine=CPU)
    assert scores.accuracy > 0.7
