"""Show a synthetic set: previews, a contact sheet, and Parquet or CSV that other tools open."""

from __future__ import annotations

import io
import json
import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont

from understudy.data.layout import (
    PREVIEWS_PER_CLASS,
    SHEET_COLUMNS,
    SHEET_ROWS,
)
from understudy.data.synthetic import SyntheticSet
from understudy.privacy.public import Public
from understudy.privacy.release import Release


def draw_pictures(synthetic: SyntheticSet) -> list[Image.Image]:
    """Return 8-bit pictures; channels other than grey or RGB lie side by side."""

    def picture(pixels: npt.NDArray[np.uint8]) -> Image.Image:
        if len(pixels) == 3:
            return Image.fromarray(np.ascontiguousarray(np.moveaxis(pixels, 0, 2)))
        return Image.fromarray(np.ascontiguousarray(np.concatenate(list(pixels), axis=1)))

    return [picture(pixels) for pixels in synthetic.pixels().numpy()]


def png(picture: Image.Image) -> bytes:
    """Encode a picture."""
    sink = io.BytesIO()
    picture.save(sink, "PNG", optimize=picture.width > 256)
    return sink.getvalue()


def choose_previews(synthetic: SyntheticSet) -> dict[str, int]:
    """Return the previews' names and which record each shows."""
    names: dict[str, int] = {}
    for label, folder in enumerate(_folder_names(synthetic.public.classes)):
        places = torch.nonzero(synthetic.labels == label).flatten().tolist()
        for number, place in enumerate(places[:PREVIEWS_PER_CLASS]):
            names[f"previews/{folder}/{number:03d}.png"] = place
    return names


def _folder_names(classes: tuple[str, ...]) -> list[str]:
    """Name a folder after each class; numbers help where a name cannot be a folder's."""
    names: list[str] = []
    taken: set[str] = set()
    for label, name in enumerate(classes):
        safe = re.sub(r"[^\w.+-]+", "_", name).strip("._")[:60]
        if not safe or safe.casefold() in taken or safe != name:
            safe = f"{label:03d}_{safe}".rstrip("_")
        taken.add(safe.casefold())
        names.append(safe)
    return names


def huggingface_schema(public: Public) -> str:
    """Say in Hugging Face's words what the columns are."""
    features = {
        "image": {"_type": "Image"},
        "label": {"names": list(public.classes), "_type": "ClassLabel"},
    }
    return json.dumps({"info": {"features": features}})


def image_table(synthetic: SyntheticSet, images: list[bytes]) -> Any:
    """Make the table Hugging Face reads as images with class labels."""
    import pyarrow as pa

    cell = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema(
        [("image", cell), ("label", pa.int64())],
        metadata={"huggingface": huggingface_schema(synthetic.public)},
    )
    cells = [{"bytes": image, "path": None} for image in images]
    return pa.table([pa.array(cells, cell), pa.array(synthetic.labels.numpy())], schema=schema)


def cells_table(synthetic: SyntheticSet) -> Any:
    """Return a synthetic table as cells, with the name of the class last."""
    import pyarrow as pa

    from understudy.data.tables import decode_table  # reads tables; only needed for one

    features, columns = synthetic.images.numpy(), synthetic.public.columns
    if columns:
        table = decode_table(features, columns)
    else:
        table = pa.table({f"x{place}": features[:, place] for place in range(features.shape[1])})
    names = ("label", "class", "target", "synthetic label")
    free = next(name for name in names if name not in table.column_names)
    labels = [synthetic.public.classes[label] for label in synthetic.labels.tolist()]
    return table.append_column(free, pa.array(labels, pa.string()))


def parquet_bytes(table: Any) -> bytes:
    """Encode a table as Parquet."""
    import pyarrow.parquet

    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink)
    return sink.getvalue()


def contact_sheet(
    release: Release, synthetic: SyntheticSet, pictures: list[Image.Image]
) -> Image.Image:
    """Draw the classes as labelled rows, each picture as an exact multiple of its size."""
    public, statement = release.public, release.statement
    rows = [
        torch.nonzero(synthetic.labels == label).flatten().tolist()
        for label in range(min(len(public.classes), SHEET_ROWS))
    ]
    across = max(1, min(SHEET_COLUMNS, max(len(row) for row in rows)))
    longest = max(public.shape[1:])
    enlarged = max(1, (96 if across <= 10 else 64) // longest)
    reduced = math.ceil(longest / 160)

    def tile(picture: Image.Image) -> Image.Image:
        if reduced > 1:
            return picture.reduce(reduced)
        size = (picture.width * enlarged, picture.height * enlarged)
        return picture.resize(size, Image.Resampling.NEAREST)

    blank = tile(Image.new("L", pictures[0].size if pictures else (1, 1)))
    bold, plain = ImageFont.load_default(16), ImageFont.load_default(13)
    names = [name if len(name) <= 22 else f"{name[:20]}..." for name in public.classes]
    counts = [f"{min(len(row), across)} of {len(row)}" for row in rows]
    edge, gap = 16, 3
    left = edge + math.ceil(
        max(*(bold.getlength(name) for name in names), *(plain.getlength(c) for c in counts))
    )
    left += 12
    title = f"Synthetic stand-in for {public.name}"
    guarantee = (
        f"({statement.epsilon:.4g}, {statement.delta:g})-differentially private, "
        f"{statement.adjacency.value}, unit: {statement.unit}"
        if statement.private
        else "NOT PRIVATE: see STATEMENT.md"
    )
    notes = f"Made by {release.recipe.get('method', 'an unknown method')}, shown in 8 bits."
    if len(public.classes) > SHEET_ROWS:
        notes += f" The first {SHEET_ROWS} of {len(public.classes)} classes."
    texts = [(title, bold), (guarantee, plain), (notes, plain)]
    pitch = max(blank.height, 36) + gap
    width = left + across * (blank.width + gap) - gap + edge
    width = max(width, math.ceil(max(font.getlength(text) for text, font in texts)) + 2 * edge)
    top = edge + 24 + 18 + 18 + 10
    sheet = Image.new("RGB", (width, top + len(rows) * pitch - gap + edge), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((edge, edge), title, fill="black", font=bold)
    colour = "#555555" if statement.private else "#c00000"
    draw.text((edge, edge + 24), guarantee, fill=colour, font=plain)
    draw.text((edge, edge + 42), notes, fill="#555555", font=plain)
    for number, row in enumerate(rows):
        upper = top + number * pitch
        middle = upper + (pitch - gap) // 2
        draw.text((left - 12, middle - 1), names[number], fill="black", font=bold, anchor="rs")
        draw.text((left - 12, middle + 14), counts[number], fill="#777777", font=plain, anchor="rs")
        for column, place in enumerate(row[:across]):
            spot = (left + column * (blank.width + gap), upper + (pitch - gap - blank.height) // 2)
            sheet.paste(tile(pictures[place]), spot)
    return sheet
