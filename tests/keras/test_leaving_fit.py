"""Whatever ends a `fit` takes all of ElasticFlow away: the next one, elastic or not, is that of plain Keras."""

from __future__ import annotations

from pathlib import Path

import pytest

from ef_common.testing.harness import HarnessError, Job
from tests import warm
from tests.keras.launch import call_alone, call_in

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

BACKENDS = ["torch", pytest.param("tensorflow", marks=pytest.mark.thorough)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_after_an_exception_is_one_of_plain_keras(tmp_path: Path, backend: str) -> None:
    # TensorFlow may stand still for up to a minute whenever it frees an iterator, and this frees many.
    with Job(tmp_path / "run", preload=warm.KERAS[backend], guard_s=800.0) as job:
        assert job.start(call_alone, "left", backend, "leave_and_train_again").result() == {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_in_graphs_after_an_exception_is_one_of_plain_keras(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        assert job.start(call_alone, "left", backend, "leave_in_a_graph").result() == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_exception_that_the_program_catches_ends_no_job_of_one(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        found = job.start(call_in, "left", backend, "catch_in_a_job").result()
        job.audit()
    assert found == {"caught": [True] * 3, "wrong": [], "elastic": True, "fits": 6}


def test_exception_that_the_program_does_not_catch_ends_it(tmp_path: Path) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS["torch"]) as job:
        worker = job.start(call_in, "left", "torch", "not_caught")
        with pytest.raises(HarnessError, match="a bug"):
            worker.result()
