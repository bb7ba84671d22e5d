"""State what was guaranteed, for a machine and for a privacy officer."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from understudy.privacy.accounting import Accountant, Budget, epsilon
from understudy.privacy.events import Event
from understudy.privacy.ledger import total_epsilon
from understudy.privacy.public import Adjacency, Public

if TYPE_CHECKING:
    from understudy.privacy.ledger import Grant

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Statement:
    """State the guarantee of one release and of everything released from the same records."""

    epsilon: float
    delta: float
    accountant: Accountant
    adjacency: Adjacency
    unit: str
    labels: str
    class_sizes: str
    events: tuple[Event, ...]
    """This release's events, stage by stage flattened."""
    stages: tuple[int, ...]
    """How many of the events belong to each stage; a later stage was planned on earlier answers."""
    earlier: tuple[Mapping[str, Any], ...]
    """Other runs on the same records before this one: by, time, events, accountant."""
    total_epsilon: float
    """What everything together adds up to, this release included, at the cap's delta."""
    budget: Budget
    """What this run was allowed to spend."""
    cap: Budget
    """What all runs on these records together are allowed to spend."""
    assumptions: tuple[str, ...]
    departures: tuple[str, ...]
    secret_known: bool
    dataset: str
    fingerprint: str
    ledger_line: str
    made: str
    software: Mapping[str, str]

    @classmethod
    def stamp(
        cls,
        *,
        grant: Grant,
        before: tuple[Grant, ...],
        public: Public,
        assumptions: tuple[str, ...],
        departures: tuple[str, ...],
        secret_known: bool,
    ) -> Statement:
        """Write the statement of a finished measurement. Called by the gate alone."""
        stages = [*before, grant]
        own = {stage.line for stage in before}
        earlier = tuple(
            {
                "by": entry["by"],
                "time": entry["time"],
                "accountant": entry["accountant"],
                "events": entry["events"],
            }
            for entry in grant.earlier
            if entry["hash"] not in own
        )
        draft = cls(
            epsilon=0.0,
            delta=grant.budget.delta,
            accountant=grant.accountant if len(stages) == 1 else Accountant.RDP,
            adjacency=public.adjacency,
            unit=public.unit,
            labels=public.labels,
            class_sizes="measured" if public.counts_measured else "declared public",
            events=tuple(event for stage in stages for event in stage.events),
            stages=tuple(len(stage.events) for stage in stages),
            earlier=earlier,
            total_epsilon=0.0,
            budget=grant.budget,
            cap=grant.cap,
            assumptions=(*assumptions_about(public), *assumptions),
            departures=departures,
            secret_known=secret_known,
            dataset=public.name,
            fingerprint=grant.fingerprint,
            ledger_line=grant.line,
            made=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            software={
                name: metadata.version(name) for name in ("understudy", "dp-accounting", "torch")
            },
        )
        return dataclasses.replace(
            draft, epsilon=draft.recompute(), total_epsilon=draft.recompute_total()
        )

    # Checking

    def recompute(self, accountant: Accountant | None = None) -> float:
        """Price this release's events again, by its own accountant or another."""
        return epsilon(
            self.events,
            self.delta,
            adjacency=self.adjacency,
            accountant=accountant or self.accountant,
            labels_fixed=self.labels == "public",
            filtered=self.budget if len(self.stages) > 1 else None,
        )

    def recompute_total(self) -> float:
        """Price everything released from these records again."""
        runs = [tuple(Event.from_json(event) for event in run["events"]) for run in self.earlier]
        events = iter(self.events)
        own = [tuple(itertools.islice(events, count)) for count in self.stages]
        return total_epsilon(
            [*runs, *own],
            [
                *(Accountant(run["accountant"]) for run in self.earlier),
                *(self.accountant for _ in own),
            ],
            self.cap,
            adjacency=self.adjacency,
            labels_fixed=self.labels == "public",
        )

    # Telling

    @property
    def private(self) -> bool:
        """Tell whether any guarantee holds at all."""
        return math.isfinite(self.epsilon) and not self.secret_known

    def paragraph(self) -> str:
        """Explain the guarantee in words a privacy officer can check."""
        if self.secret_known:
            return (
                "NOT PRIVATE. The randomness of this release was fixed for a test and is known. "
                "No guarantee holds. Do not share it."
            )
        if math.isinf(self.epsilon):
            return (
                "NOT PRIVATE. At least one answer was given without noise, so epsilon is "
                "infinite and no guarantee holds. Use it for comparison only; do not share it."
            )
        other = "any other of its class" if self.labels == "public" else "any other"
        neighbours = {
            Adjacency.ADD_OR_REMOVE: f"with or without {self.unit} of the data",
            Adjacency.REPLACE: f"with {self.unit} of the data exchanged for {other}",
        }[self.adjacency]
        asked = sum(event.times for event in self.events)
        text = (
            f"This release is ({self.epsilon:.4g}, {self.delta:g})-differentially private: whatever "
            f"anybody concludes from it, the probability of that conclusion changes by a factor of "
            f"at most {_factor(self.epsilon)} (e to the epsilon), up to a failure chance of "
            f"{self.delta:g}, {neighbours}. It was made from {asked} noisy "
            f"{'answer' if asked == 1 else 'answers'} about the records; each "
            "record's part in an answer was bounded before secret Gaussian noise was added, and "
            "beyond the facts listed below as public nothing else about the records was used. "
            "Anything computed from this release, for ever, is covered by the same guarantee."
        )
        if self.earlier:
            runs = len(self.earlier)
            counted = f"{runs} earlier {'run' if runs == 1 else 'runs'}"
            text += f" The same records were used in {counted}; {self._together()}"
        return text

    def _together(self) -> str:
        """Say what is guaranteed of all runs on these records."""
        if math.isinf(self.total_epsilon):
            return (
                "some answers were given without noise there, so nothing is guaranteed of all "
                "together."
            )
        together = (
            "all together, this one included, their price adds up to epsilon "
            f"{self.total_epsilon:.4g} at delta {self.cap.delta:g}."
        )
        if math.isinf(self.cap.epsilon):
            return f"{together} Their ledger sets no limit, so more may follow."
        return (
            f"{together} Their ledger lets them spend {self.cap.epsilon:.4g} at most: that is what "
            "is guaranteed of all together, however later runs were chosen."
        )

    def markdown(self) -> str:
        """Write STATEMENT.md. A function of :meth:`to_json` alone, so it can be checked."""
        rows = [
            ("epsilon", show_number(self.epsilon)),
            ("delta", f"{self.delta:g}"),
            ("epsilon of everything from these records", show_number(self.total_epsilon)),
            ("the most that everything may spend", show_budget(self.cap)),
            ("accountant", _ACCOUNTANTS[self.accountant]),
            ("adjacency", self.adjacency.value),
            ("unit", self.unit),
            ("each record's label", self.labels),
            ("class sizes", self.class_sizes),
            ("dataset", f"{self.dataset} (keyed fingerprint {self.fingerprint})"),
            ("ledger line", f"`{self.ledger_line}`"),
            ("made", self.made),
            ("software", ", ".join(f"{k} {v}" for k, v in sorted(self.software.items()))),
        ]
        lines = ["# What is guaranteed", "", self.paragraph(), "", "| | |", "| --- | --- |"]
        lines += [f"| {key} | {value} |" for key, value in rows]
        lines += ["", "## Every question asked", ""]
        lines += ["| question | times | inclusion | noise / bound | bound | unit |"]
        lines += ["| --- | ---: | --- | ---: | ---: | --- |"]
        lines += [_event_row(event) for event in self.events]
        lines += ["", "## What this rests on", ""]
        lines += [f"- {text}" for text in self.assumptions]
        if self.departures:
            lines += ["", "## Departures from the published method", ""]
            lines += [f"- {text}" for text in self.departures]
        if self.earlier:
            lines += ["", "## Earlier runs on the same records", ""]
            for run in self.earlier:
                asked = "; ".join(Event.from_json(event).describe() for event in run["events"])
                lines.append(f"- {run['time']}: {run['by']}, {asked}")
        lines += [
            "",
            "Check it with `understudy verify FOLDER`: epsilon is recomputed from the table above "
            "and every file is compared with its hash.",
            "",
        ]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for statement.json."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        data.update(
            format=FORMAT,
            epsilon=_plain(self.epsilon),
            total_epsilon=_plain(self.total_epsilon),
            budget=self.budget.to_json(),
            cap=self.cap.to_json(),
            accountant=self.accountant.value,
            adjacency=self.adjacency.value,
            events=[event.to_json() for event in self.events],
            earlier=[dict(run) for run in self.earlier],
            software=dict(self.software),
            private=self.private,
            in_words=self.paragraph(),
        )
        for key in ("stages", "assumptions", "departures"):
            data[key] = list(data[key])
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Statement:
        """Rebuild from :meth:`to_json`."""
        names = {field.name for field in dataclasses.fields(cls)}
        fields = {key: value for key, value in data.items() if key in names}
        fields.update(
            epsilon=float(data["epsilon"]),
            total_epsilon=float(data["total_epsilon"]),
            budget=Budget.from_json(data["budget"]),
            cap=Budget.from_json(data["cap"]),
            accountant=Accountant(data["accountant"]),
            adjacency=Adjacency(data["adjacency"]),
            events=tuple(Event.from_json(event) for event in data["events"]),
        )
        for key in ("stages", "earlier", "assumptions", "departures"):
            fields[key] = tuple(data[key])
        return cls(**fields)


