"""Show that the gate's memory does not grow with the data.

Usage: python benchmarks/gate_memory.py [--out FILE]

Writes memory-mapped datasets of growing size to a temporary folder, asks each one whole-set query
(class sums of a small random network's features) and one Poisson query, and records the peak
anonymous memory (RssAnon of /proc/self/status, so pages of the mapped file do not count) above
what the process held before. One process a size. Prints a table and appends JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

SHAPE = (3, 32, 32)
SIZES = (20_000, 80_000, 320_000)
CHUNK = 128


def anonymous() -> int:
    """Return this process's anonymous resident bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon: this benchmark needs Linux")


def measure(records: int) -> dict[str, object]:
    """Ask one dataset in this process and return what it took."""
    import torch

    from understudy.engine import Engine
    from understudy.nets import random_convnet
    from understudy.privacy import (
        Budget,
        Ledger,
        Plan,
        PrivateDataset,
        Public,
        Query,
        Records,
        Step,
    )
    from understudy.privacy.gate import record_digests

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.npy"
        images = np.lib.format.open_memmap(path, "w+", np.uint8, (records, *SHAPE))
        random = np.random.default_rng(0)
        for first in range(0, records, 10_000):
            images[first : first + 10_000] = random.integers(
                0, 256, images[first : first + 10_000].shape, np.uint8
            )
        images.flush()
        labels = np.arange(records) % 10
        mapped = np.load(path, mmap_mode="r")
        public = Public(
            name="mapped",
            shape=SHAPE,
            classes=tuple("0123456789"),
            counts=tuple(np.bincount(labels).tolist()),
        )
        data = PrivateDataset(Records(mapped, labels, record_digests(mapped)), public)
        net = random_convnet(0, SHAPE, 10, width=8)
        whole = Query(name="whole", bound=1.0, noise_multiplier=1.0, per_class=True)
        sampled = Query(
            name="sampled", bound=1.0, noise_multiplier=1.0, per_class=True, expected_batch=50
        )
        net(torch.zeros(CHUNK, *SHAPE))
        before = peak = anonymous()
        done = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.005):
                peak = max(peak, anonymous())

        watcher = threading.Thread(target=watch)
        watcher.start()
        started = time.perf_counter()
        with data.open(
            Plan(Step(whole, 1), Step(sampled, 1)),
            by="benchmark",
            recipe={},
            ledger=Ledger(Path(folder) / "ledger.jsonl"),
            budget=Budget(float("inf")),
            engine=Engine(device="cpu", chunk=CHUNK),
        ) as gate:
            for query in (whole, sampled):
                gate.noisy_sum(query, lambda image, label: net.embed(image[None])[0])
        seconds = time.perf_counter() - started
        done.set()
        watcher.join()
        return {
            "benchmark": "gate_memory",
            "records": records,
            "data_bytes": path.stat().st_size,
            "chunk": CHUNK,
            "peak_bytes": peak - before,
            "seconds": round(seconds, 2),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        }


def main() -> None:
    """Run every size in a process of its own and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--records", type=int)
    options = parser.parse_args()
    if options.records:
        print(json.dumps(measure(options.records)))
        return
    rows = []
    for records in SIZES:
        done = subprocess.run(
            [sys.executable, __file__, "--records", str(records)],
            check=True,
            capture_output=True,
            text=True,
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    print("| records | data on disk | peak memory of the gate | seconds |")
    print("| ---: | ---: | ---: | ---: |")
    for row in rows:
        print(
            f"| {row['records']:,} | {row['data_bytes'] / 2**20:,.0f} MiB | "
            f"{row['peak_bytes'] / 2**20:,.0f} MiB | {row['seconds']} |"
        )
    if options.out:
        with options.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
