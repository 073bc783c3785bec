"""Standbys take over from a coordinator that is lost, with real lines between them and the workers."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time

import pytest

from ef_common.control import sockets
from ef_common.control.control_connection import ControlConnection
from ef_common.control.coordinator import Coordinator
from ef_common.core.membership import Idle
from ef_common.errors import Evicted
from ef_common.protocol import wire
from ef_common.protocol.addresses import format_address
from ef_common.protocol.peer import End
from ef_common.session.crash_record import CrashRecord
from ef_common.session.progress_tracker import ProgressTracker
from tests.control.conftest import break_connections, connection_of, fall_silent, in_loop
from tests.waiting import poll_until

GUARD_S = 60.0


@pytest.fixture
def job(serve, join):
    """So many workers in view 1, each with a standby of its own; the first one's is the coordinator at the endpoint."""

    def make(number: int, *, claim=None, **kwargs):
        coordinators = [serve(number, **kwargs)]
        endpoints = [coordinators[0].address]
        coordinators += [serve(standby=True, endpoints=endpoints, **kwargs) for _ in range(number - 1)]
        workers = [
            join(coordinators[0], f"w{index}", standby=coordinators[index], connect_timeout_s=GUARD_S)
            for index in range(number)
        ]
        for worker in workers:
            assert worker.started().warm_up is False
        for worker in workers:
            view = worker.client.next_view(0)
            worker.client.send("settled", 1)
            worker.client.use_store("" if claim is None else "0f" * 16, claim)
        order = [view.ids.index(f"w{index}") for index in range(number)]
        poll_until(lambda: len(coordinators[0]._server.state.settled) == number)
        return coordinators, workers, order

    return make


def leader(coordinators: list[Coordinator]) -> Coordinator | None:
    """The one that leads now."""
    for coordinator in coordinators:
        state = coordinator._server.state
        if state.view is not None and state.workers and not state.held and coordinator._thread is not None:
            return coordinator
    return None


def test_failover_of_the_coordinator_alone_keeps_the_view(job):
    coordinators, workers, _ = job(3)
    coordinators[0].stop()
    poll_until(lambda: leader(coordinators[1:]))
    state = leader(coordinators[1:])._server.state
    assert state.view == workers[0].client.next_view(0)
    assert [worker.views_noticed for worker in workers] == [[1]] * 3


def test_worker_that_has_gone_to_another_coordinator_is_not_taken_for_dead(job):
    coordinators, workers, _ = job(3)
    fall_silent(workers[2].client)  # it does not return
    connection = connection_of(workers[2].client)
    connection.queue(wire.encode(wire.Moved()))
    connection.flush()
    server = coordinators[0]._server
    poll_until(lambda: server.state.view is not None and server.state.view.generation > 1)
    assert "w2" not in server.state.view.ids
    assert "w2" not in server.state.gone


def test_failover_is_followed_by_a_loss_and_a_join(job, join):
    coordinators, workers, _ = job(3)
    coordinators[0].stop()
    poll_until(lambda: leader(coordinators[1:]))
    workers[2].stop()
    view = workers[0].client.next_view(1)
    assert set(view.ids) == {"w0", "w1"}
    for worker in workers[:2]:
        worker.client.next_view(1)
        worker.client.send("settled", view.generation)
    # Its endpoint is dead; a standby of its own knows where the coordinator is.
    own = next(c for c in coordinators[1:] if c is not leader(coordinators[1:]))
    newcomer = join(coordinators[0].address, "n", standby=own).started()
    assert newcomer.warm_up is True
    newcomer.client.send("ready")
    poll_until(lambda: all(worker.client.change_pending for worker in workers[:2]))
    for worker in workers[:2]:
        worker.client.send("at_boundary", view.generation)
    assert set(newcomer.client.next_view(0).ids) == {"w0", "w1", "n"}


def test_failover_of_the_coordinators_node_makes_a_view_of_the_others(job):
    coordinators, workers, _ = job(3)
    began = time.monotonic()
    coordinators[0].stop()
    workers[0].stop()
    views = [worker.client.next_view(1) for worker in workers[1:]]
    assert views[0] == views[1]
    assert set(views[0].ids) == {"w1", "w2"}
    assert time.monotonic() - began < 30.0  # far less than the heartbeat timeout, which is 60 s


def test_failover_to_one_of_two_goes_on_when_the_node_of_the_coordinator_has_died(job):
    coordinators, workers, _ = job(2)
    coordinators[0].stop()
    workers[0].stop()
    assert workers[1].client.next_view(1).ids == ("w1",)


