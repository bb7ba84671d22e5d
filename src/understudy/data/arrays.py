"""Read arrays: ``.npz``, ``.npy``, IDX files, arrays in memory, and PyTorch datasets."""

from __future__ import annotations

import gzip
import math
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.lib import format as npy
from PIL import Image

from understudy.data.found import Ask, Found, allocate, choose_split, flat_labels, shown
from understudy.data.images import pixels
from understudy.data.preparation import Array, channels_last
from understudy.errors import DataError, UnknownName

IMAGE_KEYS = ("images", "image", "x", "data", "features", "imgs", "img")
LABEL_KEYS = ("labels", "label", "y", "targets", "target", "classes", "class")

_MOST_GZIP = 1100
"""Deflate packs at most 1032 to one, so a header that claims more is lying."""


# .npz and .npy


def find_npz(path: Path, ask: Ask) -> Found:
    """Find images and labels in an ``.npz`` file, under the usual names or the given ones."""
    where = shown(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {
                name.removesuffix(".npy"): name
                for name in archive.namelist()
                if name.endswith(".npy")
            }
            image_key, label_key = _keys(tuple(members), ask, where)
            needed = [members[image_key], members[label_key]]
            size = sum(archive.getinfo(name).file_size for name in needed)
            if size > ask.memory_limit:
                raise DataError(
                    f"{where} unpacks to {size / 2**20:.1f} MiB, more than the memory limit of "
                    f"{ask.memory_limit / 2**20:.1f} MiB. If that is expected, raise memory_limit, "
                    "or save the images as an uncompressed .npy file, which is memory-mapped."
                )
            images, labels = (
                _read_member(archive, name, f"{where}, '{name.removesuffix('.npy')}'")
                for name in needed
            )
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise DataError(f"{where} is not a readable .npz file: {shown(error)}.") from error
    return Found.of_array(images, labels, f"{where}, '{image_key}'")


def _read_member(archive: zipfile.ZipFile, name: str, where: str) -> Array:
    with archive.open(name) as file:
        shape, dtype, _ = _npy_header(file, where)
        start = file.tell()
    claimed = math.prod(shape) * dtype.itemsize + start
    if claimed != archive.getinfo(name).file_size:
        raise DataError(f"{where} is truncated or damaged: its header does not fit its size.")
    with archive.open(name) as file:
        return npy.read_array(file, allow_pickle=False)


def _npy_header(file: IO[bytes], where: str) -> tuple[tuple[int, ...], np.dtype[Any], bool]:
    """Read and check the header of an array, and stop right before its data."""
    try:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except (ValueError, EOFError) as error:
        raise DataError(f"{where} is not a readable .npy array: {shown(error)}.") from error
    if dtype.hasobject:
        raise DataError(
            f"{where} holds Python objects, which only unpickling could read. That is never done, "
            "as it can run code: save plain numbers, such as np.stack(images).astype(np.uint8)."
        )
    if dtype.names is not None:
        raise DataError(f"{where} is a structured array; save images and labels separately.")
    return shape, dtype, fortran


def load_npy(path: Path) -> Array:
    """Map an ``.npy`` file into memory without reading it."""
    where = shown(path)
    with open(path, "rb") as file:
        shape, dtype, fortran = _npy_header(file, where)
        start = file.tell()
    if math.prod(shape) * dtype.itemsize + start != path.stat().st_size:
        raise DataError(f"{where} is truncated or damaged: its header does not fit its size.")
    if math.prod(shape) == 0:
        return np.zeros(shape, dtype)
    order = "F" if fortran else "C"
    return cast(Array, np.memmap(path, dtype, "r", start, shape, order))  # type: ignore[call-overload]


def find_npy(path: Path, ask: Ask) -> Found:
    """Find images in an ``.npy`` file; their labels are in the file ``label`` names."""
    if ask.label is None:
        raise DataError(
            f"{shown(path)} holds images only. Name the file of labels with label='labels.npy', or "
            "read the folder that holds both."
        )
    labels = path.parent / ask.label
    if not labels.exists():
        raise DataError(f"{shown(labels)}, named as the file of labels, does not exist.")
    return Found.of_array(load_npy(path), np.array(load_npy(labels)), shown(path))


def find_npy_pair(folder: Path, ask: Ask) -> Found | None:
    """Find ``images.npy`` and ``labels.npy`` (or other usual names) in a folder."""
    files = {file.stem: file for file in sorted(folder.glob("*.npy"))}
    if not files:
        return None
    image, label = _keys(tuple(files), ask, shown(folder))
    return Found.of_array(
        load_npy(files[image]), np.array(load_npy(files[label])), shown(files[image])
    )


def _keys(present: tuple[str, ...], ask: Ask, where: str) -> tuple[str, str]:
    """Choose the names of images and labels among those present."""
    lower = {name.lower(): name for name in present}

    def spelt(usual: tuple[str, ...], word: str) -> str | None:
        tries = [f"{word}_{key}" for key in usual] + [f"{key}_{word}" for key in usual]
        return next((lower[name] for name in (tries if word else usual) if name in lower), None)

    pairs: dict[str, tuple[str | None, str | None]] = {
        split: (spelt(IMAGE_KEYS, word), spelt(LABEL_KEYS, word))
        for split, word in (("train", "train"), ("test", "test"), ("validation", "val"))
    }
    offered = {split: pair for split, pair in pairs.items() if None not in pair}
    image, label = spelt(IMAGE_KEYS, ""), spelt(LABEL_KEYS, "")
    named = ask.image is not None and ask.label is not None
    if offered and not named and (ask.split is not None or image is None or label is None):
        image, label = choose_split(offered, ask, where)
    elif ask.split is not None and not offered:
        raise DataError(
            f"{where} has no splits, only {_list(present)}. Leave split out, or name the arrays "
            "with image=... and label=..."
        )
    for asked in (ask.image, ask.label):
        if asked is not None and asked not in present:
            raise UnknownName(f"array in {where}", asked, present)
    image, label = ask.image or image, ask.label or label
    if image is None or label is None:
        missing = "images" if image is None else "labels"
        raise DataError(
            f"{where} has {_list(present)}, none of which is known as {missing}. Name them with "
            "image=... and label=..."
        )
    return image, label


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names)) or "no arrays"


