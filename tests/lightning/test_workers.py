"""Callbacks and modules hear of workers that come and go, all at the same steps."""

from __future__ import annotations

from typing import Any

import pytest

from ef_common.testing.harness import Job
from tests.lightning.listening import listen
from tests.waiting import join_and_loss

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.mark.parametrize("settings", [{}, pytest.param({"global_batch_size": 12}, marks=pytest.mark.thorough)])
def test_all_workers_hear_of_a_newcomer_and_of_a_loss_at_the_same_steps(job: Job, settings: dict[str, Any]) -> None:
    second, newcomer = join_and_loss(job, listen, settings)
    found, of_newcomer = second.result(), newcomer.result()
    job.audit()
    (at_join, *join), (at_loss, *loss) = found["callback"]
    assert join == [[1, 3, 2, 1, 0], [1, 3]]
    assert loss == [[0, 2, 3, 0, 1], [0, 2]]
    assert of_newcomer["callback"] == [
        [at_join, [2, 3, 2, 1, 0], [2, 3]],
        [at_loss, [1, 2, 3, 0, 1], [1, 2]],
    ]
    assert found["module"] == of_newcomer["module"] == [[at_join, [0, 1, 2]], [at_loss, [0, 1]]]
    assert 0 < at_join < at_loss < found["step"] == of_newcomer["step"]