def test_failover_to_one_of_two_waits_when_the_other_only_is_silent(job):
    coordinators, workers, _ = job(2, heartbeat_timeout_s=0.5)
    silent = workers[0].client
    # Its liveness port stays open, and it goes nowhere: as if it was stopped.
    fall_silent(silent)
    coordinators[0].stop()
    poll_until(lambda: coordinators[1]._server.state.held)
    assert "only 1 of 2 members of view 1" in coordinators[1]._server.state.held
    assert workers[1].views_noticed == [1]
    assert workers[1].client.next_view(0).issuer == coordinators[0].address[1]
    silent._close_liveness_port()  # it dies
    assert workers[1].client.next_view(1).ids == ("w1",)


def test_failover_to_one_of_two_waits_when_the_other_decides_though_connections_to_it_are_refused(job):
    """A firewall may refuse them, and the other one goes on."""
    coordinators, workers, _ = job(2, heartbeat_timeout_s=0.5)
    silent = workers[1].client
    fall_silent(silent)
    coordinators[0].stop()
    server = coordinators[1]._server
    poll_until(lambda: server.state.held)
    assert "only 1 of 2 members of view 1" in server.state.held
    silent._close_liveness_port()
    poll_until(lambda: "w1" in server.state.dead)
    assert server.state.held
    assert workers[0].views_noticed == [1]


@pytest.mark.parametrize("has_it", [True, False])
def test_failover_to_one_of_two_goes_on_with_the_claim_when_the_other_only_is_silent(job, has_it):
    winners = {}

    def claim(name, members):
        return winners.setdefault(name, members if has_it else ("w0",))

    coordinators, workers, _ = job(2, heartbeat_timeout_s=0.5, claim=claim)
    fall_silent(workers[0].client)  # its liveness port stays open, and it goes nowhere
    coordinators[0].stop()
    if has_it:
        assert workers[1].client.next_view(1).ids == ("w1",)
    else:
        poll_until(lambda: "others go on" in coordinators[1]._server.state.held)
        assert workers[1].views_noticed == [1]
    assert list(winners.values()) == [("w1",) if has_it else ("w0",)]


def test_failover_while_a_newcomer_warms_up_keeps_it(job, join, serve):
    coordinators, workers, _ = job(3)
    own = serve(3, standby=True)  # it has heard of nobody
    newcomer = join(coordinators[0], "n", standby=own).started()
    assert newcomer.warm_up is True
    coordinators[0].stop()
    poll_until(lambda: leader(coordinators[1:]))
    newcomer.client.send("ready")
    poll_until(lambda: all(worker.client.change_pending for worker in workers))
    for worker in workers:
        worker.client.send("at_boundary", 1)
    assert newcomer.client.next_view(0).world_size == 4


def test_failover_while_members_wait_at_a_boundary_issues_the_planned_view(job, join):
    coordinators, workers, _ = job(2)
    newcomer = join(coordinators[0], "n", standby=coordinators[1]).started()
    newcomer.client.send("ready")
    poll_until(lambda: all(worker.client.change_pending for worker in workers))
    workers[0].client.send("at_boundary", 1)
    coordinators[0].stop()
    workers[1].client.send("at_boundary", 1)
    views = [worker.client.next_view(1) for worker in workers]
    if views[0].world_size == 2:  # the members have come back before the newcomer
        view = views[0]
        for worker in workers:
            worker.client.send("settled", view.generation)
        poll_until(lambda: view.pending or all(worker.client.change_pending for worker in workers))
        for worker in workers:
            worker.client.send("at_boundary", view.generation)
        views = [worker.client.next_view(view.generation) for worker in workers]
    assert newcomer.client.next_view(0) == views[0]


def test_failover_when_the_coordinator_is_stopped_and_goes_on_later_leaves_one_leader(job):
    coordinators, workers, _ = job(3, heartbeat_timeout_s=0.5)
    stopped, go_on = threading.Event(), threading.Event()

    def stop() -> None:
        stopped.set()
        go_on.wait(GUARD_S)

    coordinators[0]._loop.call_soon_threadsafe(stop)
    stopped.wait(GUARD_S)
    poll_until(lambda: leader(coordinators[1:]))
    go_on.set()
    poll_until(lambda: isinstance(coordinators[0]._server.state, Idle))
    assert leader(coordinators[1:])._server.state.view.generation == 1
    assert [worker.views_noticed for worker in workers] == [[1]] * 3


