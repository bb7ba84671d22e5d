"""Time the evaluation: five ConvNets on 500 pictures, side by side and one after another.

Usage: python benchmarks/speed/evaluation_stack.py [--small] [--device cuda] [--out]

A step is one epoch of each of five networks by the `dm` protocol: batches of 256, SGD with momentum,
DSA with numbers of its own for every picture. Ours is `evaluation.classify.train_and_test` with the
five stacked; beside it the same one network after another, and the plain way: PyTorch's loader and
optimiser, augmentation by Python loops. Testing is left out of the times.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import plain
import torch
from suite import Suite, Way
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from understudy.evaluation.classify import DM, Protocol, train_and_test
from understudy.nets import ConvNet
from understudy.nets.convnet import random_convnet

NETWORKS = 5


@dataclass
class PlainTraining:
    """Hold one network in training, by a protocol."""

    net: plain.Network
    images: Tensor
    labels: Tensor
    protocol: Protocol
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimiser = torch.optim.SGD(
            self.net.parameters(),
            lr=self.protocol.lr,
            momentum=self.protocol.momentum,
            weight_decay=self.protocol.weight_decay,
        )

    def epoch(self) -> None:
        """Go through the set once."""
        batches = DataLoader(
            TensorDataset(self.images, self.labels), self.protocol.batch, shuffle=True
        )
        total, right = 0.0, 0
        for x, y in batches:
            x = plain.augment(x, self.protocol.augmentation)
            scores = self.net(x)
            loss = F.cross_entropy(scores, y)
            # The usual code keeps the loss and the accuracy of every batch.
            right += int((scores.detach().argmax(dim=1) == y).sum().item())
            total += loss.item() * len(y)
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()
        self.losses.append(total / len(self.labels))


def ours(
    suite: Suite, images: Tensor, labels: Tensor, width: int, classes: int, side_by_side: int
) -> Way:
    """Train as `evaluate` does."""
    shape = (int(images.shape[1]), int(images.shape[2]), int(images.shape[3]))

    def network(seed: int) -> ConvNet:
        return random_convnet(seed, shape, classes, width=width, device=suite.device)

    def run(count: int) -> Sequence[float]:
        laps = suite.laps()
        train_and_test(
            images,
            labels,
            images[:1],
            labels[:1],
            classes=classes,
            protocol=DM.but(epochs=count + 1, lr_drop=None),
            network=network,
            seeds=range(NETWORKS),
            device=suite.device,
            progress=laps,
            side_by_side=side_by_side,
            precision=suite.engine.dtype,
        )
        return [NETWORKS * seconds for seconds in laps.seconds]

    return run


def plain_way(suite: Suite, images: Tensor, labels: Tensor, width: int, classes: int) -> Way:
    """Train five networks, an epoch each in turn."""
    shape = tuple(images.shape[1:])
    loops = [
        PlainTraining(plain.fresh_network(shape, classes, width, suite.device), images, labels, DM)
        for _ in range(NETWORKS)
    ]
    return suite.repeated(lambda: [loop.epoch() for loop in loops])


def check(shape: tuple[int, int, int], device: torch.device) -> None:
    """Compare trained weights in float64, where the order in a batch does not matter."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(9, *shape, generator=generator, dtype=torch.float64)
    labels = torch.arange(9) % 3
    protocol = DM.but(epochs=4, lr_drop=None, augmentation="")
    for side_by_side in (1, 2):
        nets = [random_convnet(seed, shape, 3, width=4) for seed in range(2)]
        loops = [
            PlainTraining(
                plain.same_network(shape, 3, 4, dict(net.named_parameters())),
                images, labels, protocol,
            )
            for net in nets
        ]  # fmt: skip
        train_and_test(
            images, labels, images, labels, classes=3, protocol=protocol,
            network=nets.__getitem__, seeds=(0, 1), side_by_side=side_by_side, device=device,
        )  # fmt: skip
        for loop, net in zip(loops, nets, strict=True):
            for _ in range(4):
                loop.epoch()
            trained = plain.same_network(shape, 3, 4, dict(net.named_parameters()))
            for a, b in zip(trained.parameters(), loop.net.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def main(arguments: Sequence[str] | None = None) -> None:
    """Check, time an epoch, print the table."""
    suite = Suite.of("evaluation_stack", __doc__ or "", arguments)
    suite.checked(functools.partial(check, (1, 28, 28)))
    per_class, width = suite.sized((50, 128), (10, 32), (1, 4))
    images = torch.randn(10 * per_class, 1, 28, 28, device=suite.device)
    labels = torch.arange(10, device=suite.device).repeat_interleave(per_class)
    suite.measure(
        f"evaluation epoch, {NETWORKS} networks on {len(images)} pictures",
        {"images": len(images), "networks": NETWORKS, "width": width},
        {
            "side by side": ours(suite, images, labels, width, 10, NETWORKS),
            "one after another": ours(suite, images, labels, width, 10, 1),
            "plain": plain_way(suite, images, labels, width, 10),
        },
    )
    suite.finish()


if __name__ == "__main__":
    main()
