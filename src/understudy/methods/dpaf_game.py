"""Play DPAF's game: what is asked of the records, and the training between the answers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from understudy.nets.dpaf import Discriminator, Weights
from understudy.nets.draw import public_seed
from understudy.ops.adam import adam, untrained
from understudy.ops.bound import bound
from understudy.ops.gradients import split
from understudy.privacy.gate import Contribution, Gate

if TYPE_CHECKING:
    from understudy.methods.dpaf import DPAF

__all__ = ["AT_ONCE", "Game", "clipped_sum", "features_of_one", "largest", "pull_of_one"]

MIXTURES = 64
"""Mixtures of class aggregates the classifier learns from at a time. Public, so only a matter of
speed."""

CHECKPOINT = 10
"""Updates of conv2 between checkpoints: a killed run repeats at most so many."""

AT_ONCE = 128
"""Pictures drawn from the generator at a time: fixed, so that a draw does not depend on it."""


def features_of_one(discriminator: Discriminator, weights: Mapping[str, Tensor]) -> Contribution:
    """Return the map from ONE record to its features, of norm at most sqrt(m) p."""
    return lambda image, label: discriminator.features(weights, image[None])[0]


def pull_of_one(
    discriminator: Discriminator,
    weights: Mapping[str, Tensor],
    names: Sequence[str],
    directions: Tensor,
    keep: float = 1.0,
) -> Contribution:
    """Return the map from ONE record to J(x)^T v: how it would pull the named weights.

    ``directions`` holds a public v for each class. The product is the gradient of v . features(x),
    with v held fixed, cut to the ``keep`` largest of its own entries (gradient compression).
    """
    moving = {name: weights[name].detach() for name in names}
    fixed = {name: value.detach() for name, value in weights.items() if name not in moving}

    def pull(image: Tensor, label: Tensor) -> Tensor:
        def along(moving: Weights) -> Tensor:
            own = discriminator.features({**fixed, **moving}, image[None])[0]
            return (own * directions[label]).sum()

        slopes = grad(along)(moving)
        return largest(torch.cat([slopes[name].flatten() for name in names]), keep)

    return pull


def largest(vector: Tensor, keep: float) -> Tensor:
    """Set all but the largest entries of a vector to zero; equal ones stay together."""
    dropped = len(vector) - math.ceil(keep * len(vector))
    if dropped == 0:
        return vector
    sizes = vector.abs()
    return torch.where(sizes > sizes.kthvalue(dropped).values, vector, 0.0)


class _Records(ABC):
    """Stand between the game and the records: aggregates come out, and pulls on conv."""

    def __init__(self, method: DPAF, gate: Gate) -> None:
        self.method, self.gate = method, gate
        self.discriminator = method.discriminator(gate.public)
        self.queries = {step.query.name: step.query for step in method.plan(gate.public)}

    @abstractmethod
    def aggregate(self, name: str, weights: Weights) -> Tensor:
        """Return the mean features of a batch of each class, divided by the expected batch."""

    @abstractmethod
    def standing(self, weights: Weights) -> Tensor:
        """Return the aggregates of all batches since :meth:`forget`: where v is taken."""

    @abstractmethod
    def slopes(
        self, name: str, names: Sequence[str], weights: Weights, directions: Tensor
    ) -> Tensor:
        """Return the mean over records of J(x)^T v, by the named weights, as one vector."""

    @abstractmethod
    def forget(self) -> None:
        """Forget the batches so far: conv has changed, and with it all features."""


class _Gated(_Records):
    """Ask the gate. All that is kept are its answers, which are public."""

    def __init__(self, method: DPAF, gate: Gate) -> None:
        super().__init__(method, gate)
        self._answers: list[Tensor] = []

    def aggregate(self, name: str, weights: Weights) -> Tensor:
        """Release one noisy class sum of features: DPAGG."""
        contribution = features_of_one(self.discriminator, weights)
        answer = self.gate.noisy_sum(self.queries[name], contribution)
        self._answers.append(answer.value / self.method.group_size)
        return self._answers[-1]

    def standing(self, weights: Weights) -> Tensor:
        """Average the answers given under these weights: their noise shrinks, and costs nothing."""
        return torch.stack(self._answers).mean(dim=0)

    def slopes(
        self, name: str, names: Sequence[str], weights: Weights, directions: Tensor
    ) -> Tensor:
        """Release one noisy sum of clipped pulls, at a v that is public."""
        query = self.queries[name]
        keep = self.method.keep
        contribution = pull_of_one(self.discriminator, weights, names, directions, keep)
        assert query.expected_batch is not None
        return self.gate.noisy_sum(query, contribution).value / query.expected_batch

    def forget(self) -> None:
        """Drop the answers."""
        self._answers.clear()


class _Bare(_Records):
    """Do as printed, on bare batches, with noise of the size the sound variant pays for.

    Figure 1: an AGG without noise in the classifier phase, with plain SGD for its conv2, conv3
    and FC; in the game v is taken at the clean aggregate of the last mu batches. Each "per-sample
    gradient" is clipped after other records had their part in it, through v and through the layers
    they trained, so the clip norm does not bound what one record does to the sum.
    """

    def __init__(self, method: DPAF, gate: Gate) -> None:
        super().__init__(method, gate)
        self._batches: list[tuple[Tensor, Tensor]] = []
        self._noises = method.noise(gate.public)
        seed = public_seed(method.seed, "claimed noise")  # nothing is claimed to be private here
        self._stream = torch.Generator().manual_seed(seed)

    def aggregate(self, name: str, weights: Weights) -> Tensor:
        """Average a batch; in the game, add the noise of DPAGG."""
        batch = "batches" if name == "features" else "classifier batches"
        self._batches.append(self.gate.bare_batch(self.queries[batch]))
        clean = self._mean(weights, self._batches[-1:])
        if name == "classifier features":
            return clean
        stddev = self._noises[name] * self.discriminator.bound / self.method.group_size
        return clean + stddev * self._normal(clean)

    def standing(self, weights: Weights) -> Tensor:
        """Average the records themselves, without noise: AGG of the last mu batches."""
        return self._mean(weights, self._batches)

    def slopes(
        self, name: str, names: Sequence[str], weights: Weights, directions: Tensor
    ) -> Tensor:
        """Clip the pulls of the held records and add noise, but for the classifier's conv2."""
        images, labels = (torch.cat(parts) for parts in zip(*self._batches, strict=True))
        pull = pull_of_one(self.discriminator, weights, names, directions, self.method.keep)
        rows = images.new_zeros(0, sum(weights[other].numel() for other in names))
        if len(images):  # a Poisson batch may be empty
            rows = vmap(pull, chunk_size=AT_ONCE)(images, labels)
        plain = sum(
            weights[other].numel()
            for other in names
            if name == "classifier gradients" and other.startswith("conv2")
        )
        private, rest = torch.split(rows, [rows.shape[1] - plain, plain], dim=1)
        total = clipped_sum(private, self.method.clip_norm)
        total = total + self._noises[name] * self.method.clip_norm * self._normal(total)
        expected = self.method.group_size * len(self.gate.public.classes) * len(self._batches)
        return torch.cat([total, rest.sum(dim=0)]) / expected

    def forget(self) -> None:
        """Drop the batches."""
        self._batches.clear()

    def _mean(self, weights: Weights, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the mean features of each class, by the expected batch."""
        total = torch.zeros(
            len(self.gate.public.classes),
            *self.discriminator.aggregate,
            device=self.gate.engine.torch_device,
        )
        with torch.no_grad():
            for images, labels in batches:
                total.index_add_(0, labels, self.discriminator.features(weights, images))
        return total / (self.method.group_size * len(batches))

    def _normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self._stream).to(like.device)


def clipped_sum(rows: Tensor, clip_norm: float) -> Tensor:
    """Clip each row to a norm and add them up: what DP-SGD takes for bounded by construction."""
    return bound(rows, clip_norm).sum(dim=0)


class Game:
    """Play D against G. Nothing here reads records but through :class:`_Records`."""

    def __init__(self, method: DPAF, gate: Gate) -> None:
        public, self.device = gate.public, gate.engine.torch_device
        self.method, self.gate = method, gate
        self.records = (_Bare if method.published else _Gated)(method, gate)
        self.discriminator, self.maker = method.discriminator(public), method.generator(public)
        self.labels = torch.arange(len(public.classes), device=self.device)
        sizes = torch.tensor(public.sizes, device=self.device)
        self.weight = (sizes.sum() / sizes)[:, None, None, None]  # a class counts as any other
        noise = method.noise(public)["features"]
        self.stddev = noise * self.discriminator.bound / method.group_size

        seed = public_seed(method.seed, "discriminator")
        drawn = self.discriminator.draw(seed, device=self.device)
        trained = [part for _, parts in method.updated for part in parts]
        names, head = self.discriminator.names(*trained), self.discriminator.names("conv3", "fc")
        self.fixed = {n: v for n, v in drawn.items() if n not in (*names, *head)}
        self.conv = self._learner(drawn, names, method.learning_rate)
        self.head = self._learner(drawn, head, method.head_learning_rate)
        self.anchor: Tensor | None = None
        first = self.maker.draw(public_seed(method.seed, "generator"), device=self.device)
        self.generator = self._learner(first, tuple(first), method.generator_learning_rate)

    def _learner(self, drawn: Weights, names: Sequence[str], rate: float) -> _Learner:
        return _Learner({name: drawn[name] for name in names}, rate, self.method.momentum)

    @property
    def weights(self) -> Weights:
        """Return conv1 and conv2, held fixed."""
        return {**self.fixed, **{n: v.detach() for n, v in self.conv.weights.items()}}

    def play(self) -> None:
        """Train the classifier, then D and G in turns."""
        how, done = self.method, self._resume(self.gate.resume())
        if done == 0 and how.anchor and not how.published:
            self.anchor = how.embedding(self.gate.public).ask(self.gate)
        if done == 0 and how.conv1 == "transfer":
            self.fixed = self._transferred()
        distance = None if self.anchor is None else self._distance(self.anchor)
        for t in range(done, how.batches):
            stream = torch.Generator().manual_seed(public_seed(how.seed, "batch", t))
            real = self.records.aggregate("features", self.weights)
            for turn in range(t * how.public_steps, (t + 1) * how.public_steps):
                self.head.descend(self._loss(real, self._fake(self._pictures(stream), stream)))
                if (turn + 1) % how.critic_steps == 0:
                    pictures = self._pictures(stream, moving=True)
                    loss = F.softplus(-self._judged(self._fake(pictures, stream))).mean()
                    if distance is not None:
                        loss = loss + how.anchor_weight * distance(pictures)
                    self.generator.descend(loss)
            if (t + 1) % how.asymmetry == 0:
                self._update(stream)
                if (t + 1) // how.asymmetry % CHECKPOINT == 0 and not how.published:
                    self.gate.checkpoint(self._state(t + 1))

    def _distance(self, anchor: Tensor) -> Callable[[Tensor], Tensor]:
        """Return how far made pictures' mean embeddings are from the noisy ones of the records."""
        told = self.labels.repeat_interleave(self.method.fakes_per_class)
        public = self.gate.public
        match = self.method.embedding(public).distance(public, anchor)
        return lambda pictures: match(pictures, told)

    def _judged(self, aggregates: Tensor) -> Tensor:
        return self.discriminator.judge(self.head.weights, aggregates, self.labels)

    def _loss(self, real: Tensor, fake: Tensor) -> Tensor:
        """Return the binary cross entropy of D (Section 3.2)."""
        return F.softplus(-self._judged(real)).mean() + F.softplus(self._judged(fake)).mean()

    def _pictures(self, stream: torch.Generator, *, moving: bool = False) -> Tensor:
        """Make pictures of every class, as many of each."""
        told = self.labels.repeat_interleave(self.method.fakes_per_class)
        latents = torch.randn(len(told), self.method.latent, generator=stream).to(self.device)
        with torch.set_grad_enabled(moving):
            return self.maker.make(self.generator.weights, latents, told)

    def _fake(self, pictures: Tensor, stream: torch.Generator) -> Tensor:
        """Aggregate made pictures, with as much noise as the real aggregates have.

        Else D would learn to hear the noise. This noise is public and pays for nothing.
        """
        features = self.discriminator.features(self.weights, pictures)
        clean = features.view(len(self.labels), -1, *features.shape[1:]).mean(dim=1)
        noise = torch.randn(clean.shape, generator=stream).to(self.device)
        return clean + self.stddev * noise

    def _update(self, stream: torch.Generator) -> None:
        """Move conv2 (and conv1) by how real and made pictures pull at it (every mu-th batch)."""
        weights, pictures = self.weights, self._pictures(stream)
        real = self.records.standing(weights).requires_grad_()
        fake = self._fake(pictures, stream).requires_grad_()
        v_real, v_fake = torch.autograd.grad(self._loss(real, fake), [real, fake])
        v_real, v_fake = v_real * self.weight, v_fake * len(self.labels)
        # The scale of v changes as D learns; with a fixed one the clip norm keeps its meaning.
        size = _longest(torch.cat([v_real, v_fake]))
        told = self.labels.repeat_interleave(self.method.fakes_per_class)
        slopes: Weights = {}
        for name, parts in self.method.updated:
            names = self.discriminator.names(*parts)
            theirs = self.records.slopes(name, names, weights, v_real / size)
            pull = pull_of_one(self.discriminator, weights, names, v_fake / size, self.method.keep)
            rows = vmap(pull, chunk_size=AT_ONCE)(pictures, told)
            ours = clipped_sum(rows, self.method.clip_norm) / len(rows)
            slopes |= split(theirs + ours, weights, names)
        self.conv.step(slopes)
        self.records.forget()

    def _transferred(self) -> Weights:
        """Train the classifier of class shares, and return its conv1 (Section 3.1).

        Aggregates are linear in the records, so a public mixture of class aggregates is the
        aggregate of a batch with these class shares: C learns to tell the shares (mean square
        error), from mixtures drawn uniformly. What it would have of the shares of a private batch
        never enters.
        """
        how, classes = self.method, len(self.labels)
        seed = public_seed(how.seed, "classifier")
        drawn = self.discriminator.draw(seed, outputs=classes, device=self.device)
        names = self.discriminator.names("conv1", "conv2")
        conv = self._learner(drawn, names, how.learning_rate)
        rest = tuple(name for name in drawn if name not in names)
        head = self._learner(drawn, rest, how.head_learning_rate)
        for t in range(how.classifier_batches):
            stream = torch.Generator().manual_seed(public_seed(how.seed, "mixtures", t))
            shares = -torch.rand(MIXTURES, classes, generator=stream).clamp_min(1e-30).log()
            shares = (shares / shares.sum(dim=1, keepdim=True)).to(self.device)
            weights = {name: value.detach() for name, value in conv.weights.items()}
            real = self.records.aggregate("classifier features", weights).requires_grad_()
            mixed = torch.einsum("sc,cmhw->smhw", shares, real)
            error = self.discriminator.shares(head.weights, mixed) - shares
            loss = error.square().sum(dim=1).mean()
            (v,) = torch.autograd.grad(loss, [real], retain_graph=True)
            head.descend(loss)
            v = v * self.weight
            slopes = self.records.slopes("classifier gradients", names, weights, v / _longest(v))
            conv.step(split(slopes, weights, names))
            self.records.forget()
        return {name: conv.weights[name].detach() for name in self.discriminator.names("conv1")}

    def _state(self, done: int) -> Weights:
        """Return all that goes on from here: a function of answers and public values."""
        learners = {"conv": self.conv, "head": self.head, "generator": self.generator}
        state = {f"fixed/{name}": value for name, value in self.fixed.items()}
        for place, learner in learners.items():
            state |= {f"{place}/{name}": value for name, value in learner.state().items()}
        if self.anchor is not None:
            state["anchor"] = self.anchor
        return {**state, "done": torch.tensor(done)}

    def _resume(self, state: Mapping[str, Tensor] | None) -> int:
        """Take a checkpoint up. Return how many batches it stands for."""
        if state is None:
            return 0

        def under(place: str) -> Weights:
            start = f"{place}/"
            return {n.removeprefix(start): v for n, v in state.items() if n.startswith(start)}

        self.fixed = under("fixed")
        self.conv.resume(under("conv"))
        self.head.resume(under("head"))
        self.generator.resume(under("generator"))
        self.anchor = state.get("anchor")
        return int(state["done"])


def _longest(directions: Tensor) -> Tensor:
    """Return the norm of the longest direction, or next to nothing."""
    longest: Tensor = torch.linalg.vector_norm(directions.flatten(1), dim=1).max()
    return longest.clamp_min(1e-30)


class _Learner:
    """Hold weights that follow Adam."""

    def __init__(self, weights: Weights, rate: float, momentum: float) -> None:
        own = {name: value.detach().clone() for name, value in weights.items()}
        device = next(iter(own.values())).device
        self._state = untrained(own, torch.zeros((), device=device))
        # The same memory, seen by those who take gradients
        self.weights = {name: value.detach().requires_grad_() for name, value in own.items()}
        self._rate, self._momentum = rate, momentum

    def descend(self, loss: Tensor) -> None:
        """Take one step down a loss."""
        slopes = torch.autograd.grad(loss, list(self.weights.values()))
        self.step(dict(zip(self.weights, slopes, strict=True)))

    def step(self, slopes: Mapping[str, Tensor]) -> None:
        """Take one step against these slopes."""
        adam(self._state, slopes, self._rate, self._momentum)

    def state(self) -> Weights:
        """Return weights, moments and the number of steps."""
        return dict(self._state)

    def resume(self, state: Mapping[str, Tensor]) -> None:
        """Take them up."""
        for name, value in self._state.items():
            value.copy_(state[name])
