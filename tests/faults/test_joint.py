"""Several training loaders, dealt together, while workers come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.conftest import TrainingJob, struck
from tests.faults.test_kill import start_with_fault

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("num_workers", "second_is_stream"),
    [(0, False), (1, False), *(pytest.param(n, True, marks=pytest.mark.thorough) for n in (0, 1))],
)
def test_a_loss_and_a_join_leave_out_no_batch_of_any_loader(
    job: TrainingJob, finish: Callable[..., list[dict[str, Any]]], num_workers: int, second_is_stream: bool
) -> None:
    options = {"second_length": 37, "num_workers": num_workers, "step_sleep_s": 0.05, **job.patient}
    options["second_is_stream"] = second_is_stream
    _, others = start_with_fault(job, options, {"where": "forward", "step": 4})
    job.view(2)
    assert struck(job, "forward")["step"] == 4
    joiner = job.start(job.train, options)
    job.wait_for("admitted")
    finish([*others, joiner])
    returned = [step["returned"] for step in job.events("step") if step["returned"]]
    assert [stop - start for start, stop in returned[0]] == [1]  # one batch of each loader
