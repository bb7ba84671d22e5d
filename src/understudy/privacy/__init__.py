"""The private side: what is declared, asked, priced, reserved, read and stated.

Imports no networks, no datasets and no methods. Read in this order: ``public`` (what is
declared), ``events`` (what may be asked), ``accounting`` (what it costs), ``ledger`` (what was
spent), ``noise`` (where randomness comes from), ``gate`` (the one reader of records),
``statement`` and ``release`` (what leaves).
"""

from understudy.privacy.accounting import Accountant, Budget, calibrate, epsilon
from understudy.privacy.events import Event, Plan, Query, Step
from understudy.privacy.gate import Gate, NoisySum, PrivateDataset, Records
from understudy.privacy.ledger import Grant, Ledger
from understudy.privacy.noise import Secret
from understudy.privacy.public import Adjacency, Column, Public
from understudy.privacy.release import Release
from understudy.privacy.statement import Statement

__all__ = [
    "Accountant",
    "Adjacency",
    "Budget",
    "Column",
    "Event",
    "Gate",
    "Grant",
    "Ledger",
    "NoisySum",
    "Plan",
    "PrivateDataset",
    "Public",
    "Query",
    "Records",
    "Release",
    "Secret",
    "Statement",
    "Step",
    "calibrate",
    "epsilon",
]
