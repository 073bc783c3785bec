"""What callbacks of Keras write is complete after the loss of the worker that was writing it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ef_common.testing.harness import Job
from tests import warm
from tests.keras.launch import call_in

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.mark.parametrize("backend", ["torch", pytest.param("tensorflow", marks=pytest.mark.thorough)])
def test_hooks_in_which_rank_0_is_lost_are_called_by_the_next_one(tmp_path: Path, backend: str) -> None:
    (tmp_path / "files").mkdir()
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        workers = job.start_world(4, call_in, "writing", backend, "fit_with_torn_files", str(tmp_path / "files"))
        (left,) = [worker for worker in workers if worker.wait() == 0]
        found = left.result()
        job.audit()
    assert found == {
        "saved": [True, True],
        "rows": [["0", "1"], ["0", "1"]],
        "backup": False,
        "lost": ["epoch end", "last batch", "train end"],
    }
