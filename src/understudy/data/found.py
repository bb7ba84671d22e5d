"""Hold what a reader found in a source, in one shape for every format, and turn it into records.

A reader opens a source and returns a :class:`Found`. From there on all formats take the same way:
labels are numbered, every record is digested as it lies, prepared as declared, checked and stored.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from understudy.data.preparation import Array, Preparation, channels_first, channels_last, digest
from understudy.engine import Progress, silent
from understudy.errors import DataError
from understudy.privacy.public import Column

MEMORY_LIMIT = 4 * 2**30
"""Decoded records beyond so many bytes go to a temporary file."""

_BATCH_BYTES = 16 * 2**20

_SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "t10k"),
    "validation": ("validation", "val", "valid", "dev"),
}

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Carry what the caller said about a source to the reader of its format."""

    image: str | None = None
    label: str | None = None
    classes: tuple[str, ...] | None = None
    columns: Any = None
    split: str | None = None
    otherwise: str = "train"
    memory_limit: int = MEMORY_LIMIT


@dataclass(kw_only=True)
class Found:
    """Describe records that can be walked once, in order, with their labels.

    ``batches`` yields (where, batch), so that an error can name the file. ``labels`` are numbers,
    or names; a source that shows labels only record by record fills the list while it is walked.
    ``names`` says what number i is called, where the source knows. ``whole`` is all records as
    one array, where they lie so. A table brings its own ``digests`` and ``columns``.
    """

    where: str
    count: int
    batches: Iterable[tuple[str, Array]]
    labels: Array | list[Any]
    names: tuple[str, ...] | None = None
    whole: Array | None = None
    digests: npt.NDArray[np.uint8] | None = None
    columns: tuple[Column, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.count == 0:
            raise DataError(f"{self.where}: there are no records.")

    @classmethod
    def of_array(
        cls,
        images: Array,
        labels: Array | list[Any],
        where: str,
        names: tuple[str, ...] | None = None,
    ) -> Found:
        """Describe an array of records and an array of labels."""
        images, labels = channels_last(images, where), flat_labels(labels, where)
        if len(images) != len(labels):
            raise DataError(
                f"{where}: {len(images)} images but {len(labels)} labels. They must pair up."
            )
        rows = max(1, _BATCH_BYTES // max(1, images[:1].nbytes))
        batches = (
            (where, np.asarray(images[first : first + rows]))
            for first in range(0, len(images), rows)
        )
        return cls(
            where=where,
            count=len(images),
            batches=batches,
            labels=labels,
            names=names,
            whole=images,
        )


def flat_labels(labels: Array | list[Any], where: str) -> Array:
    """Return labels as a flat array, or say what is wrong with them."""
    array = np.asarray(labels)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise DataError(
            f"{where}: labels have shape {array.shape}; expected one class number per record. "
            "One-hot labels become numbers with labels.argmax(axis=1)."
        )
    if array.dtype.kind == "O":
        array = np.array([str(label) for label in array])
    return array


def gather(
    found: Found,
    preparation: Preparation,
    *,
    memory_limit: int = MEMORY_LIMIT,
    progress: Progress = silent,
) -> tuple[Array, npt.NDArray[np.uint8]]:
    """Walk the records once: digest, prepare, check, store. Returns (images, digests)."""
    if found.digests is not None and found.whole is not None:
        return found.whole, found.digests
    images: Array | None = None
    if found.whole is not None and preparation.leaves_alone(found.whole):
        images = channels_first(found.whole)
    in_place = images is not None
    digests = np.empty((found.count, 16), np.uint8)
    first: tuple[str, Array] | None = None
    done = 0
    for where, batch in found.batches:
        stop = done + len(batch)
        digests[done:stop] = digest(batch)
        prepared = preparation.apply(batch, where)
        first = first or (where, batch[:1])
        if images is None:
            shape = (found.count, *prepared.shape[1:])
            images = allocate(shape, prepared.dtype, memory_limit)
        if not in_place:
            if prepared.shape[1:] != images.shape[1:] or prepared.dtype != images.dtype:
                raise DataError(
                    _mixed(*first, where, batch, resized=preparation.resize is not None)
                )
            images[done:stop] = prepared
        done = stop
        progress(done, found.count, "reading records")
    if images is None or done != found.count:
        raise DataError(f"{found.where}: expected {found.count} records, found {done}.")
    return images, digests


def _size(batch: Array) -> str:
    """Say what one record looks like: height x width."""
    if batch.ndim == 2:
        return f"{batch.shape[1]} numbers"
    kind = "grey" if batch.ndim == 3 else "colour"
    return f"{batch.shape[1]} x {batch.shape[2]} {kind} ({batch.dtype})"


def _mixed(where: str, one: Array, other_where: str, other: Array, *, resized: bool) -> str:
    """Explain records that do not look alike."""
    message = f"{where} is {_size(one)}, but {other_where} is {_size(other)}."
    if one.shape[1:3] != other.shape[1:3] and not resized:
        message += " All images need one size: declare it with --resize 32 (resize=32 in Python)."
    if one.ndim != other.ndim:
        message += (
            " Grey and colour images are mixed: declare --grayscale (grayscale=True in Python) to "
            "make all grey, or save all in colour."
        )
    if one.dtype != other.dtype:
        message += " All records need one type."
    return message


def allocate(shape: tuple[int, ...], dtype: npt.DTypeLike, memory_limit: int) -> Array:
    """Return room for records: in memory up to the limit, else in a file nobody can find.

    The file is readable by its owner only and has no name (it is unlinked as soon as it is
    open), so it is gone when the process ends, however it ends.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size <= memory_limit:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile(prefix="understudy-") as file:
        try:
            # Claim the blocks now: writing to a mapped file on a full disk kills the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            raise DataError(
                f"The decoded records take {size / 2**30:.1f} GiB, more than the memory limit, and "
                f"{tempfile.gettempdir()} has no room for them. Set TMPDIR to a larger disk, or "
                "declare a smaller size with --resize."
            ) from error
        return np.memmap(file, dtype, "r+", shape=shape)


def number_labels(
    found: Found, classes: Sequence[str] | None = None, *, complete: bool = True
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Return labels as 0..K-1 and the K class names.

    ``classes`` declares the names and their order. Where the source names its classes they are
    matched by name; where it only numbers them, by position. ``complete`` demands at least two
    classes and a record in each.
    """
    labels, names = _positions(found)
    if names is None:
        top = int(labels.max(initial=-1))
        if classes is None and top >= len(labels):
            raise DataError(
                f"{found.where}: labels go up to {top}, but there are only {len(labels)} records, "
                "so some classes would be empty. Number the classes from 0 without gaps."
            )
        names = tuple(classes) if classes is not None else tuple(str(i) for i in range(top + 1))
    lowest, highest = int(labels.min(initial=0)), int(labels.max(initial=0))
    if lowest < 0 or highest >= max(len(names), 1):
        raise DataError(
            f"{found.where}: labels must lie in 0..{len(names) - 1} for {len(names)} classes; "
            f"found {lowest if lowest < 0 else highest}."
            + (" A label of -1 usually marks a record without one." if lowest == -1 else "")
        )
    if classes is not None and tuple(classes) != names:
        remedy = (
            "Declare it too, or remove its records."
            if complete
            else "Held-out records are of those classes: call theirs the same, and remove others."
        )
        labels, names = _match(found, labels, names, tuple(classes), remedy), tuple(classes)
    if complete:
        _check_complete(found.where, labels, names)
    return labels, names


def _positions(found: Found) -> tuple[npt.NDArray[np.int64], tuple[str, ...] | None]:
    labels = flat_labels(found.labels, found.where)
    if labels.dtype.kind in "US":
        texts = [str(label) for label in labels]
        names = found.names if found.names is not None else tuple(sorted(set(texts)))
        index = {name: i for i, name in enumerate(names)}
        unknown = sorted(set(texts) - set(index))
        if unknown:
            raise DataError(f"{found.where}: label '{unknown[0]}' is none of {list(names)}.")
        return np.array([index[text] for text in texts], np.int64), names
    if labels.dtype.kind == "f":
        if not (np.isfinite(labels).all() and (labels == np.rint(labels)).all()):
            raise DataError(
                f"{found.where}: labels are fractions or NaN. A label is a class number 0, 1, 2, "
                "... or a name."
            )
    elif labels.dtype.kind not in "biu":
        raise DataError(f"{found.where}: labels of type {labels.dtype} are not class numbers.")
    if labels.dtype.kind in "fu" and labels.size and labels.max() > 2**62:
        raise DataError(f"{found.where}: label {labels.max()} is not a class number.")
    return labels.astype(np.int64), found.names


def _match(
    found: Found,
    labels: npt.NDArray[np.int64],
    names: tuple[str, ...],
    classes: tuple[str, ...],
    remedy: str,
) -> npt.NDArray[np.int64]:
    """Renumber labels from the source's names to the declared ones."""
    used = [names[i] for i in np.unique(labels)]
    if all(name in classes for name in used):
        target = {name: classes.index(name) for name in used}
    elif all(name.isdigit() and int(name) < len(classes) for name in used):
        target = {name: int(name) for name in used}
    else:
        unknown = next(name for name in used if name not in classes)
        raise DataError(
            f"{found.where}: class '{unknown}' is not among the declared classes "
            f"{list(classes)}. {remedy}"
        )
    table = np.array([target.get(name, -1) for name in names], np.int64)
    return table[labels]


def _check_complete(where: str, labels: npt.NDArray[np.int64], names: tuple[str, ...]) -> None:
    if len(names) < 2:
        one = f"one class, '{names[0]}'" if names else "no class"
        raise DataError(
            f"{where}: there is {one}. A labelled stand-in needs at least two: put each class in a "
            "folder of its own, or name the label column."
        )
    counts = np.bincount(labels, minlength=len(names))
    if not counts.all():
        raise DataError(
            f"{where}: class '{names[int(counts.argmin())]}' has no records. Drop it from the "
            "classes, number the classes from 0 without gaps, or add records to it."
        )


def split_of(word: str) -> str | None:
    """Name the split a folder or file name stands for."""
    for split, words in _SPLITS.items():
        if word.lower() in words:
            return split
    return None


def choose_split(offered: Mapping[str, T], ask: Ask, where: str) -> T:
    """Take the split that was asked for."""
    wanted = ask.split or ask.otherwise
    chosen = split_of(wanted) or wanted
    if chosen not in offered:
        raise DataError(
            f"{where} has no split '{wanted}'; it has {', '.join(sorted(offered))}. Choose one "
            "with split=..."
        )
    return offered[chosen]


def shown(path: object) -> str:
    """Return a path as text that can always be printed, whatever bytes its name has."""
    name = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else str(path)
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


@contextlib.contextmanager
def told(source: object) -> Iterator[None]:
    """Turn what the operating system says into a :class:`DataError` that names the file."""
    try:
        yield
    except PermissionError as error:
        raise DataError(
            f"{shown(error.filename or source)}: no permission to read it. Run as its owner, or "
            "ask for read access (and search access to its folder)."
        ) from error
    except FileNotFoundError as error:
        raise DataError(f"{shown(error.filename or source)} does not exist.") from error
    except (OSError, EOFError, UnicodeError) as error:
        name = getattr(error, "filename", None) or source
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if getattr(error, "errno", None) == errno.ELOOP:
            reason = "it is a symlink loop; point it at the real file"
        raise DataError(f"{shown(name)} cannot be read: {shown(reason)}.") from error
    except MemoryError as error:
        raise DataError(
            f"{shown(source)} does not fit into memory. Save the images as an uncompressed .npy "
            "file (it is memory-mapped), or lower memory_limit so that a temporary file is used."
        ) from error


def existing(path: Path) -> Path:
    """Return the path, or say that it does not exist and what is there instead."""
    try:
        os.stat(path)
    except ValueError as error:
        raise DataError(f"{str(path)!r} is not a file name.") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        if path.is_symlink():
            raise DataError(f"{shown(path)} is a link to something that does not exist.") from error
        siblings = os.listdir(path.parent) if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, siblings, n=1)
        hint = f" Did you mean '{shown(path.parent / near[0])}'?" if near else ""
        raise DataError(f"{shown(path)} does not exist.{hint}") from error
    return path
