"""Open CSV, Parquet and Arrow tables: of image paths, of images, or of plain cells.

Images may lie in the table as Hugging Face ``datasets`` stores them (bytes, or bytes and a path),
or be named by their paths, relative to the table. Tables of plain cells go on to ``tables``.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from understudy.data.found import Ask, Found, choose_split, shown, split_of
from understudy.data.images import DECODED, decode, decoded
from understudy.data.preparation import Array
from understudy.data.tables import BINARY, classes_of, find_cells, label_column, plain, texts_of
from understudy.errors import DataError, UnknownName

SUFFIXES = (".csv", ".tsv", ".parquet", ".pq", ".arrow", ".feather")
IMAGE_COLUMNS = (
    "image", "img", "images", "picture", "path", "image_path", "file", "file_name", "filename",
    "filepath", "file_path",
)  # fmt: skip


def find_tables(folder: Path, ask: Ask, *, csv: bool) -> Found | None:
    """Find the tables of a folder: shards of one set, perhaps named after their splits."""
    places = [place for place in (folder, folder / "data") if place.is_dir()]
    kinds = SUFFIXES if csv else SUFFIXES[2:]
    for place in places:
        files = [file for file in sorted(place.iterdir()) if file.suffix.lower() in kinds]
        splits: dict[str, list[Path]] = {}
        for file in files:
            word = file.stem.replace("_", "-").replace(".", "-").split("-")[0]
            splits.setdefault(split_of(word) or "", []).append(file)
        if "" not in splits and splits:
            return find_table(choose_split(splits, ask, shown(folder)), ask)
        if files:
            if ask.split is not None:
                raise DataError(
                    f"{shown(folder)}: the tables are not named after splits, such as "
                    f"train-0.parquet. Leave split='{ask.split}' out."
                )
            return find_table(files, ask)
    return None


def find_table(files: Sequence[Path], ask: Ask) -> Found:
    """Find records in one table, which may lie in several files of the same columns."""
    where = shown(files[0])
    with told_by_arrow(where):
        schema = _schema(files[0])
        for file in files[1:]:
            if _schema(file).names != schema.names:
                raise DataError(f"{shown(file)} has other columns than {where}.")
        image = None if ask.columns is not None else _image_column(schema, ask)
        if image is None:
            return find_cells(_joined([_load(file) for file in files]), ask, where)
        label = label_column(schema.names, ask, where)
        table = _joined([_load(file, [label]) for file in files])
        kind = plain(schema.field(image).type)
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            paths = [
                (file.parent / str(text)) if text else None
                for file in files
                for text in _load(file, [image]).column(image).to_pylist()
            ]
            if None in paths:
                raise DataError(f"{where}: row {paths.index(None)} has no image path.")
            batches: Iterator[tuple[str, Array]] = decoded(cast(list[Path], paths))
        else:
            batches = _embedded(files, image)
        labels, names = classes_of(table.column(label), label, where)
        return Found(
            where=where,
            count=table.num_rows,
            batches=batches,
            labels=labels,
            names=_label_names(schema, label) or names,
            notes=(DECODED,),
        )


@contextlib.contextmanager
def told_by_arrow(where: str) -> Iterator[None]:
    """Turn what Arrow says into a :class:`DataError`."""
    try:
        yield
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = " Save the table as UTF-8." if "UTF8" in reason else ""
        raise DataError(f"{where} is not a readable table: {shown(reason)}.{hint}") from error


# Files


def _open(file: Path) -> Any:
    """Open a file in Arrow, whose threads read on while an error ends the process.

    A file of Python's would abort it there: they could no longer take the interpreter's lock.
    """
    if _is_utf8(file):
        return pa.OSFile(os.fspath(file))
    return pa.BufferReader(file.read_bytes())  # Arrow cannot take such a name


def _arrow(file: Path) -> Any:
    source = pa.memory_map(os.fspath(file)) if _is_utf8(file) else _open(file)
    try:
        return pa.ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_stream(source)


def _is_utf8(file: Path) -> bool:
    try:
        os.fspath(file).encode()
    except UnicodeEncodeError:
        return False
    return True


def _schema(file: Path) -> Any:
    suffix = file.suffix.lower()
    if suffix in (".csv", ".tsv"):
        with _open(file) as handle:  # the first rows will do: types are settled by _load
            schema = pa.csv.open_csv(handle, parse_options=_delimiter(suffix)).schema
        return pa.schema([field.with_name(field.name.strip()) for field in schema])
    if suffix in (".arrow", ".feather"):
        return _arrow(file).schema
    with _open(file) as handle:
        return pa.parquet.read_schema(handle)


def _delimiter(suffix: str) -> Any:
    return pa.csv.ParseOptions(delimiter="\t" if suffix == ".tsv" else ",")


def _load(file: Path, columns: list[str] | None = None) -> Any:
    suffix = file.suffix.lower()
    if suffix in (".csv", ".tsv"):
        with _open(file) as handle:
            table = pa.csv.read_csv(handle, parse_options=_delimiter(suffix))
        for field in table.schema:
            if pa.types.is_binary(field.type):
                raise DataError(
                    f"{shown(file)}: column '{field.name}' is not UTF-8 text. Save the table as "
                    "UTF-8."
                )
        table = table.rename_columns([name.strip() for name in table.column_names])
    elif suffix in (".arrow", ".feather"):
        table = _arrow(file).read_all()
    else:
        with _open(file) as handle:
            table = pa.parquet.ParquetFile(handle).read(columns=columns)
    if len(set(table.column_names)) != len(table.column_names):
        raise DataError(f"{shown(file)} names a column twice: {table.column_names}.")
    return table if columns is None else table.select(columns)


def _joined(tables: list[Any]) -> Any:
    """Join tables; a column whose type was inferred differently becomes text, which reads alike."""
    for name in tables[0].column_names:
        if len({str(table.schema.field(name).type) for table in tables}) > 1:
            for i, table in enumerate(tables):
                place = table.column_names.index(name)
                tables[i] = table.set_column(place, name, texts_of(table.column(name), name))
    return pa.concat_tables([table.replace_schema_metadata(None) for table in tables])


def _embedded(files: Sequence[Path], column: str) -> Iterator[tuple[str, Array]]:
    """Decode the images that lie in a column, a few rows of the file at a time."""
    for file in files:
        row = 0
        with told_by_arrow(shown(file)):
            for cells in _cells(file, column):
                for cell in cells:
                    where = f"{shown(file)}, row {row}"
                    value = cell.as_py()
                    if isinstance(value, dict):
                        path, value = value.get("path"), value.get("bytes")
                        if value is None and path is not None:
                            value = (file.parent / path).read_bytes()
                    if not isinstance(value, bytes):
                        raise DataError(f"{where}: column '{column}' has no image there.")
                    yield where, decode(value, where)[None]
                    row += 1


def _cells(file: Path, column: str) -> Iterator[Any]:
    if file.suffix.lower() in (".arrow", ".feather"):
        yield from _arrow(file).read_all().column(column).chunks
        return
    with _open(file) as handle:
        parquet = pa.parquet.ParquetFile(handle)
        for batch in parquet.iter_batches(batch_size=64, columns=[column]):
            yield batch.column(0)


# Columns of image tables


def _is_image_type(kind: Any) -> bool:
    kind = plain(kind)
    if pa.types.is_struct(kind):
        return any(field.name == "bytes" for field in kind)
    return any(test(kind) for test in BINARY)


def _image_column(schema: Any, ask: Ask) -> str | None:
    """Return the column of images or of their paths, or None for a table of plain cells."""
    if ask.image is not None:
        if ask.image not in schema.names:
            raise UnknownName("column", ask.image, schema.names)
        return ask.image
    holding: list[str] = [name for name in schema.names if _is_image_type(schema.field(name).type)]
    if holding:
        return next((name for name in holding if name.lower() in IMAGE_COLUMNS), holding[0])
    names: list[str] = schema.names
    for name in names:
        kind = plain(schema.field(name).type)
        texts = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if name.lower() in IMAGE_COLUMNS and texts:
            return name
    return None


def _label_names(schema: Any, label: str) -> tuple[str, ...] | None:
    """Return the names a Hugging Face ClassLabel declares in the schema's metadata."""
    try:
        notes = json.loads((schema.metadata or {})[b"huggingface"])
        names = notes["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return tuple(str(name) for name in names) if names else None
