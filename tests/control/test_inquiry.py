"""An agent asks whether the others go on without a worker; and what it sees of the worker's heartbeats."""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ef_common.control.leader_request import LeaderRequests
from ef_common.core.membership import Gathering, Shortage
from ef_common.core.view import Member
from ef_common.errors import AuthenticationError, Evicted, ProtocolError
from ef_common.protocol import wire
from ef_common.protocol.addresses import named_by
from ef_common.protocol.auth import Token
from ef_common.protocol.leadership import why_out
from ef_common.session.crash_record import CrashRecord, lives
from tests.control.conftest import connection_of, fall_silent
from tests.control.test_client import answer_with, listener  # noqa: F401  (a fixture)
from tests.control.test_failover import job, leader  # noqa: F401  (a fixture)
from tests.waiting import poll_until

AGENT = Member("n-agent", "n", "")
ASKER = LeaderRequests(AGENT, None)


def ask(coordinator, worker):
    return ASKER.inquire([coordinator.address], worker)


def test_inquiry_about_a_member_and_a_newcomer_says_that_they_are_not_out(form, join):
    coordinator, _ = form(2)
    join(coordinator, "late").started()
    assert [ask(coordinator, worker) for worker in ("w0", "w1", "late")] == ["", "", ""]


def test_inquiry_about_one_that_the_others_go_on_without_says_why(form):
    coordinator, workers = form(3)
    connection_of(workers[0].client).hang_up()
    assert workers[1].client.next_view(1).world_size == 2
    assert ask(coordinator, workers[0].client.member.id) == "view 2 is without it"


def test_inquiry_before_the_first_view_says_nothing_against_anybody(serve, join):
    coordinator = serve(2)
    join(coordinator, "w0")
    poll_until(lambda: coordinator._server.state.workers)
    assert [ask(coordinator, worker) for worker in ("w0", "w1")] == ["", ""]


def test_inquiry_after_the_job_has_failed_says_why(form):
    coordinator, workers = form(2)
    workers[1].client.fail("w1 raised ValueError")
    assert ask(coordinator, "w0") == "w1 raised ValueError"


def test_inquiry_of_a_coordinator_that_may_not_go_on_says_that_nothing_is_decided(form):
    """It may be this one that is cut off, and its newest view may never have come about."""
    coordinator, workers = form(3)
    connection_of(workers[0].client).hang_up()
    workers[1].client.next_view(1)
    name = workers[0].client.member.id
    server = coordinator._server
    assert why_out(name, server.state)
    server.state = replace(server.state, shortage=Shortage("only 1 of 2"))
    assert why_out(name, server.state) == ""


def test_inquiry_of_a_standby_that_gathers_the_members_says_that_nothing_is_decided(job):  # noqa: F811
    coordinators, workers, _ = job(2)
    fall_silent(workers[0].client)
    coordinators[0].stop()
    poll_until(lambda: isinstance(coordinators[1]._server.state, Gathering))
    assert ask(coordinators[1], "w0") == ""


def test_inquiry_goes_from_a_standby_to_who_has_taken_over(job):  # noqa: F811
    coordinators, workers, _ = job(3)
    coordinators[0].stop()
    workers[0].stop()
    poll_until(lambda: leader(coordinators) is not None)
    third = next(one for one in coordinators[1:] if one is not leader(coordinators))
    poll_until(lambda: third._server.leader)
    name = workers[0].client.member.id
    poll_until(lambda: ask(third, name))
    assert ask(third, workers[1].client.member.id) == ""


def test_inquiry_of_nobody_and_of_a_standby_that_knows_no_leader_says_nothing(serve):
    gone = serve()
    gone.stop()
    assert ASKER.inquire([gone.address, serve(standby=True).address], "w0") is None


