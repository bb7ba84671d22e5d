"""Time PSG's steps: per-example gradients, an outer step, an inner epoch.

Usage: python benchmarks/speed/psg_step.py [--small] [--device cuda] [--out]

The paper's setting: Poisson batches of 256 in expectation from MNIST's sizes, ConvNet of width 128,
10 synthetic images a class. Ours is PSG itself through a gate. Beside it the plain way, a backward
pass for each record, and Opacus' hooks where Opacus is installed (pip install opacus): the usual
code's shadow copy of the network, brought up to date at every step. All three clip and noise only
the weights that are matched, and divide by the expected batch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
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
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from understudy.engine import Engine
from understudy.methods.gradient_matching import Pixels, Theta, Training
from understudy.methods.psg import PSG
from understudy.nets.draw import draw_parameters, public_seed

PrivateGradient = Callable[[nn.Module, Tensor, Tensor, float, float], list[Tensor]]
"""Take a network, records and labels, clip norm and noise multiplier; return the noisy sum."""

try:
    import opacus

    OPACUS: str | None = f"Opacus {opacus.__version__}"
except ImportError:
    OPACUS = None


class Hooked:
    """Let Opacus' hooks take the rows on a shadow copy of the network."""

    def __init__(self) -> None:
        self._shadow: nn.Module | None = None

    def __call__(
        self, net: nn.Module, images: Tensor, labels: Tensor, bound: float, noise_multiplier: float
    ) -> list[Tensor]:
        """Return the noisy sum of clipped rows."""
        from opacus import GradSampleModule

        if self._shadow is None:
            own = copy.deepcopy(net)
            for parameter in own.parameters():  # what is not matched needs no rows
                parameter.requires_grad = parameter.dim() >= 2
            self._shadow = GradSampleModule(own, loss_reduction="sum")
        shadow: Any = self._shadow
        shadow._module.load_state_dict(net.state_dict())
        with warnings.catch_warnings():  # that pictures need no gradient is as it should be
            warnings.filterwarnings("ignore", message="Full backward hook")
            F.cross_entropy(shadow(images), labels, reduction="sum").backward()
        weights = plain.weights_of(shadow._module)
        rows = [weight.grad_sample for weight in weights]  # type: ignore[attr-defined]
        norms = torch.stack([row.flatten(1).norm(dim=1) for row in rows], dim=1).norm(dim=1)
        factors = (bound / (norms + 1e-6)).clamp(max=1.0)
        sums = [torch.einsum("n,n...->...", factors, row) for row in rows]
        shadow.zero_grad()
        return [some + noise_multiplier * bound * torch.randn_like(some) for some in sums]


@dataclass
class PlainPSG:
    """Hold what the usual loop keeps: all records on the device, a network, images, optimisers."""

    method: PSG
    net: plain.Network
    real: Tensor
    real_labels: Tensor
    synthetic: Tensor
    gradient: PrivateGradient

    def __post_init__(self) -> None:
        classes = len(self.synthetic) // self.method.images_per_class
        self.labels = torch.arange(classes).repeat_interleave(self.method.images_per_class)
        self.labels = self.labels.to(self.synthetic.device)
        self.synthetic.requires_grad_()
        self.optimiser = torch.optim.SGD(
            [self.synthetic], lr=self.method.learning_rate, momentum=self.method.momentum
        )
        self.network_optimiser = torch.optim.SGD(
            self.net.parameters(), lr=self.method.network_learning_rate
        )

    def private_gradient(self) -> list[Tensor]:
        """Draw a batch and return its noisy gradient, divided by the expected batch."""
        method = self.method
        everyone = np.arange(len(self.real))
        picked = torch.from_numpy(plain.poisson(everyone, method.expected_batch))
        picked = picked.to(self.real.device)
        noisy = self.gradient(
            self.net,
            self.real[picked],
            self.real_labels[picked],
            method.clip_norm,
            method.noise_multiplier,
        )
        return [part / method.expected_batch for part in noisy]

    def outer_step(self) -> None:
        """Move the images so that their gradient points the noisy gradient's way."""
        theirs = self.private_gradient()
        loss = F.cross_entropy(self.net(self.synthetic), self.labels)
        ours = torch.autograd.grad(loss, plain.weights_of(self.net), create_graph=True)
        self.optimiser.zero_grad()
        distance = plain.gradient_distance(ours, theirs)
        distance.backward(inputs=[self.synthetic])
        self.optimiser.step()
        distance.item()  # the usual code keeps the loss of every step

    def inner_epoch(self) -> None:
        """Train the network on the set for an epoch, by PyTorch's loader."""
        images = self.synthetic.detach().clone()
        batches = DataLoader(
            TensorDataset(images, self.labels), self.method.network_batch, shuffle=True
        )
        for x, y in batches:
            self.network_optimiser.zero_grad()
            F.cross_entropy(self.net(x), y).backward()
            self.network_optimiser.step()


def loop_of(suite: Suite, method: PSG, drawn: Drawn, gradient: PrivateGradient) -> PlainPSG:
    """Set the usual loop up."""
    public, device = drawn.private.public, suite.device
    classes = len(public.classes)
    net = plain.fresh_network(public.shape, classes, method.width, device)
    start = torch.randn(classes * method.images_per_class, *public.shape, device=device)
    labels = torch.from_numpy(drawn.labels).to(device)
    return PlainPSG(method, net, drawn.on(device), labels, start, gradient)


