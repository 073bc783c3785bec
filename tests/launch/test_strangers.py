"""A real job, and a stranger at all of its listening ports: it trains on, in bounded memory and with bounded files."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ef_common.control.leader_request import Conversation
from ef_common.control.sockets import raise_file_limit
from ef_common.core import membership
from ef_common.launch import environment
from ef_common.launch.environment import WorkerEnvironment
from ef_common.protocol import sessions, wire
from ef_common.protocol.addresses import LOOPBACK
from ef_common.testing.ports import free_ports
from ef_common.tls import COORDINATOR, Tls
from tests.control.test_robustness import HELLO
from tests.faults.hosts import ENOUGH
from tests.launch.test_run import Launched, script
from tests.launch.test_trust import environ_of, greet
from tests.strangers import FRAME_BYTES, GARBAGE, Place, crowd, reaches, say
from tests.tap import Tap
from tests.waiting import poll_until

pytestmark = [pytest.mark.processes, pytest.mark.thorough, pytest.mark.timeout(300)]

GUARD_S = 30.0
PORTS = {
    "coordinator": 1,
    "standby": 2,
    "liveness port; peer connections between nodes": 3,  # one of them since it has received the state
    "peer connections within a node": 1,
    "metrics of a worker": 1,
    "live page": 1,
}
"""Where the job listens, and with how many sockets."""
TAKEN_OVER = {
    "coordinator": "tests/launch/test_strangers.py::test_stranger_at_each_port_stops_nobody",
    "standby": "tests/control/test_tls.py::test_connection_to_a_standby_that_is_taken_over_is_not_believed",
    "liveness port; peer connections between nodes": "tests/collectives/test_peer_connections.py::"
    "test_connection_that_is_taken_over_breaks_the_group",
}
"""Where a connection is taken over, if TLS protects it; and the test that does."""
MORE_FILES = sessions.MAX_STRANGERS + 300  # 64 are accepted at once, and those turned away are closed a few turns later
MORE_BYTES = 64 << 20


class Job:
    """A job of two workers, one of which has received the state from the other one, so it listens for more."""

    def __init__(self, directory: Path, *tls: str) -> None:
        self.run = Launched(directory)
        self._pages = free_ports(2)
        environ = {environment.TOKEN: secrets.token_hex(20), environment.METRICS_PORT: str(self._pages[0])}
        self.run.start(*tls, "--nproc-per-node=2", *script(), **environ)
        generation = self.run.wait_for_world(2)
        command = [sys.executable, "-m", "ef_common.cli", "status", "--serve", f"--address={LOOPBACK}:{self._pages[1]}"]
        self._live = subprocess.Popen(
            [*command, str(directory)], env={**os.environ, **environ}, stdout=subprocess.DEVNULL
        )
        os.kill(self.run.workers()[-1], signal.SIGKILL)
        self.generation = self.run.wait_for_world(2, after=generation)
        self.workers = self.run.workers()
        self.variables = environ_of(self.workers[-1])
        launcher = psutil.Process(self.run.process.pid)
        coordinator = next(p for p in psutil.process_iter() if self.coordinator[1] in _ports(p))
        self.processes = [coordinator, psutil.Process(self._live.pid), *launcher.children(recursive=True)]
        poll_until(lambda: all(reaches((LOOPBACK, port)) for port in self._pages))

    @property
    def worker(self) -> WorkerEnvironment:
        """What a worker knows."""
        return environment.read_environment(self.variables)

    @property
    def coordinator(self) -> tuple[str, int]:
        assert self.worker.coordinator is not None
        return self.worker.coordinator

    def places(self) -> dict[Place, str]:
        """Where its processes listen, except those from which the kernel keeps strangers (Gloo's); and for what."""
        found: dict[Place, str] = {}
        for process in self.processes:
            found |= {(LOOPBACK, port): self._purpose_of(process, port) for port in _ports(process)}
            found |= dict.fromkeys(_names(process), "peer connections within a node")
        return {place: purpose for place, purpose in found.items() if reaches(place)}

    def _purpose_of(self, process: psutil.Process, port: int) -> str:
        if port in self._pages:
            return ("metrics of a worker", "live page")[self._pages.index(port)]
        if port == self.coordinator[1]:
            return "coordinator"
        return "liveness port; peer connections between nodes" if process.pid in self.workers else "standby"

    def end(self) -> None:
        """End all of it."""
        self._live.kill()
        self._live.wait()
        self.run.end()

    @contextlib.contextmanager
    def attacked(self) -> Iterator[Callable[[], None]]:
        """Everything is as before afterwards; what is given may be called meanwhile."""
        before = [(process.num_fds(), process.memory_info().rss) for process in self.processes]

        def look() -> None:
            for process, (files, size) in zip(self.processes, before, strict=True):
                assert process.num_fds() < files + MORE_FILES, process
                assert process.memory_info().rss < size + MORE_BYTES, process

        yield look
        look()
        self.run.wait_for_step(self.newest_step() + 10)
        assert self.run.workers() == self.workers
        assert max(event["generation"] for event in self.run.events("view")) == self.generation
        poll_until(lambda: all(p.num_fds() <= files + 10 for p, (files, _) in zip(self.processes, before, strict=True)))

    def newest_step(self) -> int:
        return int(max(event["step"] for event in self.run.events("step")))

    def greet(self, address: tuple[str, int], name: str) -> Conversation:
        """Be a worker of it."""
        return greet(address, self.variables, name)


def _ports(process: psutil.Process) -> set[int]:
    with contextlib.suppress(psutil.Error):
        return {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    return set()


def _names(process: psutil.Process) -> list[str]:
    """Its abstract sockets of ours that listen."""
    inodes = set()
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(link))
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    listening = [row for row in rows if len(row) == 8 and int(row[3], 16) & 0x10000 and f"socket:[{row[6]}]" in inodes]
    return [f"\0{row[7][1:]}" for row in listening if row[7].startswith("@elasticflow-")]


@pytest.fixture(scope="module", params=["", "TLS"], ids=["clear", "TLS"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    raise_file_limit()
    directory = tmp_path_factory.mktemp("job")
    made = Job(directory / "run", *(["--tls=1"] if request.param else []))
    try:
        yield made
        (made.run.directory / ENOUGH).touch()
        assert made.run.wait() == 0
        made.run.audit()
    finally:
        made.end()


def garbage(job: Job, look: Callable[[], None]) -> None:
    for place in job.places():
        for data in GARBAGE:
            say(place, data)


def half_a_greeting(job: Job, look: Callable[[], None]) -> None:
    """That of the protocol, and that of TLS."""
    hello = Tls(job.worker.credentials).connects(COORDINATOR).take() if job.worker.credentials else b"\x16\x03\x01\x02"
    for place in job.places():
        for data in (HELLO[:40], hello[: len(hello) // 2], secrets.token_bytes(10)):
            say(place, data)


def frame_of_2_gib(job: Job, look: Callable[[], None]) -> None:
    """It is announced in each way in which we, Gloo or TLS announce something; and a line has no end."""
    for place in job.places():
        for begin in (FRAME_BYTES.to_bytes(4, "big"), FRAME_BYTES.to_bytes(8, "little"), b"\x17\x03\x03\xff\xff", b"{"):
            say(place, begin, more=FRAME_BYTES)
        look()


def a_thousand_idle_connections(job: Job, look: Callable[[], None]) -> None:
    """All at once, at each port. A page that answers one client after the other has room for a few; the others wait."""
    for place in job.places():
        with crowd(place):
            job.greet(job.coordinator, f"worker-{secrets.token_hex(2)}").close()  # who knows the secret gets in
            job.run.wait_for_step(job.newest_step() + 3)
            look()


def replayed_bytes(job: Job, look: Callable[[], None]) -> None:
    with Tap(job.coordinator) as tap:
        conversation = job.greet(tap.address, "overheard")
        conversation.send(membership.Leaving(""))
        said = bytes(tap.said)
        conversation.close()
    assert len(said) > 100
    for place in job.places():
        for _ in range(3):
            say(place, said)


def connection_taken_over_after_the_greeting(job: Job, look: Callable[[], None]) -> None:
    """Without TLS the attacker would be that worker, and could end the job."""
    if job.worker.credentials is None:
        pytest.skip("nothing protects from that without TLS")
    for _ in range(3):
        with Tap(job.coordinator) as tap:
            conversation = job.greet(tap.address, f"taken-{secrets.token_hex(2)}")
            tap.inject(wire.encode(membership.Failed("", "taken over", fatal=True)))
            heard: list[object] = []
            with contextlib.suppress(OSError):
                while (message := conversation.receive()) is not None:
                    heard.append(message)
            conversation.close()
            assert all(isinstance(message, (wire.Error, wire.Alive, wire.NewView)) for message in heard)


ATTACKS = (
    garbage,
    half_a_greeting,
    frame_of_2_gib,
    a_thousand_idle_connections,
    replayed_bytes,
    connection_taken_over_after_the_greeting,
)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda one: one.__name__)
def test_stranger_at_each_port_stops_nobody(job: Job, attack: Callable[[Job, Callable[[], None]], None]) -> None:
    assert Counter(job.places().values()) == PORTS
    with job.attacked() as look:
        attack(job, look)
