"""Let many processes race for one budget.

Usage: python -m tests.privacy.race LEDGER PROCESSES
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.fixtures import little
from understudy.errors import BudgetExceeded
from understudy.privacy import Accountant, Budget, Ledger, Plan, Query, Step
from understudy.privacy.ledger import total_epsilon
from understudy.privacy.public import Adjacency

AFFORDABLE = 5


def main(path: Path, processes: int) -> dict[str, object]:
    """Fork the racers at once, wait for all, and count."""
    public = little(8).public
    events = Plan(Step(Query(name="q", bound=1.0, noise_multiplier=20.0), 10)).events(public)

    def price(runs: int, cap: Budget) -> float:
        return total_epsilon(
            [events] * runs,
            [Accountant.PLD] * runs,
            cap,
            adjacency=Adjacency.ADD_OR_REMOVE,
            labels_fixed=False,
        )

    cap = Budget(1.0)
    for _ in range(20):  # prices depend a little on the cap, which chooses the order
        cap = Budget((price(AFFORDABLE, cap) + price(AFFORDABLE + 1, cap)) / 2)
    children = []
    for number in range(processes):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with Ledger(path, cap=cap).reserve(
                    events,
                    by=f"racer {number}",
                    recipe={"racer": number},
                    public=public,
                    budget=cap,
                    fingerprint=b"one dataset",
                ):
                    code = 0
            except BudgetExceeded:
                code = 3
            finally:
                os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    return {
        "granted": codes.count(0),
        "refused": codes.count(3),
        "failed": codes.count(1),
        "affordable": AFFORDABLE,
        "spent": Ledger(path).spent(),
        "cap": cap.epsilon,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
