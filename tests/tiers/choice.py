"""Which cases of parametrized tests with real processes `make test` and `make test-all` run.

`make test` runs one case of each test, and the cases of a file take turns. `make test-all` runs
cases that together have each value of each parameter, on two platforms.
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


def covering(cases: Iterable[Case], first: Collection[str], platforms: Collection[str] = ()) -> set[str]:
    """Names of the cases that `make test-all` runs, the chosen ones `first` among them.

    Of each test, they have each value of each parameter, but of a platform (a framework, an engine) only two values:
    the tests of a file take turns, as with `chosen`. Among cases that have as many values which no other one has yet,
    those are taken whose pairs of values the file has least often so far. A value that can only be had in a case that
    would be skipped is shown by one such case.
    """
    turns: Counter[Value] = Counter()
    pairs: Counter[tuple[Value, Value]] = Counter()
    names = set()

    def take(case: Case) -> None:
        names.add(case.name)
        turns.update(case.values)
        pairs.update(combinations(case.values, 2))

    for alternatives in _of_each_function(cases):
        runnable = [case for case in alternatives if case.runs]
        taken = [case for case in alternatives if case.name in first]
        for case in taken:
            take(case)
        while wanted := _wanted(runnable, taken, platforms):

            def rank(case: Case, wanted: Collection[Value] = wanted) -> tuple[float, ...]:
                new = [value for value in case.values if value in wanted]
                number = sum(value[0] not in platforms for value in new)
                return -number, -len(new), case.cost * (1 + _times(case, turns)), _met(case, pairs)

            best = min(runnable, key=rank)
            taken.append(best)
            take(best)
        shown = {value for case in runnable for value in case.values}
        for case in alternatives:
            if not shown.issuperset(case.values):
                shown.update(case.values)
                take(case)
    return names


def _wanted(runnable: Sequence[Case], taken: Sequence[Case], platforms: Collection[str]) -> set[Value]:
    """Values that one more case should have."""
    had = {value for case in taken if case.runs for value in case.values}
    count = Counter(name for name, _ in had)
    missing = {value for case in runnable for value in case.values} - had
    return {value for value in missing if value[0] not in platforms or count[value[0]] < 2}


def _of_each_function(cases: Iterable[Case]) -> Iterable[list[Case]]:
    functions: dict[str, list[Case]] = {}
    for case in cases:
        functions.setdefault(case.function, []).append(case)
    return functions.values()


def _met(case: Case, pairs: Mapping[tuple[Value, Value], int]) -> int:
    return sum(pairs[pair] for pair in combinations(case.values, 2))
