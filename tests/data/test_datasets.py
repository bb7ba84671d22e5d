"""Named datasets are found where they lie, and an absent one says how to get it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.pictures import Pictures
from understudy.data import DATASETS, load, load_heldout, open_data, open_heldout
from understudy.data.datasets import VARIABLE
from understudy.errors import BadConfiguration, DataError, DatasetAbsent, UnknownName


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hide whatever this machine has."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "nothing"))
    work = tmp_path / "a" / "b"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    return work


def test_the_table_is_complete() -> None:
    assert list(DATASETS) == [
        "digits",
        "mnist",
        "fashion-mnist",
        "cifar10",
        "celeba",
        "celeba-hair",
        "adult",
        "pneumoniamnist",
    ]
    for name, card in DATASETS.items():
        assert card.name == name
        assert all((card.description, card.licence, card.citation, card.get, card.splits))
        assert card.folders == () or card.marks
        assert len(card.classes) >= 2


def test_digits() -> None:
    data, held_out = load("digits"), load_heldout("digits")
    assert data.public.shape == (1, 8, 8) == DATASETS["digits"].shape
    assert data.public.size == 1438
    assert len(held_out) == 359
    assert data.public.preparation == ("values mapped from [0, 16] to [-1, 1]",)
    assert [float(end) for end in held_out.images.aminmax()] == [-1, 1]
    same = load_heldout("digits", like=data.public)
    torch.testing.assert_close(same.images, held_out.images)
    larger = load("digits", resize=16)
    assert larger.public.shape == (1, 16, 16)
    assert load_heldout("digits", like=larger.public).images.shape == (359, 1, 16, 16)
    assert load_heldout("digits", resize=16).images.shape == (359, 1, 16, 16)
    assert (larger._records._digests == data._records._digests).all()


def test_absent_says_where_it_looked_and_how_to_get_it(nowhere: Path) -> None:
    for name, card in DATASETS.items():
        if not card.folders or card.place is not None:  # Debian's lies in /usr/share/datasets
            continue
        with pytest.raises(DatasetAbsent) as caught:
            load(name)
        message = str(caught.value)
        assert card.get in message
        for place in (str(nowhere.parents[1] / "nothing"), "data", "../shared/data", "/usr/share"):
            assert place in message
        with pytest.raises(DatasetAbsent, match="looked in elsewhere"):
            load(name, path="elsewhere")


def test_open_data(nowhere: Path, grey: Pictures) -> None:
    assert open_data("digits", resize=None).public.name == "digits"
    assert open_data(str(grey.to_npz()), label=None).public.counts == (5, 3, 4)
    with pytest.raises(UnknownName, match=r"Did you mean 'mnist'\?.*A path looks like"):
        open_data("mnits")
    with pytest.raises(DataError, match=r"'?no/such.npz'? does not exist"):
        open_data("no/such.npz")
    with pytest.raises(BadConfiguration, match=r"write '\./digits'"):
        open_data("digits", label="y")
    public = open_data("digits").public
    assert len(open_heldout("digits", like=public)) == 359
    with pytest.raises(UnknownName):
        open_heldout("digit", like=public)
    held_out = open_heldout(grey.to_npz(), like=open_data(grey.to_npz()).public)
    assert len(held_out) == 12
    with pytest.raises(UnknownName):
        load("mnits")
    with pytest.raises(DataError, match="has the splits train, test"):
        load("digits", split="validation")


def test_a_path_that_nearly_exists(grey: Pictures) -> None:
    path = grey.to_npz()
    with pytest.raises(DataError, match=r"Did you mean '.*a\.npz'"):
        open_data(str(path.with_name("b.npz")))


def test_idx_layouts(nowhere: Path, grey: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    grey.to_idx(packed=True)
    data = nowhere / "data"
    data.mkdir()
    (grey.folder / "gz").rename(data / "fashion-mnist")
    with pytest.raises(DataError, match="class 'Dress' has no records"):
        load("fashion-mnist")
    grey.labels = np.arange(12) % 10
    (data / "fashion-mnist").rename(grey.folder / "gz")
    grey.to_idx(packed=True)
    public = load("fashion-mnist", path=grey.folder / "gz").public
    assert public.classes[9] == "Ankle boot"
    (grey.folder / "gz").rename(grey.folder / "mnist")
    monkeypatch.setenv(VARIABLE, f"{nowhere}:{grey.folder}")
    assert load("mnist").public.classes[9] == "9"
    assert DATASETS["mnist"].place == grey.folder / "mnist"


def test_cifar10_layouts_agree(nowhere: Path) -> None:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (20, 3, 32, 32)).astype(np.uint8)
    labels = np.arange(20, dtype=np.uint8) % 10
    binary, pictures = nowhere / "data" / "cifar-10-batches-bin", nowhere / "data" / "cifar10"
    binary.mkdir(parents=True)
    pictures.mkdir()
    for batch in range(5):
        part = slice(4 * batch, 4 * batch + 4)
        rows = np.concatenate([labels[part, None], images[part].reshape(4, -1)], axis=1)
        (binary / f"data_batch_{batch + 1}.bin").write_bytes(rows.tobytes())
        lines = np.moveaxis(images[part], 1, 3).reshape(4, 1024, 3)
        Image.fromarray(lines).save(pictures / f"data_batch_{batch + 1}.png")
    (pictures / "train_lables.json").write_text(json.dumps(labels.tolist()))
    for path in (binary, pictures):
        data = load("cifar10", path=path)
        np.testing.assert_array_equal(data._records._images, images)
        np.testing.assert_array_equal(data._records._labels, labels)
        assert data.public.classes[0] == "airplane"
    assert load("cifar10").public.counts == (2,) * 10
    (binary / "data_batch_1.bin").write_bytes(b"123")
    with pytest.raises(DataError, match="is truncated"):
        load("cifar10", path=binary)
    (pictures / "train_lables.json").write_text("[1, 2")
    with pytest.raises(DataError, match="is damaged"):
        load("cifar10", path=pictures)


def test_real_mnist(shared_data: Path) -> None:
    data = load("mnist", path=shared_data)
    assert data.public.counts == (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
    held_out = load_heldout("mnist", path=shared_data, like=data.public)
    assert held_out.images.shape == (10000, 1, 28, 28)
    assert held_out.labels.bincount().tolist()[:3] == [980, 1135, 1032]


def test_real_adult(shared_data: Path) -> None:
    data = load("adult", path=shared_data)
    assert data.public.counts == (24720, 7841)
    assert data.public.classes == ("<=50K", ">50K")
    assert data.public.shape == DATASETS["adult"].shape
    cells = data._records._images
    assert np.abs(cells).max() <= 1
    # Every cell but "?" is a declared category: one-hot blocks of complete columns sum to one.
    first = 0
    missing = {}
    for column in data.public.columns:
        block = cells[:, first : first + column.width]
        if column.kind == "categorical":
            missing[column.name] = int((block.sum(axis=1) == 0).sum())
        first += column.width
    assert {name: n for name, n in missing.items() if n} == {
        "workclass": 1836,
        "occupation": 1843,
        "native-country": 583,
    }
    held_out = load_heldout("adult", path=shared_data)
    assert held_out.labels.bincount().tolist() == [12435, 3846]


def test_real_celeba(shared_data: Path) -> None:
    gender = load_heldout("celeba", path=shared_data, resize=32)
    hair = load_heldout("celeba-hair", path=shared_data)
    assert gender.images.shape == (2000, 3, 32, 32)
    assert gender.labels.bincount().tolist() == [1316, 684]
    assert hair.images.shape == (2000, 3, 64, 64)
    assert hair.labels.bincount().tolist() == [966, 426, 608]


def test_real_pneumoniamnist(shared_data: Path) -> None:
    assert load("pneumoniamnist", path=shared_data).public.counts == (1214, 3494)
    assert load("pneumoniamnist", split="validation", path=shared_data).public.size == 524
    assert len(load_heldout("pneumoniamnist", path=shared_data)) == 624
