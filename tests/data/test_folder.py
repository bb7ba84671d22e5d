"""A release on disk: whole or not at all, and caught when anything in it is changed."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib
import importlib.util
import json
import os
import re
import runpy
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import safetensors.torch
import torch
from PIL import Image

from understudy.data import pictures
from understudy.data.folder import load, save
from understudy.data.synthetic import SyntheticSet
from understudy.data.verify import verify
from understudy.errors import (
    BadConfiguration,
    LedgerError,
    ReleaseError,
    ReleaseExists,
    Tampered,
)
from understudy.methods import LDPDC, method_named
from understudy.privacy.accounting import Accountant, Budget
from understudy.privacy.events import Event, Plan, Query, Step
from understudy.privacy.gate import PrivateDataset, Records, record_digests
from understudy.privacy.ledger import Ledger
from understudy.privacy.noise import Secret
from understudy.privacy.public import Column, Public
from understudy.privacy.release import Release
from understudy.privacy.statement import Statement

METHOD = LDPDC(noise_multiplier=2.0, images_per_class=3, group_size=5.0)
CLASSES = ("cat", "dog/wolf", "..")
COLUMNS = (
    Column(name="age", kind="numeric", low=17, high=90),
    Column(name="height", kind="numeric", low=0.5, high=2.5),
    Column(name="sex", kind="categorical", categories=("Female", "Male")),
    Column(name="code", kind="categorical", categories=("1", "2", "NA", "")),
)

Made = tuple[Release, SyntheticSet, Ledger]


def replan(recipe: Mapping[str, Any], public: Public) -> tuple[Event, ...]:
    """Plan again, as the command line does."""
    method = method_named(recipe["method"]).configured(recipe["configuration"])
    return method.plan(public).events(public)


def measure(
    data: PrivateDataset, ledger: Ledger, method: LDPDC = METHOD, secret: Secret | None = None
) -> Release:
    with data.open(
        method.plan(data.public),
        by=method.name,
        recipe=method.recipe(),
        ledger=ledger,
        budget=Budget(100.0),
        secret=secret,
    ) as gate:
        return method.measure(gate)


def private_images(shape: tuple[int, int, int]) -> PrivateDataset:
    labels = np.arange(60, dtype=np.int64) % 3
    images = np.random.default_rng(0).integers(0, 256, (60, *shape), np.uint8)
    public = Public(
        name="pets | of <b>",
        shape=shape,
        classes=CLASSES,
        counts=(20, 20, 20),
        preparation=("pixels mapped from [0, 255] to [-1, 1]",),
    )
    return PrivateDataset(Records(images, labels, record_digests(images)), public)


@pytest.fixture(scope="module", autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNDERSTUDY_STATE", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def made(state: None, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Release the same images twice; the second release knows of the first run."""
    ledger = Ledger(tmp_path_factory.mktemp("ledger") / "pets.jsonl")
    data = private_images((1, 8, 8))
    measure(data, ledger, dataclasses.replace(METHOD, images_per_class=2))
    release = measure(data, ledger)
    return release, METHOD.synthesise(release), ledger


@pytest.fixture(scope="module")
def table(state: None, tmp_path_factory: pytest.TempPathFactory) -> Made:
    width = sum(column.width for column in COLUMNS)
    rows = np.random.default_rng(1).uniform(-1, 1, (40, width)).astype(np.float32)
    labels = np.arange(40, dtype=np.int64) % 2
    public = Public(
        name="people", shape=(width,), classes=("<=50K", ">50K"), counts=(20, 20), columns=COLUMNS
    )
    data = PrivateDataset(Records(rows, labels, record_digests(rows)), public)
    ledger = Ledger(tmp_path_factory.mktemp("ledger") / "people.jsonl")
    release = measure(data, ledger)
    return release, METHOD.synthesise(release), ledger


