"""Kill a run at random instants, many times, and look at what its ledger says.

Usage: python -m tests.privacy.kill_at_random LEDGER KILLS

Each round forks a child that fits a small dataset and reports every answer it sees through a
pipe; the parent kills it (SIGKILL): every other round after a random time from its start, else a
random few milliseconds after a random answer. After each kill:

* the ledger's chain is intact and holds the reservation of every answer that was seen;
* an answer seen twice (a run taken up again) is the same, bit for bit;
* what is recorded equals the price of all grants handed out.
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import sys
import time
from pathlib import Path

import numpy as np
import torch

from tests.fixtures import private
from understudy.engine import Engine
from understudy.methods import LDPDC
from understudy.privacy import Budget, Ledger

ANSWERS = 30
REPORT = struct.Struct("<16sIQ")


def child(path: Path, pipe: int) -> None:
    """Fit, reporting (grant, turn, hash of the answer) as soon as an answer is seen."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (80, 1, 4, 4)).astype(np.uint8)
    data = private(images, np.arange(80) % 2)
    method = LDPDC(noise_multiplier=60.0, images_per_class=ANSWERS, group_size=10)
    with data.open(
        method.plan(data.public),
        by="ldpdc",
        recipe=method.recipe(),
        ledger=Ledger(path),
        budget=Budget(50.0),
        engine=Engine(device="cpu"),
    ) as gate:
        query = method.query(data.public)
        for turn in range(ANSWERS):
            answer = gate.noisy_sum(query, lambda image, label: image).value
            mark = hash(answer.numpy().tobytes()) & (2**64 - 1)
            os.write(pipe, REPORT.pack(gate.grant.id.encode(), turn, mark))


def main(path: Path, kills: int) -> dict[str, object]:
    """Run the rounds and report."""
    rng = random.Random(os.urandom(8))
    seen: dict[tuple[str, int], int] = {}
    violations: list[str] = []
    answering = 0
    longest = 0.25
    for number in range(kills):
        reading, writing = os.pipe()
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            try:
                child(path, writing)
            finally:
                os._exit(0)
        os.close(writing)
        reports = b""
        if number % 2:
            time.sleep(rng.random() * longest)
        else:
            for _ in range(rng.randrange(1, ANSWERS + 1)):
                reports += os.read(reading, REPORT.size)
            longest = max(longest, min(2.0, 1.5 * (time.monotonic() - started)))
            time.sleep(rng.random() * 0.004)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while part := os.read(reading, 1 << 16):
            reports += part
        os.close(reading)
        ledger = Ledger(path)
        granted = {entry["grant"]: entry for entry in ledger.grants()}
        answering += 0 < len(reports) < ANSWERS * REPORT.size
        for grant_bytes, turn, mark in REPORT.iter_unpack(reports):
            grant = grant_bytes.decode()
            if grant not in granted:
                violations.append(f"round {number}: an answer under {grant}, not in the ledger")
            elif granted[grant]["events"][0]["times"] != ANSWERS:
                violations.append(f"round {number}: {grant} reserved the wrong number of answers")
            if seen.setdefault((grant, turn), mark) != mark:
                violations.append(f"round {number}: turn {turn} of {grant} was drawn twice")
    return {
        "kills": kills,
        "killed while answering": answering,
        "grants": len(Ledger(path).grants()),
        "answers seen": len(seen),
        "violations": violations,
    }


if __name__ == "__main__":
    # One hash seed for all children, so that equal answers have equal marks.
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
