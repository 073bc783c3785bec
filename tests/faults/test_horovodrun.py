"""The scenarios of Horovod's own elastic tests, under horovodrun, with two differences.

Survivors keep their process; and there are none of an exception of the user's own code, which would come again.

Its hosts are localhost and 127.0.0.1. Which of them has rank 0 is left to chance by horovodrun.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness_run import HarnessError
from tests.faults.horovodrun_job import COMMAND, WITHOUT_SSH, A, B, HorovodrunJob
from tests.faults.horovodrun_worker import FAIL
from tests.faults.hosts import Host, hosted
from tests.horovod_built import needs_horovod
from tests.waiting import poll_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180), *needs_horovod("torch")]
in_both = hosted("lightning", "keras-tensorflow")
# The launcher does the same for each framework: for the second one, these only repeat what the first one has shown.
with_slow_keras = pytest.mark.parametrize(
    "host",
    [
        "lightning",
        pytest.param("keras-tensorflow", marks=[pytest.mark.exhaustive, *needs_horovod("tensorflow")]),
    ],
    indirect=True,
    scope="module",
)
STRUCK_AT = 6
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def job(tmp_path: Path, host: Host) -> Iterator[HorovodrunJob]:
    with HorovodrunJob(tmp_path / "run", host) as job:
        yield job


def fault(number: int = signal.SIGKILL, *, step: int = STRUCK_AT) -> dict[str, Any]:
    return {"where": "forward", "step": step, "signal": int(number)}


def check(job: HorovodrunJob, pids: set[int]) -> None:
    """These have come to the end, in the process in which they began, with equal weights; and the audit holds."""
    results = job.results_by_pid()
    if set(results) != pids:
        raise HarnessError(f"expected results of {pids}, there are those of {set(results)}\n{job.tails()}")
    assert all(result["pid"] == pid for pid, result in results.items())
    assert len({result["weights"] for result in results.values()}) == 1
    assert len({result["step"] for result in results.values()}) == 1
    job.audit()


def struck(job: HorovodrunJob, *ranks: int) -> set[int]:
    """Process ids of the workers that were struck, each in the step in which it was to be."""
    records = job.wait_for("fault", len(ranks), what="injected:forward")
    assert len(records) == len(ranks)
    assert {record["step"] for record in records} == {STRUCK_AT}
    return job.pids_of([record["worker"] for record in records])


def neighbours(job: HorovodrunJob, pids: set[int]) -> set[int]:
    """Process ids of the workers of the same hosts, themselves among them."""
    return {pid for host in (A, B) if pids & set(job.on(host)) for pid in job.on(host)}


@in_both
@pytest.mark.thorough
def test_hosts_added_and_removed(job: HorovodrunJob) -> None:
    job.set_hosts(f"{A}:1")
    # Two resets are all that is needed.
    job.start("-np", "1", "--min-np", "1", "--max-np", "2", "--reset-limit", "2", *job.discovered())
    job.wait_for_step(2)
    (first,) = job.on(A)
    job.set_hosts(f"{A}:1", f"{B}:1")
    view = job.view(2)
    assert job.on(A) == [first]
    job.set_hosts(f"{B}:1")
    job.view(1, after=view["generation"])
    assert job.enough() == 0
    check(job, set(job.on(B)))
    assert job.view_sizes() == [1, 2, 1]
    assert len(job.events("admitted")) == 1
    assert len(job.events("start")) == 2


@in_both
@pytest.mark.thorough
def test_single_rank_failure(job: HorovodrunJob) -> None:
    """Rank 0 fails; its neighbour leaves, as the driver gives up the host; those of the other host go on."""
    job.set_hosts(f"{A}:2", f"{B}:2")
    job.start("-np", "4", "--min-np", "2", "--max-np", "4", *job.discovered(), faults={0: fault()})
    (victim,) = struck(job, 0)
    gone = neighbours(job, {victim})
    assert len(gone) == 2
    view = job.view(2)
    assert job.enough() == 0
    assert job.pids_of(view["members"]).isdisjoint(gone)
    check(job, job.pids_of(view["members"]))
    assert job.view_sizes() == [4, 3, 2]


@with_slow_keras
def test_fault_tolerance_without_scaling(job: HorovodrunJob) -> None:
    job.start("-np", "2", "--min-np", "1", "-H", f"{A}:1,{B}:1", faults={0: fault()})
    gone = struck(job, 0)
    view = job.view(1)
    assert job.enough() == 0
    assert job.pids_of(view["members"]).isdisjoint(gone)
    check(job, job.pids_of(view["members"]))
    assert job.view_sizes() == [2, 1]


@with_slow_keras
@pytest.mark.thorough
def test_exception_of_one_rank_ends_the_job(job: HorovodrunJob) -> None:
    """Horovod's own workers would go on without it."""
    job.set_hosts(f"{A}:1", f"{B}:1")
    job.start("-np", "2", "--min-np", "1", *job.discovered(), faults={0: fault(FAIL)})
    assert job.wait() != 0
    assert len(struck(job, 0)) == 1
    assert "processes exited with non-zero status" in job.output
    assert "InjectedError: as the test wants it" in job.output
    assert "JobFailed: worker " in job.output
    assert job.results_by_pid() == {}


