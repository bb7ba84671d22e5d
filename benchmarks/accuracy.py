"""Measure the accuracy of a method on a named dataset and keep the result with its provenance.

Usage, one line of `docs/results.md`:

    python benchmarks/accuracy.py mnist ldpdc --protocol dm --out benchmarks/results/ldpdc.jsonl

Each repeat makes a new release (its own secret noise, its own public seed, its own throw-away
ledger) and trains `--seeds` networks on it; accuracy is that of the last epoch on the whole test
set. Appends one JSON line a repeat.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from understudy import jobs, run
from understudy.data.datasets import load, load_heldout
from understudy.engine import Engine
from understudy.evaluation.classify import PROTOCOLS
from understudy.privacy import Budget, Ledger


def revision() -> str:
    """Return the commit this runs from, marked where the tree differs from it."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return found.stdout.strip() or "unknown"


def measure(options: argparse.Namespace, repeat: int) -> dict[str, Any]:
    """Make one release, evaluate it, and say how."""
    values = {"seed": repeat, **dict(pair.split("=", 1) for pair in options.set)}
    values = {key: json.loads(value) if isinstance(value, str) else value
              for key, value in values.items()}  # fmt: skip
    method = jobs.configure(options.method, values, preset=options.preset)
    engine = Engine(device=options.device)
    data = load(options.dataset)
    test = load_heldout(options.dataset, like=data.public)
    protocol = PROTOCOLS[options.protocol]
    protocol = protocol.with_flips() if options.flips else protocol

    def told(done: int, total: int, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{done}/{total} {text[:60]:60}", end="", file=sys.stderr)

    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        release = run.fit(
            data,
            method,
            budget=None if options.epsilon is None else Budget(options.epsilon),
            ledger=Ledger(Path(folder) / "ledger.jsonl"),
            engine=engine,
            progress=told,
        )
        fitted = time.perf_counter()
        synthetic = run.synthesise(release, engine=engine, progress=told)
        made = time.perf_counter()
    seeds = tuple(range(100 * repeat, 100 * repeat + options.seeds))
    scores = run.evaluate(
        synthetic, test, protocol=protocol, seeds=seeds, engine=engine, progress=told
    )
    done = time.perf_counter()
    recipe = json.dumps(release.recipe, sort_keys=True, default=str)
    return {
        "benchmark": "accuracy",
        "dataset": options.dataset,
        "recipe": release.recipe,
        "recipe_sha256": hashlib.sha256(recipe.encode()).hexdigest(),
        "records": data.public.size,
        "synthetic_records": len(synthetic),
        "epsilon": release.statement.epsilon,
        "epsilon_rdp": release.statement.recompute(jobs.Accountant.RDP),
        "delta": release.statement.delta,
        "scores": scores.to_json(),
        "seconds": {
            "fit": round(fitted - started, 1),
            "synthesise": round(made - fitted, 1),
            "evaluate": round(done - made, 1),
        },
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "threads": torch.get_num_threads(),
        "machine": engine.describe(),
        "python": platform.python_version(),
        "revision": revision(),
        "command": "python benchmarks/accuracy.py " + " ".join(sys.argv[1:]),
    }


def main() -> None:
    """Run the repeats and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dataset")
    parser.add_argument("method")
    parser.add_argument("--preset")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON")
    parser.add_argument("--epsilon", type=float)
    parser.add_argument("--protocol", default="dm", choices=PROTOCOLS)
    parser.add_argument("--flips", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    for repeat in range(options.repeats):
        row = measure(options, repeat)
        print(
            f"{row['dataset']} {options.method} epsilon {row['epsilon']:.3g}: "
            f"{row['scores']['accuracy']:.2%} ({row['seconds']})"
        )
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
