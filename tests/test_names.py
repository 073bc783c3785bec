"""No two things of the engine have one name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
APART = {"testing", "demo", "report", "audit"}
"""Packages that name what they show or check as the engine does."""


def sources() -> list[Path]:
    """Of the engine."""
    package = ROOT / "ef_common"
    return [path for path in package.rglob("*.py") if not APART.intersection(path.relative_to(package).parts)]


def test_public_classes_have_names_of_their_own() -> None:
    places = defaultdict(list)
    for path in sources():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
