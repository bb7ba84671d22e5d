"""What the documentation points at exists: pages, sections, files, commands' fields and tests."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from understudy.methods import BUILT_IN, TRAINERS, mechanism_named

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])
CODE = sorted(path for folder in ("src", "benchmarks") for path in ROOT.glob(f"{folder}/**/*.py"))
METHOD_PAGES = sorted(ROOT.glob("docs/methods/*.md"))
BASES = (".", "docs", "src/understudy", "tests")
"""Where a file named on a page may lie: `privacy/gate.py` is src/understudy/privacy/gate.py."""

MADE = ("benchmarks/results/", "docs/figures/continual.png")
"""Files that a command on the page writes. They need not be there."""
PUT_OFF = re.compile(r"\b(?:TODO|TBD|FIXME|XXX|TOLD|MEASURED|FP\d+)\b")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=named)


@cache
def prose(page: Path) -> str:
    """Return a page without blocks of code, where brackets mean something else."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^(?: {4}|\t).*$", "", text, flags=re.MULTILINE)


@cache
def sections(page: Path) -> set[str]:
    """Return what a link may point at: headings, as GitHub names them, and explicit anchors."""
    found = set(re.findall(r'<a id="([^"]+)">', prose(page)))
    for heading in re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE):
        found.add(re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-"))
    return found


def links(page: Path) -> list[str]:
    """Return the targets of a page's links and pictures that are not on the web."""
    found = re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", prose(page))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


@EVERY_PAGE
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        target, _, section = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{named(page)} links to {link}"
        assert file.is_relative_to(ROOT), f"{named(page)} links out of the repository: {link}"
        if section:
            assert section in sections(file), f"{named(page)} links to {link}"


@EVERY_PAGE
def test_every_file_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    paths = re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|md|png|jsonl))`", text)
    paths += re.findall(r"python ((?:benchmarks|tests)/[\w./-]+\.py)", text)
    for path in paths:
        if not path.startswith(MADE):
            assert any((ROOT / base / path).exists() for base in (*BASES, page.parent)), path


@pytest.mark.parametrize("file", [path for path in CODE if "docs/" in path.read_text()], ids=named)
def test_every_page_that_code_names_is_there(file: Path) -> None:
    for path in re.findall(r"\bdocs/[\w./-]+\.(?:md|png)", file.read_text()):
        assert path.startswith(MADE) or (ROOT / path).exists(), f"{named(file)} names {path}"


def test_every_test_a_page_names_is_there() -> None:
    tests = "\n".join(path.read_text() for path in ROOT.glob("tests/**/*.py"))
    defined = set(re.findall(r"def (test_\w+)", tests))
    for page in PAGES:
        stated = set(re.findall(r"`(test_\w+)`", page.read_text()))
        assert stated <= defined, f"{named(page)} names {stated - defined}"


def test_every_method_in_the_readme_has_its_page() -> None:
    """And every registered method is in the table, and every page in docs/methods."""
    rows = re.findall(
        r"^\| \[`([\w-]+)`\]\(([\w./-]+)\) \|", (ROOT / "README.md").read_text(), re.M
    )
    table = dict(rows)
    assert len(table) == len(rows)
    assert set(table) == {kind.name for kind in (*BUILT_IN, *TRAINERS)}
    assert {ROOT / page for page in table.values()} == set(METHOD_PAGES)
    for name, page in table.items():
        assert name == Path(page).stem or f"`{name}`" in (ROOT / page).read_text(), page


@pytest.mark.parametrize("page", METHOD_PAGES, ids=named)
def test_the_fields_a_page_sets_are_fields_of_the_method_it_names(page: Path) -> None:
    """Commands continued over several lines with a backslash count as one."""
    text = page.read_text().replace("\\\n", " ")
    for line in text.splitlines():
        command = re.search(r"understudy (?:synth|train|plan) .*", line)
        if command is None:
            continue
        given = re.search(r"(?:--method|-m) ([\w-]+)", command[0])
        default = "dp-sgd" if "understudy train" in command[0] else "whole-set"
        kind = mechanism_named(given[1] if given else default)
        for field in re.findall(r"--set '?(\w+)=", command[0]):
            assert field in kind.describe_fields(), f"{named(page)}: {kind.name} has no {field}"
        for preset in re.findall(r"--preset ([\w-]+)", command[0]):
            assert preset in kind.presets, f"{named(page)}: {kind.name} has no preset {preset}"


@EVERY_PAGE
def test_no_page_waits_for_its_figures(page: Path) -> None:
    assert not PUT_OFF.search(prose(page))


@pytest.mark.parametrize("kind", [*BUILT_IN, *TRAINERS], ids=lambda kind: kind.name)
def test_presets_say_where_they_come_from(kind: type) -> None:
    for name, preset in kind.presets.items():  # type: ignore[attr-defined]
        assert len(preset.told.split()) > 5 and not PUT_OFF.search(preset.told), name
