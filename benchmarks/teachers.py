"""Compare a stack of teachers with a loop over them: one DataLens iteration, in one run.

Usage: python benchmarks/teachers.py [--teachers 200] [--device cpu] [--rounds 3] [--chunk N]
           [--loop N] [--preset mnist-eps1] [--side 28] [--out FILE]

    python benchmarks/teachers.py --teachers 2000 4000 --device cuda --loop 200

The stack is what a release does: batches drawn by the gate, two steps of every teacher, one noisy
sum of their votes. The loop does the same arithmetic with one PyTorch module and one
`torch.optim.Adam` a teacher, one after the other, without the gate. With ``--loop`` the loop covers
so many teachers and its time is scaled to all. Both take turns inside each round and the best of
the rounds counts, so a busy machine disturbs both alike. Before timing, one step of the first
teacher is checked against its module. Prints a table; appends one JSON line a number of teachers.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from understudy.engine import Engine
from understudy.methods.datalens import DataLens
from understudy.nets.gan import Discriminator
from understudy.privacy import (
    Budget,
    Ledger,
    PrivateDataset,
    Public,
    Records,
    Secret,
)
from understudy.privacy.gate import Gate, record_digests

CLASSES = 10


class Plain(nn.Module):
    """The published discriminator, as anybody would write it."""

    def __init__(self, like: Discriminator, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.classes = like.classes
        channels, side, _ = like.shape
        first, second = len(weights["first.weight"]), len(weights["second.weight"])
        hidden = len(weights["third.weight"])
        self.first = nn.Conv2d(channels + self.classes, first, 5, stride=2)
        self.second = nn.Conv2d(first + self.classes, second, 5, stride=2)
        self.second_norm = nn.BatchNorm2d(second, track_running_stats=False)
        self.third = nn.Linear(second * (side // 4) ** 2 + self.classes, hidden)
        self.third_norm = nn.BatchNorm1d(hidden, track_running_stats=False)
        self.last = nn.Linear(hidden + self.classes, 1)
        self.to(weights["first.weight"].device)
        with torch.no_grad():
            for name, value in weights.items():
                name = name.replace(".scale", "_norm.weight").replace(".shift", "_norm.bias")
                self.get_parameter(name).copy_(value)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return one logit a picture."""
        told = F.one_hot(labels, self.classes).to(images.dtype)

        def joined(x: Tensor) -> Tensor:
            x = torch.cat([x, told[:, :, None, None].expand(-1, -1, *x.shape[2:])], 1)
            return F.pad(x, (1, 2, 1, 2))

        x = F.leaky_relu(self.first(joined(images)), 0.2)
        x = F.leaky_relu(self.second_norm(self.second(joined(x))), 0.2).flatten(1)
        x = F.leaky_relu(self.third_norm(self.third(torch.cat([x, told], 1))), 0.2)
        logits: Tensor = self.last(torch.cat([x, told], 1))
        return logits[:, 0]


def learn(
    net: Plain, adam: torch.optim.Optimizer, real: Tensor, made: Tensor, labels: Tensor
) -> None:
    """Take one step of one module."""
    adam.zero_grad()
    error = F.softplus(-net(real, labels)).mean() + F.softplus(net(made, labels)).mean()
    error.backward()  # type: ignore[no-untyped-call]
    adam.step()


