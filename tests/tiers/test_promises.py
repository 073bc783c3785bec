from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.tiers.marks import COLLECTED
from tests.tiers.places import ROOT
from tests.tiers.promises import PROMISES, Promise

pytestmark = pytest.mark.timeout(300)  # another pytest imports the frameworks

README = " ".join((ROOT / "README.md").read_text().split())
EXPRESSIONS = {"fast": "not thorough", "slow": "thorough and not exhaustive"}


@pytest.fixture(scope="module")
def tiers(request: pytest.FixtureRequest) -> dict[str, set[str]]:
    """Names of the tests of which each tier has a case."""
    if request.config.args == ["tests"]:  # this pytest knows them all
        found: dict[str, set[str]] = {tier: set() for tier in EXPRESSIONS}
        for item in request.config.stash[COLLECTED]:
            tier = "slow" if item.get_closest_marker("thorough") else "fast"
            if not item.get_closest_marker("exhaustive"):
                found[tier].add(item.nodeid)
    else:
        files = sorted({test.partition("::")[0] for promise in PROMISES for test in (promise.fast, promise.slow)})
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
        found = {
            tier: {
                *subprocess.run(
                    [*command, "-m", marks, *files], cwd=ROOT, capture_output=True, text=True
                ).stdout.split()
            }
            for tier, marks in EXPRESSIONS.items()
        }
    return {tier: {re.split(r"[\[@]", name)[0] for name in names} for tier, names in found.items()}


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.words)
def test_promise_stands_in_the_readme_and_is_guarded_in_both_tiers(
    promise: Promise, tiers: dict[str, set[str]]
) -> None:
    assert promise.words in README
    assert promise.fast in tiers["fast"]
    assert promise.slow in tiers["slow"]


def test_every_promise_and_every_program_of_the_readme_has_a_row() -> None:
    text = (ROOT / "README.md").read_text()
    promises = text.partition("## What is promised")[2].partition("\n## ")[0].split("\n\n")
    said = [
        *re.findall(r"^\* .*(?:\n  .*)*", "\n\n".join(promises), re.MULTILINE),
        *re.findall(r"```\w*\n(.*?)```", text, re.DOTALL),
    ]
    wanted = [" ".join(one.split()) for one in said if "pip install" not in one]
    assert len(wanted) > 10
    assert [one for one in wanted if not any(promise.words in one for promise in PROMISES)] == []