# IDX


_IDX_NAME = re.compile(r"(?:.*-)?(train|t10k|test)-(images|labels)[-.]idx\d-ubyte(?:\.gz)?", re.I)
_IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def idx_files(folder: Path) -> dict[str, dict[str, Path]]:
    """Return the IDX files of a folder: split -> images or labels -> path."""
    files: dict[str, dict[str, Path]] = {}
    for file in sorted(folder.iterdir()):
        if match := _IDX_NAME.fullmatch(file.name):
            split = "train" if match[1].lower() == "train" else "test"
            files.setdefault(split, {}).setdefault(match[2].lower(), file)
    return files


def find_idx_folder(folder: Path, ask: Ask) -> Found | None:
    """Find the usual four IDX files in a folder."""
    files = idx_files(folder)
    if not files:
        return None
    pair = choose_split(files, ask, shown(folder))
    for part in ("images", "labels"):
        if part not in pair:
            have = shown(next(iter(pair.values())).name)
            raise DataError(f"{shown(folder)} has '{have}' but not the {part} that belong to it.")
    images = read_idx(pair["images"], ask.memory_limit)
    labels = np.array(read_idx(pair["labels"], ask.memory_limit))
    return Found.of_array(images, labels, shown(pair["images"]))


def find_idx(path: Path, ask: Ask) -> Found:
    """Find images in one IDX file and labels in the file beside it."""
    name = ask.label or path.name.replace("images", "labels").replace("idx3", "idx1")
    labels = path.parent / name
    if name == path.name or not labels.exists():
        raise DataError(
            f"{shown(path)} holds images only, and '{shown(labels)}' does not exist. Name the file "
            "of labels with label=..."
        )
    images = read_idx(path, ask.memory_limit)
    return Found.of_array(images, np.array(read_idx(labels, ask.memory_limit)), shown(path))


