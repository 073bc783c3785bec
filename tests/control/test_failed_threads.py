"""A thread of the control plane that fails tells all who wait for it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ef_common.control.client import CoordinatorClient
from ef_common.control.control_connection import ControlConnection
from ef_common.control.coordinator import Coordinator
from ef_common.control.leader_announcer import LeaderAnnouncer
from ef_common.control.leader_request import Conversation
from ef_common.control.serving import ServedStream, ServerLoop
from ef_common.core import membership
from ef_common.core.membership import Install
from ef_common.core.quorum import Bid
from ef_common.core.resume_state import ResumeState
from ef_common.core.view import View
from ef_common.errors import CoordinatorLost, GroupBroken, ProtocolError, ThreadFailed
from ef_common.protocol import wire
from ef_common.protocol.client import Client
from ef_common.protocol.server import CoordinatorServer
from ef_common.protocol.server_outputs import Write
from ef_common.session.crash_record import CrashRecord
from tests.control.conftest import break_connections, connection_of, in_loop
from tests.control.test_failover import job, leader  # noqa: F401  (a fixture)
from tests.waiting import poll_until

GUARD_S = 20.0


class Outcome:
    """Something that may wait for ever, in a thread."""

    def __init__(self, wait: Any) -> None:
        self.error: BaseException | None = None
        self._wait = wait
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._wait()
        except BaseException as error:
            self.error = error

    def get(self) -> BaseException | None:
        self._thread.join(GUARD_S)
        assert not self._thread.is_alive(), "it waits for ever"
        return self.error


def fail(*args: object, **kwargs: object) -> None:
    raise RuntimeError("out of order")


def words_for(coordinator: Coordinator, client: CoordinatorClient) -> Write:
    """Something that the coordinator says to a worker."""
    return Write(coordinator._server.workers[client.member.id], b'{"v":13,"t":"alive"}\n' * 2)


def assert_out_of_order(error: BaseException | None) -> None:
    assert isinstance(error, ThreadFailed)
    assert str(error) == "the thread that speaks with the coordinator has failed: RuntimeError: out of order"
    assert isinstance(error.__cause__, RuntimeError)


@pytest.mark.parametrize("place", ["receive", "take in"])
def test_reader_that_fails_tells_the_main_thread_and_ends_the_line(form, monkeypatch, place):
    coordinator, (worker, other) = form(2)
    waiting = Outcome(lambda: worker.client.next_view(1))
    fetching = Outcome(lambda: worker.client.bootstrap(1).get("k"))
    if place == "receive":
        monkeypatch.setattr(connection_of(worker.client), "read", fail)
    else:
        monkeypatch.setattr(worker.client._protocol, "receive", fail)
    in_loop(coordinator, lambda now: coordinator._server.outputs.append(words_for(coordinator, worker.client)))
    error = waiting.get()
    assert isinstance(error, ThreadFailed)
    assert str(error) == "the thread that listens to the coordinator has failed: RuntimeError: out of order"
    assert isinstance(error.__cause__, RuntimeError)
    assert isinstance(fetching.get(), GroupBroken)
    poll_until(lambda: worker.views_noticed[-1] > 1 << 32)  # so its group ends, and a world of one asks
    assert worker.client.change_pending
    assert other.client.next_view(1).ids == (other.client.member.id,)  # the others go on at once


def hear_on_downlink(client: CoordinatorClient) -> None:
    client._do(client._protocol._ask_for_downlink)
    poll_until(lambda: client._protocol._hears_downlink)


@pytest.mark.parametrize("place", ["receive", "take in"])
def test_reader_of_the_downlink_that_fails_tells_the_main_thread_and_ends_the_line(job, monkeypatch, place):  # noqa: F811
    coordinators, workers, _ = job(2)
    client, server = workers[1].client, coordinators[0]._server
    hear_on_downlink(client)
    waiting = Outcome(lambda: client.next_view(1))
    if place == "receive":
        monkeypatch.setattr(client._connections[client._protocol._downlink], "read", fail)
    else:
        monkeypatch.setattr(client._protocol, "receive", fail)
    in_loop(coordinators[0], lambda now: server._tell([(wire.Alive(), ["w1"])] * 2))
    error = waiting.get()
    assert isinstance(error, ThreadFailed)
    assert str(error) == "the thread that hears the coordinator has failed: RuntimeError: out of order"
    assert workers[0].client.next_view(1).ids == ("w0",)  # the others go on at once


def test_worker_that_can_have_no_more_threads_does_without_a_downlink(job, monkeypatch):  # noqa: F811
    _, workers, _ = job(2)
    client = workers[1].client

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        client._do(client._protocol._ask_for_downlink)
    assert client._protocol._downlink is None
    assert client._protocol.end is None
    hear_on_downlink(client)  # the next heartbeat asks again


def test_failure_of_the_reader_in_a_call_that_another_thread_does_for_it_ends_the_line(form, monkeypatch):
    """The thread that does it may have nobody who waits for it, and the reader would read on."""
    coordinator, (worker, other) = form(2)
    client = worker.client
    waiting = Outcome(lambda: client.next_view(1))
    monkeypatch.setattr(client._protocol, "receive", fail)
    with client._changed:
        in_loop(coordinator, lambda now: coordinator._server.outputs.append(words_for(coordinator, client)))
        poll_until(lambda: client._calls)
        client.send("suspect", 1)
    assert_out_of_order(waiting.get())
    assert other.client.next_view(1).ids == (other.client.member.id,)


def test_output_that_cannot_be_carried_out_ends_the_line_whoever_asked_for_it(form, monkeypatch):
    _, (worker, other) = form(2)
    client = worker.client
    waiting = Outcome(lambda: client.next_view(1))
    monkeypatch.setattr(connection_of(client), "flush", fail)
    client.send("suspect", 1)
    assert_out_of_order(waiting.get())
    assert other.client.next_view(1).ids == (other.client.member.id,)


def test_claim_whose_thread_fails_or_cannot_be_started_ends_the_line(form, monkeypatch):
    for owner, method in ((Client, "claimed"), (threading.Thread, "start")):
        _, (worker,) = form(1)
        client = worker.client
        client.use_store("0f" * 16, lambda name, members: members)
        waiting = Outcome(lambda client=client: client.next_view(1))
        poll_until(lambda client=client: client._changed._waiters)  # it has been started
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, fail)
            client._do(lambda client=client: client._protocol._hear(membership.Claim("", Bid("3", ("a",)))))
            assert isinstance(waiting.get(), ThreadFailed)


def test_worker_that_hangs_is_ended_even_if_there_can_be_no_more_threads(form, monkeypatch):
    _, (worker,) = form(1)
    client = worker.client
    ended: list[str] = []
    monkeypatch.setattr(client, "_on_hung", lambda why, heard: ended.append(why))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        client._do(lambda: client._protocol._hear(wire.Eviction("it hangs", hung=True)))
    assert ended == ["it hangs"]


def test_heartbeats_that_fail_tell_the_main_thread_and_end_the_line(serve, join, monkeypatch):
    coordinator, record = serve(2, heartbeat_timeout_s=4.0), CrashRecord()
    rested = threading.Event()
    monkeypatch.setattr(record, "rest", rested.set)
    workers = [join(coordinator, "a", crash_record=record).started, join(coordinator, "b").started]
    worker, other = (started() for started in workers)
    worker.client.next_view(0)
    waiting = Outcome(lambda: worker.client.next_view(1))
    monkeypatch.setattr(record, "beat", fail)
    error = waiting.get()
    assert isinstance(error, ThreadFailed)
    assert "sends heartbeats to the coordinator has failed: RuntimeError" in str(error)
    assert rested.wait(GUARD_S)  # its agent does not take it for one that stands still
    assert other.client.next_view(1).ids == ("b",)


def test_worker_that_cannot_tell_where_it_stands_ends_and_leaves_no_line(job, monkeypatch):  # noqa: F811
    _, workers, _ = job(2)
    client = workers[0].client
    opened: list[ControlConnection] = []

    class Kept(ControlConnection):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            opened.append(self)

    def refuse(state: object, member: object) -> None:
        raise ProtocolError("a message must fit into 2097152 bytes. Received: 2097153 bytes")

    monkeypatch.setattr("ef_common.control.client.ControlConnection", Kept)
    monkeypatch.setattr(ResumeState, "report", refuse)
    waiting = Outcome(lambda: client.next_view(1))
    break_connections(client)
    error = waiting.get()
    assert isinstance(error, ThreadFailed)
    assert "ProtocolError: a message must fit into 2097152 bytes" in str(error)
    assert opened
    poll_until(lambda: all(line._socket.fileno() < 0 for line in opened))


def test_first_view_that_a_failed_reader_cannot_take_in_is_not_waited_for(serve, join, monkeypatch):
    coordinator = serve(2)
    worker = join(coordinator, "a")
    poll_until(lambda: coordinator._server.state.workers)
    poll_until(lambda: worker.client._threads)
    monkeypatch.setattr(worker.client._protocol, "_hear_view", fail)
    join(coordinator, "b")
    with pytest.raises(ThreadFailed):
        worker.started()


def knows_the_leader(coordinators) -> bool:
    """Whether one of two leads, and the other one has heard so. They may change places before."""
    first = leader(coordinators)
    if not first:
        return False
    (other,) = {*coordinators} - {first}
    return other._server.leader.endswith(f":{first.address[1]}")


def test_announcer_that_fails_once_tells_all_the_same(job, monkeypatch):  # noqa: F811
    failures = [RuntimeError("out of order")] * 3

    def attempt(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop()
        return Conversation(*args, **kwargs)

    monkeypatch.setattr("ef_common.control.leader_announcer.Conversation", attempt)
    monkeypatch.setattr("ef_common.protocol.announcer._AGAIN_S", 0.05)
    coordinators, _, _ = job(3)
    coordinators[0].stop()
    poll_until(lambda: knows_the_leader(coordinators[1:]))
    assert not failures


def test_announcer_that_cannot_look_looks_again(job, monkeypatch):  # noqa: F811
    look, failures = LeaderAnnouncer._look, [RuntimeError("out of order")] * 2

    def fail_first(self: LeaderAnnouncer) -> None:
        if failures:
            raise failures.pop()
        look(self)

    monkeypatch.setattr(LeaderAnnouncer, "_look", fail_first)
    monkeypatch.setattr("ef_common.control.leader_announcer._AFTER_FAULT_S", 0.05)
    coordinators, _, _ = job(3)
    coordinators[0].stop()
    poll_until(lambda: knows_the_leader(coordinators[1:]))


def test_announcer_of_the_endpoints_that_cannot_look_looks_again(serve, monkeypatch):
    failures = [RuntimeError("out of order")] * 2
    looked = threading.Event()

    def fail_first(self: LeaderAnnouncer) -> None:
        if failures:
            raise failures.pop()
        looked.set()

    monkeypatch.setattr(LeaderAnnouncer, "_look_at_endpoints", fail_first)
    monkeypatch.setattr("ef_common.control.leader_announcer._AFTER_FAULT_S", 0.05)
    serve(standby=True, endpoints=[("127.0.0.1", 1)])
    assert looked.wait(GUARD_S)


@pytest.mark.parametrize("also", ["nothing", "a connection", "all connections"])
def test_coordinator_whose_loop_ends_tells_its_workers_and_its_host(form, monkeypatch, also):
    coordinator, workers = form(2)
    waiting = [Outcome(lambda worker=worker: worker.client.next_view(1)) for worker in workers]
    owner, name = (ServedStream, "abort") if also == "a connection" else (ServerLoop, "end_all")
    act = getattr(owner, name)

    def act_and_fail(self: Any) -> None:
        act(self)
        raise RuntimeError("out of order")

    if also != "nothing":
        monkeypatch.setattr(owner, name, act_and_fail)

    def end() -> None:
        raise SystemExit(1)

    coordinator._loop.call_soon_threadsafe(end)
    for one in waiting:
        assert isinstance(one.get(), CoordinatorLost)
    assert coordinator.wait_until_idle(GUARD_S)
    poll_until(coordinator._loop.is_closed)
    with pytest.raises(ThreadFailed, match="serves the workers of the job has failed: SystemExit: 1"):
        poll_until(coordinator.check)
    assert not coordinator.leads  # or its agent would go on leaving signs of life
    assert coordinator._announcer._stopped.is_set()  # it would go on telling others that this coordinator leads


@pytest.mark.parametrize("standbys", [False, True])
def test_decision_that_cannot_be_told_is_waited_for_by_nobody(form, job, monkeypatch, standbys):  # noqa: F811
    perform, failures = CoordinatorServer._perform, [RuntimeError("out of order")]

    def fail_once(self: CoordinatorServer, action: Any) -> None:
        if isinstance(action, Install) and action.view.generation == 2 and failures:
            raise failures.pop()
        perform(self, action)

    workers = job(3)[1] if standbys else form(3)[1]
    monkeypatch.setattr(CoordinatorServer, "_perform", fail_once)
    views: list[View] = []
    waiting = [Outcome(lambda worker=worker: views.append(worker.client.next_view(1))) for worker in workers[:2]]
    workers[2].client.send("bye")
    workers[2].stop()
    for worker in workers[:2]:
        worker.client.send("suspect", 1)  # rather than go on without the one that has said goodbye
    errors = [one.get() for one in waiting]
    assert not failures
    if standbys:
        assert errors == [None, None]
        assert [view.world_size for view in views] == [2, 2]
    else:
        assert all(isinstance(error, CoordinatorLost) for error in errors)