@with_slow_keras
@pytest.mark.thorough
def test_all_ranks_failure(job: HorovodrunJob) -> None:
    job.set_hosts(f"{A}:1", f"{B}:1")
    together = {**fault(FAIL), "after": 1}  # else the first one may end the job before the other one is struck
    job.start("-np", "2", "--min-np", "1", *job.discovered(), faults={0: together, 1: together})
    assert job.wait() != 0
    assert len(struck(job, 0, 1)) == 2
    assert "processes exited with non-zero status" in job.output
    assert job.results_by_pid() == {}
    job.audit()


@with_slow_keras
@pytest.mark.thorough
def test_all_hosts_blacklisted(job: HorovodrunJob) -> None:
    """A worker of each host fails: the driver would end the job, so the others train to the end before it knows."""
    job.set_hosts(f"{A}:2", f"{B}:2")
    faults = {0: fault(), 2: fault()}
    job.start("-np", "4", "--min-np", "2", "--max-np", "4", *job.discovered(), faults=faults)
    gone = struck(job, 0, 2)
    assert neighbours(job, gone) == {event["pid"] for event in job.events("start")}
    view = job.view(2)
    assert job.pids_of(view["members"]).isdisjoint(gone)
    job.wait_for_step(STRUCK_AT + 20)
    assert job.enough() != 0
    assert "processes exited with non-zero status" in job.output
    check(job, job.pids_of(view["members"]))


@with_slow_keras
@pytest.mark.thorough
def test_loss_on_the_only_host(job: HorovodrunJob) -> None:
    """The driver would end the job, so the others train to the end before it knows."""
    job.set_hosts(f"{A}:2")
    job.start("-np", "2", "--min-np", "1", *job.discovered(), faults={0: fault()})
    gone = struck(job, 0)
    view = job.view(1)
    job.wait_for_step(STRUCK_AT + 10)
    assert job.enough() != 0
    assert "processes exited with non-zero status" in job.output
    assert job.pids_of(view["members"]).isdisjoint(gone)
    check(job, job.pids_of(view["members"]))


@with_slow_keras
@pytest.mark.thorough
def test_min_hosts_timeout(job: HorovodrunJob) -> None:
    """With fewer than --min-np the driver waits, and gives up; the one that is left trains on meanwhile."""
    options = ("-np", "2", "--min-np", "2", "--elastic-timeout", "3")
    job.set_hosts(f"{A}:1", f"{B}:1")
    job.start(*options, *job.discovered(), faults={0: fault()})
    struck(job, 0)
    view = job.view(1)
    job.wait_for_step(STRUCK_AT + 10)
    assert job.wait() != 0
    assert "processes exited with non-zero status" in job.output
    assert len(view["members"]) == 1
    assert len(job.events("start")) == 2
    job.audit()


@with_slow_keras
@pytest.mark.thorough
def test_reset_limit(job: HorovodrunJob) -> None:
    """One reset is allowed, and two are needed (that two are enough is part of the first test)."""
    job.set_hosts(f"{A}:1")
    job.start("-np", "1", "--min-np", "1", "--max-np", "2", "--reset-limit", "1", *job.discovered())
    job.wait_for_step(2)
    job.set_hosts(f"{A}:1", f"{B}:1")
    job.view(2)
    job.set_hosts(f"{B}:1")
    assert job.wait() != 0
    assert "exceeded" in job.output
    assert job.results_by_pid() == {}
    job.audit()


