"""Diagrams of state machines: rows "before → after   when", in a docstring and in docs/architecture.md."""

from __future__ import annotations

import re

import pytest


def rows(machine: object) -> list[str]:
    """The changes in the diagram of a class or a module, such as "FREE → PROMISED"."""
    return re.findall(r"\b\w+ → \w+\b", str(machine.__doc__))


def states(machine: object) -> set[str]:
    """The states in its diagram that are written in capitals, as the members of an Enum are."""
    return {name for row in rows(machine) for name in row.split(" → ") if name.isupper()}


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
