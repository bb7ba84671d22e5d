"""Bad input gets an error that says which file, what was found, and what would work."""

from __future__ import annotations

import gzip
import io
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from tests.data.pictures import Items, Pictures
from understudy.data import read
from understudy.errors import DataError, UnknownName


def refused(source: Any, match: str, **options: Any) -> str:
    """Read, expect a DataError, and return its message, which can be printed anywhere."""
    with pytest.raises(DataError, match=match) as caught:
        read(source, **options)
    message = str(caught.value)
    message.encode("utf-8")
    assert message.endswith((".", "?", "png", "npz"))
    return message


# Folders of images


def broken(data: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "text": b"this is no image",
        "truncated": data[: len(data) // 2],
        "head only": data[:24],
        "flipped": data[:60] + bytes([data[60] ^ 0xFF]) + data[61:],
    }


@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "webp", "bmp", "tiff"])
def test_unreadable_images(tmp_path: Path, kind: str) -> None:
    p = Pictures(tmp_path, True)
    folder = p.to_folder(kind)
    for name, data in broken(p.png(1, kind)).items():
        if name == "flipped" and kind != "png":
            continue  # only PNG has checksums
        (folder / "cat" / f"01.{kind}").write_bytes(data)
        message = refused(folder, rf"cat/01\.{kind} is not a readable image|claims to have")
        assert "empty" in message or name != "empty"


def test_mixed_sizes(grey: Pictures) -> None:
    folder = grey.to_folder()
    Image.new("L", (20, 30)).save(folder / "dog" / "06.png")
    message = refused(folder, r"00\.png is 9 x 7 grey .*06\.png is 30 x 20 grey")
    assert "--resize 32" in message
    assert "--grayscale" not in message
    assert read(folder, resize=8).public.shape == (1, 8, 8)


def test_mixed_modes(grey: Pictures) -> None:
    folder = grey.to_folder()
    Image.new("RGB", (7, 9)).save(folder / "dog" / "06.png")
    message = refused(folder, "Grey and colour images are mixed: declare --grayscale")
    assert "--resize" not in message
    Image.new("RGB", (5, 5)).save(folder / "dog" / "06.png")
    assert "--resize" not in refused(folder, "Grey and colour", resize=8)
    Image.new("RGB", (7, 9)).save(folder / "dog" / "06.png")
    assert read(folder, grayscale=True).public.shape == (1, 9, 7)


def test_deep_pixels(grey: Pictures) -> None:
    folder = grey.to_folder()
    Image.fromarray(np.zeros((9, 7), np.uint16)).save(folder / "cat" / "00.png")
    refused(folder, r"mode I;16.*value_range=\(0, 65535\)")


def test_missing_classes(grey: Pictures, tmp_path: Path) -> None:
    folder = grey.to_folder()
    (folder / "yak").mkdir()
    refused(folder, "yak: this class is empty, there are no images")
    (folder / "yak" / "a.dcm").write_bytes(b"x")
    refused(folder, "it has 1 other files, such as 'a.dcm'")
    refused(folder / "cat", "has 0 subfolders and images outside of any")
    one = tmp_path / "one"
    one.mkdir()
    refused(one, "has 0 subfolders. Put the images of each class")
    (folder / "cat").rename(one / "cat")
    refused(one, "has 1 subfolder. Put")
    (one / "labels.csv").write_text("x")
    refused(one, "Or read its table: '.*labels.csv'")


def test_images_without_a_class(grey: Pictures) -> None:
    folder = grey.to_folder()
    (folder / "stray.png").write_bytes(grey.png(0))
    refused(folder, "images outside of its class subfolders")


def test_undeclared_classes(grey: Pictures) -> None:
    refused(grey.to_folder(), "class 'owl' is not among", classes=("cat", "dog"))
    refused(grey.to_folder(), "'yak' has no records", classes=("cat", "dog", "owl", "yak"))


def test_names_that_are_not_utf8(grey: Pictures) -> None:
    folder = os.fsencode(grey.to_folder())
    try:
        os.rename(folder + b"/cat", folder + b"/c\xe4t")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    os.rename(folder + b"/dog/05.png", folder + b"/dog/\xff.png")
    public = read(folder).public
    assert public.classes == ("c\\xe4t", "dog", "owl")
    public.name.encode()
    with open(folder + b"/dog/\xff.png", "wb"):
        pass
    assert r"\xff.png" in refused(folder, "is empty")
    os.rename(folder, os.fsencode(grey.folder) + b"/d\xe4ta")
    assert r"d\xe4ta" in refused(os.fsencode(grey.folder) + b"/d\xe4ta", "is empty")
    refused(os.fsencode(grey.folder) + b"/n\xe4", r"n\\xe4 does not exist")
    table = grey.to_parquet()
    os.rename(os.fsencode(table), os.fsencode(grey.folder) + b"/\xe4.parquet")
    assert read(os.fsencode(grey.folder) + b"/\xe4.parquet").public.name == r"\xe4"