def read_idx(path: Path, memory_limit: int) -> Array:
    """Read an IDX file: mapped into memory, or unpacked no further than its header allows."""
    where, packed = shown(path), path.suffix.lower() == ".gz"
    length = path.stat().st_size
    try:
        with cast(IO[bytes], gzip.open(path, "rb") if packed else open(path, "rb")) as file:
            head = file.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_TYPES:
                raise DataError(f"{where} is not an IDX file: it starts with {head.hex(' ')}.")
            sides = file.read(4 * head[3])
            if not 1 <= head[3] <= 4 or len(sides) != 4 * head[3]:
                raise DataError(f"{where} is not a usable IDX file: it has {head[3]} dimensions.")
            shape = tuple(int(side) for side in np.frombuffer(sides, ">u4"))
            dtype = np.dtype(_IDX_TYPES[head[2]])
            start, size = file.tell(), math.prod(shape) * dtype.itemsize
            truncated = f"{where} is truncated: its header promises {size} bytes of data."
            if start + size > (length * _MOST_GZIP if packed else length):
                raise DataError(f"{truncated} Get the file again.")
            if not packed and start + size == length and size:
                return cast(Array, np.memmap(path, dtype, "r", start, shape))
            array = allocate(shape, dtype, memory_limit)
            room = array.reshape(-1).view(np.uint8)
            done = 0
            while done < size:
                block = file.read(min(2**22, size - done))
                if not block:
                    raise DataError(f"{truncated} Get the file again.")
                room[done : done + len(block)] = np.frombuffer(block, np.uint8)
                done += len(block)
            if file.read(1):
                raise DataError(f"{where} is longer than its header says. Get the file again.")
            return array
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{where} is truncated or damaged ({error}). Get it again.") from error


# Objects in memory


def find_arrays(images: Any, labels: Any) -> Found:
    """Find records in two arrays or tensors."""
    return Found.of_array(_array(images), _array(labels), "the array")


def _array(value: Any) -> Array:
    try:
        return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    except ValueError as error:
        raise DataError(f"A {type(value).__name__} does not form an array: {error}.") from error


def find_dataset(dataset: Any, ask: Ask) -> Found:
    """Find records in a PyTorch ``Dataset``: anything with a length that yields pairs.

    An item is (image, label) or a mapping; an image is a Pillow image, or an array or tensor of
    bytes or of numbers in a declared range. Each item is fetched once.
    """
    labels: list[Any] = []
    where = f"the {type(dataset).__name__}"

    def walk() -> Iterator[tuple[str, Array]]:
        for number in range(len(dataset)):
            place = f"item {number} of {where}"
            try:
                image, label = _pair(dataset[number], ask, place)
            except (DataError, UnknownName):
                raise
            except Exception as error:  # the dataset is the caller's own code
                raise DataError(f"{place} cannot be read: {error!r}.") from error
            labels.append(label)
            if isinstance(image, Image.Image):
                yield place, pixels(image, place)[None]
            else:
                yield place, channels_last(_array(image)[None], place)

    return Found(
        where=where,
        count=len(dataset),
        batches=walk(),
        labels=labels,
        names=_class_names(dataset, ask),
    )


def _pair(item: Any, ask: Ask, where: str) -> tuple[Any, Any]:
    if isinstance(item, Mapping):
        image, label = _keys(tuple(item), ask, where)
        image, label = item[image], item[label]
    elif isinstance(item, tuple | list) and len(item) >= 2:
        image, label = item[0], item[1]
    else:
        raise DataError(f"{where} is a {type(item).__name__}; expected a pair (image, label).")
    if not isinstance(label, str):
        flat = flat_labels(_array(label).reshape(-1), where)
        if len(flat) != 1:
            raise DataError(f"{where} has {len(flat)} labels; expected one.")
        label = flat[0].item()
    return image, label


def _class_names(dataset: Any, ask: Ask) -> tuple[str, ...] | None:
    """Return the class names a dataset tells: torchvision's, or those of a ClassLabel."""
    names = getattr(dataset, "classes", None)
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping):
        usual: Callable[[str], bool] = LABEL_KEYS.__contains__
        key = ask.label or next((key for key in features if usual(str(key).lower())), None)
        names = getattr(features.get(key), "names", None)
    if isinstance(names, list | tuple) and names and all(isinstance(n, str) for n in names):
        return tuple(names)
    return None
