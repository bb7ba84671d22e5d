"""Whole jobs on folders: one function a command of the command line.

:mod:`understudy.run` works on values (a dataset, a release, a synthetic set); this module reads
and writes them, and looks names up.
"""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.auditing import AuditFailed, AuditPool, AuditResult
from understudy.auditing import audit as run_audit
from understudy.data.datasets import DATASETS, load_heldout, open_data, open_heldout, open_training
from understudy.data.folder import check_free, checked_files, load, save
from understudy.data.heldout import HeldOut
from understudy.data.layout import TENSORS
from understudy.data.pictures import contact_sheet, draw_pictures, png
from understudy.data.readers import name_of
from understudy.data.synthetic import SyntheticSet
from understudy.data.verify import Verification
from understudy.data.verify import verify as verify_folder
from understudy.engine import Engine, Progress, silent
from understudy.errors import BadConfiguration, LedgerError, ReleaseError, UnknownName
from understudy.evaluation.ceilings import CEILINGS
from understudy.evaluation.ceilings import ceilings as compute_ceilings
from understudy.evaluation.classify import PROTOCOLS, Protocol, Scores, judge, sklearn_scores
from understudy.evaluation.fidelity import Fidelity
from understudy.evaluation.fidelity import fidelity as compare
from understudy.methods import (
    TRAINERS,
    Generative,
    Mechanism,
    Method,
    Trainer,
    mechanism_named,
    registered,
)
from understudy.methods.matching import Watch
from understudy.nets.classifiers import NETWORKS
from understudy.privacy.accounting import Accountant, Budget, calibrate, epsilon
from understudy.privacy.durable import write_durably
from understudy.privacy.events import Event
from understudy.privacy.gate import PrivateDataset
from understudy.privacy.ledger import Ledger, digest
from understudy.privacy.public import Adjacency, Public
from understudy.privacy.release import Release
from understudy.privacy.statement import Statement, describe_events
from understudy.report import Entry, gather
from understudy.report import write as write_report
from understudy.run import classifier, evaluate, fit, synthesise
from understudy.run import sample as draw

SCORES = ".scores.json"
AUDIT = ".audit.json"
SKLEARN = "sklearn"
DEFAULT_METHOD = "whole-set"
AUTO = "auto"

# Making


def synth(
    data: PrivateDataset,
    method: Mechanism,
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    engine: Engine | None = None,
    progress: Progress = silent,
    pictures: str | os.PathLike[str] | None = None,
    every: int = 1000,
    **spending: Any,
) -> tuple[Path, Statement]:
    """Fit, synthesise and write the release. Return its folder and its statement.

    The noisy signals are written as soon as they are measured, so what was paid for is never lost:
    the same call takes up a release without a set, and its optimisation where that stopped.
    ``pictures`` is a folder for a contact sheet ``every`` so many steps. ``spending`` goes to
    :func:`understudy.run.fit`: budget, delta, ledger, secret.
    """
    if not isinstance(method, Method):
        raise BadConfiguration(
            f"'{method.name}' trains a classifier and makes no synthetic set: `understudy train`."
        )
    target = Path(folder)
    release = _measured(target, data, method, spending.get("budget"))
    if release is None:
        check_free(target, overwrite)
        release = fit(data, method, engine=engine, progress=progress, **spending)
        save(target, release, overwrite=overwrite, source=method.source)
    unfinished = _unfinished(target, release, method)
    synthetic = synthesise(
        release,
        engine=engine,
        progress=progress,
        checkpoint=unfinished,
        every=every,
        watch=None if pictures is None else _sheets(Path(pictures), release),
    )
    written = save(target, release, synthetic, overwrite=True, source=method.source)
    unfinished.unlink(missing_ok=True)
    return written, release.statement


