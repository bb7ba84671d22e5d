"""What the command line calls: audits of recipes and of releases."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.privacy import test_mutants as broken
from understudy import jobs
from understudy.auditing import AuditFailed
from understudy.errors import BadConfiguration
from understudy.methods import DPSGD, LDPDC
from understudy.privacy import Budget, Ledger, PrivateDataset

RECIPE = {"group_size": 60.0, "images_per_class": 2}


@pytest.fixture
def data() -> PrivateDataset:
    return jobs.open_data("digits")


def released(data: PrivateDataset, folder: Path, **changes: object) -> Path:
    method = LDPDC.configured({**RECIPE, **changes})
    ledger = Ledger(folder / "ledger.jsonl", cap=Budget(math.inf))
    jobs.synth(data, method, folder / "release", ledger=ledger)
    return folder / "release"


def test_the_claim_of_a_named_dataset_is_that_of_its_training_split(data: PrivateDataset) -> None:
    """Groups of sixty are too many for the records lent, and few for those the claim is about."""
    method = LDPDC(**RECIPE).calibrated(data.public, Budget(1.0))
    result = jobs.audit(method, "digits", quick=True, runs=4)
    assert result.passed
    assert result.claimed == method.epsilon(data.public)


def test_a_classifier_is_audited_too(data: PrivateDataset) -> None:
    method = DPSGD.configured(DPSGD.miniature).calibrated(data.public, Budget(1.0))
    result = jobs.audit(method, "digits", quick=True, runs=8)
    assert result.passed and result.releases == 0
    assert result.lower_bound > 0.5


def test_an_audit_that_fails_is_kept_for_the_report(
    data: PrivateDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = released(data, tmp_path, noise_multiplier=10.0)
    broken.noise_halved(monkeypatch)
    with pytest.raises(AuditFailed, match="ABOVE"):
        jobs.audit_release(folder, quick=True, runs=8)
    kept = json.loads((tmp_path / "release.audit.json").read_text())
    assert kept["audit"]["passed"] is False
    page = jobs.report([folder]).read_text()
    assert "The audit failed" in page and "Do not share this release" in page


def test_an_audit_names_the_records_that_were_attacked_with(
    data: PrivateDataset, tmp_path: Path
) -> None:
    """Not those of the release: a reader must not think that the private ones were used."""
    lent = tmp_path / "at home" / "lent.npz"
    lent.parent.mkdir()
    heldout = jobs.open_heldout("digits", like=data.public)
    images = ((heldout.images + 1) * 8).round().numpy()  # digits are declared in 0..16
    np.savez(lent, images=images, labels=heldout.labels.numpy())
    folder = released(data, tmp_path, noise_multiplier=10.0)
    result = jobs.audit_release(folder, str(lent), quick=True, runs=8)
    assert result.pool == "lent" and "on 'lent'" in str(result)
    page = jobs.report([folder]).read_text()
    assert "public or test records (lent)" in page and "at home" not in page


def test_what_claims_nothing_is_not_audited(data: PrivateDataset, tmp_path: Path) -> None:
    folder = released(data, tmp_path, noise_multiplier=0.0)
    with pytest.raises(BadConfiguration, match="claims no guarantee"):
        jobs.audit_release(folder)
