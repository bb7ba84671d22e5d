"""Put bytes on disk so that they are there after a crash, whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path


def write_durably(path: Path, content: bytes | Callable[[Path], object]) -> None:
    """Write a whole file or none of it, and wait until it is on disk.

    ``content`` may be what writes a file of its own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        if isinstance(content, bytes):
            write_synced(draft, content)
        else:
            content(draft)
            sync(draft)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file and wait until its content is on disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