def _measured(
    target: Path, data: PrivateDataset, method: Method, budget: Budget | None
) -> Release | None:
    """Return the signals an interrupted :func:`synth` of the same call left, if it did."""
    try:
        release, synthetic = load(target)
    except ReleaseError:
        return None
    found, own = dict(release.recipe["configuration"]), dict(method.recipe()["configuration"])
    if budget is not None:
        found.pop("noise_multiplier"), own.pop("noise_multiplier")
        spent, most = release.statement.epsilon, budget.epsilon
        if release.statement.delta != budget.delta or not 0.9 * most <= spent <= most:
            return None
    same = (
        synthetic is None
        and release.recipe["method"] == method.name
        and json.dumps(found) == json.dumps(own)
        and release.statement.fingerprint == data.ledger().path.stem
    )
    return release if same else None


def _unfinished(target: Path, release: Release, method: Mechanism) -> Path:
    """Name the file that keeps an optimisation of this release by this method."""
    own = digest({"line": release.statement.ledger_line, **method.recipe()})[:12]
    return _beside(target, f".{own}.optimising", hidden=True)


def _sheets(folder: Path, release: Release) -> Watch:
    """Return a watcher that draws the set as it is, one numbered contact sheet at a time."""
    if not release.public.is_image:
        raise BadConfiguration("A table has no contact sheets to draw while it is made.")
    folder.mkdir(parents=True, exist_ok=True)

    def draw_sheet(done: int, synthetic: SyntheticSet) -> None:
        pictures = draw_pictures(synthetic)
        sheet = png(contact_sheet(release, synthetic, pictures))
        write_durably(folder / f"step-{done:06d}.png", sheet)

    return draw_sheet


def signals(
    data: PrivateDataset,
    method: Mechanism,
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    **spending: Any,
) -> tuple[Path, Statement]:
    """Fit and write what was measured.

    Of a method these are signals, from which sets can be made later at no cost; of a trainer, the
    trained classifier.
    """
    check_free(Path(folder), overwrite)
    release = fit(data, method, **spending)
    written = save(folder, release, overwrite=overwrite, source=method.source)
    return written, release.statement


def resynthesise(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    changes: Mapping[str, Any] | None = None,
    engine: Engine | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
    pictures: str | os.PathLike[str] | None = None,
    every: int = 1000,
) -> Path:
    """Make a synthetic set from a saved release, with some fields of its method changed. Free.

    A call that was interrupted goes on where it stopped when it is repeated.
    """
    target = Path(folder)
    if target.resolve() != Path(source).resolve():
        check_free(target, overwrite)
    release, _ = load(source)
    recipe = release.recipe
    kind = mechanism_named(recipe["method"])
    method = kind.configured({**recipe["configuration"], **(changes or {})})
    unfinished = _unfinished(target, release, method)
    synthetic = synthesise(
        release,
        method,
        engine=engine,
        progress=progress,
        checkpoint=unfinished,
        every=every,
        watch=None if pictures is None else _sheets(Path(pictures), release),
    )
    written = save(folder, release, synthetic, overwrite=overwrite, source=method.source)
    unfinished.unlink(missing_ok=True)
    return written


