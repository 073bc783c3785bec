"""What our own sources touch of others' private parts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from ef_common import parts
from ef_common.parts import Part

ROOT = Path(__file__).parents[1]
_PRIVATE = re.compile(r"_[a-z]\w*", re.IGNORECASE)
_OF_TUPLES = {"_replace", "_asdict", "_fields"}


def private_uses(path: Path) -> set[str]:
    """Private names of others that a file touches: as attributes, as texts that name some, and by imports.

    What a class calls by `self` is its own if the same folder defines it somewhere.
    """
    tree, own = _tree(path), _own_names(path.parent)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            if not (_is_own_object(node.value) and node.attr in own):
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found.update(alias.name for alias in node.names if _is_private(alias.name))
    found.update(text for text in _texts(tree) if _is_private(text) and text not in own)
    return found - _OF_TUPLES


def _texts(node: ast.AST) -> Iterator[str]:
    """Texts that stand for themselves: no parts of f-strings, no values of `__slots__`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value
        elif not isinstance(child, ast.JoinedStr):
            yield from _texts(child)


def _is_private(name: str) -> bool:
    return _PRIVATE.fullmatch(name) is not None and not name.startswith("_elasticflow")


def _is_own_object(node: ast.expr) -> bool:
    is_super = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return not is_super and isinstance(node, ast.Name) and node.id in ("self", "cls")


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _own_names(folder: Path) -> frozenset[str]:
    """Names that the sources of a folder define: functions, classes, attributes of `self`, fields."""
    found = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(_tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own_object(node.value):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return frozenset(found)


def shared_names(cls: type, base: type) -> set[str]:
    """Private names by which both a class of ours and a base of others' call something: ours, or theirs?"""
    ours = [c for c in cls.__mro__ if c.__module__.startswith("ef_")]
    names = {name for c in ours for name in vars(c)}
    for c in ours:
        for function in vars(c).values():
            code = getattr(getattr(function, "fget", function), "__code__", None)
            names.update(code.co_names if code is not None else ())
    return {name for name in names if _is_private(name) and (hasattr(base, name) or parts._is_field(base, name))}


def unknown_users(listed: Iterable[Part], folder: Path) -> set[str]:
    """Users of private parts whom the sources do not know."""
    return {user for part in listed for user in part.user.split()} - _own_names(folder)


def releases_of(package: str) -> tuple[str, str]:
    """The oldest release of a package that `pyproject.toml` allows, and the one that the tests are run with."""
    (oldest,) = set(re.findall(rf'"{package}>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    pinned = re.search(rf"^{package}==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if pinned is None:
        raise LookupError(f"constraints.txt pins no {package}")
    return oldest, pinned[1]
