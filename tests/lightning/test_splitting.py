"""Workers that split the data in different ways train on nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ef_common.testing.harness import Job
from tests.lightning import splitting

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def test_split_that_differs_is_an_error_before_the_first_update(job: Job, tmp_path: Path) -> None:
    workers = job.start_world(2, splitting.train, [1, 2], str(tmp_path))
    assert [worker.wait() for worker in workers] == [1, 1], job.tails()
    for worker in workers:
        (fault,) = worker.events("fault")
        assert fault["what"] == "UsageError"
        error = worker.output.read_text().partition("ef_common.errors.UsageError: ")[2]
        assert error.startswith("the workers have different data")
    assert not job.events("step")


def test_newcomer_with_another_split_is_refused_and_the_others_train_on(job: Job, tmp_path: Path) -> None:
    (first,) = job.start_world(1, splitting.train, [1], str(tmp_path), "over")
    job.wait_for("start")
    newcomer = job.start(splitting.train, [2], str(tmp_path), "over")
    assert newcomer.wait() == 1, job.tails()
    assert "the workers have different data" in newcomer.output.read_text()
    (tmp_path / "over").touch()
    first.result()
    job.audit()


def test_split_with_a_seed_trains(job: Job, tmp_path: Path) -> None:
    workers = job.start_world(2, splitting.train, [1, 1], str(tmp_path))
    first, second = (worker.result() for worker in workers)
    assert first == second
    job.audit()
    assert "different data" not in job.tails()