@pytest.fixture(scope="module")
def pristine(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    release, synthetic, _ = made
    return save(tmp_path_factory.mktemp("pristine") / "release", release, synthetic)


@pytest.fixture(scope="module")
def pristine_table(table: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    release, synthetic, _ = table
    return save(tmp_path_factory.mktemp("pristine") / "table", release, synthetic)


@pytest.fixture
def copied(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "release"))


def names(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in files)


def reseal(folder: Path) -> None:
    """Do what a forger would: make the manifest agree with the files again."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {
        name: {
            "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest(),
            "size": (folder / name).stat().st_size,
        }
        for name in names(folder)
        if name != "manifest.json"
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def edit(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change a JSON file and reseal the folder."""
    data = json.loads((folder / name).read_text())
    change(data)
    (folder / name).write_text(json.dumps(data, indent=2) + "\n")
    reseal(folder)


def rewrite(folder: Path, statement: Statement) -> None:
    """Do what a careful forger would: regenerate every word from the forged numbers."""
    (folder / "statement.json").write_text(json.dumps(statement.to_json(), indent=2) + "\n")
    (folder / "STATEMENT.md").write_text(statement.markdown())
    reseal(folder)


def same(a: Release, b: Release) -> None:
    assert (a.recipe, a.public, a.statement) == (b.recipe, b.public, b.statement)
    assert a.signals.keys() == b.signals.keys()
    assert all(torch.equal(a.signals[name], b.signals[name]) for name in a.signals)


# Round trips


def test_images_come_back(made: Made, pristine: Path) -> None:
    release, synthetic, _ = made
    back, again = load(pristine)
    same(back, release)
    assert again is not None
    assert torch.equal(again.images, synthetic.images)
    assert torch.equal(again.labels, synthetic.labels)
    assert (again.images.dtype, again.labels.dtype) == (torch.float32, torch.int64)
    assert again.images.abs().max() > 1  # not clamped
    assert torch.equal(METHOD.synthesise(back).images, synthetic.images)


def test_signals_alone_come_back(made: Made, tmp_path: Path) -> None:
    release, _, _ = made
    place = save(tmp_path / "signals", release)
    back, synthetic = load(place)
    same(back, release)
    assert synthetic is None
    verify(place, replan=replan)
    assert names(place) == sorted(
        ["README.md", "STATEMENT.md", "manifest.json", "recipe.json"]
        + ["signals.safetensors", "statement.json"]
    )


def test_verification_tells_what_was_checked(made: Made, pristine: Path) -> None:
    release, _, ledger = made
    found = verify(pristine, ledger=ledger, replan=replan)
    assert found.statement == release.statement
    assert found.not_checked == ()
    assert [name for name, _ in found.checks] == [
        "files",
        "words",
        "terms",
        "epsilon",
        "total epsilon",
        "plan",
        "synthetic set",
        "ledger",
    ]
    assert set(found.epsilons) == set(Accountant)
    pld, rdp, classic = (found.epsilons[name] for name in Accountant)
    assert pld == pytest.approx(release.statement.epsilon)
    assert pld < rdp < classic
    told = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert told["recomputed"] == {"pld": pld, "rdp": rdp, "rdp-classic": classic}
    assert [name for name, _ in verify(pristine).not_checked] == ["plan", "ledger"]


def test_a_release_without_noise_says_it_is_not_private(tmp_path: Path) -> None:
    method = dataclasses.replace(METHOD, noise_multiplier=0.0)
    ledger = Ledger(tmp_path / "ledger.jsonl", cap=Budget(float("inf")))
    release = measure(private_images((3, 6, 8)), ledger, method)
    place = save(tmp_path / "release", release, method.synthesise(release))
    told = verify(place, ledger=ledger, replan=replan).to_json()
    assert (told["private"], told["epsilon"]) == (False, "inf")
    assert "NOT PRIVATE" in (place / "README.md").read_text()
    with Image.open(place / "previews" / "cat" / "000.png") as picture:
        assert (picture.mode, picture.size) == ("RGB", (8, 6))


def repriced(forged: Statement) -> Statement:
    """A forger who can add up."""
    return dataclasses.replace(
        forged, epsilon=forged.recompute(), total_epsilon=forged.recompute_total()
    )


def test_a_release_in_two_stages(tmp_path: Path) -> None:
    hidden = dataclasses.replace(private_images((1, 4, 4)).public, counts=None)
    data = PrivateDataset(private_images((1, 4, 4))._records, hidden)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    counting = Plan(Step(Query(name="sizes", bound=1, noise_multiplier=5, per_class=True), times=1))
    terms: dict[str, Any] = {"by": "ldpdc", "ledger": ledger, "budget": Budget(100.0)}
    with data.open(counting, recipe={"stage": "class sizes"}, **terms) as first:
        public = hidden.measured((21, 19, 20))
        plan = METHOD.plan(public)
        with data.open(
            plan, recipe=METHOD.recipe(), public=public, before=(first.grant,), **terms
        ) as gate:
            release = METHOD.measure(gate)
    place = save(tmp_path / "release", release, METHOD.synthesise(release))
    found = verify(place, ledger=ledger, replan=replan)
    assert found.statement.stages == (1, 1)
    assert found.statement.accountant is Accountant.RDP
    forged = dataclasses.replace(release.statement, stages=(2,))
    rewrite(place, repriced(forged))
    with pytest.raises(Tampered, match=r"recipe\.json asks"):
        verify(place, replan=replan)


def test_a_known_secret_is_stated(tmp_path: Path) -> None:
    release = measure(
        private_images((1, 8, 8)), Ledger(tmp_path / "l.jsonl"), secret=Secret.for_testing(1)
    )
    place = save(tmp_path / "release", release)
    assert not verify(place).statement.private
    edit(place, "statement.json", lambda data: data.update(secret_known=False))
    with pytest.raises(Tampered, match="statement.json"):
        verify(place)


def test_nothing_is_a_pickle(pristine: Path, pristine_table: Path) -> None:
    for place in (pristine, pristine_table):
        for name in names(place):
            assert not zipfile.is_zipfile(place / name), name  # what torch.save writes
            assert (place / name).read_bytes()[:1] != b"\x80", name
            assert not name.endswith((".pkl", ".pickle", ".pt", ".pth", ".npy", ".npz"))


def test_class_names_never_leave_the_folder(pristine: Path) -> None:
    previews = {path.name for path in (pristine / "previews").iterdir()}
    assert previews == {"cat", "001_dog_wolf", "002"}
    assert names(pristine / "previews" / "cat") == ["000.png", "001.png", "002.png"]


def test_folder_names_differ_even_where_case_does_not_count() -> None:
    found = pictures._folder_names(("A", "a", "", "x" * 300, "é"))
    assert found[0] == "A"
    assert len({name.casefold() for name in found}) == 5
    assert all(name and len(name) < 70 and "/" not in name for name in found)


# Other people's readers


def test_parquet_is_known_to_hugging_face(
    made: Made, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    _, synthetic, _ = made
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    found = datasets.load_dataset(
        "parquet", data_files=str(pristine / "synthetic.parquet"), split="train"
    )
    assert isinstance(found.features["image"], datasets.Image)
    assert isinstance(found.features["label"], datasets.ClassLabel)
    assert found.features["label"].names == list(CLASSES)
    assert found["label"] == synthetic.labels.tolist()
    assert np.array_equal(np.asarray(found[4]["image"]), synthetic.pixels()[4, 0].numpy())


@pytest.mark.parametrize("kind", ["image", "table"])
def test_the_examples_on_the_card_work(
    kind: str,
    pristine: Path,
    pristine_table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = pristine if kind == "image" else pristine_table
    blocks = re.findall(r"```python\n(.*?)```", (place / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    monkeypatch.chdir(place)
    for number, block in enumerate(blocks):
        if "datasets" in block:
            if importlib.util.find_spec("datasets") is None:
                continue
            datasets = importlib.import_module("datasets")
            monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        (tmp_path / f"block{number}.py").write_text(block)
        result = runpy.run_path(str(tmp_path / f"block{number}.py"))
        assert "model" in result or len(result["train"]) == (9 if kind == "image" else 6)


def test_the_card_tells_what_it_must(made: Made, tmp_path: Path) -> None:
    release, synthetic, _ = made
    card = (save(tmp_path / "a", release, synthetic) / "README.md").read_text()
    assert card.startswith("---\nlicense: other\n")
    assert "- image-classification" in card
    assert "data_files: synthetic.parquet" in card
    assert "pets \\| of &lt;b>" in card  # foreign text stays text
    assert f"{release.statement.epsilon:.6g}" in card
    for departure in release.statement.departures:
        assert departure in card
    assert "understudy verify FOLDER" in card
    place = save(tmp_path / "b", release, synthetic, licence="cc-by-4.0", source=METHOD.source)
    card = (place / "README.md").read_text()
    assert 'license: "cc-by-4.0"' in card
    assert METHOD.source in card
    if importlib.util.find_spec("yaml") is not None:
        front = importlib.import_module("yaml").safe_load(card.split("---\n")[1])
        assert front["size_categories"] == ["n<1K"]


def test_contact_sheet_shows_every_class(made: Made, pristine: Path) -> None:
    _, synthetic, _ = made
    with Image.open(pristine / "contact_sheet.png") as sheet:
        pixels = np.asarray(sheet.convert("L"))
    for place in (0, 5, 8):  # each picture is there, enlarged exactly
        picture = synthetic.pixels()[place, 0].numpy().repeat(12, 0).repeat(12, 1)
        windows = np.lib.stride_tricks.sliding_window_view(pixels, picture.shape)
        corners = np.argwhere((windows[:, :, ::24, ::24] == picture[::24, ::24]).all(axis=(2, 3)))
        assert any(np.array_equal(windows[y, x], picture) for y, x in corners)


@pytest.mark.parametrize("shape", [(1, 300, 200), (2, 5, 5), (3, 28, 28)])
def test_other_shapes_are_drawn(made: Made, tmp_path: Path, shape: tuple[int, int, int]) -> None:
    release, _, _ = made
    public = dataclasses.replace(release.public, shape=shape)
    synthetic = SyntheticSet(
        images=torch.zeros(4, *shape), labels=torch.tensor([0, 2, 2, 2]), public=public
    )
    place = save(tmp_path / "r", dataclasses.replace(release, public=public), synthetic)
    assert verify(place)  # a class without any record is no obstacle
    with Image.open(place / "contact_sheet.png") as sheet:
        assert sheet.width < 3000


# Tables


def test_tables_come_back(table: Made, pristine_table: Path) -> None:
    release, synthetic, ledger = table
    back, again = load(pristine_table)
    same(back, release)
    assert back.public.columns == COLUMNS
    assert again is not None
    assert torch.equal(again.images, synthetic.images)
    assert verify(pristine_table, ledger=ledger, replan=replan).not_checked == ()
    cells = pa.parquet.read_table(pristine_table / "synthetic.parquet")
    assert cells.column_names == ["age", "height", "sex", "code", "label"]
    assert cells["label"].to_pylist() == ["<=50K"] * 3 + [">50K"] * 3
    assert all(17 <= age <= 90 for age in cells["age"].to_pylist())
    assert pa.csv.read_csv(pristine_table / "synthetic.csv").num_rows == 6
    assert "- tabular-classification" in (pristine_table / "README.md").read_text()


def test_a_table_of_undeclared_columns(made: Made, tmp_path: Path) -> None:
    release, _, _ = made
    public = dataclasses.replace(release.public, shape=(2,))
    rows = torch.tensor([[0.5, -2.0], [1 / 3, 1e-7]])
    synthetic = SyntheticSet(images=rows, labels=torch.tensor([0, 1]), public=public)
    place = save(tmp_path / "r", dataclasses.replace(release, public=public), synthetic)
    assert verify(place)
    assert pa.parquet.read_table(place / "synthetic.parquet").column_names == ["x0", "x1", "label"]


@pytest.mark.parametrize("name", ["synthetic.csv", "synthetic.parquet"])
def test_cells_that_differ_from_the_tensors_are_caught(
    pristine_table: Path, tmp_path: Path, name: str
) -> None:
    place = Path(shutil.copytree(pristine_table, tmp_path / "table"))
    cells = pa.parquet.read_table(place / "synthetic.parquet")
    ages = pa.array([20, *cells["age"].to_pylist()[1:]])
    cells = cells.set_column(0, "age", pa.compute.subtract(ages, 1))
    if name.endswith(".csv"):
        pa.csv.write_csv(cells, place / name)
    else:
        pa.parquet.write_table(cells, place / name)
    reseal(place)
    with pytest.raises(Tampered, match=name):
        verify(place)


# Tampering, hashes left alone


def test_a_flipped_bit_in_any_file_is_named(copied: Path) -> None:
    for name in names(copied):
        content = (copied / name).read_bytes()
        for place in (0, len(content) // 2, len(content) - 1):
            flipped = bytearray(content)
            flipped[place] ^= 1
            (copied / name).write_bytes(flipped)
            for check in (load, verify):
                with pytest.raises(Tampered, match=re.escape(name)):
                    check(copied)
        (copied / name).write_bytes(content)
    verify(copied)


def test_every_bit_of_the_manifest_counts(copied: Path) -> None:
    content = (copied / "manifest.json").read_bytes()
    for bit in range(0, 8 * len(content), 149):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << (bit % 8)
        (copied / "manifest.json").write_bytes(flipped)
        with pytest.raises(ReleaseError, match="manifest.json"):
            load(copied)


def test_a_missing_file_is_named(copied: Path) -> None:
    for name in names(copied):
        content = (copied / name).read_bytes()
        (copied / name).unlink()
        with pytest.raises(Tampered, match=re.escape(name)):
            load(copied)
        (copied / name).write_bytes(content)


def test_an_extra_file_is_named(copied: Path) -> None:
    (copied / "previews" / "cat" / "real.png").write_bytes(b"")
    with pytest.raises(Tampered, match=r"previews/cat/real\.png"):
        load(copied)


def test_links_and_devices_are_refused(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "card").write_bytes((copied / "README.md").read_bytes())
    (copied / "README.md").unlink()
    (copied / "README.md").symlink_to(tmp_path / "card")
    with pytest.raises(Tampered, match=r"README\.md is a link"):
        load(copied)
    (copied / "README.md").unlink()
    os.mkfifo(copied / "README.md")
    with pytest.raises(Tampered, match=r"README\.md is a link or a device"):
        load(copied)


@pytest.mark.parametrize("name", ["../outside", "/etc/hosts", "a/../../b", "a\\..\\b", ""])
def test_paths_that_lead_outside_are_refused(copied: Path, name: str) -> None:
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["files"][name] = {"sha256": "0" * 64, "size": 0}
    (copied / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    with pytest.raises(Tampered, match="may lie outside"):
        load(copied)


def test_folders_that_are_no_release(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="no such folder"):
        load(tmp_path / "absent")
    with pytest.raises(ReleaseError, match="not a release"):
        load(tmp_path)


def test_a_later_format_is_told_apart_from_tampering(copied: Path) -> None:
    edit(copied, "manifest.json", lambda data: None)
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["format"] = 2
    (copied / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    with pytest.raises(ReleaseError, match="reads format 1") as caught:
        load(copied)
    assert not isinstance(caught.value, Tampered)


# Tampering, with the hashes computed again


def numbers(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Find every number in JSON data."""
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from numbers(value, (*path, key))
    elif isinstance(data, int | float):
        yield path


def test_an_edited_number_with_new_hashes_is_caught(made: Made, copied: Path) -> None:
    _, _, ledger = made
    original = json.loads((copied / "statement.json").read_text())
    places = list(numbers(original))
    assert len(places) > 12
    for path in places:
        for factor in (2, 1.01, 0):
            data = json.loads(json.dumps(original))
            inner = data
            for key in path[:-1]:
                inner = inner[key]
            value = inner[path[-1]]
            exact = isinstance(value, int) and factor != 0
            inner[path[-1]] = value + 1 if exact else value * factor
            if isinstance(value, bool):
                inner[path[-1]] = not value
            (copied / "statement.json").write_text(json.dumps(data, indent=2) + "\n")
            reseal(copied)
            with pytest.raises(Tampered):
                verify(copied, ledger=ledger, replan=replan)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"epsilon": 0.1}, "epsilon is 0.1, but the recorded events give"),
        ({"total_epsilon": 0.1}, "total_epsilon is 0.1, but the recorded events give"),
        ({"delta": 1e-3}, "recorded events give"),
        ({"accountant": Accountant.RDP}, "recorded events give"),
        ({"earlier": ()}, "total_epsilon"),
        ({"unit": "one hospital"}, "unit is 'one hospital'"),
        ({"labels": "public"}, "labels is 'public'"),
        ({"class_sizes": "measured"}, "class_sizes"),
        ({"dataset": "others"}, "dataset is 'others'"),
        ({"stages": (2,)}, "stages"),
    ],
)
def test_a_careful_forger_is_caught(
    made: Made, copied: Path, change: dict[str, Any], reason: str
) -> None:
    rewrite(copied, dataclasses.replace(made[0].statement, **change))
    with pytest.raises(Tampered, match=reason):
        verify(copied)


@pytest.mark.parametrize(
    "change", [{"noise_multiplier": 9.0}, {"bound": 1.0}, {"times": 1}, {"sampling_rate": 0.001}]
)
def test_events_and_epsilon_forged_together_do_not_follow_from_the_recipe(
    made: Made, copied: Path, change: dict[str, Any]
) -> None:
    statement = made[0].statement
    forged = dataclasses.replace(
        statement, events=(dataclasses.replace(statement.events[0], **change),)
    )
    rewrite(copied, repriced(forged))
    assert verify(copied)  # consistent in itself
    with pytest.raises(Tampered, match=r"recipe\.json asks"):
        verify(copied, replan=replan)


def test_a_release_forged_throughout_meets_the_ledger(made: Made, copied: Path) -> None:
    release, _, ledger = made
    event = dataclasses.replace(release.statement.events[0], noise_multiplier=9.0)
    forged = dataclasses.replace(release.statement, events=(event,))
    rewrite(copied, repriced(forged))
    noise = {"noise_multiplier": 9.0}
    edit(copied, "recipe.json", lambda data: data["recipe"]["configuration"].update(noise))
    assert verify(copied, replan=replan)  # nothing inside shows it
    with pytest.raises(Tampered, match="other events than its line"):
        verify(copied, ledger=ledger, replan=replan)


def test_what_the_ledger_knows_better(made: Made, copied: Path, tmp_path: Path) -> None:
    release, _, ledger = made
    statement = release.statement
    alone = dataclasses.replace(statement, earlier=())
    rewrite(copied, dataclasses.replace(alone, total_epsilon=alone.recompute_total()))
    assert verify(copied, replan=replan)
    with pytest.raises(Tampered, match="leaves out earlier runs"):
        verify(copied, ledger=ledger)
    run = {**statement.earlier[0], "by": "somebody"}
    rewrite(copied, dataclasses.replace(statement, earlier=(run,)))
    with pytest.raises(Tampered, match="earlier run that"):
        verify(copied, ledger=ledger)
    rewrite(copied, dataclasses.replace(statement, fingerprint="0" * 32))
    with pytest.raises(Tampered, match="fingerprint"):
        verify(copied, ledger=ledger)
    rewrite(copied, dataclasses.replace(statement, ledger_line="0" * 64))
    with pytest.raises(Tampered, match="has no line"):
        verify(copied, ledger=ledger)
    rewrite(copied, statement)
    with pytest.raises(Tampered, match="has no line"):
        verify(copied, ledger=Ledger(tmp_path / "none.jsonl"))
    edit(copied, "recipe.json", lambda data: data["recipe"]["configuration"].update(seed=5))
    with pytest.raises(Tampered, match="is not the recipe"):
        verify(copied, ledger=ledger)


def test_a_broken_ledger_is_not_the_releases_fault(
    made: Made, pristine: Path, tmp_path: Path
) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(made[2].path.read_bytes().replace(b'"by":"ldpdc"', b'"by":"ldpdd"', 1))
    with pytest.raises(LedgerError, match="line 2"):
        verify(pristine, ledger=Ledger(path))


@pytest.mark.parametrize(
    "change",
    [
        {"private": False},
        {"in_words": "This release is harmless."},
        {"note": "audited by nobody"},
        {"format": 7},
        {"events": []},
        {"events": "none"},
        {"delta": "small"},
        {"epsilon": None},
        {"software": 3},
    ],
)
def test_a_statement_says_only_what_follows(copied: Path, change: dict[str, Any]) -> None:
    edit(copied, "statement.json", lambda data: data.update(change))
    for check in (load, verify):
        with pytest.raises(Tampered, match="statement.json"):
            check(copied)


def test_words_edited_with_new_hashes_are_caught(copied: Path) -> None:
    words = copied / "STATEMENT.md"
    words.write_text(words.read_text().replace("| unit | one record |", "| unit | one house |"))
    reseal(copied)
    with pytest.raises(Tampered, match=r"STATEMENT\.md"):
        verify(copied)


@pytest.mark.parametrize(
    "text",
    ["NaN", "-Infinity", "1e999", '{"format": 1, "format": 2}', "[" * 5000, "3", '"é', "\xff"],
)
@pytest.mark.parametrize("name", ["statement.json", "recipe.json"])
def test_odd_json_is_refused(copied: Path, name: str, text: str) -> None:
    content = (copied / name).read_text().replace('"format": 1', f'"odd": {text}, "format": 1')
    for whole in (content, text):
        (copied / name).write_text(whole, "latin-1")
        reseal(copied)
        with pytest.raises(Tampered, match=name):
            load(copied)


@pytest.mark.parametrize(
    "change",
    [
        {"method": "ldpdx"},
        {"method": 5},
        {"configuration": {"group_size": "many", "noise_multiplier": 2.0}},
        {"configuration": {"noise_multiplier": 2.0, "group_sizes": 5}},
        {"configuration": {"noise_multiplier": -1.0}},
    ],
)
def test_a_recipe_that_cannot_be_planned_is_refused(copied: Path, change: dict[str, Any]) -> None:
    edit(copied, "recipe.json", lambda data: data["recipe"].update(change))
    with pytest.raises(Tampered, match=r"recipe\.json"):
        verify(copied, replan=replan)


def test_tensors_and_pictures_must_agree(made: Made, copied: Path, tmp_path: Path) -> None:
    _, synthetic, _ = made
    good = (copied / "synthetic.safetensors").read_bytes()

    def forged(images: torch.Tensor, labels: torch.Tensor) -> None:
        content = safetensors.torch.save({"images": images, "labels": labels})
        (copied / "synthetic.safetensors").write_bytes(content)
        reseal(copied)

    forged(synthetic.images, synthetic.labels.flip(0))
    with pytest.raises(Tampered, match="other labels"):
        verify(copied)
    forged(-synthetic.images, synthetic.labels)
    with pytest.raises(Tampered, match="the image of row 0"):
        verify(copied)
    forged(synthetic.images.double(), synthetic.labels)
    with pytest.raises(Tampered, match="float32"):
        load(copied)
    forged(synthetic.images[:, :, :5].contiguous(), synthetic.labels)
    with pytest.raises(Tampered, match=r"synthetic\.safetensors"):
        load(copied)
    forged(synthetic.images / 0, synthetic.labels)
    with pytest.raises((Tampered, ReleaseError), match="NaN"):
        load(copied)
    (copied / "synthetic.safetensors").write_bytes(good)
    Image.new("L", (8, 8)).save(copied / "previews" / "cat" / "001.png")
    reseal(copied)
    with pytest.raises(Tampered, match=r"previews/cat/001\.png does not show record 1"):
        verify(copied)
    (copied / "previews" / "cat" / "001.png").write_bytes(b"not a picture")
    reseal(copied)
    with pytest.raises(Tampered, match=r"previews/cat/001\.png"):
        verify(copied)


def test_safetensors_that_are_something_else_are_refused(copied: Path) -> None:
    for name in ("signals.safetensors", "synthetic.safetensors"):
        good = (copied / name).read_bytes()
        torch.save({"a": torch.zeros(1)}, copied / name)
        reseal(copied)
        with pytest.raises(Tampered, match=name):
            load(copied)
        (copied / name).write_bytes(good)


# Writing


def left_beside(place: Path) -> list[str]:
    return sorted(path.name for path in place.parent.iterdir())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.ENOSPC, "No space left on device"), ReleaseError),
        (PermissionError(errno.EACCES, "Permission denied", "/there"), ReleaseError),
    ],
)
@pytest.mark.parametrize("overwriting", [False, True])
def test_an_interrupted_save_leaves_nothing(
    made: Made,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    expected: type[BaseException],
    overwriting: bool,
) -> None:
    release, synthetic, _ = made
    place = tmp_path / "release"
    if overwriting:
        save(place, release)
    before = names(place)
    steps = 0
    stop = 0

    def stopping(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == stop:
                raise error
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", stopping(os.fsync))
        patch.setattr(os, "rename", stopping(os.rename))
        patch.setattr(Path, "mkdir", stopping(Path.mkdir))
        rehearsal = tmp_path / "rehearsal"
        if overwriting:
            shutil.copytree(place, rehearsal)
        save(rehearsal, release, synthetic, overwrite=True)
        shutil.rmtree(rehearsal)
        total = steps  # the last flushes the parent folder, after the rename
        for stop in (1, 8, total - 2, total - 1):
            steps = 0
            with pytest.raises(expected):
                save(place, release, synthetic, overwrite=True)
            assert steps >= stop
            assert left_beside(place) == (["release"] if overwriting else [])
            assert names(place) == before
    save(place, release, synthetic, overwrite=True)
    assert left_beside(place) == ["release"]
    verify(place)


def test_a_full_disk_says_so(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ReleaseError, match="the disk is full"):
        save(tmp_path / "release", made[0])


def test_no_permission_says_where(made: Made, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        with pytest.MonkeyPatch.context() as patch:

            def forbidden(path: Path, *arguments: Any, **options: Any) -> None:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))

            patch.setattr(Path, "mkdir", forbidden)
            with pytest.raises(ReleaseError, match=f"no permission for {tmp_path}"):
                save(tmp_path / "release", made[0])
        return
    tmp_path.chmod(0o500)
    with pytest.raises(ReleaseError, match="no permission"):
        save(tmp_path / "release", made[0])


def test_a_folder_in_use_is_refused(made: Made, tmp_path: Path) -> None:
    release, synthetic, _ = made
    place = tmp_path / "release"
    place.mkdir()
    save(place, release, synthetic)  # an empty folder is free
    with pytest.raises(ReleaseExists, match="not empty"):
        save(place, release)
    save(place, release, overwrite=True)
    assert load(place)[1] is None
    assert left_beside(place) == ["release"]


def test_only_a_release_is_ever_overwritten(made: Made, tmp_path: Path) -> None:
    release, _, _ = made
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "holiday.jpg").write_bytes(b"dear")
    with pytest.raises(ReleaseExists, match="not a release folder"):
        save(photos, release, overwrite=True)
    (photos / "manifest.json").write_text("{}")
    with pytest.raises(ReleaseExists, match="not a release folder"):
        save(photos, release, overwrite=True)
    place = save(tmp_path / "release", release)
    (place / "notes.txt").write_text("mine")
    with pytest.raises(ReleaseExists, match=r"notes\.txt"):
        save(place, release, overwrite=True)
    (place / "notes.txt").unlink()
    (place / "link").symlink_to(photos)
    with pytest.raises(ReleaseExists, match="link"):
        save(place, release, overwrite=True)
    with pytest.raises(ReleaseExists, match="is a file"):
        save(photos / "holiday.jpg", release, overwrite=True)
    assert (photos / "holiday.jpg").read_bytes() == b"dear"


def test_a_damaged_release_can_be_overwritten(made: Made, copied: Path) -> None:
    (copied / "signals.safetensors").unlink()
    (copied / "README.md").write_text("edited")
    save(copied, made[0], made[1], overwrite=True)
    verify(copied)


def test_a_set_of_another_kind_is_refused(made: Made, tmp_path: Path) -> None:
    release, synthetic, _ = made
    other = dataclasses.replace(release.public, classes=("a", "b", "c"))
    with pytest.raises(BadConfiguration, match="synthetic set"):
        save(tmp_path / "r", release, dataclasses.replace(synthetic, public=other))
    with pytest.raises(BadConfiguration, match="labels"):
        wrong = dataclasses.replace(synthetic, labels=synthetic.labels + 1)
        save(tmp_path / "r", release, wrong)
    with pytest.raises(ReleaseError, match="NaN"):
        save(tmp_path / "r", release, dataclasses.replace(synthetic, images=synthetic.images / 0))
    assert list(tmp_path.iterdir()) == []