_ACCOUNTANTS = {
    Accountant.PLD: "privacy loss distributions (dp-accounting)",
    Accountant.RDP: "Renyi DP, improved conversion (dp-accounting)",
    Accountant.RDP_CLASSIC: "Renyi DP, classic conversion (dp-accounting)",
}


def assumptions_about(public: Public) -> tuple[str, ...]:
    """Say what the guarantee takes for granted about the data."""
    lines = [
        f"The unit of protection is {public.unit}. Somebody who appears in k records is protected "
        "less: at k times epsilon, delta grows by (e^(k epsilon) - 1) / (e^epsilon - 1).",
        "The names of the classes, the shape of a record and its preparation are public"
        + (f": {'; '.join(public.preparation)}." if public.preparation else "."),
    ]
    if public.counts_measured:
        lines.append("Class sizes were measured with noise; that answer is in the table above.")
    else:
        lines.append(
            "The class sizes "
            f"({', '.join(map(str, public.sizes))}) are declared public; inclusion probabilities "
            "derived from them are the same for neighbouring datasets."
        )
    if public.labels == "public":
        lines.append("Which class a record belongs to is public; what is protected is the record.")
    lines.append(
        "The machine that made the release, its random number source and its memory were not "
        "observed while it ran; running time is not protected."
    )
    return tuple(lines)


