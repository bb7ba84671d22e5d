"""Data in: readers for the usual formats, named datasets, real test sets.

Reading puts records behind the gate of :mod:`understudy.privacy`; from then on only their public
facts can be looked at. Read in this order: ``readers`` (the front door), ``found`` (the way all
formats go), ``preparation`` (what may be done to a record), then one file per family of formats:
``images``, ``arrays``, ``frames``, ``tables``; ``datasets`` (known by name), ``heldout``.
``decode_table`` is imported when it is first used: pictures do without pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.data.datasets import (
    DATASETS,
    NamedDataset,
    load,
    load_heldout,
    open_data,
    open_heldout,
    open_training,
)
from understudy.data.heldout import HeldOut, read_heldout
from understudy.data.readers import read

if TYPE_CHECKING:
    from understudy.data.tables import decode_table

__all__ = [
    "DATASETS",
    "HeldOut",
    "NamedDataset",
    "decode_table",
    "load",
    "load_heldout",
    "open_data",
    "open_heldout",
    "open_training",
    "read",
    "read_heldout",
]


def __getattr__(name: str) -> Any:
    if name != "decode_table":
        raise AttributeError(f"module 'understudy.data' has no attribute '{name}'")
    from understudy.data.tables import decode_table

    return decode_table
