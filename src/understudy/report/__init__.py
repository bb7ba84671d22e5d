"""Show what a release is: one page for people, Markdown and JSON for machines."""

from __future__ import annotations

from understudy.report.content import Entry, Report, gather
from understudy.report.html import render_html, render_json, render_markdown, write

__all__ = [
    "Entry",
    "Report",
    "gather",
    "render_html",
    "render_json",
    "render_markdown",
    "write",
]
