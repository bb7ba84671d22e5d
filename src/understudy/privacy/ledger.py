"""Remember, on disk and before any record is read, what was spent on a dataset.

One ledger belongs to one private dataset, across runs and methods. It is a file of JSON lines,
append-only, each line carrying the hash of the one before. A run *reserves* its whole plan; the
line is on disk (fsync) before the gate may read. A crash can therefore waste budget, never hide
it. Appends are serialised by a file lock that the operating system releases when a process dies.

What is in the way of a cheat is the chain (no line can be edited or dropped from the middle) and
the releases themselves, which quote the line they were made under; what is not, is deleting the
tail of the file on one's own machine. See docs/sharp-edges.md.

Adding up (docs/guarantee.md, "Many runs"): one run has parameters fixed before its first answer,
so its own accountant prices it. From the second run on, parameters may have been chosen after
looking at earlier answers; the total is then that of the Renyi privacy filter of Feldman and Zrnic
2021, with a share of delta for each order. What a filter guarantees under full adaptivity is the cap.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import hmac
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from understudy.errors import BudgetExceeded, LedgerError
from understudy.privacy.accounting import Accountant, Budget, calibrate, epsilon
from understudy.privacy.durable import sync, write_durably
from understudy.privacy.events import Event
from understudy.privacy.public import Adjacency, Public

GENESIS = "0" * 64
LOCK_SECONDS = 120.0
CHECKPOINT = "checkpoint.safetensors"


def state_folder() -> Path:
    """Return where ledgers live: $UNDERSTUDY_STATE, else the user's state folder."""
    chosen = os.environ.get("UNDERSTUDY_STATE")
    return Path(chosen) if chosen else Path(platformdirs.user_state_dir("understudy"))


def canonical(data: Any) -> str:
    """Write JSON one way only, so that it can be hashed."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest(data: Any) -> str:
    """Hash plain data."""
    return hashlib.sha256(canonical(data).encode()).hexdigest()


def holder_key() -> bytes:
    """Return this user's key for dataset fingerprints, made once, readable by nobody else."""
    path = state_folder() / "fingerprint.key"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(path) + ".lock", timeout=LOCK_SECONDS):
        if not path.exists():
            write_durably(path, secrets.token_bytes(32))
            path.chmod(0o600)
        key = path.read_bytes()
    if len(key) != 32:
        raise LedgerError(
            f"The key {path} is damaged ({len(key)} bytes, not 32). Restore it from a backup: "
            "without it the ledgers beside it cannot be matched to their data."
        )
    return key


def keyed_fingerprint(fingerprint: bytes) -> str:
    """Turn a digest of the data into a name that tells a stranger nothing about it."""
    return hmac.digest(holder_key(), fingerprint, "sha256").hex()[:32]


