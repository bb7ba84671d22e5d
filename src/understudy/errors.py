"""Say what was asked, what is there, and what would work.

The tree, with the exit code the command line ends with::

    UnderstudyError                 1
    ├── UsageError                  2   the call itself is wrong
    │   ├── UnknownName             2   no such method, dataset, field; the nearest is offered
    │   └── BadConfiguration        2   a method or query was configured so that it makes no sense
    ├── DataError                   3   the data cannot be read as declared; no budget was spent
    │   └── DatasetAbsent           3   a named dataset is not on this machine; says how to get it
    ├── PrivacyError                4
    │   ├── BudgetExceeded          4   the ledger has too little left; no record was read
    │   ├── AuditFailed             4   an attack did better than the claim allows (auditing/)
    │   ├── NotPlanned              4   a query outside the plan, or one too many
    │   └── LedgerError             4   the ledger is damaged, locked or made for other terms
    └── ReleaseError                5
        ├── Tampered                5   a release does not verify; says which file or number
        └── ReleaseExists           5   the target folder is in use

Ctrl-C ends with 130, as shells expect.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UnderstudyError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1


class UsageError(UnderstudyError):
    """The call itself is wrong."""

    exit_code = 2


class UnknownName(UsageError):
    """There is no such method, dataset, network or field."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, tuple(sorted(known))
        near = difflib.get_close_matches(name, self.known, n=1, cutoff=0.5)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        super().__init__(f"There is no {kind} '{name}'.{hint} Known: {', '.join(self.known)}.")


class BadConfiguration(UsageError, ValueError):
    """A method, query or option was given a value that makes no sense."""


class DataError(UnderstudyError):
    """The data cannot be read as declared. Nothing was spent."""

    exit_code = 3


class DatasetAbsent(DataError):
    """A named dataset is not on this machine."""


class PrivacyError(UnderstudyError):
    """The privacy core refused."""

    exit_code = 4


class BudgetExceeded(PrivacyError):
    """The ledger has too little left. No record was read."""


class NotPlanned(PrivacyError):
    """A query is outside the plan, or asked once too often."""


class LedgerError(PrivacyError):
    """The ledger is damaged, in use, or was opened under other terms."""


class ReleaseError(UnderstudyError):
    """A release folder cannot be read or written."""

    exit_code = 5


class Tampered(ReleaseError):
    """A release does not verify."""


class ReleaseExists(ReleaseError):
    """The folder to write to is in use."""