def test_heartbeats_are_noted_down_until_the_worker_knows_that_it_is_out(serve, join, tmp_path: Path):
    coordinator = serve(1, heartbeat_timeout_s=0.4)
    record = CrashRecord(tmp_path)
    record.introduce("w0")
    worker = join(coordinator, "w0", crash_record=record).started()

    def beats():
        return [life.beats for life in lives(tmp_path).values()]

    poll_until(lambda: beats() > [3])
    worker.client._do(lambda: worker.client._protocol._hear(wire.Eviction("silent for 3 s")))
    before = beats()
    poll_until(lambda: beats() > before)  # the reader thread knows it, the main thread does not
    with pytest.raises(Evicted):
        worker.client.next_view(1)
    poll_until(lambda: not beats())


def test_heartbeats_end_in_the_crash_record_with_the_connection(serve, join, tmp_path: Path):
    coordinator = serve(1, heartbeat_timeout_s=0.4)
    record = CrashRecord(tmp_path)
    record.introduce("w0")
    worker = join(coordinator, "w0", crash_record=record).started()
    poll_until(lambda: lives(tmp_path))
    worker.client.stop()
    assert not any(thread.name == "elasticflow-heartbeat" and thread.is_alive() for thread in threading.enumerate())
    assert not lives(tmp_path)


def test_leader_is_found_also_through_a_standby_that_knows_it(serve, join):
    coordinators = [serve(2), serve(standby=True)]
    workers = [join(coordinators[0], f"w{index}", standby=one) for index, one in enumerate(coordinators)]
    for worker in workers:
        worker.started().client.send("settled", worker.client.next_view(0).generation)
    here, there = (coordinator.address for coordinator in coordinators)
    assert ASKER.find_leader([here]) == here
    assert ASKER.find_leader([there]) is None  # it has heard of nobody so far
    assert coordinators[0].hand_over(workers[0].client.member.node)
    poll_until(lambda: ASKER.find_leader([there]) == there)
    assert ASKER.find_leader([here]) == there  # the one that has handed over sends on
    assert ASKER.find_leader([("127.0.0.1", 1)]) is None


def test_leader_of_another_start_with_the_same_token_is_none(serve):
    token = Token("of the whole cluster")
    leader = serve(token=token.for_start("this")).address
    assert LeaderRequests(AGENT, token.for_start("this")).find_leader([leader]) == leader
    for other in (token, token.for_start("that"), None):
        with pytest.raises(AuthenticationError):
            LeaderRequests(AGENT, other).find_leader([leader])


def test_coordinator_of_another_version_is_told_by_both_versions_only_where_nobody_leads(serve, listener):  # noqa: F811
    answer_with(listener, b'{"v":99,"t":"challenge","nonce":""}\n')
    with pytest.raises(ProtocolError, match=rf"expected version {wire.VERSION} .*Received: v=99"):
        ASKER.find_leader([("127.0.0.1", 1), listener.getsockname()])
    leader = serve().address
    assert ASKER.find_leader([listener.getsockname(), leader]) == leader


def test_those_who_do_not_answer_are_asked_at_the_same_time():
    """Of many machines on record most may be gone."""
    number, lock, waiting, most = 10, threading.Lock(), 0, 0

    def be_silent(server: socket.socket) -> None:
        nonlocal waiting, most
        with server.accept()[0] as peer:
            with lock:
                waiting += 1
                most = max(most, waiting)
            while peer.recv(65536):
                pass
            with lock:
                waiting -= 1

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(number) as pool:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        heard = [pool.submit(be_silent, server) for server in silent]
        assert ASKER.find_leader([("127.0.0.1", 1), *(one.getsockname() for one in silent)]) is None
        assert all(one.result() is None for one in heard)
    assert most > number / 2


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_error_while_one_of_several_is_asked_reaches_the_one_that_looks(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error("out of order")

    monkeypatch.setattr("ef_common.control.leader_request.LeaderRequests._talk_to_leader", fail)
    with pytest.raises(error, match="out of order"):
        ASKER.find_leader([("127.0.0.1", 7)])


def test_what_a_standby_reaches_on_its_own_machine_others_reach_under_its_address():
    assert named_by(("192.0.2.1", 1), "127.0.0.1:7") == ("192.0.2.1", 7)
    assert named_by(("192.0.2.1", 1), "192.0.2.2:7") == ("192.0.2.2", 7)
