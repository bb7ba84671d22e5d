"""Put bytes on disk so that they are there after a crash, whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_durably(path: Path, content: bytes) -> None:
    """Write a whole file or none of it, and wait until it is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write_synced(draft, content)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file and wait until its content is on disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
