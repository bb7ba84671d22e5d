"""The command line: thin commands, each one call of the Python API."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from understudy.bench.command import bench
from understudy.errors import BadConfiguration, UnderstudyError

if TYPE_CHECKING:
    from understudy import jobs
else:

    class _Later:
        """Import the jobs, and torch with them, when a command runs: --help stays quick."""

        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("understudy.jobs"), name)

    jobs = _Later()

DEFAULT_METHOD = "whole-set"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""
Turn a sensitive labelled dataset into a small, shareable, differentially private stand-in.

[bold]The whole job[/bold]

    understudy synth my_images/ --epsilon 1 -o release/

[bold]Look before spending[/bold]

    understudy plan my_images/ --epsilon 1

[bold]Afterwards[/bold]

    understudy evaluate release/ --test my_test_images/
    understudy report release/
    understudy verify release/

Exit codes: 0 done, 1 unexpected failure, 2 wrong usage, 3 the data cannot be read, 4 the privacy
core refused (budget, plan, ledger), 5 a release cannot be read, written or verified, 130 Ctrl-C.
""",
)
errors = Console(stderr=True, highlight=False, soft_wrap=True)
out = Console(highlight=False, soft_wrap=True)

# Options several commands share, in groups: {name: (how it is declared, default)}.

Group = Mapping[str, tuple[Any, Any]]


def _data_option(told: str, kind: Any, *flags: str) -> Any:
    return Annotated[kind, typer.Option(*flags, help=told, rich_help_panel="Data")]


DATA_TOLD = (
    "A dataset's name (see `understudy datasets`) or a path: a folder with one subfolder of images "
    "a class, a CSV or Parquet table, .npz, .npy, IDX."
)
Data = Annotated[str, typer.Argument(metavar="DATA", help=DATA_TOLD)]
MaybeData = Annotated[str | None, typer.Argument(metavar="[DATA]", help=DATA_TOLD)]
Folder = Annotated[Path, typer.Argument(metavar="RELEASE", help="A release folder.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")]
Overwrite = Annotated[bool, typer.Option(help="Replace a release that is already there.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")]
Epsilon = Annotated[
    float | None, typer.Option("--epsilon", "-e", help="The budget. Noise is calibrated to it.")
]
Delta = Annotated[float, typer.Option(help="The failure chance of the guarantee.")]
Adjacency = Annotated[
    str,
    typer.Option(
        "--adjacency",
        help="What neighbouring datasets differ in: 'add-or-remove' one record or 'replace' it.",
        rich_help_panel="Data",
    ),
]
LedgerPath = Annotated[
    Path | None,
    typer.Option(
        "--ledger",
        help="A ledger file of your own, instead of the one in your state folder that belongs to "
        "these records.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="A field of the method's configuration; repeatable. `understudy methods NAME` "
        "lists them.",
    ),
]