@with_slow_keras
@pytest.mark.thorough
def test_blacklist_cooldown(job: HorovodrunJob) -> None:
    """A host that was given up is used again after a while, by a new process."""
    job.set_hosts(f"{A}:1", f"{B}:1")
    cooldown = ("--blacklist-cooldown-range", "1", "2")
    job.start("-np", "2", "--min-np", "1", "--max-np", "2", *cooldown, *job.discovered(), faults={0: fault()})
    (victim,) = struck(job, 0)
    alone = job.view(1)
    (survivor,) = job.pids_of(alone["members"])
    both = job.view(2, after=alone["generation"])
    pids = job.pids_of(both["members"])
    assert survivor in pids
    assert victim not in pids
    assert job.enough() == 0
    check(job, pids)
    assert len(neighbours(job, {victim})) == 2
    assert job.view_sizes() == [2, 1, 2]


@pytest.mark.thorough
def test_newcomer_that_comes_after_the_end(job: HorovodrunJob) -> None:
    """It has nothing to do, which is no failure of the job."""
    job.set_hosts(f"{A}:1")
    job.start("-np", "1", "--min-np", "1", "--max-np", "2", *job.discovered())
    job.wait_for_step(2)
    job.set_hosts(f"{A}:1", f"{B}:1")
    job.wait_until(lambda events: "the driver counts on 2 processes" in job.output, "a round")
    assert job.enough() == 0
    check(job, set(job.on(A)))
    assert job.on(B) == []
    assert "nothing to join" in job.output


def test_workers_that_the_end_of_horovodrun_does_not_reach_leave(job: HorovodrunJob) -> None:
    """Else they would train to the end beside those of the next start."""
    job.start(launcher=WITHOUT_SSH, gone_s=1.0)
    job.view(2)
    pids = {event["pid"] for event in job.events("start")}
    job.wait_for_step(2)
    job.kill()
    notices = job.wait_until(lambda events: [event for event in events if event["kind"] == "notice"], "a notice")
    assert all("does not answer" in notice["what"] for notice in notices)
    poll_until(lambda: pids.isdisjoint(process.pid for process in job.processes()))
    assert job.results_by_pid() == {}
    job.audit()


@pytest.mark.thorough
def test_worker_that_leaves_does_not_end_the_job(job: HorovodrunJob) -> None:
    """For the driver, a process that ends with status 0 has completed the job: the next round would end the other."""
    job.set_hosts(f"{A}:1", f"{B}:1")
    job.start("-np", "2", "--min-np", "1", "--max-np", "2", *job.discovered())
    job.wait_for_step(2)
    (leaver,) = job.on(B)
    os.kill(leaver, signal.SIGUSR1)
    job.view(1)
    job.wait_until(lambda events: "the driver counts on 1 processes" in job.output, "a round")
    job.wait_for_steps(20)
    assert job.enough() == 0
    check(job, set(job.on(A)))
    assert job.view_sizes() == [2, 1]


@pytest.mark.thorough
def test_host_that_comes_after_the_training_does_not_end_who_has_work_left(job: HorovodrunJob) -> None:
    """Another worker has ended, so a complete round would be the end of the job for the driver."""
    job.set_hosts(f"{A}:1", f"{B}:1")
    job.start("-np", "2", "--min-np", "1", "--max-np", "3", *job.discovered(), rank_that_waits="0")
    job.wait_for_step(2)
    job.finish_training()
    job.wait_until(lambda events: len(job.results_by_pid()) == 1, "the result of the worker that does not wait")
    job.set_hosts(f"{A}:2", f"{B}:2")
    job.wait_until(lambda events: "the driver gives no answer" in job.output, "the news of the host")
    job.end_waiting()
    assert job.wait() == 0
    check(job, {*job.on(A), *job.on(B)})


@pytest.mark.thorough
def test_plain_horovodrun_trains_the_example(job: HorovodrunJob) -> None:
    """The command itself, without elasticity."""
    script = (str(EXAMPLES / "01-lightning-digits" / "train.py"), "--epochs", "1")
    job.start("-np", "2", launcher=COMMAND, script=script)
    assert job.wait() == 0
    assert job.view_sizes() == [2]
    assert "test accuracy: " in job.output
    job.audit()
