"""An exception of the user's own code, told over real lines."""

from __future__ import annotations

import threading

import pytest

from ef_common.control.control_connection import ControlConnection
from ef_common.control.leader_request import LeaderRequests
from ef_common.core.view import Member
from ef_common.errors import JobFailed
from ef_common.protocol.auth import Token
from tests.control.test_failover import job, leader  # noqa: F401  (a fixture)
from tests.waiting import poll_until

WHY = "worker w0 (node n) raised ValueError: x"


def test_failure_is_told_to_members_and_newcomers_and_whoever_comes_later(form, join):
    coordinator, workers = form(2)
    newcomer = join(coordinator, "late").started()
    assert workers[0].client.fail(WHY) is True
    for worker in (workers[1], newcomer, workers[0]):
        with pytest.raises(JobFailed, match=r"worker w0 .*ValueError: x"):
            worker.client.next_view(1)
    with pytest.raises(JobFailed, match="ValueError: x"):
        join(coordinator, "later").started()
    poll_until(lambda: workers[1].views_noticed[-1] > 1)  # so whoever waits in its group wakes


def test_failure_before_the_first_view_is_told_to_those_who_wait_for_it(serve, join):
    coordinator = serve(3)
    waiting = join(coordinator, "a")
    failing = join(coordinator, "b")
    poll_until(lambda: len(coordinator._server.state.workers) == 2 and failing.client._process)
    failing.client.fail(WHY)
    for worker in (waiting, failing):
        with pytest.raises(JobFailed, match="ValueError: x"):
            worker.started()


def test_failure_of_a_newcomer_is_not_the_jobs(form, join):
    coordinator, (worker,) = form(1)
    newcomer = join(coordinator, "late").started()
    assert newcomer.client.fail(WHY) is False
    assert not coordinator._server.state.failed
    assert worker.client.next_view(0).generation == 1


def test_failure_without_a_coordinator_does_not_take_long(form, monkeypatch):
    monkeypatch.setattr("ef_common.control.client.FAIL_S", 0.1)
    coordinator, (worker,) = form(1)
    coordinator.stop()
    assert worker.client.fail(WHY) is False


def test_failure_that_the_coordinator_has_not_told_is_told_by_its_successor(job, monkeypatch):  # noqa: F811
    """It dies when the word is on its way."""
    coordinators, workers, _ = job(3)
    queue = ControlConnection.queue

    def lost(self, data):
        if b'"t":"fail"' not in data:
            queue(self, data)

    monkeypatch.setattr(ControlConnection, "queue", lost)
    monkeypatch.setattr("ef_common.control.client.FAIL_S", 20.0)
    heard = []
    failing = threading.Thread(target=lambda: heard.append(workers[1].client.fail(WHY)))
    failing.start()
    coordinators[0].stop()
    failing.join(20.0)
    assert heard == [True]
    for worker in (workers[0], workers[2]):
        with pytest.raises(JobFailed, match="ValueError: x"):
            worker.client.next_view(1)


def test_failure_is_told_by_a_standby_that_ends_then_to_the_one_where_the_others_have_gathered(job):  # noqa: F811
    coordinators, workers, _ = job(3)
    coordinators[1]._announcer.stop()  # nobody hears from it that it leads
    for worker, successor in zip(workers, (1, 1, 2), strict=True):
        worker.client._protocol._search.address = coordinators[successor].address
    coordinators[0].stop()
    poll_until(lambda: len(coordinators[1]._server.state.workers) == 2)
    assert workers[2].client.fail(WHY) is True
    assert coordinators[2].failure == WHY
    workers[2].stop()
    coordinators[2].wait_until_told(20.0)  # as its agent does
    assert coordinators[2]._announcer._told_failure.is_set()
    coordinators[2].stop()
    poll_until(lambda: coordinators[1].failure == WHY)
    for worker in workers[:2]:
        with pytest.raises(JobFailed, match="ValueError: x"):
            worker.client.next_view(2)  # that without the third one may have been issued


def test_failure_is_told_to_all_standbys_for_those_who_come_to_them_afterwards(job):  # noqa: F811
    coordinators, workers, _ = job(3)
    workers[1].client.fail(WHY)
    poll_until(lambda: all(one._server.state.failed for one in coordinators))
    assert {one._server.state.failed for one in coordinators} == {WHY}


def test_failure_is_not_told_at_the_endpoint_where_the_next_job_may_be(job, serve):  # noqa: F811
    coordinators, workers, _ = job(2)
    next_job = serve(2)
    coordinators[0]._announcer._announcer.endpoint = next_job.address
    workers[1].client.fail(WHY)
    poll_until(lambda: coordinators[1]._server.state.failed)
    assert next_job.address not in coordinators[0]._announcer._announcer._tried
    assert not next_job._server.state.failed


AGENT = Member("n-agent", "n", "")
ASKER = LeaderRequests(AGENT, None)


def test_report_of_an_agent_ends_the_job(form):
    coordinator, (worker,) = form(1)
    assert ASKER.report_failure([coordinator.address], "a crash", fatal=True) == "a crash"
    with pytest.raises(JobFailed, match="a crash"):
        worker.client.next_view(1)
    assert ASKER.report_failure([coordinator.address], "another", fatal=True) == "a crash"


def test_report_that_is_not_fatal_ends_nothing_once_there_is_a_view(form, serve, join):
    coordinator, (worker,) = form(1)
    assert ASKER.report_failure([coordinator.address], "an import", fatal=False) == ""
    assert worker.client.next_view(0).world_size == 1
    begins = serve(2)
    waiting = join(begins, "a")
    poll_until(lambda: begins._server.state.workers)
    assert ASKER.report_failure([begins.address], "an import", fatal=False) == "an import"
    with pytest.raises(JobFailed, match="an import"):
        waiting.started()


def test_report_goes_on_from_a_standby_and_from_who_is_not_there(form, serve):
    leads, _ = form(1)
    standby = serve(standby=True)
    gone = serve()
    gone.stop()
    addresses = [gone.address, standby.address, leads.address]
    assert ASKER.report_failure(addresses, "a crash", fatal=True) == "a crash"


def test_report_follows_a_standby_that_knows_who_leads(job):  # noqa: F811
    coordinators, _, _ = job(3)
    coordinators[0].stop()
    poll_until(lambda: leader(coordinators) is not None)
    third = next(one for one in coordinators[1:] if one is not leader(coordinators))
    poll_until(lambda: third._server.leader)
    assert ASKER.report_failure([third.address], "a crash", fatal=True) == "a crash"


def test_report_to_nobody_is_in_vain(serve):
    gone = serve()
    gone.stop()
    assert ASKER.report_failure([gone.address], "a crash", fatal=True) is None
    token = Token("secret")
    assert ASKER.report_failure([serve(token=token).address], "a crash", fatal=True) is None
