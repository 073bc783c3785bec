"""Waiting for what the coordinator of a job knows, or for what its workers have logged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ef_common.core.membership import Membership, Phase, Serving
from ef_common.testing.harness import GUARD_S, Job, WorkerProcess

STOP = "stop"
"""A file in the run directory that ends a training."""


def poll_until(condition: Callable[[], object], *, guard_s: float = 60.0) -> None:
    """Wait until this holds."""
    deadline = time.monotonic() + guard_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def wait_until(job: Job, reached: Callable[[Membership], bool]) -> None:
    """Wait for a state of the coordinator, and until it has told the workers of it, which comes after the decision."""
    deadline = time.monotonic() + GUARD_S
    while not reached(job.coordinator._server.state):
        assert time.monotonic() < deadline, job.tails()
        assert any(worker.alive for worker in job.workers), job.tails()
        time.sleep(0.02)
    told = threading.Event()
    job.coordinator._loop.call_soon_threadsafe(told.set)
    assert told.wait(GUARD_S)


def is_ready(training: int, *, world_size: int = 3) -> Callable[[Membership], bool]:
    """A newcomer is ready for this training, or has joined in it as the last one of so many."""

    def reached(state: Membership) -> bool:
        ready = [stands for stands in state.workers.values() if stands.phase is Phase.READY]
        joined = isinstance(state, Serving) and state.view.world_size == world_size and state.training == training
        return joined or any(stands.training == training for stands in ready)

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


def join_and_loss(job: Job, target: Callable[..., Any], *args: Any) -> tuple[WorkerProcess, WorkerProcess]:
    """Two train, a third one joins, rank 0 is killed, and `STOP` ends the training. Returns the two that are left."""
    job.start_world(2, target, *args)
    first, second = job.view(2)
    before = job.wait_until(two_steps(2), "steps of two")
    newcomer = job.start(target, *args)
    joined = job.wait_until(two_steps(3, after=before), "steps of three")
    first.kill()
    job.wait_until(two_steps(2, after=joined), "steps of two that are left")
    (job.directory / STOP).touch()
    return second, newcomer
