from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import get_args

import pytest

from ef_common.control.client import CoordinatorClient
from ef_common.control.control_connection import ControlConnection
from ef_common.control.coordinator import Coordinator
from ef_common.core import membership
from ef_common.core.room import Demand, Room
from ef_common.core.view import Member
from ef_common.core.watermark import Watermark
from ef_common.errors import (
    AuthenticationError,
    CoordinatorLost,
    GroupBroken,
    JobFinished,
    Left,
    ProtocolError,
    TrainingOver,
)
from ef_common.protocol import fields, wire
from ef_common.protocol.auth import Token, new_nonce
from ef_common.protocol.client_outputs import Connect, CoordinatorLink
from ef_common.protocol.introduction import Answer, Introduction
from ef_common.protocol.server_outputs import Write
from ef_common.session.ports import ControlChannel
from ef_common.testing.ports import reserve_port
from tests.control.conftest import break_connections, connection_of, in_loop
from tests.waiting import poll_until

MEMBER = Member("w", "n", "")
GUARD_S = 60.0


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock
        sock.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept


def answer_with(listener: socket.socket, *lines: bytes) -> threading.Thread:
    """Play a coordinator that says these lines to each who connects, and reads on."""

    def play() -> None:
        try:
            while True:
                peer, _ = listener.accept()
                with peer:
                    peer.sendall(b"".join(lines))
                    while peer.recv(65536):
                        pass
        except OSError:
            return

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    return thread


def test_client_is_a_control_channel():
    channel: ControlChannel = CoordinatorClient(("127.0.0.1", 1), MEMBER, None)
    assert channel.change_pending is False


def test_client_waits_for_a_coordinator_that_starts_later(serve, join):
    reserved = reserve_port()
    address = reserved.getsockname()
    worker = join(address, "w")
    time.sleep(0.1)
    coordinator = Coordinator(address)
    coordinator.start()
    reserved.close()
    try:
        assert worker.started().warm_up is False
    finally:
        coordinator.stop()


def test_client_without_coordinator_names_the_address_and_what_to_check(join):
    with reserve_port() as reserved:
        address = reserved.getsockname()
        with pytest.raises(CoordinatorLost, match=rf"127\.0\.0\.1:{address[1]} .*refused.*ELASTICFLOW_TOKEN"):
            join(address, "w", connect_timeout_s=0.2).started()


def test_client_of_a_silent_server_gives_up_in_time(listener, join):
    with pytest.raises(CoordinatorLost, match="timed out"):
        join(listener.getsockname(), "w", connect_timeout_s=0.3).started()


@pytest.mark.parametrize(
    "line",
    [b"SSH-2.0-OpenSSH_9.6\r\n", b'{"v":99,"t":"challenge","nonce":""}\n', b"x" * 5000],
    ids=["ssh", "version", "long"],
)
def test_client_of_another_server_raises_protocol_error(listener, join, line):
    answer_with(listener, line)
    with pytest.raises(ProtocolError, match="protocol"):
        join(listener.getsockname(), "w").started()


FORGED = "0" * 64
FORGED_ANSWERS = {
    wire.Welcome: wire.Welcome(membership.Accept("", True), 2.0, FORGED, ()),
    wire.Finished: wire.Finished(membership.Finish(""), FORGED),
    wire.Redirect: wire.Redirect("127.0.0.1:1", FORGED),
    wire.Aborted: wire.Aborted(membership.Abort("", "RuntimeError: it is over"), FORGED),
}


@pytest.mark.parametrize("kind", get_args(Answer), ids=lambda kind: kind.__name__.lower())
def test_client_believes_no_impostor(listener, join, kind):
    answer_with(listener, wire.encode(wire.Challenge(new_nonce())), wire.encode(FORGED_ANSWERS[kind]))
    with pytest.raises(AuthenticationError, match="impostor"):
        join(listener.getsockname(), "w", Token("hunter2")).started()


