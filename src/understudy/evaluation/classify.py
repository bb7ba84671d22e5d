"""Train a classifier on a synthetic set, test it on held-out real records.

The number is the accuracy after the last epoch of a protocol fixed beforehand. There is no
selection on the test set, of epochs or of anything else: it would overstate the result and read the
test set more often than anybody accounts for.

Networks and the order of training come from the seeds alone (public randomness, local generators).
On a GPU the seeds train side by side in one recorded step, on a CPU one after the other; the
arithmetic is the same code.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from understudy.engine import abreast, captured, moved
from understudy.errors import BadConfiguration, UnknownName
from understudy.nets.classifiers import Dropout, build
from understudy.nets.convnet import ConvNet
from understudy.ops.augment import Augmentation, AugmentParams
from understudy.ops.augment import apply as augment
from understudy.ops.pieces import piece

__all__ = [
    "DATALENS",
    "DM",
    "PROTOCOLS",
    "PSG",
    "QUICK",
    "Protocol",
    "Scores",
    "sklearn_scores",
    "train_and_test",
]

Progress = Callable[[int, int, str], None]
Network = str | Callable[[int], nn.Module]

# Networks trained side by side on a GPU: at batch 256, 32x32, about 1 GB each.
_SIDE_BY_SIDE = 8


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Fix how a classifier is trained: SGD with momentum, one drop of the rate, the last epoch.

    `epochs` counts passes over the set that are really made. After `lr_drop` passes the rate is
    multiplied by `lr_factor` and the momentum starts from nothing (a fresh optimiser).
    `one_family` gives a batch one family of augmentation with parameters per picture, as the code
    of the papers does; otherwise each picture has its own family. Tables are never augmented.
    """

    name: str
    epochs: int
    lr: float
    batch: int
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_drop: int | None = None
    lr_factor: float = 0.1
    augmentation: str = ""
    one_family: bool = True
    network: str = "convnet"

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch < 1 or not self.lr > 0:
            raise BadConfiguration(
                f"Protocol '{self.name}' needs epochs, batch and lr above zero, not "
                f"{self.epochs}, {self.batch}, {self.lr}."
            )
        if not 0 <= self.momentum < 1 or self.weight_decay < 0 or not self.lr_factor > 0:
            raise BadConfiguration(
                f"Protocol '{self.name}' needs 0 <= momentum < 1, weight_decay >= 0 and "
                f"lr_factor > 0, not {self.momentum}, {self.weight_decay}, {self.lr_factor}."
            )
        Augmentation(self.augmentation)

    def but(self, **changes: Any) -> Protocol:
        """Return this protocol with some fields changed, and a name that says so."""
        if "name" not in changes:
            told = ", ".join(f"{field}={value!r}" for field, value in sorted(changes.items()))
            changes["name"] = f"{self.name} ({told})"
        return replace(self, **changes)

    def with_flips(self) -> Protocol:
        """Return this protocol for pictures that may be mirrored (not digits, not letters)."""
        families = Augmentation(self.augmentation).families
        if not families or "flip" in families:
            return self
        return replace(self, augmentation="_".join((*families, "flip")), name=f"{self.name}+flip")

    def rate(self, epoch: int) -> float:
        """Return the learning rate of a pass, counted from zero."""
        dropped = self.lr_drop is not None and epoch >= self.lr_drop
        return self.lr * self.lr_factor if dropped else self.lr


