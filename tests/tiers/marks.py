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
            if item.get_closest_marker("processes") is not None:
                files[item.path].append(item)
            if group := _group(item):
                item.add_marker(pytest.mark.xdist_group(group))
    for functions in files.values():
        names = chosen(_case(item) for item in functions)
        for item in functions:
            if item.nodeid not in names and item.get_closest_marker("each_case") is None:
                item.add_marker(pytest.mark.thorough)


def _case(item: pytest.Function) -> Case:
    indices = item.callspec.indices if hasattr(item, "callspec") else {}
    skipped = any(mark.args[:1] == (True,) for mark in item.iter_markers("skipif"))
    runs = not skipped and item.get_closest_marker("thorough") is None
    return Case(item.nodeid, item.originalname, tuple(sorted(indices.items())), runs)


def _group(item: pytest.Function) -> str:
    """Tests that use a fixture of their own module run in one process: what it makes is made once."""
    definitions = item._fixtureinfo.name2fixturedefs
    callspec = getattr(item, "callspec", None)
    for name in SHARED:
        if name in definitions or (callspec is not None and callspec.params.get("place") == name):
            return name
    file = item.nodeid.partition("::")[0]
    own = [name for name, (*_, last) in definitions.items() if last.scope == "module" and last.baseid == file]
    indices = callspec.indices if callspec is not None else {}
    return "-".join([file, *(str(indices[name]) for name in own if name in indices)]) if own else ""