def test_links(grey: Pictures) -> None:
    folder = grey.to_folder()
    inside = folder / "cat" / "loop"
    inside.symlink_to(folder)
    refused(folder, "loop loops back to a folder it lies in")
    inside.unlink()
    inside.symlink_to(inside)
    refused(folder, "is a symlink loop")
    inside.unlink()
    inside.symlink_to(folder / "dog")
    refused(folder, "Links to folders are not followed")
    inside.unlink()
    gone = folder / "cat" / "gone.png"
    gone.symlink_to(folder / "nowhere.png")
    refused(folder, r"gone\.png is a link to a file that does not exist")
    gone.unlink()
    # A link to a file is a file, and the source itself may be a link.
    real = folder / "cat" / "00.png"
    real.rename(grey.folder / "real.png")
    real.symlink_to(grey.folder / "real.png")
    (grey.folder / "link").symlink_to(folder)
    assert read(grey.folder / "link").public.counts == (5, 3, 4)
    (grey.folder / "round").symlink_to(grey.folder / "round")
    refused(grey.folder / "round", "symlink loop")
    (grey.folder / "void").symlink_to(grey.folder / "nowhere")
    refused(grey.folder / "void", "a link to something that does not exist")


def test_things_that_are_no_files(grey: Pictures) -> None:
    folder = grey.to_folder()
    os.mkfifo(folder / "cat" / "pipe.png")
    refused(folder, r"pipe\.png is not a regular file")
    os.mkfifo(grey.folder / "pipe.npz")
    refused(grey.folder / "pipe.npz", "neither a file nor a folder")


@pytest.fixture
def nobody() -> Iterator[Callable[[], None]]:
    """Become somebody whom permissions bind: root may read anything."""
    me = os.geteuid()
    yield lambda: os.seteuid(65534) if me == 0 else None
    os.seteuid(me)


def test_no_permission(nobody: Callable[[], None]) -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are closed to nobody
        Path(place).chmod(0o755)
        grey = Pictures(Path(place), False)
        folder, table = grey.to_folder(), grey.to_parquet()
        read(folder)  # now everything is imported
        read(table)
        (folder / "cat" / "00.png").chmod(0)
        table.chmod(0)
        nobody()
        refused(table, r"t\.parquet: no permission to read it")
        refused(folder, r"cat/00\.png: no permission to read it")
        os.seteuid(os.getuid())
        (folder / "dog").chmod(0)
        nobody()
        refused(folder, "dog: no permission to read it")
        os.seteuid(os.getuid())
        (folder / "dog").chmod(0o755)


# Bombs


def png_claiming(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [9_000, 12_000, 60_000])
def test_an_image_bomb(grey: Pictures, side: int) -> None:
    folder = grey.to_folder()
    (folder / "cat" / "00.png").write_bytes(png_claiming(side, side))
    refused(folder, "as a decompression bomb does")


def test_a_zip_bomb(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, images=np.zeros((2000, 32, 32), np.uint8), labels=np.arange(2000) % 2)
    assert path.stat().st_size < 20_000
    refused(path, "unpacks to 2.0 MiB, more than the memory limit", memory_limit=2**20)


def test_a_gzip_bomb(tmp_path: Path, grey: Pictures) -> None:
    folder = grey.to_idx(packed=True)
    images = folder / "train-images-idx3-ubyte.gz"
    head = b"\0\0\x08\x03" + np.array([12, 9, 7], ">u4").tobytes()
    images.write_bytes(gzip.compress(head + bytes(2**24)))
    refused(folder, "is longer than its header says")
    images.write_bytes(gzip.compress(b"\0\0\x08\x03" + np.array([2**31] * 3, ">u4").tobytes()))
    refused(folder, "is truncated: its header promises")


# Arrays


def saved(path: Path, **arrays: Any) -> Path:
    np.savez(path / "a.npz", **arrays)
    return path / "a.npz"


X = np.random.default_rng(0).integers(0, 256, (6, 5, 4)).astype(np.uint8)
Y = np.arange(6) % 2


