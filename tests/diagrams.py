"""Diagrams of state machines: rows "before → after   when", in a docstring and in docs/architecture.md.

What stands after the arrow is the next state, or the error or the decision with which the machine ends.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence

import pytest

_LINE = re.compile(r"^\s*(?:\w+ {2,})?\w+ → \w+ +\S")


def rows(machine: object) -> list[str]:
    """The changes in the diagram of a class or a module, such as "FREE → PROMISED"."""
    return re.findall(r"\b\w+ → \w+\b", "\n".join(blocks(str(machine.__doc__))))


def states(machine: object) -> set[str]:
    """The states in its diagram that are written in capitals, as the members of an Enum are."""
    return {name for row in rows(machine) for name in row.split(" → ") if name.isupper()}


def cases(witnesses: Mapping[str, Sequence[object]]) -> list[tuple[str, int]]:
    """The numbers of the witnesses for each row."""
    return [(row, number) for row, ones in witnesses.items() for number in range(len(ones))]


def blocks(text: str) -> list[str]:
    """The diagrams in a text, as they stand in the docs."""
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if _LINE.match(line):
            found[-1].append(line.rstrip().replace("`", ""))
        elif found[-1]:
            found.append([])
    return [textwrap.dedent("\n".join(block)) for block in found if len(block) > 1]


def watch(monkeypatch: pytest.MonkeyPatch, machine: type, attribute: str = "state") -> list[str]:
    """Note, in the order of time, what leads from one state to the next in each object of a class."""
    found: list[str] = []

    def note(self: object, after: object) -> None:
        before = self.__dict__.get(attribute, after)
        if before is not after:
            found.append(f"{before.name} → {after.name}")  # type: ignore[attr-defined]
        self.__dict__[attribute] = after

    monkeypatch.setattr(machine, attribute, property(lambda self: self.__dict__[attribute], note), raising=False)
    return found
