"""Time one query over a whole set of 60,000 pictures: what the whole-set plan asks 50 times.

Usage: python benchmarks/speed/whole_set_pass.py [--small] [--device cuda] [--out]

MNIST's sizes, random pictures of 28x28, ConvNet of width 128, an augmentation draw a class. Ours is
`WholeSet.measure` through a gate: bytes to numbers, features record by record under vmap, clipping,
exact sums, noise, journal. The plain way keeps all pictures on the device as floats and goes class
by class, batch by batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import plain
import torch
from suite import Drawn, Suite, Way, draw_records, mnist_sizes, throw_away_gate
from torch import Tensor

from understudy.engine import Engine
from understudy.methods.matching import public_seed
from understudy.methods.whole_set import WholeSet
from understudy.nets import ConvNet, draw_parameters
from understudy.ops.augment import Augmentation

PLAIN_BATCH = 256
"""Pictures of a batch in the usual code (DM's and PSG's real batch)."""


@torch.no_grad()
def plain_pass(
    net: plain.Network,
    real: Tensor,
    labels: Tensor,
    classes: int,
    bound: float,
    noise_multiplier: float,
    augment: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """Return the noisy sum of clipped features of each class."""
    sums = []
    for c in range(classes):
        members = (labels == c).nonzero().flatten()
        total: Tensor | None = None
        for picked in torch.split(members, PLAIN_BATCH):
            features = plain.clipped(net.embed(augment(real[picked], c)), bound)
            total = features.sum(dim=0) if total is None else total + features.sum(dim=0)
        assert total is not None, f"class {c} has no records"
        sums.append(total + noise_multiplier * bound * torch.randn_like(total))
    return torch.stack(sums)


def ours(suite: Suite, method: WholeSet, drawn: Drawn) -> Way:
    """Ask as the whole-set plan does."""

    def run(count: int) -> Sequence[float]:
        laps = suite.laps()
        asked = dataclasses.replace(method, queries=count + 1)
        with suite.gate(drawn.private, asked, laps) as gate:
            asked.measure(gate)
        return laps.seconds

    return run


def plain_way(suite: Suite, method: WholeSet, drawn: Drawn) -> Way:
    """Pass with a network initialised on the CPU."""
    real, labels = drawn.on(suite.device), torch.from_numpy(drawn.labels).to(suite.device)
    shape, classes = drawn.private.public.shape, len(drawn.private.public.classes)
    assert method.clip_norm is not None

    def step() -> None:
        net = plain.fresh_network(shape, classes, method.width, suite.device, frozen=True)
        seed = plain.clock_seed()
        plain_pass(
            net, real, labels, classes, method.clip_norm or 1.0, method.noise_multiplier,
            lambda x, c: plain.augment(x, method.augmentation, seed + c),
        )  # fmt: skip

    return suite.repeated(step)


def check(shape: tuple[int, int, int], device: torch.device) -> None:
    """Compare the sums of two passes without noise."""
    drawn = draw_records(shape, (7, 8, 9))
    method = WholeSet(
        noise_multiplier=0.0, queries=2, width=4, augmentation="color_crop_cutout_scale_rotate"
    )
    with throw_away_gate(
        drawn.private,
        method,
        Engine(device=str(device), chunk=5, precision="float32"),
        lambda *_: None,
    ) as gate:
        sums = method.measure(gate).signals["sums"]
    real = drawn.on(torch.device("cpu")).double()
    with torch.device("meta"):
        template = ConvNet(shape, 3, 4)
    for i in range(2):
        weights = draw_parameters(template, public_seed(0, "network", i))
        draws = Augmentation(method.augmentation).draw(
            public_seed(0, "augmentation", i), 3, (shape[1], shape[2])
        )
        expected = plain_pass(
            plain.same_network(shape, 3, 4, weights), real, torch.from_numpy(drawn.labels), 3, 1.0,
            0.0, lambda x, c, draws=draws: plain.augment_as(x, draws, c),
        )  # fmt: skip
        torch.testing.assert_close(sums[i].double(), expected, rtol=1e-3, atol=1e-4)


def cell(
    suite: Suite, name: str, shape: tuple[int, ...], sizes: Sequence[int], width: int, **more: Any
) -> None:
    """Time one setting."""
    drawn = draw_records(shape, sizes)
    method = WholeSet(width=width)
    suite.measure(
        name,
        {"shape": shape, "records": len(drawn.labels), "classes": len(sizes), "width": width},
        {"ours": ours(suite, method, drawn), "plain": plain_way(suite, method, drawn)},
        **more,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Check, time the pass, print the table."""
    suite = Suite.of("whole_set_pass", __doc__ or "", arguments)
    suite.checked(functools.partial(check, (1, 28, 28)))
    width = suite.sized(128, 32, 4)
    sizes = suite.sized(mnist_sizes(1), mnist_sizes(20), (8, 8))
    cell(suite, f"whole-set pass, {sum(sizes):,} records", (1, 28, 28), sizes, width)
    suite.finish()


if __name__ == "__main__":
    main()
