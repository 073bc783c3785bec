"""No two things of the engine and its plugins have one name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
APART = {"testing", "demo", "report", "audit"}
"""Packages that name what they show or check as the engine does."""
ONE_IDEA = {"Fit", "StagedStep"}
"""What two plugins have, or two backends."""


def sources() -> list[Path]:
    """Of the engine and its plugins."""
    packages = [ROOT / name for name in ("ef_common", "ef_lightning", "ef_keras")]
    found = [(package, path) for package in packages for path in package.rglob("*.py")]
    return [path for package, path in found if not APART.intersection(path.relative_to(package).parts)]


def test_public_classes_have_names_of_their_own() -> None:
    places = defaultdict(list)
    for path in sources():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in ONE_IDEA} == {}
