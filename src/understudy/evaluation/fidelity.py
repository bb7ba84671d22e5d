"""Say how near synthetic records are to real ones that were held out.

Every figure compares two sets of feature vectors, and depends on what the features are and on how
many records are compared. So each is named by its features, and given twice: for the synthetic
set, and for as many real records put in its place. Nothing here reads a private record, and
nothing comes from the synthetic set's own point of view: the feature network is trained on
held-out real records, never on the synthetic ones it judges.

    a third of the held-out records     trains the feature network (where there is one)
    a third                             is the reference
    a third                             lends "real against real" its records
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from understudy.data.heldout import HeldOut
from understudy.data.synthetic import SyntheticSet
from understudy.engine import Engine, Progress, silent
from understudy.errors import BadConfiguration, DataError
from understudy.evaluation.classify import QUICK, Protocol, train_and_test
from understudy.methods.matching import public_seed
from understudy.nets.convnet import random_convnet

__all__ = [
    "Fidelity",
    "Figures",
    "check_alike",
    "classifier_score",
    "fidelity",
    "frechet_distance",
    "kernel_distance",
    "neighbourhoods",
]

NEAREST = 5
"""k of precision, recall, density and coverage (as Naeem et al. 2020; Kynkaanniemi et al.: 3)."""

FEATURE_WIDTH = 32
"""Width of the ConvNet: 512 features from 16 pixels upwards. A third of MNIST's test records
(3,333) is then enough for covariances of full rank."""

FEATURE_STEPS = 1000
"""Steps that train it, however many records there are: 19 passes over a third of MNIST's test
records."""

KERNEL_SUBSETS, KERNEL_SUBSET = 100, 1000
"""Number and largest size of the subsets a kernel distance is averaged over (Binkowski et al.
2018)."""

INCEPTION_FEATURES, INCEPTION_CLASSES = 2048, 1008

LEAST_PROBABILITY = 1e-30
"""Below it a class counts as impossible: the logarithm of zero is none."""

_ROWS = 1024  # rows of a distance matrix held at a time

Kind = Literal["own", "inception", "columns"]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Hold the figures of one set of records, measured against the reference.

    The distances are zero at best; ``kernel_distance`` is unbiased, so it may fall below.
    ``classifier_score`` lies between 1 and the number of classes; None where there is no
    classifier. ``precision``, ``recall`` and ``coverage`` are shares; ``density`` may exceed 1.
    ``nearest``: the least and the median Euclidean distance of a record to its nearest reference
    record, in pixels within [-1, 1] or standardised columns, whatever the features are.
    """

    frechet_distance: float
    kernel_distance: float
    classifier_score: float | None
    precision: float
    recall: float
    density: float
    coverage: float
    nearest: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """Hold the figures of a synthetic set beside those of as many real records in its place.

    ``compared`` records of each stand against ``reference`` real ones; ``trained_on`` further
    real ones trained the feature network. Figures made with other features or counts cannot be
    compared with these.
    """

    kind: Kind
    features: str
    """What the features are, in words."""
    synthetic: Figures
    real: Figures
    """Real against real: what a perfect set of this size would get."""
    records: int
    """Size of the whole synthetic set."""
    compared: int
    reference: int
    trained_on: int
    seed: int
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def titles(self) -> dict[str, str]:
        """Name each figure. Inception's names are kept for Inception's features."""
        standard = self.kind == "inception"
        return {
            "frechet_distance": "Inception FID" if standard else "Fréchet distance (not FID)",
            "kernel_distance": "Inception KID" if standard else "kernel distance (not KID)",
            "classifier_score": "Inception Score" if standard else "classifier score",
            "precision": "precision",
            "recall": "recall",
            "density": "density",
            "coverage": "coverage",
            "nearest": "nearest real record (least, median)",
        }

    @property
    def caution(self) -> str:
        """Say what the figures may be compared with."""
        told = (
            f"Features: {self.features}. Published figures compare thousands of records with the "
            "training set; fewer records give a larger FID."
            if self.kind == "inception"
            else f"Features: {self.features}; not Inception. Compare only with figures made the same "
            "way."
        )
        return f"{told} Read each beside 'real against real', made from equally many records."

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        data = dataclasses.asdict(self)
        for which in ("synthetic", "real"):
            data[which]["nearest"] = list(data[which]["nearest"])
        return {**data, "titles": self.titles, "caution": self.caution}

    def __str__(self) -> str:
        lines = [
            f"{self.compared} of {self.records} synthetic records against {self.reference} real ones",
            f"{'':38}{'synthetic':>16}{'real against real':>20}",
        ]
        for name, title in self.titles.items():
            ours, theirs = (_told(getattr(part, name)) for part in (self.synthetic, self.real))
            lines.append(f"{title:38}{ours:>16}{theirs:>20}")
        return "\n".join([*lines, self.caution])


