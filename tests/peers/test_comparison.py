"""The peers' tests are held against the list of what is known; the list itself is well-formed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.peers import __main__ as peers
from tests.peers.__main__ import KNOWN, ROOT
from tests.peers.comparison import compare, read_known, read_outcomes

LIST = """
## A heading
# alone: It counts calls.
a.py::test_calls[1-*]
# alone, in_a_job: It looks for a name.
a.py::test_name
"""


def test_list_of_known_failures_has_a_reason_for_each() -> None:
    known = read_known(KNOWN.read_text())
    assert known
    assert len({(k.pattern, k.ways) for k in known}) == len(known)


@pytest.mark.parametrize("text", ["a.py::test_x", "# sometimes: why\na.py::test_x", "# alone\na.py::test_x"])
def test_list_without_a_reason_or_with_another_way_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        read_known(text)


def test_difference_is_what_passes_plain_and_fails_otherwise() -> None:
    names = ("a.py::test_calls[1-x]", "a.py::test_calls[2-x]", "a.py::test_name", "a.py::test_broken")
    plain = {name: not name.endswith("broken") for name in names}
    found = compare("alone", plain, dict.fromkeys(names, False), read_known(LIST))
    assert found.unknown == ("a.py::test_calls[2-x]",)
    assert found.by_reason == {"It counts calls.": 1, "It looks for a name.": 1}
    assert (found.gone, found.num_compared) == ((), 3)
    found = compare("in_a_job", plain, {"a.py::test_name": True}, read_known(LIST))
    assert (found.gone, found.unknown, found.num_compared) == (("a.py::test_name",), (), 1)


def test_outcome_of_a_test_is_the_worst_of_its_parts(tmp_path: Path) -> None:
    rows = [("a", "passed"), ("a", "failed"), ("b", "passed"), ("c", "skipped")]
    path = tmp_path / "outcomes"
    path.write_text("".join(json.dumps({"test": test, "outcome": outcome}) + "\n" for test, outcome in rows))
    assert read_outcomes(path) == {"a": False, "b": True}


def test_without_a_checkout_nothing_is_run_and_it_is_said() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LIGHTNING_SRC"}
    command = [sys.executable, "-B", "-m", "tests.peers"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    assert "LIGHTNING_SRC does not name a checkout" in done.stdout


@pytest.mark.parametrize("plain", ["", '{"test": "a.py::test_x", "outcome": "failed"}\n'])
def test_checkout_whose_tests_do_not_run_fails_and_says_where_to_look(
    plain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests" / "tests_pytorch").mkdir(parents=True)
    monkeypatch.setattr(peers, "OUTCOMES", tmp_path / "outcomes")

    def run(way: str, *_: object) -> None:
        (tmp_path / "outcomes" / f"{way}.jsonl").write_text(plain)

    monkeypatch.setattr(peers, "_run", run)
    result = CliRunner().invoke(peers.main, ["--way=alone"], env={"LIGHTNING_SRC": str(tmp_path)})
    assert result.exit_code == 1
    assert "Error: no test was run both plain and alone, and passed plain: see the ends of plain.txt" in result.output