def sample(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    count: int,
    *,
    seed: int = 0,
    engine: Engine | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Path:
    """Draw records from a saved release's generator into a release folder of their own. Free."""
    check_free(Path(folder), overwrite)
    release, _ = load(source)
    drawn = draw(release, count, seed=seed, engine=engine, progress=progress)
    paper = mechanism_named(release.recipe["method"]).source
    return save(folder, release, drawn, overwrite=overwrite, source=paper)


def configure(
    name: str = DEFAULT_METHOD,
    values: Mapping[str, Any] | None = None,
    *,
    preset: str | None = None,
    public: Public | None = None,
    budget: Budget | None = None,
    engine: Engine | None = None,
) -> Mechanism:
    """Build a method or trainer by name, from a preset if given, with some fields set.

    ``preset="auto"`` takes the one that suits the ``public`` facts, the budget and the device.
    """
    kind = mechanism_named(name)
    base: Mapping[str, Any] = {}
    if preset == AUTO:
        if public is None:
            raise BadConfiguration("preset='auto' needs the public facts of the data.")
        preset = kind.suited(public, budget, engine or Engine())
    if preset is not None:
        if preset not in kind.presets:
            raise UnknownName(f"preset of {name}", preset, kind.presets)
        base = kind.presets[preset].configuration
    return kind.configured({**base, **(values or {})})


# Pricing


def facts(
    *,
    shape: tuple[int, ...],
    counts: tuple[int, ...],
    adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE,
    labels: str = "private",
    name: str = "declared facts",
) -> Public:
    """Write down public facts by hand, to price a method without any data."""
    if labels not in ("private", "public"):
        raise BadConfiguration(f"labels are 'private' or 'public', not '{labels}'.")
    return Public(
        name=name,
        shape=shape,
        classes=tuple(f"class {number}" for number in range(len(counts))),
        counts=counts,
        adjacency=_adjacency(adjacency),
        labels="public" if labels == "public" else "private",
    )


@dataclass(frozen=True)
class Priced:
    """Say what a method would ask of a dataset and what that would cost."""

    method: Mechanism
    public: Public
    delta: float
    events: tuple[Event, ...]
    epsilons: Mapping[Accountant, float]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "recipe": self.method.recipe(),
            "public": self.public.to_json(),
            "delta": self.delta,
            "events": [event.to_json() for event in self.events],
            "epsilon": {key.value: value for key, value in self.epsilons.items()},
        }

    def describe(self) -> str:
        """Explain in a few lines."""
        sizes = self.public.sizes
        lines = [
            f"{self.method.title} on {self.public.name}: {len(sizes)} classes of {min(sizes)} to "
            f"{max(sizes)} records of shape {'x'.join(map(str, self.public.shape))}.",
            "",
        ]
        lines += [f"  asks '{e.name}': {e.describe()}" for e in self.events]
        lines += ["", f"  noise_multiplier {self.method.noise_multiplier:.4g}", ""]
        lines += [
            f"  epsilon {value:.4g} at delta {self.delta:g} by {accountant.value}"
            for accountant, value in self.epsilons.items()
        ]
        lines += [
            "",
            "Nothing was spent. A release quotes the first figure; `understudy synth` with the "
            "same options would make it.",
        ]
        return "\n".join(lines)


def plan(
    public: Public, method: Mechanism, *, budget: Budget | None = None, delta: float = 1e-5
) -> Priced:
    """Price a method on public facts; with a budget, find the noise first. Reads no record."""
    if budget is not None:
        method = method.calibrated(public, budget)
        delta = budget.delta
    return Priced(
        method=method,
        public=public,
        delta=delta,
        events=method.plan(public).events(public),
        epsilons={
            accountant: method.epsilon(public, delta, accountant) for accountant in Accountant
        },
    )


def account(
    *,
    epsilon: float | None = None,
    noise: float | None = None,
    steps: int | None = None,
    rate: float | None = None,
    delta: float = 1e-5,
    adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE,
) -> dict[str, Any]:
    """Find the missing one of epsilon, noise and steps from the other two."""
    missing = [
        name for name, value in (("epsilon", epsilon), ("noise", noise), ("steps", steps))
        if value is None
    ]  # fmt: skip
    if len(missing) != 1:
        raise BadConfiguration("Give exactly two of epsilon, noise and steps.")
    if rate is not None and not 0 < rate <= 1:
        raise BadConfiguration(f"rate is a probability: {rate}.")
    relation = _adjacency(adjacency)

    def events(noise_multiplier: float, times: float) -> tuple[Event, ...]:
        return (
            Event(
                name="answer",
                times=int(times),
                noise_multiplier=noise_multiplier,
                bound=1.0,
                sampling_rate=rate,
                per_class=False,
                unit="record",
            ),
        )

    if epsilon is not None:
        budget = Budget(epsilon, delta)
        if steps is not None:
            times = steps
            noise = calibrate(lambda z: events(z, times), budget, adjacency=relation)
        else:
            assert noise is not None
            given = noise
            steps = int(
                calibrate(
                    lambda n: events(given, n),
                    budget,
                    adjacency=relation,
                    start=100.0,
                    increasing=True,
                    integer=True,
                )
            )
    assert noise is not None
    assert steps is not None
    asked = events(noise, steps)
    return {
        "noise_multiplier": float(noise),
        "steps": steps,
        "rate": rate,
        "delta": delta,
        "adjacency": relation.value,
        **{f"epsilon ({a.value})": _price(asked, delta, relation, a) for a in Accountant},
    }


