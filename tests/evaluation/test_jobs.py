"""What the command line calls: releases evaluated on files, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from understudy import jobs
from understudy.auditing import AuditFailed
from understudy.errors import DataError, ReleaseError, UnderstudyError, UsageError
from understudy.methods import DPSGD, LDPDC, WholeSet
from understudy.privacy import Ledger

CLASSES = ("healthy", "ill")


def pictures(
    folder: Path, *, classes: Sequence[str] = CLASSES, size: int = 8, mode: str = "L"
) -> Path:
    """Draw eight noisy pictures a class, each class of its own brightness."""
    random = np.random.default_rng(len(folder.name))
    for place, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(8):
            shape = (size, size) if mode == "L" else (size, size, 3)
            pixels = np.clip(random.normal(60 + 110 * place, 40, shape), 0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture
def release(tmp_path: Path) -> Path:
    data = jobs.open_data(str(pictures(tmp_path / "scans")))
    method = LDPDC(group_size=4.0, images_per_class=3, noise_multiplier=5.0)
    return jobs.synth(data, method, tmp_path / "release")[0]


@pytest.mark.parametrize("network", ["convnet", "mlp", "lenet", "alexnet", "datalens", "sklearn"])
def test_every_network_is_chosen_by_name(network: str, release: Path, tmp_path: Path) -> None:
    judged = jobs.score(
        release, str(tmp_path / "scans"), network=network, protocol="quick", seeds=(0,)
    )
    named = ("logistic", "forest", "boosting") if network == "sklearn" else (network,)
    assert tuple(score.network for score in judged.scores.values()) == named
    assert all(score.tested == 16 for score in judged.scores.values())


def test_several_networks_stand_side_by_side(release: Path, tmp_path: Path) -> None:
    scans = str(tmp_path / "scans")
    judged = jobs.score(
        release, scans, network=("sklearn", "mlp", "convnet"), protocol="quick", seeds=(0,),
        training=scans, ceilings=("random-real",),
    )  # fmt: skip
    assert [*judged.scores] == ["logistic", "forest", "boosting", "mlp, quick", "convnet, quick"]
    assert judged.ceilings["random-real"].network == "mlp"
    with pytest.raises(UsageError, match="Did you mean 'vgg11'"):
        jobs.score(release, scans, network="vgg1")


def test_what_is_wrong_is_refused_before_anything_is_trained(
    release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans = str(tmp_path / "scans")
    monkeypatch.setattr(jobs, "_scored", lambda *_, **__: pytest.fail("something was trained"))
    for wrong, told in (
        (
            {"network": ("mlp", "vgg1")},
            "Known: alexnet, convnet, datalens, lenet, mlp, resnet18, sk",
        ),
        ({"training": scans, "ceilings": ("al-real",)}, "mean 'all-real'"),
        ({"ceilings": ("dm",)}, "with --ceilings DATA"),
        ({"inception": tmp_path / "no.pt"}, "no.pt'. --inception takes"),
        ({"protocol": "dn"}, "mean 'dm'"),
        ({"training": str(tmp_path / "nowhere")}, "nowhere"),
    ):
        with pytest.raises(UnderstudyError) as caught:
            jobs.score(release, scans, **wrong)  # type: ignore[arg-type]
        assert told in str(caught.value)


def test_scores_are_about_one_test_set(release: Path, tmp_path: Path) -> None:
    """Accuracies on different records would stand side by side as if they could be compared."""
    scans, other = str(tmp_path / "scans"), str(pictures(tmp_path / "other hospital"))
    quick = {"network": "mlp", "protocol": "quick", "seeds": (0,)}
    jobs.score(release, scans, **quick)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"'scans'\) than these \('other hospital'\)"):
        jobs.score(release, other, **quick)  # type: ignore[arg-type]
    same = (tmp_path / "scans").rename(tmp_path / "moved")
    jobs.score(release, str(same), network="convnet", protocol="quick", seeds=(0,))
    kept = tmp_path / "release.scores.json"
    assert [*json.loads(kept.read_text())["scores"]] == ["mlp, quick", "convnet, quick"]
    kept.unlink()
    jobs.score(release, other, **quick)  # type: ignore[arg-type]
    assert json.loads(kept.read_text())["test"] == "other hospital"


def test_scores_are_about_one_set(tmp_path: Path) -> None:
    """A set made anew from the same signals has the same ledger line, and other scores."""
    scans = str(pictures(tmp_path / "scans"))
    method = WholeSet.configured({**WholeSet.miniature, "noise_multiplier": 5.0})
    release, _ = jobs.synth(jobs.open_data(scans), method, tmp_path / "release")
    jobs.score(release, scans, network="mlp", protocol="quick", seeds=(0,))
    assert "Not measured." not in scored_part(jobs.report([release]))
    jobs.resynthesise(release, release, changes={"steps": 2}, overwrite=True)
    assert "Not measured." in scored_part(jobs.report([release]))


def scored_part(page: Path) -> str:
    """Return what a report says of accuracy."""
    return page.with_suffix(".md").read_text().partition("## Utility")[2].partition("## ")[0]


def test_what_was_found_is_kept_at_once(
    release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans = str(tmp_path / "scans")

    def dies(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "compute_ceilings", dies)
    with pytest.raises(KeyboardInterrupt):
        jobs.score(release, scans, network="mlp", protocol="quick", seeds=(0,), training=scans)
    assert "mlp, quick" in json.loads((tmp_path / "release.scores.json").read_text())["scores"]


@pytest.mark.parametrize(
    ("test", "told"),
    [
        ({"size": 16}, "have shape (1, 16, 16), but 'scans' has (1, 8, 8)"),
        ({"mode": "RGB"}, "have shape (3, 8, 8), but 'scans' has (1, 8, 8)"),
        (
            {"classes": ("cat", "dog")},
            "class 'cat' is not among the declared classes ['healthy', 'ill']. Held-out",
        ),
        ({"classes": (*CLASSES, "unsure")}, "class 'unsure' is not among the declared classes"),
        ({"classes": ()}, "subfolder"),
    ],
    ids=["larger", "colour", "other classes", "one class more", "empty"],
)
def test_a_test_set_that_does_not_fit_is_refused(
    test: dict[str, object], told: str, release: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "test"
    folder.mkdir()
    pictures(folder, **test)  # type: ignore[arg-type]
    for ask in (jobs.score, jobs.audit_release):
        with pytest.raises(DataError) as caught:
            ask(release, str(folder))
        assert told in str(caught.value)


def test_a_test_set_that_is_nowhere_is_refused(release: Path, tmp_path: Path) -> None:
    with pytest.raises(UnderstudyError, match="nowhere"):
        jobs.score(release, str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="--test"):
        jobs.score(release)


def test_a_label_is_declared_for_the_test_set_the_ceilings_and_the_audit(tmp_path: Path) -> None:
    """A table's label has any name, and all three read a table like the private one."""
    random = np.random.default_rng(0)
    for name in ("people", "others"):
        cells = [f"{random.uniform(-1, 1):.3f},{'yes' if i % 2 else 'no'}" for i in range(40)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["blood,ill", *cells]))
    data = jobs.open_data(str(tmp_path / "people.csv"), label="ill", columns={"blood": [-1, 1]})
    method = LDPDC(group_size=4.0, images_per_class=3, noise_multiplier=5.0)
    release, _ = jobs.synth(data, method, tmp_path / "release")
    others = str(tmp_path / "others.csv")
    judged = jobs.score(
        release, others, protocol="quick", seeds=(0,), training=str(tmp_path / "people.csv"),
        ceilings=("random-real",), label="ill",
    )  # fmt: skip
    assert "random-real" in judged.ceilings
    assert [*judged.scores][3:] == ["mlp, quick"], "what the references are computed with"
    assert jobs.audit_release(release, others, quick=True, runs=4, label="ill").pool == "others"


