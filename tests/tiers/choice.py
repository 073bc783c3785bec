"""One case of each parametrized test with real processes for `make test`; the cases of a file take turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Value = tuple[str, object]


@dataclass(frozen=True)
class Case:
    """One case of a parametrized test.

    Attributes:
        name: Of the case.
        function: Name of the test.
        values: Which value each parameter has: (name of the parameter, its number or id).
        runs: Whether it can run here. One that would be skipped represents nothing.
        cost: How much longer it takes than the others.
    """

    name: str
    function: str
    values: Sequence[Value] = field(default_factory=tuple)
    runs: bool = True
    cost: float = 1.0


def chosen(cases: Iterable[Case]) -> set[str]:
    """Names of the cases that represent their tests.

    The tests choose one after the other, each the first case whose values have been chosen least often so far: a case
    that costs twice as much, half as often. So a file with enough tests runs with each framework, each engine, each
    size. The choice depends on the file alone.
    """
    functions: dict[str, list[Case]] = {}
    for case in cases:
        functions.setdefault(case.function, []).append(case)
    turns: Counter[Value] = Counter()
    names = set()
    for alternatives in functions.values():
        candidates = [case for case in alternatives if case.runs] or alternatives[:1]
        best = min(candidates, key=lambda case: case.cost * (1 + _times(case, turns)))
        turns.update(best.values)
        names.add(best.name)
    return names


def _times(case: Case, turns: Mapping[Value, int]) -> int:
    return sum(turns[value] for value in case.values)