def _price(
    events: Sequence[Event], delta: float, adjacency: Adjacency, accountant: Accountant
) -> float:
    return epsilon(events, delta, adjacency=adjacency, accountant=accountant)


def _adjacency(name: Adjacency | str) -> Adjacency:
    try:
        return Adjacency(name)
    except ValueError:
        raise UnknownName("adjacency", str(name), [a.value for a in Adjacency]) from None


# Looking


@dataclass(frozen=True)
class Judged:
    """Hold what :func:`score` found, all of it kept beside the release as well."""

    scores: Mapping[str, Scores]
    ceilings: Mapping[str, Scores]
    fidelity: Fidelity | None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "scores": {name: item.to_json() for name, item in self.scores.items()},
            "ceilings": {name: item.to_json() for name, item in self.ceilings.items()},
            "fidelity": None if self.fidelity is None else self.fidelity.to_json(),
        }


def score(
    folder: str | os.PathLike[str],
    test: str | None = None,
    *,
    protocol: str = "dm",
    network: str | Sequence[str] | None = None,
    flips: bool = False,
    seeds: Sequence[int] = (0, 1, 2),
    training: str | None = None,
    ceilings: Sequence[str] | None = None,
    fidelity: bool = False,
    inception: str | os.PathLike[str] | None = None,
    engine: Engine | None = None,
    progress: Progress = silent,
    **options: Any,
) -> Judged:
    """Evaluate a saved release on real test data and keep what is found beside it.

    ``network`` is one or several names, "sklearn" for scikit-learn's three models. ``training``
    names real training records to compute ``ceilings`` from (all of them unless some are named).
    They are read OPENLY, past the gate: see :mod:`understudy.evaluation.ceilings`. Ceilings are
    computed with the first network; where none is named, the set is scored with theirs, too.
    ``fidelity`` compares the set with the test records; ``inception`` is a TorchScript file of the
    standard Inception network for it.

    What is found is kept as soon as it is found. A file of scores is about one set and one test
    set: another set's is replaced, and another test set is refused before anything is trained.
    """
    release, synthetic = load(folder)
    trained = mechanism_named(release.recipe["method"])
    if synthetic is None and not issubclass(trained, Trainer):
        raise ReleaseError(
            f"{folder} holds signals and no synthetic set yet: `understudy synthesise {folder}`."
        )
    source = test or release.public.name
    if test is None and source not in DATASETS:
        raise BadConfiguration("Say with --test which real data to test on.")
    if ceilings and training is None:
        raise BadConfiguration(
            "Ceilings are computed from real training records: say which, with --ceilings DATA."
        )
    networks: Sequence[str | None]
    networks = [network] if network is None or isinstance(network, str) else list(network) or [None]
    _check_names(networks, ceilings, inception)
    chosen = _protocol(protocol)
    chosen = chosen.with_flips() if flips else chosen
    heldout = open_heldout(source, like=release.public, **options)
    about = {**_about(Path(folder), release), "test": name_of(source), "records": heldout.digest()}
    _check_one_test_set(_beside(Path(folder), SCORES), about)
    named = training is None or training in DATASETS  # which brings its own label
    alike_read = {} if named else {key: item for key, item in options.items() if key != "split"}
    real = None if training is None else open_training(training, like=release.public, **alike_read)
    scores: dict[str, Scores] = {}
    references: dict[str, Scores] = {}
    alike = None

    def kept() -> Judged:
        judged = Judged(scores, references, alike)
        _keep(Path(folder), about, judged)
        return judged

    if synthetic is None:
        if real is not None or fidelity:
            raise BadConfiguration(
                f"{folder} holds a classifier and no synthetic set: there is nothing to compare "
                "with real records."
            )
        given = judge(
            classifier(release, engine=engine),
            heldout.images,
            heldout.labels,
            classes=len(release.public.classes),
            told=f"the released classifier ({trained.name})",
        )
        scores[given.network] = given
        return kept()
    own = None if release.public.is_image else "mlp"
    peer = next((name for name in networks if name not in (SKLEARN, None)), own)
    if real is not None and peer not in networks:
        networks = [*networks, peer]  # references are read beside the set's own figure
    for name in networks:
        scores |= _scored(
            synthetic, heldout, chosen, name, seeds=seeds, engine=engine, progress=progress
        )
        kept()
    if real is not None:
        claimed = release.statement.epsilon
        possible = [name for name in CEILINGS if name != "dp-sgd" or math.isfinite(claimed)]
        references = compute_ceilings(
            real,
            heldout,
            like=synthetic,
            protocol=chosen,
            network=peer,
            seeds=seeds,
            epsilon=claimed if math.isfinite(claimed) else None,
            delta=release.statement.delta,
            which=tuple(ceilings or possible),
            engine=engine,
            progress=progress,
        )
        kept()
    if fidelity or inception is not None:
        features = "own" if inception is None else Path(inception)
        alike = compare(synthetic, heldout, features=features, engine=engine, progress=progress)
    return kept()


