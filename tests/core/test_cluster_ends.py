"""A job is over when a pod says so, unless others are heard to train on: tables, and schedules of all that happens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ef_common.core.cluster import Cause, Decision, Job, JobPhase, Pod, WorkerReport, decide
from ef_common.core.cluster.decide import END_S, GOES_ON_S, LISTEN_S, WORKS_S
from ef_common.core.cluster.report import after
from ef_common.core.cluster.state import FINISHED, LEFT
from tests.core.cluster_model import Cluster, Served
from tests.core.test_cluster import check_shares, gone, job, nodes, one, one_event, pod, running, settle

AT = 1000.0
NUM_SCHEDULES = 40
MANY = 1000


def at(index: int, **more: object) -> Pod:
    return pod(index, **{"address": f"10.0.0.{index}", **more})


def ended(index: int, *, status: int = FINISHED, **more: object) -> Pod:
    return at(index, ended=True, running=False, status=status, ended_at=AT - 1.0, **more)


def heard(by: int = 0, *, moved_at: float = AT, moves_s: float = 3.0, said_at: float = AT) -> WorkerReport:
    """What the pod with this number has said of a training that went on then."""
    said = WorkerReport(said_at, 2, 1, 40, 1.0)
    return replace(said, by=f"10.0.0.{by}", moved_at=moved_at, moves_s=moves_s)


def ending(*there: Pod, report: WorkerReport | None = None, **more: object) -> Job:
    given = {"pods": there or (at(0), ended(1)), "report": report, **more}
    return running("a", 1, 4, 0, **given)


def phase(job: Job, now: float = AT) -> JobPhase:
    return one(job, nodes(8), now).record.phase


def test_job_goes_on_if_another_pod_is_heard_to_train_on_and_makes_no_pods_until_that_is_known() -> None:
    decision = one(ending(report=heard()), nodes(8), AT)
    assert (decision.record.phase, decision.record.cause) == (JobPhase.RUNNING, Cause.NONE)
    assert (decision.create, gone(decision)) == ((), [])
    assert decision.record.ended_at is None


def test_job_is_over_once_the_others_have_ended_or_do_not_train_on() -> None:
    still = heard(moved_at=AT)
    assert phase(ending(report=still), AT + GOES_ON_S - 1.0) is JobPhase.RUNNING
    assert phase(ending(report=still), AT + GOES_ON_S) is JobPhase.SUCCEEDED
    for others in ((ended(0), ended(1)), (at(0, running=False), ended(1)), (at(0, gone_by=AT + 9.0), ended(1))):
        assert phase(ending(*others, report=still)) is JobPhase.SUCCEEDED
    lost = ended(0, status=137)
    assert phase(ending(lost, ended(1), report=still)) is JobPhase.SUCCEEDED
    record = replace(ending().record, leaving=frozenset({"a0"}))
    assert phase(ending(record=record, report=still)) is JobPhase.SUCCEEDED


def test_long_steps_are_waited_for() -> None:
    slow = heard(moves_s=GOES_ON_S)
    assert phase(ending(report=slow), AT + 2 * GOES_ON_S - 1.0) is JobPhase.RUNNING
    assert phase(ending(report=slow), AT + 2 * GOES_ON_S) is JobPhase.SUCCEEDED


def test_another_pod_may_be_heard_when_the_one_has_ended_that_has_answered() -> None:
    for said in (heard(by=1), replace(heard(), by="")):
        assert phase(ending(report=said), AT + LISTEN_S - 1.0) is JobPhase.RUNNING
        assert phase(ending(report=said), AT + LISTEN_S) is JobPhase.SUCCEEDED
    nameless = (at(0, address=""), ended(1, address=""))
    assert phase(ending(*nameless, report=replace(heard(), by="")), AT + LISTEN_S) is JobPhase.SUCCEEDED


def test_new_controller_listens_before_it_takes_a_job_for_over() -> None:
    assert phase(ending()) is JobPhase.SUCCEEDED, "whoever says nothing of its training is not waited for"
    assert phase(ending(heard_since=AT - LISTEN_S + 1.0)) is JobPhase.RUNNING
    assert phase(ending(heard_since=AT - LISTEN_S)) is JobPhase.SUCCEEDED
    assert phase(ending(ended(0), ended(1), heard_since=AT)) is JobPhase.SUCCEEDED


def test_pod_that_was_only_let_go_is_replaced_once_the_training_has_gone_on_for_long() -> None:
    late = AT - 1.0 + GOES_ON_S
    assert one(ending(report=heard(moved_at=late)), nodes(8), late).create == ()
    decision = one(ending(report=heard(moved_at=late + 1.0)), nodes(8), late + 1.0)
    assert (decision.record.phase, gone(decision), decision.create) == (JobPhase.RUNNING, ["a-1"], (2, 3))
    again = ending(at(0), replace(ended(1), ended_at=0.0), report=heard(moved_at=late + 1.0))
    assert gone(one(again, nodes(8), late + 1.0)) == [], "it is not known when it has ended"
    first = heard(moved_at=late + 1.0, moves_s=0.0)
    assert gone(one(ending(report=first), nodes(8), late + 1.0)) == [], "nobody was heard to train on"
    last = ending(ended(0), ended(1), report=heard(moved_at=late + 1.0))
    assert phase(last, late + 2.0) is JobPhase.SUCCEEDED


def test_pod_that_works_on_after_the_training_ends_by_itself() -> None:
    """The first container of rank 0 may evaluate or export what was trained."""
    over = one(ending(at(0), ended(1), at(2, seeks="here")), nodes(8), AT)
    assert (over.record.phase, gone(over)) == (JobPhase.SUCCEEDED, [])
    works = ending(at(0), ended(1), at(2, seeks="here"), at(3, running=False), record=over.record, ttl_s=1.0)
    assert gone(one(works, nodes(8), AT + END_S - 1.0)) == ["a-3"]
    later = one(works, nodes(8), AT + END_S)
    assert (gone(later), later.remove) == (["a-2", "a-3"], False), "whoever still looks for the job has never trained"
    alone = replace(works, pods=(at(0), ended(1)))
    assert gone(one(alone, nodes(8), AT + WORKS_S - 1.0)) == []
    assert not one(alone, nodes(8), AT + WORKS_S - 1.0).remove
    assert gone(one(alone, nodes(8), AT + WORKS_S)) == ["a-0"]
    for last in (ended(0), ended(0, lingers=True)):
        assert one(replace(works, pods=(last, ended(1))), nodes(8), AT + 2.0).remove


def evaluating() -> Job:
    """A job that has succeeded, with two pods that work on."""
    over = one(ending(at(0), at(1, node="n1"), ended(2)), nodes(1, 1, 1, 1), AT)
    return ending(at(0), at(1, node="n1"), record=over.record)


def test_room_of_pods_that_work_on_is_promised_to_no_job_that_waits() -> None:
    waits = [evaluating(), job("b", 3, 3, created=1.0), job("c", 1, 1, created=2.0)]
    soon = decide(waits, nodes(1, 1, 1, 1), AT + END_S - 1.0)
    assert (soon["b"].create, soon["b"].wanted, soon["c"].create) == ((0, 1), 3, ()), (
        "pods that end by themselves do it"
    )
    later = decide(waits, nodes(1, 1, 1, 1), AT + END_S)
    assert (later["b"].create, later["b"].record.cause, later["c"].create) == ((), Cause.NO_ROOM, (0,))
    assert gone(later["a"]) == []


def test_pod_that_works_on_takes_its_room_once() -> None:
    over = one(ending(at(0), ended(1)), nodes(2), AT)
    found = decide([ending(at(0), record=over.record), job("b", 1, 1, created=1.0)], nodes(2), AT + END_S)
    assert found["b"].create == (0,)


def test_job_gives_up_pods_for_one_that_waits_although_pods_of_a_job_that_is_over_work_on() -> None:
    runs = running("c", 1, 2, 0, pods=(pod(0, "n2", key="c"), pod(1, "n3", key="c")))
    found = decide([evaluating(), runs, job("b", 1, 2, created=1.0)], nodes(1, 1, 1, 1), AT + END_S)
    assert (gone(found["c"]), found["b"].wanted) == (["c-1"], 1)
    found = decide([evaluating(), runs, job("b", 2, 2, created=1.0)], nodes(1, 1, 1, 1), AT + END_S)
    assert (gone(found["c"]), found["b"].wanted, found["b"].record.cause) == ([], 0, Cause.NO_ROOM)


def test_pods_of_a_training_that_has_failed_have_a_minute_to_end() -> None:
    failed = one(ending(at(0), ended(1, status=1)), nodes(8), AT)
    rest = ending(at(0), record=failed.record, ttl_s=1.0)
    assert (gone(one(rest, nodes(8), AT + END_S - 1.0)), one(rest, nodes(8), AT + 2.0).remove) == ([], False)
    assert gone(one(rest, nodes(8), AT + END_S)) == ["a-0"]
    assert one(replace(rest, pods=()), nodes(8), AT + 2.0).remove


def test_training_that_has_failed_is_not_waited_for() -> None:
    assert phase(ending(at(0), ended(1, status=1), report=heard())) is JobPhase.FAILED
    assert phase(ending(at(0), ended(1, status=1), ended(2), report=heard())) is JobPhase.FAILED


def test_job_that_is_suspended_keeps_what_a_pod_has_said() -> None:
    decision = one(ending(report=heard(), suspended=True), nodes(8), AT)
    assert gone(decision) == ["a-0"]


def test_training_goes_on_with_another_step_or_view() -> None:
    said = WorkerReport(5.0, 2, 1, 40, 1.0)
    first = after(None, said)
    assert (first.moved_at, first.moves_s) == (5.0, 0.0)
    same = after(first, replace(said, at=8.0, workers=1))
    assert (same.at, same.workers, same.moved_at, same.moves_s) == (8.0, 1, 5.0, 0.0)
    for change in ({"step": 41}, {"generation": 2}):
        moved = after(same, replace(said, at=11.0, **change))  # type: ignore[arg-type]
        assert (moved.moved_at, moved.moves_s) == (11.0, 6.0)
        assert after(moved, replace(moved, at=14.0)).moves_s == 6.0


# ---------------------------------------------------------------- anything in any order


def end_one(cluster: Cluster) -> None:
    """A pod of a training that goes on is let go, or told to go, and ends as if the training were over."""
    key = cluster.random.choice(sorted(cluster.jobs))
    served, there = cluster.jobs[key], cluster.running(key)
    told = [pod for pod in there if pod.gone_by is not None]
    goes = cluster.random.choice(told or there) if there else None
    stay = [pod for pod in there if pod != goes and pod.alive and pod.uid not in served.job.record.leaving]
    if goes is not None and len(stay) >= served.job.minimum:
        cluster.losses[key] += 1
        cluster.counts["told to go" if goes.gone_by else "let go"] += 1
        cluster.end(key, goes, FINISHED)


def look(cluster: Cluster) -> None:
    """A controller hears of the trainings at once, and of pods late; it may be one that has just begun."""
    controller = cluster.random.choice(cluster.controllers)
    new = cluster.picture()
    controller.picture = replace(cluster.stale_picture(), jobs=new.jobs, reports=new.reports)
    if cluster.random.random() < 0.1:
        controller.todo, controller.heard_since = [], cluster.now
        controller.picture = replace(controller.picture, reports={})
    cluster.think(controller)
    while cluster.step(controller):
        if cluster.random.random() < 0.1:
            cluster.fail(controller, is_done=cluster.random.random() < 0.5)


def run_schedule(seed: int, num_controllers: int) -> Cluster:
    cluster = Cluster(seed, {"n0": 3, "n1": 3}, num_controllers=num_controllers)
    for number, key in enumerate(("a", "b")):
        cluster.jobs[key] = Served(job(key, 1 + number, 4, takes=4, backoff_limit=10**6), most=4)
    for _ in range(150):
        match cluster.random.choice("hhhhhhrrrriiiiieeexx"):
            case "h":
                look(cluster)
            case "i":
                cluster.now += cluster.random.choice([1.0, 5.0, 30.0])
                look(cluster)
            case "e":
                end_one(cluster)
            case event:
                one_event(cluster, event)
    return cluster


def check_ends(number: int, *, num_controllers: int) -> None:
    """No job is over before its training is (:class:`Cluster` checks that), and each one is over soon after that."""
    let_go = told_to_go = 0
    for seed in range(number):
        cluster = run_schedule(seed, num_controllers)
        let_go += cluster.counts["let go"]
        told_to_go += cluster.counts["told to go"]
        settle(cluster)
        check_shares(cluster)
        assert not any(served.job.record.is_over for served in cluster.jobs.values())
        for key in sorted(cluster.jobs):
            cluster.jobs[key].work = 0
            cluster.work()
            for _ in range(3):
                look(cluster)
            settle(cluster, rounds=90)
            assert cluster.jobs[key].job.record.phase is JobPhase.SUCCEEDED, (seed, key)
    assert let_go > told_to_go > number / 4


def test_no_schedule_ends_a_job_whose_training_goes_on() -> None:
    check_ends(NUM_SCHEDULES, num_controllers=2)


@pytest.mark.thorough
@pytest.mark.parametrize("num_controllers", [1, 2, 3])
def test_no_schedule_of_many_ends_a_job_whose_training_goes_on(num_controllers: int) -> None:
    check_ends(MANY, num_controllers=num_controllers)


def test_status_of_a_pod_that_was_told_to_go_needs_no_report() -> None:
    decision: Decision = one(ending(at(0), ended(1, status=LEFT)), nodes(8), AT)
    assert (decision.record.phase, gone(decision)) == (JobPhase.RUNNING, ["a-1"])
