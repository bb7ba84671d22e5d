"""Time one optimisation step on stored signals: what Dosser and the whole-set plan do for free.

Usage: python benchmarks/speed/optimisation_step.py [--small] [--device cuda] [--out]

500 synthetic pictures of 28x28 (10 classes, 50 each), ConvNet of width 128, an augmentation draw a
class. Ours is `methods.matching.optimise`. Two cells: signals at hand, as the whole-set plan's 50
are, and signals rebuilt for every step, as most of Dosser's 10,000 are. The plain way goes class by
class; at hand its networks wait on the device, else each is initialised on the CPU. Unlike the
published code, which steps once a class, it steps once for all classes, so that results are equal.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import plain
import torch
from suite import Suite, Way, assert_same_pictures
from torch import Tensor

from understudy.methods.matching import Extractor, Optimisation, optimise, public_seed
from understudy.nets import ConvNet, draw_parameters
from understudy.ops.augment import Augmentation
from understudy.privacy import Public

AT_HAND = 4
"""Signals of the first cell: all are kept after four steps."""

GROUP, CLIP_NORM = 50.0, 1.0


@dataclass
class PlainStep:
    """Hold what the usual loop keeps: stored sums, the images, an optimiser."""

    targets: Tensor
    synthetic: Tensor
    images_per_class: int
    strategy: str = plain.STRATEGY
    learning_rate: float = 1.0

    def __post_init__(self) -> None:
        self.synthetic.requires_grad_()
        self.optimiser = torch.optim.SGD([self.synthetic], lr=self.learning_rate, momentum=0.5)

    def step(
        self, net: plain.Network, which: int, augment: Callable[[Tensor, int], Tensor] | None = None
    ) -> None:
        """Take one step on one stored signal, class by class."""
        loss = torch.zeros((), dtype=self.synthetic.dtype, device=self.synthetic.device)
        for c, target in enumerate(self.targets[which]):
            images = self.synthetic[c * self.images_per_class : (c + 1) * self.images_per_class]
            if augment is None:
                images = plain.augment(images, self.strategy, seed=1000 * which + c)
            else:
                images = augment(images, c)
            loss = loss + plain.class_loss(net.embed(images), target, CLIP_NORM, GROUP)
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()


def extractor(
    shape: tuple[int, ...],
    classes: int,
    width: int,
    device: torch.device,
    precision: torch.dtype = torch.float32,
) -> Extractor:
    """Return the maker of the signals."""
    public = Public(
        name="nothing",
        shape=shape,
        classes=tuple(map(str, range(classes))),
        counts=(1000,) * classes,
    )
    return Extractor(
        public=public,
        seed=0,
        kind="convnet",
        width=width,
        augmentation=plain.STRATEGY,
        device=device,
        precision=precision,
    )


def ours(suite: Suite, signals: Extractor, images_per_class: int, stored: int | None) -> Way:
    """Optimise on so many stored signals in turn, or on as many as there are steps."""
    classes = len(signals.public.classes)

    def run(count: int) -> Sequence[float]:
        targets = torch.randn(stored or count + 1, classes, signals.features)
        laps = suite.laps()
        optimise(
            targets,
            signals,
            Optimisation(steps=count + 1),
            images_per_class=images_per_class,
            weight=GROUP,
            clip_norm=CLIP_NORM,
            progress=laps,
        )
        return laps.seconds

    return run


def plain_way(suite: Suite, signals: Extractor, images_per_class: int, stored: int | None) -> Way:
    """Step on stored networks in turn, or on one initialised for every step."""
    public, device = signals.public, suite.device
    classes = len(public.classes)

    def network() -> plain.Network:
        return plain.fresh_network(public.shape, classes, signals.width, device, frozen=True)

    loop = PlainStep(
        torch.randn(AT_HAND, classes, signals.features, device=device),
        torch.randn(classes * images_per_class, *public.shape, device=device),
        images_per_class,
    )
    kept = [network() for _ in range(stored or 0)]
    turn = 0

    def step() -> None:
        nonlocal turn
        turn += 1
        which = turn % AT_HAND
        loop.step(kept[which] if kept else network(), which)

    return suite.repeated(step)


def check(shape: tuple[int, int, int], device: torch.device) -> None:
    """Compare the images after two steps, for several seeds, so that every family occurs."""
    for seed in range(5):
        signals = dataclasses.replace(
            extractor(shape, 3, 4, device),
            augmentation="color_crop_cutout_flip_scale_rotate",
            seed=seed,
        )
        generator = torch.Generator().manual_seed(seed)
        targets = torch.randn(2, 3, signals.features, generator=generator)
        made = optimise(
            targets,
            signals,
            Optimisation(steps=2),
            images_per_class=2,
            weight=GROUP,
            clip_norm=CLIP_NORM,
        )
        generator.manual_seed(public_seed(seed, "start"))
        start = torch.randn(6, *shape, generator=generator)
        loop = PlainStep(targets.double(), start.double(), 2)
        with torch.device("meta"):
            template = ConvNet(shape, 3, 4)
        for i in range(2):
            weights = draw_parameters(template, public_seed(seed, "network", i))
            draws = Augmentation(signals.augmentation).draw(
                public_seed(seed, "augmentation", i), 3, (shape[1], shape[2])
            )
            net = plain.same_network(shape, 3, 4, weights, frozen=True)
            loop.step(net, i, lambda x, c, draws=draws: plain.augment_as(x, draws, c))
        assert_same_pictures(made.images, loop.synthetic, start)


def cell(
    suite: Suite,
    name: str,
    shape: tuple[int, ...],
    images_per_class: int,
    width: int,
    stored: int | None,
    classes: int = 10,
    **more: Any,
) -> None:
    """Time one setting."""
    signals = extractor(shape, classes, width, suite.device, suite.engine.dtype)
    suite.measure(
        name,
        {
            "shape": shape,
            "classes": classes,
            "images_per_class": images_per_class,
            "width": width,
            "signals_at_hand": stored is not None,
        },
        {
            "ours": ours(suite, signals, images_per_class, stored),
            "plain": plain_way(suite, signals, images_per_class, stored),
        },
        settle=stored or 0,
        **more,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Check, time both cells, print the table."""
    suite = Suite.of("optimisation_step", __doc__ or "", arguments)
    suite.checked(functools.partial(check, (1, 28, 28)))
    classes, images_per_class, width = suite.sized((10, 50, 128), (10, 10, 32), (2, 1, 4))
    for name, stored in (("signals at hand", AT_HAND), ("signals rebuilt", None)):
        told = f"optimisation step, {classes * images_per_class} pictures, {name}"
        cell(suite, told, (1, 28, 28), images_per_class, width, stored, classes)
    suite.finish()


if __name__ == "__main__":
    main()
