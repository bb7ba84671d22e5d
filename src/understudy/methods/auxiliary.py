"""Name auxiliary images: public pictures that show where features of such pictures lie."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from understudy.errors import BadConfiguration, DataError, UnknownName
from understudy.methods.diffusion import Diffusion
from understudy.nets.draw import public_seed
from understudy.ops.subspace import random_fields
from understudy.privacy.public import Public

__all__ = ["PUBLIC_IMAGES", "Auxiliary", "auxiliary", "digest"]

PUBLIC_IMAGES = "The auxiliary images are public: they contain no private record."
"""What a statement assumes where auxiliary images are given."""


@dataclass(frozen=True)
class Auxiliary:
    """Name public images by their hash; a recipe keeps the name, not the images.

    Two are equal if their images are. :meth:`of` takes a tensor, a file or ``"random fields"``,
    pictures drawn by a formula, for whoever has no public images.
    """

    sha256: str
    path: str | None = dataclasses.field(default=None, compare=False)
    pictures: Tensor | None = dataclasses.field(default=None, compare=False, repr=False)

    FIELDS = "random fields"

    @classmethod
    def of(
        cls, source: Auxiliary | Tensor | str | os.PathLike[str] | Mapping[str, Any]
    ) -> Auxiliary:
        """Take images (n, C, H, W), float in [-1, 1] or uint8, a file of them, or an entry."""
        if isinstance(source, Auxiliary):
            return source
        if isinstance(source, Mapping):
            return cls(str(source["sha256"]), source.get("path"))
        if isinstance(source, Tensor):
            images = _in_range(source.detach().cpu())
            return cls(digest(images), None, images)
        if str(source) == cls.FIELDS:
            return cls(cls.FIELDS, cls.FIELDS)
        path = Path(source)
        images = _read_images(path)
        return cls(digest(images), str(path), images)

    def images(self, public: Public) -> Tensor:
        """Return the pictures, read again from their file if need be, and check them."""
        if self.sha256 == self.FIELDS:
            seed = public_seed(self.FIELDS, *public.shape)
            return random_fields(public.shape, 1000, torch.Generator().manual_seed(seed))
        images = self.pictures
        if images is None and self.path is not None and Path(self.path).is_file():
            images = _read_images(Path(self.path))
        if images is None or digest(images) != self.sha256:
            raise DataError(
                "This configuration needs the auxiliary images with SHA-256 "
                f"{self.sha256[:16]}..., and they are not at {self.path or 'hand'}. Give the "
                "same images again: method = dataclasses.replace(method, auxiliary=images)."
            )
        if tuple(images.shape[1:]) != public.shape:
            raise BadConfiguration(
                f"Auxiliary images have shape {tuple(images.shape[1:])}, records {public.shape}."
            )
        return images

    def to_json(self) -> dict[str, Any]:
        """Return what a recipe keeps."""
        return {"sha256": self.sha256, "path": self.path}


def auxiliary(source: Any) -> Auxiliary | Diffusion:
    """Take a generator's configuration, its name, or whatever names images."""
    if isinstance(source, Diffusion):
        return source
    if isinstance(source, str) and source == Diffusion.NAME:
        return Diffusion()
    if isinstance(source, Mapping):
        if Diffusion.NAME in source:
            return Diffusion.of(source[Diffusion.NAME])
        if "sha256" not in source:
            raise UnknownName("auxiliary", next(iter(source), ""), (Diffusion.NAME, "sha256"))
    return Auxiliary.of(source)


def _read_images(path: Path) -> Tensor:
    try:
        if path.suffix == ".safetensors":
            with safe_open(str(path), framework="pt") as file:
                return _in_range(file.get_tensor("images"))
        return _in_range(torch.from_numpy(np.load(path, allow_pickle=False)))
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise DataError(
            f"No auxiliary images in {path}: {error}. Give a .npy file, or a .safetensors file "
            "with a tensor 'images'."
        ) from error


def _in_range(images: Tensor) -> Tensor:
    if images.dtype == torch.uint8:
        return images.float().div_(127.5).sub_(1.0)
    if not images.is_floating_point():
        raise DataError(f"Auxiliary images must be uint8 or floating point, not {images.dtype}.")
    return images.float()


def digest(images: Tensor) -> str:
    """Return the SHA-256 of images, whatever machine holds them."""
    values = np.ascontiguousarray(images.numpy(), dtype="<f4")
    return hashlib.sha256(str(values.shape).encode() + values.tobytes()).hexdigest()
