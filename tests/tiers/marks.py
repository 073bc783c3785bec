"""What pytest is told of the tests that it has collected: their tier, and which of them share a process."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.tiers.choice import Case, chosen

COSTS = {"keras-tensorflow": 2.0, "keras-torch": 1.2, "lightning-horovod": 1.2}
"""CPU time of a worker of these hosts, where one of Lightning takes 1: TensorFlow traces each step anew in each."""
SHARED = ("ceph", "etcd")
"""Fixtures of a session that take seconds to start. All tests that use one run in one process of pytest's."""

COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""All tests that pytest has found, with their marks, also those that it does not run."""


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
    cost = COSTS.get(str(_params(item).get("host")), 1.0)
    return Case(item.nodeid, item.originalname, tuple(sorted(_indices(item).items())), runs, cost)


def _indices(item: pytest.Function) -> dict[str, int]:
    """Which of its values each parameter has."""
    return item.callspec.indices if hasattr(item, "callspec") else {}


def _params(item: pytest.Function) -> dict[str, object]:
    """The values of its parameters."""
    return item.callspec.params if hasattr(item, "callspec") else {}


def _group(item: pytest.Function) -> str:
    """Tests that use a fixture of their own module run in one process: what it makes is made once."""
    definitions = item._fixtureinfo.name2fixturedefs
    for name in SHARED:
        if name in definitions or _params(item).get("place") == name:
            return name
    file = item.nodeid.partition("::")[0]
    own = [name for name, (*_, last) in definitions.items() if last.scope == "module" and last.baseid == file]
    indices = _indices(item)
    return "-".join([file, *(str(indices[name]) for name in own if name in indices)]) if own else ""