def _check_names(
    networks: Sequence[str | None],
    ceilings: Sequence[str] | None,
    inception: str | os.PathLike[str] | None,
) -> None:
    """Refuse before anything is trained what would be refused after hours."""
    for name in networks:
        if name not in (None, SKLEARN, *NETWORKS):
            raise UnknownName("network", str(name), (*NETWORKS, SKLEARN))
    for name in ceilings or ():
        if name not in CEILINGS:
            raise UnknownName("ceiling", name, CEILINGS)
    if inception is not None and not Path(inception).is_file():
        raise BadConfiguration(
            f"There is no file '{inception}'. --inception takes the TorchScript file of the standard "
            "Inception network; without it --fidelity trains a network of its own."
        )


def _check_one_test_set(kept: Path, about: Mapping[str, Any]) -> None:
    """Refuse to put results on different test records side by side."""
    known = _known(kept, about)
    if known and known.get("records") != about["records"]:
        raise BadConfiguration(
            f"{kept} holds results on other test records ('{known['test']}') than these "
            f"('{about['test']}'). Results on different records cannot be compared, so a release has "
            "one test set at a time: move that file away, or remove it, to begin anew."
        )


def _scored(
    synthetic: SyntheticSet,
    heldout: HeldOut,
    protocol: Protocol,
    network: str | None,
    *,
    seeds: Sequence[int],
    engine: Engine | None,
    progress: Progress,
) -> dict[str, Scores]:
    """Train one network on the set, or scikit-learn's models, which are also what tables get."""
    if network == SKLEARN or (network is None and not synthetic.public.is_image):
        return sklearn_scores(
            synthetic.images,
            synthetic.labels,
            heldout.images,
            heldout.labels,
            classes=len(synthetic.public.classes),
            seeds=seeds,
        )
    found = evaluate(
        synthetic,
        heldout,
        protocol=protocol,
        network=network,
        seeds=seeds,
        engine=engine,
        progress=progress,
    )
    return {f"{found.network}, {found.protocol}": found}


def _keep(folder: Path, about: Mapping[str, Any], judged: Judged) -> None:
    """Add what was found to the file beside the release; of another set it is replaced."""
    kept = _beside(folder, SCORES)
    known = _known(kept, about) or dict(about)
    found = judged.to_json()
    for part in ("scores", "ceilings"):
        known[part] = {**known.get(part, {}), **found[part]}
    known["fidelity"] = found["fidelity"] or known.get("fidelity")
    write_durably(kept, json.dumps(known, indent=1).encode())


def _about(folder: Path, release: Release) -> dict[str, Any]:
    """Say of which release and which set figures are; one release may have its set made anew."""
    made = checked_files(folder).get(TENSORS, {})
    return {"ledger_line": release.statement.ledger_line, "set": made.get("sha256")}