def dataset(records: int, side: int) -> PrivateDataset:
    """Make random records: speed does not depend on what they show."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (records, 1, side, side), np.uint8)
    labels = np.arange(records) % CLASSES
    public = Public(
        name="random pictures",
        shape=(1, side, side),
        classes=tuple(map(str, range(CLASSES))),
        counts=tuple(np.bincount(labels, minlength=CLASSES).tolist()),
    )
    return PrivateDataset(Records(images, labels, record_digests(images)), public)


def measure(options: argparse.Namespace, teachers: int) -> dict[str, object]:
    """Time both ways for one number of teachers."""
    device = torch.device(options.device)
    configuration = DataLens.presets[options.preset].configuration
    method = dataclasses.replace(
        DataLens.configured(configuration), teachers=teachers, iterations=options.rounds + 1
    )
    data = dataset(method.batch * teachers, options.side)
    engine = Engine(device=options.device, chunk=options.chunk)

    def wait() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        gate = stack.enter_context(
            data.open(
                method.plan(data.public),
                by="benchmark",
                recipe=method.recipe(),
                ledger=Ledger(Path(folder) / "ledger.jsonl"),
                budget=Budget(float("inf")),
                secret=Secret.for_testing(0),
                engine=engine,
            )
        )
        ways = both(options, method, gate)
        best = dict.fromkeys(ways, float("inf"))
        for turn in range(options.rounds + 1):
            for name, way in ways.items():
                started = wait()
                way()
                if turn:  # the first round warms up
                    best[name] = min(best[name], wait() - started)
    looped = min(options.loop or teachers, teachers)
    seconds = {"stack": best["stack"], "loop": best["loop"] * teachers / looped}
    memory = (
        torch.cuda.max_memory_allocated()
        if device.type == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    return {
        "benchmark": "teachers",
        "teachers": teachers,
        "looped_teachers": looped,
        "preset": options.preset,
        "side": options.side,
        "records_at_once": engine.records_at_once,
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "times_as_fast": round(seconds["loop"] / seconds["stack"], 2),
        "peak_memory_bytes": memory,
        "threads": torch.get_num_threads(),
        "machine": engine.describe(),
        "python": platform.python_version(),
    }


def both(
    options: argparse.Namespace, method: DataLens, gate: Gate
) -> dict[str, Callable[[], None]]:
    """Return one iteration of the stack, and one of the loop."""
    public, device, vote = gate.public, gate.engine.torch_device, method.vote(gate.public.dimension)
    teacher = method.discriminator(public)
    query = method.query(public)
    stream = torch.Generator().manual_seed(0)
    made = torch.rand(CLASSES, method.batch, *public.shape, generator=stream).to(device)
    asked = torch.rand(method.images_per_iteration, *public.shape, generator=stream).to(device)
    wanted = (torch.arange(method.images_per_iteration) % CLASSES).to(device)
    lesson = method.lesson(teacher, made)
    ballots = method.ballots(teacher, asked, wanted)
    shards = gate.shards(method.teachers, method.first_teachers(teacher), batch=method.batch)
    coins = (len(asked), vote.coins(public.dimension))

    def stacked() -> None:
        shards.train(lesson, times=method.teacher_steps)
        shards.noisy_sum(query, ballots, coins=coins)

    count = min(options.loop or method.teachers, method.teachers)
    first = method.first_teachers(teacher)
    nets = []
    for number in range(count):
        own = first(torch.tensor([number], device=device))
        weights = {n[8:]: v[0] for n, v in own.items() if n.startswith("weights.")}
        nets.append(Plain(teacher, weights))
    adams = [
        torch.optim.Adam(
            net.parameters(), lr=method.teacher_learning_rate, betas=(method.momentum, 0.999)
        )
        for net in nets
    ]
    real = torch.rand(method.batch, *public.shape, generator=stream).to(device)
    labels = (torch.arange(method.batch) % CLASSES).to(device)
    fakes = made[labels, torch.arange(method.batch, device=device)]
    check(method, teacher, lesson, real, fakes, labels)
    tosses = torch.rand(coins, generator=stream).to(device)
    cast = torch.func.vmap(vote.cast)

    def looped() -> None:
        total = torch.zeros(len(asked), vote.width(public.dimension), device=device)
        for net, adam in zip(nets, adams, strict=True):
            for _ in range(method.teacher_steps):
                learn(net, adam, real, fakes, labels)
            images = asked.clone().requires_grad_()
            error = F.softplus(-net(images, wanted)).mean()
            (slope,) = torch.autograd.grad(error, images)
            total += cast(-slope.flatten(1), tosses)

    return {"stack": stacked, "loop": looped}


def check(
    method: DataLens,
    teacher: Discriminator,
    lesson: Callable[[dict[str, Tensor], Tensor, Tensor], dict[str, Tensor]],
    real: Tensor,
    fakes: Tensor,
    labels: Tensor,
) -> None:
    """Compare one step of the first teacher with its module's, by what they say of the records.

    Weights themselves differ where a gradient is almost zero: Adam's first step is its sign.
    """
    first = method.first_teachers(teacher)(torch.zeros(1, dtype=torch.long, device=real.device))
    start = {name: value[0] for name, value in first.items()}
    net = Plain(teacher, {n[8:]: v for n, v in start.items() if n.startswith("weights.")})
    adam = torch.optim.Adam(
        net.parameters(), lr=method.teacher_learning_rate, betas=(method.momentum, 0.999)
    )
    after = lesson(start, real * 2 - 1, labels)
    learn(net, adam, real, fakes, labels)
    ours = teacher({n[8:]: v for n, v in after.items() if n.startswith("weights.")}, real, labels)
    torch.testing.assert_close(ours, net(real, labels), rtol=2e-2, atol=2e-2)


def main() -> None:
    """Time every number of teachers and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teachers", type=int, nargs="+", default=[200])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loop", type=int)
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--preset", default="mnist-eps1", choices=DataLens.presets)
    parser.add_argument("--side", type=int, default=28)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))

    rows = [measure(options, teachers) for teachers in options.teachers]
    print(f"one iteration, preset '{options.preset}', {options.device}\n")
    print("| teachers | stack, s | loop, s | times as fast | peak memory, MiB |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        seconds, memory = row["seconds"], row["peak_memory_bytes"]
        assert isinstance(seconds, dict)
        assert isinstance(memory, int)
        print(
            f"| {row['teachers']:,} | {seconds['stack']:.3f} | {seconds['loop']:.3f} | "
            f"{row['times_as_fast']} | {memory / 2**20:,.0f} |"
        )
    if options.out:
        with options.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