def _told(value: float | tuple[float, float] | None) -> str:
    if value is None:
        return "-"
    return ", ".join(f"{v:.3g}" for v in (value if isinstance(value, tuple) else (value,)))


def fidelity(
    synthetic: SyntheticSet,
    heldout: HeldOut,
    *,
    features: str | Path = "own",
    seed: int = 0,
    engine: Engine | None = None,
    progress: Progress = silent,
) -> Fidelity:
    """Compare a synthetic set, or many samples of a generator, with held-out real records.

    ``features`` "own": a ConvNet trained here, on a third of the held-out records; for a table,
    and for pictures under 8 pixels, the columns themselves, standardised. A path: the standard
    Inception as a TorchScript file with the interface of NVIDIA's ``inception-2015-12-05.pt``; only
    then are FID, KID and Inception Score called so.

    Values are cut to [-1, 1], as in the pictures people see. Where a third of the held-out records
    has too few of some class to match the synthetic set, the set is thinned, its class shares kept.
    ``seed`` is public: it deals the records to their thirds and draws the network.
    """
    check_alike(synthetic, heldout)
    if not bool(synthetic.images.isfinite().all()):
        raise BadConfiguration("The synthetic records have entries that are not finite.")
    engine = engine or Engine()
    chosen = _kind(synthetic, features)
    deal = torch.Generator().manual_seed(public_seed(seed, "fidelity"))
    training, reference, pool = _deal(heldout, 3 if chosen == "own" else 2, deal)
    ours, theirs = _matched(synthetic.labels.cpu(), heldout.labels[pool], heldout.classes, deal)
    theirs = pool[theirs]
    if min(len(ours), len(reference)) <= NEAREST:
        raise DataError(
            f"There are {len(ours)} synthetic and {len(reference)} real records to compare; "
            f"{NEAREST} nearest neighbours need {NEAREST + 1} of each. Give a larger set, or more "
            f"held-out records than {len(heldout)}."
        )
    groups = [
        part.detach().cpu().clamp(-1, 1)
        for part in (synthetic.images[ours], heldout.images[theirs], heldout.images[reference])
    ]
    if chosen == "own":
        space = _own(heldout, training, pool, public_seed(seed, "features"), engine, progress)
    elif chosen == "inception":
        space = _inception(Path(features), engine)
    else:
        space = _columns(groups[-1])
    embedded = [space.embed(part, engine, progress) for part in groups]
    plain = groups if synthetic.public.is_image else [part for part, _ in embedded]
    figures = [
        _figures(embedded[i], embedded[-1][0], plain[i], plain[-1], public_seed(seed, "subsets"))
        for i in (0, 1)
    ]
    return Fidelity(
        kind=chosen,
        features=space.told,
        synthetic=figures[0],
        real=figures[1],
        records=len(synthetic),
        compared=len(ours),
        reference=len(reference),
        trained_on=len(training),
        seed=seed,
        details=space.details,
    )


def check_alike(synthetic: SyntheticSet, heldout: HeldOut) -> None:
    """Refuse real records of other classes or another shape than the synthetic set has."""
    if tuple(heldout.classes) != synthetic.public.classes:
        raise BadConfiguration(
            f"The real records have classes {heldout.classes}; the synthetic set "
            f"{synthetic.public.classes}."
        )
    if heldout.images.shape[1:] != torch.Size(synthetic.public.shape):
        raise BadConfiguration(
            f"Real records have shape {tuple(heldout.images.shape[1:])}; synthetic ones "
            f"{synthetic.public.shape}. Read the real ones with the same preparation."
        )


