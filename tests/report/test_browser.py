"""The page in a real browser, from disk."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from understudy.report import Entry, gather, write

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

DRIVER = """
const told = [];
const tell = (what, holds) => told.push(`${what}: ${holds ? "yes" : "NO"}`);
const press = (target, key) =>
  target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const zoom = document.getElementById("zoom");
const caption = document.getElementById("zoom-caption");
const picture = document.getElementById("zoom-picture");
const tiles = [...document.querySelectorAll(".tile")];
tell("closed at first", !zoom.open);
tiles[7].click();
tell("a click zooms", zoom.open && caption.textContent === "Class 1, image 3 of 5");
tell("the picture is that one", picture.src === tiles[7].querySelector("img").src);
tell("the picture is large", picture.getBoundingClientRect().width > 200);
tell("pixels stay sharp", getComputedStyle(picture).imageRendering === "pixelated");
press(zoom, "ArrowRight");
tell("an arrow turns the page", caption.textContent === "Class 1, image 4 of 5");
document.getElementById("zoom-before").click();
tell("the button turns back", caption.textContent === "Class 1, image 3 of 5");
zoom.querySelector("form button").click();
tell("it closes", !zoom.open);
tell("one tab stop a class", document.querySelectorAll('.tile[tabindex="0"]').length === 10);
tiles[5].focus();
press(tiles[5], "ArrowRight");
tell("arrows walk the grid", document.activeElement === tiles[6]);
press(tiles[6], "End");
tell("End goes to the last", document.activeElement === tiles[9]);
const before = getComputedStyle(document.body).backgroundColor;
document.getElementById("theme").click();
tell("the theme turns", getComputedStyle(document.body).backgroundColor !== before);
const folded = document.querySelectorAll("details:not([open])").length;
dispatchEvent(new Event("beforeprint"));
tell("paper shows all", folded && !document.querySelector("details:not([open])"));
dispatchEvent(new Event("afterprint"));
tell("and folds again", document.querySelectorAll("details:not([open])").length === folded);
tell("nothing wider than the page", document.documentElement.scrollWidth <= innerWidth);
document.title = "driven";
document.body.append(Object.assign(document.createElement("pre"), {
  id: "told", textContent: told.join("\\n"),
}));
"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser to test in: none of {', '.join(BROWSERS)} is installed")
    return found


def visit(browser: str, url: str, profile: Path, *extra: str) -> tuple[str, list[str]]:
    """Load a page and return its DOM afterwards, and what it said on the console."""
    run = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--disable-background-networking", "--enable-logging=stderr", "--v=0",
            f"--user-data-dir={profile}", *extra, "--dump-dom", url,
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout, re.findall(r"CONSOLE.*", run.stderr)


@pytest.fixture(scope="module")
def page(entry: Entry, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(gather([entry]), tmp_path_factory.mktemp("page"))


def test_an_error_on_the_console_would_be_seen(browser: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text("<!DOCTYPE html><title>x</title><script>nothing()</script>")
    assert visit(browser, broken.as_uri(), tmp_path / "profile")[1]


def test_it_opens_and_zooms(browser: str, page: Path, tmp_path: Path) -> None:
    dom, console = visit(browser, f"{page.as_uri()}#zoom=0", tmp_path / "profile")
    assert console == []
    dialog = re.search(r"<dialog[^>]*>.*?</dialog>", dom, re.DOTALL)
    assert dialog is not None
    assert re.match(r"<dialog[^>]* open", dialog[0])
    assert "Class 0, image 1 of 5" in dialog[0]
    assert 'src="data:image/png;base64,' in dialog[0]
    assert 'alt="Synthetic image 1 of class 0"' in dialog[0]


def test_it_stays_closed_unasked(browser: str, page: Path, tmp_path: Path) -> None:
    dom, console = visit(browser, f"{page.as_uri()}?theme=dark", tmp_path / "profile")
    assert console == []
    assert not re.search(r"<dialog[^>]* open", dom)
    assert re.search(r'<html[^>]* data-theme="dark"', dom)


def test_the_interactive_parts_respond(browser: str, page: Path, tmp_path: Path) -> None:
    text = page.read_text("utf-8")
    # The page's own policy would stop the driver, so this copy goes without it.
    text, removed = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    assert removed == 1
    driven = tmp_path / "driven.html"
    driven.write_text(text.replace("</body>", f"<script>{DRIVER}</script></body>"), "utf-8")
    dom, console = visit(browser, driven.as_uri(), tmp_path / "profile", "--window-size=500,900")
    assert console == []
    told = re.search(r'<pre id="told">(.*?)</pre>', dom, re.DOTALL)
    assert told is not None
    assert [line for line in told[1].splitlines() if not line.endswith(": yes")] == []
    assert len(told[1].splitlines()) == 15


def test_a_comparison_and_hostile_names_open_quietly(
    browser: str, several: list[Entry], nasty: Entry, tmp_path: Path
) -> None:
    page = write(gather([*several, nasty]), tmp_path / "out")
    dom, console = visit(browser, f"{page.as_uri()}#r2-utility", tmp_path / "profile")
    assert console == []
    assert re.search(r'<details class="release" id="r2" open', dom)
    assert not re.search(r'<details class="release" id="r1" open', dom)
