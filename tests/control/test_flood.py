"""A coordinator in a process of its own, and peers that send, or open, or leave unread as much as they can."""

from __future__ import annotations

import contextlib
import itertools
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from ef_common.core import membership
from ef_common.core.membership import Settings
from ef_common.core.progress import Progress
from ef_common.core.watermark import Watermark
from ef_common.launch.coordinator_process import start_coordinator
from ef_common.protocol import fields, wire
from ef_common.protocol.addresses import LOOPBACK
from ef_common.protocol.auth import Token
from tests.control.conftest import Peer
from tests.control.test_robustness import HELLO

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

TOKEN = Token("hunter2")
HEARTBEAT_TIMEOUT_S = 2.0
FLOOD_S = 3 * HEARTBEAT_TIMEOUT_S
"""Whoever is not heard for a third of it is evicted."""
NUM_CONNECTIONS = 3000
MORE_BYTES = 64 << 20
MAX_FILES = 800


class Job:
    """The coordinator's process, and two workers in view 1."""

    def __init__(self, join: Callable) -> None:
        self.address, pid = start_coordinator(
            LOOPBACK,
            TOKEN,
            Settings(min_nodes=2, last_call_s=0.0),
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            hang_timeout_s=None,
        )
        self.process = psutil.Process(pid)
        self.workers = [join(self.address, name, TOKEN) for name in ("w0", "w1")]
        for worker in self.workers:
            assert worker.started().client.next_view(0).world_size == 2
        self._before = self.process.memory_info().rss
        self._most_files, self._most_bytes = 0, 0

    def look(self) -> None:
        self._most_files = max(self._most_files, self.process.num_fds())
        self._most_bytes = max(self._most_bytes, self.process.memory_info().rss - self._before)

    def check(self) -> None:
        self.look()
        assert self._most_files < MAX_FILES
        assert self._most_bytes < MORE_BYTES
        assert [worker.views_noticed for worker in self.workers] == [[1], [1]]
        assert not any(worker.client._protocol.end for worker in self.workers)


@pytest.fixture
def job(join) -> Iterator[Job]:
    made = Job(join)
    yield made
    made.process.kill()


def poison(number: int) -> bytes:
    """Silence, half an introduction, garbage, a line without an end, a proof that is wrong."""
    return (b"", HELLO[:40], b"\x16\x03\x01\n", b"x" * 2_000_000, HELLO)[number % 5]


def test_crowd_without_the_token_takes_few_files_and_little_memory_and_evicts_nobody(job):
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200
    crowd: list[socket.socket] = []
    until = time.monotonic() + FLOOD_S
    try:
        for number in itertools.count():
            sock = socket.socket()
            crowd.append(sock)
            sock.settimeout(5.0)
            sock.connect(job.address)
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.send(poison(number))
            if len(crowd) > min(NUM_CONNECTIONS, room):
                crowd.pop(0).close()
            if number % 100 == 0:
                job.look()
            if number > NUM_CONNECTIONS and time.monotonic() > until:
                break
    finally:
        for sock in crowd:
            sock.close()
    job.check()


BEAT = wire.Heartbeat(Watermark(2**53, 2**53, (2**53,) * fields.MAX_RETURNED))
FLOODS = {
    "heartbeats": BEAT,
    "progress": wire.Heartbeat(None, Progress(1, 2**53, True, "step", 1e9, 1e9, 1e9, 1e9, 2**53, 1e9, 1e9)),
    "settled": membership.Settled("", 1),
    "suspicions": membership.Suspected("", 1),
    "relays": wire.Relay(1, "k", b"x" * 700_000),
}


@pytest.mark.parametrize("name", FLOODS)
def test_peer_with_the_token_that_sends_as_fast_as_it_can_and_reads_nothing_harms_nobody(job, name):
    """It waits to be admitted; each message is answered, if it is one that is."""
    deaf = Peer(job.address)
    assert isinstance(deaf.introduce("deaf", TOKEN, standby=1), wire.Welcome)
    job.workers[0].client.tell_watermark(Watermark(1, 1, (7,) * fields.MAX_RETURNED))
    deaf.socket.settimeout(0.2)
    data = wire.encode(FLOODS[name]) * (1 if name == "relays" else 50)
    until, sent = time.monotonic() + FLOOD_S, 0
    while time.monotonic() < until:
        with contextlib.suppress(TimeoutError):
            try:
                sent += deaf.socket.send(data)  # what is sent in part is refused then, as a line that is none
            except ConnectionError:
                break
        job.look()
    deaf.close()
    assert sent > 1 << 20
    job.check()


def test_member_that_floods_the_others_is_refused_before_it_costs_them_their_lines(job):
    """It is let in, and publishes what fills the memory of all."""
    flooder = Peer(job.address)
    assert isinstance(flooder.introduce("flooder", TOKEN), wire.Welcome)
    flooder.say(membership.Ready(""))
    for worker in job.workers:
        while not worker.client.change_pending:
            time.sleep(0.01)
        worker.client.send("at_boundary", 1)
    assert all("flooder" in worker.client.next_view(1).ids for worker in job.workers)
    reader = threading.Thread(target=flooder.hear_all)
    reader.start()
    with contextlib.suppress(OSError):
        for number in range(1000):
            flooder.say(wire.Relay(2, f"{number}", b"x" * 700_000))
    for worker in job.workers:
        assert set(worker.client.next_view(2).ids) == {"w0", "w1"}
        assert not worker.client._protocol.end
    reader.join()  # it has been refused
    flooder.close()
    job.look()
    assert job._most_bytes < MORE_BYTES
