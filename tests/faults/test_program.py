"""A program of one `forward` survives what a model by hand survives."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.conftest import TrainingJob
from tests.faults.hosts import in_each_framework_but_jax
from tests.faults.test_kill import view_sizes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@in_each_framework_but_jax
def test_program_survives_a_kill_and_a_join_with_equal_weights(
    job: TrainingJob, finish: Callable[..., list[dict[str, Any]]]
) -> None:
    options = {"epochs": 8, "step_sleep_s": 0.04, "val_length": 20, "program": True, **job.patient}
    first, second = job.start_world(2, job.train, options)
    job.wait_for("epoch_end", epoch=0)
    second.kill()
    assert second.wait() == -signal.SIGKILL
    joiner = job.start(job.train, options)
    job.view(2, after=2)
    job.wait_for("admitted")
    results = finish([first, joiner])
    assert view_sizes(job)[:3] == [2, 1, 2]
    assert {"loss", "accuracy", "val_loss", "val_accuracy"} <= set(results[0]["metrics"])
