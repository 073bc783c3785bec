"""A coordinator, clients and rude peers, all of them closed at the end of a test."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from ef_common.control.client import CoordinatorClient
from ef_common.control.control_connection import ControlConnection
from ef_common.control.coordinator import Coordinator
from ef_common.core.membership import Settings
from ef_common.core.room import Room
from ef_common.core.view import Member
from ef_common.protocol import wire
from ef_common.protocol.auth import Token, new_nonce, worker_proof
from ef_common.protocol.client import ClientState

GUARD_S = 30.0


class Peer:
    """A raw connection to a coordinator."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, timeout=GUARD_S)
        self._lines = self.socket.makefile("rb")

    def say(self, *messages: bytes | wire.FromWorker) -> None:
        self.socket.sendall(b"".join(one if isinstance(one, bytes) else wire.encode(one) for one in messages))

    def hear(self) -> wire.FromCoordinator | None:
        """The next message, or None at the end of the connection. What room there is may be told at any time."""
        with contextlib.suppress(ConnectionError):
            while line := self._lines.readline():
                message = wire.decode_from_coordinator(line[:-1])
                if not isinstance(message, Room):
                    return message
        return None

    def hear_all(self) -> list[wire.FromCoordinator]:
        return list(iter(self.hear, None))

    def introduce(
        self, name: str, token: Token | None = None, *, key: str = "", returning: bool = False, standby: int = 0
    ) -> wire.FromCoordinator | None:
        challenge = self.hear()
        assert isinstance(challenge, wire.Challenge)
        member, nonce, key = Member(name, f"node-{name}", "", standby=standby), new_nonce(), key or new_nonce()
        proof = worker_proof(token, server_nonce=challenge.nonce, client_nonce=nonce, key=key, member=member)
        self.say(wire.Hello(member, nonce, key, proof, returning))
        return self.hear()

    def end(self) -> None:
        """End the connection in order; `close` resets it if something has come that was not read."""
        self.socket.shutdown(socket.SHUT_WR)
        self.hear_all()
        self.close()

    def close(self) -> None:
        self._lines.close()
        self.socket.close()


class Worker:
    """A real client, started in a thread, because the first view may need others."""

    def __init__(self, client: CoordinatorClient) -> None:
        self.client = client
        self.warm_up: bool | None = None
        self.error: Exception | None = None
        self.views_noticed: list[int] = []
        self._thread = threading.Thread(target=self._start, daemon=True)
        self._thread.start()

    def _start(self) -> None:
        try:
            self.warm_up = self.client.start(self.views_noticed.append)
        except Exception as error:
            self.error = error

    def started(self) -> Worker:
        self._thread.join(GUARD_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self

    def stop(self) -> None:
        self.client.stop()
        self._thread.join(GUARD_S)


def connection_of(client: CoordinatorClient) -> ControlConnection:
    """The socket of the connection on which a client speaks."""
    return next(iter(client._connections.values()))


def break_connections(client: CoordinatorClient) -> None:
    """Nothing more comes to a client on any of its connections."""
    for connection in list(client._connections.values()):
        connection.give_up()


def fall_silent(client: CoordinatorClient) -> None:
    """Let a client say nothing more, and go to no other coordinator; it listens."""
    client._protocol.state = ClientState.ENDING


def in_loop(coordinator: Coordinator, act: Callable[[float], object]) -> None:
    """Let the thread of a coordinator do something, which is given the time, and what the server asks for then."""
    done = threading.Event()

    def run() -> None:
        coordinator._serving.report(act)
        done.set()

    coordinator._loop.call_soon_threadsafe(run)
    assert done.wait(10.0)


@pytest.fixture
def serve() -> Iterator[Callable[..., Coordinator]]:
    with contextlib.ExitStack() as stack:

        def make(num_nodes: int = 1, *, token: Token | None = None, **kwargs: object) -> Coordinator:
            settings = Settings(
                min_nodes=int(kwargs.pop("min_nodes", num_nodes)),
                max_nodes=int(kwargs.pop("max_nodes", 100)),
                last_call_s=float(kwargs.pop("last_call_s", 0)),
            )
            kwargs.setdefault("heartbeat_timeout_s", 60.0)
            coordinator = Coordinator(("127.0.0.1", 0), token=token, settings=settings, **kwargs)
            coordinator.start()
            stack.callback(coordinator.stop)
            return coordinator

        yield make


@pytest.fixture
def join() -> Iterator[Callable[..., Worker]]:
    """Connect a worker; it may have to be waited for with `started`."""
    with contextlib.ExitStack() as stack:

        def make(
            coordinator: Coordinator | tuple[str, int],
            name: str,
            token: Token | None = None,
            **kwargs: object,
        ) -> Worker:
            address = coordinator.address if isinstance(coordinator, Coordinator) else coordinator
            node, size = str(kwargs.pop("node", f"node-{name}")), int(kwargs.pop("local_world_size", 1))
            standby = kwargs.pop("standby", None)
            port = standby.address[1] if isinstance(standby, Coordinator) else 0
            member = Member(name, node, "", local_world_size=size, standby=port)
            worker = Worker(CoordinatorClient(address, member, token, **kwargs))
            stack.callback(worker.stop)
            return worker

        yield make


@pytest.fixture
def dial() -> Iterator[Callable[[Coordinator], Peer]]:
    """Connect a raw peer."""
    with contextlib.ExitStack() as stack:

        def make(coordinator: Coordinator) -> Peer:
            peer = Peer(coordinator.address)
            stack.callback(peer.close)
            return peer

        yield make


@pytest.fixture
def form(
    serve: Callable[..., Coordinator], join: Callable[..., Worker]
) -> Callable[..., tuple[Coordinator, list[Worker]]]:
    """A job of so many workers, in its first view, in rank order."""

    def make(number: int, **kwargs: object) -> tuple[Coordinator, list[Worker]]:
        coordinator = serve(number, **kwargs)
        workers = [join(coordinator, f"w{i}", kwargs.get("token")) for i in range(number)]
        for worker in workers:
            assert worker.started().warm_up is False
        view = workers[0].client.next_view(0)
        assert view.world_size == number
        return coordinator, sorted(workers, key=lambda worker: view.ids.index(worker.client.member.id))

    return make
