"""Every source gives the same records, and meets the same ledger, for the same images."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.pictures import CLASSES, Array, Pictures, every_source
from understudy.data import read, read_heldout
from understudy.data.preparation import Preparation, digest
from understudy.errors import BadConfiguration, DataError, UnknownName
from understudy.privacy.gate import PrivateDataset
from understudy.privacy.public import Adjacency


def opened(data: PrivateDataset) -> tuple[Array, Array, Array]:
    records = data._records
    return np.asarray(records._images), records._labels, records._digests


# One way for all formats


def test_every_source_gives_the_same_records(pictures: Pictures) -> None:
    for name, source in every_source(pictures):
        data = read(source)
        images, labels, digests = opened(data)
        assert images.dtype == np.uint8, name
        np.testing.assert_array_equal(images, pictures.channels_first(), name)
        np.testing.assert_array_equal(labels, pictures.labels, name)
        np.testing.assert_array_equal(digests, digest(pictures.images), name)
        assert labels.dtype == np.int64
        assert data.public.shape == ((3, 9, 7) if pictures.colour else (1, 9, 7))
        assert data.public.counts == (5, 3, 4)
        assert data.public.preparation[-1] == "pixels mapped from [0, 255] to [-1, 1]"


def test_preparation_changes_records_alike_and_digests_never(pictures: Pictures) -> None:
    expected: Array | None = None
    for name, source in every_source(pictures):
        data = read(source, resize=(4, 6), grayscale=True)
        images, _, digests = opened(data)
        expected = images if expected is None else expected
        np.testing.assert_array_equal(images, expected, name)
        np.testing.assert_array_equal(digests, digest(pictures.images), name)
        assert data.public.shape == (1, 4, 6)
        assert data.public.preparation[-3:] == (
            "converted to grayscale",
            "images resized to 4 x 6 (bilinear)",
            "pixels mapped from [0, 255] to [-1, 1]",
        )


def test_numbers_that_are_pixels_in_disguise_meet_the_same_ledger(pictures: Pictures) -> None:
    exact = pictures.images.astype(np.float32)
    disguises = [
        (exact / 255, (0, 1)),
        (exact / 127.5 - 1, (-1, 1)),
        (exact, (0, 255)),
        (pictures.images.astype(np.int64), (0, 255)),
        (exact.astype(np.float64) / 255, (0, 1)),
    ]
    plain = read((pictures.images, pictures.labels))
    for values, value_range in disguises:
        data = read((values, pictures.labels), value_range=value_range)
        images, _, digests = opened(data)
        assert images.dtype == np.float32
        np.testing.assert_allclose(images, opened(plain)[0] / 127.5 - 1, atol=1e-6)
        np.testing.assert_array_equal(digests, opened(plain)[2])
        low, high = value_range
        said = f"values mapped from [{low}, {high}] to [-1, 1]"
        assert data.public.preparation == (said,)


def test_other_numbers_are_digested_as_they_are(grey: Pictures) -> None:
    values = np.random.default_rng(0).uniform(0, 1, (12, 9, 7)).astype(np.float32)
    one = read((values, grey.labels), value_range=(0, 1))
    two = read((values, grey.labels), value_range=(0, 2), resize=3)
    np.testing.assert_array_equal(opened(one)[2], opened(two)[2])
    assert len(np.unique(opened(one)[2], axis=0)) == 12


def test_grey_images_saved_in_colour_meet_the_same_ledger(grey: Pictures) -> None:
    coloured = np.repeat(grey.images[..., None], 3, axis=3)
    data = read((coloured, grey.labels))
    assert data.public.shape == (3, 9, 7)
    np.testing.assert_array_equal(opened(data)[2], digest(grey.images))


def test_labels_order_and_classes_do_not_change_the_ledger(grey: Pictures) -> None:
    order = np.random.default_rng(1).permutation(12)
    one = read((grey.images, grey.labels))
    two = read((grey.images[order], (np.arange(12) % 2)))
    assert one._records._fingerprint() == two._records._fingerprint()
    other = read((grey.images[:11], grey.labels[:11]))
    assert one._records._fingerprint() != other._records._fingerprint()


def test_digests_do_not_confuse_shapes_or_neighbours() -> None:
    flat = np.arange(12, dtype=np.uint8)
    shapes = [(3, 4), (4, 3), (2, 6), (2, 2, 3)]
    digests = [digest(flat.reshape(1, *shape)).tobytes() for shape in shapes]
    assert len(set(digests)) == len(shapes)
    near = np.zeros((2, 3, 3), np.float32)
    near[1, 0, 0] = 1e-6
    assert digest(near)[0].tobytes() != digest(near + 0.1)[0].tobytes()
    assert np.array_equal(digest(near[:1]), digest(near[:1].astype(np.float64)))


# Declarations


def test_public_facts_are_those_declared(grey: Pictures) -> None:
    data = read(
        grey.to_folder(),
        adjacency="replace",
        unit="one patient",
        labels="public",
        name="scans",
        counts="private",
    )
    public = data.public
    assert (public.name, public.unit, public.labels) == ("scans", "one patient", "public")
    assert public.adjacency is Adjacency.REPLACE
    assert public.counts is None
    assert public.classes == CLASSES
    assert read(grey.folder / "f").public.name == "f"


def test_declared_counts_are_taken_and_stated(grey: Pictures) -> None:
    data = read((grey.images, grey.labels), counts=(6, 4, 4))
    assert data.public.counts == (6, 4, 4)
    assert "class sizes declared by the data holder, not counted" in data.public.preparation


def test_class_names(grey: Pictures) -> None:
    pair = (grey.images, grey.labels)
    assert read(pair).public.classes == ("0", "1", "2")
    assert read(pair, classes=CLASSES).public.classes == CLASSES
    assert read(grey.to_parquet()).public.classes == CLASSES
    # Named classes are matched by name, numbered ones by position.
    reordered = read(grey.to_folder(), classes=("owl", "cat", "dog"))
    assert reordered.public.classes == ("owl", "cat", "dog")
    assert reordered.public.counts == (4, 5, 3)
    digits = read(grey.to_folder(names=("0", "1", "2"), below="g"), classes=CLASSES)
    assert digits.public.classes == CLASSES
    named = read((grey.images, np.array(CLASSES)[grey.labels]))
    assert named.public.classes == CLASSES


def test_names_of_arrays_columns_and_files_can_be_given(grey: Pictures) -> None:
    path = grey.to_npz(images="scan", labels="finding")
    with pytest.raises(DataError, match=r"'finding', 'scan'.*image=\.\.\. and label="):
        read(path)
    assert read(path, image="scan", label="finding").public.counts == (5, 3, 4)
    with pytest.raises(UnknownName, match="Did you mean 'scan'"):
        read(path, image="scam", label="finding")
    np.save(grey.folder / "x.npy", grey.images)
    np.save(grey.folder / "y.npy", grey.labels)
    assert read(grey.folder / "x.npy", label="y.npy").public.counts == (5, 3, 4)
    single = grey.to_idx() / "train-images-idx3-ubyte"
    assert read(single).public.counts == (5, 3, 4)


def test_splits(grey: Pictures) -> None:
    other = Pictures(grey.folder, False, seed=1)
    grey.to_folder(below="s/train")
    other.to_folder(below="s/test")
    folder = grey.folder / "s"
    np.savez(
        grey.folder / "s.npz",
        train_images=grey.images,
        train_labels=grey.labels,
        test_images=other.images,
        test_labels=other.labels,
    )
    grey.to_idx()
    other.to_idx(split="t10k")
    hub = grey.folder / "hub" / "data"
    hub.mkdir(parents=True)
    grey.to_parquet().rename(hub / "train-00000-of-00001.parquet")
    other.to_parquet().rename(hub / "test-00000-of-00001.parquet")
    for source in (folder, grey.folder / "s.npz", grey.folder / "idx", hub.parent):
        train, test = read(source), read(source, split="test")
        np.testing.assert_array_equal(opened(train)[2], digest(grey.images))
        np.testing.assert_array_equal(opened(test)[2], digest(other.images))
        held_out = read_heldout(source, like=train.public)
        np.testing.assert_array_equal(held_out.labels, other.labels)
        with pytest.raises(DataError, match="no split 'validation'"):
            read(source, split="validation")
    with pytest.raises(DataError, match="split='test' means nothing"):
        read(folder / "train", split="test")


def test_what_the_datasets_library_writes(colour: Pictures) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))}
    )
    items = [
        {"image": Image.fromarray(image), "label": int(label)}
        for image, label in zip(colour.images, colour.labels, strict=True)
    ]
    made = datasets.Dataset.from_list(items, features=features)
    made.to_parquet(str(colour.folder / "train.parquet"))
    made.save_to_disk(str(colour.folder / "saved"))
    for source in (colour.folder / "train.parquet", colour.folder / "saved", made):
        data = read(source)
        assert data.public.classes == CLASSES
        np.testing.assert_array_equal(opened(data)[0], colour.channels_first())
        np.testing.assert_array_equal(opened(data)[2], digest(colour.images))


def test_a_pytorch_dataset_of_numbers(colour: Pictures) -> None:
    tensors = torch.from_numpy(colour.channels_first()).float() / 255
    dataset = torch.utils.data.TensorDataset(tensors, torch.from_numpy(colour.labels))
    data = read(dataset, value_range=(0, 1))
    np.testing.assert_array_equal(opened(data)[2], digest(colour.images))
    np.testing.assert_allclose(opened(data)[0], tensors * 2 - 1, atol=1e-6)


def test_rows_of_numbers(grey: Pictures) -> None:
    rows = grey.images.reshape(12, -1)
    data = read((rows, grey.labels))
    assert data.public.shape == (63,)
    np.testing.assert_allclose(opened(data)[0], rows / 127.5 - 1, atol=1e-6)


def test_paletted_transparent_and_deep_files(tmp_path: Path, colour: Pictures) -> None:
    folder = colour.to_folder()
    for number, mode in enumerate(("P", "RGBA", "CMYK")):
        file = sorted(folder.rglob("*.png"))[number]
        Image.open(file).convert(mode).save(file.with_suffix(".tiff"))
        file.unlink()
    assert read(folder).public.shape == (3, 9, 7)


def test_hidden_files_are_no_records(grey: Pictures) -> None:
    folder = grey.to_folder()
    (folder / ".DS_Store").write_bytes(b"x")
    (folder / "cat" / "._00.png").write_bytes(b"x")
    (folder / "cat" / "notes.txt").write_text("x")
    (folder / "README.md").write_text("x")
    assert read(folder).public.counts == (5, 3, 4)


# Memory


def test_an_array_file_is_mapped_never_loaded(grey: Pictures) -> None:
    for source in (grey.to_npy(), grey.to_idx()):
        images = read(source)._records._images
        while images.base is not None and not isinstance(images, np.memmap):
            images = images.base
        assert isinstance(images, np.memmap)
        assert images.filename is not None


def test_beyond_the_limit_records_lie_in_a_file_without_a_name(
    pictures: Pictures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    data = read(pictures.to_folder(), memory_limit=100)
    assert isinstance(data._records._images, np.memmap)
    assert list(scratch.iterdir()) == []
    np.testing.assert_array_equal(opened(data)[0], pictures.channels_first())
    packed = read(pictures.to_idx(packed=True), memory_limit=100) if not pictures.colour else data
    np.testing.assert_array_equal(opened(packed)[0], pictures.channels_first())


def test_progress_is_told(grey: Pictures) -> None:
    told: list[tuple[int, int, str]] = []
    read(grey.to_folder(), progress=lambda *step: told.append(step))
    assert told[-1][:2] == (12, 12)
    assert len(told) == 12


# Held-out data


def test_held_out_data_is_prepared_like_the_private(pictures: Pictures) -> None:
    public = read(pictures.to_folder(), resize=5, grayscale=True).public
    held_out = read_heldout((pictures.images, pictures.labels), like=public)
    assert held_out.images.dtype == torch.float32
    assert held_out.images.shape == (12, 1, 5, 5)
    assert held_out.classes == CLASSES
    assert len(held_out) == 12
    private = torch.from_numpy(opened(read(pictures.folder / "f", resize=5, grayscale=True))[0])
    torch.testing.assert_close(held_out.images, private / 127.5 - 1)


def test_held_out_data_must_match(pictures: Pictures) -> None:
    public = read(pictures.to_folder()).public
    with pytest.raises(DataError, match=r"test records have shape \([13], 7, 9\)"):
        read_heldout((np.swapaxes(pictures.images, 1, 2), pictures.labels), like=public)
    with pytest.raises(DataError, match=r"labels must lie in 0\.\.2"):
        read_heldout((pictures.images, pictures.labels + 1), like=public)
    strange = pictures.to_folder(names=("cat", "dog", "yak"), below="g")
    with pytest.raises(DataError, match="'yak' is not among the declared"):
        read_heldout(strange, like=public)
    # A test set need not have every class.
    some = read_heldout((pictures.images[:5], pictures.labels[:5]), like=public)
    assert some.labels.tolist() == [0] * 5


def test_preparation_is_recalled_from_its_sentences() -> None:
    for declared in (
        Preparation(),
        Preparation(resize=(4, 6), grayscale=True),
        Preparation(value_range=(-0.5, 1e-7)),
        Preparation(value_range=(0.0, 65535.0), resize=(1, 2)),
    ):
        sentences = declared.sentences(np.zeros(0, np.float32))
        assert Preparation.recall(sentences) == declared
    pixels = Preparation(grayscale=True)
    assert Preparation.recall(pixels.sentences(np.zeros(0, np.uint8))) == pixels


@pytest.mark.parametrize(
    "wrong",
    [
        {"resize": 0},
        {"resize": (1, 2, 3)},
        {"value_range": (1, 0)},
        {"value_range": (0, float("nan"))},
        {"adjacency": "nearby"},
        {"counts": "secret"},
        {"labels": "hidden"},
        {"classes": ("a", "a", "b")},
        {"classes": "abc"},
    ],
)
def test_declarations_that_make_no_sense(grey: Pictures, wrong: dict[str, Any]) -> None:
    with pytest.raises(BadConfiguration):
        read((grey.images, grey.labels), **wrong)
