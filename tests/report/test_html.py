"""The page: self-contained, valid, escaped, readable in both themes; and the Markdown."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.report.samples import NASTY
from understudy.errors import ReleaseError, UsageError
from understudy.report import Entry, gather, render_html, render_markdown, write
from understudy.report.html import _environment

VOID = {"meta", "link", "img", "br", "hr", "input"}
ENTRIES = ("entry", "nasty", "open_entry", "table_entry", "several")


class Page(HTMLParser):
    """Read a page: balanced tags, every attribute, every text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.note(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.note(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"<{tag}> has an attribute twice: {names}"
        self.tags.append((tag, dict(attrs)))

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def rendered(request: pytest.FixtureRequest, name: str) -> str:
    """Render a page once for all tests that read it."""
    if name not in PAGES:
        entries = request.getfixturevalue(name)
        PAGES[name] = render_html(gather(entries if isinstance(entries, list) else [entries]))
    return PAGES[name]


PAGES: dict[str, str] = {}


@pytest.mark.parametrize("name", ENTRIES)
def test_the_page_is_valid(request: pytest.FixtureRequest, name: str) -> None:
    page = Page(rendered(request, name))
    ids = Counter(attributes["id"] for _, attributes in page.tags if "id" in attributes)
    assert [name for name, count in ids.items() if count > 1] == []
    for tag, attributes in page.tags:
        wanted = [*(attributes.get("aria-labelledby") or "").split()]
        if (attributes.get("href") or "").startswith("#"):
            wanted.append((attributes["href"] or "")[1:])
        wanted += re.findall(r"url\(#([^)]+)\)", str(attributes.get("clip-path")))
        assert all(place in ids for place in wanted), f"<{tag}> points at nothing: {wanted}"


@pytest.mark.parametrize("name", ENTRIES)
def test_the_page_loads_nothing(request: pytest.FixtureRequest, name: str) -> None:
    text = rendered(request, name)
    for tag, attributes in Page(text).tags:
        for key, value in attributes.items():
            if key in ("src", "href", "xlink:href", "action", "poster", "srcset", "data"):
                assert (value or "").startswith(("#", "data:")), f"<{tag} {key}={value!r}>"
            assert not re.search(r"url\((?!#)", value or ""), f"<{tag} {key}={value!r}>"
            assert not key.startswith("on")
    for part in re.findall(r"<(?:style|script)>(.*?)</(?:style|script)>", text, re.DOTALL):
        assert not re.search(r"https?:|@import|url\((?!#)|\bfetch\(|XMLHttpRequest|import\(", part)


def test_the_page_forbids_loading_and_foreign_scripts(request: pytest.FixtureRequest) -> None:
    text = rendered(request, "entry")
    policy = next(
        attributes["content"] or ""
        for attributes in Page(text).named("meta")
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 1
    wanted = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{wanted}'" in policy
    assert "default-src 'none'" in policy


def test_every_text_is_escaped(request: pytest.FixtureRequest) -> None:
    text = rendered(request, "nasty")
    page = Page(text)
    assert {tag for tag, _ in page.tags} & {"marquee", "u", "s", "i"} == set()
    assert len(page.named("script")) == 1
    assert all((image["src"] or "").startswith("data:") for image in page.named("img"))
    told = "".join(page.texts)
    for name in (*NASTY, "</title>", "{{ 7 * 7 }}", "<marquee>", "<u>net</u>", "<s>ceiling</s>", "<em>told</em>",
        "<a href=//x.example>", "<b>more was asked</b>", "<img src=x onerror=alert(2)>",
    ):  # fmt: skip
        assert name in told, name
    assert "\x00" not in text
    assert "\x1b" not in text
    assert "</title><script>alert(1)</script>" in told


def test_the_charts_keep_every_name(request: pytest.FixtureRequest) -> None:
    text = rendered(request, "nasty")
    charts = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    for name in ("$x^2$", "猫", "{{ 7 * 7 }}", "url(#p)"):
        assert name in "".join(Page(charts).texts)
    assert "x" * 60 not in "".join(re.findall(r"<text.*?</text>", charts, re.DOTALL))


def test_long_names_are_told_apart_in_charts(several: list[Entry]) -> None:
    """Releases of one family differ at the end of their names."""
    long = "department-of-radiology-stand-in-of-2026"
    entries = [dataclasses.replace(e, title=f"{long}-{i}") for i, e in enumerate(several)]
    page = Page(render_html(gather(entries)))
    shortened = [text for text in page.texts if "…" in text]
    assert len(shortened) == len(set(shortened)) == len(entries)
    assert all(text.endswith(f"2026-{i}") for i, text in enumerate(shortened))


def test_a_comparison_has_a_table_of_facts_and_one_of_accuracies(several: list[Entry]) -> None:
    """Side by side in one table they would be wider than paper."""
    text = render_html(gather(several))
    facts, accuracies = re.findall(r"<table>.*?</table>", text, flags=re.DOTALL)[:2]
    assert "ε with earlier runs" in facts and "ConvNet" not in facts
    assert "ConvNet" in accuracies and "±" in accuracies
    for entry in several:
        assert entry.title in facts and entry.title in accuracies


def test_what_is_said_is_there(request: pytest.FixtureRequest, entry: Entry) -> None:
    told = " ".join("".join(Page(rendered(request, "entry")).texts).split())
    statement = entry.release.statement
    for words in (
        statement.paragraph(),
        f"{statement.epsilon:.4g}",
        statement.fingerprint,
        statement.ledger_line,
        "sum of a group",
        "prices do not add up",
        "what had been spent at each step",
        "rests on this: Gaussian noise",
        "What an attacker could gain",
        "The ledger so far",
        "first run on these records",
        "full real data",
        "fifty real records",
        "read openly, so the guarantee does not cover them",
        "Fréchet distance (not FID)",
        "real against real",
        "prove that epsilon is at least 0.25",
        "were held out (digits of another school)",
        "Not covered by the guarantee is what this page says of real records: Accuracy was",
        "Not all of its figures are covered by a guarantee",
        "Gaussian noise",
        "95 % interval",
        "unknown: one seed",
        'load_file("digits-release/synthetic.safetensors")',
        "images_per_class",
        *statement.assumptions,
        *statement.departures,
    ):
        assert words in told, words
    assert "NOT PRIVATE" not in told


def test_a_page_of_the_release_alone_says_so(request: pytest.FixtureRequest) -> None:
    text = rendered(request, "open_entry")
    assert "never from the private records" in text
    assert "Not covered by the guarantee" not in text


def test_a_release_without_noise_is_loud(request: pytest.FixtureRequest) -> None:
    text = rendered(request, "open_entry")
    assert 'class="alarm"' in text
    assert "<strong>NOT PRIVATE</strong>" in text
    assert "Nothing bounds it" in text
    assert "attack-title" not in text


def test_what_was_not_measured_is_said(request: pytest.FixtureRequest) -> None:
    text = rendered(request, "open_entry")
    assert "<b>Not measured.</b>" in text
    assert "understudy evaluate RELEASE --test DATA" in text
    assert "--fidelity</code> measures" in text
    assert "understudy audit --release RELEASE" in text


def test_a_failed_audit_is_loud(request: pytest.FixtureRequest, nasty: Entry) -> None:
    assert "<strong>The audit failed</strong>" in rendered(request, "nasty")
    assert "**FAILED**" in render_markdown(gather([nasty]))
    assert "The audit failed" not in rendered(request, "entry")


def test_every_image_and_chart_is_named(request: pytest.FixtureRequest) -> None:
    text = rendered(request, "several")
    page = Page(text)
    tiles = [image for image in page.named("img") if image["src"] != "data:,"]
    assert len(tiles) == 50 + 50 + 100 + 50
    assert all(re.match(r"Synthetic image \d+ of class \d", image["alt"] or "") for image in tiles)
    indices = [b["data-index"] for b in page.named("button") if b.get("class") == "tile"]
    assert indices == [str(place) for place in range(len(tiles))]
    charts = page.named("svg")
    assert charts
    assert all(c["role"] == "img" and c["aria-labelledby"] for c in charts)
    for title, told in re.findall(r"<title id=[^>]*>(.*?)</title><desc[^>]*>(.*?)</desc>", text):
        assert title
        assert told


def test_pictures_are_the_released_ones(entry: Entry) -> None:
    assert entry.synthetic is not None
    pixels = entry.synthetic.pixels().numpy()
    section = gather([entry]).sections[0]
    uri = section.groups[3].pictures[2].uri
    picture = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
    index = int(np.flatnonzero(entry.synthetic.labels.numpy() == 3)[2])
    assert np.array_equal(np.asarray(picture), pixels[index, 0])


@pytest.mark.parametrize("name", ENTRIES)
def test_headings_do_not_skip_a_level(request: pytest.FixtureRequest, name: str) -> None:
    levels = [int(tag[1]) for tag, _ in Page(rendered(request, name)).tags if tag in HEADINGS]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


HEADINGS = {f"h{level}" for level in range(1, 7)}


# Colours


def palettes() -> dict[str, dict[str, str]]:
    style = str(_environment(autoescape=True).get_template("report.css").render())
    blocks = re.findall(r"color-scheme: (light|dark);(.*?)\}", style, re.DOTALL)
    assert [name for name, _ in blocks] == ["light", "dark", "light", "dark", "light"]
    return {
        name: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for name, block in blocks[:2]
    }


def luminance(rgb: tuple[float, ...]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_contrast(theme: str) -> None:
    colours = {name: rgb(value) for name, value in palettes()[theme].items()}
    for text, ground in (
        ("ink", "paper"), ("muted", "paper"), ("link", "paper"), ("ink", "panel"), ("ink", "note"),
        ("alarm-ink", "alarm"), ("c2", "paper"),
    ):  # fmt: skip
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for series in ("c1", "c2", "c3", "c4", "c5", "c6"):
        assert contrast(colours[series], colours["paper"]) >= 3, series
    # A number on the darkest shade of a confusion matrix.
    shade = tuple((a + b) / 2 for a, b in zip(colours["c1"], colours["paper"], strict=True))
    assert contrast(colours["ink"], shade) >= 4.5


def test_charts_take_the_colours_of_the_theme(request: pytest.FixtureRequest) -> None:
    charts = "".join(re.findall(r"<svg.*?</svg>", rendered(request, "several"), re.DOTALL))
    left = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]+)", charts))
    assert left == set()
    assert "var(--c1)" in charts
    assert "var(--ink)" in charts
    assert set(re.findall(r"var\(--([\w-]+)\)", charts)) <= set(palettes()["light"])


# Writing


def test_three_files_are_written_whole(entry: Entry, tmp_path: Path) -> None:
    report = gather([entry])
    page = write(report, tmp_path / "new" / "folder")
    assert page == tmp_path / "new" / "folder" / "report.html"
    assert sorted(path.name for path in page.parent.iterdir()) == [
        "report.html", "report.json", "report.md",
    ]  # fmt: skip
    assert page.read_text("utf-8") == render_html(report)
    assert json.loads(page.with_suffix(".json").read_text("utf-8")) == report.to_json()
    assert write(report, page.parent, name="again").name == "again.html"


def test_nothing_half_written_stays(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = gather([entry])
    page = write(report, tmp_path)
    before = page.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ReleaseError, match="No space left"):
        write(dataclasses.replace(report, title="other"), tmp_path)
    assert page.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("name", ["", "a/b", "../up"])
def test_a_name_is_a_name(entry: Entry, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="not a plain file name"):
        write(gather([entry]), tmp_path, name=name)


def test_the_page_is_the_same_every_time(entry: Entry) -> None:
    report = gather([entry])
    assert render_html(report) == render_html(report)


# Markdown


@pytest.mark.parametrize("name", ENTRIES)
def test_markdown_tables_are_whole(request: pytest.FixtureRequest, name: str) -> None:
    entries = request.getfixturevalue(name)
    text = render_markdown(gather(entries if isinstance(entries, list) else [entries]))
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(blocks) >= 5
    for block in blocks:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1, block
        assert re.fullmatch(r"\|( -+:? \|)+ ?", block.splitlines()[1]), block
    assert "\n\n\n" not in text
    assert text.count("```") % 2 == 0


def test_markdown_says_the_same(entry: Entry) -> None:
    text = render_markdown(gather([entry]))
    statement = entry.release.statement
    for words in (
        f"{statement.epsilon:.4g}",
        statement.fingerprint,
        "Every record is clipped",
        "ConvNet, DM protocol",
        "full real data",
        "fifty real records",
        "Fréchet distance (not FID)",
        "prove epsilon at least 0.25",
        "load_file(",
        "What the guarantee rests on",
    ):
        assert words in text, words
    assert "NOT PRIVATE" not in text


def test_markdown_is_loud_too(open_entry: Entry) -> None:
    text = render_markdown(gather([open_entry]))
    assert "> **NOT PRIVATE.**" in text
    assert "**Not measured.**" in text


def test_markdown_is_escaped(nasty: Entry) -> None:
    text = re.sub(r"```.*?```", "", render_markdown(gather([nasty])), flags=re.DOTALL)
    assert "<" not in text.replace("&lt;", "")
    assert "one \\| two" in text