def _kind(synthetic: SyntheticSet, features: str | Path) -> Kind:
    public = synthetic.public
    if features == "own":
        drawn = public.is_image and min(public.shape[1:]) >= 8  # a ConvNet needs 8x8 pixels
        return "own" if drawn else "columns"
    if not Path(features).is_file():
        raise BadConfiguration(
            f"features is 'own' or the path of an Inception TorchScript file; there is no file "
            f"'{features}'."
        )
    if not public.is_image or public.shape[0] not in (1, 3):
        raise BadConfiguration(
            f"Inception looks at grey or colour pictures, not at records of shape {public.shape}. "
            "Leave features at 'own'."
        )
    return "inception"


# Which records


def _deal(
    heldout: HeldOut, parts: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Deal the rows of each class to pool, reference and, where there are three, training."""
    hands: list[list[Tensor]] = [[], [], [torch.zeros(0, dtype=torch.long)]]
    for label in range(len(heldout.classes)):
        rows = torch.nonzero(heldout.labels == label)[:, 0]
        rows = rows[torch.randperm(len(rows), generator=generator)]
        for turn in range(parts):
            hands[turn].append(rows[turn::parts])
    pool, reference, training = (torch.cat(hand) for hand in hands)
    return training, reference, pool


def _matched(
    ours: Tensor, theirs: Tensor, classes: tuple[str, ...], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Choose rows of two label lists so that both have the same number of each class.

    All of the first where the second suffices; else a smaller set with the same class shares.
    """
    wanted = torch.bincount(ours, minlength=len(classes))
    there = torch.bincount(theirs, minlength=len(classes))
    for name, count, found in zip(classes, wanted.tolist(), there.tolist(), strict=True):
        if count and not found:
            raise DataError(f"The held-out set has no records of class '{name}' to compare with.")
    present = wanted > 0
    share = min(1.0, float((there[present] / wanted[present]).min()))
    rows: tuple[list[Tensor], list[Tensor]] = ([], [])
    for label in torch.nonzero(present)[:, 0].tolist():
        count = max(1, math.floor(share * int(wanted[label]) + 1e-6))
        for chosen, labels in zip(rows, (ours, theirs), strict=True):
            own = torch.nonzero(labels == label)[:, 0]
            chosen.append(own[torch.randperm(len(own), generator=generator)[:count]])
    return torch.cat(rows[0]), torch.cat(rows[1])


# Features


@dataclass(frozen=True)
class _Space:
    """Map records to features and, where there is a classifier, to log probabilities."""

    told: str
    of: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    details: dict[str, Any]

    @torch.no_grad()
    def embed(
        self, records: Tensor, engine: Engine, progress: Progress
    ) -> tuple[Tensor, Tensor | None]:
        """Work on a few records at a time; answer in float64 on the CPU."""
        features, chances = [], []
        for start in range(0, len(records), engine.records_at_once):
            part = records[start : start + engine.records_at_once]
            vectors, logs = self.of(part.to(engine.torch_device))
            features.append(vectors.double().cpu())
            if logs is not None:
                chances.append(logs.double().cpu())
            progress(start + len(part), len(records), "looking at records")
        return torch.cat(features), torch.cat(chances) if chances else None


def _own(
    heldout: HeldOut,
    training: Tensor,
    pool: Tensor,
    seed: int,
    engine: Engine,
    progress: Progress,
) -> _Space:
    """Train a ConvNet on real records that take part in no comparison.

    Training it on the synthetic set would ask that set what matters in a picture. Its accuracy on
    the pool is kept: features of a network that cannot tell the classes apart say little.
    """
    channels, height, width = heldout.images.shape[1:]
    shape = (int(channels), int(height), int(width))
    net = random_convnet(
        seed, shape, len(heldout.classes), device=engine.torch_device, width=FEATURE_WIDTH
    )

    def convnet(_: int) -> nn.Module:
        return net

    scores = train_and_test(
        heldout.images[training],
        heldout.labels[training],
        heldout.images[pool],
        heldout.labels[pool],
        classes=len(heldout.classes),
        protocol=_feature_protocol(len(training)),
        network=convnet,
        seeds=(seed,),
        device=engine.torch_device,
        progress=progress,
    )

    def of(images: Tensor) -> tuple[Tensor, Tensor]:
        features = net.embed(images)
        return features, net.classifier(features).log_softmax(1)

    told = f"a ConvNet of width {FEATURE_WIDTH} trained on {len(training)} held-out real records"
    return _Space(told, of, {"accuracy": scores.accuracy, "training": dict(scores.settings)})


def _feature_protocol(records: int) -> Protocol:
    """Return the quick protocol with as many passes as make FEATURE_STEPS steps."""
    epochs = math.ceil(FEATURE_STEPS / math.ceil(records / QUICK.batch))
    return QUICK.but(name="features", epochs=epochs, lr_drop=math.ceil(2 * epochs / 3))


def _inception(path: Path, engine: Engine) -> _Space:
    """Open NVIDIA's TorchScript translation of the Inception of 2015-12-05.

    It takes bytes (n, 3, height, width), resizes them itself, and gives the 2048 pooled features
    with ``return_features`` and else the 1008 probabilities, which the Inception Score takes
    without the output bias (stylegan2-ada-pytorch, metrics/). Grey pictures are repeated to three
    channels. The file's hash is kept, as its weights are all that makes it the standard one.
    """
    blank = torch.zeros(1, 3, 8, 8, dtype=torch.uint8, device=engine.torch_device)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the file exists in no other form
            network = torch.jit.load(  # type: ignore[no-untyped-call, unused-ignore]
                str(path), map_location=engine.torch_device
            ).eval()
            gives = [
                tuple(network(blank, **how).shape)
                for how in ({"return_features": True}, {"no_output_bias": True})
            ]
    except (RuntimeError, ValueError) as error:
        raise DataError(
            f"{path} is not a TorchScript file with the interface of inception-2015-12-05.pt: "
            f"{error}"
        ) from error
    if gives != [(1, INCEPTION_FEATURES), (1, INCEPTION_CLASSES)]:
        raise DataError(
            f"{path} makes {gives} of one picture; the standard Inception makes "
            f"{INCEPTION_FEATURES} features and {INCEPTION_CLASSES} probabilities."
        )

    def of(images: Tensor) -> tuple[Tensor, Tensor]:
        pictures = images.add(1).mul(127.5).round().to(torch.uint8)
        pictures = pictures.expand(-1, 3, -1, -1).contiguous()
        features = network(pictures, return_features=True)
        chances = network(pictures, no_output_bias=True)
        return features, chances.double().clamp_min(LEAST_PROBABILITY).log()

    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return _Space("Inception of 2015-12-05", of, {"weights_sha256": digest})


def _columns(reference: Tensor) -> _Space:
    """Take the columns themselves, by the reference's mean and deviation.

    A column the reference never varies in keeps its scale.
    """
    flat = reference.flatten(1).double()
    mean, deviation = flat.mean(0), flat.std(0)
    scale = torch.where(deviation > 0, deviation, 1.0)

    def of(records: Tensor) -> tuple[Tensor, None]:
        return (records.flatten(1).double().cpu() - mean) / scale, None

    return _Space("the records' own columns, standardised by the reference", of, {})


# Figures


def _figures(
    embedded: tuple[Tensor, Tensor | None],
    reference: Tensor,
    records: Tensor,
    reference_records: Tensor,
    seed: int,
) -> Figures:
    features, chances = embedded
    precision, recall, density, coverage = neighbourhoods(features, reference)
    nearest = _nearest(records.flatten(1).double(), reference_records.flatten(1).double())
    return Figures(
        frechet_distance=frechet_distance(features, reference),
        kernel_distance=kernel_distance(features, reference, seed),
        classifier_score=None if chances is None else classifier_score(chances),
        precision=precision,
        recall=recall,
        density=density,
        coverage=coverage,
        nearest=(float(nearest.min()), float(nearest.median())),
    )


class _Given(nn.Module):
    """Stand where torchmetrics wants a network: the features are there already."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_features = width

    def forward(self, features: Tensor) -> Tensor:
        return features


def _torchmetrics() -> Any:
    """Return torchmetrics' image metrics, importing them only now: that takes seconds."""
    try:
        from torchmetrics import image
        from torchmetrics.image import fid, inception, kid  # noqa: F401
    except ImportError as missing:
        raise ImportError(
            "Fidelity figures need torchmetrics: pip install 'torchmetrics>=1.4'"
        ) from missing
    return image


def frechet_distance(features: Tensor, reference: Tensor) -> float:
    """Return ``|m1 - m2|^2 + tr(S1 + S2 - 2 sqrt(S1 S2))`` (Heusel et al. 2017, Equation 6)."""
    metric = _torchmetrics().fid.FrechetInceptionDistance(feature=_Given(features.shape[1]))
    metric.update(reference.double(), real=True)
    metric.update(features.double(), real=False)
    return max(0.0, float(metric.compute()))


def kernel_distance(features: Tensor, reference: Tensor, seed: int = 0) -> float:
    """Return the unbiased squared MMD of a cubic kernel (Binkowski et al. 2018, Section 4)."""
    size = min(len(features), len(reference), KERNEL_SUBSET)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore", UserWarning)  # that it keeps features in memory
        torch.default_generator.manual_seed(seed)  # torchmetrics asks the global one; a fork
        metric = _torchmetrics().kid.KernelInceptionDistance(
            feature=_Given(features.shape[1]), subsets=KERNEL_SUBSETS, subset_size=size
        )
        metric.update(reference.double(), real=True)
        metric.update(features.double(), real=False)
        return float(metric.compute()[0])


def classifier_score(log_probabilities: Tensor) -> float:
    """Return ``exp of the mean of KL(p(y|x) || p(y))`` (Salimans et al. 2016), all as one split."""
    logits = log_probabilities.double().clamp_min(math.log(LEAST_PROBABILITY))
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore", UserWarning)  # as above; and one split has no deviation
        metric = _torchmetrics().inception.InceptionScore(feature=_Given(1), splits=1)
        metric.update(logits)
        return float(metric.compute()[0])


def neighbourhoods(
    features: Tensor, reference: Tensor, nearest: int = NEAREST
) -> tuple[float, float, float, float]:
    """Return precision, recall (Kynkaanniemi et al. 2019), density and coverage (Naeem et al. 2020).

    A record's ball reaches its k-th nearest other of its own set. Precision: the share of ours in
    some real ball; recall: of the real ones in some ball of ours; density: how many real balls
    hold one of ours, in units of k; coverage: the share of real balls that hold one of ours.
    """
    ours, real = _radii(features, nearest), _radii(reference, nearest)
    held = torch.zeros(len(features), dtype=torch.long)
    recalled = covered = 0
    for rows, radii in zip(torch.split(reference, _ROWS), torch.split(real, _ROWS), strict=True):
        apart = torch.cdist(rows, features)
        inside = apart <= radii[:, None]
        held += inside.sum(0)
        covered += int(inside.any(1).sum())
        recalled += int((apart <= ours).any(1).sum())
    return (
        float((held > 0).double().mean()),
        recalled / len(reference),
        float(held.double().mean()) / nearest,
        covered / len(reference),
    )


def _radii(features: Tensor, nearest: int) -> Tensor:
    """Return each row's distance to its k-th nearest other row."""
    radii = []
    for start in range(0, len(features), _ROWS):
        rows = features[start : start + _ROWS]
        apart = torch.cdist(rows, features)
        apart[torch.arange(len(rows)), torch.arange(start, start + len(rows))] = math.inf
        radii.append(apart.kthvalue(nearest, dim=1).values)
    return torch.cat(radii)


def _nearest(records: Tensor, reference: Tensor) -> Tensor:
    """Return each record's distance to the nearest of the reference."""
    parts = [torch.cdist(rows, reference).amin(1) for rows in torch.split(records, _ROWS)]
    return torch.cat(parts)
