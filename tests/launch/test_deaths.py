"""What an agent makes of a worker that has raised before it joined."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ef_common.launch.deaths import Deaths
from ef_common.launch.restarts import Restarts


@pytest.mark.parametrize(
    ("answer", "why", "excused"), [("", "", True), ("an import", "an import", False), (None, "", False)]
)
@pytest.mark.parametrize("status", [1, 3])
def test_newcomer_that_the_job_does_without_was_failed_by_its_machine(
    tmp_path: Path, answer: str | None, why: str, excused: bool, status: int
) -> None:
    told = []

    def report(text: str, fatal: bool) -> str | None:
        told.append((text, fatal))
        return answer

    deaths = Deaths(tmp_path, node="n", report=report)
    raises = status == 1
    assert deaths.of_one(0, status).why == (why if raises else "")
    assert Restarts(tmp_path, 0).count.excused is (excused and raises)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=status, error_file="<N/A>")
    try:
        raise ChildFailedError("train.py", {0: failure})
    except ChildFailedError:
        deaths.at_the_end()
    assert Restarts(tmp_path).count.excused is (excused and raises)
    assert [fatal for _, fatal in told] == [False] * (1 if why else 2) * raises