WATCHED: Group = {
    "pictures": (
        Annotated[
            Path | None,
            typer.Option(help="A folder for contact sheets of the set while it is being made."),
        ],
        None,
    ),
    "every": (Annotated[int, typer.Option(help="Optimisation steps between them.")], 1000),
}
SOURCE: Group = {
    "label": (_data_option("The label's column or array.", str | None), None),
    "image": (_data_option("The column of image paths, or the array.", str | None), None),
    "value_range": (
        _data_option("LOW,HIGH: the declared range of floating-point pixels.", str | None),
        None,
    ),
    "split": (_data_option("The split to read, where there are several.", str | None), None),
}
DECLARED: Group = {
    **SOURCE,
    "resize": (_data_option("Resize images to this many pixels a side.", int | None), None),
    "grayscale": (
        _data_option("Convert images.", bool | None, "--grayscale/--colour"),
        None,
    ),
    "columns": (
        _data_option(
            "JSON with the declared range or categories of a table's columns. [0, 40] gives whole "
            "numbers, [0.0, 40.0] fractions.",
            Path | None,
        ),
        None,
    ),
    "class_sizes": (
        _data_option(
            "'public': the files' class sizes may be known. 'private': measure them with noise, "
            "out of the budget. Or numbers: 500,400,...",
            str,
        ),
        "public",
    ),
    "adjacency": (Adjacency, "add-or-remove"),
    "unit": (_data_option("What one record stands for, in words.", str), "one record"),
    "labels": (
        _data_option("Whether each record's own label is 'private' or 'public'.", str),
        "private",
    ),
    "name": (_data_option("What to call the dataset.", str | None), None),
}
METHOD: Group = {
    "method": (
        Annotated[str, typer.Option("--method", "-m", help="See `understudy methods`.")],
        DEFAULT_METHOD,
    ),
    "preset": (
        Annotated[
            str,
            typer.Option(
                help="A named configuration of the method to start from. 'auto': the one that "
                "suits the data's public facts, the budget and the device; 'none': the defaults."
            ),
        ],
        "auto",
    ),
    "set_": (Set, None),
}
TRAINER: Group = {
    **METHOD,
    "method": (
        Annotated[str, typer.Option("--method", "-m", help="See `understudy methods`.")],
        "dp-sgd",
    ),
}
SPENDING: Group = {
    "epsilon": (Epsilon, None),
    "delta": (Delta, 1e-5),
    "ledger": (LedgerPath, None),
    "device": (Device, "auto"),
    "chunk": (
        Annotated[
            int | None,
            typer.Option(help="Records worked on at once: bounds memory, changes no answer."),
        ],
        None,
    ),
}

Command = Callable[..., None]


def takes(**groups: Group) -> Callable[[Command], Command]:
    """Give a command groups of options; it receives each group as one dictionary."""

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters.values()
        added = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=declared
            )
            for group in groups.values()
            for name, (declared, default) in group.items()
        ]
        parameters = [
            *(p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name not in groups),
            *added,
        ]

        @functools.wraps(command)
        def call(**given: Any) -> None:
            for name, group in groups.items():
                given[name] = {option: given.pop(option) for option in group}
            command(**given)

        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call

    return decorate


