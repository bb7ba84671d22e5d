"""Fixtures: real small releases to report on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.samples import NASTY, audit, ceilings, digits, fidelity, measured, scores, table
from understudy.report import Entry


@pytest.fixture(scope="session", autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep ledgers and keys of these tests to themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNDERSTUDY_STATE", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for ledgers."""
    return tmp_path_factory.mktemp("ledgers")


@pytest.fixture(scope="session")
def entry(folder: Path) -> Entry:
    """Return a private release, with scores and baselines."""
    release, synthetic = measured(digits(), folder / "plain.jsonl")
    return Entry(
        release=release,
        synthetic=synthetic,
        title="Digits at epsilon 1",
        scores={"ConvNet, DM protocol": scores(10), "MLP": scores(10, accuracy=0.7, seeds=1)},
        ceilings=ceilings(10),
        fidelity=fidelity(),
        audit=audit(),
        test="digits of another school",
        baselines={"full real data": 0.97},
        folder=Path("somewhere/of mine/digits-release"),
    )


@pytest.fixture(scope="session")
def nasty(folder: Path) -> Entry:
    """Return a release whose every free text tries to break out of its place."""
    names = (*NASTY, "</title>", "{{ 7 * 7 }}", "\x00\x1b[31m", "</script><!--", "x" * 200)
    release, synthetic = measured(digits(names), folder / "nasty.jsonl")
    return Entry(
        release=dataclasses.replace(
            release,
            recipe={
                "method": "<i>other</i>",
                "configuration": {"<b>": "<img src=https://x.example/>", "widths": [1, 2]},
            },
            statement=dataclasses.replace(release.statement, departures=("<marquee>", "one | two")),
        ),
        synthetic=synthetic,
        title="</title><script>alert(1)</script>",
        scores={"<u>net</u>": scores(10)},
        ceilings=ceilings(10, "<s>real</s>", "<em>told</em>"),
        fidelity=fidelity("<img src=x onerror=alert(2)>"),
        test="<q>test</q>",
        audit=audit(2.0, pool="<a href=//x.example>", findings=["<b>more was asked</b>"]),
        baselines={"<s>ceiling</s>": 0.9},
        folder=Path("/secret/place/rel'\"ease`<x>"),
    )


@pytest.fixture(scope="session")
def open_entry(folder: Path) -> Entry:
    """Return a release without noise."""
    release, synthetic = measured(digits(), folder / "open.jsonl", noise_multiplier=0.0)
    return Entry(release=release, synthetic=synthetic, title="No noise")


@pytest.fixture(scope="session")
def table_entry(folder: Path) -> Entry:
    """Return a release of a table."""
    release, synthetic = measured(table(), folder / "table.jsonl", images_per_class=8)
    return Entry(release=release, synthetic=synthetic, title="People", scores={"forest": scores(2)})


@pytest.fixture(scope="session")
def several(folder: Path, open_entry: Entry) -> list[Entry]:
    """Return releases of the same records in one ledger, and one without noise."""
    data, entries = digits(), []
    cases = ((1.0, 5, 0.7), (0.5, 5, 0.6), (4.0, 10, 0.85))
    for epsilon, images, accuracy in cases:
        release, synthetic = measured(
            data, folder / "several.jsonl", epsilon=epsilon, images_per_class=images
        )
        entries.append(
            Entry(
                release=release,
                synthetic=synthetic,
                title=f"LDPDC, epsilon {epsilon:g}",
                scores={"ConvNet": scores(10, accuracy=accuracy)},
            )
        )
    with_scores = dataclasses.replace(open_entry, scores={"ConvNet": scores(10, accuracy=0.9)})
    return [*entries, with_scores]