# E = 1000 in the code of DM, NDPDC and Dosser is a loop over 0..E, with the drop after epoch
# E//2 + 1: 1001 passes, 502 of them at the full rate. No flip: see with_flips.
DM = Protocol(
    name="dm",
    epochs=1001,
    lr=0.01,
    momentum=0.9,
    weight_decay=5e-4,
    batch=256,
    lr_drop=502,
    augmentation="color_crop_cutout_scale_rotate",
)
# E = 300 without augmentation: PSG's supplement, and its code for CIFAR-10. (Its code uses E = 1000
# with another augmentation, up to 45 degrees, for the grey sets; not offered.)
PSG = DM.but(name="psg", epochs=301, lr_drop=152, augmentation="")
# 600 epochs of plain SGD on its own small CNN. Departure: the last epoch, where the authors report
# the best epoch on the test set.
DATALENS = Protocol(name="datalens", epochs=600, lr=2e-3, batch=512, network="datalens")
# Ours, for a first look on a laptop: a sixteenth of the passes of dm. Its numbers must not be compared
# with published ones.
QUICK = Protocol(
    name="quick",
    epochs=60,
    lr=0.02,
    momentum=0.9,
    weight_decay=5e-4,
    batch=64,
    lr_drop=40,
    augmentation="color_crop_cutout_scale_rotate",
)

PROTOCOLS: Mapping[str, Protocol] = {p.name: p for p in (DM, PSG, DATALENS, QUICK)}


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Hold the confusion matrix of every seed; all figures follow from these.

    `confusions[s][i][j]` counts the test records of class i that the network of seed s called j.
    """

    protocol: str
    network: str
    seeds: tuple[int, ...]
    confusions: tuple[tuple[tuple[int, ...], ...], ...]
    settings: Mapping[str, Any]

    @property
    def accuracies(self) -> tuple[float, ...]:
        """Return the accuracy of every seed."""
        return tuple(
            sum(row[i] for i, row in enumerate(matrix)) / self.tested for matrix in self.confusions
        )

    @property
    def tested(self) -> int:
        """Return the number of test records."""
        return sum(map(sum, self.confusions[0]))

    @property
    def accuracy(self) -> float:
        """Return the mean accuracy over the seeds."""
        return math.fsum(self.accuracies) / len(self.seeds)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % t interval of the mean over seeds, cut to [0, 1]; None with one seed.

        It covers the training's own randomness, given this synthetic set and this test set: not
        that of the release, nor of drawing the test records.
        """
        count = len(self.seeds)
        if count < 2:
            return None
        from scipy.stats import t  # type: ignore[import-untyped, unused-ignore]

        variance = math.fsum((a - self.accuracy) ** 2 for a in self.accuracies) / (count - 1)
        half = float(t.ppf(0.975, count - 1)) * math.sqrt(variance / count)
        return max(0.0, self.accuracy - half), min(1.0, self.accuracy + half)

    @property
    def confusion(self) -> tuple[tuple[int, ...], ...]:
        """Return the confusion matrix added up over the seeds."""
        return tuple(
            tuple(map(sum, zip(*rows, strict=True))) for rows in zip(*self.confusions, strict=True)
        )

    @property
    def per_class(self) -> tuple[float | None, ...]:
        """Return the accuracy within each class; None for a class the test set does not have."""
        return tuple(
            row[i] / sum(row) if sum(row) else None for i, row in enumerate(self.confusion)
        )

    @property
    def balanced_accuracy(self) -> float:
        """Return the mean of the per-class accuracies: guessing gives 1 / classes."""
        present = [value for value in self.per_class if value is not None]
        return math.fsum(present) / len(present)

    @property
    def chance(self) -> float:
        """Return the accuracy of the best constant answer, the share of the largest class."""
        return max(map(sum, self.confusions[0])) / self.tested

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return {
            "protocol": self.protocol,
            "network": self.network,
            "settings": dict(self.settings),
            "seeds": list(self.seeds),
            "tested": self.tested,
            "accuracies": list(self.accuracies),
            "accuracy": self.accuracy,
            "interval_95": None if self.interval is None else list(self.interval),
            "balanced_accuracy": self.balanced_accuracy,
            "per_class": list(self.per_class),
            "chance": self.chance,
            "confusions": [[list(row) for row in matrix] for matrix in self.confusions],
        }

    def __str__(self) -> str:
        if self.interval is None:
            spread = "one seed"
        elif len(set(self.accuracies)) == 1:
            spread = f"the same with each of {len(self.seeds)} seeds"
        else:
            spread = f"95 % interval {self.interval[0]:.2%} to {self.interval[1]:.2%}"
            spread += f", {len(self.seeds)} seeds"
        told = f"{self.network}, {self.protocol}: {self.accuracy:.2%} ({spread})"
        if self.chance > 1.5 / len(self.confusion):
            told += f"; balanced {self.balanced_accuracy:.2%}"
        return told


