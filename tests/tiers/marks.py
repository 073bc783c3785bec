"""What pytest is told of the tests that it has collected: their tier, and which of them share a process."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.tiers.choice import Case, chosen

SHARED = ("ceph", "etcd")
"""Fixtures of a session that take seconds to start. All tests that use one run in one process of pytest's."""


def mark(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves out, keep together what shares a fixture, and put slow tests first."""
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in ("slow", "thorough")))
    files = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function):
            if any(item.get_closest_marker(name) for name in ("processes", "turns")):
                files[item.path].append(item)
            if group := _group(item):
                item.add_marker(pytest.mark.xdist_group(group))
    for functions in files.values():
        names = chosen(_case(item) for item in functions)
        for item in functions:
            if item.nodeid not in names:
                item.add_marker(pytest.mark.thorough)


def _case(item: pytest.Function) -> Case:
    skipped = any(mark.args[:1] == (True,) for mark in item.iter_markers("skipif"))
    runs = not skipped and item.get_closest_marker("thorough") is None
    return Case(item.nodeid, item.originalname, tuple(sorted(_indices(item).items())), runs)


def _indices(item: pytest.Function) -> dict[str, int]:
    """Which of its values each parameter has."""
    return item.callspec.indices if hasattr(item, "callspec") else {}


def _group(item: pytest.Function) -> str:
    """Tests that use a fixture of their own module run in one process: what it makes is made once."""
    definitions = item._fixtureinfo.name2fixturedefs
    params = item.callspec.params if hasattr(item, "callspec") else {}
    for name in SHARED:
        if name in definitions or params.get("place") == name:
            return name
    file = item.nodeid.partition("::")[0]
    own = [name for name, (*_, last) in definitions.items() if last.scope == "module" and last.baseid == file]
    indices = _indices(item)
    return "-".join([file, *(str(indices[name]) for name in own if name in indices)]) if own else ""