def test_client_that_lost_its_connection_keeps_its_view(form):
    coordinator, workers = form(2)
    client = workers[0].client
    coordinator.stop()
    while not client._protocol.end:
        time.sleep(0.01)
    assert client.next_view(0).generation == 1
    assert not client.change_pending
    client.send("suspect", 1)
    with pytest.raises(CoordinatorLost, match="has ended"):
        client.next_view(1)


def test_client_that_loses_its_connection_before_the_first_view_raises(serve, join):
    coordinator = serve(2)
    worker = join(coordinator, "w")
    while not coordinator._population:
        time.sleep(0.01)
    coordinator.stop()
    with pytest.raises(CoordinatorLost):
        worker.started()


def test_client_bootstrap_of_a_replaced_view_raises_group_broken(form):
    _, workers = form(3)
    box = workers[0].client.bootstrap(1)
    waiting = threading.Timer(0.1, workers[2].client.stop)
    waiting.start()
    with pytest.raises(GroupBroken, match="replaced"):
        box.get("never")
    waiting.join()
    box.put("late", b"")
    with pytest.raises(GroupBroken):
        box.get("late")


def test_client_bootstrap_on_a_lost_connection_raises_group_broken_but_keeps_what_came(form):
    coordinator, workers = form(2)
    workers[0].client.bootstrap(1).put("key", b"value")
    box = workers[1].client.bootstrap(1)
    assert box.get("key") == b"value"
    coordinator.stop()
    with pytest.raises(GroupBroken):
        box.get("never")
    assert box.get("key") == b"value"


def test_client_bootstrap_values_do_not_outlive_their_view(form):
    _, workers = form(3)
    workers[0].client.bootstrap(1).put("key", b"old")
    workers[2].client.stop()
    assert workers[1].client.next_view(1).generation == 2
    assert workers[0].client.next_view(1).generation == 2
    workers[0].client.bootstrap(2).put("key", b"new")
    assert workers[1].client.bootstrap(2).get("key") == b"new"


def test_client_fault_in_on_view_does_not_end_the_connection(form, caplog):
    _, workers = form(3)

    def fail(generation: int) -> None:
        raise ValueError("boom")

    workers[0].client._on_view = fail
    workers[1].client.stop()
    assert workers[0].client.next_view(1).generation == 2
    workers[2].client.stop()
    assert workers[0].client.next_view(2).generation == 3
    assert "boom" in caplog.text


def test_client_send_from_a_signal_handler_inside_send_does_not_hang(form):
    _, workers = form(2)
    connection = connection_of(workers[0].client)
    before = signal.signal(signal.SIGUSR1, lambda *_: workers[0].client.send("leave"))
    try:
        with connection._sending:  # as if the signal came while this thread sends
            signal.raise_signal(signal.SIGUSR1)
        workers[0].client.send("suspect", 99)  # takes along what lies in the outbox
        while not workers[1].client.change_pending:
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_client_tells_its_place_and_a_newcomer_learns_it(form, join):
    coordinator, (member,) = form(1, heartbeat_timeout_s=0.4)
    newcomer = join(coordinator, "late").started().client
    assert newcomer.job_watermark() is None
    member.client.tell_watermark(Watermark(3, 10))
    while newcomer.job_watermark() != Watermark(3, 10):
        time.sleep(0.01)
    member.client.tell_watermark(Watermark(3, 11, (5,)))
    while newcomer.job_watermark() != Watermark(3, 11, (5,)):
        time.sleep(0.01)


def test_client_tells_its_training_and_a_newcomer_that_waits_for_an_earlier_one_learns_it(form, join):
    coordinator, (member,) = form(1)
    newcomer = join(coordinator, "late").started().client
    assert newcomer.job_training() == 1
    newcomer.send("ready", 1)
    member.client.send("begin", 2)
    with pytest.raises(TrainingOver, match="in training 2"):
        newcomer.next_view(0)
    assert newcomer.job_training() == 2
    assert join(coordinator, "later").started().client.job_training() == 2
    newcomer.send("ready", 2)
    poll_until(lambda: member.client.change_pending)
    member.client.send("at_boundary", 1)
    assert newcomer.next_view(0).ids == ("w0", "late")


