"""Decode image files, and read a folder of class subfolders of them."""

from __future__ import annotations

import errno
import io
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from understudy.data.found import Ask, Found, choose_split, shown, split_of
from understudy.errors import DataError

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")

MOST_PIXELS = 2**26
"""No image may claim more pixels (8192 x 8192): a small file can decode into gigabytes."""

DECODED = "image files decoded to 8 bits; first frame only, transparency and rotation tags ignored"

_GREY_MODES = ("1", "L", "LA", "La")
_COLOUR_MODES = ("RGB", "RGBA", "RGBX", "RGBa", "P", "PA", "CMYK", "YCbCr", "HSV")


def decode(file: Path | bytes, where: str) -> npt.NDArray[np.uint8]:
    """Return the pixels of an image file: (height, width) if grey, else (height, width, 3)."""
    try:
        with warnings.catch_warnings():
            # Pillow warns of what it can mend, such as odd EXIF data. Bombs are refused below.
            warnings.simplefilter("ignore")
            opened = io.BytesIO(file) if isinstance(file, bytes) else file
            with Image.open(opened, formats=FORMATS) as image:
                return pixels(image, where)
    except DataError:
        raise
    except (PermissionError, FileNotFoundError, IsADirectoryError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise DataError(_bomb(where)) from error
    except Exception as error:  # decoders raise whatever they stumble over, SyntaxError included
        if isinstance(error, OSError) and error.errno in (errno.ELOOP, errno.EMFILE, errno.EIO):
            raise
        empty = file == b"" or (isinstance(file, Path) and os.path.getsize(file) == 0)
        reason = "the file is empty" if empty else shown(error)
        if isinstance(error, UnidentifiedImageError) and not empty:
            reason = f"it is none of {', '.join(FORMATS)}"
        raise DataError(
            f"{where} is not a readable image ({reason}). It may be truncated: copy it again, or "
            "remove it."
        ) from error


def pixels(image: Image.Image, where: str) -> npt.NDArray[np.uint8]:
    """Return the 8-bit pixels of an open Pillow image."""
    if image.width * image.height > MOST_PIXELS:
        raise DataError(_bomb(where))
    if image.mode in _GREY_MODES:
        return np.array(image.convert("L"))
    if image.mode in _COLOUR_MODES:
        # By way of RGBA, as a palette may carry transparency that RGB alone cannot take.
        through = image.convert("RGBA") if image.mode in ("P", "PA") else image
        return np.array(through.convert("RGB"))
    raise DataError(
        f"{where} has pixels of mode {image.mode}; 8-bit grey or colour works. Save it with 8 "
        "bits, or save all images as one .npy array and declare value_range=(0, 65535)."
    )


def _bomb(where: str) -> str:
    return (
        f"{where} claims to have more than {MOST_PIXELS} pixels, as a decompression bomb does. It "
        "was not decoded: scale it down first, or remove it."
    )


def find_folder(folder: Path, ask: Ask) -> Found:
    """Find images in class subfolders, perhaps below a folder for each split."""
    subfolders, loose = _entries(folder)
    splits = {split_of(entry.name) or "": entry for entry in subfolders}
    if subfolders and "" not in splits:
        return find_folder(choose_split(splits, ask, shown(folder)), _within(ask))
    if ask.split is not None:
        raise DataError(
            f"{shown(folder)} has no folders named train and test, so split='{ask.split}' means "
            "nothing here. Point at the folder of the split, or leave split out."
        )
    if len(subfolders) < 2:
        found = f"{len(subfolders)} subfolder{'s' * (len(subfolders) != 1)}"
        if any(_is_image(entry) for entry in loose):
            found += " and images outside of any"
        tables = [entry for entry in loose if entry.suffix.lower() in (".csv", ".tsv")]
        hint = f" Or read its table: '{shown(tables[0])}'." if tables else ""
        name = shown(folder.name)
        raise DataError(
            f"{shown(folder)} has {found}. Put the images of each class into a subfolder of its "
            f"own (at least two): {name}/cat/1.png, {name}/dog/1.png.{hint}"
        )
    if any(_is_image(entry) for entry in loose):
        raise DataError(
            f"{shown(folder)} has images outside of its class subfolders. Move each to the folder "
            "of its class: an image without a class cannot be used."
        )
    files: list[Path] = []
    labels: list[int] = []
    for label, subfolder in enumerate(subfolders):
        images, others = _images_below(subfolder)
        if not images:
            seen = ""
            if others:
                seen = f"; it has {len(others)} other files, such as '{shown(others[0].name)}'"
            raise DataError(
                f"{shown(subfolder)}: this class is empty, there are no images "
                f"({', '.join(SUFFIXES)}) in it{seen}. Add some, or remove the "
                "folder."
            )
        files += images
        labels += [label] * len(images)
    return Found(
        where=shown(folder),
        count=len(files),
        batches=decoded(files),
        labels=np.array(labels, np.int64),
        names=tuple(shown(subfolder.name) for subfolder in subfolders),
        notes=(DECODED,),
    )


def decoded(files: list[Path]) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
    """Decode files one at a time."""
    for file in files:
        yield shown(file), decode(file, shown(file))[None]


def _within(ask: Ask) -> Ask:
    return Ask(classes=ask.classes, memory_limit=ask.memory_limit)


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def _entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return a folder's subfolders and its files, by name, without hidden ones."""
    subfolders: list[Path] = []
    files: list[Path] = []
    with os.scandir(folder) as entries:
        listed = sorted(entries, key=lambda entry: entry.name)
    for entry in listed:
        path = Path(entry.path)
        if entry.name.startswith((".", "__MACOSX")):
            continue
        if not entry.is_dir(follow_symlinks=False):
            if entry.is_symlink():
                _refuse_folder_link(path, folder)
            files.append(path)
        else:
            subfolders.append(path)
    return subfolders, files


def _refuse_folder_link(path: Path, folder: Path) -> None:
    """Refuse a link to a folder: it may lead in circles, outside, or to records already read.

    A record read twice would count twice, which breaks the guarantee. A link to a file is fine.
    """
    try:
        target = path.resolve(strict=True)
        path.stat()
    except FileNotFoundError as error:
        raise DataError(f"{shown(path)} is a link to a file that does not exist.") from error
    except (OSError, RuntimeError) as error:
        raise DataError(f"{shown(path)} is a symlink loop. Remove it.") from error
    if not target.is_dir():
        return
    place = folder.resolve()
    kind = "loops back to a folder it lies in" if place.is_relative_to(target) else "is a link"
    raise DataError(
        f"{shown(path)} {kind} ({shown(target)}). Links to folders are not followed, as records "
        "could be read twice or come from elsewhere: put the real folder here."
    )


def _images_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the images in a class folder and below it, and what else lies there."""
    subfolders, files = _entries(folder)
    images = [file for file in files if _is_image(file)]
    others = [file for file in files if not _is_image(file)]
    for image in images:
        if not image.is_file():
            raise DataError(f"{shown(image)} is not a regular file.")
    for subfolder in subfolders:
        more_images, more_others = _images_below(subfolder)
        images += more_images
        others += more_others
    return images, others
