"""Time an NDPDC iteration: ask one noisy sum a class, then step on the synthetic images.

Usage: python benchmarks/speed/ndpdc_iteration.py [--small] [--device cuda] [--out]

DPDC's setting: 10 classes, groups of 50 by Poisson inclusion, 50 images a class, ConvNet of width
128, MNIST's sizes and pictures of its shape and of CIFAR's. Ours is NDPDC itself: `measure` through
a gate with its secret coins, clipping, noise and journal, then `synthesise`. The plain way does the
same per class and eagerly, without a gate.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import plain
import torch
from suite import (
    Drawn,
    Suite,
    Way,
    assert_same_pictures,
    draw_records,
    mnist_sizes,
    throw_away_gate,
)
from torch import Tensor

from understudy.engine import Engine
from understudy.methods.matching import public_seed
from understudy.methods.ndpdc import NDPDC
from understudy.nets import ConvNet, draw_parameters
from understudy.ops.augment import Augmentation

Shape = tuple[int, int, int]

SHAPES: dict[str, Shape] = {"MNIST's shape": (1, 28, 28), "CIFAR's shape": (3, 32, 32)}


@dataclass
class PlainNDPDC:
    """Hold what the usual loop keeps: all records on the device, the images, an optimiser."""

    method: NDPDC
    real: Tensor
    members: Sequence[npt.NDArray[Any]]
    synthetic: Tensor

    def __post_init__(self) -> None:
        self.synthetic.requires_grad_()
        self.optimiser = torch.optim.SGD(
            [self.synthetic], lr=self.method.learning_rate, momentum=self.method.momentum
        )

    def network(self) -> plain.Network:
        """Draw a network for this iteration."""
        method, shape = self.method, self.real.shape[1:]
        return plain.fresh_network(
            shape, len(self.members), method.width, self.real.device, frozen=True
        )

    def iteration(
        self,
        net: plain.Network | None = None,
        augment: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:
        """Take one iteration, class by class. A network and draws may be given, to compare."""
        method, count = self.method, self.method.images_per_class
        assert method.clip_norm is not None
        net = net or self.network()
        loss = torch.zeros((), dtype=self.real.dtype, device=self.real.device)
        for c, members in enumerate(self.members):
            seed = plain.clock_seed()
            own = augment or (lambda x, _, seed=seed: plain.augment(x, method.augmentation, seed))
            picked = torch.from_numpy(plain.poisson(members, method.group_size))
            real = own(self.real[picked.to(self.real.device)], c)
            images = own(self.synthetic[c * count : (c + 1) * count], c)
            target = plain.noisy_sum(net.embed(real), method.clip_norm, method.noise_multiplier)
            features = net.embed(images)
            loss = loss + plain.class_loss(features, target, method.clip_norm, method.group_size)
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        loss.item()  # the usual code keeps the loss of every iteration


def plain_ndpdc(method: NDPDC, drawn: Drawn, device: torch.device) -> PlainNDPDC:
    """Set the usual loop up."""
    public = drawn.private.public
    classes = len(public.classes)
    start = torch.randn(classes * method.images_per_class, *public.shape, device=device)
    return PlainNDPDC(method, drawn.on(device), [drawn.members(c) for c in range(classes)], start)


def ours(suite: Suite, method: NDPDC, drawn: Drawn, parts: dict[str, list[float]]) -> Way:
    """Measure and synthesise, as anybody would."""

    def run(count: int) -> Sequence[float]:
        sampling, matching = suite.laps(), suite.laps()
        asked = dataclasses.replace(method, iterations=count + 1)
        with suite.gate(drawn.private, asked, sampling) as gate:
            release = asked.measure(gate)
        asked.synthesise(release, engine=suite.engine, progress=matching)
        both = statistics.median(sampling.seconds), statistics.median(matching.seconds)
        parts["sampling"].append(both[0])
        parts["matching"].append(both[1])
        return [sum(both)]

    return run


def check(shape: Shape, device: torch.device) -> None:
    """Compare sums and images after two iterations without noise, every record included."""
    drawn = draw_records(shape, (8, 8, 8))
    method = NDPDC(
        noise_multiplier=0.0,
        iterations=2,
        group_size=8.0,
        images_per_class=2,
        width=4,
        augmentation="color_crop_cutout_flip_scale_rotate",
    )
    engine = Engine(device=str(device), precision="float32")
    with throw_away_gate(drawn.private, method, engine, lambda *_: None) as gate:
        release = method.measure(gate)
    images = method.synthesise(release, engine=engine).images

    generator = torch.Generator().manual_seed(public_seed(method.seed, "start"))
    start = torch.randn(images.shape, generator=generator)
    real = drawn.on(torch.device("cpu")).double()
    loop = PlainNDPDC(method, real, [drawn.members(c) for c in range(3)], start.double())
    with torch.device("meta"):
        template = ConvNet(shape, 3, method.width)
    for i in range(method.iterations):
        weights = draw_parameters(template, public_seed(method.seed, "network", i))
        net = plain.same_network(shape, 3, method.width, weights, frozen=True)
        draws = Augmentation(method.augmentation).draw(
            public_seed(method.seed, "augmentation", i), 3, (shape[1], shape[2])
        )
        for c in range(3):
            looked_at = plain.augment_as(real[drawn.labels == c], draws, c)
            sums = plain.clipped(net.embed(looked_at), 1.0).sum(dim=0)
            torch.testing.assert_close(
                release.signals["sums"][i, c].double(), sums, rtol=1e-3, atol=1e-4
            )
        loop.iteration(net, lambda x, c, draws=draws: plain.augment_as(x, draws, c))
    assert_same_pictures(images, loop.synthetic, start)


def cell(
    suite: Suite,
    name: str,
    shape: tuple[int, ...],
    sizes: Sequence[int],
    method: NDPDC,
    **more: Any,
) -> None:
    """Time one setting."""
    drawn = draw_records(shape, sizes)
    parts: dict[str, list[float]] = {"sampling": [], "matching": []}
    line = suite.measure(
        name,
        {
            "shape": shape,
            "records": len(drawn.labels),
            "classes": len(sizes),
            "group": method.group_size,
            "images_per_class": method.images_per_class,
            "width": method.width,
        },
        {
            "ours": ours(suite, method, drawn, parts),
            "plain": suite.repeated(plain_ndpdc(method, drawn, suite.device).iteration),
        },
        **more,
    )
    line["parts_ms"] = {k: round(1000 * statistics.median(v), 4) for k, v in parts.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Check, time both shapes, print the table."""
    suite = Suite.of("ndpdc_iteration", __doc__ or "", arguments)
    method = suite.sized(
        NDPDC(),
        NDPDC(width=32, group_size=10.0, images_per_class=10),
        NDPDC(width=4, group_size=4.0, images_per_class=1),
    )
    sizes = suite.sized(mnist_sizes(1), mnist_sizes(20), (8, 8))
    for name, shape in SHAPES.items():
        suite.checked(functools.partial(check, shape))
        cell(suite, f"NDPDC iteration, {name}", shape, sizes, method)
    suite.finish()


if __name__ == "__main__":
    main()
