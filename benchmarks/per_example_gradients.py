"""Compare ways to take per-example gradients: the same network, records and tensors, one run.

Usage: python benchmarks/per_example_gradients.py [--records 64] [--width 128] [--side 28]
           [--device cpu] [--rounds 5] [--out FILE]

Three columns: PSG's contribution under ``vmap`` (as the gate runs it, a few records at a time),
the same contribution called record by record, and Opacus' hooks, where Opacus is installed. Each
way gives rows of gradients; the first two are checked against each other. Methods take turns
inside each round and the best of the rounds counts, so a busy machine disturbs all alike. Ratios
are to one by one. Prints a table and appends JSON lines.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from understudy.nets import random_convnet
from understudy.ops.gradients import gradient_of_one, matched

CLASSES = 10
CHUNKS = (8, 16, 32, 128)


def one_by_one(net: nn.Module, images: Tensor, labels: Tensor, names: tuple[str, ...]) -> Tensor:
    """Run plain backward passes, one a record."""
    own = dict(net.named_parameters())
    moving = [own[name] for name in names]
    rows = []
    for image, label in zip(images, labels, strict=True):
        loss = F.cross_entropy(net(image[None]), label[None])
        rows.append(torch.cat([part.flatten() for part in torch.autograd.grad(loss, moving)]))
    return torch.stack(rows)


def vectorised(chunk: int) -> Callable[[nn.Module, Tensor, Tensor, tuple[str, ...]], Tensor]:
    """Return the gate's way: a chunk of records at a time."""

    def run(net: nn.Module, images: Tensor, labels: Tensor, names: tuple[str, ...]) -> Tensor:
        parameters = {name: value.detach() for name, value in net.named_parameters()}
        rows = torch.func.vmap(gradient_of_one(net, parameters, names))
        pieces = zip(torch.split(images, chunk), torch.split(labels, chunk), strict=True)
        return torch.cat([rows(*piece) for piece in pieces])

    return run


def opacus_hooks(net: nn.Module, images: Tensor, labels: Tensor, names: tuple[str, ...]) -> Tensor:
    """Let Opacus' hooks fill ``grad_sample`` in one backward pass."""
    from opacus import GradSampleModule

    own_net = copy.deepcopy(net)
    for parameter in own_net.parameters():  # what is not matched needs no rows
        parameter.requires_grad = parameter.dim() >= 2
    hooked = GradSampleModule(own_net, loss_reduction="sum")
    F.cross_entropy(hooked(images), labels, reduction="sum").backward()
    own = dict(hooked._module.named_parameters())
    return torch.cat([own[name].grad_sample.flatten(1) for name in names], dim=1)


def main() -> None:
    """Time every way and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--side", type=int, default=28)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))

    device, shape = torch.device(options.device), (1, options.side, options.side)
    net = random_convnet(0, shape, CLASSES, width=options.width, device=device)
    names = matched(dict(net.named_parameters()))
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(options.records, *shape, generator=generator).to(device)
    labels = torch.randint(CLASSES, (options.records,), generator=generator).to(device)

    ways = {"one by one": one_by_one}
    ways |= {f"vmap(grad), {c} at a time": vectorised(c) for c in CHUNKS if c <= options.records}
    try:
        import opacus

        ways[f"Opacus {opacus.__version__}, hooks"] = opacus_hooks
    except ImportError:
        print("Opacus is not installed: its row is left out (pip install opacus).\n")

    with torch.backends.cudnn.flags(allow_tf32=False):
        truth = one_by_one(net, images, labels, names)
        for way in ways.values():  # warm up, and check
            torch.testing.assert_close(way(net, images, labels, names), truth, rtol=1e-2, atol=1e-4)
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(options.rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way(net, images, labels, names)
            if device.type == "cuda":
                torch.cuda.synchronize()
            best[name] = min(best[name], time.perf_counter() - started)

    print(f"{truth.shape[1]:,} numbers a gradient, {options.records} records, {device}\n")
    print("| way | ms a record | times as fast as one by one |")
    print("| --- | ---: | ---: |")
    for name, seconds in best.items():
        ratio = best["one by one"] / seconds
        print(f"| {name} | {1000 * seconds / options.records:.3f} | {ratio:.2f} |")
    if options.out:
        line = {
            "benchmark": "per_example_gradients",
            "records": options.records,
            "width": options.width,
            "side": options.side,
            "device": str(device),
            "threads": torch.get_num_threads(),
            "ms_a_record": {n: round(1000 * s / options.records, 4) for n, s in best.items()},
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        }
        with options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
