"""Each diagram of a state machine stands in docs/architecture.md, too, and has a witness for each of its rows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.diagrams import blocks

ROOT = Path(__file__).parents[1]
DOCS = (ROOT / "docs" / "architecture.md").read_text()


def diagrams() -> Iterator[tuple[str, str]]:
    """Each diagram in the package, and the name of its module or class."""
    for path in sorted((ROOT / "ef_common").rglob("*.py")):
        tree = ast.parse(path.read_text())
        documented = [(path.stem if path.stem != "__init__" else path.parent.name, tree)]
        documented += [(node.name, node) for node in tree.body if isinstance(node, ast.ClassDef)]  # type: ignore[misc]
        for name, node in documented:
            for block in blocks(ast.get_docstring(node) or ""):
                yield name, block


def test_diagrams_in_the_docs_are_those_in_the_code() -> None:
    assert sorted(blocks(DOCS)) == sorted(block for _, block in diagrams())


def test_each_diagram_has_witnesses() -> None:
    """A test compares the rows of the diagram with those for which it has them."""
    held = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        for named in re.findall(r"\brows\((\w+)\) == (?:list|\[)", text):
            alias = re.search(rf"import (\w+) as {named}\b", text) or re.search(
                rf'^{named} = import_module\("[\w.]*?(\w+)"\)', text, re.MULTILINE
            )
            held.add(alias.group(1) if alias else named)
    assert {name for name, _ in diagrams()} == held


def test_enumerations_of_states_are_in_a_diagram() -> None:
    """What is called a state, a stage or a phase, and decides what a machine does."""
    in_rows = {
        name for _, block in diagrams() for row in block.splitlines() for name in re.findall(r"\b[A-Z_]+\b", row)
    }
    missing = []
    for path in sorted((ROOT / "ef_common").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and re.search(r"(State|Stage|Phase)$", node.name):
                members = [one.targets[0] for one in node.body if isinstance(one, ast.Assign)]
                missing += [
                    f"{node.name}.{one.id}" for one in members if isinstance(one, ast.Name) and one.id not in in_rows
                ]
    assert missing == []
