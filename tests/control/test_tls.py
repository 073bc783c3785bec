"""The control plane under TLS: who may be what, what can be read on the network, and what becomes of changed bytes."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

import pytest

from ef_common.control.coordinator import Coordinator
from ef_common.control.leader_request import Conversation, LeaderRequests
from ef_common.core.membership import Idle
from ef_common.core.view import Member
from ef_common.errors import AuthenticationError, CoordinatorLost
from ef_common.launch.certificates import Trust, trust_of
from ef_common.protocol import wire
from ef_common.protocol.auth import Token
from ef_common.tls import Credentials, Tls
from tests.control.conftest import Worker, connection_of
from tests.control.test_robustness import HELLO
from tests.tap import Tap
from tests.waiting import poll_until

GUARD_S = 30.0
TRUST = trust_of(Token("hunter2"), "1")
OTHERS = trust_of(Token("another job's"), "1")
WORKER = Tls(TRUST.worker)
COORDINATOR = Tls(TRUST.coordinator)


@pytest.fixture
def lead(serve) -> Callable[..., Coordinator]:
    """A coordinator under TLS."""

    def make(number: int = 1, *, trust: Trust = TRUST, credentials: Credentials | None = None, **kwargs) -> Coordinator:
        return serve(number, token=trust.token, credentials=credentials or trust.coordinator, **kwargs)

    return make


@pytest.fixture
def enter(join) -> Callable[..., Worker]:
    """A worker under TLS."""

    def make(where: Coordinator | tuple[str, int], name: str, *, trust: Trust = TRUST, **kwargs) -> Worker:
        return join(where, name, trust.token, tls=Tls(trust.worker), **kwargs)

    return make


@pytest.fixture
def network() -> Iterator[Callable[[Coordinator], Tap]]:
    with contextlib.ExitStack() as stack:

        def make(coordinator: Coordinator) -> Tap:
            return stack.enter_context(Tap(coordinator.address))

        yield make


def test_job_loses_a_worker_and_gains_one(lead, enter):
    coordinator = lead(3)
    workers = [enter(coordinator, name) for name in ("w0", "w1", "lost")]
    for worker in workers:
        assert worker.started().warm_up is False
    connection_of(workers.pop().client)._socket.shutdown(socket.SHUT_RDWR)  # as the end of its process
    assert {frozenset(worker.client.next_view(1).ids) for worker in workers} == {frozenset({"w0", "w1"})}
    assert coordinator._server.state.gone == {"lost"}
    newcomer = enter(coordinator, "new").started()
    assert newcomer.warm_up
    newcomer.client.send("ready")
    for worker in workers:
        poll_until(lambda worker=worker: worker.client.change_pending)
        worker.client.send("at_boundary", 2)
    generation = newcomer.client.next_view(0).generation
    workers[0].client.bootstrap(generation).put("k", b"x" * 500_000)
    assert newcomer.client.bootstrap(generation).get("k") == b"x" * 500_000
    newcomer.stop()  # with a goodbye
    poll_until(lambda: len(coordinator._server.workers) == 2)


def test_standby_takes_over(lead, enter):
    leader = lead(2)
    standbys = [lead(standby=True, endpoints=[leader.address]) for _ in range(2)]
    workers = [enter(leader, f"w{i}", standby=standbys[i]) for i in range(2)]
    for worker in workers:
        worker.started()
        worker.client.send("settled", 1)
    leader.stop()
    poll_until(
        lambda: any(len(one._server.workers) == 2 and not isinstance(one._server.state, Idle) for one in standbys)
    )
    assert [worker.client.bootstrap(1).replaced() for worker in workers] == [False, False]
    (led,) = (one for one in standbys if not isinstance(one._server.state, Idle))
    (other,) = (one for one in standbys if one is not led)
    poll_until(lambda: other._server.leader != "")  # it has been told


# ---------------------------------------------------------------- who may be what


def test_key_of_a_worker_is_none_of_a_coordinator(lead, enter):
    """Though it has the greeting's secret, and a certificate of the job."""
    impostor = lead(credentials=TRUST.worker)
    with pytest.raises(AuthenticationError, match=r"its certificate is not accepted: Hostname mismatch"):
        enter(impostor, "w0").started()
    assert len(impostor._server.workers) == 0