class Journal:
    """Keep the noisy answers of one grant until its run is finished."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cached_property
    def _places(self) -> dict[int, Path]:
        """Tell which file holds the answer of which turn."""
        places = {}
        for path in self.folder.glob("answer-*.safetensors"):
            with self._whole(path), safe_open(path, framework="pt") as file:
                places.update({int(name): path for name in file.keys()})  # noqa: SIM118
        return places

    @staticmethod
    @contextlib.contextmanager
    def _whole(path: Path) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, KeyError, ValueError) as error:
            raise LedgerError(f"The journalled answer {path} is damaged: {error}.") from error

    def read(self, turn: int) -> Tensor | None:
        """Return the answer already given at this turn, if any."""
        path = self._places.get(turn)
        if path is None:
            return None
        with self._whole(path), safe_open(path, framework="pt") as file:
            answer: Tensor = file.get_tensor(str(turn))
        return answer

    def write(self, answers: Mapping[int, Tensor]) -> None:
        """Keep answers by turn, all of them or none. Only after this may anybody see them."""
        path = self.folder / f"answer-{min(answers):08d}.safetensors"
        tensors = {str(turn): answer.contiguous() for turn, answer in answers.items()}
        write_durably(path, functools.partial(save_file, tensors))
        self._places.update(dict.fromkeys(answers, path))

    def checkpoint(self, asked: int, left: Mapping[str, int], state: Mapping[str, Tensor]) -> None:
        """Keep state that stands for the first answers, then forget them. In this order."""
        tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
        facts = json.dumps({"asked": asked, "left": dict(left)})
        kept = functools.partial(save_file, tensors, metadata={"counts": facts})
        write_durably(self.folder / CHECKPOINT, kept)
        needed = {path for turn, path in self._places.items() if turn >= asked}
        for path in {*self._places.values()} - needed:
            path.unlink()
        vars(self).pop("_places")

    def kept(self) -> Kept | None:
        """Return the last checkpoint, if there is one."""
        path = self.folder / CHECKPOINT
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                facts = json.loads(file.metadata()["counts"])
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return Kept(int(facts["asked"]), dict(facts["left"]), state)
        except (SafetensorError, KeyError, ValueError, TypeError) as error:
            raise LedgerError(f"The checkpoint {path} is damaged: {error}.") from error


@dataclass(frozen=True)
class Kept:
    """Hold a checkpoint: how many answers it stands for, what is left to ask, and the state."""

    asked: int
    left: Mapping[str, int]
    state: Mapping[str, Tensor]


@dataclass(frozen=True)
class Grant:
    """Permit one run to ask the events it reserved."""

    id: str
    by: str
    events: tuple[Event, ...]
    budget: Budget
    accountant: Accountant
    line: str
    """Hash of the ledger line that reserved it."""
    fingerprint: str
    earlier: tuple[Mapping[str, Any], ...]
    """The ledger's earlier grants: who, when and which events."""
    cap: Budget
    """The most all runs together may spend, as it stood when this one was reserved."""
    journal: Journal
    pid: int

    def still_ours(self) -> None:
        """Refuse in a forked child: two processes would answer under one grant."""
        if os.getpid() != self.pid:
            raise LedgerError("A gate was carried into another process. Open the dataset there.")