def train_and_test(
    images: Tensor,
    labels: Tensor,
    test_images: Tensor,
    test_labels: Tensor,
    *,
    classes: int,
    protocol: Protocol | str = "dm",
    network: Network | None = None,
    seeds: Sequence[int] = (0,),
    device: torch.device | str | None = None,
    progress: Progress | None = None,
    side_by_side: int | None = None,
    precision: torch.dtype = torch.float32,
) -> Scores:
    """Train one network per seed on `images` by the protocol and test it after the last epoch.

    Images are (n, C, H, W), or (n, F) for a table, of a floating type and on the same scale in both
    sets; labels are 0 .. classes-1. `network` is a name of `nets.NETWORKS` in place of the
    protocol's own, or a function from a seed to a module. `side_by_side` networks train at once as
    one stack: 8 on a GPU unless told otherwise, 1 on a CPU (networks with dropout or batch norm
    always 1). `precision` is what ConvNets on a GPU are trained in, by fused blocks if bfloat16;
    weights, steps and the test are float32. `progress(done, total, text)` hears of every epoch of
    every seed.
    """
    protocol = _protocol(protocol)
    if not seeds:
        raise BadConfiguration("Give at least one seed.")
    device = torch.device(device if device is not None else images.device)
    images, labels = _checked("synthetic", images, labels, classes)
    test_images, test_labels = _checked("test", test_images, test_labels, classes)
    if images.shape[1:] != test_images.shape[1:]:
        raise BadConfiguration(
            f"Synthetic records have shape {tuple(images.shape[1:])}, test records "
            f"{tuple(test_images.shape[1:])}."
        )
    if images.dim() == 2:
        protocol = replace(protocol, augmentation="")
    images, labels = images.detach().to(device), labels.to(device)

    named = network if network is not None else protocol.network
    shape = tuple(images.shape[1:])

    def make(seed: int) -> nn.Module:
        if isinstance(named, str):
            return build(named, shape, classes, seed, device)
        return named(seed).to(device)

    done, total = 0, len(seeds) * protocol.epochs

    def tick(trained: int, text: str) -> None:
        nonlocal done
        done += trained
        if progress is not None:
            progress(done, total, text)

    confusions: list[Tensor] = []
    width = side_by_side or (_SIDE_BY_SIDE if device.type == "cuda" else 1)
    for group in _groups(seeds, width):
        nets = [make(seed).to(images.dtype).train() for seed in group]
        _compute_in(nets, precision)
        if len(nets) > 1 and _stackable(nets[0]):
            flats = _train(nets, group, images, labels, protocol, tick)
            trained = list(zip(nets, flats, strict=True))
        else:
            trained = [
                (net, _train([net], [seed], images, labels, protocol, tick)[0])
                for net, seed in zip(nets, group, strict=True)
            ]
        _compute_in(nets, torch.float32)
        for net, flat in trained:
            nn.utils.vector_to_parameters(flat, net.parameters())
            confusions.append(_confusion(net, test_images, test_labels, classes, device))

    settings = asdict(protocol)
    label = named if isinstance(named, str) else getattr(named, "__name__", "custom")
    settings["network"] = label
    return Scores(
        protocol=protocol.name,
        network=label,
        seeds=tuple(seeds),
        confusions=tuple(
            tuple(tuple(map(int, row)) for row in matrix.tolist()) for matrix in confusions
        ),
        settings=settings,
    )


