"""What has come of the peers' tests, held against what is known."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

WAYS = ("alone", "in_a_job", "two")
"""Ways of running with ElasticFlow."""

Passed = Mapping[str, bool]
"""Whether each test has passed, by its name; one that was skipped is not there."""


@dataclass(frozen=True, slots=True)
class Known:
    """A test, or several (`*` stands for anything), that fail in some ways of running, and why."""

    pattern: str
    ways: frozenset[str]
    reason: str

    def fits(self, test: str, way: str) -> bool:
        # Names of tests have brackets, which are no sets of characters here.
        return way in self.ways and fnmatch.fnmatchcase(test, self.pattern.replace("[", "[[]"))


def read_known(text: str) -> list[Known]:
    """The known failures.

    Raises:
        ValueError: A line that is malformed, with its number.

    >>> read_known('''
    ... # alone, in_a_job: It counts calls.
    ... tests/a.py::test_b[*]
    ... ''')[0].reason
    'It counts calls.'
    """
    found: list[Known] = []
    ways: frozenset[str] = frozenset()
    reason = ""
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if line.startswith("##") or not line:
            continue
        if line.startswith("#"):
            named, separator, reason = line[1:].partition(":")
            ways, reason = frozenset(way.strip() for way in named.split(",")), reason.strip()
            if not separator or not reason or not ways.issubset(WAYS):
                raise ValueError(f"line {number}: expected '# alone, in_a_job: a reason'. Received: {line}")
        elif not reason:
            raise ValueError(f"line {number}: a test without a reason. Received: {line}")
        else:
            found.append(Known(line, ways, reason))
    return found


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What has come of the tests of one way of running."""

    passed: Passed
    used: frozenset[str]  # tests that ElasticFlow was put into


def read_outcomes(path: Path, name: Callable[[str], str] = str) -> Outcomes:
    """What the plugin has written.

    Of several records of a test (its teardown, a second try, another worker), none may have failed. One that follows
    another counts only if all do.
    """
    leading: dict[str, bool] = {}
    following: dict[str, bool] = {}
    used: set[str] = set()
    for line in path.read_text().splitlines():
        record = json.loads(line)
        test = name(record["test"])
        passed = following if record.get("follows") else leading
        if record["outcome"] != "skipped":
            passed[test] = passed.get(test, True) and record["outcome"] == "passed"
        if record["used"]:
            used.add(test)
    return Outcomes(following | leading, frozenset(used))


@dataclass(frozen=True, slots=True)
class Difference:
    """What one way of running differs in from the plain one."""

    way: str
    num_compared: int
    num_used: int  # tests among them that ElasticFlow was put into
    unknown: tuple[str, ...]  # failures that are not in the list
    gone: tuple[str, ...]  # tests of the list that pass
    by_reason: Mapping[str, int]  # known failures


def compare(way: str, plain: Outcomes, ours: Outcomes, known: Iterable[Known]) -> Difference:
    """Hold the tests that pass plain, and were run in this way too, against the list."""
    known = list(known)
    compared = sorted(test for test, passed in plain.passed.items() if passed and test in ours.passed)
    reasons = {test: next((k.reason for k in known if k.fits(test, way)), None) for test in compared}
    by_reason: dict[str, int] = {}
    for test in compared:
        reason = reasons[test]
        if reason is not None and not ours.passed[test]:
            by_reason[reason] = by_reason.get(reason, 0) + 1
    return Difference(
        way,
        len(compared),
        len(ours.used.intersection(compared)),
        unknown=tuple(test for test in compared if not ours.passed[test] and reasons[test] is None),
        gone=tuple(test for test in compared if ours.passed[test] and reasons[test] is not None),
        by_reason=by_reason,
    )
