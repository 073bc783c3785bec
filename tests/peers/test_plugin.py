"""What the plugin writes of the peers' tests."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ef_common.errors import JobFailed
from ef_common.launch import process
from tests.peers.pair import FOLLOWS, Pair
from tests.peers.plugin import USED, Outcomes


@pytest.mark.parametrize(("properties", "expected"), [([], (False, False)), ([USED, FOLLOWS], (True, True))])
def test_record_of_a_test_tells_what_its_worker_knows(
    properties: list[Any], expected: tuple[bool, bool], tmp_path: Path
) -> None:
    as_of_xdist = [list(one) for one in properties]
    report = pytest.TestReport("a.py::test_a", ("a.py", 0, "test_a"), {}, "passed", None, "call")
    report.user_properties = as_of_xdist  # type: ignore[assignment]
    Outcomes(tmp_path / "outcomes").pytest_runtest_logreport(report)
    record = json.loads((tmp_path / "outcomes").read_text())
    assert (record["used"], record["follows"]) == expected


@pytest.mark.parametrize(
    ("rank", "has_files", "error", "follows"),
    [
        (0, True, None, False),
        (1, True, None, True),
        (1, False, None, False),
        (1, False, ValueError("me"), False),
        (0, False, JobFailed("worker me raised ValueError"), False),
        (0, False, JobFailed("worker other raised ValueError"), True),
    ],
)
def test_worker_follows_where_the_other_writes_or_has_ended_the_job(
    rank: int, has_files: bool, error: Exception | None, follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.mkdtemp", None)  # brings back what the pair replaces
    session = SimpleNamespace(rank=rank, worker=SimpleNamespace(id="me"))
    monkeypatch.setattr(process, "_this", SimpleNamespace(session=session))
    pair = Pair()
    pair._has_files = has_files
    assert pair._follows(error) is follows
