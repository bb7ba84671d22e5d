"""Move a synthetic set so that its gradients point where noisy ones do: the public half of PSG.

On a GPU a matching step and a training step are each recorded once and replayed: all they read and
change lies in memory that stays where it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from understudy.engine import Engine, captured, moved
from understudy.errors import BadConfiguration
from understudy.nets.convnet import ConvNet
from understudy.nets.draw import Drawing, public_seed
from understudy.nets.generator import draw_generator
from understudy.ops.gradients import (
    batch_gradient,
    batch_loss,
    gradient_of_one,
    loss_along,
    matched,
    row_distance,
    slopes_of_distance,
    split,
)
from understudy.privacy.public import Public

if TYPE_CHECKING:
    from understudy.methods.psg import PSG

__all__ = ["Generated", "Matching", "Pixels", "Synthetic", "Theta", "Training"]


class Theta:
    """Hold the network's parameters: one row of numbers that stays where it is."""

    def __init__(self, method: PSG, public: Public, engine: Engine) -> None:
        self._exact = method.network(public)
        self._batch = method.network(public, precision=engine.dtype)
        self._record = method.network(public, precision=engine.dtype, by_record=True)
        self._drawing = Drawing(self._batch, engine.torch_device)
        self._row = torch.zeros(self._drawing.count, device=engine.torch_device)
        self.parameters = self._drawing.split(self._row)
        self.names, self.weights = tuple(self.parameters), matched(self.parameters)

    def draw(self, seed: int) -> None:
        """Begin with a random network."""
        self._row.copy_(self._drawing.rows([seed])[0])

    def state(self) -> dict[str, Tensor]:
        """Return what a contribution is given."""
        return {"theta": self._row}

    def gradient_of_one(self, names: tuple[str, ...]) -> Callable[..., Tensor]:
        """Return the map from the state and ONE record to its gradient."""

        def contribution(state: Mapping[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
            parameters = self._drawing.split(state["theta"])
            return gradient_of_one(self._record, parameters, names)(image, label)

        return contribution

    def descend(self, images: Tensor, labels: Tensor, rate: float) -> None:
        """Take one step of plain SGD on a batch of public images."""
        leaf = self._row.detach().requires_grad_()
        loss = batch_loss(self._batch, self._drawing.split(leaf), images, labels)
        self._row.sub_(torch.autograd.grad(loss, leaf)[0], alpha=rate)

    def towards(self, real: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        """Return what pulls images as the distance of their gradient to a real one does.

        Its slopes by the images are the distance's. Its value is the distance only where the
        network is differentiated twice, which fused blocks cannot be.
        """
        net, parameters, names = self._batch, self.parameters, self.weights
        if isinstance(net, ConvNet) and net.is_fast(images):
            ours = batch_gradient(net, parameters, images.detach(), labels, names)
            direction = slopes_of_distance(ours, real)
            return loss_along(*net.along(parameters, direction, images), labels)
        ours = batch_gradient(self._exact, parameters, images, labels, names, create_graph=True)
        return row_distance(ours, real)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return what a step of training changes."""
        return (self._row,)


class Matching:
    """Move the set so that its gradient points where a noisy one does. Recorded on a GPU."""

    def __init__(self, theta: Theta, synthetic: Synthetic, asked: tuple[str, ...]) -> None:
        count = sum(theta.parameters[name].numel() for name in asked)
        self._answer = torch.zeros(count, device=synthetic.labels.device)

        def step() -> None:
            real = split(self._answer, theta.parameters, asked)
            synthetic.descend(theta.towards(real, synthetic.images(), synthetic.labels))

        self._go = synthetic.recorded(step, synthetic.tensors)

    def step(self, answer: Tensor) -> None:
        """Take one step."""
        self._answer.copy_(answer)
        self._go()


class Training:
    """Train theta on the set, a batch at a time. Recorded on a GPU, for each size of a batch."""

    def __init__(self, theta: Theta, synthetic: Synthetic, rate: float) -> None:
        self._theta, self._synthetic, self._rate = theta, synthetic, rate
        self._steps: dict[int, tuple[Tensor, Callable[[], None]]] = {}

    def step(self, rows: Tensor) -> None:
        """Take one step on these images."""
        if len(rows) not in self._steps:
            self._steps[len(rows)] = self._recorded(rows)
        here, go = self._steps[len(rows)]
        if len(rows) < len(self._synthetic.labels):
            here.copy_(moved(rows, here.device))
        go()

    def _recorded(self, rows: Tensor) -> tuple[Tensor, Callable[[], None]]:
        theta, synthetic = self._theta, self._synthetic
        here = rows.to(synthetic.labels.device, copy=True)

        def step() -> None:
            images = synthetic.images().detach()
            theta.descend(images[here], synthetic.labels[here], self._rate)

        return here, synthetic.recorded(step, theta.tensors)


class Synthetic(ABC):
    """Hold the synthetic set while it is being made: what moves, and how."""

    recordable: bool
    """Whether all it is lies in memory that stays where it is."""

    def __init__(self, method: PSG, public: Public, device: torch.device) -> None:
        classes = len(public.classes)
        self.labels = torch.arange(classes, device=device).repeat_interleave(
            method.images_per_class
        )
        self._start = torch.Generator().manual_seed(public_seed(method.seed, "start"))

    @abstractmethod
    def images(self) -> Tensor:
        """Return the set as it is, attached to what moves."""

    @abstractmethod
    def signals(self) -> dict[str, Tensor]:
        """Return what is released."""

    @abstractmethod
    def descend(self, loss: Tensor) -> None:
        """Take one step."""

    @abstractmethod
    def _memory(self) -> dict[str, Tensor]:
        """Return all that outlives a run: what moves, and what its optimiser remembers."""

    @abstractmethod
    def _remember(self, memory: Mapping[str, Tensor]) -> None:
        """Take that up again."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return what a step changes."""
        return tuple(self._memory().values())

    def recorded(
        self, step: Callable[[], None], changed: Callable[[], tuple[Tensor, ...]]
    ) -> Callable[[], None]:
        """Return a step that looks at the set, recorded where it can be."""
        return captured(step, self.labels.device, changed()) if self.recordable else step

    def state(self, *, runs_done: int) -> dict[str, Tensor]:
        """Return what a checkpoint keeps."""
        return {"runs_done": torch.tensor(runs_done), **self._memory()}

    def resume(self, state: Mapping[str, Tensor] | None) -> int:
        """Take a checkpoint up. Return how many runs it stands for."""
        if state is None:
            return 0
        self._remember(state)
        return int(state["runs_done"])


class Pixels(Synthetic):
    """Algorithm 1: the pixels themselves, from standard normal numbers, by SGD."""

    recordable = True

    def __init__(self, method: PSG, public: Public, device: torch.device) -> None:
        super().__init__(method, public, device)
        images = torch.randn(len(self.labels), *public.shape, generator=self._start).to(device)
        self._pixels = images.requires_grad_()
        self._velocity = torch.zeros_like(images, requires_grad=False)
        self._rate, self._momentum = method.learning_rate, method.momentum

    def images(self) -> Tensor:
        """Return the pixels."""
        return self._pixels

    def signals(self) -> dict[str, Tensor]:
        """Release the pixels."""
        return {"images": self._pixels}

    def descend(self, loss: Tensor) -> None:
        """Take one step of SGD with momentum."""
        (slope,) = torch.autograd.grad(loss, self._pixels)
        with torch.no_grad():
            self._velocity.mul_(self._momentum).add_(slope)
            self._pixels.sub_(self._velocity, alpha=self._rate)

    def _memory(self) -> dict[str, Tensor]:
        return {"pixels": self._pixels.detach(), "velocity": self._velocity}

    def _remember(self, memory: Mapping[str, Tensor]) -> None:
        for name, value in self._memory().items():
            value.copy_(memory[name])


class Generated(Synthetic):
    """Algorithm 2: the weights of a generator of fixed latents, by Adam."""

    recordable = False

    def __init__(self, method: PSG, public: Public, device: torch.device) -> None:
        super().__init__(method, public, device)
        if len(public.shape) != 3:
            raise BadConfiguration(f"psg: the prior makes pictures; '{public.name}' has none.")
        channels, height, width = public.shape
        self._generator = draw_generator(
            public_seed(method.seed, "generator"),
            (channels, height, width),
            len(public.classes),
            width=max(1, method.width // 2),
            latent=method.latent,
            device=device,
        )
        count = len(self.labels)
        self._latents = torch.randn(count, method.latent, generator=self._start).to(device)
        self._moving = list(self._generator.parameters())
        self._optimiser = torch.optim.Adam(self._moving, lr=method.generator_learning_rate)

    def images(self) -> Tensor:
        """Return what the generator makes of the latents."""
        made: Tensor = self._generator(self._latents, self.labels)
        return made

    def signals(self) -> dict[str, Tensor]:
        """Release the images, the latents and the generator."""
        weights = {f"generator.{k}": v for k, v in self._generator.state_dict().items()}
        return {"images": self.images(), "latents": self._latents, **weights}

    def descend(self, loss: Tensor) -> None:
        """Take one step of Adam."""
        for value, slope in zip(self._moving, torch.autograd.grad(loss, self._moving), strict=True):
            value.grad = slope
        self._optimiser.step()

    def _memory(self) -> dict[str, Tensor]:
        memory: dict[str, Tensor] = {}
        for place, value in enumerate(self._moving):
            memory[f"moving.{place}"] = value
            for name, kept in self._optimiser.state[value].items():
                memory[f"optimiser.{place}.{name}"] = kept
        return memory

    def _remember(self, memory: Mapping[str, Tensor]) -> None:
        for place, value in enumerate(self._moving):
            value.data.copy_(memory[f"moving.{place}"])
            self._optimiser.state[value] = {
                name.split(".")[2]: kept.clone()
                for name, kept in memory.items()
                if name.startswith(f"optimiser.{place}.")
            }