def _known(kept: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Read what lies beside a release; nothing, where it is about another release or set."""
    if not kept.exists():
        return {}
    try:
        known = json.loads(kept.read_text())
        same = known["ledger_line"] == about["ledger_line"] and known.get("set") == about.get("set")
        return dict(known) if same else {}
    except (ValueError, KeyError, TypeError) as error:
        raise ReleaseError(
            f"{kept} cannot be read ({error}). Remove it and evaluate again."
        ) from error


def _protocol(name: str) -> Protocol:
    if name not in PROTOCOLS:
        raise UnknownName("protocol", name, PROTOCOLS)
    return PROTOCOLS[name]


def _beside(folder: Path, ending: str, *, hidden: bool = False) -> Path:
    """Name a file that lies beside a release, whose own files are sealed."""
    folder = folder.resolve()
    return folder.with_name(f"{'.' if hidden else ''}{folder.name}{ending}")


def report(
    folders: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str] | None = None
) -> Path:
    """Write a self-contained page about one or several releases. Return its path."""
    entries = []
    for folder in map(Path, folders):
        release, synthetic = load(folder)
        about = _about(folder, release)
        known = _known(_beside(folder, SCORES), about)
        entries.append(
            Entry(
                release=release,
                synthetic=synthetic,
                title=folder.resolve().name,
                scores=known.get("scores", {}),
                ceilings=known.get("ceilings", {}),
                fidelity=known.get("fidelity"),
                test=str(known.get("test", "")),
                audit=_known(_beside(folder, AUDIT), {"ledger_line": about["ledger_line"]}).get(
                    "audit"
                ),
                folder=folder,
            )
        )
    if output is None:
        first = Path(folders[0]).resolve()
        output = first.with_name(f"{first.name}.report.html")
    page = Path(output)
    if page.suffix != ".html":
        raise BadConfiguration(f"A report is an .html file, not '{page.name}'.")
    return write_report(gather(entries), page.parent, name=page.stem)


# Checking


def verify(folder: str | os.PathLike[str], *, ledger: Ledger | None = None) -> Verification:
    """Check a release: hashes, recomputed epsilon, and the plan its recipe would make."""

    def replan(recipe: Mapping[str, Any], public: Public) -> tuple[Event, ...]:
        method = mechanism_named(recipe["method"]).configured(recipe["configuration"])
        return method.plan(public).events(public)

    return verify_folder(folder, ledger=ledger, replan=replan)


def audit(
    method: Mechanism,
    pool: str = "digits",
    *,
    quick: bool = False,
    runs: int = 1000,
    delta: float = 1e-5,
    budget: Budget | None = None,
    engine: Engine | None = None,
    progress: Progress = silent,
) -> AuditResult:
    """Attack a method on the test split of a public dataset. Raises AuditFailed above the claim.

    No private data is touched: the auditor plays a holder whose records are the pool. The claim is
    the one made for the training split: its class sizes set the sampling rates.
    """
    public = open_data(pool).public
    heldout = load_heldout(pool, like=public)
    records = AuditPool.of(heldout.images, heldout.labels, public=public)
    if budget is not None:
        method = method.calibrated(records.public, budget)
        delta = budget.delta
    return run_audit(
        method,
        records,
        runs=runs,
        delta=delta,
        quick=quick,
        engine=engine,
        progress=progress,
    )


def audit_release(
    folder: str | os.PathLike[str],
    pool: str | None = None,
    *,
    quick: bool = False,
    runs: int = 1000,
    engine: Engine | None = None,
    progress: Progress = silent,
    **options: Any,
) -> AuditResult:
    """Attack the very recipe of a release, and keep the result beside it for the report.

    ``pool`` is public data, or test data, of the same kind of records; by default the test split of
    the named dataset the release is of. Class sizes are those declared of the private data, so the
    claim that is audited is the release's own; where they were measured, it is that of all
    questions but the counting. Raises AuditFailed, after keeping the result.
    """
    release, _ = load(folder)
    public, statement = release.public, release.statement
    if not statement.private:
        raise BadConfiguration(f"{folder} claims no guarantee, so there is none to audit.")
    source = pool or public.name
    if pool is None and source not in DATASETS:
        raise BadConfiguration("Say with --pool which public or test records to attack with.")
    heldout = open_heldout(source, like=public, **options)
    kind = mechanism_named(release.recipe["method"])
    result = run_audit(
        kind.configured(release.recipe["configuration"]),
        AuditPool.of(heldout.images, heldout.labels, public=public, name=name_of(source)),
        runs=runs,
        delta=statement.delta,
        quick=quick,
        strict=False,
        engine=engine,
        progress=progress,
    )
    kept = {"ledger_line": statement.ledger_line, "audit": result.to_json()}
    write_durably(_beside(Path(folder), AUDIT), json.dumps(kept, indent=1).encode())
    if not result.passed:
        raise AuditFailed(result)
    return result


def summarise(ledger: Ledger) -> dict[str, Any]:
    """Say what a ledger holds."""
    entries = ledger.entries()
    finished = {entry["grant"] for entry in entries if entry["kind"] == "finished"}
    cap = ledger.cap()
    return {
        "ledger": str(ledger.path),
        "dataset": entries[0]["dataset"] if entries else None,
        "cap": _short(cap.epsilon) if cap else None,
        "delta": cap.delta if cap else 1e-5,
        "spent": _short(ledger.spent()),
        "runs": [
            {
                "time": entry["time"],
                "by": entry["by"],
                "asked": describe_events([Event.from_json(event) for event in entry["events"]]),
                "finished": entry["grant"] in finished,
            }
            for entry in entries
            if entry["kind"] == "reserved"
        ],
    }


def _short(value: float) -> float | str:
    return "infinite" if math.isinf(value) else float(f"{value:.6g}")


def set_cap(
    ledger: Ledger, cap: float, delta: float | None = None, data: PrivateDataset | None = None
) -> None:
    """Set the most that may ever be spent on records, before the first run; or change it."""
    now = ledger.cap()
    if now is None:
        if data is None:
            raise LedgerError(
                f"Ledger {ledger.path} has not begun. Give the data it is to belong to."
            )
        data.begin_ledger(ledger, Budget(cap, delta or 1e-5))
        return
    ledger.raise_cap(Budget(cap, delta or now.delta), by="command line")


# Listing


def list_methods(name: str | None = None) -> list[dict[str, Any]]:
    """Describe every method, or one."""
    if name is not None:
        chosen: list[type[Mechanism]] = [mechanism_named(name)]
    else:
        chosen = [*registered().values(), *TRAINERS]
    return [
        {
            "name": method.name,
            "title": method.title,
            "makes": _makes(method),
            "source": method.source,
            "description": inspect.cleandoc(method.__doc__ or ""),
            "fields": method.describe_fields(),
            "departures": list(method.departures),
            "presets": {key: preset.told for key, preset in method.presets.items()},
        }
        for method in chosen
    ]


def _makes(kind: type[Mechanism]) -> str:
    if issubclass(kind, Trainer):
        return "a classifier"
    return "a generator" if issubclass(kind, Generative) else "a set"


def list_datasets() -> list[dict[str, Any]]:
    """Describe every dataset known by name, and where it is on this machine."""
    return [
        {
            "name": card.name,
            "description": card.description,
            "shape": list(card.shape),
            "classes": list(card.classes),
            "licence": card.licence,
            "place": None
            if card.place is None
            else str(card.place)
            if card.folders
            else "built in",
            "get": card.get,
        }
        for card in DATASETS.values()
    ]


def read_columns(path: Path) -> dict[str, Any]:
    """Read the declaration of a table's columns."""
    try:
        declared = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadConfiguration(f"{path} does not hold the columns as JSON: {error}.") from error
    if not isinstance(declared, dict):
        raise BadConfiguration(
            f'{path} must hold an object such as {{"age": [17, 90], "sex": ["F", "M"]}}.'
        )
    return declared


__all__ = [
    "Accountant",
    "Budget",
    "Engine",
    "Ledger",
    "Mechanism",
    "Priced",
    "PrivateDataset",
    "Public",
    "Release",
    "Verification",
    "account",
    "audit",
    "audit_release",
    "configure",
    "facts",
    "list_datasets",
    "list_methods",
    "open_data",
    "plan",
    "read_columns",
    "report",
    "resynthesise",
    "sample",
    "score",
    "set_cap",
    "signals",
    "summarise",
    "synth",
    "verify",
]