def test_a_classifier_is_evaluated_and_not_reported(tmp_path: Path) -> None:
    data = jobs.open_data(str(pictures(tmp_path / "scans")))
    method = DPSGD.configured({**DPSGD.miniature, "noise_multiplier": 5.0})
    model, _ = jobs.signals(data, method, tmp_path / "model")
    assert jobs.score(model, str(tmp_path / "scans")).scores
    with pytest.raises(ReleaseError, match="holds a classifier, and a report is about synthetic"):
        jobs.report([model])


def tampered(folder: Path) -> None:
    path = folder / "synthetic.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def truncated(folder: Path) -> None:
    path = folder / "synthetic.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def emptied(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def without_a_set(folder: Path) -> None:
    """Put the signals of a run that is still optimising in place of the release."""
    data = jobs.open_data(str(folder.parent / "scans"))
    method = LDPDC(group_size=4.0, images_per_class=3, noise_multiplier=6.0)
    emptied(folder)
    folder.rmdir()
    jobs.signals(data, method, folder, ledger=Ledger(folder.with_name("another.jsonl")))


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (tampered, "is not the file that was released"),
        (truncated, "is not the file that was released"),
        (emptied, "is not a release"),
        (without_a_set, "no synthetic set yet"),
    ],
    ids=["tampered", "truncated", "empty", "still going"],
)
def test_a_release_that_is_none_is_neither_evaluated_nor_reported(
    harm: Callable[[Path], None], told: str, release: Path, tmp_path: Path
) -> None:
    harm(release)
    for ask in (
        lambda: jobs.score(release, str(tmp_path / "scans")),
        lambda: jobs.report([release]),
    ):
        with pytest.raises(ReleaseError, match=told):
            ask()
    assert not (tmp_path / "release.report.html").exists()
    if harm is not without_a_set:  # its recipe can be audited as any other
        with pytest.raises(UnderstudyError, match=told) as caught:
            jobs.audit_release(release, str(tmp_path / "scans"))
        assert not isinstance(caught.value, AuditFailed)
