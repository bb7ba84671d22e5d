"""Check what a release claims: every hash, every number, every plan."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from understudy.data.folder import (
    checked_files,
    read_recipe,
    read_release,
    read_statement,
    read_synthetic,
    some_names,
    text_bytes,
    well_formed,
)
from understudy.data.layout import (
    CSV,
    MANIFEST,
    PARQUET,
    RECIPE,
    SHEET,
    STATEMENT,
    STATEMENT_IN_WORDS,
    TENSORS,
)
from understudy.data.pictures import cells_table, choose_previews, draw_pictures, huggingface_schema
from understudy.data.synthetic import SyntheticSet
from understudy.errors import (
    Tampered,
    UnderstudyError,
)
from understudy.privacy.accounting import Accountant
from understudy.privacy.events import Event
from understudy.privacy.ledger import Ledger, cap_in, digest
from understudy.privacy.public import Public
from understudy.privacy.statement import Statement, assumptions_about, show_number

Replan = Callable[[Mapping[str, Any], Public], tuple[Event, ...]]
"""Plan a recipe again on public facts: ``method_named(...).configured(...).plan(...).events(...)``.

Methods lie above this layer, so whoever calls :func:`verify` brings the function.
"""


@dataclass(frozen=True)
class Verification:
    """Say what was checked of a release, and that all of it held."""

    folder: Path
    statement: Statement
    checks: tuple[tuple[str, str], ...]
    """(name, detail) of every check that was made; each one passed."""
    not_checked: tuple[tuple[str, str], ...]
    """(name, what it would take) of the checks that were not."""
    epsilons: Mapping[Accountant, float]
    """Epsilon recomputed by every accountant. The statement's own is the one that is claimed:
    privacy loss distributions need a plan fixed before the first answer, which several stages are
    not."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `understudy verify --json`."""
        return {
            "folder": str(self.folder),
            "verified": True,
            "private": self.statement.private,
            "epsilon": _plain(self.statement.epsilon),
            "delta": self.statement.delta,
            "total_epsilon": _plain(self.statement.total_epsilon),
            "accountant": self.statement.accountant.value,
            "recomputed": {name.value: _plain(value) for name, value in self.epsilons.items()},
            "checks": [{"name": name, "detail": detail} for name, detail in self.checks],
            "not_checked": [{"name": name, "needs": needs} for name, needs in self.not_checked],
        }


def _plain(value: float) -> float | str:
    return "inf" if math.isinf(value) else value


def verify(
    folder: str | os.PathLike[str],
    *,
    ledger: Ledger | None = None,
    replan: Replan | None = None,
) -> Verification:
    """Check a release against itself and, with a ledger, against what was reserved for it.

    Raises Tampered with the reason at the first thing that does not hold. Beyond the hashes,
    which whoever edits a file can compute again, it checks what numbers say about each other:
    epsilon and the total follow from the recorded events, the words from the numbers, the terms
    from the public facts, the events (with ``replan``) from the recipe, and pictures and tables
    from the tensors. A LedgerError means that the ledger itself is damaged.

    What no check of a folder can show is that the events recorded are those that were asked, that
    the signals were measured at all, or that ``secret_known`` was false: somebody who rewrites
    every file consistently makes another release, not a wrong one. Against that stand the ledger,
    whose line holds the events and a digest of the recipe, and the holder's word. Earlier runs
    left out of the statement show only against the ledger, too.
    """
    place = Path(folder)
    files = checked_files(place)
    checks = [("files", f"{len(files)} files, each with the hash and size in {MANIFEST}")]
    skipped = []

    statement, words = read_statement(place)
    recipe, public = read_recipe(place)
    if (place / STATEMENT_IN_WORDS).read_bytes() != text_bytes(words):
        raise Tampered(f"{STATEMENT_IN_WORDS} does not say what {STATEMENT} says.")
    checks.append(("words", f"{STATEMENT_IN_WORDS} and 'in_words' follow from the numbers"))
    _check_terms(statement, public)
    checks.append(("terms", f"adjacency, unit and labels are those declared in {RECIPE}"))

    epsilons = _recomputed(statement)
    events = f"{len(statement.events)} recorded {_plural('event', len(statement.events))}"
    own = f"{show_number(statement.epsilon)} at delta {statement.delta:g}, recomputed from {events}"
    runs = f"{len(statement.earlier)} earlier {_plural('run', len(statement.earlier))}"
    checks.append(("epsilon", own))
    checks.append(("total epsilon", f"{show_number(statement.total_epsilon)} with {runs}"))
    if replan is None:
        skipped.append(("plan", "the methods, to plan the recipe again"))
    else:
        _check_plan(statement, recipe, public, replan)
        checks.append(("plan", f"{RECIPE}, planned again, asks exactly the recorded events"))

    read_release(place)
    synthetic = read_synthetic(place, files)
    if synthetic is None:
        if strange := {*files} & {PARQUET, CSV, SHEET}:
            raise Tampered(f"{some_names(strange)}: without {TENSORS} there is nothing they show.")
    else:
        with well_formed(PARQUET):
            detail = (_check_images if public.is_image else _check_cells)(place, synthetic, files)
        checks.append(("synthetic set", detail))

    if ledger is None:
        skipped.append(("ledger", "the data holder's ledger"))
    else:
        checks.append(("ledger", _check_ledger(statement, recipe, public, ledger)))
    return Verification(
        folder=place,
        statement=statement,
        checks=tuple(checks),
        not_checked=tuple(skipped),
        epsilons=epsilons,
    )


