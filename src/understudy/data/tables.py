"""Encode tables of plain cells, and decode them again.

A table of cells is encoded by declared columns only: a number is scaled from its declared range
to [-1, 1] (clipped first), a category becomes one-hot 0/1 over its declared categories, and a
cell that is missing or unknown becomes all zeros. Ranges and categories are never taken from
the records, because that would leak them.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from understudy.data.found import Ask, Found, allocate, shown
from understudy.data.preparation import Array
from understudy.errors import BadConfiguration, DataError, UnknownName
from understudy.privacy.gate import record_digests
from understudy.privacy.public import Column

LABEL_COLUMNS = ("label", "labels", "class", "target", "y", "category")

MISSING = "cells that are missing or outside the declared categories become all zeros"
CLIPPED = "numbers clipped to their declared ranges, which are mapped to [-1, 1]"
BINARY = (pa.types.is_binary, pa.types.is_large_binary)

_MOST_CLASSES = 1000


def find_cells(table: Any, ask: Ask, where: str) -> Found:
    """Encode a table of plain cells by its declared columns."""
    table = table.select(
        [name for name in table.column_names if not name.startswith("__index_level_")]
    )
    label = label_column(table.column_names, ask, where)
    columns, left_out = declared(ask.columns, table.schema, label, where)
    labels, names = classes_of(table.column(label), label, where)
    notes = [CLIPPED] if any(column.kind == "numeric" for column in columns) else []
    notes.append(MISSING)
    if left_out:
        notes.append(f"columns left out: {', '.join(left_out)}")
    return Found(
        where=where,
        count=table.num_rows,
        batches=(),
        labels=labels,
        names=names,
        whole=encode(table, columns, ask.memory_limit),
        digests=digest_rows(table),
        columns=columns,
        notes=tuple(notes),
    )


def declared(
    columns: Any, schema: Any, label: str, where: str
) -> tuple[tuple[Column, ...], tuple[str, ...]]:
    """Return the declared columns in order, and the names of those declared left out.

    ``columns`` is a mapping, JSON text, the path of a JSON file, or :class:`Column` objects:
    ``{"age": [17, 90], "sex": ["Female", "Male"], "id": null}``. Two numbers are a range, a list
    of names are categories, null leaves a column out. A range of whole numbers decodes to whole
    numbers; write ``[0.0, 1.5]`` for others.
    """
    declarations = _declarations(columns)
    missing = [name for name in schema.names if name != label and name not in declarations]
    if declarations and all(isinstance(value, Column) for value in declarations.values()):
        # Objects, as Public carries them, are the whole declaration.
        declarations, missing = {**declarations, **dict.fromkeys(missing)}, []
    for name in declarations:
        if name not in schema.names:
            raise UnknownName("column", name, schema.names)
    if missing:
        raise DataError(_undeclared(missing, schema, where))
    kept, left_out = [], []
    for name, declaration in declarations.items():
        if declaration is None:
            left_out.append(name)
        elif name != label:
            kept.append(_column(name, declaration))
    if not kept:
        raise DataError(f"{where}: no column besides the label '{label}' is declared.")
    return tuple(kept), tuple(left_out)


def _declarations(columns: Any) -> dict[str, Any]:
    if columns is None:
        return {}
    if isinstance(columns, str | os.PathLike):
        text = os.fspath(columns)
        if not str(text).lstrip().startswith("{"):
            try:
                text = Path(columns).read_text("utf-8")
            except (OSError, UnicodeError) as error:
                raise DataError(
                    f"The column declarations '{shown(columns)}' cannot be read: {error}."
                ) from error
        try:
            columns = json.loads(text)
        except ValueError as error:
            raise DataError(f"The column declarations are not valid JSON: {error}.") from error
    if isinstance(columns, Mapping):
        return {str(name): value for name, value in columns.items()}
    if isinstance(columns, Sequence) and all(isinstance(c, Column) for c in columns):
        return {column.name: column for column in columns}
    raise BadConfiguration('columns must be like {"age": [17, 90], "sex": ["Female", "Male"]}.')


def _column(name: str, declaration: Any) -> Column:
    if isinstance(declaration, Column):
        return declaration
    if isinstance(declaration, Mapping):
        extra = set(declaration) - {"low", "high", "categories"}
        if extra:
            raise UnknownName(
                f"entry for column '{name}'", str(min(extra)), ("low", "high", "categories")
            )
        declaration = declaration.get("categories") or [
            declaration.get("low"),
            declaration.get("high"),
        ]
    if not isinstance(declaration, list | tuple) or not declaration:
        raise BadConfiguration(
            f"Column '{name}' is declared as {declaration!r}; expected [low, high], a list of "
            "categories, or null to leave it out."
        )
    numbers = [isinstance(v, int | float) and not isinstance(v, bool) for v in declaration]
    if all(numbers) and len(declaration) == 2:
        low, high = declaration
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise BadConfiguration(f"Column '{name}' needs a finite range with low < high.")
        return Column(name=name, kind="numeric", low=low, high=high)
    categories = tuple(_category(value) for value in declaration)
    if len(set(categories)) != len(categories):
        raise BadConfiguration(f"Column '{name}' names a category twice.")
    return Column(name=name, kind="categorical", categories=categories)


def _category(value: Any) -> str:
    """Write a declared category as the cell would be written."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def _undeclared(names: Sequence[str], schema: Any, where: str) -> str:
    example = {
        name: "[LOW, HIGH]" if _is_number(schema.field(name).type) else '["...", "..."]'
        for name in names
    }
    text = ", ".join(f'"{name}": {value}' for name, value in example.items())
    numeric = [name for name in names if _is_number(schema.field(name).type)]
    which = f"Column '{numeric[0]}' is numeric" if numeric else f"Column '{names[0]}' is text"
    need = "range" if numeric else "list of categories"
    return (
        f"{where}: {which} and has no declared {need}. One taken from the records would leak them, "
        f"so declare what is publicly known, with --columns columns.json (columns=... in Python): "
        f"{{{text}}}. null leaves a column out."
    )