@app.command(rich_help_panel="Make")
@takes(how=METHOD, spending=SPENDING, declared=DECLARED, watched=WATCHED)
def synth(
    data: Data,
    output: Output,
    how: dict[str, Any],
    spending: dict[str, Any],
    declared: dict[str, Any],
    watched: dict[str, Any],
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Do the whole job: read, spend the budget, synthesise, write a release.

    Examples:
        understudy synth scans/ --epsilon 1 -o release/

        understudy synth scans/ --method ldpdc --epsilon 1 --resize 32 --unit "one patient's scan" -o release/

        understudy synth people.csv --label income --columns columns.json --epsilon 1 -o release/

    Give --epsilon and the noise is found; or fix --set noise_multiplier=... and it is priced. A run
    that was interrupted, while measuring or while optimising, is taken up where it stopped when the
    same command is given again.
    """
    with _progress(quiet) as progress:
        dataset = _open(data, declared, progress)
        folder, statement = jobs.synth(
            dataset,
            _method(how, dataset.public, spending),
            output,
            overwrite=overwrite,
            progress=progress,
            **watched,
            **_spending(spending),
        )
    if as_json:
        return _print_json({"release": str(folder), "statement": statement.to_json()})
    out.print(statement.paragraph())
    out.print(f"\nWritten to {folder}")
    look = next(
        (
            folder / name
            for name in ("contact_sheet.png", "synthetic.csv")
            if (folder / name).exists()
        ),
        folder,
    )
    out.print(f"Look at {look}, or run: understudy verify {folder}")


@app.command(rich_help_panel="Make")
@takes(how=METHOD, spending=SPENDING, declared=DECLARED)
def fit(
    data: Data,
    output: Output,
    how: dict[str, Any],
    spending: dict[str, Any],
    declared: dict[str, Any],
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Spend the budget and keep the noisy signals; make the set later, as often as you like.

    Example:
        understudy fit scans/ --epsilon 1 -o signals/
    """
    with _progress(quiet) as progress:
        dataset = _open(data, declared, progress)
        folder, statement = jobs.signals(
            dataset,
            _method(how, dataset.public, spending),
            output,
            overwrite=overwrite,
            progress=progress,
            **_spending(spending),
        )
    if as_json:
        return _print_json({"release": str(folder), "statement": statement.to_json()})
    out.print(statement.paragraph())
    out.print(f"\nWritten to {folder}. Next, free: understudy synthesise {folder} -o release/")


@app.command(rich_help_panel="Make")
@takes(how=TRAINER, spending=SPENDING, declared=DECLARED)
def train(
    data: Data,
    output: Output,
    how: dict[str, Any],
    spending: dict[str, Any],
    declared: dict[str, Any],
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a classifier on the records themselves, by DP-SGD: for when nobody needs the data.

    It has the same ledger, statement and verification as a synthetic set, and is the figure to
    compare one with: `understudy evaluate model/ --test ...` tests it.

    Example:
        understudy train scans/ --epsilon 1 -o model/
    """
    with _progress(quiet) as progress:
        dataset = _open(data, declared, progress)
        folder, statement = jobs.signals(
            dataset,
            _method(how, dataset.public, spending),
            output,
            overwrite=overwrite,
            progress=progress,
            **_spending(spending),
        )
    if as_json:
        return _print_json({"release": str(folder), "statement": statement.to_json()})
    out.print(statement.paragraph())
    out.print(f"\nWritten to {folder}. Next: understudy evaluate {folder} --test TEST_DATA")


@app.command(rich_help_panel="Make")
def sample(
    release: Folder,
    output: Output,
    count: Annotated[int, typer.Option("--count", "-n", help="How many records.")],
    seed: Annotated[int, typer.Option(help="Another public seed draws other records.")] = 0,
    device: Device = "auto",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Draw any number of records from a released generator. Costs no privacy.

    Example:
        understudy sample release/ -n 100000 -o many/
    """
    with _progress(quiet) as progress:
        folder = jobs.sample(
            release,
            output,
            count,
            seed=seed,
            engine=jobs.Engine(device=device),
            overwrite=overwrite,
            progress=progress,
        )
    if as_json:
        return _print_json({"release": str(folder)})
    out.print(f"Written to {folder}")


@app.command(rich_help_panel="Make")
@takes(watched=WATCHED)
def synthesise(
    release: Folder,
    output: Output,
    watched: dict[str, Any],
    set_: Set = None,
    device: Device = "auto",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Make a synthetic set from saved signals. Costs no privacy.

    Example, another public seed:

        understudy synthesise signals/ --set seed=1 -o release/
    """
    with _progress(quiet) as progress:
        folder = jobs.resynthesise(
            release,
            output,
            changes=_assignments(set_),
            engine=jobs.Engine(device=device),
            overwrite=overwrite,
            progress=progress,
            **watched,
        )
    if as_json:
        return _print_json({"release": str(folder)})
    out.print(f"Written to {folder}")


@app.command(rich_help_panel="Look")
@takes(how=METHOD, declared=DECLARED)
def plan(
    how: dict[str, Any],
    declared: dict[str, Any],
    data: MaybeData = None,
    shape: Annotated[
        str | None, typer.Option(help="A record's shape, instead of DATA: 1x28x28 or 14.")
    ] = None,
    epsilon: Epsilon = None,
    delta: Delta = 1e-5,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Price a method on a dataset's public facts. Nothing is spent.

    With DATA the class names and sizes, declared public, are read off it; no record passes the
    gate and no ledger is touched. Without DATA, give the facts:

        understudy plan --shape 1x28x28 --class-sizes 5923,6742,5958,6131,5842,5421,5918,6265,5851,5949

        understudy plan mnist --method ldpdc --epsilon 1
    """
    if data is not None:
        public = _open(data, declared).public
    elif shape is not None:
        if declared["class_sizes"] in ("public", "private"):
            raise BadConfiguration(
                "Without DATA there are no class sizes to read: give them, as in "
                "--class-sizes 500,400."
            )
        public = jobs.facts(
            shape=_shape(shape),
            counts=_numbers(declared["class_sizes"]),
            adjacency=declared["adjacency"],
            labels=declared["labels"],
        )
    else:
        raise BadConfiguration("Give DATA, or --shape and --class-sizes.")
    spending = {"epsilon": epsilon, "delta": delta, "device": device}
    method = _method(how, public, spending)
    priced = jobs.plan(public, method, budget=_budget(epsilon, delta), delta=delta)
    if as_json:
        return _print_json(priced.to_json())
    out.print(priced.describe())


@app.command(rich_help_panel="Look")
@takes(source=SOURCE)
def evaluate(
    release: Folder,
    source: dict[str, Any],
    test: Annotated[
        str | None,
        typer.Option(help="Real test data: a name or a path. Default: the named dataset's own."),
    ] = None,
    protocol: Annotated[
        str, typer.Option(help="dm (1000 epochs), psg, datalens, or quick.")
    ] = "quick",
    network: Annotated[
        list[str] | None,
        typer.Option(
            help="convnet, mlp, lenet, alexnet, vgg11, resnet18, datalens; or 'sklearn'. Repeatable."
        ),
    ] = None,
    flips: Annotated[
        bool, typer.Option(help="Let training mirror pictures: not for digits or letters.")
    ] = False,
    seeds: Annotated[
        int,
        typer.Option(min=1, help="How many networks to train: 3 or more for a figure to quote."),
    ] = 3,
    ceilings: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Real TRAINING records to compute references from. They are read openly, past "
            "the gate: for public benchmarks, or for the holder's own eyes.",
        ),
    ] = None,
    ceiling: Annotated[
        list[str] | None,
        typer.Option(help="Only this one: random-real, dm, dp-sgd, all-real. Repeatable."),
    ] = None,
    fidelity: Annotated[
        bool, typer.Option(help="Also measure how near the set is to the test records.")
    ] = False,
    inception: Annotated[
        Path | None,
        typer.Option(help="TorchScript file of the standard Inception network, for fidelity."),
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train on the synthetic set, test on real held-out data; last epoch, mean of several nets.

    Scores are kept beside the release, in RELEASE.scores.json, for the report. They come from real
    test records, so they are not covered by the release's guarantee.

    Examples:
        understudy evaluate release/ --test scans_test/

        understudy evaluate release/ --test fashion-mnist --protocol dm --flips --seeds 5

        understudy evaluate release/ --network convnet --network vgg11 --network sklearn

        understudy evaluate release/ --fidelity --ceilings mnist
    """
    with _progress(quiet) as progress:
        judged = jobs.score(
            release,
            test,
            protocol=protocol,
            network=network,
            flips=flips,
            seeds=tuple(range(seeds)),
            training=ceilings,
            ceilings=ceiling,
            fidelity=fidelity,
            inception=inception,
            engine=jobs.Engine(device=device),
            progress=progress,
            **_reading(source),
        )
    if as_json:
        return _print_json(judged.to_json())
    for score in judged.scores.values():
        out.print(str(score), markup=False)
    for name, score in judged.ceilings.items():
        out.print(f"{name}: {score}\n    {score.settings['ceiling']}", markup=False)
    if judged.fidelity is not None:
        out.print(f"\n{judged.fidelity}\n", markup=False)
    some = next(iter(judged.scores.values()))
    if seeds < 3:
        out.print(f"{seeds} of the 3 seeds that a figure to quote takes.")
    out.print(
        f"Always answering the largest class gives {some.chance:.1%}; balanced accuracy of that is "
        f"{1 / len(some.confusion):.1%}."
    )


@app.command(rich_help_panel="Look")
def report(
    releases: Annotated[list[Path], typer.Argument(metavar="RELEASE...")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: RELEASE.report.html.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page (and Markdown, JSON) about one or several releases.

    Example:
        understudy report release/
    """
    page = jobs.report(releases, output)
    if as_json:
        return _print_json({"report": str(page)})
    out.print(f"Open {page}")


@app.command(rich_help_panel="Check")
def verify(
    release: Folder,
    ledger: LedgerPath = None,
    as_json: AsJson = False,
) -> None:
    """Recompute the guarantee from the recorded events and check every file's hash.

    Example:
        understudy verify release/
    """
    verification = jobs.verify(release, ledger=jobs.Ledger(ledger) if ledger else None)
    if as_json:
        return _print_json(verification.to_json())
    for name, detail in verification.checks:
        out.print(f"[green]ok[/green]  {name}: {detail}")
    for name, needs in verification.not_checked:
        out.print(f"--  {name}: not checked, needs {needs}")
    out.print("\nepsilon recomputed: " + ", ".join(
        f"{value:.4g} ({accountant.value})" for accountant, value in verification.epsilons.items()
    ))  # fmt: skip
    out.print(verification.statement.paragraph())


@app.command(rich_help_panel="Check")
@takes(how=METHOD, source=SOURCE)
def audit(
    how: dict[str, Any],
    source: dict[str, Any],
    release: Annotated[
        Path | None,
        typer.Option(help="Audit the very recipe of this release, and show it in its report."),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(
            help="Records that play the private ones. With --release: public or test records of "
            "the same kind, a name or a path; else a public dataset's name, whose test split is "
            "taken (digits unless told otherwise)."
        ),
    ] = None,
    epsilon: Epsilon = None,
    delta: Delta = 1e-5,
    quick: Annotated[bool, typer.Option(help="Minutes: fewer runs, weaker bounds.")] = False,
    runs: Annotated[int, typer.Option(help="Runs with and without the canary.")] = 1000,
    device: Device = "auto",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Attack a method with public records: a lower bound on epsilon beside the claim.

    A bound above the claim ends with exit code 4. No private data is read.

    Examples:
        understudy audit --release release/ --pool scans_test/ --quick

        understudy audit --release release/ --pool people_test.csv --label income --quick

        understudy audit --epsilon 4 --quick

        understudy audit --method ldpdc --set images_per_class=4 --set group_size=10 --epsilon 1
    """
    engine = jobs.Engine(device=device)
    with _progress(quiet) as progress:
        if release is not None:
            result = jobs.audit_release(
                release,
                pool,
                quick=quick,
                runs=runs,
                engine=engine,
                progress=progress,
                **_reading(source),
            )
        elif given := [option for option, value in source.items() if value is not None]:
            raise BadConfiguration(
                f"--{given[0].replace('_', '-')} says how to read the pool of a release's audit: "
                "give --release too. A named dataset brings its own."
            )
        else:
            spending = {"epsilon": epsilon, "delta": delta, "device": device}
            pool = pool or "digits"
            result = jobs.audit(
                _method(how, jobs.open_data(pool).public, spending),
                pool,
                quick=quick,
                runs=runs,
                delta=delta,
                budget=_budget(epsilon, delta),
                engine=engine,
                progress=progress,
            )
    if as_json:
        return _print_json(result.to_json())
    out.print(str(result), markup=False)


@app.command(rich_help_panel="Check")
@takes(declared=DECLARED)
def ledger(
    declared: dict[str, Any],
    data: MaybeData = None,
    path: LedgerPath = None,
    cap: Annotated[
        float | None, typer.Option(help="Set the most epsilon that may ever be spent.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="The cap's delta; default: the one in force.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what was spent on a dataset, or set the cap.

    The cap is what is guaranteed of all runs together. It is best fixed before the first run; else
    that run's own budget becomes the cap, and a second run is refused until somebody decides that
    more may be spent:

        understudy ledger scans/ --cap 3

        understudy ledger scans/
    """
    opened = None if data is None else _open(data, declared)
    if opened is None and path is None:
        raise BadConfiguration("Give DATA, or --ledger and a ledger's file.")
    if opened is not None and path is not None and path.exists():
        raise BadConfiguration(f"Ledger {path} has begun: give --ledger without DATA.")
    if path is not None and not path.exists() and (opened is None or cap is None):
        raise BadConfiguration(
            f"There is no ledger {path}, so nothing is known of what was spent. Give the file that "
            "the runs were given with --ledger, or DATA for the one in your state folder."
        )
    book = opened.ledger() if opened and path is None else jobs.Ledger(path or "")
    if cap is not None:
        jobs.set_cap(book, cap, delta, opened)
    summary = jobs.summarise(book)
    if as_json:
        return _print_json(summary)
    if not summary["runs"]:
        limit = "" if cap is None else f" At most epsilon {summary['cap']} may ever be."
        out.print(f"Nothing was ever asked of these records ({book.path}).{limit}")
        return
    table = Table("time", "by", "asked", "finished", box=None, pad_edge=False)
    for run in summary["runs"]:
        table.add_row(
            run["time"], run["by"], run["asked"], "yes" if run["finished"] else "no: resumes"
        )
    out.print(table)
    out.print(
        f"\nSpent: epsilon {summary['spent']} of {summary['cap']} at delta {summary['delta']:g}"
        f"\nLedger: {book.path}"
    )


@app.command(rich_help_panel="Check")
def account(
    epsilon: Epsilon = None,
    noise: Annotated[
        float | None, typer.Option(help="noise_multiplier: noise / bound on one contribution.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="How many answers.")] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Poisson inclusion probability; none: every record, every time."),
    ] = None,
    delta: Delta = 1e-5,
    adjacency: Adjacency = "add-or-remove",
    as_json: AsJson = False,
) -> None:
    """Turn noise and steps into epsilon, epsilon and steps into noise, epsilon and noise into steps.

    Examples:
        understudy account --noise 1 --steps 10000 --rate 0.00922

        understudy account --epsilon 1 --steps 50

        understudy account --epsilon 1 --noise 4 --rate 0.01
    """
    answer = jobs.account(
        epsilon=epsilon, noise=noise, steps=steps, rate=rate, delta=delta, adjacency=adjacency
    )
    if as_json:
        return _print_json(answer)
    for key, value in answer.items():
        out.print(f"{key:>26}  {value:g}" if isinstance(value, float) else f"{key:>26}  {value}")


@app.command(rich_help_panel="Look")
def methods(
    name: Annotated[str | None, typer.Argument(help="Show one method's fields.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, or one method's configuration."""
    listing = jobs.list_methods(name)
    if as_json:
        return _print_json(listing)
    if name is None:
        table = Table("name", "what", "makes", "source", box=None, pad_edge=False)
        for method in listing:
            table.add_row(method["name"], method["title"], method["makes"], method["source"])
        out.print(table)
        return
    (method,) = listing
    out.print(f"[bold]{method['name']}[/bold]: {method['title']}\n{method['source']}\n")
    out.print(method["description"] + "\n", markup=False)
    for field, default in method["fields"].items():
        out.print(f"  --set {field}={default}", markup=False)
    for preset, told in method["presets"].items():
        out.print(f"  --preset {preset}  {told}", markup=False)


@app.command(rich_help_panel="Look")
def datasets(as_json: AsJson = False) -> None:
    """List the datasets known by name, where they are, and how to get the others."""
    listing = jobs.list_datasets()
    if as_json:
        return _print_json(listing)
    for item in listing:
        here = f"[green]{item['place']}[/green]" if item["place"] else "not here"
        out.print(f"[bold]{item['name']}[/bold]  {item['description']}  ({here})")
        if not item["place"]:
            out.print(f"    {item['get']}", markup=False)


app.command(rich_help_panel="Check")(bench)

# Turning words into values


def _open(data: str, declared: Mapping[str, Any], progress: Any = None) -> jobs.PrivateDataset:
    """Open DATA as the options declare it."""
    sizes, columns = declared["class_sizes"], declared["columns"]
    return jobs.open_data(
        data,
        **{
            **{key: value for key, value in declared.items() if key != "class_sizes"},
            **_reading({key: declared[key] for key in SOURCE}),
            "counts": sizes if sizes in ("public", "private") else _numbers(sizes),
            "columns": None if columns is None else jobs.read_columns(columns),
            "progress": progress,
        },
    )


def _reading(source: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the options that say where records lie into keyword arguments."""
    return {**source, "value_range": _range(source["value_range"])}


def _spending(given: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the options of a run that spends into keyword arguments."""
    return {
        "budget": _budget(given["epsilon"], given["delta"]),
        "delta": given["delta"],
        "ledger": jobs.Ledger(given["ledger"]) if given["ledger"] else None,
        "engine": jobs.Engine(device=given["device"], chunk=given["chunk"]),
    }


def _method(
    how: Mapping[str, Any], public: jobs.Public, spending: Mapping[str, Any]
) -> jobs.Mechanism:
    return jobs.configure(
        how["method"],
        _assignments(how["set_"]),
        preset=None if how["preset"] == "none" else how["preset"],
        public=public,
        budget=_budget(spending["epsilon"], spending["delta"]),
        engine=jobs.Engine(device=spending["device"]),
    )


def _assignments(texts: list[str] | None) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for text in texts or []:
        field, equals, value = text.partition("=")
        if not equals:
            raise BadConfiguration(f"--set takes FIELD=VALUE, not '{text}'.")
        try:
            values[field] = json.loads(value)
        except json.JSONDecodeError:
            values[field] = value
    return values


def _budget(epsilon: float | None, delta: float) -> jobs.Budget | None:
    return None if epsilon is None else jobs.Budget(epsilon, delta)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BadConfiguration(
            f"--class-sizes takes 'public', 'private' or numbers like 500,400: not '{text}'."
        ) from None


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        raise BadConfiguration(f"--shape looks like 1x28x28 or 14, not '{text}'.") from None


def _range(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise BadConfiguration(f"--value-range looks like 0,1, not '{text}'.") from None
    return low, high


# Talking


def _print_json(data: Any) -> None:
    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return value

    sys.stdout.write(json.dumps(plain(data), indent=2, default=str) + "\n")


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar with the time left, on a terminal only, for what takes over two seconds."""
    if quiet or not errors.is_terminal:
        yield lambda done, total, text: None
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
    )
    started = time.monotonic()
    task = bar.add_task("", total=1)
    running, last = False, (0, 1)

    def tick(done: int, total: int, text: str) -> None:
        nonlocal running, task, last
        if not running and time.monotonic() - started > 2:
            bar.start()
            running = True
        if total != last[1] or done < last[0]:  # another stage: its own time left
            bar.remove_task(task)
            task = bar.add_task(text, total=total)
        last = (done, total)
        bar.update(task, completed=done, total=total, description=text)

    try:
        yield tick
    finally:
        if running:
            bar.stop()


def main() -> None:
    """Run a command; turn errors into one line and an exit code."""
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        try:
            code = app(standalone_mode=False) or 0
            if code == 130:
                _interrupted()
            sys.exit(code)
        except (KeyboardInterrupt, typer.Abort):
            _interrupted()
        except UnderstudyError as error:
            errors.print(f"{type(error).__name__}: {error}", markup=False, style="red")
            sys.exit(error.exit_code)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except Exception as error:
            # Typer brings its own copy of click, whose usage errors know how to show themselves.
            show = getattr(error, "show", None)
            if show is None:
                raise
            show()
            sys.exit(getattr(error, "exit_code", 2))


def _interrupted() -> None:
    errors.print(
        "Interrupted. What was asked so far is recorded; give the same command again to resume."
    )
    sys.exit(130)


def _warn(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    errors.print(f"{category.__name__}: {message}", markup=False, style="yellow")


if __name__ == "__main__":
    main()