def _check_terms(statement: Statement, public: Public) -> None:
    declared = {
        "adjacency": public.adjacency,
        "unit": public.unit,
        "labels": public.labels,
        "dataset": public.name,
        "class_sizes": "measured" if public.counts_measured else "declared public",
    }
    for key, value in declared.items():
        if getattr(statement, key) != value:
            raise Tampered(
                f"{STATEMENT}: {key} is '{getattr(statement, key)}', but the public facts in "
                f"{RECIPE} give '{value}'."
            )
    rests_on = assumptions_about(public)
    if statement.assumptions[: len(rests_on)] != rests_on:
        raise Tampered(
            f"{STATEMENT}: the assumptions are not those that the public facts in {RECIPE} need."
        )


def _recomputed(statement: Statement) -> dict[Accountant, float]:
    with well_formed(STATEMENT):
        epsilons = {accountant: statement.recompute(accountant) for accountant in Accountant}
        total = statement.recompute_total()
    for key, claimed, found in (
        ("epsilon", statement.epsilon, epsilons[statement.accountant]),
        ("total_epsilon", statement.total_epsilon, total),
    ):
        if not math.isclose(claimed, found, rel_tol=1e-6):
            raise Tampered(
                f"{STATEMENT}: {key} is {show_number(claimed)}, but the recorded events give "
                f"{show_number(found)}."
            )
    return epsilons


def _check_plan(
    statement: Statement, recipe: Mapping[str, Any], public: Public, replan: Replan
) -> None:
    try:
        planned = replan(recipe, public)
    except UnderstudyError as error:
        raise Tampered(f"{RECIPE} cannot be planned again: {error}") from error
    except Exception as error:  # values of a wrong type reach the method's own arithmetic
        raise Tampered(f"{RECIPE} cannot be planned again: {error!r}") from error
    recorded = statement.events[-statement.stages[-1] :]
    if planned != recorded:
        raise Tampered(
            f"{STATEMENT} records {'; '.join(event.describe() for event in recorded)}, but "
            f"{RECIPE} asks {'; '.join(event.describe() for event in planned)}. Bounds, names and "
            "sampling count as well."
        )