def _event_row(event: Event) -> str:
    inclusion = (
        "every record"
        if event.sampling_rate is None
        else f"each record with probability {event.sampling_rate:.5g}"
    )
    per_class = ", one answer a class" if event.per_class else ""
    return (
        f"| {event.name}{per_class} | {event.times} | {inclusion} | {event.noise_multiplier:.6g} | "
        f"{event.bound:.6g} | {event.unit} |"
    )


def _factor(epsilon: float) -> str:
    """Write e to the epsilon, however large or near to one, rounded up: it is a bound."""
    if epsilon >= 700:
        return f"1e+{math.ceil(epsilon / math.log(10))}"
    value = math.exp(epsilon)
    if value >= 1e6 or epsilon < 1e-9:
        return f"{value:.3g}"
    tells = value - 1 if value < 2 else value
    step = min(1.0, 10.0 ** (math.floor(math.log10(tells)) - 2))
    return f"{math.ceil(value / step) * step:,.10g}"


def show_number(value: float) -> str:
    """Write a number, or that it is infinite."""
    return "infinite (not private)" if math.isinf(value) else f"{value:.6g}"


def show_budget(budget: Budget) -> str:
    """Write a budget, or that there is none."""
    return "no limit" if math.isinf(budget.epsilon) else str(budget)


def _plain(value: float) -> float | str:
    return "inf" if math.isinf(value) else value


def describe_events(events: Sequence[Event]) -> str:
    """Write events on one line."""
    return "; ".join(event.describe() for event in events)
