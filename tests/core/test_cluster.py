"""The controller's decisions: tables, and a cluster under a virtual clock in which anything happens in any order."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from ef_common.core.cluster import (
    Cause,
    Decision,
    Job,
    JobPhase,
    Node,
    Pod,
    Record,
    Refusal,
    SharePolicy,
    WorkerReport,
    agrees,
    decide,
    refused,
)
from ef_common.core.cluster.decide import END_S, LOST_S, MOST_RETRY_S, RELEASE_S, RETRY_S, START_S, STEADY_S, TRY_S
from ef_common.core.cluster.state import FAILED, FINISHED, LEFT
from tests.core import cluster_model
from tests.core.cluster_model import EXITS, GPU, ONE, Cluster, Controller, Served
from tests.diagrams import cases, rows, states

NUM_SCHEDULES = 30
MANY = 500


def nodes(*sizes: int) -> list[Node]:
    return [Node(f"n{number}", {GPU: size}) for number, size in enumerate(sizes)]


def job(key: str = "a", low: int = 1, high: int = 4, *, pods: tuple[Pod, ...] = (), **more: object) -> Job:
    places = frozenset(f"n{number}" for number in range(9))
    return replace(Job(key, low, high, ONE, places, pods=pods), **more)  # type: ignore[arg-type]


def pod(index: int, node: str = "n0", *, key: str = "a", **more: object) -> Pod:
    one = Pod(f"{key}-{index}", f"{key}{index}", index, ONE, node, running=bool(node), created=float(index))
    return replace(one, **more)  # type: ignore[arg-type]


def pods(number: int, node: str = "n0", key: str = "a") -> tuple[Pod, ...]:
    return tuple(pod(index, node, key=key) for index in range(number))


def running(key: str, low: int, high: int, number: int, node: str = "n0", **more: object) -> Job:
    given = {"pods": pods(number, node, key), "record": Record(JobPhase.RUNNING, starts=1), **more}
    return job(key, low, high, **given)  # type: ignore[arg-type]


def one(job: Job, free: list[Node], now: float = 0.0) -> Decision:
    return decide([job], free, now)[job.key]


def gone(decision: Decision) -> list[str]:
    return [doom.pod.name for doom in decision.delete]


# ---------------------------------------------------------------- shares


def test_job_starts_with_what_fits_and_grows() -> None:
    first = one(job("a", 1, 4), nodes(2))
    assert (first.create, first.wanted, first.why) == ((0, 1), 2, "grows from 0 to 2 pods")
    assert one(running("a", 1, 4, 2), nodes(2, 1)).create == (2,)


def test_number_of_pods_that_a_job_may_have_costs_nothing() -> None:
    most = 2**31 - 1
    tracemalloc.start()
    decision = one(job("a", 1, most, spares=most, pods=(pod(1),)), nodes(4))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert decision.create == (0, 2, 3)
    assert peak_bytes < 10**6


def test_job_without_room_for_its_minimum_waits_and_takes_nothing() -> None:
    decision = one(job("a", 3, 4), nodes(1, 1))
    assert (decision.create, decision.wanted) == ((), 0)
    assert decision.record.why == "there is no room for 3 pods, the minimum"
    assert decision.record.cause is Cause.NO_ROOM


def test_pods_of_others_count_per_node() -> None:
    big = job("a", 1, 4, request={GPU: 2})
    assert one(big, nodes(1, 1, 1)).create == ()
    assert one(big, nodes(1, 2, 3)).create == (0, 1)


def test_surplus_is_shared_equally_whatever_the_priority() -> None:
    new = [job("a", 1, 8), job("b", 2, 8, priority=5), job("c", 1, 2)]
    wanted = {key: one.wanted for key, one in decide(new, nodes(4, 5), 0.0).items()}
    assert wanted == {"a": 3, "b": 4, "c": 2}  # of equals, the higher priority has the odd one


def test_equals_keep_what_they_have() -> None:
    both = [running("a", 1, 4, 2), running("b", 1, 4, 3, "n1")]
    decisions = decide(both, nodes(2, 3), 0.0)
    assert not decisions["a"].delete + decisions["b"].delete
    assert not decisions["a"].create + decisions["b"].create


def test_new_job_gets_its_minimum_from_the_surplus_of_others_and_waits_until_they_have_gone() -> None:
    first = decide([running("a", 1, 4, 4), job("b", 1, 4, created=5.0)], nodes(4), 0.0)
    assert gone(first["a"]) == ["a-2", "a-3"]  # the newest
    assert first["a"].record.leaving == {"a2", "a3"}
    assert (first["b"].create, first["b"].wanted) == ((), 2)
    leaving = tuple(replace(one, gone_by=30.0) if one.index > 1 else one for one in pods(4))
    then = decide([replace(running("a", 1, 4, 4), pods=leaving), job("b", 1, 4)], nodes(4), 1.0)
    assert then["b"].create == ()
    assert then["a"].delete == ()
    last = decide([running("a", 1, 4, 2), job("b", 1, 4)], nodes(4), 2.0)
    assert last["b"].create == (0, 1)


def test_nobody_moves_for_a_newcomer_who_does_not_have_to() -> None:
    others = [running(f"j{number}", 1, 8, 4, f"n{number}") for number in range(8)]
    decisions = decide([*others, job("new", 2, 8, created=9.0)], nodes(*[4] * 8), 0.0)
    assert decisions["new"].wanted == 3
    for key in (other.key for other in others):
        assert gone(decisions[key]) in ([], [f"{key}-3"])
        assert decisions[key].wanted == 4 - len(decisions[key].delete)
    assert sum(len(one.delete) for one in decisions.values()) == 3


def test_newcomer_takes_room_that_is_about_to_be_free_before_it_takes_any_from_others() -> None:
    leaving = replace(pod(1, "n1"), gone_by=30.0)
    decisions = decide([running("a", 1, 2, 2, pods=(pod(0), leaving)), job("b", 1, 1)], nodes(1, 1), 0.0)
    assert not decisions["a"].delete
    assert (decisions["b"].wanted, decisions["b"].create) == (1, ())


def test_room_that_is_about_to_be_free_is_given_once() -> None:
    where = (pod(0), pod(1, "n1"), pod(2), pod(3), pod(4, "n1", gone_by=30.0))
    newcomers = [job("b", 1, 1, created=1.0), job("c", 1, 1, created=2.0)]
    decisions = decide([running("a", 1, 4, 0, pods=where), *newcomers], nodes(3, 2), 0.0)
    assert [one.wanted for one in decisions.values()] == [3, 1, 1]
    assert gone(decisions["a"]) == ["a-3"]


def test_job_that_has_its_minimum_keeps_it_whatever_waits() -> None:
    decisions = decide([running("a", 3, 4, 3), job("b", 2, 2, priority=9)], nodes(4), 0.0)
    assert not decisions["a"].delete
    assert decisions["b"].wanted == 0
    assert decisions["a"].wanted == 4  # nothing is idle


def test_minimum_that_is_not_on_nodes_yet_is_taken_from_nobody() -> None:
    hopeful = running("a", 2, 2, 0, pods=(pod(0), pod(1, "")))
    decisions = decide([hopeful, running("b", 1, 1, 1, "n1", created=9.0)], nodes(1, 1), 0.0)
    assert not decisions["b"].delete


def test_older_job_that_waits_is_not_passed_by_smaller_ones() -> None:
    waiting = [running("a", 2, 2, 2), job("b", 3, 3, created=1.0), job("c", 1, 1, created=2.0)]
    assert decide(waiting, nodes(4), 0.0)["c"].wanted == 0
    hopeless = [waiting[0], replace(waiting[1], minimum=5, maximum=5), waiting[2]]
    assert decide(hopeless, nodes(4), 0.0)["c"].wanted == 1


def test_of_two_that_lack_their_minimum_one_gives_its_pods_to_the_other() -> None:
    decisions = decide([running("a", 4, 4, 3), running("b", 4, 4, 3, "n1", created=1.0)], nodes(3, 3), 0.0)
    assert decisions["a"].wanted == 4
    assert gone(decisions["b"]) == ["b-2"]  # and it keeps the others, which hold its state


def test_job_below_its_minimum_that_has_not_trained_gives_up_its_pods() -> None:
    waiting = job("a", 3, 3, pods=pods(2))
    assert gone(one(waiting, nodes(2))) == ["a-0", "a-1"]
    assert gone(one(replace(waiting, record=Record(JobPhase.RUNNING)), nodes(2))) == []


def test_what_is_given_up_first_is_pending_and_then_the_newest() -> None:
    mixed = (pod(0, created=9.0), pod(1, created=1.0), pod(2, "n0", running=False, created=0.0), pod(3, ""))
    assert gone(one(running("a", 1, 4, 0, record=Record(JobPhase.RUNNING), pods=mixed), nodes(3))) == ["a-3"]
    assert gone(one(running("a", 1, 2, 0, pods=mixed), nodes(4))) == ["a-2", "a-3"]
    assert gone(one(running("a", 1, 1, 0, pods=mixed), nodes(4))) == ["a-0", "a-2", "a-3"]


def test_pod_that_slows_others_down_is_given_up_before_newer_ones() -> None:
    mixed = (pod(0, created=1.0), pod(1, created=2.0, slow=True), pod(2, created=3.0))
    assert gone(one(running("a", 1, 2, 0, pods=mixed), nodes(4))) == ["a-1"]
    assert gone(one(running("a", 1, 3, 0, pods=mixed), nodes(4))) == []


def test_pod_that_does_not_train_yet_is_given_up_before_those_that_do() -> None:
    mixed = (pod(0, created=1.0, idle=True), pod(1, created=2.0, slow=True), pod(2, created=3.0))
    assert gone(one(running("a", 1, 2, 0, pods=mixed), nodes(4))) == ["a-0"]
    assert gone(one(running("a", 1, 1, 0, pods=mixed), nodes(4))) == ["a-0", "a-1"]
    starts = (*mixed, pod(3, "n0", running=False, created=0.0))
    assert gone(one(running("a", 1, 3, 0, pods=starts), nodes(4))) == ["a-3"]


def test_pod_of_rank_0_is_given_up_last() -> None:
    there = tuple(pod(index, address=f"10.0.0.{index}") for index in range(3))
    report = WorkerReport(0.0, 3, 1, 1, 1.0, first="10.0.0.2")
    assert gone(one(running("a", 1, 2, 0, pods=there, report=report), nodes(4))) == ["a-1"]
    assert gone(one(running("a", 1, 1, 0, pods=there, report=report), nodes(4))) == ["a-0", "a-1"]
    slow = (*there[:2], replace(there[2], slow=True))
    assert gone(one(running("a", 1, 2, 0, pods=slow, report=report), nodes(4))) == ["a-1"]
    unknown = (*there[:2], replace(there[2], address=""))
    for said in (report, replace(report, first=""), replace(report, first="10.0.0.9")):
        assert gone(one(running("a", 1, 2, 0, pods=unknown, report=said), nodes(4))) == ["a-2"]


def test_pods_that_are_somewhere_stay_whatever_others_need_there() -> None:
    decision = one(running("a", 1, 4, 2), nodes(0, 1))  # the scheduler chooses who goes
    assert (gone(decision), decision.create) == ([], (2,))
    both = decide([running("a", 1, 4, 2), job("b", 1, 1)], nodes(0, 1), 0.0)
    assert both["b"].create == (0,)
    taken = decide([running("a", 1, 4, 2), job("b", 1, 1)], nodes(0, 0), 0.0)
    assert gone(taken["a"]) == ["a-1"]  # the room of two is room for two


def test_pods_on_a_node_that_gets_no_more_pods_or_does_not_answer_stay() -> None:
    decision = one(running("a", 2, 4, 2, "cordoned"), nodes(1))
    assert (gone(decision), decision.create) == ([], (2,))


def test_node_of_which_nothing_is_known_counts_for_nothing() -> None:
    assert one(replace(job("a", 1, 4), nodes=frozenset({"gone"})), nodes(4)).wanted == 0


# ---------------------------------------------------------------- other policies


def test_gang_gives_all_of_the_maximum_or_nothing_and_the_oldest_comes_first() -> None:
    jobs = [job("a", 1, 4, created=1.0), job("b", 1, 4, created=2.0, priority=9), job("c", 1, 2, created=3.0)]
    decisions = decide(jobs, nodes(6), 0.0, policy=SharePolicy.GANG)
    assert {key: one.wanted for key, one in decisions.items()} == {"a": 4, "b": 0, "c": 0}  # c must not pass b
    assert decisions["b"].record.why == "there is no room for 4 pods, the minimum"
    ended = [replace(jobs[0], record=Record(JobPhase.SUCCEEDED, ended_at=0.0)), *jobs[1:]]
    later = decide(ended, nodes(6), 1.0, policy=SharePolicy.GANG)
    assert {key: one.wanted for key, one in later.items()} == {"a": 0, "b": 4, "c": 2}


def test_gang_that_has_lost_a_pod_keeps_the_others_and_gets_it_back_first() -> None:
    jobs = [running("a", 1, 4, 3), running("b", 1, 1, 1, created=1.0), job("c", 1, 1, created=2.0)]
    lacking = decide(jobs, nodes(4), 0.0, policy=SharePolicy.GANG)
    assert (gone(lacking["a"]), lacking["b"].wanted, lacking["c"].wanted) == ([], 1, 0)
    complete = decide([jobs[0], jobs[2]], nodes(4), 0.0, policy=SharePolicy.GANG)
    assert (complete["a"].create, complete["c"].wanted) == ((3,), 0)


def test_gang_gives_up_what_its_user_does_not_want_any_more() -> None:
    assert gone(decide([running("a", 1, 2, 4)], nodes(4), 0.0, policy=SharePolicy.GANG)["a"]) == ["a-2", "a-3"]


def test_priority_gives_the_surplus_to_the_highest_class_and_shares_it_there() -> None:
    jobs = [job("a", 1, 8), job("b", 1, 4, priority=5), job("c", 1, 4, priority=5)]
    wanted = {key: one.wanted for key, one in decide(jobs, nodes(4, 3), 0.0, policy=SharePolicy.PRIORITY).items()}
    assert wanted == {"a": 1, "b": 3, "c": 3}
    wanted = {key: one.wanted for key, one in decide(jobs, nodes(6, 6), 0.0, policy=SharePolicy.PRIORITY).items()}
    assert wanted == {"a": 4, "b": 4, "c": 4}


def test_with_priority_surplus_is_taken_from_the_lowest_class() -> None:
    low, high = running("a", 1, 4, 2), running("b", 1, 4, 4, "n1", priority=5)
    new = job("c", 1, 1, priority=9)
    decisions = decide([low, high, new], nodes(2, 4), 0.0, policy=SharePolicy.PRIORITY)
    assert (gone(decisions["a"]), gone(decisions["b"]), decisions["c"].wanted) == (["a-1"], [], 1)
    assert gone(decide([low, high, new], nodes(2, 4), 0.0)["b"]) == ["b-3"]


# ---------------------------------------------------------------- the life of a job


def test_job_runs_when_its_minimum_runs_and_counts_its_starts() -> None:
    assert one(job("a", 2, 4, pods=pods(1)), nodes(4)).record.phase is JobPhase.PENDING
    record = one(job("a", 2, 4, pods=pods(2)), nodes(4)).record
    assert (record.phase, record.starts) == (JobPhase.RUNNING, 1)
    lost = one(job("a", 2, 4, record=record), nodes(4)).record
    assert (lost.phase, lost.starts) == (JobPhase.PENDING, 1)
    again = one(job("a", 2, 4, pods=pods(2), record=lost), nodes(4)).record
    assert (again.phase, again.starts) == (JobPhase.RUNNING, 2)


def test_pod_that_was_told_to_go_is_replaced_and_not_counted() -> None:
    there = (pod(0), pod(1, ended=True, status=LEFT))
    decision = one(job("a", 1, 2, pods=there), nodes(2))
    assert gone(decision) == ["a-1"]
    assert decision.record.crashes == 0
    assert decision.create == ()  # its name is taken
    assert one(job("a", 1, 3, pods=there), nodes(2)).create == (2,)


def test_pod_that_is_lost_is_counted_once_and_replaced_the_first_time_at_once() -> None:
    there = (pod(0), pod(1, ended=True, status=137))
    first = one(job("a", 1, 4, pods=there), nodes(2), 100.0)
    assert (first.record.crashes, first.record.counted, first.create) == (1, {"a1"}, (2,))
    assert first.record.lost == "a-1 ended with status 137"
    second = one(job("a", 1, 4, pods=there, record=first.record), nodes(2), 101.0)
    assert second.record.crashes == 1
    twice = (pod(0), replace(there[1], uid="new", created=100.0))
    third = one(job("a", 1, 4, pods=twice, record=first.record), nodes(2), 101.0)
    assert (third.record.crashes, third.create) == (2, ())
    late = one(job("a", 1, 4, pods=twice, record=first.record), nodes(2), 101.0 + STEADY_S)
    assert late.record.crashes == 1


def test_pods_that_are_lost_again_and_again_fail_a_job_that_has_not_its_minimum_then() -> None:
    record = Record(JobPhase.RUNNING, crashes=6, crashed_at=90.0)
    last = (pod(0), pod(1, ended=True, status=139, created=91.0))
    decision = one(job("a", 2, 2, pods=last, record=record), nodes(2), 100.0)
    assert decision.record.phase is JobPhase.FAILED
    assert decision.record.why == "pods were lost 7 times in a row, and backoffLimit is 6: a-1 ended with status 139"
    assert decision.record.cause is Cause.TOO_MANY_CRASHES


def test_pods_that_are_lost_together_count_once_even_if_they_are_seen_one_after_the_other() -> None:
    lost = tuple(pod(index, ended=True, status=137) for index in range(16))
    half = one(running("a", 1, 16, 0, pods=(*lost[:8], *pods(16)[8:])), nodes(16), 100.5)
    assert (half.record.phase, half.record.crashes, half.record.crashed_at) == (JobPhase.RUNNING, 1, 100.5)
    rest = running("a", 1, 16, 0, pods=lost, record=half.record)
    then = one(rest, nodes(16), 130.0)
    assert (then.record.crashes, then.record.crashed_at, len(then.record.counted)) == (1, 100.5, 16)
    late = one(rest, nodes(16), 101.0 + STEADY_S)
    assert (late.record.crashes, late.record.crashed_at) == (1, 101.0 + STEADY_S)


def test_pod_that_has_replaced_a_lost_one_and_is_lost_counts_again_whatever_else_is_lost() -> None:
    record = Record(JobPhase.RUNNING, crashes=1, crashed_at=100.5)
    there = (pod(0, ended=True, created=101.0), pod(1, ended=True))
    decision = one(running("a", 1, 2, 0, pods=there, record=record), nodes(2), 103.0)
    assert (decision.record.crashes, decision.record.crashed_at) == (2, 103.0)


@pytest.mark.parametrize(
    ("status", "phase", "cause"),
    [
        (FINISHED, JobPhase.SUCCEEDED, Cause.COMPLETED),
        (FAILED, JobPhase.FAILED, Cause.TRAINING_FAILED),
    ],
)
def test_job_ends_when_a_pod_says_so_and_the_others_may_end_by_themselves(
    status: int, phase: JobPhase, cause: Cause
) -> None:
    there = (pod(0), pod(1, ended=True, status=status), pod(2, "", running=False))
    decision = one(job("a", 1, 3, pods=there, record=Record(JobPhase.RUNNING)), nodes(3), 10.0)
    assert (decision.record.phase, decision.record.cause, decision.record.ended_at) == (phase, cause, 10.0)
    assert gone(decision) == ["a-2"]
    ended = job("a", 1, 3, pods=there[:2], record=decision.record)
    assert gone(one(ended, nodes(3), 11.0)) == []
    gone_by_itself = replace(ended, pods=(pod(0, ended=True, status=status), there[1]), ttl_s=5.0)
    assert one(gone_by_itself, nodes(3), 14.0).remove is False
    assert one(gone_by_itself, nodes(3), 15.0).remove is True


def test_job_that_is_over_takes_no_part_in_the_shares() -> None:
    over = running("a", 1, 4, 0, record=Record(JobPhase.SUCCEEDED, ended_at=0.0))
    decisions = decide([over, job("b", 1, 4)], nodes(4), 1.0)
    assert (decisions["a"].create, decisions["b"].create) == ((), (0, 1, 2, 3))


def test_pod_whose_training_has_ended_keeps_its_room_while_its_other_containers_run() -> None:
    lost = pod(1, ended=True, lingers=True, running=False, status=137)
    decision = one(job("a", 1, 2, pods=(pod(0), lost)), nodes(2))
    assert (decision.record.crashes, gone(decision), decision.wanted) == (1, ["a-1"], 2)
    decisions = decide([job("a", 1, 1, pods=(lost,)), job("b", 1, 1, created=1.0)], nodes(2), 0.0)
    assert [one.create for one in decisions.values()] == [(0,), ()]
    record = Record(JobPhase.RUNNING)
    over = job("a", 1, 2, pods=(replace(lost, status=FINISHED), pod(0)), record=record)
    first = one(over, nodes(2), 10.0)
    assert (first.record.phase, gone(first)) == (JobPhase.SUCCEEDED, [])
    over = replace(over, record=first.record)
    assert gone(one(over, nodes(2), 9.0 + END_S)) == []
    assert gone(one(over, nodes(2), 10.0 + END_S)) == ["a-1"], "the other one works on after the training"


def test_what_has_become_of_a_lost_pod_is_told_until_as_many_run_as_before() -> None:
    there = (pod(0), pod(1, ended=True, status=137))
    lost = one(running("a", 1, 2, 0, pods=there), nodes(2), 100.0).record
    assert lost.why == lost.lost == "a-1 ended with status 137"
    starting = (pod(0), pod(1, running=False, uid="new"))
    then = one(running("a", 1, 2, 0, pods=starting, record=lost), nodes(2), 110.0).record
    assert then.why == then.lost == lost.lost
    again = one(running("a", 1, 2, 2, record=then), nodes(2), 120.0).record
    assert (again.why, again.lost, again.crashes) == ("", "", 1)
    assert (lost.cause, again.cause) == (Cause.POD_LOST, Cause.NONE)
    alone = one(running("a", 1, 2, 0, pods=there), nodes(1), 100.0).record
    assert alone.why == lost.lost  # it is told once, even if nothing replaces it
    waiting = one(running("a", 1, 2, 0, record=lost), nodes(0), 110.0).record
    assert (waiting.why, waiting.lost) == ("there is no room for 1 pods, the minimum", lost.lost)


def test_pod_that_cannot_start_is_told() -> None:
    there = (pod(1, running=False, problem="ErrImagePull: b"), pod(0, running=False, problem="ErrImagePull: a"))
    lost = Record(JobPhase.RUNNING, lost="a-2 was lost")
    record = one(running("a", 1, 3, 0, pods=(*there, pod(2)), record=lost), nodes(3)).record
    assert (record.why, record.lost) == ("a-0 cannot start: ErrImagePull: a", "a-2 was lost")
    assert record.cause is Cause.CANNOT_START
    assert one(running("a", 1, 3, 3, record=record), nodes(3), 1.0).record.why == ""


def test_pod_that_does_not_start_for_long_is_told() -> None:
    """As one whose volume another node has."""
    there = (pod(0), pod(1, running=False, waits="ContainerCreating", waits_since=100.0))
    stuck = running("a", 2, 2, 0, pods=there)
    assert one(stuck, nodes(2), 100.0 + START_S).record.cause is Cause.NONE
    record = one(stuck, nodes(2), 101.0 + START_S).record
    assert record.cause is Cause.CANNOT_START
    assert record.why == (
        "a-1 has not started in 5 minutes (ContainerCreating): kubectl describe pod a-1 shows what it waits for"
    )
    assert one(replace(stuck, record=record), nodes(2), 900.0).record == record, "it is told once"


def test_suspended_job_has_no_pods_and_goes_on_when_it_may() -> None:
    told = Record(JobPhase.RUNNING, cause=Cause.POD_LOST, why="a-3 was lost")
    decision = one(running("a", 2, 4, 3, suspended=True, record=told), nodes(4))
    assert (decision.record.cause, decision.record.why) == (Cause.NONE, "its user wants no pods")
    assert gone(decision) == ["a-0", "a-1", "a-2"]
    without = one(job("a", 2, 4, suspended=True, record=decision.record), nodes(4))
    assert (without.record.phase, without.create) == (JobPhase.SUSPENDED, ())
    again = one(job("a", 2, 4, record=without.record), nodes(4))
    assert (again.record.phase, again.create) == (JobPhase.PENDING, (0, 1, 2, 3))


def test_job_that_makes_no_sense_fails_with_what_is_wrong() -> None:
    decision = one(job("a", problem="minWorkers is 3, and maxWorkers 2"), nodes(4))
    assert (decision.record.phase, decision.record.why) == (JobPhase.FAILED, "minWorkers is 3, and maxWorkers 2")
    assert decision.record.cause is Cause.INVALID
    assert decision.create == ()


def test_pods_that_the_scheduler_places_nowhere_are_taken_back_and_tried_again_later() -> None:
    there = (*pods(2), pod(2, "", unschedulable_since=0.0, running=False))
    job_ = running("a", 1, 4, 0, pods=there)
    assert gone(one(job_, nodes(4), TRY_S)) == []
    decision = one(job_, nodes(4), TRY_S + 1)
    assert (gone(decision), decision.wanted) == (["a-2"], 2)
    assert decision.record.refusal is not None
    rest = replace(job_, pods=there[:2], record=decision.record)
    assert one(rest, nodes(4), TRY_S + 2).create == ()
    assert one(rest, nodes(4), TRY_S + 1 + RETRY_S).create == (2, 3)


def test_each_refusal_in_a_row_doubles_the_time_until_room_is_taken_from_others_again() -> None:
    """A job that cannot use more room: each try takes a pod from another job, in vain."""
    a, b, now = running("a", 1, 4, 2), running("b", 1, 4, 4), 0.0
    late = pod(2, "", unschedulable_since=0.0, running=False)
    pauses = []
    for _ in range(6):
        refused_at = decide([replace(a, pods=(*pods(2), late)), b], nodes(6), now + TRY_S + 1)["a"]
        refusal = refused_at.record.refusal
        assert refusal is not None
        pauses.append(refusal.until - now - TRY_S - 1)
        a = replace(a, record=refused_at.record)
        found = decide([a, b], nodes(6), refusal.until - 1)
        assert (found["a"].wanted, gone(found["b"])) == (2, [])
        a, now = replace(a, record=found["a"].record), refusal.until
        found = decide([a, b], nodes(6), now)
        assert (found["a"].wanted, gone(found["b"])) == (3, ["b-3"])
        assert found["a"].record.cause is Cause.NONE, "it is tried again"
        a, late = replace(a, record=found["a"].record), replace(late, unschedulable_since=now)
    assert pauses == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S, 8 * RETRY_S, MOST_RETRY_S, MOST_RETRY_S]


def test_refusals_are_no_row_once_a_pod_has_found_a_node_or_none_was_refused_for_long() -> None:
    record = Record(JobPhase.RUNNING, refusal=Refusal(2, 100.0, "quota", tries=5))

    def after(num_pods: int, now: float) -> Refusal | None:
        return one(running("a", 1, 4, num_pods, record=record), nodes(8), now).record.refusal

    assert after(2, 101.0) == after(1, 101.0) == record.refusal
    assert after(3, 99.0) == record.refusal
    assert after(3, 101.0) is None
    assert after(2, 99.0 + MOST_RETRY_S) == record.refusal
    assert after(2, 100.0 + MOST_RETRY_S) is None


def test_pod_that_is_refused_while_nothing_more_is_tried_lengthens_no_pause() -> None:
    """It was to replace one that was lost meanwhile."""
    record = Record(JobPhase.RUNNING, refusal=Refusal(3, 500.0, "quota", tries=2))
    there = (*pods(2), pod(2, "", unschedulable_since=100.0, running=False))
    now = 101.0 + TRY_S
    found = one(running("a", 1, 4, 0, pods=there, record=record), nodes(8), now).record.refusal
    assert found == Refusal(2, now + 2 * RETRY_S, "the scheduler finds no node for more pods", tries=2)
    said = refused(job(pods=there), Decision(record), 0, now=500.0, why="quota")
    assert said == Refusal(3, 500.0 + 4 * RETRY_S, "quota", tries=3)
    many = refused(job(), Decision(replace(record, refusal=Refusal(0, 0.0, "", tries=2**31))), 0, now=0.0, why="quota")
    assert many.until == MOST_RETRY_S


def test_job_that_was_refused_a_pod_has_no_more_than_it_has_then() -> None:
    there = (*pods(4), pod(4, gone_by=9.0), pod(5, ended=True))
    decision = Decision(Record(leaving=frozenset({"a0", "a4"})))
    found = refused(job(high=9, pods=there), decision, 2, now=5.0, why="quota")
    assert found == Refusal(5, 5.0 + RETRY_S, "quota")


def test_job_that_has_more_than_a_quota_seemed_to_allow_keeps_them() -> None:
    """The answer to a call was lost, and the next one was refused."""
    record = Record(JobPhase.RUNNING, refusal=Refusal(2, 900.0, "quota"))
    decisions = decide([running("a", 3, 4, 3, record=record), job("b", 1, 3, created=9.0)], nodes(3), 0.0)
    assert (gone(decisions["a"]), decisions["a"].wanted, decisions["b"].wanted) == ([], 3, 0)
    pending = running("a", 1, 4, 0, pods=(*pods(3), pod(3, "")), record=record)
    assert gone(one(pending, nodes(8))) == ["a-3"]


def test_job_whose_minimum_the_scheduler_refuses_takes_nothing() -> None:
    there = (pod(0), pod(1, "", unschedulable_since=0.0, running=False))
    decision = one(job("a", 2, 4, pods=there), nodes(4), TRY_S + 1)
    assert gone(decision) == ["a-0", "a-1"]
    assert decision.record.why == "the scheduler finds no node for more pods"
    assert decision.record.cause is Cause.REFUSED


def test_pod_on_record_that_is_still_there_is_deleted_and_counts_as_gone() -> None:
    record = Record(JobPhase.RUNNING, leaving=frozenset({"a1"}))
    decision = one(running("a", 1, 2, 2, record=record), nodes(1))
    assert gone(decision) == ["a-1"]
    assert decision.record.leaving == {"a1"}
    assert decision.wanted == 1
    later = one(running("a", 1, 2, 1, record=record), nodes(1))
    assert later.record.leaving == frozenset()


def test_pod_that_nobody_ends_is_forgotten() -> None:
    there = (pod(0), pod(1, "dead", gone_by=10.0))
    assert one(job("a", pods=there), nodes(1), 10.0 + LOST_S).delete == ()
    (doom,) = one(job("a", pods=there), nodes(1), 10.0 + LOST_S + 1).delete
    assert (doom.pod.name, doom.force) == ("a-1", True)
    over = job("a", pods=there, record=Record(JobPhase.SUCCEEDED, ended_at=10.0))
    (doom,) = one(over, nodes(1), 10.0 + LOST_S + 1).delete
    assert (doom.pod.name, doom.force) == ("a-1", True)


def test_names_are_as_many_as_pods_are_allowed() -> None:
    there = tuple(replace(one, gone_by=1.0) for one in pods(2))
    assert one(job("a", 1, 3, pods=there), nodes(8)).create == (2,)


def test_decision_agrees_with_the_same_pods_in_the_same_places() -> None:
    known = job("a", pods=pods(2))
    assert agrees(known, pods(2))
    assert not agrees(known, pods(3))
    assert not agrees(known, pods(1))
    assert not agrees(known, [pod(0), pod(1, gone_by=1.0)])
    assert not agrees(known, [pod(0), pod(1, uid="another")])
    assert not agrees(job("a", pods=(pod(0), pod(1, ""))), pods(2))
    assert not agrees(job("a", pods=(pod(0), pod(1, running=False))), pods(2))


# ---------------------------------------------------------------- a training that chooses its size


def asking(number: int, *, at: float = 0.0, asked: int = 0, heard: int | None = None, heard_at: float = 0.0) -> Job:
    """A job with so many pods whose training has asked for so many, and was heard to ask for so many."""
    record = Record(JobPhase.RUNNING, starts=1, asked=asked, asked_at=at)
    report = None if heard is None else WorkerReport(heard_at, number, 1, 1, 1.0, heard)
    return running("a", 1, 4, number, record=record, autoscales=True, report=report)


def test_job_that_chooses_its_size_begins_with_the_fewest_and_keeps_what_it_has_until_it_is_heard() -> None:
    assert one(job("a", 2, 4, autoscales=True), nodes(8)).create == (0, 1)
    decision = one(asking(3), nodes(8), 900.0)
    assert (decision.create, decision.delete, decision.record.asked) == ((), (), 0)


def test_job_grows_to_what_its_training_asks_for_and_not_beyond_what_its_user_allows() -> None:
    decision = one(asking(1, heard=3, heard_at=5.0), nodes(8), 6.0)
    assert (decision.record.asked, decision.record.asked_at, decision.create) == (3, 5.0, (1, 2))
    assert decision.why == "grows from 1 to 3 pods, for which the training asks"
    assert one(asking(1, asked=3), nodes(2)).why == "grows from 1 to 2 pods"
    assert one(asking(1, asked=9), nodes(8)).wanted == 4
    assert one(replace(asking(1, asked=3), maximum=2), nodes(8)).wanted == 2
    free = one(replace(asking(1, asked=3), autoscales=False), nodes(8))
    assert (free.wanted, free.record.asked) == (4, 0)


def test_training_chooses_who_goes_and_what_is_left_over_goes_later() -> None:
    first = one(asking(4, asked=4, heard=2, heard_at=5.0), nodes(8), 6.0)
    assert (first.record.asked, first.wanted, first.delete) == (2, 4, ())
    assert gone(one(asking(4, asked=2, at=5.0), nodes(8), 4.0 + RELEASE_S)) == []
    assert gone(one(asking(4, asked=2, at=5.0), nodes(8), 5.0 + RELEASE_S)) == ["a-2", "a-3"]


def test_pod_that_has_left_by_itself_is_replaced_once_the_training_still_asks_for_it() -> None:
    there = (*pods(3), pod(3, ended=True, status=LEFT))
    first = one(replace(asking(0, asked=4, heard=4, heard_at=9.0), pods=there), nodes(8), 10.0)
    assert (first.record.asked, first.create, gone(first)) == (3, (), ["a-3"])
    assert first.record.crashes == 0
    again = one(replace(asking(0), pods=there, record=first.record), nodes(8), 11.0)
    assert again.record == first.record  # it is counted once
    still = WorkerReport(11.0, 3, 2, 9, 1.0, asked=4)
    later = one(replace(asking(3), record=first.record, report=still), nodes(8), 12.0)
    assert (later.record.asked, later.create) == (4, (3,))
    named = replace(asking(0, asked=4), pods=there)  # it was to go anyway, for want of room
    named = replace(named, record=replace(named.record, leaving=frozenset({"a3"})))
    assert one(named, nodes(8), 10.0).record.asked == 4
    evicted = (*pods(3), pod(3, ended=True, status=LEFT, gone_by=30.0))
    assert one(replace(asking(0, asked=4), pods=evicted), nodes(8), 10.0).record.asked == 4
    fewer = one(replace(asking(3), record=first.record, report=replace(still, asked=3)), nodes(8), 12.0)
    assert (fewer.record.asked, fewer.create) == (3, ())


def test_pods_that_leave_one_after_the_other_are_as_many_as_the_training_asked_to() -> None:
    there = (*pods(3), pod(3, ended=True, status=LEFT))
    assert one(replace(asking(0, asked=2), pods=there), nodes(8)).record.asked == 2
    few = (pod(0), pod(1, ended=True, status=LEFT))
    assert one(replace(asking(0, asked=2), pods=few, minimum=2), nodes(8)).record.asked == 2


def test_what_was_heard_before_a_pod_left_does_not_count() -> None:
    decision = one(asking(3, asked=3, at=10.0, heard=4, heard_at=9.0), nodes(8), 11.0)
    assert (decision.record.asked, decision.create) == (3, ())


def test_training_asks_for_nothing_before_it_begins_and_is_heard_anew_after_it_has_ended() -> None:
    begins = job("a", 2, 4, autoscales=True, pods=pods(1), report=WorkerReport(5.0, 1, 1, 1, 1.0, asked=4))
    assert one(begins, nodes(8), 6.0).wanted == 2
    assert one(replace(asking(0, asked=4), pods=()), nodes(8)).record.asked == 0


def test_training_that_has_begun_anew_asks_for_no_number_and_keeps_what_it_has() -> None:
    anew = replace(asking(3, asked=2, heard=0, heard_at=9.0), spares=1)
    decision = one(anew, nodes(8), 900.0)
    assert (decision.record.asked, decision.wanted, decision.create, decision.delete) == (0, 3, (), ())


def test_training_never_asks_for_less_than_the_minimum() -> None:
    low = replace(asking(3, asked=1), minimum=2)
    assert (gone(one(low, nodes(8), 900.0)), one(low, nodes(8), 900.0).wanted) == (["a-2"], 2)


# ---------------------------------------------------------------- spares


def test_spares_are_there_if_nobody_else_needs_the_room() -> None:
    decision = one(job("a", 1, 2, spares=1), nodes(8))
    assert (decision.create, decision.wanted, decision.spares) == ((0, 1, 2), 3, 1)
    both = decide([job("a", 1, 2, spares=2), job("b", 1, 4, created=1.0)], nodes(6), 0.0)
    assert {key: (one.wanted, one.spares) for key, one in both.items()} == {"a": (2, 0), "b": (4, 0)}
    waits = decide([job("a", 2, 2, spares=2), job("b", 3, 4, created=1.0)], nodes(4), 0.0)
    assert {key: (one.wanted, one.spares) for key, one in waits.items()} == {"a": (4, 2), "b": (0, 0)}
    comes = decide([running("a", 2, 2, 4, spares=2), job("b", 2, 4, created=1.0)], nodes(4), 0.0)
    assert (gone(comes["a"]), comes["b"].wanted) == (["a-2", "a-3"], 2)


def test_spare_goes_first_when_another_job_needs_the_room() -> None:
    spared = running("a", 1, 2, 3, spares=1)
    decisions = decide([spared, running("b", 1, 4, 2, "n1"), job("c", 1, 1, created=9.0)], nodes(3, 2), 0.0)
    assert (gone(decisions["a"]), gone(decisions["b"])) == (["a-2"], [])
    assert decisions["c"].wanted == 1


def test_spare_goes_before_the_worker_of_a_job_that_has_more() -> None:
    jobs = [running("a", 1, 1, 2, spares=1), running("b", 1, 4, 4, "n1"), job("c", 1, 1, created=9.0)]
    decisions = decide(jobs, nodes(2, 4), 0.0)
    assert (gone(decisions["a"]), gone(decisions["b"]), decisions["c"].wanted) == (["a-1"], [], 1)


def test_job_that_waits_has_no_spares() -> None:
    assert one(job("a", 3, 3, spares=2), nodes(2)).wanted == 0


def test_pod_that_is_lost_has_been_replaced_by_the_spare_which_is_replaced_then() -> None:
    there = (pod(0), pod(1, ended=True, status=137), pod(2))
    decision = one(running("a", 1, 2, 0, pods=there, spares=1), nodes(3))
    assert (decision.create, decision.wanted, gone(decision)) == ((), 3, ["a-1"])  # its name is free later
    assert one(running("a", 1, 2, 0, pods=(pod(0), pod(2)), spares=1), nodes(3)).create == (1,)


def test_there_are_no_spares_that_the_training_would_take() -> None:
    scaled = job("a", 1, 2, takes=4, spares=1)
    assert one(scaled, nodes(8)).wanted == 2
    refused = Record(JobPhase.RUNNING, refusal=Refusal(2, 900.0, "quota"))
    assert one(running("a", 1, 2, 2, spares=1, record=refused), nodes(8)).wanted == 2


def test_training_that_chooses_its_size_has_spares_beyond_that() -> None:
    assert one(replace(asking(1), spares=1), nodes(8)).wanted == 1
    decision = one(replace(asking(2, asked=2), spares=1), nodes(8), 900.0)
    assert (decision.wanted, decision.spares) == (3, 1)
    low = one(replace(asking(2, asked=1), minimum=2, spares=1), nodes(8), 900.0)
    high = one(replace(asking(4, asked=9), spares=1), nodes(8), 900.0)
    assert [(found.wanted, found.spares) for found in (low, high)] == [(3, 1), (5, 1)]
    fewer = one(replace(asking(4, asked=2, at=890.0), spares=1), nodes(8), 900.0)
    assert (fewer.wanted, fewer.create, fewer.delete) == (4, (), ())
    there = (*pods(4), pod(4, ended=True, status=LEFT))  # one of four has left, and the fifth was a spare
    left = one(replace(asking(0, asked=4), pods=there, spares=1), nodes(8), 900.0)
    assert (left.record.asked, left.create) == (3, ())


# ---------------------------------------------------------------- anything in any order


def made(random_: random.Random, number: int, *, work: int = 10**9, autoscales: bool = False) -> Served:
    low = random_.randint(1, 3)
    barred = frozenset({"n0"}) if random_.random() < 0.2 else frozenset[str]()
    new = job(f"j{number}", low, low + random_.randint(0, 4), priority=random_.choice([0, 0, 5]))
    chooses = autoscales and random_.random() < 0.6
    spares = random_.choice([0, 0, 1, 2]) if autoscales else 0
    new = replace(new, created=float(number), backoff_limit=10**6, autoscales=chooses, takes=new.maximum, spares=spares)
    return Served(new, work=work, most=new.maximum, barred=barred, has_sidecars=number % 2 == 1)


EVENTS = "pppttsssssssskrrrrweeoufcnzlxxhh"
CALMER = "pppttthhhhhhsssssskrrrrrrrreouufcnzlxaaaa"
"""With these, trainings that choose their size also become larger than their minimum."""


def one_event(cluster: Cluster, among: str = EVENTS, *, autoscales: bool = False) -> None:
    random_ = cluster.random
    controller = random_.choice(cluster.controllers)
    match random_.choice(among):
        case "p":
            controller.picture = cluster.stale_picture()
        case "t":
            cluster.think(controller)
        case "s":
            cluster.step(controller)
        case "h":  # it sees jobs at once, and pods late
            controller.picture = replace(cluster.stale_picture(), jobs=cluster.picture().jobs)
            cluster.think(controller)
            while cluster.step(controller):
                pass
        case "k":  # it dies, and another one begins with nothing
            controller.todo = []
            controller.picture = cluster.picture()
        case "r":
            cluster.schedule()
            cluster.run_pods()
        case "w":
            cluster.work()
        case "e":
            cluster.end_pod(random_.choice(EXITS))
        case "o":
            cluster.preempt()
        case "u":
            if cluster.others:
                del cluster.others[random_.choice(sorted(cluster.others))]
        case "f":
            cluster.now += random_.choice([1.0, 10.0, 100.0])
        case "c" if len(cluster.jobs) < 5:
            cluster.jobs[f"j{len(cluster.jobs)}"] = made(random_, len(cluster.jobs), autoscales=autoscales)
        case "a":
            cluster.ask()
        case "d":
            cluster.seek()
        case "z" if cluster.jobs:
            served = cluster.jobs[random_.choice(sorted(cluster.jobs))]
            served.change(suspended=not served.job.suspended)
        case "x" if cluster.jobs:
            served = cluster.jobs[random_.choice(sorted(cluster.jobs))]
            served.change(maximum=random_.randint(served.job.minimum, served.job.takes))
        case "n":
            cluster.restore()
        case "l" if random_.random() < 0.3:
            cluster.lose(random_.choice(sorted(cluster.nodes)))
        case _:
            pass


def settle(cluster: Cluster, *, rounds: int = 60, num_quiet: int = 4) -> None:
    """Nothing happens any more but what the controllers do, all of which see everything; it comes to an end.

    Args:
        cluster: The cluster.
        rounds: How many minutes that takes at most, beside those in which everybody waits for the end of a refusal.
        num_quiet: How many of them nothing happens.
    """
    cluster.mend()
    quiet = 0
    for _ in range(rounds):
        acts = [cluster.turn(controller) for controller in cluster.controllers]
        cluster.now += 61.0
        if not any(acts):
            refusals = [served.job.record.refusal for served in cluster.jobs.values()]
            refusals += [one for controller in cluster.controllers for one in controller.refusals.values()]
            cluster.now = max([cluster.now, *(one.until for one in refusals if one is not None)])
        quiet = 0 if any(acts) else quiet + 1
        if quiet > num_quiet:
            return
    raise AssertionError("the controllers do not come to rest")


def check_shares(cluster: Cluster) -> None:
    """The shares are fair, nothing is idle, and nobody has pods who should not."""
    over = {key for key, served in cluster.jobs.items() if served.job.record.is_over}
    assert not [pod for key in over for pod in cluster.pods.get(key, {}).values() if pod.alive]
    left = [key for key in cluster.jobs if key not in over]
    sizes = {key: sum(pod.alive for pod in cluster.pods.get(key, {}).values()) for key in left}
    free = sum(map(cluster.free, cluster.nodes))
    jobs = {key: cluster.policy.told_of(cluster.jobs[key].job) for key in left}
    tiers = {key: cluster.policy.tier(job) for key, job in jobs.items()}
    wait = {key for key, job in jobs.items() if sizes[key] < job.minimum and not job.suspended}
    for key, job in jobs.items():
        assert all(pod.node and pod.running for pod in cluster.pods.get(key, {}).values()), "nothing is left over"
        cap = cluster.jobs[key].cap
        assert sizes[key] <= (0 if job.suspended else cap + cluster.jobs[key].num_spares)
        assert sizes[key] >= job.minimum or sizes[key] == 0 or job.record.phase is JobPhase.RUNNING
        if key in wait or job.suspended or sizes[key] >= cap or (job.autoscales and not cluster.jobs[key].asks):
            continue
        assert not free, (key, sizes)
        for other, size in sizes.items():
            most = {-1: 0, 0: sizes[key] + 1, 1: jobs[other].maximum}[_sign(tiers[key] - tiers[other])]
            assert other in wait or size <= max(jobs[other].minimum, most), (key, other, sizes)
            assert size <= cluster.jobs[other].cap, "nobody has spares while others lack pods"
    for key in sorted(wait, key=lambda key: jobs[key].rank)[:1]:  # whoever waits first
        surplus = sum(max(0, sizes[other] - jobs[other].minimum) for other in jobs if other not in wait)
        held = sum(sizes[other] for other in wait)
        assert free + surplus + held < jobs[key].minimum, (key, sizes)


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def check_schedules(
    number: int, *, num_controllers: int, policy: SharePolicy = SharePolicy.FAIR, autoscales: bool = False
) -> None:
    conflicts = names = disagreements = others = released = spares = 0
    for seed in range(number):
        room = {"n0": 4, "n1": 4, "n2": 3} if autoscales else {"n0": 2, "n1": 3, "n2": 1}
        cluster = Cluster(seed, room, num_controllers=num_controllers, policy=policy)
        for _ in range(cluster.random.randint(20, 200)):
            one_event(cluster, CALMER if autoscales else EVENTS, autoscales=autoscales)
        settle(cluster)
        check_shares(cluster)
        conflicts += cluster.num_conflicts
        names += cluster.num_refused_names
        disagreements += cluster.num_disagreements
        others += len(cluster.others)
        released += cluster.num_released
        spares += cluster.num_spares
    assert min(conflicts, names, disagreements, others) > 0, "what the rule guards against has happened"
    assert (released > 0) is (spares > 0) is autoscales


@pytest.mark.parametrize("policy", SharePolicy)
def test_no_schedule_breaks_a_limit_and_each_one_comes_to_rest_with_its_shares(policy: SharePolicy) -> None:
    check_schedules(NUM_SCHEDULES, num_controllers=2, policy=policy)


def test_no_schedule_breaks_a_limit_if_trainings_choose_their_sizes_and_have_spares() -> None:
    check_schedules(NUM_SCHEDULES // 2, num_controllers=2, autoscales=True)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", SharePolicy)
@pytest.mark.parametrize("num_controllers", [1, 2, 3])
def test_no_schedule_of_many_breaks_a_limit(num_controllers: int, policy: SharePolicy) -> None:
    check_schedules(MANY, num_controllers=num_controllers, policy=policy)


@pytest.mark.thorough
@pytest.mark.parametrize("num_controllers", [1, 2, 3])
def test_no_schedule_of_many_breaks_a_limit_if_trainings_choose_their_sizes_and_have_spares(
    num_controllers: int,
) -> None:
    check_schedules(MANY, num_controllers=num_controllers, autoscales=True)


def test_no_schedule_counts_a_power_cut_twice_or_lets_it_fail_a_job() -> None:
    most = cuts = 0
    for seed in range(NUM_SCHEDULES // 3):
        cluster = Cluster(seed, {"n0": 8, "n1": 8}, num_controllers=2)
        cluster.jobs["a"] = Served(job("a", 1, 16, takes=16), most=16)
        limit = cluster.jobs["a"].job.backoff_limit
        for event in range(60 * limit):
            if event % 60 == 59:
                cluster.cut_power(cluster.random.choice(["n0", "n1"]))
            cluster.now += 1.0
            one_event(cluster, among="ppttthhhhsssssskrrr")
            record = cluster.jobs["a"].job.record
            assert record.crashes <= cluster.num_cuts <= limit
            assert not record.is_over
            most = max(most, record.crashes)
        cuts += cluster.losses["a"]
        settle(cluster)
        check_shares(cluster)
    assert most > limit / 2, "cuts were seen one by one"
    assert cuts > 4 * cluster.num_cuts * (seed + 1), "and has cost many pods"


def test_every_job_ends_however_small_the_cluster_is() -> None:
    for seed in range(10):
        cluster = Cluster(seed, {"n0": 2, "n1": 2})
        for number in range(6):
            served = made(cluster.random, number, work=cluster.random.randint(1, 40))
            served.job = replace(served.job, minimum=min(4, served.job.minimum), backoff_limit=6)
            served.barred = frozenset()
            cluster.jobs[served.job.key] = served
        controller: Controller = cluster.controllers[0]
        for _ in range(600):
            cluster.turn(controller)
            cluster.work()
            cluster.now += 5.0
        phases = {served.job.record.phase for served in cluster.jobs.values()}
        assert phases == {JobPhase.SUCCEEDED}, (seed, [served.job.record for served in cluster.jobs.values()])


# ---------------------------------------------------------------- the diagram of the phases

rules = import_module("ef_common.core.cluster.decide")
OFTEN = Record(JobPhase.PENDING, crashes=7, lost="a-1 was lost")
PHASES: dict[str, tuple[Job, ...]] = {
    "PENDING → RUNNING": (job("a", 2, 4, pods=pods(2)),),
    "RUNNING → PENDING": (running("a", 2, 4, 0), running("a", 2, 4, 0, pods=(pod(0, ended=True, status=LEFT),))),
    "PENDING → SUSPENDED": (job(suspended=True),),
    "RUNNING → SUSPENDED": (running("a", 1, 4, 0, suspended=True),),
    "SUSPENDED → PENDING": (job(record=Record(JobPhase.SUSPENDED)),),
    "SUSPENDED → RUNNING": (job(record=Record(JobPhase.SUSPENDED), pods=pods(1)),),
    "any → SUCCEEDED": (
        running("a", 1, 4, 0, pods=(pod(0, ended=True, status=FINISHED), pod(1))),
        job(pods=(pod(0, ended=True, status=FINISHED),)),
        job(pods=(pod(0, ended=True, status=FINISHED),), record=Record(JobPhase.SUSPENDED)),
    ),
    "any → FAILED": (
        running("a", 1, 4, 0, pods=(pod(0, ended=True, status=FAILED), pod(1))),
        job(record=OFTEN),
        running("a", 2, 4, 0, pods=(pod(0), pod(1, ended=True, status=137)), record=replace(OFTEN, cap=2)),
        job(problem="it makes no sense"),
        job(problem="it makes no sense", record=Record(JobPhase.SUSPENDED)),
    ),
}


def phase_change(before: Job, decision: Decision) -> str:
    return f"{before.record.phase.name} → {decision.record.phase.name}"


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(rules) == list(PHASES)
    assert states(rules) == set(JobPhase.__members__)


@pytest.mark.parametrize(("row", "case"), cases(PHASES))
def test_each_row_of_the_diagram_is_true(row: str, case: int) -> None:
    before = PHASES[row][case]
    assert phase_change(before, one(before, nodes(4))) == row.replace("any", before.record.phase.name)


@pytest.mark.parametrize("phase", [JobPhase.SUCCEEDED, JobPhase.FAILED])
def test_job_that_is_over_stays_so(phase: JobPhase) -> None:
    for before in (one for jobs in PHASES.values() for one in jobs):
        over = replace(before, record=replace(before.record, phase=phase, ended_at=0.0))
        assert one(over, nodes(4)).record.phase is phase


def test_no_schedule_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()

    def watched(jobs: list[Job], *rest: Any, **more: Any) -> Mapping[str, Decision]:
        decisions = decide(jobs, *rest, **more)
        found.update(phase_change(job, decisions[job.key]) for job in jobs)
        return decisions

    monkeypatch.setattr(cluster_model, "decide", watched)
    for seed in range(10):
        cluster = Cluster(seed, {"n0": 2, "n1": 3, "n2": 1}, num_controllers=1, policy=SharePolicy.FAIR)
        for _ in range(150):
            one_event(cluster)
    over = ("SUCCEEDED", "FAILED")
    changes = {row for row in found if len(set(row.split(" → "))) == 2}
    assert {row for row in changes if not row.endswith(over)} == {row for row in PHASES if not row.endswith(over)}
    assert not any(row.startswith(over) for row in changes)