def _check_images(folder: Path, synthetic: SyntheticSet, files: Mapping[str, Any]) -> str:
    table = _read_parquet(folder)
    if table.column_names != ["image", "label"]:
        raise Tampered(f"{PARQUET} has columns {table.column_names}, not image and label.")
    notes = (table.schema.metadata or {}).get(b"huggingface", b"")
    if notes.decode() != huggingface_schema(synthetic.public):
        raise Tampered(f"{PARQUET} names other classes than {RECIPE}.")
    if table.column("label").to_pylist() != synthetic.labels.tolist():
        raise Tampered(f"{PARQUET} has other labels than {TENSORS}.")
    pictures = draw_pictures(synthetic)
    for row, cell in enumerate(table.column("image").to_pylist()):
        if not _shows(cell["bytes"], pictures[row]):
            raise Tampered(f"{PARQUET}: the image of row {row} is not that of {TENSORS}.")
    previews = choose_previews(synthetic)
    listed = {name for name in files if name.startswith("previews/")}
    if strange := listed ^ {*previews}:
        raise Tampered(f"{some_names(strange)}: not the previews that belong to {TENSORS}.")
    for name, place in previews.items():
        with well_formed(name):
            if not _shows((folder / name).read_bytes(), pictures[place]):
                raise Tampered(f"{name} does not show record {place} of {TENSORS}.")
    return (
        f"{len(synthetic)} images and labels alike in {TENSORS} and {PARQUET}, and "
        f"{len(previews)} previews"
    )


def _shows(content: bytes, picture: Image.Image) -> bool:
    with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
        return (image.mode, image.size, image.tobytes()) == (
            picture.mode,
            picture.size,
            picture.tobytes(),
        )


def _check_cells(folder: Path, synthetic: SyntheticSet, files: Mapping[str, Any]) -> str:
    import pyarrow.csv

    expected = cells_table(synthetic)
    if not _read_parquet(folder).equals(expected):
        raise Tampered(f"{PARQUET} has other cells than {TENSORS}.")
    with well_formed(CSV):
        cells = pyarrow.csv.read_csv(
            pyarrow.BufferReader((folder / CSV).read_bytes()),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=expected.schema,
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )
        if not cells.equals(expected):
            raise Tampered(f"{CSV} has other cells than {TENSORS}.")
    return f"{len(synthetic)} rows alike in {TENSORS}, {PARQUET} and {CSV}"


def _read_parquet(folder: Path) -> Any:
    import pyarrow.parquet

    # From bytes: given a path, Arrow would look for partitions in its name.
    return pyarrow.parquet.ParquetFile(pyarrow.BufferReader((folder / PARQUET).read_bytes())).read()


def _check_ledger(
    statement: Statement, recipe: Mapping[str, Any], public: Public, ledger: Ledger
) -> str:
    """Find the line a release was made under, and compare what it reserved."""
    entries = ledger.entries()
    grants = [entry for entry in entries if entry["kind"] == "reserved"]
    line = next((entry for entry in grants if entry["hash"] == statement.ledger_line), None)
    if line is None:
        raise Tampered(
            f"{STATEMENT}: ledger {ledger.path} has no line {statement.ledger_line}. Either it is "
            "the ledger of other records, or this release was not made under it."
        )
    if entries[0]["fingerprint"] != statement.fingerprint:
        raise Tampered(f"{STATEMENT}: the fingerprint is not that of ledger {ledger.path}.")
    own, last = statement.events[: -statement.stages[-1]], statement.events[-statement.stages[-1] :]
    if line["events"] != [event.to_json() for event in last]:
        raise Tampered(f"{STATEMENT} records other events than its line in {ledger.path}.")
    for key, found in (("budget", line["budget"]), ("cap", cap_in(entries, line).to_json())):
        if getattr(statement, key).to_json() != found:
            raise Tampered(f"{STATEMENT} tells another {key} than {ledger.path}.")
    identity = {
        "by": line["by"],
        "recipe": recipe,
        "public": public.to_json(),
        "events": line["events"],
    }
    if line["identity"] != digest(identity):
        raise Tampered(
            f"{RECIPE} is not the recipe, or has not the public facts, that {ledger.path} reserved."
        )
    keys = ("by", "time", "accountant", "events")
    before = [{key: e[key] for key in keys} for e in grants if e["seq"] < line["seq"]]
    for run in statement.earlier:
        if dict(run) not in before:
            raise Tampered(f"{STATEMENT} lists an earlier run that {ledger.path} does not have.")
        before.remove(dict(run))
    if [event for run in before for event in run["events"]] != [e.to_json() for e in own]:
        raise Tampered(
            f"{STATEMENT} leaves out earlier runs on the same records that {ledger.path} has."
        )
    return f"line {line['seq'] + 1} of {len(entries)} reserved this recipe; the chain is intact"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
