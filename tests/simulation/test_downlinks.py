"""Half of the members, without a store, when their coordinator is killed and has left something unread."""

from __future__ import annotations

import pytest

from ef_common.protocol.client import Client
from ef_common.testing.simulation import simulate
from ef_common.testing.simulation.schedule import Fault, Job, Schedule
from ef_common.testing.simulation.simulation import Outcome


def killed_while_something_is_unread(seed: int) -> Outcome:
    """The node of the coordinator stands still, so a heartbeat stays unread, and is lost before it goes on."""
    job = Job(num_workers=2, length=400, batch_size=2, epochs=1, min_nodes=1, last_call_s=2.0, standbys=True)
    at = 4.0 + 0.05 * seed
    return simulate(Schedule(seed, job, (Fault("suspend", at=at, duration_s=1.0), Fault("node", at=at + 0.9))))


@pytest.mark.parametrize("seed", range(10))
def test_half_goes_on_whatever_the_coordinator_has_left_unread(seed: int) -> None:
    outcome = killed_while_something_is_unread(seed)

    assert outcome.violation is None
    assert outcome.ends == {"w0": "crashed", "w1": "finished"}


def test_half_waits_if_the_coordinator_speaks_where_its_worker_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "_ask_for_downlink", lambda self: None)

    outcome = killed_while_something_is_unread(0)

    assert outcome.violation is None
    assert outcome.ends == {"w0": "crashed", "w1": ""}
