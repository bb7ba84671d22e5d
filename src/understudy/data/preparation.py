"""Prepare records in declared ways only, and digest them before anything is done to them.

A batch of records, as it lies in a file, is one of

    (n, height, width)            grey images       uint8, or numbers of a declared range
    (n, height, width, channels)  colour images     uint8, or numbers of a declared range
    (n, features)                 rows of numbers

and leaves here as uint8 (n, C, H, W), which the gate maps to [-1, 1], or float32 (n, *shape) that
already lies in [-1, 1]. Nothing is ever estimated from the records: a size, a range or a
conversion is declared, and stated in ``Public.preparation``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from understudy.errors import BadConfiguration, DataError
from understudy.privacy.gate import record_digests

Array = npt.NDArray[Any]

PIXELS = (0.0, 255.0)
"""The range of 8-bit pixels, the only range that need not be declared."""

_GREY = "converted to grayscale"
_RESIZED = "images resized to {} x {} (bilinear)"
_MAPPED = "{} mapped from [{:g}, {:g}] to [-1, 1]"


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Declare what is done to every record alike. ``resize`` is (height, width)."""

    resize: tuple[int, int] | None = None
    grayscale: bool = False
    value_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.resize is not None and not all(1 <= side <= 8192 for side in self.resize):
            raise BadConfiguration(f"resize must be 1 to 8192 pixels a side, not {self.resize}.")
        if self.value_range is not None:
            low, high = self.value_range
            if not (np.isfinite(low) and np.isfinite(high) and low < high):
                raise BadConfiguration(f"value_range needs finite low < high, not [{low}, {high}].")

    @classmethod
    def declare(
        cls,
        resize: int | tuple[int, int] | None = None,
        grayscale: bool | None = None,
        value_range: tuple[float, float] | None = None,
    ) -> Preparation:
        """Build from what a caller gives: one number for a square, lists for pairs."""
        size = (resize, resize) if isinstance(resize, int) else resize
        for name, pair in (("resize", size), ("value_range", value_range)):
            if pair is not None and len(tuple(pair)) != 2:
                raise BadConfiguration(f"{name} takes two numbers, not {pair!r}.")
        return cls(
            resize=None if size is None else (int(size[0]), int(size[1])),
            grayscale=bool(grayscale),
            value_range=None
            if value_range is None
            else (float(value_range[0]), float(value_range[1])),
        )

    def sentences(self, images: Array) -> tuple[str, ...]:
        """Say what was done to the records that became ``images``, in order."""
        said = []
        if self.grayscale:
            said.append(_GREY)
        if self.resize is not None:
            said.append(_RESIZED.format(*self.resize))
        if self.value_range is not None or images.dtype == np.uint8:
            what = "pixels" if images.dtype == np.uint8 else "values"
            said.append(_MAPPED.format(what, *(self.value_range or PIXELS)))
        return tuple(said)

    @classmethod
    def recall(cls, sentences: Iterable[str]) -> Preparation:
        """Rebuild from :meth:`sentences`, so that a test set is prepared like the private one."""
        number = r"([-+.\de]+)"
        resize = value_range = None
        text = list(sentences)
        for sentence in text:
            if match := re.fullmatch(r"images resized to (\d+) x (\d+) \(bilinear\)", sentence):
                resize = (int(match[1]), int(match[2]))
            if match := re.fullmatch(
                rf"values mapped from \[{number}, {number}\] to \[-1, 1\]", sentence
            ):
                value_range = (float(match[1]), float(match[2]))
        return cls(resize=resize, grayscale=_GREY in text, value_range=value_range)

    def is_pixels(self, batch: Array) -> bool:
        """Tell 8-bit images, which stay bytes, from numbers."""
        return batch.dtype == np.uint8 and batch.ndim > 2 and self.value_range in (None, PIXELS)

    def leaves_alone(self, whole: Array) -> bool:
        """Tell whether these records can be used as they lie, without a copy."""
        if self.resize is not None or (self.grayscale and whole.ndim == 4):
            return False
        ready = whole.dtype == np.dtype(np.float32) and self.value_range == (-1.0, 1.0)
        return self.is_pixels(whole) or ready

    def apply(self, batch: Array, where: str) -> Array:
        """Prepare a batch; see the top of the file for what goes in and comes out."""
        if not self.is_pixels(batch):
            batch = self._values(batch, where)
        if self.resize is not None and batch.ndim == 2:
            raise DataError(f"{where} holds rows of {batch.shape[1]} numbers, which have no size.")
        if self.resize is not None or (self.grayscale and batch.ndim == 4):
            batch = np.stack([self._picture(picture) for picture in batch])
        return channels_first(batch)

    def _picture(self, picture: Array) -> Array:
        if picture.dtype != np.uint8:
            return self._exact_picture(picture)
        image = Image.fromarray(picture)
        if self.grayscale:
            image = image.convert("L")
        if self.resize is not None:
            height, width = self.resize
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(image)

    def _exact_picture(self, picture: Array) -> Array:
        """Do the same to numbers that are not bytes, channel by channel."""
        if self.grayscale and picture.ndim == 3:
            weights = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R 601, as Pillow's "L"
            picture = np.asarray(picture @ weights)
        if self.resize is None:
            return picture
        height, width = self.resize
        planes = [
            Image.fromarray(np.ascontiguousarray(plane)).resize(
                (width, height), Image.Resampling.BILINEAR
            )
            for plane in np.atleast_3d(picture).transpose(2, 0, 1)
        ]
        resized = np.clip(np.stack([np.asarray(plane) for plane in planes], axis=-1), -1.0, 1.0)
        return np.asarray(resized[..., 0] if picture.ndim == 2 else resized)

    def _values(self, batch: Array, where: str) -> npt.NDArray[np.float32]:
        """Map numbers of the declared range to [-1, 1]; refuse any outside it."""
        if self.value_range is not None:
            low, high = self.value_range
        elif batch.dtype == np.uint8:
            low, high = PIXELS
        elif batch.dtype == np.bool_:
            low, high = 0.0, 1.0
        else:
            raise DataError(
                f"{where} holds {batch.dtype} values, whose range is not known. Declare it "
                "with --value-range LOW,HIGH (in Python value_range=(0, 1) after ToTensor, (-1, 1) "
                "after Normalize(0.5, 0.5), (0, 255) for pixels). Use a range known without "
                "looking at the data: one read off the records would leak."
            )
        if batch.dtype.kind not in "biuf":
            raise DataError(f"{where}: expected numbers, found type {batch.dtype}.")
        values = batch.astype(np.float64)
        if not np.isfinite(values).all():
            raise DataError(
                f"{where}: there are values that are NaN or infinite. Repair or remove those "
                "records first."
            )
        # The extremes themselves are not shown: a range chosen from them would leak.
        if values.size and (values.min() < low or values.max() > high):
            raise DataError(
                f"{where}: some values lie outside the declared range [{low:g}, {high:g}]. Declare "
                "the range that the format allows with --value-range LOW,HIGH "
                "(value_range=(low, high) in Python)."
            )
        mapped = (values - low) * (2.0 / (high - low)) - 1.0
        return np.clip(mapped, -1.0, 1.0).astype(np.float32)


