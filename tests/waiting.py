"""Waiting for what the coordinator of a job knows, or for what its workers have logged."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ef_common.core.membership import Membership, Phase
from ef_common.testing.harness import Job

GUARD_S = 90.0


def wait_until(job: Job, reached: Callable[[Membership], bool]) -> None:
    """Wait for a state of the coordinator."""
    deadline = time.monotonic() + GUARD_S
    while not reached(job.coordinator._switchboard.state):
        assert time.monotonic() < deadline, job.tails()
        assert any(worker.alive for worker in job.workers), job.tails()
        time.sleep(0.02)


def is_ready(training: int, *, world_size: int = 3) -> Callable[[Membership], bool]:
    """A newcomer is ready for this training, or has joined in it as the last one of so many."""

    def reached(state: Membership) -> bool:
        ready = [worker for worker, (_, phase) in state.workers.items() if phase is Phase.READY]
        joined = state.view is not None and state.view.world_size == world_size and state.training == training
        return joined or any(state.ready_for.get(worker, 1) == training for worker in ready)

    return reached


def two_steps(world_size: int, *, after: int = 0) -> Callable[[Sequence[dict[str, Any]]], int]:
    """Two updates have been made in a view of this size: a boundary has come between them. Its generation."""

    def made(events: Sequence[dict[str, Any]]) -> int:
        steps: dict[int, set[int]] = {}
        for event in events:
            if event["kind"] == "step" and event["world_size"] == world_size and event["generation"] > after:
                steps.setdefault(event["generation"], set()).add(event["step"])
        return next((generation for generation, found in steps.items() if len(found) > 1), 0)

    return made