@pytest.mark.parametrize(
    ("images", "labels", "match"),
    [
        (X, Y[:5], "6 images but 5 labels"),
        (X, Y * 0, "one class, '0'"),
        (X, Y * 2, "class '1' has no records"),
        (X, Y * 10**9, "only 6 records, so some classes would be empty"),
        (X, Y - 1, r"labels must lie in .*found -1.*usually marks"),
        (X, Y * 0.5, "labels are fractions or NaN"),
        (X, Y * np.nan, "labels are fractions or NaN"),
        (X, np.eye(2)[Y], "One-hot labels become numbers"),
        (X, Y.astype(np.complex64), "not class numbers"),
        (X, Y.astype(np.uint64) + np.uint64(2**63), "is not a class number"),
        (X[:0], Y[:0], "there are no records"),
        (X[0, 0], Y[:4], "Expected .records, height, width."),
        (np.zeros((6, 5, 4, 2), np.uint8), Y, "with 1 or 3 channels"),
        (np.zeros((6, 2, 2, 2, 2), np.uint8), Y, "Expected .records, height, width."),
        (X.astype("S1"), Y, r"has type \|S1"),
        (X / 255, Y, "whose range is not known. Declare it"),
        (X.astype(np.int32), Y, "whose range is not known"),
        (np.array(list("abcdef"), object), Y, "which only unpickling could read"),
        (np.zeros(6, [("a", "u1")]), Y, "structured array"),
    ],
)
def test_arrays(tmp_path: Path, images: Any, labels: Any, match: str) -> None:
    refused(saved(tmp_path, images=images, labels=labels), match)
    if "pickl" not in match and "structured" not in match:
        refused((images, labels), match)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_not_finite(wrong: float) -> None:
    values = X / 255
    values[3, 2, 1] = wrong
    refused((values, Y), "NaN or infinite", value_range=(0, 1))
    items = Items((value, int(label)) for value, label in zip(values, Y, strict=True))
    refused(items, "item 3 of the Items: there are values that are NaN", value_range=(0, 1))


def test_values_outside_the_range_are_not_shown() -> None:
    message = refused((X / 7.0, Y), r"outside the declared range \[0, 1\]", value_range=(0, 1))
    assert str((X / 7.0).max())[:4] not in message


def test_damaged_arrays(tmp_path: Path) -> None:
    path = saved(tmp_path, images=X, labels=Y)
    whole = path.read_bytes()
    for data in (
        whole[:200],
        whole[:-30],
        b"",
        b"nonsense",
        whole.replace(b"'shape': (6, 5", b"'shape': (9, 9"),
    ):
        path.write_bytes(data)
        refused(path, "not a readable .npz file|does not fit its size")
    np.save(tmp_path / "images.npy", X)
    np.save(tmp_path / "labels.npy", Y)
    path.unlink()
    good = (tmp_path / "images.npy").read_bytes()
    for data, match in (
        (good[:-1], "does not fit its size"),
        (good[:20], "not a readable .npy array"),
        (b"", "not a readable .npy array"),
    ):
        (tmp_path / "images.npy").write_bytes(data)
        refused(tmp_path, match)


def test_no_pickle_is_ever_opened(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {tmp_path}/sprung",)

    np.save(tmp_path / "images.npy", np.array([Trap()] * 4, object), allow_pickle=True)
    np.save(tmp_path / "labels.npy", Y[:4])
    refused(tmp_path, "which only unpickling could read")
    (tmp_path / "x.pkl").write_bytes(b"x")
    refused(tmp_path / "x.pkl", "is a pickle, which can run code and is never opened")
    assert not (tmp_path / "sprung").exists()


def test_names_that_fit_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path, pictures=X, labels=Y)
    refused(path, "has 'labels', 'pictures', none of which is known as images")
    refused(path, "has no splits", split="test")
    with pytest.raises(UnknownName, match="Did you mean 'pictures'"):
        read(path, image="picture")
    refused(tmp_path / "a.xyz", "Did you mean '.*a.npz'")
    (tmp_path / "b.xyz").write_text("x")
    refused(tmp_path / "b.xyz", r"files of type '\.xyz' cannot be read")
    (tmp_path / "c.png").write_text("x")
    refused(tmp_path / "c.png", "One image is not a dataset")
    np.save(tmp_path / "d.npy", X)
    refused(tmp_path / "d.npy", "Name the file of labels")
    refused(tmp_path / "d.npy", "named as the file of labels, does not exist", label="e.npy")
    refused("a\0b", "is not a file name")
    refused(7, "Cannot read records from a int")


