"""Keep a release in a folder: write it whole or not at all, read it safely, check what it claims.

    release/
      signals.safetensors     the noisy answers
      statement.json          what is guaranteed, for machines; STATEMENT.md says it in words
      recipe.json             the method, its whole configuration, the public facts
      synthetic.safetensors   images (float32, not clamped) and labels (int64)
      synthetic.parquet       the same set, 8-bit, as Hugging Face reads it; for a table, its cells
      synthetic.csv           for a table
      previews/CLASS/NNN.png  pictures, and contact_sheet.png with all classes on one page
      README.md               the data card
      manifest.json           size and SHA-256 of every other file

The last five before the manifest are there when a synthetic set is. Nothing here is a pickle, so
reading a stranger's release runs none of their code.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import safetensors.torch
import torch

from understudy.data.card import data_card
from understudy.data.layout import (
    CARD,
    CSV,
    FORMAT,
    KIND,
    MANIFEST,
    PARQUET,
    RECIPE,
    SHEET,
    SIGNALS,
    STATEMENT,
    STATEMENT_IN_WORDS,
    TENSORS,
)
from understudy.data.pictures import (
    cells_table,
    choose_previews,
    contact_sheet,
    draw_pictures,
    image_table,
    parquet_bytes,
    png,
)
from understudy.data.synthetic import SyntheticSet
from understudy.errors import (
    BadConfiguration,
    ReleaseError,
    ReleaseExists,
    Tampered,
)
from understudy.privacy.durable import sync, write_synced
from understudy.privacy.events import Event
from understudy.privacy.ledger import canonical
from understudy.privacy.public import Public
from understudy.privacy.release import Release
from understudy.privacy.statement import FORMAT as STATEMENT_FORMAT
from understudy.privacy.statement import Statement

# Writing


def save(
    folder: str | os.PathLike[str],
    release: Release,
    synthetic: SyntheticSet | None = None,
    *,
    overwrite: bool = False,
    source: str | None = None,
    licence: str | None = None,
) -> Path:
    """Write a release, and the synthetic set made from it, into a folder. Return the folder.

    Everything is written to a hidden folder beside the target, flushed to disk and renamed into
    place, so an interruption, a full disk or a missing permission leaves nothing behind. A folder
    that holds anything is refused; ``overwrite`` replaces it only if it is a release and nothing
    else. ``source`` (the method's paper) and ``licence`` (a Hugging Face identifier such as
    "cc-by-4.0"; the data holder's choice) go on the data card.
    """
    target = Path(folder).resolve()
    check_free(target, overwrite)
    contents = _contents(release, synthetic, source, licence)
    draft = target.with_name(f".{target.name}.draft-{secrets.token_hex(4)}")
    try:
        _write_all(draft, contents)
        check_free(target, overwrite)
        _put_in_place(draft, target)
    except OSError as error:
        raise ReleaseError(f"Cannot write the release {target}: {_reason(error)}.") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # where the rename went well there is no draft
    return target


def check_free(target: Path, overwrite: bool) -> None:
    """Refuse a target that is in use by anything but a release that may be replaced."""
    try:
        if not target.exists() or (target.is_dir() and not any(target.iterdir())):
            return
        if not target.is_dir():
            raise ReleaseExists(f"{target} is a file. A release is a folder: choose another name.")
        if not overwrite:
            raise ReleaseExists(
                f"{target} is not empty. Choose another folder, or replace it with --overwrite "
                "(overwrite=True in Python) if it holds an older release."
            )
        try:
            strange = _files_in(target) - {*_manifest(target), MANIFEST}
        except ReleaseError as error:
            raise ReleaseExists(
                f"{target} is not a release folder, so it is never overwritten: {error}"
            ) from error
        if strange:
            raise ReleaseExists(
                f"{target} also holds {some_names(strange)}, which the release does not list. Move them "
                "away first: overwriting would delete them."
            )
    except OSError as error:
        raise ReleaseError(f"Cannot look into {target}: {_reason(error)}.") from error


def _write_all(draft: Path, contents: Mapping[str, bytes]) -> None:
    folders = {draft, *(parent for name in contents for parent in (draft / name).parents)}
    folders = {folder for folder in folders if folder.is_relative_to(draft)}
    for folder in sorted(folders):
        folder.mkdir(parents=True)
    for name, content in contents.items():
        write_synced(draft / name, content)
    for folder in folders:
        sync(folder)


def _put_in_place(draft: Path, target: Path) -> None:
    if target.exists() and any(target.iterdir()):
        retired = draft.with_name(draft.name.replace(".draft-", ".retired-"))
        os.rename(target, retired)
        try:
            os.rename(draft, target)
        except BaseException:
            os.rename(retired, target)
            raise
        shutil.rmtree(retired, ignore_errors=True)
    else:
        os.rename(draft, target)
    sync(target.parent)


def _reason(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; make room or choose another disk"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission for {error.filename or 'this place'}; choose another folder"
    return error.strerror or str(error)


def _contents(
    release: Release, synthetic: SyntheticSet | None, source: str | None, licence: str | None
) -> dict[str, bytes]:
    """Return every file of a release, by name."""
    if synthetic is not None:
        synthetic = _ready(synthetic, release.public)
    contents = {
        SIGNALS: safetensors.torch.save(dict(release.signals), {"format": "pt"}),
        STATEMENT: _json(release.statement.to_json()),
        STATEMENT_IN_WORDS: text_bytes(release.statement.markdown()),
        RECIPE: _json(_recipe(release.recipe, release.public)),
        CARD: text_bytes(data_card(release, synthetic, source, licence)),
    }
    if synthetic is not None:
        tensors = {"images": synthetic.images, "labels": synthetic.labels}
        contents[TENSORS] = safetensors.torch.save(tensors, {"format": "pt"})
        if synthetic.public.is_image:
            pictures = draw_pictures(synthetic)
            contents[PARQUET] = parquet_bytes(image_table(synthetic, [png(p) for p in pictures]))
            for name, place in choose_previews(synthetic).items():
                contents[name] = png(pictures[place])
            contents[SHEET] = png(contact_sheet(release, synthetic, pictures))
        else:
            import pyarrow.csv

            table = cells_table(synthetic)
            contents[PARQUET] = parquet_bytes(table)
            sink = io.BytesIO()
            pyarrow.csv.write_csv(table, sink)
            contents[CSV] = sink.getvalue()
    files = {
        name: {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        for name, content in sorted(contents.items())
    }
    return {**contents, MANIFEST: _json({"kind": KIND, "format": FORMAT, "files": files})}


def _ready(synthetic: SyntheticSet, public: Public) -> SyntheticSet:
    """Check that a set belongs to the release, and bring its tensors to their stored types."""
    theirs = synthetic.public
    if (theirs.shape, theirs.classes, theirs.columns) != (
        public.shape,
        public.classes,
        public.columns,
    ):
        raise BadConfiguration(
            f"The synthetic set has records of shape {theirs.shape} in {len(theirs.classes)} "
            f"classes; the release was made for {public.shape} in {len(public.classes)}."
        )
    images = synthetic.images.detach().to("cpu", torch.float32).contiguous()
    labels = synthetic.labels.detach().to("cpu", torch.int64).contiguous()
    if not torch.isfinite(images).all():
        raise ReleaseError(
            "The synthetic set holds values that are NaN or infinite, so it was not written. "
            "Synthesise again with a smaller learning rate: it costs no budget."
        )
    if len(labels) and not (labels.min() >= 0 and labels.max() < len(public.classes)):
        raise BadConfiguration(f"Synthetic labels must lie in 0..{len(public.classes) - 1}.")
    return SyntheticSet(images=images, labels=labels, public=public)


def _recipe(recipe: Mapping[str, Any], public: Public) -> dict[str, Any]:
    return {"format": FORMAT, "recipe": dict(recipe), "public": public.to_json()}


def _json(data: Any) -> bytes:
    return (json.dumps(data, indent=2, allow_nan=False) + "\n").encode("ascii")


def text_bytes(text: str) -> bytes:
    """Encode text; what UTF-8 cannot hold is escaped."""
    return text.encode("utf-8", "backslashreplace")


# Reading


def load(folder: str | os.PathLike[str]) -> tuple[Release, SyntheticSet | None]:
    """Read a release, after comparing every file with the manifest.

    Safe on a stranger's folder: nothing outside it is opened and nothing is unpickled. It shows
    that the files are as they were written; :func:`verify` also checks what they claim.
    """
    place = Path(folder)
    files = checked_files(place)
    return read_release(place), read_synthetic(place, files)


def read_release(folder: Path) -> Release:
    """Read the private side's outcome, files already checked."""
    statement, _ = read_statement(folder)
    recipe, public = read_recipe(folder)
    with well_formed(SIGNALS):
        signals = safetensors.torch.load((folder / SIGNALS).read_bytes())
    return Release(signals=signals, recipe=recipe, public=public, statement=statement)


def read_synthetic(folder: Path, files: Mapping[str, Any]) -> SyntheticSet | None:
    """Read the synthetic set, if there is one."""
    if TENSORS not in files:
        return None
    _, public = read_recipe(folder)
    with well_formed(TENSORS):
        tensors = safetensors.torch.load((folder / TENSORS).read_bytes())
        images, labels = tensors["images"], tensors["labels"]
        if (images.dtype, labels.dtype, len(tensors)) != (torch.float32, torch.int64, 2):
            raise ValueError("expected float32 images and int64 labels, and nothing else")
        return _ready(SyntheticSet(images=images, labels=labels, public=public), public)


def read_statement(folder: Path) -> tuple[Statement, str]:
    """Return the statement and the words that go with it."""
    data = _read_json(folder, STATEMENT)
    with well_formed(STATEMENT):
        if data["format"] != STATEMENT_FORMAT:
            raise ValueError(f"its format is {data['format']}, not {STATEMENT_FORMAT}")
        statement = Statement.from_json(data)
        _check_events(statement)
        _check_same(STATEMENT, data, statement.to_json())
        return statement, statement.markdown()


def read_recipe(folder: Path) -> tuple[dict[str, Any], Public]:
    """Read the method's configuration and the public facts."""
    data = _read_json(folder, RECIPE)
    with well_formed(RECIPE):
        recipe, public = dict(data["recipe"]), Public.from_json(data["public"])
        if not isinstance(recipe["method"], str) or not isinstance(recipe["configuration"], dict):
            raise TypeError("it names no method and configuration")
        _check_same(RECIPE, data, _recipe(recipe, public))
    return recipe, public


def _check_same(name: str, found: Mapping[str, Any], derived: Mapping[str, Any]) -> None:
    """Compare a file with what its own fields give, so that no field says something else."""
    for key in sorted({*found, *derived}):
        if key not in found or key not in derived:
            raise Tampered(f"{name}: the field '{key}' is {_there(key in found)}.")
        if canonical(found[key]) != canonical(derived[key]):
            raise Tampered(
                f"{name}: '{key}' is {_brief(found[key])}, but the other fields give "
                f"{_brief(derived[key])}."
            )


def _check_events(statement: Statement) -> None:
    """Refuse values that no plan produces, before any arithmetic is done with them."""
    earlier = [Event.from_json(event) for run in statement.earlier for event in run["events"]]
    for event in (*statement.events, *earlier):
        rate = 1.0 if event.sampling_rate is None else event.sampling_rate
        if not (
            isinstance(event.times, int)
            and event.times >= 1
            and 0 <= event.noise_multiplier < math.inf
            and 0 < event.bound < math.inf
            and 0 < rate <= 1
            and event.unit in ("record", "shard")
            and isinstance(event.per_class, bool)
        ):
            raise ValueError(f"no query is like {event}")
    if not 0 < statement.delta < 1:
        raise ValueError(f"delta is {statement.delta}")
    if not isinstance(statement.secret_known, bool):
        raise TypeError("secret_known is neither true nor false")
    if min(statement.stages) < 1 or sum(statement.stages) != len(statement.events):
        raise ValueError(f"stages {statement.stages} do not hold {len(statement.events)} events")


@contextlib.contextmanager
def well_formed(name: str) -> Iterator[None]:
    """Report whatever a parser makes of a file that is readable but wrong."""
    try:
        yield
    except ReleaseError:
        raise
    except Exception as error:  # the file is a stranger's; any parser may stumble its own way
        raise Tampered(f"{name} is not what a release holds: {_complaint(error)}.") from error


def _complaint(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return str(error).rstrip(".") or type(error).__name__


def _read_json(folder: Path, name: str) -> Any:
    """Read strict JSON: no NaN, no infinity, no key twice."""
    with well_formed(name):
        data = json.loads(
            (folder / name).read_bytes().decode("ascii"),
            object_pairs_hook=_unique,
            parse_constant=_not_finite,
            parse_float=_finite,
        )
        if not isinstance(data, dict):
            raise TypeError("not a JSON object")
        return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a key appears twice")
    return data


def _not_finite(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _not_finite(text)


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Return name -> hash and size, after checking the manifest's own form."""
    if not folder.is_dir():
        raise ReleaseError(
            f"There is no release at {folder}: no such folder. A run that is still going makes it "
            "when its last question is answered; one that stopped goes on when its command is "
            "given again."
        )
    if not (folder / MANIFEST).is_file():
        if (folder / STATEMENT).exists() or (folder / RECIPE).exists():
            raise Tampered(f"{MANIFEST} is missing from {folder}.")
        raise ReleaseError(f"{folder} is not a release: it has no {MANIFEST}.")
    data = _read_json(folder, MANIFEST)
    with well_formed(MANIFEST):
        if data["kind"] != KIND:
            raise ValueError(f"it describes {_brief(data['kind'])}, not '{KIND}'")
        if data["format"] != FORMAT:
            raise ReleaseError(
                f"{MANIFEST} of {folder} has format {_brief(data['format'])}; this version of "
                f"understudy reads format {FORMAT}. Use the version that wrote it."
            )
        files = data["files"]
        for name, entry in files.items():
            if any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name:
                raise ValueError(f"it lists '{name}', which may lie outside the release")
            if set(entry) != {"sha256", "size"}:
                raise ValueError(f"its entry for '{name}' needs sha256 and size, no more")
        if (folder / MANIFEST).read_bytes() != _json(data):
            raise ValueError("it was rewritten by something else")
    return dict(files)


def checked_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Compare the folder with its manifest: the same files, each with its hash."""
    try:
        listed = _manifest(folder)
        present = _files_in(folder) - {MANIFEST}
        needed = {SIGNALS, STATEMENT, STATEMENT_IN_WORDS, RECIPE, CARD}
        if unlisted_need := needed - {*listed}:
            raise Tampered(f"{MANIFEST} does not list {some_names(unlisted_need)}.")
        if missing := {*listed} - present:
            raise Tampered(f"{some_names(missing)}: missing from {folder}, but in its {MANIFEST}.")
        if extra := present - {*listed}:
            raise Tampered(f"{some_names(extra)}: in {folder}, but not in its {MANIFEST}.")
        for name, entry in listed.items():
            content, size = hashlib.sha256(), 0
            with open(folder / name, "rb") as file:
                while block := file.read(2**20):
                    content.update(block)
                    size += len(block)
            if (content.hexdigest(), size) != (entry["sha256"], entry["size"]):
                raise Tampered(
                    f"{name} is not the file that was released: its hash and size ({size} bytes) "
                    f"differ from {MANIFEST}."
                )
    except OSError as error:
        raise ReleaseError(f"Cannot read the release {folder}: {_reason(error)}.") from error
    return listed


def _files_in(folder: Path) -> set[str]:
    """List the files of a folder; refuse links and anything that is not a plain file."""

    def give_up(error: OSError) -> NoReturn:
        raise error

    found = set()
    for place, inner, names in os.walk(folder, onerror=give_up):
        for entry in (*inner, *names):
            path = Path(place, entry)
            name, mode = path.relative_to(folder).as_posix(), path.lstat().st_mode
            if stat.S_ISREG(mode):
                found.add(name)
            elif not stat.S_ISDIR(mode):
                raise Tampered(f"{name} is a link or a device. A release has plain files only.")
    return found


def some_names(names: set[str]) -> str:
    """Name the first three files and count the rest."""
    first, more = sorted(names)[:3], len(names) - 3
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")


def _there(found: bool) -> str:
    return "not one of its fields" if found else "missing"


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