@pytest.mark.parametrize("tls", [WORKER, COORDINATOR], ids=["worker", "coordinator"])
def test_only_a_coordinator_says_that_it_leads(lead, enter, tls, caplog):
    standby = lead(standby=True)
    speaker = Conversation(standby.address, Member("speaker", "n", ""), TRUST.token, tls=tls)
    speaker.send(wire.Follow(1, leads=True))
    if tls is COORDINATOR:
        poll_until(lambda: standby._server.leader == "127.0.0.1:1")
    else:
        heard = [type(message) for message in iter(speaker.receive, None)]
        assert heard == [wire.Error]
        assert standby._server.leader == ""
        assert "its certificate is that of a worker" in caplog.text
    speaker.close()


def test_worker_has_no_voice_in_who_founds_the_job(lead):
    standby = lead(standby=True)
    for tls, granted in ((WORKER, False), (COORDINATOR, True)):
        answer = LeaderRequests(Member("a", "n", ""), TRUST.token, tls).seek(
            standby.address, door="h1:1", wish="promise"
        )
        assert answer is not None
        assert (answer.granted, answer.doors) == (granted, ("h1:1",) if granted else ())


@pytest.mark.parametrize("stranger", ["coordinator", "worker"])
def test_certificate_of_another_job_is_refused_by_both_sides(lead, enter, join, stranger):
    """Though both have the greeting's secret of this one."""
    credentials = OTHERS.coordinator if stranger == "coordinator" else TRUST.coordinator
    coordinator = lead(credentials=credentials)
    tls = Tls(OTHERS.worker) if stranger == "worker" else WORKER
    with pytest.raises(AuthenticationError, match="there is no TLS with the coordinator"):
        join(coordinator, "w0", TRUST.token, tls=tls).started()
    assert len(coordinator._server.workers) == 0


def test_client_without_a_certificate_is_refused(lead):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(lead().address) as plain,
        context.wrap_socket(plain) as stranger,
        pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
    ):
        stranger.recv(1)


def test_worker_of_the_job_that_does_not_know_the_secret_of_the_greeting_is_refused(lead, join):
    with pytest.raises(AuthenticationError, match="has a job token"):
        join(lead(), "w0", Token("guessed"), tls=WORKER).started()


def test_one_side_without_tls_is_told(serve, lead, join, caplog):
    with pytest.raises(AuthenticationError, match="it does not speak TLS"):
        join(serve(token=TRUST.token), "w0", TRUST.token, tls=WORKER).started()
    with pytest.raises(CoordinatorLost, match="If it has TLS, all nodes need it"):
        join(lead(), "w1", TRUST.token, connect_timeout_s=0.5).started()


def test_old_tls_is_refused(lead):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(lead().address) as plain, pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        context.wrap_socket(plain)


def test_agent_asks_about_a_worker(lead, enter):
    coordinator = lead()
    enter(coordinator, "w0").started()
    agent = Member("agent", "n", "")
    assert LeaderRequests(agent, TRUST.token, COORDINATOR).inquire([coordinator.address], "w0") == ""
    assert LeaderRequests(agent, TRUST.token).inquire([coordinator.address], "w0") is None


# ---------------------------------------------------------------- the network


def test_nothing_that_is_said_can_be_read_on_the_network(lead, enter, network):
    coordinator = lead(2)
    between = network(coordinator)
    workers = [enter(between.address, name) for name in ("w0", "w1")]
    for worker in workers:
        worker.started()
    workers[0].client.bootstrap(1).put("key-of-a-value", b"a value " * 1000)
    assert workers[1].client.bootstrap(1).get("key-of-a-value") == b"a value " * 1000
    assert len(between.passed) > 8000
    for said in (b"node-w0", b"challenge", b"key-of-a-value", b"YSB2YWx1ZS", b"heartbeat", b"ElasticFlow"):
        assert said not in between.passed


def test_changed_byte_ends_the_connection_and_nothing_of_it_is_heard(lead, enter, network, caplog):
    """The worker comes back: its process lives."""
    coordinator = lead(2)
    between = network(coordinator)
    workers = [enter(between.address, "far", standby=lead(standby=True)), enter(coordinator, "near")]
    for worker in workers:
        worker.started()
        worker.client.send("settled", 1)
    before = coordinator._server.workers["far"]
    between.changes = True
    workers[0].client.send("suspect", 1)
    poll_until(lambda: coordinator._server.workers.get("far") not in (None, before))
    assert between.changed.is_set()
    assert "no TLS" in caplog.text
    assert not any(worker.client._protocol.end for worker in workers)