def test_encrypted_archives(tmp_path: Path) -> None:
    path = saved(tmp_path, images=X, labels=Y)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            data[info.header_offset + 6] |= 1
    start = data.find(b"PK\x01\x02")
    while start >= 0:
        data[start + 8] |= 1
        start = data.find(b"PK\x01\x02", start + 1)
    path.write_bytes(data)
    refused(path, "not a readable .npz file")


# IDX


def test_damaged_idx(grey: Pictures) -> None:
    folder = grey.to_idx()
    images = folder / "train-images-idx3-ubyte"
    good = images.read_bytes()
    for data, match in (
        (good[:-1], "is truncated: its header promises 756 bytes"),
        (good + b"x", "is longer than its header says"),
        (b"PK" + good, "is not an IDX file: it starts with 50 4b 00 00"),
        (good[:9], "has 3 dimensions"),
        (b"", "is not an IDX file"),
    ):
        images.write_bytes(data)
        refused(folder, match)
    packed = grey.to_idx(packed=True)
    whole = packed / "train-images-idx3-ubyte.gz"
    data = whole.read_bytes()
    for broken_data in (data[: len(data) // 2], data[:-4] + b"abcd", b"", good):
        whole.write_bytes(broken_data)
        refused(packed, "truncated or damaged|not an IDX file|is truncated")
    (folder / "train-labels-idx1-ubyte").unlink()
    images.write_bytes(good)
    refused(folder, "but not the labels that belong to it")
    refused(images, "Name the file of labels")


# Tables of images


def test_tables_of_images(grey: Pictures) -> None:
    table = grey.to_csv()
    lines = table.read_text().splitlines()
    table.write_text("\n".join([*lines, "png/none.png,cat"]) + "\n")
    refused(table, r"none\.png does not exist")
    table.write_text("\n".join([*lines, ",cat"]) + "\n")
    refused(table, "row 12 has no image path")
    table.write_text("\n".join(lines))
    with pytest.raises(UnknownName, match="Did you mean 'label'"):
        read(table, label="labels")
    with pytest.raises(UnknownName, match="Did you mean 'file_name'"):
        read(table, image="filename")


def test_images_in_a_table(grey: Pictures) -> None:
    cells = [{"bytes": grey.png(i), "path": None} for i in range(12)]
    cells[4]["bytes"] = b"no image"
    pa.parquet.write_table(
        pa.table({"image": cells, "label": grey.labels}), grey.folder / "t.parquet"
    )
    refused(grey.folder / "t.parquet", r"t\.parquet, row 4 is not a readable image")
    cells[4] = {"bytes": None, "path": None}
    pa.parquet.write_table(
        pa.table({"image": cells, "label": grey.labels}), grey.folder / "t.parquet"
    )
    refused(grey.folder / "t.parquet", "row 4: column 'image' has no image there")


# Datasets and resources


def test_datasets_that_misbehave(grey: Pictures) -> None:
    class Raises(Items):
        def __getitem__(self, number: Any) -> Any:
            raise RuntimeError("disk on fire")

    refused(Raises([1, 2]), r"item 0 of the Raises cannot be read: RuntimeError\('disk on fire'\)")
    refused(Items([1, 2]), "is a int; expected a pair")
    refused(Items([(X[0], [1, 2]), (X[1], 1)]), "has 2 labels; expected one")
    refused(([[1], [2, 3]], [0, 1]), "A list does not form an array")
    refused(Items([]), "there are no records")
    refused(Items([(X[0], 0), (X[1] / 255, 1)]), "whose range is not known")
    mixed = Items([(X[0], 0), (X[1, :3], 1)])
    refused(mixed, "item 0 of the Items is 5 x 4 grey .* item 1 of the Items is 3 x 4 grey")


def test_a_full_disk(grey: Pictures, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = sorted(tmp_path.iterdir())
    folder = grey.to_folder()
    refused(folder, "has no room for them. Set TMPDIR", memory_limit=10)
    assert sorted(set(tmp_path.iterdir()) - {folder}) == before


def test_nothing_is_left_behind(grey: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = grey.to_folder()
    (folder / "owl" / "11.png").write_bytes(b"")
    scratch = grey.folder / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    refused(folder, "is empty", memory_limit=10)
    assert list(scratch.iterdir()) == []


def test_pillow_is_left_as_it_was(grey: Pictures) -> None:
    read(grey.to_folder())
    limit = Image.MAX_IMAGE_PIXELS
    refused(Items([(Image.new("F", (3, 3)), 0)] * 2), "has pixels of mode F")
    assert limit == Image.MAX_IMAGE_PIXELS
    assert Image.open(io.BytesIO(grey.png(0))).size == (7, 9)
