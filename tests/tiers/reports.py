"""What pytest has written of its tests (in JUnit's format), counted."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

DURATIONS = Path(__file__).with_name("durations.json")


@dataclass(frozen=True)
class Outcome:
    """One test.

    Attributes:
        file: Its path from the root of the project.
        name: Its name, with its parameters.
        result: "passed", "failed" or "skipped".
        duration_s: How long it took, with its fixtures.
    """

    file: str
    name: str
    result: str
    duration_s: float


def read(path: Path) -> list[Outcome]:
    """The tests of a report. A test that fails and whose fixture fails after it counts once."""
    found: dict[tuple[str, str], Outcome] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        file = case.get("file") or case.get("classname", "").replace(".", "/") + ".py"
        result = next((_RESULTS[child.tag] for child in case if child.tag in _RESULTS), "passed")
        name = _GROUP.sub("", case.get("name", ""))
        outcome = Outcome(file, name, result, float(case.get("time", 0.0)))
        known = found.get((file, outcome.name))
        if known is None or known.result == "passed":
            found[file, outcome.name] = outcome
    return list(found.values())


_GROUP = re.compile(r"@[^\]@]*$")  # of the tests that run in one process, behind the name
_RESULTS = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def closing_line(outcomes: Iterable[Outcome]) -> str:
    """The line that a person, or CI, looks for."""
    count = Counter(outcome.result for outcome in outcomes)
    return f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped"


def slowest(outcomes: Iterable[Outcome], number: int = 10) -> list[Outcome]:
    """The tests that took longest, longest first."""
    return sorted(outcomes, key=lambda outcome: -outcome.duration_s)[:number]


def durations_of(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Seconds of each file, all its tests added up."""
    total: Counter[str] = Counter()
    for outcome in outcomes:
        total[outcome.file] += outcome.duration_s  # type: ignore[assignment]
    return {file: round(seconds, 1) for file, seconds in sorted(total.items())}


def durations(tier: str, paths: Iterable[str], path: Path = DURATIONS) -> dict[str, float]:
    """Seconds of each file in these paths, where they were measured; of the tier "all", those of "fast" and "rest"."""
    known: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}
    total: Counter[str] = Counter()
    for part in PARTS.get(tier, (tier,)):
        total.update(known.get(part, {}))  # type: ignore[arg-type]
    places = tuple(paths)
    return {file: s for file, s in total.items() if any(file == p or file.startswith(f"{p}/") for p in places)}


PARTS = {"all": ("fast", "rest"), "slow": ("rest", "launchers"), "every": ("fast", "rest", "launchers")}
"""Of which tiers that are measured a tier consists. How long the cases take that only "every" has is not known."""


def estimate_s(tier: str, paths: Iterable[str], path: Path = DURATIONS) -> float:
    """Seconds that the tests of these paths take, one after the other, where the durations were measured."""
    return sum(durations(tier, paths, path).values())


def write_durations(tier: str, durations: Mapping[str, float], path: Path = DURATIONS) -> None:
    """Write down what was measured, for estimates."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, tier: durations}, indent=1, sort_keys=True) + "\n")


START_S = 25.0
"""pytest's own start: each of its processes imports the frameworks and collects all tests."""