def channels_last(array: Array, where: str) -> Array:
    """Return records in the one layout used here, as a view; grey images lose their channel."""
    if array.ndim == 4 and array.shape[3] not in (1, 3) and array.shape[1] in (1, 3):
        array = np.moveaxis(array, 1, 3)
    if array.ndim == 4 and array.shape[3] == 1:
        array = array[..., 0]
    if array.ndim not in (2, 3, 4) or (array.ndim == 4 and array.shape[3] != 3):
        raise DataError(
            f"{where} has shape {array.shape}. Expected (records, height, width), (records, "
            "height, width, channels), (records, channels, height, width) with 1 or 3 channels, "
            "or (records, features)."
        )
    if array.dtype.kind not in "biuf":
        raise DataError(f"{where} has type {array.dtype}; images are numbers, best uint8.")
    return array


def channels_first(batch: Array) -> Array:
    """Return a view of shape (n, C, H, W); rows of numbers stay as they are."""
    if batch.ndim == 3:
        return batch[:, None]
    return np.moveaxis(batch, 3, 1) if batch.ndim == 4 else batch


def digest(batch: Array) -> npt.NDArray[np.uint8]:
    """Digest each record so that the same image meets the same ledger from whatever format.

    A colour image whose channels agree counts as the grey image it is, and numbers that are
    8-bit pixels in disguise (k, k / 255 or k / 127.5 - 1) count as those pixels. Each record is
    judged by itself, and no declaration is consulted.
    """
    is_levels, levels = _levels(batch)
    out = np.empty((len(batch), 16), np.uint8)
    out[is_levels] = _digest_grey_or_colour(levels[is_levels])
    with np.errstate(over="ignore"):  # a number beyond float32 is refused later, by its range
        exact = batch[~is_levels].astype("<f4", copy=False)
    out[~is_levels] = _digest_grey_or_colour(exact)
    return out


def _digest_grey_or_colour(batch: Array) -> npt.NDArray[np.uint8]:
    if batch.ndim != 4:
        return record_digests(batch)
    grey = (batch == batch[..., :1]).all(axis=(1, 2, 3))
    out = np.empty((len(batch), 16), np.uint8)
    out[grey] = record_digests(batch[grey][..., 0])
    out[~grey] = record_digests(batch[~grey])
    return out


def _levels(batch: Array) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint8]]:
    """Say which records are 8-bit pixels in some scale, and give those pixels."""
    if batch.dtype == np.uint8:
        return np.ones(len(batch), np.bool_), batch
    levels = np.zeros(batch.shape, np.uint8)
    found = np.zeros(len(batch), np.bool_)
    # Tried in this order, so that a black-and-white image in {0, 1} is black and white.
    scales = ((255.0, 0.0), (1.0, 0.0), (127.5, 127.5))
    for factor, shift in scales[1:2] if batch.dtype.kind in "iu" else scales:
        left = np.flatnonzero(~found)
        scaled = batch[left].astype(np.float64) * factor + shift
        with np.errstate(invalid="ignore"):  # NaN and infinity are refused later, by name
            rounded = np.rint(scaled)
            fits = (np.abs(scaled - rounded) < 1e-3) & (rounded >= 0) & (rounded <= 255)
        whole = fits.all(axis=tuple(range(1, batch.ndim)))
        levels[left[whole]] = rounded[whole].astype(np.uint8)
        found[left[whole]] = True
    return found, levels