def others(suite: Suite, method: PSG, drawn: Drawn) -> dict[str, PlainPSG]:
    """Return the loops to compare with: plain, and Opacus where it is installed."""
    loops = {"plain": loop_of(suite, method, drawn, plain.private_gradient)}
    if OPACUS is not None:
        loops[OPACUS] = loop_of(suite, method, drawn, Hooked())
    return loops


def our_gradients(suite: Suite, method: PSG, drawn: Drawn) -> Way:
    """Ask the gate for noisy gradients at a fixed network."""

    def run(count: int) -> Sequence[float]:
        laps = suite.laps()
        asked = dataclasses.replace(method, outer_steps=count + 1, repeats=1, inner_epochs=0)
        theta = Theta(asked, drawn.private.public, suite.engine)
        theta.draw(0)
        contribution = theta.gradient_of_one(theta.weights)
        with suite.gate(drawn.private, asked, laps) as gate:
            for _ in range(count + 1):
                gate.noisy_sum(asked.query(), contribution, theta.state())
        return laps.seconds

    return run


def our_steps(suite: Suite, method: PSG, drawn: Drawn) -> Way:
    """Run PSG: between two answers lie a matching step and a query."""

    def run(count: int) -> Sequence[float]:
        laps = suite.laps()
        asked = dataclasses.replace(method, repeats=count + 1)
        with suite.gate(drawn.private, asked, laps) as gate:
            asked.measure(gate)
        return laps.seconds

    return run


def our_epochs(suite: Suite, method: PSG, drawn: Drawn) -> Way:
    """Train theta as PSG does between outer steps."""
    public = drawn.private.public
    theta = Theta(method, public, suite.engine)
    theta.draw(0)
    synthetic = Pixels(method, public, suite.device)
    training = Training(theta, synthetic, method.network_learning_rate)
    everyone = torch.arange(len(synthetic.labels))
    return suite.repeated(lambda: training.step(everyone))


def check(shape: tuple[int, int, int], device: torch.device) -> None:
    """Compare rows with Opacus', and images after two outer steps and an inner epoch."""
    drawn = draw_records(shape, (4, 4, 4))
    method = PSG(
        noise_multiplier=0.0,
        runs=1,
        outer_steps=2,
        inner_epochs=1,
        repeats=1,
        images_per_class=2,
        expected_batch=12.0,
        width=4,
        learning_rate=1.0,
    )
    with throw_away_gate(
        drawn.private, method, Engine(device=str(device), precision="float32"), lambda *_: None
    ) as gate:
        images = method.measure(gate).signals["images"]
    weights = draw_parameters(
        method.network(drawn.private.public), public_seed(method.seed, "network", 0)
    )
    net = plain.same_network(shape, 3, 4, weights)
    generator = torch.Generator().manual_seed(public_seed(method.seed, "start"))
    start = torch.randn(images.shape, generator=generator)
    real, labels = drawn.on(torch.device("cpu")).double(), torch.from_numpy(drawn.labels)
    loop = PlainPSG(method, net, real, labels, start.double(), plain.private_gradient)
    if OPACUS is not None:
        with_hooks = Hooked()(net, real, labels, method.clip_norm, 0.0)
        for a, b in zip(
            with_hooks,
            plain.private_gradient(net, real, labels, method.clip_norm, 0.0),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-9)
    loop.outer_step()
    loop.inner_epoch()
    loop.outer_step()
    assert_same_pictures(images, loop.synthetic, start)


def main(arguments: Sequence[str] | None = None) -> None:
    """Check, time the three cells, print the table."""
    suite = Suite.of("psg_step", __doc__ or "", arguments)
    if OPACUS is None:
        print("Opacus is not installed: its rows are left out (pip install opacus).\n")
    shape = (1, 28, 28)
    suite.checked(functools.partial(check, shape))
    width, batch, images = suite.sized((128, 256.0, 10), (32, 64.0, 4), (4, 4.0, 1))
    drawn = draw_records(shape, suite.sized(mnist_sizes(1), mnist_sizes(20), (8, 8)))
    method = PSG(
        runs=1,
        outer_steps=1,
        inner_epochs=0,
        width=width,
        expected_batch=batch,
        images_per_class=images,
    )
    loops = others(suite, method, drawn)
    sizes = {
        "shape": shape,
        "records": len(drawn.labels),
        "expected_batch": batch,
        "images_per_class": images,
        "width": width,
    }
    suite.measure(
        "PSG, noisy gradient of a batch",
        sizes,
        {
            "ours": our_gradients(suite, method, drawn),
            **{name: suite.repeated(loop.private_gradient) for name, loop in loops.items()},
        },
    )
    suite.measure(
        "PSG, outer step",
        sizes,
        {
            "ours": our_steps(suite, method, drawn),
            **{name: suite.repeated(loop.outer_step) for name, loop in loops.items()},
        },
    )
    suite.measure(
        "PSG, inner epoch",
        sizes,
        {
            "ours": our_epochs(suite, method, drawn),
            "plain": suite.repeated(loops["plain"].inner_epoch),
        },
    )
    suite.finish()


if __name__ == "__main__":
    main()
