"""A call that exchanges values, made by one worker alone, ends all of them with one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from ef_common.testing.harness import Job
from tests.lightning import one_sided

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

SMALL = 3
NAMES = {
    "checkpoint": "barrier 'trainer.save_checkpoint'",
    "reduce": "strategy.reduce or self.log(sync_dist=True), mean of [3]",
    "reduce as many": "strategy.reduce or self.log(sync_dist=True), mean of [",
    "log": "strategy.reduce or self.log(sync_dist=True), mean of one number",
    "gather": "self.all_gather",
    "large gather": "self.all_gather",
    "broadcast": "strategy.broadcast",
    "barrier": "barrier 'mine'",
    "default group": "torch.distributed.all_reduce",
}
"""How the error names each call."""


@pytest.mark.parametrize(
    ("caller", "width"),
    [
        (0, SMALL),
        pytest.param(1, SMALL, marks=pytest.mark.thorough),
        pytest.param(0, one_sided.WIDE, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("name", one_sided.CALLS)
def test_call_of_one_worker_ends_all_with_one_clear_error(
    job: Job, tmp_path: Path, name: str, caller: int, width: int
) -> None:
    workers = job.start_world(2, one_sided.run, name, caller, width, str(tmp_path))
    assert [worker.wait() for worker in workers] == [1, 1], job.tails()
    for worker in workers:
        (fault,) = worker.events("fault")
        assert fault["what"] == "CallMismatch"
        error = worker.output.read_text().partition("ef_common.errors.CallMismatch: ")[2]
        received = error.partition("Received: ")[2].splitlines()[0]
        assert f"rank {caller} (node founders) in {NAMES[name]}" in received
        assert f"rank {1 - caller} (node founders) in reduction of the gradients, a sum of " in received
    assert not job.events("close")
    assert max(event["step"] for event in job.events("step")) <= one_sided.STEP


def test_call_of_one_worker_while_the_others_wait_for_a_newcomer_ends_all(job: Job, tmp_path: Path) -> None:
    workers = job.start_world(2, one_sided.run_to_boundary, str(tmp_path))
    job.wait_for_step(2)
    newcomer = job.start(one_sided.run_to_boundary, str(tmp_path))
    assert [worker.wait() for worker in workers] == [1, 1], job.tails()
    for worker in workers:
        (fault,) = worker.events("fault")
        assert fault["what"] == "CallMismatch"
        assert "rank 0 (node founders) in barrier 'mine'" in fault["message"]
        assert "rank 1 (node founders) in wait between two steps" in fault["message"]
    assert newcomer.wait() == 1