def say_as_a_stranger(coordinator, data):
    """Say this on a connection of its own, and wait for its end."""
    with socket.create_connection(coordinator.address) as stranger:
        stranger.settimeout(GUARD_S)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(data)
            while stranger.recv(4096):
                pass


def test_what_was_said_on_one_connection_is_nothing_on_another(lead, enter, network):
    coordinator = lead(1)
    between = network(coordinator)
    enter(between.address, "w0").started()
    say_as_a_stranger(coordinator, bytes(between.passed))
    assert set(coordinator._server.workers) == {"w0"}
    assert coordinator._server.state.generation == 1


@pytest.mark.parametrize("tls", [COORDINATOR, None], ids=["TLS", "clear"])
def test_connection_to_a_standby_that_is_taken_over_is_not_believed(serve, lead, network, tls):
    """After the greeting of another coordinator, somebody else says who leads. In the clear that is believed."""
    standby = lead(standby=True) if tls else serve(1, token=TRUST.token, standby=True)
    between = network(standby)
    coordinator = Conversation(between.address, Member("other", "n", ""), TRUST.token, tls=tls)
    between.inject(wire.encode(wire.Follow(1, leads=True)))
    if tls:
        with contextlib.suppress(ConnectionError):
            assert coordinator.receive() is None  # it ends the connection
        assert standby._server.leader == ""
    else:
        poll_until(lambda: standby._server.leader == "127.0.0.1:1")
    coordinator.close()


# ---------------------------------------------------------------- a secret is replaced


@pytest.mark.parametrize("tls", ["0", "1"])
@pytest.mark.parametrize(
    ("at_coordinator", "at_worker"),
    [("old", "old\nnew"), ("old\nnew", "old"), ("old\nnew", "new\nold"), ("new\nold", "old\nnew"), ("new", "new\nold")],
)
def test_secret_is_replaced_node_by_node(lead, join, tls, at_coordinator, at_worker):
    ours, theirs = trust_of(Token(at_coordinator), tls), trust_of(Token(at_worker), tls)
    identity = None if theirs.worker is None else Tls(theirs.worker)
    worker = join(lead(trust=ours), "w0", theirs.token, tls=identity).started()
    assert worker.client.next_view(0).ids == ("w0",)


@pytest.mark.parametrize("tls", ["0", "1"])
def test_secret_that_was_replaced_is_refused(lead, join, tls):
    old = trust_of(Token("old"), tls)
    identity = None if old.worker is None else Tls(old.worker)
    with pytest.raises(AuthenticationError):
        join(lead(trust=trust_of(Token("new"), tls)), "w0", old.token, tls=identity).started()


# ---------------------------------------------------------------- a busy coordinator


class Late(Tap):
    """An address that leads to another one, a while after somebody has been accepted there."""

    LATE_S = 1.3

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Timer(self.LATE_S, self._lead_on, [self._sockets[0].accept()[0]]).start()

    def _lead_on(self, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            ends = [near, socket.create_connection(self._to)]
            self._sockets += ends
            for source, target in (ends, ends[::-1]):
                threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()


def test_coordinator_that_accepts_and_is_too_busy_for_the_handshake_gets_more_time(lead, enter):
    coordinator = lead()
    with Late(coordinator.address) as busy:
        worker = enter(busy.address, "w0", standby=lead(standby=True), connect_timeout_s=GUARD_S)
        assert worker.started().client.next_view(0).ids == ("w0",)


# ---------------------------------------------------------------- strangers


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", HELLO, b"\0" * 5000, b"\x16\x03\x01\x40\x00\x01" + b"x" * 9]
)
def test_stranger_with_garbage_is_closed_and_logged_once(lead, enter, data, caplog):
    """The last one begins a record and does not end it: it is closed after two seconds."""
    coordinator = lead(heartbeat_timeout_s=0.4)
    enter(coordinator, "w0").started()
    for _ in range(3):
        say_as_a_stranger(coordinator, data)
    assert caplog.text.count("dropped the connection") == 1
    assert set(coordinator._server.workers) == {"w0"}


def test_strangers_in_a_handshake_are_as_many_as_those_in_the_greeting(lead, enter, monkeypatch):
    monkeypatch.setattr("ef_common.protocol.sessions.MAX_STRANGERS", 4)
    monkeypatch.setattr("ef_common.protocol.sessions.STRANGER_S", 3600.0)
    coordinator = lead()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(coordinator.address))
        poll_until(lambda: len(coordinator._serving._open) == 4)
        enter(coordinator, "w0").started()