def test_client_whose_connection_breaks_returns_to_the_same_coordinator(job):
    coordinators, workers, _ = job(3)
    break_connections(workers[1].client)
    poll_until(lambda: coordinators[0]._server.state.workers.get("w1"))
    workers[1].client.send("suspect", 1)
    for worker in (workers[0], workers[2]):
        worker.client.send("suspect", 1)
    assert {worker.client.next_view(1).generation for worker in workers} == {2}


def test_client_that_is_sent_to_another_coordinator_does_not_try_the_old_one_first(job):
    coordinators, workers, _ = job(2)
    first, client = coordinators[0]._server, workers[1].client
    first._leadership.follow(format_address(coordinators[1].address))
    in_loop(coordinators[0], lambda now: first._redirect("w1"))
    poll_until(lambda: "w1" in coordinators[1]._server.state.workers)
    assert client._protocol._search.address == coordinators[1].address


def test_client_that_is_sent_away_looks_elsewhere_though_its_coordinator_would_take_it_again(job, monkeypatch):
    """Where that one's node was cut off, it stays a minority for good."""
    coordinators, workers, _ = job(3, heartbeat_timeout_s=0.5)
    client = workers[2].client
    client._protocol._search.address = coordinators[2].address  # it has gone there while it could reach nobody else
    asked = []

    class Unreached(ControlConnection):
        @classmethod
        def connect(cls, address, *args, **kwargs):
            asked.append(address)
            raise ConnectionRefusedError

    monkeypatch.setattr("ef_common.control.client.ControlConnection", Unreached)
    client._do(lambda: client._protocol._hear(wire.Redirect("", "0" * 64)))
    break_connections(client)
    poll_until(lambda: len(set(asked)) > 1)
    assert asked[0] != coordinators[2].address


def test_worker_that_is_silent_is_not_told_that_it_is_out_before_others_go_on_without_it(job):
    """It may be the coordinator that hears nobody: those whom it would end are most of the members."""
    coordinators, workers, _ = job(3, heartbeat_timeout_s=0.5)
    for worker in workers[1:]:
        fall_silent(worker.client)  # it goes nowhere, either
    poll_until(lambda: coordinators[0]._server.state.held)
    assert "only 1 of 3" in coordinators[0]._server.state.held
    assert not any(worker.client._protocol.end for worker in workers)
    connection_of(workers[1].client).hang_up()  # its process ends
    assert workers[0].client.next_view(1).ids == ("w0",)
    with pytest.raises(Evicted):
        workers[2].client.next_view(1)


def test_worker_whose_connection_was_reset_does_not_take_its_coordinator_for_dead(job):
    coordinators, workers, _ = job(3)
    client, server = workers[2].client, coordinators[0]._server
    client._do(client._protocol._ask_for_downlink)
    poll_until(lambda: client._protocol._hears_downlink)
    before = server.workers["w2"]
    in_loop(coordinators[0], lambda now: server.end(before, End.BROKEN, now))
    poll_until(lambda: client._protocol.end)
    assert isinstance(client._protocol.end, Evicted)  # by the coordinator itself, to which it has come back
    assert not any(link.over for link in client._protocol.resume_state.links)


def test_client_whose_connection_breaks_publishes_again_what_may_be_lost(job):
    _, workers, _ = job(2)
    break_connections(workers[0].client)
    workers[0].client.bootstrap(1).put("key", b"value")
    poll_until(lambda: workers[1].client._protocol.value(1, "key") == b"value")


def test_end_of_a_connection_that_proves_nothing_does_not_count_a_worker_as_gone(job):
    coordinators, workers, _ = job(3)
    server = coordinators[0]._server
    fall_silent(workers[2].client)  # it does not return
    in_loop(coordinators[0], lambda now: server.end(server.workers["w2"], End.BROKEN, now))
    assert set(workers[0].client.next_view(1).ids) == {"w0", "w1"}
    assert server.state.gone == frozenset()


@pytest.mark.parametrize("word", [None, wire.encode(wire.Moved())], ids=["no word", "no room"])
def test_control_connection_that_is_left_without_a_word_is_reset(word):
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    near.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while word is not None and near.send(bytes(65536)):
            pass  # until there is room for nothing more
    ControlConnection(near).leave(word)
    with far, pytest.raises(ConnectionResetError):
        read_to_the_end(far)


def read_to_the_end(sock: socket.socket) -> None:
    while sock.recv(65536):
        pass


