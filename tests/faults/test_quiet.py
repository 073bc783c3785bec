"""A step in which nothing happens costs the coordinator nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ef_common.core import membership
from ef_common.protocol import wire
from ef_common.protocol.peer import Peer
from ef_common.protocol.server import CoordinatorServer
from tests.faults.conftest import TrainingJob, check_run
from tests.faults.hosts import in_each_framework

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

NUM_BEFORE = 20
"""Collectives, some of which are those of the start."""


@in_each_framework
def test_normal_steps_send_the_coordinator_heartbeats_and_nothing_else(
    make_job: Callable[..., TrainingJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[type] = []
    training: set[str] = set()
    hear = CoordinatorServer._hear

    def listen(self: CoordinatorServer, peer: Peer, worker: str, message: wire.FromWorker) -> None:
        heard.append(type(message))
        if (
            isinstance(message, wire.Heartbeat)
            and message.progress is not None
            and message.progress.number > NUM_BEFORE
        ):
            training.add(worker)
        hear(self, peer, worker, message)

    monkeypatch.setattr(CoordinatorServer, "_hear", listen)
    job = make_job()
    workers = job.start_world(2, job.train, {"length": 16000, **job.patient})  # no epoch ends
    job.wait_until(lambda _: len(training) == 2, "heartbeats from steps: what came before them has been heard, too")
    before = list(heard)
    job.wait_for_step(max(event["step"] for event in job.events("step")) + 40)
    in_40_steps = heard[len(before) :]
    check_run(job, workers)
    assert set(in_40_steps) <= {wire.Heartbeat}
    assert membership.Closed in heard  # what else there is, is heard
