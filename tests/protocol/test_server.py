"""The coordinator's server, without sockets, threads or clocks."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from ef_common.core.progress import Progress
from ef_common.protocol import wire
from ef_common.protocol.client_outputs import Connect
from ef_common.protocol.peer import Peer
from ef_common.protocol.server_outputs import Close
from tests.protocol.test_client import drain, introduce, make, serve


def test_worker_whose_first_attempt_took_too_long_is_taken_when_it_comes_again() -> None:
    client, server = make(standby=1000), serve()
    attempt = drain(client, Connect)[0]
    first = server.connect("10.0.0.9", 0.0)
    client.connected(attempt.link, 0.0)
    client.receive(attempt.link, server.outputs.popleft().data, 0.0)
    hello = client.outputs.popleft()
    client.tick(attempt.timeout_s)  # no answer has come
    server.receive(first, hello.data, 1.0)  # it stood still meanwhile
    while (again := drain(client, Connect)) == []:
        client.tick(client.deadline)
    client.outputs.append(again[0])
    _, second = introduce(client, server, 1.5)
    assert first.dropped
    assert server._workers == {"w": second}
    assert list(server.state.workers) == ["w"]
    assert client.end is None


def test_heartbeat_to_a_coordinator_that_knows_of_the_failure_alone_is_no_reason_to_drop_a_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client, server = make(standby=1000), serve()
    _, peer = introduce(client, server, 0.0)
    server.state = replace(server.state, failed="ValueError")
    heartbeat = wire.Heartbeat(None, Progress(7, 3, True, "step", 1.0))
    server.receive(peer, wire.encode(heartbeat), 1.0)
    assert not is_closed(server.outputs, peer)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def is_closed(outputs: object, peer: Peer) -> bool:
    return any(isinstance(output, Close) and output.peer is peer for output in outputs)