def test_fresh_coordinator_at_the_old_endpoint_becomes_a_standby(job, serve, join):
    coordinators, _, _ = job(2)
    endpoint = coordinators[0].address
    coordinators[0].stop()
    poll_until(lambda: leader(coordinators[1:]))
    fresh = Coordinator(endpoint, heartbeat_timeout_s=60.0)
    fresh._settings = coordinators[1]._settings
    fresh.start()
    try:
        poll_until(lambda: isinstance(fresh._server.state, Idle))
        newcomer = join(endpoint, "n", standby=fresh).started()
        assert newcomer.warm_up is True
        poll_until(lambda: "n" in leader(coordinators[1:])._server.state.workers)
    finally:
        fresh.stop()


def test_worker_that_was_away_for_too_long_is_evicted(job, monkeypatch):
    _, workers, _ = job(3, heartbeat_timeout_s=0.5)
    away = workers[2].client
    monkeypatch.setattr(away._protocol, "tick", lambda now: None)
    assert set(workers[0].client.next_view(1).ids) == {"w0", "w1"}
    with pytest.raises(Evicted):
        away.next_view(1)


def test_door_is_closed_to_forked_children_and_open_as_long_as_the_worker_lives(job):
    _, workers, _ = job(2)
    port = workers[0].client.member.liveness_port
    socket.create_connection(("127.0.0.1", port)).close()
    workers[0].stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


class Beats(CrashRecord):
    """Counts what is noted down for the agent."""

    def __init__(self):
        super().__init__()
        self.num_beats, self.rests = 0, False

    def beat(self):
        self.num_beats += 1

    def rest(self):
        self.rests = True


def test_agent_sees_beats_each_second_however_rare_heartbeats_are_and_none_after_the_close(serve, join):
    record = Beats()
    worker = join(serve(1, heartbeat_timeout_s=600.0), "w0", crash_record=record).started()
    poll_until(lambda: record.num_beats >= 3)
    assert not record.rests
    worker.client.send("close")
    poll_until(lambda: record.rests)


def test_agent_sees_no_beats_between_two_trainings(serve, join):
    record, tracker = Beats(), ProgressTracker(time.monotonic)
    join(serve(1), "w0", crash_record=record, tracker=tracker).started()
    poll_until(lambda: record.num_beats >= 1)
    tracker.rests = True
    poll_until(lambda: record.rests)
    tracker.rests, before = False, record.num_beats
    poll_until(lambda: record.num_beats > before)


def test_control_connections_leave_no_fork_handlers_behind():
    def open_and_close():
        ends = socket.socketpair()
        ControlConnection(ends[0]).close()
        ends[1].close()

    open_and_close()
    gc.collect()
    before = len(sockets._CALLED_IN_CHILDREN)
    for _ in range(10):
        open_and_close()
    gc.collect()
    assert len(sockets._CALLED_IN_CHILDREN) <= before


def test_coordinator_that_hands_over_sends_members_and_newcomers_to_another_one_and_no_view_changes(job, join):
    coordinators, workers, order = job(3)
    early = join(coordinators[0], "n", standby=coordinators[2]).started()
    first = workers[order.index(0)]
    assert coordinators[0].hand_over(first.client.member.node)
    assert coordinators[0].wait_until_idle(0)
    coordinators[0].stop()
    poll_until(lambda: leader(coordinators[1:]))
    new = leader(coordinators[1:])._server
    poll_until(lambda: {"w0", "w1", "w2", "n"} <= set(new.state.workers))
    assert new.state.view == workers[0].client.next_view(0)
    assert [worker.views_noticed for worker in workers] == [[1]] * 3
    early.client.send("ready")
    poll_until(lambda: all(worker.client.change_pending for worker in workers))


def test_coordinator_whose_thread_does_not_answer_does_not_hand_over(serve, monkeypatch):
    coordinator, released = serve(1), threading.Event()
    coordinator._loop.call_soon_threadsafe(released.wait)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("ef_common.control.coordinator._STOP_S", 0.05)
            assert not coordinator.hand_over("elsewhere")
    finally:
        released.set()


def test_coordinator_with_nobody_to_take_over_does_not_hand_over(job, serve, join):
    coordinators, workers, _ = job(1)
    assert not coordinators[0].hand_over(workers[0].client.member.node)
    standby = serve(standby=True)
    assert not standby.hand_over("elsewhere")
    stopped = serve(1)
    stopped.stop()
    assert not stopped.hand_over("elsewhere")
    assert not coordinators[0].wait_until_idle(0)