def judge(
    net: nn.Module,
    test_images: Tensor,
    test_labels: Tensor,
    *,
    classes: int,
    told: str,
    device: torch.device | str | None = None,
) -> Scores:
    """Test a network that is already trained. ``told`` names it in the scores."""
    test_images, test_labels = _checked("test", test_images, test_labels, classes)
    place = torch.device(device) if device is not None else next(net.parameters()).device
    matrix = _confusion(net.eval(), test_images, test_labels, classes, place)
    return Scores(
        protocol="as released",
        network=told,
        seeds=(0,),
        confusions=(tuple(tuple(map(int, row)) for row in matrix.tolist()),),
        settings={},
    )


def _protocol(protocol: Protocol | str) -> Protocol:
    """Return the protocol of that name."""
    if isinstance(protocol, Protocol):
        return protocol
    if protocol not in PROTOCOLS:
        raise UnknownName("protocol", protocol, PROTOCOLS)
    return PROTOCOLS[protocol]


def _checked(which: str, images: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return images and integer labels, or say what is wrong with them."""
    if images.dim() not in (2, 4) or not images.is_floating_point():
        raise BadConfiguration(
            f"The {which} images must be floating point, (n, C, H, W) or (n, F), not "
            f"{images.dtype} of shape {tuple(images.shape)}."
        )
    if labels.shape != images.shape[:1] or labels.is_floating_point():
        raise BadConfiguration(
            f"The {which} labels must be {images.shape[0]} integers, not {labels.dtype} of shape "
            f"{tuple(labels.shape)}."
        )
    if images.shape[0] == 0:
        raise BadConfiguration(f"The {which} set is empty.")
    if not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise BadConfiguration(
            f"The {which} labels run from {int(labels.min())} to {int(labels.max())}, but there "
            f"are {classes} classes, 0 to {classes - 1}."
        )
    if not bool(images.isfinite().all()):
        raise BadConfiguration(f"The {which} images have entries that are not finite.")
    return images, labels.long()


def _groups(seeds: Sequence[int], width: int) -> Iterator[list[int]]:
    """Cut the seeds into groups of at most `width`."""
    for start in range(0, len(seeds), width):
        yield list(seeds[start : start + width])


def _stackable(net: nn.Module) -> bool:
    """Tell whether networks like this one can train as a stack: no state besides parameters."""
    return _recordable(net) and not any(isinstance(part, Dropout) for part in net.modules())


def _recordable(net: nn.Module) -> bool:
    """Tell whether runs that warm up can be undone: no statistics, no global generator."""
    global_masks = any(isinstance(part, nn.Dropout) for part in net.modules())
    return not global_masks and next(net.buffers(), None) is None


def _compute_in(nets: Sequence[nn.Module], precision: torch.dtype) -> None:
    """Choose what ConvNets are computed in on a GPU; other networks know float32 only."""
    for net in nets:
        if isinstance(net, ConvNet):
            net.precision = precision


def _piece(images: Tensor, net: nn.Module) -> int:
    """Return how many pictures to take at a time: the whole batch unless on a CPU.

    Pieces change nothing but the speed, since no record sees another, except in batch norm.
    """
    mixes = any(isinstance(part, _BatchNorm) for part in net.modules())
    return len(images) if mixes else piece(images)


def _train(
    nets: Sequence[nn.Module],
    seeds: Sequence[int],
    images: Tensor,
    labels: Tensor,
    protocol: Protocol,
    tick: Callable[[int, str], None],
) -> Tensor:
    """Train the networks side by side; return their parameters, one flat row each.

    Every network has its own order and augmentation.
    """
    flats = torch.stack([nn.utils.parameters_to_vector(n.parameters()).detach() for n in nets])
    state = _Stack(nets[0], flats, torch.zeros_like(flats), flats.new_zeros(()))
    augmentation = Augmentation(protocol.augmentation)
    size = (int(images.shape[-2]), int(images.shape[-1]))
    # One stream for the order and the augmentation of each seed, apart from its weights' stream.
    streams = [torch.Generator().manual_seed(seed) for seed in seeds]
    n = images.shape[0]
    counts = [min(protocol.batch, n - start) for start in range(0, n, protocol.batch)]
    steps: dict[int, _Step] = {}  # by the size of a batch: the last one of an epoch is smaller

    for epoch in range(protocol.epochs):
        if epoch == protocol.lr_drop:
            state.velocities.zero_()
        state.rate.fill_(protocol.rate(epoch))
        orders = torch.stack([torch.randperm(n, generator=stream) for stream in streams])
        parts = [torch.split(moved(orders, images.device), counts, dim=1)]
        if augmentation.families:
            draws = augmentation.draw_batches(
                streams, counts, size, one_family=protocol.one_family
            ).packed()
            parts.append(torch.split(moved(draws, images.device), counts, dim=1))
        for batch in zip(*parts, strict=True):
            count = batch[0].shape[1]
            if count not in steps:
                steps[count] = _Step(state, images, labels, protocol, batch)
            steps[count](batch)
        tick(len(nets), f"epoch {epoch + 1} of {protocol.epochs}")
    return flats


@dataclass
class _Stack:
    """Hold networks of one kind in training: a row of parameters and one of velocities each.

    All parameters of a network are one row, so a step of SGD is a few operations on one tensor.
    """

    net: nn.Module
    flats: Tensor
    velocities: Tensor
    rate: Tensor

    def __post_init__(self) -> None:
        self._names = [name for name, _ in self.net.named_parameters()]
        self._shapes = [p.shape for p in self.net.parameters()]

    def loss(self, flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the summed loss of the network with these parameters."""
        rows = torch.split(flat, [shape.numel() for shape in self._shapes])
        pieces = zip(self._names, rows, self._shapes, strict=True)
        parameters = {name: row.view(shape) for name, row, shape in pieces}
        logits = functional_call(self.net, parameters, (x,), tie_weights=False)
        return F.cross_entropy(logits, y, reduction="sum")

    def gradient(self, which: int, x: Tensor, y: Tensor) -> Tensor:
        """Return a network's gradient, added up over the batch a few records at a time."""
        leaf, size = self.flats[which].detach().requires_grad_(), _piece(x, self.net)
        if x.is_cuda and x.dim() == 4 and not isinstance(self.net, ConvNet):
            x = x.contiguous(memory_format=torch.channels_last)
        losses = (
            self.loss(leaf, part, targets)
            for part, targets in zip(torch.split(x, size), torch.split(y, size), strict=True)
        )
        total = torch.zeros_like(leaf)
        for loss in losses:
            total += torch.autograd.grad(loss, leaf)[0]
        return total

    def descend(self, gradients: Tensor, protocol: Protocol) -> None:
        """Take the step of torch.optim.SGD, in place: v <- m v + g + w p, then p <- p - r v."""
        gradients.add_(self.flats, alpha=protocol.weight_decay)
        self.velocities.mul_(protocol.momentum).add_(gradients)
        self.flats.addcmul_(self.velocities, self.rate, value=-1)


class _Step:
    """Train every network on one batch of its own. On a GPU this is recorded once and replayed."""

    def __init__(
        self,
        stack: _Stack,
        images: Tensor,
        labels: Tensor,
        protocol: Protocol,
        batch: Sequence[Tensor],
    ) -> None:
        self._batch = [part.clone() for part in batch]
        picked, *packed = self._batch
        gradients = torch.zeros_like(stack.flats)

        def step() -> None:
            x, y = images[picked.flatten()], labels[picked]
            for draws in packed:
                x = augment(x, AugmentParams.unpacked(draws.flatten(0, 1)))
            x = x.view(*picked.shape, *x.shape[1:])

            def one(which: int) -> None:
                gradients[which] = stack.gradient(which, x[which], y[which])

            works = [functools.partial(one, which) for which in range(len(gradients))]
            abreast(works, images.device)
            stack.descend(gradients.div_(picked.shape[1]), protocol)

        if not _recordable(stack.net):
            self._go = step
            return
        masks = [m.generator(images.device) for m in stack.net.modules() if isinstance(m, Dropout)]
        self._go = captured(step, images.device, (stack.flats, stack.velocities), masks)

    def __call__(self, batch: Sequence[Tensor]) -> None:
        """Take the step on these records of each network, with these draws."""
        for mine, given in zip(self._batch, batch, strict=True):
            mine.copy_(given)
        self._go()


@torch.no_grad()
def _confusion(
    net: nn.Module, images: Tensor, labels: Tensor, classes: int, device: torch.device
) -> Tensor:
    """Return the confusion matrix of the network on the test set."""
    net.eval()
    dtype = next(net.parameters()).dtype
    step = 1024
    if device.type == "cpu":
        step = min(step, piece(images))
    matrix = torch.zeros(classes * classes, dtype=torch.int64, device=device)
    for part, truth in zip(torch.split(images, step), torch.split(labels, step), strict=True):
        guess = net(part.to(device, dtype)).argmax(1)
        matrix += torch.bincount(truth.to(device) * classes + guess, minlength=classes * classes)
    return matrix.view(classes, classes).cpu()


def sklearn_scores(
    images: Tensor,
    labels: Tensor,
    test_images: Tensor,
    test_labels: Tensor,
    *,
    classes: int,
    models: Sequence[str] = ("logistic", "forest", "boosting"),
    seeds: Sequence[int] = (0,),
    progress: Progress | None = None,
) -> dict[str, Scores]:
    """Score scikit-learn's classifiers on flattened records: for tables and small pictures.

    Logistic regression on standardised features (by the synthetic set's own mean and scale), a
    random forest, gradient boosting on histograms. Needs scikit-learn.
    """
    images, labels = _checked("synthetic", images, labels, classes)
    test_images, test_labels = _checked("test", test_images, test_labels, classes)
    if not seeds:
        raise BadConfiguration("Give at least one seed.")
    makers = _sklearn_models()
    for name in models:
        if name not in makers:
            raise UnknownName("scikit-learn model", name, makers)
    x, y = images.detach().flatten(1).cpu().numpy(), labels.cpu().numpy()
    test_x, truth = test_images.detach().flatten(1).cpu().numpy(), test_labels.cpu()
    scores: dict[str, Scores] = {}
    done = 0
    for name in models:
        confusions = []
        for seed in seeds:
            if len(set(y.tolist())) == 1:
                guess = torch.full_like(truth, int(y[0]))
            else:
                model = makers[name](seed % 2**32)
                guess = torch.as_tensor(model.fit(x, y).predict(test_x)).long()
            matrix = torch.bincount(truth * classes + guess, minlength=classes * classes)
            rows = matrix.view(classes, classes).tolist()
            confusions.append(tuple(tuple(map(int, row)) for row in rows))
            done += 1
            if progress is not None:
                progress(done, len(models) * len(seeds), name)
        scores[name] = Scores(
            protocol="scikit-learn",
            network=name,
            seeds=tuple(seeds),
            confusions=tuple(confusions),
            settings={"model": name},
        )
    return scores


def _sklearn_models() -> dict[str, Callable[[int], Any]]:
    """Return the makers of the scikit-learn models, importing it only now."""
    try:
        from sklearn import (  # type: ignore[import-untyped, unused-ignore]
            ensemble,
            linear_model,
            pipeline,
            preprocessing,
        )
    except ImportError as missing:
        raise ImportError(
            "sklearn_scores needs scikit-learn: pip install scikit-learn"
        ) from missing
    return {
        "logistic": lambda seed: pipeline.make_pipeline(
            preprocessing.StandardScaler(),
            linear_model.LogisticRegression(max_iter=1000, random_state=seed),
        ),
        "forest": lambda seed: ensemble.RandomForestClassifier(200, random_state=seed),
        # scikit-learn's 20 records to a leaf is made for larger sets than these.
        "boosting": lambda seed: ensemble.HistGradientBoostingClassifier(
            min_samples_leaf=5, random_state=seed
        ),
    }
