"""The peers' tests are held against the list of what is known; the list itself is well-formed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.peers import __main__ as peers
from tests.peers.comparison import WAYS, Outcomes, compare, read_known, read_outcomes
from tests.peers.suites import HERE, Suite, suites_of

LIST = """
## A heading
# alone: It counts calls.
a.py::test_calls[1-*]
# alone, in_a_job, two: It looks for a name.
a.py::test_name
"""


@pytest.mark.parametrize("peer", ["lightning", "keras"])
def test_list_of_known_failures_has_a_reason_for_each(peer: str) -> None:
    known = read_known((HERE / f"known_{peer}.txt").read_text())
    assert known
    assert len({(k.pattern, k.ways) for k in known}) == len(known)


@pytest.mark.parametrize("text", ["a.py::test_x", "# sometimes: why\na.py::test_x", "# alone\na.py::test_x"])
def test_list_without_a_reason_or_with_another_way_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        read_known(text)


def _outcomes(**passed: bool) -> Outcomes:
    return Outcomes({f"a.py::test_{name}": value for name, value in passed.items()}, frozenset({"a.py::test_name"}))


def test_difference_is_what_passes_plain_and_fails_otherwise() -> None:
    names = ("calls[1-x]", "calls[2-x]", "name", "broken")
    plain = _outcomes(**{name: name != "broken" for name in names})
    found = compare("alone", plain, _outcomes(**dict.fromkeys(names, False)), read_known(LIST))
    assert found.unknown == ("a.py::test_calls[2-x]",)
    assert found.by_reason == {"It counts calls.": 1, "It looks for a name.": 1}
    assert (found.gone, found.num_compared, found.num_used) == ((), 3, 1)
    found = compare("in_a_job", plain, _outcomes(name=True), read_known(LIST))
    assert (found.gone, found.unknown, found.num_compared) == (("a.py::test_name",), (), 1)


def test_outcome_of_a_test_is_the_worst_of_its_parts(tmp_path: Path) -> None:
    rows = [("a", "passed", True), ("a", "failed", False), ("b", "passed", False), ("c", "skipped", False)]
    path = tmp_path / "outcomes"
    lines = (json.dumps({"test": test, "outcome": outcome, "used": used}) for test, outcome, used in rows)
    path.write_text("\n".join(lines))
    assert read_outcomes(path) == Outcomes({"a": False, "b": True}, frozenset("a"))


def test_outcome_of_a_worker_that_follows_counts_where_none_leads(tmp_path: Path) -> None:
    rows = [("a", "failed", True), ("a", "passed", False), ("b", "failed", True), ("b", "passed", True)]
    path = tmp_path / "outcomes"
    lines = (
        json.dumps({"test": test, "outcome": outcome, "used": False, "follows": follows})
        for test, outcome, follows in rows
    )
    path.write_text("\n".join(lines))
    assert read_outcomes(path).passed == {"a": True, "b": False}


def test_tests_are_run_by_the_suite_that_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests" / "tests_pytorch").mkdir(parents=True)
    monkeypatch.setenv("LIGHTNING_SRC", str(tmp_path))
    names = ("lightning", "keras-tensorflow", "keras-torch")
    lightning, *keras = suites = suites_of(())
    assert tuple(suite.name for suite in suites) == names
    assert [suite.ways for suite in suites] == [("alone", "in_a_job"), WAYS, WAYS]
    assert all(Path(test).exists() for suite in keras for test in suite.tests)
    assert tuple(suite.name for suite in suites_of(["keras/src/models"])) == names[1:]
    assert suites_of(["tests_pytorch/core"])[0].tests == ("tests_pytorch/core",)
    assert lightning.name_of("tests/tests_pytorch/a.py::test_b") == "tests_pytorch/a.py::test_b"
    assert keras[1].name_of("keras/src/a.py::test_b") == "torch: keras/src/a.py::test_b"


def test_without_a_checkout_lightnings_are_not_run_and_it_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LIGHTNING_SRC", raising=False)
    assert [suite.name for suite in suites_of(())] == ["keras-tensorflow", "keras-torch"]
    assert "LIGHTNING_SRC does not name a checkout" in capsys.readouterr().out


@pytest.mark.parametrize("plain", ["", '{"test": "a.py::test_x", "outcome": "failed", "used": false}\n'])
def test_suite_whose_tests_do_not_run_fails_and_says_where_to_look(
    plain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests" / "tests_pytorch").mkdir(parents=True)
    monkeypatch.setattr(peers, "OUTCOMES", tmp_path / "outcomes")

    def run(suite: Suite, way: str) -> None:
        (tmp_path / "outcomes" / f"{suite.name}-{way}.jsonl").write_text(plain)

    monkeypatch.setattr(peers, "_run", run)
    arguments = ["--way=alone", "tests_pytorch/core"]
    result = CliRunner().invoke(peers.main, arguments, env={"LIGHTNING_SRC": str(tmp_path)})
    assert result.exit_code == 1
    assert "Error: no test was run both plain and alone, and passed plain: see the ends of" in result.output
