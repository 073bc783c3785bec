"""What a job has learned of its sizes is known to newcomers, and to the next start from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from ef_common.testing.harness import Job
from tests import warm
from tests.faults import learning

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

TARGETS = {"lightning": (learning.lightning, warm.TORCH), "keras-torch": (learning.keras_torch, warm.KERAS["torch"])}


@pytest.mark.thorough
@pytest.mark.parametrize("framework", TARGETS)
def test_newcomer_knows_the_sizes_that_the_others_have_measured(tmp_path: Path, framework: str) -> None:
    target, preload = TARGETS[framework]
    with Job(tmp_path / "run", preload=preload) as job:
        first = job.start(target, str(tmp_path / "checkpoints"), 40)
        job.wait_for("throughput")
        newcomer = job.start(target, str(tmp_path / "checkpoints"), 40)
        assert newcomer.result()["known"] == [1]
        assert first.result()["known"] == []
        job.audit()
        assert [event["nodes"] for event in job.events("throughput")].count(2) > 0


@pytest.mark.parametrize("framework", TARGETS)
def test_new_start_knows_what_the_one_before_has_measured(tmp_path: Path, framework: str) -> None:
    target, preload = TARGETS[framework]
    folder = str(tmp_path / "checkpoints")
    with Job(tmp_path / "first", preload=preload) as job:
        before = job.start(target, folder, 2).result()
    assert before["known"] == []
    with Job(tmp_path / "second", preload=preload) as job:
        again = job.start(target, folder, 3, *filter(None, [before.get("path")])).result()
    assert again["known"] == [1]
