"""The same few pictures, written in every format that can be read."""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet
import torch
from PIL import Image

Array = npt.NDArray[Any]
CLASSES = ("cat", "dog", "owl")


class Pictures:
    """Hold pictures (n, 9, 7) or (n, 9, 7, 3), sorted by label, and write them."""

    def __init__(self, folder: Path, colour: bool, seed: int = 0) -> None:
        self.folder, self.colour = folder, colour
        shape = (12, 9, 7, 3) if colour else (12, 9, 7)
        self.images = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
        self.labels = np.repeat(np.arange(3), (5, 3, 4))

    def channels_first(self) -> Array:
        return np.moveaxis(self.images, 3, 1) if self.colour else self.images[:, None]

    def png(self, number: int, kind: str = "png") -> bytes:
        file = io.BytesIO()
        Image.fromarray(self.images[number]).save(file, kind, lossless=True)
        return file.getvalue()

    def to_folder(
        self, kind: str = "png", names: Sequence[str] = CLASSES, below: str = "f"
    ) -> Path:
        folder = self.folder / below
        for number, label in enumerate(self.labels.tolist()):
            place = folder / names[label]
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{number:02}.{kind}").write_bytes(self.png(number, kind))
        return folder

    def to_npz(self, images: str = "images", labels: str = "labels") -> Path:
        arrays: dict[str, Any] = {images: self.images, labels: self.labels}
        np.savez_compressed(self.folder / "a.npz", **arrays)
        return self.folder / "a.npz"

    def to_npz_channels_first(self) -> Path:
        np.savez(self.folder / "b.npz", x_train=self.channels_first(), y_train=self.labels[:, None])
        return self.folder / "b.npz"

    def to_npy(self) -> Path:
        folder = self.folder / "npy"
        folder.mkdir()
        np.save(folder / "images.npy", self.images)
        np.save(folder / "labels.npy", self.labels)
        return folder

    def to_idx(self, packed: bool = False, split: str = "train") -> Path:
        folder = self.folder / ("gz" if packed else "idx")
        folder.mkdir(exist_ok=True)
        for part, array in (("images", self.images), ("labels", self.labels.astype(np.uint8))):
            head = bytes([0, 0, 8, array.ndim])
            data = head + np.array(array.shape, ">u4").tobytes() + array.tobytes()
            name = f"{split}-{part}-idx{3 if part == 'images' else 1}-ubyte"
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(data))
            else:
                (folder / name).write_bytes(data)
        return folder

    def to_csv(self) -> Path:
        files = sorted(self.to_folder(below="png").rglob("*.png"))
        lines = [f"{os.path.relpath(file, self.folder)},{file.parent.name}\n" for file in files]
        (self.folder / "list.csv").write_text("file_name,label\n" + "".join(lines))
        return self.folder / "list.csv"

    def to_parquet(self) -> Path:
        """Write what Hugging Face `datasets` writes, by hand."""
        cells = [{"bytes": self.png(i), "path": None} for i in range(len(self.images))]
        names = '{"info": {"features": {"label": {"names": ["cat", "dog", "owl"]}}}}'
        table = pa.table({"image": cells, "label": pa.array(self.labels)})
        pa.parquet.write_table(
            table.replace_schema_metadata({"huggingface": names}), self.folder / "t.parquet"
        )
        return self.folder / "t.parquet"


class Items(list[Any]):
    """Act as a PyTorch dataset: a length, and pairs by number."""


def every_source(p: Pictures) -> list[tuple[str, Any]]:
    """Write the pictures in every format that keeps their bytes; grey ones also as IDX."""
    tensors = torch.from_numpy(p.channels_first())
    sources: list[tuple[str, Any]] = [
        *[(f"folder of {kind}", p.to_folder(kind, below=kind)) for kind in ("png", "bmp", "tiff")],
        ("folder of webp", p.to_folder("webp", below="webp")) if p.colour else ("npz", p.to_npz()),
        ("npz", p.to_npz()),
        ("npz, channels first", p.to_npz_channels_first()),
        ("npy", p.to_npy()),
        ("csv", p.to_csv()),
        ("parquet", p.to_parquet()),
        ("arrays", (p.images, p.labels)),
        ("tensors", (tensors, torch.from_numpy(p.labels))),
        (
            "dataset of Pillow images",
            Items(zip(map(Image.fromarray, p.images), p.labels, strict=True)),
        ),
        ("dataset of tensors", torch.utils.data.TensorDataset(tensors, torch.tensor(p.labels))),
        (
            "dataset of mappings",
            Items({"image": i, "label": y} for i, y in zip(p.images, p.labels, strict=True)),
        ),
    ]
    if not p.colour:
        sources.append(("idx", p.to_idx()))
        sources.append(("idx.gz", p.to_idx(packed=True)))
    return sources
