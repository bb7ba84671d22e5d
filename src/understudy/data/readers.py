"""Read a private dataset from whatever it lies in.

    read("faces/")                          class subfolders of images, or train/ and test/ of them
    read("labels.csv")                      a table of image paths and labels
    read("scans.npz"), read("arrays/")      arrays, .npz or a folder of images.npy and labels.npy
    read("mnist/")                          IDX files, packed or not
    read("train.parquet")                   images as Hugging Face stores them
    read("people.csv", columns={...})       plain cells, with declared ranges and categories
    read(dataset), read((images, labels))   a PyTorch dataset, or two arrays

All checks happen here, before any budget is spent: what cannot be read as declared is a
:class:`~understudy.errors.DataError` that says which file, what was found and what would work.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from understudy.data.arrays import (
    find_arrays,
    find_dataset,
    find_idx,
    find_idx_folder,
    find_npy,
    find_npy_pair,
    find_npz,
)
from understudy.data.found import (
    MEMORY_LIMIT,
    Ask,
    Found,
    existing,
    gather,
    number_labels,
    shown,
    told,
)
from understudy.data.images import SUFFIXES as IMAGE_SUFFIXES
from understudy.data.images import find_folder
from understudy.data.preparation import Preparation
from understudy.engine import Progress, silent
from understudy.errors import BadConfiguration, DataError
from understudy.privacy.gate import PrivateDataset, Records
from understudy.privacy.public import Adjacency, Public

Counts = Literal["public", "private"] | Sequence[int]


def read(
    source: Any,
    *,
    label: str | None = None,
    image: str | None = None,
    classes: Sequence[str] | None = None,
    resize: int | tuple[int, int] | None = None,
    grayscale: bool | None = None,
    value_range: tuple[float, float] | None = None,
    columns: Any = None,
    split: str | None = None,
    counts: Counts = "public",
    adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE,
    unit: str = "one record",
    labels: Literal["private", "public"] = "private",
    name: str | None = None,
    memory_limit: int = MEMORY_LIMIT,
    progress: Progress | None = None,
) -> PrivateDataset:
    """Read a labelled dataset and put it behind the gate.

    ``label`` and ``image`` name columns, arrays or files where the usual names do not fit.
    ``resize`` (one side, or height and width), ``grayscale`` and ``value_range`` declare what is
    done to every record alike; ``columns`` declares a table's ranges and categories. ``counts``
    "public" declares the class sizes of the files public, "private" leaves them to a paid
    measurement, and numbers declare sizes known from elsewhere. ``memory_limit`` is in bytes:
    decoded records beyond it go to a temporary file that vanishes with the process.
    """
    ask = Ask(
        image=image,
        label=label,
        classes=None if classes is None else _names(classes),
        columns=columns,
        split=split,
        memory_limit=memory_limit,
    )
    with told(source):
        return private(
            find(source, ask),
            Preparation.declare(resize, grayscale, value_range),
            classes=ask.classes,
            counts=counts,
            adjacency=adjacency,
            unit=unit,
            labels=labels,
            name=name or name_of(source),
            memory_limit=memory_limit,
            progress=progress,
        )


def private(
    found: Found,
    preparation: Preparation,
    *,
    name: str,
    classes: tuple[str, ...] | None = None,
    counts: Counts = "public",
    adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE,
    unit: str = "one record",
    labels: Literal["private", "public"] = "private",
    memory_limit: int = MEMORY_LIMIT,
    progress: Progress | None = None,
) -> PrivateDataset:
    """Check, number, digest and prepare what a reader found, and put it behind the gate."""
    try:
        adjacency = Adjacency(adjacency)
    except ValueError as error:
        known = " or ".join(f"'{kind.value}'" for kind in Adjacency)
        raise BadConfiguration(f"adjacency is {known}, not '{adjacency}'.") from error
    if isinstance(counts, str) and counts not in ("public", "private"):
        raise BadConfiguration(f"counts are 'public', 'private' or numbers, not '{counts}'.")
    if labels not in ("public", "private"):
        raise BadConfiguration(f"labels are 'public' or 'private', not '{labels}'.")
    check_preparation(found, preparation)
    # Labels first where they are known, as decoding every image may take a while.
    numbered = number_labels(found, classes) if len(found.labels) == found.count else None
    images, digests = gather(
        found, preparation, memory_limit=memory_limit, progress=progress or silent
    )
    positions, names = numbered or number_labels(found, classes)
    said = found.notes if found.columns else (*found.notes, *preparation.sentences(images))
    sizes: tuple[int, ...] | None = None
    if counts == "public":
        sizes = tuple(int(size) for size in np.bincount(positions, minlength=len(names)))
    elif counts != "private":
        sizes = tuple(int(size) for size in counts)
        said = (*said, "class sizes declared by the data holder, not counted")
    public = Public(
        name=name,
        shape=tuple(images.shape[1:]),
        classes=names,
        counts=sizes,
        adjacency=adjacency,
        unit=unit,
        labels=labels,
        preparation=said,
        columns=found.columns,
    )
    return PrivateDataset(Records(images, positions, digests), public)


def check_preparation(found: Found, preparation: Preparation) -> None:
    """Refuse declarations about images for a table of plain cells."""
    if found.columns and preparation != Preparation():
        raise BadConfiguration(
            f"{found.where} is a table of plain cells: resize, grayscale and value_range are for "
            "images. Its ranges are declared with columns=..."
        )


def find(source: Any, ask: Ask) -> Found:
    """Choose the reader for a source."""
    if isinstance(source, bytes):
        source = os.fsdecode(source)
    if isinstance(source, str | os.PathLike):
        path = existing(Path(source))
        return _find_in_folder(path, ask) if path.is_dir() else _find_in_file(path, ask)
    if isinstance(source, tuple) and len(source) == 2:
        return find_arrays(*source)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return find_dataset(source, ask)
    raise DataError(
        f"Cannot read records from a {type(source).__name__}. Give a path, a pair (images, labels) "
        "or a dataset that has a length and yields pairs (image, label)."
    )


def _find_in_folder(folder: Path, ask: Ask) -> Found:
    from understudy.data.frames import SUFFIXES as TABLE_SUFFIXES
    from understudy.data.frames import find_tables  # reads with pyarrow, which pictures do without

    if ask.columns is not None and (found := find_tables(folder, ask, csv=True)):
        return found
    if found := find_npy_pair(folder, ask):
        return found
    if found := find_idx_folder(folder, ask):
        return found
    names = [entry.suffix.lower() for entry in folder.iterdir()]
    if (folder / "data").is_dir():
        names += [entry.suffix.lower() for entry in (folder / "data").iterdir()]
    if any(suffix in TABLE_SUFFIXES for suffix in names):
        alone = not any(entry.is_dir() for entry in folder.iterdir())
        if found := find_tables(folder, ask, csv=alone):
            return found
    return find_folder(folder, ask)


def _find_in_file(path: Path, ask: Ask) -> Found:
    from understudy.data.frames import SUFFIXES as TABLE_SUFFIXES
    from understudy.data.frames import find_table  # reads with pyarrow, which pictures do without

    suffix = path.suffix.lower()
    if not path.is_file():
        raise DataError(f"{shown(path)} is neither a file nor a folder.")
    if "-ubyte" in path.name.lower() or ".idx" in path.name.lower():
        return find_idx(path, ask)
    if suffix == ".npz":
        return find_npz(path, ask)
    if ask.split is not None:
        raise DataError(f"{shown(path)} is one file without splits: leave split out.")
    if suffix == ".npy":
        return find_npy(path, ask)
    if suffix in TABLE_SUFFIXES:
        return find_table([path], ask)
    if suffix in (".pkl", ".pickle", ".pt", ".pth"):
        raise DataError(
            f"{shown(path)} is a pickle, which can run code and is never opened. Save the images "
            "and labels with numpy.savez(...) instead."
        )
    hint = " One image is not a dataset: name the folder." if suffix in IMAGE_SUFFIXES else ""
    raise DataError(
        f"{shown(path)}: files of type '{suffix}' cannot be read.{hint} A folder of class "
        "subfolders, .npz, .npy, IDX, .csv, .parquet or .arrow can."
    )


def _names(classes: Sequence[str]) -> tuple[str, ...]:
    if isinstance(classes, str):
        raise BadConfiguration(f"classes is a list of names, not the text '{classes}'.")
    names = tuple(str(name) for name in classes)
    if len(set(names)) != len(names):
        raise BadConfiguration(f"classes names a class twice: {list(names)}.")
    return names


def name_of(source: Any) -> str:
    """Name a dataset after its file or folder."""
    if isinstance(source, bytes | str | os.PathLike):
        path = Path(os.path.abspath(os.fsdecode(source)))
        return shown(path.name.split(".")[0] or path.name or "dataset")
    return "arrays" if isinstance(source, tuple) else type(source).__name__.lower()
