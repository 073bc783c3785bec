"""Which cases of parametrized tests with real processes `make test` and `make test-all` run.

`make test` runs one case of each test, and the cases of a file take turns. `make test-all` runs
cases that together have each value of each parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

Value = tuple[str, object]


@dataclass(frozen=True)
class Case:
    """One case of a parametrized test.

    Attributes:
        name: Of the case.
        function: Name of the test.
        values: Which value each parameter has: (name of the parameter, the value). Parameters that are given in one
            row count as one.
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
    turns: Counter[Value] = Counter()
    names = set()
    for alternatives in _of_each_function(cases):
        candidates = [case for case in alternatives if case.runs] or alternatives[:1]
        best = min(candidates, key=lambda case: case.cost * (1 + _times(case, turns)))
        turns.update(best.values)
        names.add(best.name)
    return names


def _times(case: Case, turns: Mapping[Value, int]) -> int:
    return sum(turns[value] for value in case.values)


def covering(cases: Iterable[Case], first: Collection[str]) -> set[str]:
    """Names of the cases that have each value of each parameter of their test, the chosen ones `first` among them.

    Of cases that have as many values which no other one has yet, those are taken whose pairs of values the tests of the
    file have least often so far: so each host meets each size, though not in each test. A value that can only be had in
    a case that would be skipped is shown by one such case.
    """
    pairs: Counter[tuple[Value, Value]] = Counter()
    names = set()
    for alternatives in _of_each_function(cases):
        taken = [case for case in alternatives if case.name in first]
        for case in taken:
            pairs.update(combinations(case.values, 2))
        missing = {value for case in alternatives for value in case.values}
        missing -= {value for case in taken if case.runs for value in case.values}
        for candidates in ([c for c in alternatives if c.runs], [c for c in alternatives if not c.runs]):
            left = missing & {value for case in candidates for value in case.values}
            while left:
                best = min(candidates, key=lambda case: (-len(left & set(case.values)), _met(case, pairs), case.cost))
                taken.append(best)
                pairs.update(combinations(best.values, 2))
                left -= set(best.values)
                missing -= set(best.values)
        names.update(case.name for case in taken)
    return names


def _of_each_function(cases: Iterable[Case]) -> Iterable[list[Case]]:
    functions: dict[str, list[Case]] = {}
    for case in cases:
        functions.setdefault(case.function, []).append(case)
    return functions.values()


def _met(case: Case, pairs: Mapping[tuple[Value, Value], int]) -> int:
    return sum(pairs[pair] for pair in combinations(case.values, 2))
