"""Streams of shards, while workers come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.conftest import TrainingJob, struck
from tests.faults.test_kill import start_with_fault

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

Finish = Callable[..., list[dict[str, Any]]]
STREAM = {"length": 203, "shards": 9, "step_sleep_s": 0.03, "epochs": 2}


def test_a_loss_and_a_join_leave_out_no_sample(job: TrainingJob, finish: Finish) -> None:
    options = {**STREAM, **job.patient}
    _, others = start_with_fault(job, options, {"where": "forward", "step": 4})
    job.view(2)
    assert struck(job, "forward")["step"] == 4
    joiner = job.start(job.train, options)
    job.wait_for("admitted")
    job.wait_for("epoch_end", exact=True)
    finish([*others, joiner])
    assert [step for step in job.events("step") if step["returned"]]
