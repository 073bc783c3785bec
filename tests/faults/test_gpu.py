"""What is different on a GPU: precision, and jobs that the launcher starts there."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.conftest import TrainingJob
from tests.faults.hosts import hosted
from tests.faults.test_kill import view_sizes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@hosted("lightning-cuda", "lightning-nccl")
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_kill_and_join_in_each_precision_keep_weights_and_scale_equal(
    job: TrainingJob, finish: Callable[..., list[dict[str, Any]]], precision: str
) -> None:
    """A newcomer whose gradients are scaled by another factor would get other weights."""
    options = {"length": 403, "step_sleep_s": 0.03, "limits": {"precision": precision}, **job.patient}
    first, second = job.start_world(2, job.train, options)
    job.wait_for_step(4)
    second.kill()
    assert second.wait() == -signal.SIGKILL
    joiner = job.start(job.train, options)
    job.view(2, after=2)
    job.wait_for("admitted")
    finish([first, joiner])
    assert view_sizes(job)[:3] == [2, 1, 2]