def _is_number(kind: Any) -> bool:
    kind = plain(kind)
    return any(
        test(kind) for test in (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    )


# Labels and cells


def label_column(names: Sequence[str], ask: Ask, where: str) -> str:
    """Return the label column: the named one, or one with a usual name."""
    if ask.label is not None:
        if ask.label not in names:
            raise UnknownName("column", ask.label, names)
        return ask.label
    for usual in LABEL_COLUMNS:
        for name in names:
            if name.lower() == usual:
                return name
    raise DataError(
        f"{where} has columns {', '.join(names)}. Which is the label? Name it with --label "
        "(label=... in Python)."
    )


def classes_of(column: Any, label: str, where: str) -> tuple[Array, tuple[str, ...] | None]:
    """Return labels; numbers are named after themselves, in their own order."""
    if column.null_count:
        raise DataError(f"{where}: {column.null_count} cells of label column '{label}' are empty.")
    texts = np.array(texts_of(column, label).to_pylist(), dtype=np.str_)
    kinds = sorted({str(text) for text in texts})
    if len(kinds) > _MOST_CLASSES or any(_is_fraction(kind) for kind in kinds):
        raise DataError(
            f"{where}: label column '{label}' has {len(kinds)} different values, which look like "
            "measurements, not classes. Choose another with --label, or bin it first."
        )
    if not pa.types.is_integer(plain(column.type)):
        return texts, None
    kinds.sort(key=int)
    numbers = texts.astype(np.int64)
    if int(kinds[0]) < 0:
        return numbers, None  # refused with the other labels out of range
    index = {int(kind): place for place, kind in enumerate(kinds)}
    return np.array([index[int(number)] for number in numbers], np.int64), tuple(kinds)


def _is_fraction(text: str) -> bool:
    try:
        return not float(text).is_integer()
    except (ValueError, OverflowError):
        return False


def plain(kind: Any) -> Any:
    """Look through dictionaries and extensions to the type of the cells."""
    if pa.types.is_dictionary(kind):
        return kind.value_type
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def texts_of(column: Any, name: str) -> Any:
    """Write cells as text, alike from every format: 39, 0.5, true, Private; missing is empty."""
    kind = plain(column.type)
    if kind != column.type:
        column = column.cast(kind)
    if pa.types.is_nested(kind):
        raise DataError(f"Column '{name}' holds {kind}: only plain cells can be read.")
    if pa.types.is_floating(kind):
        column = pc.if_else(pc.is_nan(column), None, column).cast(pa.float64())
    if any(test(kind) for test in BINARY):
        raise DataError(f"Column '{name}' holds bytes: only plain cells can be read.")
    return pc.fill_null(pc.utf8_trim_whitespace(column.cast(pa.string())), "").combine_chunks()


def _numbers(column: Any, name: str) -> npt.NDArray[np.float64]:
    """Return cells as numbers, NaN where there is none."""
    kind = plain(column.type)
    if _is_number(kind):
        numbers = column.cast(kind).cast(pa.float64(), safe=False)
        return cast(npt.NDArray[np.float64], numbers.to_numpy())

    def number(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            return math.nan

    return np.array([number(text) for text in texts_of(column, name).to_pylist()], np.float64)


def encode(table: Any, columns: Sequence[Column], memory_limit: int) -> npt.NDArray[np.float32]:
    """Encode cells as declared: see the top of the file."""
    width = sum(column.width for column in columns)
    features = allocate((table.num_rows, width), np.float32, memory_limit)
    first = 0
    for column in columns:
        cells, block = table.column(column.name), features[:, first : first + column.width]
        if column.kind == "numeric":
            low, high = cast(float, column.low), cast(float, column.high)
            scaled = (np.clip(_numbers(cells, column.name), low, high) - low) / (high - low) * 2 - 1
            block[:, 0] = np.nan_to_num(scaled, nan=0.0)
        else:
            known = pa.array(column.categories, pa.string())
            places = pc.fill_null(pc.index_in(texts_of(cells, column.name), known), -1).to_numpy()
            block[:] = places[:, None] == np.arange(column.width)
        first += column.width
    return features


def digest_rows(table: Any) -> npt.NDArray[np.uint8]:
    """Digest all cells of each row, the label's too, by column name.

    Whichever column is the label, and in whichever order columns lie, a row is the same record.
    """
    names = sorted(table.column_names)
    header = "\x1f".join(names).encode()
    cells = [texts_of(table.column(name), name) for name in names]
    rows = pc.binary_join_element_wise(*cells, "\x1e")
    hashed = b"".join(
        hashlib.blake2b(header + b"\x1d" + row.encode(), digest_size=32).digest()
        for row in rows.to_pylist()
    )
    return record_digests(np.frombuffer(hashed, np.uint8).reshape(table.num_rows, 32))


def decode_table(features: npt.NDArray[Any], columns: Sequence[Column]) -> pa.Table:
    """Turn encoded rows back into cells, as for a synthetic table.

    A number is mapped back into its range (a whole number where the range is written in whole
    numbers); a category is the one with the largest entry, or missing if none is above zero.
    """
    features = np.asarray(features, np.float64)
    width = sum(column.width for column in columns)
    if features.ndim != 2 or features.shape[1] != width:
        raise DataError(
            f"Encoded rows have shape {features.shape}; these {len(columns)} columns need (rows, "
            f"{width})."
        )
    decoded_columns: dict[str, Any] = {}
    first = 0
    for column in columns:
        block = features[:, first : first + column.width]
        if column.kind == "numeric":
            low, high = cast(float, column.low), cast(float, column.high)
            numbers = (np.clip(block[:, 0], -1, 1) + 1) / 2 * (high - low) + low
            if isinstance(low, int) and isinstance(high, int):
                decoded_columns[column.name] = pa.array(np.rint(numbers).astype(np.int64))
            else:
                decoded_columns[column.name] = pa.array(numbers)
        else:
            best, height = block.argmax(axis=1), block.max(axis=1)
            names = np.array([*column.categories, None], object)
            cells = names[np.where(height > 0, best, column.width)]
            decoded_columns[column.name] = pa.array(cells, pa.string())
        first += column.width
    return pa.table(decoded_columns)


def table_of(rows: Sequence[Sequence[str]], names: Sequence[str]) -> pa.Table:
    """Build a table of rows of text, reading numbers as numbers, as from a CSV file."""
    text = io.BytesIO()
    pa.csv.write_csv(
        pa.table({name: [row[i] for row in rows] for i, name in enumerate(names)}), text
    )
    return pa.csv.read_csv(pa.BufferReader(text.getvalue()))