class Ledger:
    """Append to, add up and check one dataset's ledger."""

    def __init__(self, path: str | os.PathLike[str], *, cap: Budget | None = None) -> None:
        """Use the ledger at ``path``. ``cap`` takes effect when the first run creates it."""
        self.path = Path(path)
        self._first_cap = cap

    @classmethod
    def for_fingerprint(cls, fingerprint: bytes) -> Ledger:
        """Return the default ledger of a dataset."""
        name = keyed_fingerprint(fingerprint)
        return cls(state_folder() / "ledgers" / f"{name}.jsonl")

    @property
    def _runs(self) -> Path:
        return self.path.with_name(self.path.name + ".runs")

    # Reading

    def entries(self) -> list[dict[str, Any]]:
        """Return every line, after checking the chain."""
        if not self.path.exists():
            return []
        try:
            text = self.path.read_bytes().decode("ascii")
        except PermissionError as error:
            raise LedgerError(f"No permission to read the ledger {self.path}.") from error
        except UnicodeDecodeError as error:
            raise LedgerError(f"Ledger {self.path} is damaged: not plain text.") from error
        # A last line without its newline was never completely written, so nothing was granted
        # under it; the next append removes it.
        lines = text.split("\n")[:-1]
        previous, entries = GENESIS, []
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
                body = {key: value for key, value in entry.items() if key != "hash"}
                intact = entry["previous"] == previous and digest(body) == entry["hash"]
            except (ValueError, KeyError, TypeError, AttributeError):
                intact = False
            if not intact:
                raise LedgerError(
                    f"Ledger {self.path} is damaged at line {number}: the hash chain breaks "
                    "there. Restore it from a backup. Nothing more can be released under it."
                )
            previous = entry["hash"]
            entries.append(entry)
        return entries

    def grants(self) -> list[dict[str, Any]]:
        """Return the reservations, oldest first."""
        return [entry for entry in self.entries() if entry["kind"] == "reserved"]

    def cap(self) -> Budget | None:
        """Return the cap in force."""
        entries = self.entries()
        return cap_in(entries) if entries else self._first_cap

    def spent(self) -> float:
        """Return the epsilon of everything ever reserved, at the cap's delta."""
        entries = self.entries()
        if not entries:
            return 0.0
        return total_epsilon(*_granted(entries), cap_in(entries), **_terms(entries[0]))

    # Writing

    def raise_cap(self, cap: Budget, *, by: str) -> None:
        """Change the cap. The change itself is a line in the ledger."""
        with self._locked() as entries:
            if not entries:
                raise LedgerError(f"Ledger {self.path} has no entries yet.")
            self._append(entries, {"kind": "cap", "by": by, "cap": cap.to_json()})

    def begin(self, cap: Budget, *, public: Public, fingerprint: bytes) -> None:
        """Begin the ledger of some records with the most that may ever be spent on them."""
        with self._locked() as entries:
            if entries:
                raise LedgerError(f"Ledger {self.path} has begun; its cap can be changed.")
            self._create(entries, public, keyed_fingerprint(fingerprint), cap)

    @contextlib.contextmanager
    def reserve(
        self,
        events: Sequence[Event],
        *,
        by: str,
        recipe: Mapping[str, Any],
        public: Public,
        budget: Budget,
        fingerprint: bytes,
        accountant: Accountant = Accountant.PLD,
        replayable: bool = True,
    ) -> Iterator[Grant]:
        """Write the whole plan down, then hand out the grant; mark it finished at the end.

        An unfinished grant of the same recipe whose process is gone is taken up again, with the
        answers it had journalled. Raises BudgetExceeded, before any record is read, where the
        ledger's cap would be passed.
        """
        name = keyed_fingerprint(fingerprint)
        identity = digest(
            {
                "by": by,
                "recipe": recipe,
                "public": public.to_json(),
                "events": [event.to_json() for event in events],
            }
        )
        with contextlib.ExitStack() as stack:
            entry, earlier, cap = self._enter(
                stack, tuple(events), by, identity, public, budget, name, accountant, replayable
            )
            folder = self._runs / entry["grant"]
            yield Grant(
                id=entry["grant"],
                by=by,
                events=tuple(events),
                budget=budget,
                accountant=accountant,
                line=entry["hash"],
                fingerprint=name,
                earlier=tuple(earlier),
                cap=cap,
                journal=Journal(folder),
                pid=os.getpid(),
            )
            with self._locked() as entries:
                self._append(entries, {"kind": "finished", "grant": entry["grant"]})
        shutil.rmtree(folder, ignore_errors=True)

    def _enter(
        self,
        stack: contextlib.ExitStack,
        events: tuple[Event, ...],
        by: str,
        identity: str,
        public: Public,
        budget: Budget,
        fingerprint: str,
        accountant: Accountant,
        replayable: bool,
    ) -> tuple[dict[str, Any], list[dict[str, Any]], Budget]:
        """Find an unfinished grant to take up, or reserve a new one. Holds the run's lock."""
        with self._locked() as entries:
            if not entries:
                entries.append(
                    self._create(entries, public, fingerprint, self._first_cap or budget)
                )
            self._same_terms(entries[0], public, fingerprint)
            reserved = [entry for entry in entries if entry["kind"] == "reserved"]
            done = {entry["grant"] for entry in entries if entry["kind"] == "finished"}
            for entry in reserved if replayable else []:
                open_still = entry["identity"] == identity and entry["grant"] not in done
                if open_still and self._taken_up(stack, entry["grant"]):
                    before = [e for e in reserved if e["seq"] < entry["seq"]]
                    return entry, before, cap_in(entries, until=entry)
            self._refuse_overspending(entries, events, public, accountant, by)
            entry = {
                "kind": "reserved",
                "grant": secrets.token_hex(8),
                "by": by,
                "identity": identity,
                "accountant": accountant.value,
                "budget": budget.to_json(),
                "events": [event.to_json() for event in events],
            }
            if not self._take_run(stack, entry["grant"]):
                raise LedgerError("A new run's folder is already locked.")
            return self._append(entries, entry), reserved, cap_in(entries)

    def _create(
        self, entries: list[dict[str, Any]], public: Public, fingerprint: str, cap: Budget
    ) -> dict[str, Any]:
        """Write the first line: whose records, in which terms, and the most they may cost."""
        first = {
            "kind": "created",
            "dataset": public.name,
            "fingerprint": fingerprint,
            "adjacency": public.adjacency.value,
            "unit": public.unit,
            "labels": public.labels,
            "cap": cap.to_json(),
        }
        return self._append(entries, first)

    def _refuse_overspending(
        self,
        entries: list[dict[str, Any]],
        events: tuple[Event, ...],
        public: Public,
        accountant: Accountant,
        by: str,
    ) -> None:
        cap = cap_in(entries)
        groups, accountants = _granted(entries)
        terms = _terms(entries[0])
        total = total_epsilon([*groups, events], [*accountants, accountant], cap, **terms)
        # The calibration stops within its budget; the slack only forgives the last bit.
        if total <= cap.epsilon * (1 + 1e-9):
            return
        asked = epsilon(events, cap.delta, accountant=accountant, **terms)
        before = total_epsilon(groups, accountants, cap, **terms)
        left = max(0.0, cap.epsilon - before)
        raise BudgetExceeded(
            f"{by} asks for epsilon {asked:.4g} at delta {cap.delta:g} "
            f"({'; '.join(event.describe() for event in events)}). Ledger '{public.name}' "
            f"({self.path}) has {left:.2f} of {cap.epsilon:g} left. "
            f"{self._advice(groups, accountants, events, cap, accountant, terms)}"
        )

    def _advice(
        self,
        groups: list[tuple[Event, ...]],
        accountants: list[Accountant],
        events: tuple[Event, ...],
        cap: Budget,
        accountant: Accountant,
        terms: dict[str, Any],
    ) -> str:
        """Say which noise would fit, or how the cap is raised."""
        raising = (
            "Raise the cap with `understudy ledger DATA --cap EPSILON`, or use the release you "
            "have: synthesising again from it is free."
        )
        if not events or math.isinf(cap.epsilon):
            return raising

        def scaled(factor: float) -> tuple[Event, ...]:
            return tuple(
                Event(
                    **{
                        **event.to_json(),
                        "noise_multiplier": max(event.noise_multiplier, 1e-3) * factor,
                    }
                )
                for event in events
            )

        factor = 1.0
        for _ in range(24):
            factor *= 1.25
            noisy = scaled(factor)
            if (
                total_epsilon([*groups, noisy], [*accountants, accountant], cap, **terms)
                <= cap.epsilon
            ):
                break
        else:
            return f"No noise would fit. {raising}"
        if not groups:
            with contextlib.suppress(Exception):
                factor = calibrate(scaled, cap, accountant=accountant, start=factor, **terms)
                noisy = scaled(factor)
        return f"noise_multiplier={noisy[0].noise_multiplier:.2f} would fit. {raising}"

    def _same_terms(self, created: Mapping[str, Any], public: Public, fingerprint: str) -> None:
        if created["fingerprint"] != fingerprint:
            raise LedgerError(
                f"Ledger {self.path} belongs to other records ('{created['dataset']}'), or was "
                f"made with another key than {state_folder() / 'fingerprint.key'}. One dataset, "
                "one ledger: choose another path."
            )
        asked = {
            "adjacency": public.adjacency.value,
            "unit": public.unit,
            "labels": public.labels,
        }
        for key, value in asked.items():
            if created[key] != value:
                raise LedgerError(
                    f"Ledger {self.path} counts in terms of {key} '{created[key]}'; this run "
                    f"declares '{value}'. Guarantees in different terms do not add up: declare "
                    f"the same."
                )

    def _taken_up(self, stack: contextlib.ExitStack, grant: str) -> bool:
        """Take up an unfinished run, unless it is alive. Without its answers it cannot be."""
        folder = self._runs / grant
        if not folder.is_dir():
            raise LedgerError(
                f"This run was begun before (grant {grant}), and the answers it was given are gone "
                f"from {folder}. To ask again would put a second noise on sums that were answered. "
                "Restore the folder from a backup, or change the seed: that is a new run, and is "
                "paid for."
            )
        return self._take_run(stack, grant)

    def _take_run(self, stack: contextlib.ExitStack, grant: str) -> bool:
        """Lock a run's folder for as long as it lives. False where another process holds it."""
        folder = self._runs / grant
        if not folder.is_dir():
            folder.mkdir(parents=True)
            for made in (folder, *folder.parents[:2]):
                sync(made)
        lock = FileLock(str(folder / "alive.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return False
        stack.callback(lock.release)
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[list[dict[str, Any]]]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(str(self.path) + ".lock", timeout=LOCK_SECONDS):
                yield self.entries()
        except Timeout as error:
            raise LedgerError(
                f"Ledger {self.path} has been locked by another process for "
                f"{LOCK_SECONDS:.0f} s. Wait for it, or end it."
            ) from error
        except OSError as error:
            reason = error.strerror or str(error)
            raise LedgerError(
                f"Cannot write the ledger {self.path}: {reason}. Nothing was granted."
            ) from error

    def _append(self, entries: list[dict[str, Any]], body: dict[str, Any]) -> dict[str, Any]:
        """Add one line and wait until it is on disk."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        entry = {
            "seq": len(entries),
            "time": now,
            "previous": entries[-1]["hash"] if entries else GENESIS,
            **body,
        }
        entry["hash"] = digest(entry)
        fresh = not self.path.exists()
        with open(self.path, "r+b" if not fresh else "w+b") as file:
            # Drop a torn tail: a line whose newline never reached the disk granted nothing.
            content = file.read()
            file.seek(content.rfind(b"\n") + 1)
            file.truncate()
            file.write((canonical(entry) + "\n").encode("ascii"))
            file.flush()
            os.fsync(file.fileno())
        if fresh:
            sync(self.path.parent)
        return entry


def total_epsilon(
    groups: Sequence[tuple[Event, ...]],
    accountants: Sequence[Accountant],
    cap: Budget,
    *,
    adjacency: Adjacency,
    labels_fixed: bool,
) -> float:
    """Add up runs at the cap's delta: one by its own accountant, several by the Renyi filter."""
    if len(groups) == 1:
        return epsilon(
            groups[0],
            cap.delta,
            adjacency=adjacency,
            accountant=accountants[0],
            labels_fixed=labels_fixed,
        )
    return epsilon(
        tuple(event for group in groups for event in group),
        cap.delta,
        adjacency=adjacency,
        accountant=Accountant.RDP,
        labels_fixed=labels_fixed,
        filtered=cap,
    )


def _terms(created: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "adjacency": Adjacency(created["adjacency"]),
        "labels_fixed": created["labels"] == "public",
    }


def cap_in(entries: Sequence[Mapping[str, Any]], until: Mapping[str, Any] | None = None) -> Budget:
    """Return the cap in force at the end of a ledger's lines, or when one of them was written."""
    if until is not None:
        entries = entries[: until["seq"]]
    setting = [entry for entry in entries if entry["kind"] in ("created", "cap")]
    return Budget.from_json(setting[-1]["cap"])


def _granted(
    entries: Sequence[Mapping[str, Any]],
) -> tuple[list[tuple[Event, ...]], list[Accountant]]:
    """Return each reservation's events and the accountant that prices it alone."""
    reserved = [entry for entry in entries if entry["kind"] == "reserved"]
    return [_events(entry) for entry in reserved], [Accountant(e["accountant"]) for e in reserved]


def _events(entry: Mapping[str, Any]) -> tuple[Event, ...]:
    return tuple(Event.from_json(event) for event in entry["events"])
