"""Name the files of a release folder."""

from __future__ import annotations

FORMAT = 1
KIND = "understudy release"

MANIFEST = "manifest.json"
SIGNALS = "signals.safetensors"
STATEMENT = "statement.json"
STATEMENT_IN_WORDS = "STATEMENT.md"
RECIPE = "recipe.json"
TENSORS = "synthetic.safetensors"
PARQUET = "synthetic.parquet"
CSV = "synthetic.csv"
SHEET = "contact_sheet.png"
CARD = "README.md"

PREVIEWS_PER_CLASS = 50
SHEET_COLUMNS = 20
SHEET_ROWS = 100
