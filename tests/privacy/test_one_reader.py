"""Private records are read in one file. Checked on the syntax trees of the whole package."""

from __future__ import annotations

import ast
from pathlib import Path

import understudy

PACKAGE = Path(understudy.__file__).parent
PRIVATE_ATTRIBUTES = {"_records", "_images", "_labels", "_digests", "_members", "_states"}


def modules() -> list[tuple[str, ast.Module]]:
    return [
        (str(path.relative_to(PACKAGE)), ast.parse(path.read_text()))
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


def test_only_the_gate_touches_records() -> None:
    offenders = [
        f"{name}:{node.lineno} {node.attr}"
        for name, tree in modules()
        if name != "privacy/gate.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE_ATTRIBUTES
    ]
    assert offenders == []


def test_nobody_pickles() -> None:
    offenders = []
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names]
                names.append(getattr(node, "module", "") or "")
                if {"pickle", "dill", "joblib", "shelve"} & set(names):
                    offenders.append(f"{name}:{node.lineno}")
            if isinstance(node, ast.Attribute) and ast.unparse(node) in {
                "torch.load",
                "torch.save",
            }:
                offenders.append(f"{name}:{node.lineno}")
    assert offenders == []


def test_secret_randomness_is_drawn_in_the_core_alone() -> None:
    """Nothing outside privacy/ makes noise secretly, and privacy/ never uses a seedable source."""
    for name, tree in modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            text = ast.unparse(node)
            if name.startswith("privacy/"):
                assert not text.startswith(("torch.rand", "np.random", "random.")), (
                    f"{name}:{node.lineno} draws from a seedable source"
                )
            else:
                assert text != "torch.manual_seed", f"{name}:{node.lineno} seeds globally"
