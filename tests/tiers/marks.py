"""What pytest is told of the tests that it has collected: their tier, and which of them share a process."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.tiers.choice import Case, Value, chosen, covering
from tests.tiers.places import is_of_launchers

COSTS = {
    "keras-tensorflow": 2.0,
    "tensorflow": 2.0,
    "keras-jax": 4.0,
    "jax": 4.0,
    "keras-torch": 1.2,
    "lightning-horovod": 1.2,
}
"""CPU time of a worker of these hosts and backends, where others take 1: TensorFlow traces steps in each process, and
JAX cannot be forked."""
PLATFORMS = ("host", "backend", "engine")
"""Parameters that say on what the same is tested."""
SERVERS = ("keras-tensorflow", "keras-torch")
"""Hosts whose forkservers take longest to start."""
SHARED = ("ceph", "etcd")
"""Fixtures of a session that take seconds to start. All tests that use one run in one process of pytest's."""

COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""All tests that pytest has found, with their marks, also those that it does not run."""


def mark(items: list[pytest.Item]) -> None:
    """Mark what is left out, keep together what shares a fixture or a server, and put slow tests first."""
    functions = [item for item in items if isinstance(item, pytest.Function)]
    files = defaultdict(list)
    for item in functions:
        if item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.thorough)
        if any(item.get_closest_marker(name) for name in ("processes", "turns")):
            files[item.path].append(item)
    for together in files.values():
        names = chosen(_case(item, runs=_runs(item) and not item.get_closest_marker("thorough")) for item in together)
        kept = covering((_case(item, runs=_runs(item)) for item in together), names, PLATFORMS)
        for item in together:
            if item.nodeid not in names:
                item.add_marker(pytest.mark.thorough)
            if item.nodeid not in kept:
                item.add_marker(pytest.mark.exhaustive)
    for item in functions:
        if item.get_closest_marker("thorough") and is_of_launchers(item.nodeid.partition("::")[0]):
            item.add_marker(pytest.mark.launchers)
    first = set()
    for item in functions:
        if group := _group(item):
            item.add_marker(pytest.mark.xdist_group(group))
        if group in SERVERS or any(item.get_closest_marker(name) for name in ("slow", "thorough")):
            first.add(item)
    items.sort(key=lambda item: item not in first)


def _case(item: pytest.Function, *, runs: bool) -> Case:
    params = _params(item)
    cost = max((COSTS.get(value, 1.0) for value in params.values() if isinstance(value, str)), default=1.0)
    return Case(item.nodeid, item.originalname, _values(item), runs, cost)


def _runs(item: pytest.Function) -> bool:
    return not any(mark.args[:1] == (True,) for mark in item.iter_markers("skipif"))


def _values(item: pytest.Function) -> tuple[Value, ...]:
    """What each parameter has; those of one row of a `parametrize`, platforms left out, together."""
    params = _params(item)
    rows = [[name for name in _argnames(mark) if name not in PLATFORMS] for mark in item.iter_markers("parametrize")]
    alone = [[name] for name in params if all(name not in row for row in rows)]
    return tuple(("-".join(row), repr([params[name] for name in row])) for row in sorted([*rows, *alone]) if row)


def _argnames(mark: pytest.Mark) -> list[str]:
    """Names of the parameters of a `parametrize`, however they are written."""
    names = mark.args[0] if mark.args else mark.kwargs["argnames"]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _indices(item: pytest.Function) -> dict[str, int]:
    """Which of its values each parameter has."""
    return item.callspec.indices if hasattr(item, "callspec") else {}


def _params(item: pytest.Function) -> dict[str, object]:
    """The values of its parameters."""
    return item.callspec.params if hasattr(item, "callspec") else {}


def _group(item: pytest.Function) -> str:
    """Name of what the test shares with others, which run in the same process for it: it is made once."""
    definitions = item._fixtureinfo.name2fixturedefs
    for name in SHARED:
        if name in definitions or _params(item).get("place") == name:
            return name
    return _server(item) or _module(item)


def _server(item: pytest.Function) -> str:
    """The forkserver of a Keras, if it is a test of `make test`: all others would be too many for one process."""
    if item.get_closest_marker("thorough") or not item.get_closest_marker("processes"):
        return ""
    values = [value for value in _params(item).values() if isinstance(value, str)]
    if "tests/keras/" in item.nodeid:
        values = [f"keras-{value}" for value in values]
    return next((server for server in SERVERS if server in values), "")


def _module(item: pytest.Function) -> str:
    """Its file, with the cases of the file's own fixtures, if it uses such."""
    file = item.nodeid.partition("::")[0]
    definitions, indices = item._fixtureinfo.name2fixturedefs, _indices(item)
    own = [name for name, (*_, last) in definitions.items() if last.scope == "module" and last.baseid == file]
    return "-".join([file, *(str(indices[name]) for name in own if name in indices)]) if own else ""