def test_rank_0_tells_how_many_nodes_are_wanted_and_the_newest_one_leaves(form, join):
    coordinator, (first, second, third) = form(3, min_nodes=1, max_nodes=4, last_call_s=0.5)
    for worker in (first, second, third):
        worker.client.send("settled", 1)
    first.client.want(2)
    poll_until(lambda: first.client.room is not None and first.client.room.wanted == 2)
    poll_until(lambda: first.client.change_pending)
    for worker in (first, second, third):
        worker.client.send("at_boundary", 1)
    assert first.client.next_view(1).ids == (first.client.member.id, second.client.member.id)
    with pytest.raises(Left):
        third.client.next_view(1)
    spare = join(coordinator, "late").started().client
    spare.send("ready", 1)
    poll_until(lambda: first.client.room == Room(Demand(1, 1, 2), 2, 1, 0, 1, 4))
    assert not first.client.change_pending
    assert second.client._protocol.resume_state.demand == Demand(1, 1, 2)


def test_coordinator_tells_the_newest_place_of_the_newest_training(form, join):
    coordinator, (first, second) = form(2, heartbeat_timeout_s=0.4)
    newcomer = join(coordinator, "late").started().client
    first.client.tell_watermark(Watermark(3, 10))
    second.client.tell_watermark(Watermark(0, 4, training=2))
    while newcomer.job_watermark() != Watermark(0, 4, training=2):
        time.sleep(0.01)


def test_client_does_not_tell_a_place_that_names_too_many_positions():
    client = CoordinatorClient(("127.0.0.1", 1), MEMBER, None)
    client.tell_watermark(Watermark(0, 5))
    client.tell_watermark(Watermark(0, 9999, tuple(range(fields.MAX_RETURNED + 1))))
    assert client._protocol._heartbeats.watermark == Watermark(0, 5)


def test_client_of_a_newcomer_that_looks_for_the_place_learns_that_the_job_is_over(form, join):
    coordinator, (member,) = form(1)
    newcomer = join(coordinator, "late").started().client
    member.client.send("close")
    while not newcomer._protocol.end:
        time.sleep(0.01)
    with pytest.raises(JobFinished):
        newcomer.job_watermark()


def test_client_stop_may_be_repeated_and_come_before_start():
    client = CoordinatorClient(("127.0.0.1", 1), MEMBER, None)
    client.stop()
    client.stop()
    client.send("bye")


def test_client_that_is_stopped_while_nobody_answers_does_not_wait_for_that(join, monkeypatch):
    """As with Ctrl-C at the start, where the address of the coordinator is wrong."""
    monkeypatch.setattr("ef_common.control.client._GOODBYE_S", GUARD_S)  # longer than an attempt
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf, contextlib.ExitStack() as waiting:
        with contextlib.suppress(OSError):
            while True:  # until the system answers nobody any more
                waiting.enter_context(socket.create_connection(deaf.getsockname(), timeout=0.2))
        worker = join(deaf.getsockname(), "w", connect_timeout_s=GUARD_S)
        poll_until(lambda: worker.client._connecting and len(worker.client._threads) == 2)
        worker.client.stop()
        reader, heartbeats = worker.client._threads
        assert reader.is_alive()
        heartbeats.join(GUARD_S)
        with pytest.raises(CoordinatorLost, match="has closed its control connection"):
            worker.started()


