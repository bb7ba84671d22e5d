"""Keep measurements as JSON lines: appended durably, one for each cell that was run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from understudy.bench.cells import plain_values
from understudy.errors import DataError
from understudy.privacy.durable import sync

Line = Mapping[str, Any]

KIND = "cell"
"""Marks the lines of this format; other benchmarks keep theirs in the same folder."""


def append(file: Path, line: Line) -> None:
    """Write one line and wait until it is on disk."""
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = not file.exists()
    text = json.dumps(plain_values({"benchmark": KIND, **line}), allow_nan=False)
    torn = b"" if fresh or _ends_whole(file) else b"\n"
    with open(file, "ab") as stream:
        stream.write(torn + text.encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
    if fresh:
        sync(file.parent)


def read(file: Path) -> list[Line]:
    """Return the lines of cells, oldest first. A line that was cut short by a crash is left out."""
    if not file.exists():
        return []
    found: list[Line] = []
    for number, text in enumerate(file.read_text("utf-8").splitlines(), start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            if not text.endswith("}"):  # every whole line ends so
                continue
            raise DataError(f"{file}, line {number} is no JSON: {error}.") from error
        if isinstance(line, dict) and line.get("benchmark") == KIND:
            found.append(line)
    return found


def latest(lines: Iterable[Line]) -> dict[str, Line]:
    """Return what stands for each cell, by digest: its last measurement, whatever it was.

    Never the best one. A failure stands only where nothing was ever measured.
    """
    standing: dict[str, Line] = {}
    for line in lines:
        before = standing.get(line["cell"])
        if before is None or line["status"] == "done" or before["status"] == "failed":
            standing[line["cell"]] = line
    return standing


def _ends_whole(file: Path) -> bool:
    with open(file, "rb") as stream:
        if stream.seek(0, os.SEEK_END) == 0:
            return True
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) == b"\n"