def test_client_whose_name_server_is_lost_finds_its_standby(serve, join, monkeypatch):
    """As if the node of the coordinator was the name server, too."""
    real, over = socket.getaddrinfo, threading.Event()

    def getaddrinfo(host, *args, flags=0, **kwargs):
        if host == "head.test" and not flags & socket.AI_NUMERICHOST:
            over.wait(GUARD_S)
            raise socket.gaierror("no answer")
        return real(host, *args, flags=flags, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    try:
        worker = join(("head.test", 1), "w", standby=serve(), connect_timeout_s=10.0).started()
        assert worker.client.next_view(0).ids == ("w",)
    finally:
        over.set()


def test_client_finds_its_coordinator_at_the_last_address_of_a_name_though_the_others_are_silent(
    serve, join, monkeypatch
):
    coordinator, real = serve(), socket.getaddrinfo
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf, contextlib.ExitStack() as waiting:
        with contextlib.suppress(OSError):
            while True:  # until the system answers nobody any more
                waiting.enter_context(socket.create_connection(deaf.getsockname(), timeout=0.2))
        places = [
            real(*where, type=socket.SOCK_STREAM)[0] for where in (*[deaf.getsockname()] * 2, coordinator.address)
        ]

        def getaddrinfo(host, *args, flags=0, **kwargs):
            if host == "three.test" and not flags & socket.AI_NUMERICHOST:
                return places
            return real(host, *args, flags=flags, **kwargs)

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        worker = join(("three.test", 1), "w", standby=serve(standby=True), connect_timeout_s=10.0).started()
        assert worker.client.next_view(0).ids == ("w",)


def test_client_makes_no_connection_whose_time_is_over(monkeypatch):
    monkeypatch.setattr(ControlConnection, "connect", None)
    client = CoordinatorClient(("127.0.0.1", 1), MEMBER, None)
    introduction = Introduction(MEMBER, None, key=new_nonce(), address=("127.0.0.1", 1))
    client._read(Connect(CoordinatorLink(("127.0.0.1", 1), introduction, 0.0), 1.0, 1.0))
    assert not client._connections


def test_client_is_heard_to_its_last_word_by_a_coordinator_that_speaks_meanwhile(form):
    """If the client did not read that any more, its system would reset the connection, and the word be lost."""
    coordinator, (worker,) = form(1)
    server = coordinator._server
    (peer,) = server.workers.values()

    def be_busy(now: float) -> None:
        for _ in range(3):
            time.sleep(0.1)
            coordinator._serving._do(Write(peer, wire.encode(wire.Alive())))

    in_loop(coordinator, be_busy)
    worker.client.send("close")
    worker.client.stop()
    poll_until(lambda: coordinator._server.state.closed)


def test_client_started_twice_raises_protocol_error(form):
    _, workers = form(1)
    with pytest.raises(ProtocolError, match="twice"):
        workers[0].client.start(lambda generation: None)


def test_client_unknown_message_raises_protocol_error():
    with pytest.raises(ProtocolError, match="kind='hello'"):
        CoordinatorClient(("127.0.0.1", 1), MEMBER, None).send("hello")


def test_client_that_comes_after_the_end_closes_its_connection(form, join):
    coordinator, workers = form(1)
    workers[0].client.send("close")
    workers[0].client.stop()
    late = join(coordinator, "late")
    with pytest.raises(JobFinished):
        late.started()
    assert coordinator.wait_until_idle(10)


def test_control_plane_does_not_import_torch():
    code = (
        "import sys, ef_common.control.client, ef_common.control.coordinator, ef_common.launch.environment;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_worker_whose_connection_breaks_before_the_first_view_connects_again(serve, join, caplog):
    coordinator = serve(2)
    early = join(coordinator, "a")
    poll_until(lambda: "a" in coordinator._server.state.workers and early.client._protocol._link)
    break_connections(early.client)
    poll_until(lambda: "connecting again" in caplog.text)
    other = join(coordinator, "b")
    assert (early.started().warm_up, other.started().warm_up) == (False, False)
    assert set(early.client.next_view(0).ids) == {"a", "b"}
