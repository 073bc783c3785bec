"""Pods that are lost again and again: they are not replaced for a while, and the others go on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ef_common.core.cluster import Cause, Decision, Job, JobPhase, Pod, Record, Refusal, rests_on_pods
from ef_common.core.cluster.losses import MAX_PAUSE_S, STEADY_S, pause_s
from tests.core.test_cluster import gone, job, nodes, one, pod, pods, running

LIMIT = 2
AT = 100.0
BEYOND = Record(JobPhase.RUNNING, starts=1, crashes=LIMIT, crashed_at=AT - 10.0)
"""One more loss in a row is too many."""


def lost(index: int, *, created: float = AT - 5.0) -> Pod:
    return pod(index, ended=True, running=False, status=139, created=created)


def losing(low: int = 2, high: int = 4, *, there: tuple[Pod, ...] | None = None, **more: object) -> Job:
    """A job of three pods that has lost one too many."""
    there = (*pods(3), lost(3)) if there is None else there
    return job("a", low, high, **{"pods": there, "record": BEYOND, "backoff_limit": LIMIT, "takes": high, **more})


def capped(low: int = 2, high: int = 4, *, cap: int = 3, there: tuple[Pod, ...] | None = None, **more: object) -> Job:
    """A job that has lost one too many a while ago."""
    record = replace(BEYOND, crashes=LIMIT + 1, crashed_at=AT, lost="a-3 ended with status 139", cap=cap)
    return losing(low, high, there=pods(3) if there is None else there, **{"record": record, **more})


def then(before: Job, decision: Decision, *there: Pod, **more: object) -> Job:
    return replace(before, record=decision.record, pods=there, **more)  # type: ignore[arg-type]


def test_job_goes_on_with_those_that_run_and_says_why_for_as_long_as_it_is_so() -> None:
    first = one(losing(), nodes(8), AT)
    record = first.record
    assert (record.phase, record.crashes, record.cap) == (JobPhase.RUNNING, LIMIT + 1, 3)
    assert (first.create, gone(first), first.wanted) == ((), ["a-3"], 3)
    assert record.cause is Cause.NOT_REPLACED
    assert record.why == (
        "pods were lost 3 times in a row, and backoffLimit is 2: a-3 ended with status 139; "
        "no pods replace them for 10 minutes"
    )
    later = one(then(losing(), first, *pods(3)), nodes(8), AT + STEADY_S - 1.0)
    assert (later.create, later.record) == ((), record)  # so it is told once


def test_pauses_grow_up_to_the_longest_one_however_often_pods_are_lost() -> None:
    assert [pause_s(Record(crashes=number)) for number in (1, 2, 3, 7, 8)] == [0.0, 1.0, 2.0, 32.0, MAX_PAUSE_S]
    assert pause_s(Record(crashes=5000)) == MAX_PAUSE_S


def test_pods_are_tried_again_once_after_a_while() -> None:
    again = one(capped(), nodes(8), AT + STEADY_S)
    assert (again.record.cap, again.record.crashes, again.create) == (None, LIMIT + 1, (3,))
    assert again.record.why == again.record.lost == "a-3 ended with status 139"
    crashed = then(capped(), again, *pods(3), lost(3, created=AT + STEADY_S))
    once = one(crashed, nodes(8), AT + STEADY_S + 5.0)
    assert (once.record.crashes, once.record.cap, once.create) == (LIMIT + 2, 3, ())
    assert once.record.crashed_at == AT + STEADY_S + 5.0
    runs = then(capped(), again, *pods(4))
    assert one(runs, nodes(8), AT + STEADY_S + 5.0).record.why == ""


def test_loss_long_after_pods_were_tried_again_is_the_first_in_a_row() -> None:
    again = one(capped(), nodes(8), AT + STEADY_S)
    late = then(capped(), again, *pods(3), lost(3, created=AT + STEADY_S))
    for after_s, crashes in ((2 * STEADY_S, LIMIT + 2), (2 * STEADY_S + 1.0, 1)):
        assert one(late, nodes(8), AT + after_s).record.crashes == crashes


def test_cap_of_the_time_before_does_not_count_although_nobody_has_decided_since() -> None:
    there = (*pods(2), lost(3, created=AT + STEADY_S))
    assert one(capped(cap=4, there=there), nodes(8), AT + STEADY_S + 5.0).record.cap == 2


def test_each_loss_lets_it_have_one_fewer_and_at_last_it_fails() -> None:
    there = (*pods(2), lost(2, created=1.0))
    fewer = one(capped(there=there), nodes(8), AT + 60.0)
    assert (fewer.record.phase, fewer.record.cap, fewer.create) == (JobPhase.RUNNING, 2, ())
    assert fewer.record.crashes == LIMIT + 1, "it was there together with the one that was lost before"
    assert one(then(capped(), fewer, *there), nodes(8), AT + 61.0).record.cap == 2, "it counts once"
    late = then(capped(), one(then(capped(), fewer, *pods(2)), nodes(8), AT + 61.0), *there)
    assert one(late, nodes(8), AT + 62.0).record.cap == 2, "although nobody has seen it for a moment"
    last = then(capped(), fewer, pod(0), lost(1, created=1.0))
    end = one(last, nodes(8), AT + 61.0).record
    assert (end.phase, end.cause) == (JobPhase.FAILED, Cause.TOO_MANY_CRASHES)
    assert end.why == "pods were lost 3 times in a row, and backoffLimit is 2: a-1 ended with status 139"


def test_pods_that_are_lost_together_are_all_missing() -> None:
    assert one(losing(1, 4, there=(pod(0), lost(1), lost(2), lost(3))), nodes(8), AT).record.cap == 1
    assert one(capped(1, there=(pod(0), lost(1), lost(2))), nodes(8), AT + 1.0).record.cap == 1
    assert one(losing(2, 4, there=(pod(0), lost(1), lost(2))), nodes(8), AT).record.phase is JobPhase.FAILED


@pytest.mark.parametrize("away", [pod(2, gone_by=AT + 30.0), pod(2, "", running=False)], ids=["evicted", "pending"])
def test_minimum_has_to_run_when_one_is_lost_too_many(away: Pod) -> None:
    there = (*pods(2), away, lost(3))
    assert one(losing(3, there=there), nodes(8), AT).record.phase is JobPhase.FAILED
    decision = one(losing(2, there=there), nodes(8), AT)
    assert decision.record.phase is JobPhase.RUNNING
    assert decision.record.cap == (2 if away.gone_by else 3), "one that may start yet is not given up"
    leaving = replace(BEYOND, leaving=frozenset({"a2"}))
    assert one(losing(3, record=leaving), nodes(8), AT).record.phase is JobPhase.FAILED


def test_pod_that_has_come_too_late_to_be_counted_takes_none_of_the_others_with_it() -> None:
    assert one(capped(3, there=(*pods(3), lost(4))), nodes(8), AT + 1.0).record.cap == 3
    more = one(capped(1, 8, there=(*pods(5), pod(5, ""), lost(6))), nodes(8), AT + 1.0)
    assert (more.wanted, more.record.cap, gone(more)) == (5, 3, ["a-5", "a-6"])


def test_pods_that_had_to_go_for_others_come_back() -> None:
    assert one(capped(there=pods(1)), nodes(1), AT + 60.0).record.phase is JobPhase.RUNNING
    assert one(capped(there=pods(1)), nodes(8), AT + 60.0).create == (1, 2)
    evicted = (pod(0), pod(1, gone_by=AT + 90.0), pod(2, ended=True, running=False, status=75))
    assert one(capped(there=evicted), nodes(8), AT + 60.0).record.cap == 3
    waits = one(capped(there=()), nodes(1), AT + 60.0)
    assert (waits.record.phase, waits.record.cause) == (JobPhase.PENDING, Cause.NO_ROOM)


def test_size_that_the_user_wants_counts_as_before() -> None:
    fewer = one(capped(2, 4, maximum=2), nodes(8), AT + 60.0)
    assert (gone(fewer), fewer.record.cap) == (["a-2"], 3)
    back = one(then(capped(), fewer, *pods(2)), nodes(8), AT + 61.0)
    assert back.create == (2,)


def test_minimum_that_is_raised_meanwhile_is_waited_for() -> None:
    raised = one(capped(4), nodes(8), AT + 60.0)
    assert (raised.record.phase, raised.create, gone(raised)) == (JobPhase.RUNNING, (), [])
    assert raised.record.cause is Cause.NOT_REPLACED
    assert one(capped(4), nodes(8), AT + STEADY_S).create == (3,)


def test_limit_that_is_raised_or_a_job_that_was_suspended_lets_pods_be_tried_again_at_once() -> None:
    assert one(capped(backoff_limit=LIMIT + 1), nodes(8), AT + 60.0).create == (3,)
    suspended = one(capped(suspended=True), nodes(8), AT + 60.0)
    assert (suspended.record.phase, suspended.record.cap) == (JobPhase.RUNNING, 3)
    without = one(then(capped(), suspended, suspended=True), nodes(8), AT + 61.0)
    assert (without.record.phase, without.record.crashes, without.record.cap) == (JobPhase.SUSPENDED, 0, None)
    assert one(then(capped(), without), nodes(8), AT + 62.0).create == (0, 1, 2, 3)


def test_limit_that_is_lowered_long_after_the_losses_does_no_harm() -> None:
    old = Record(JobPhase.RUNNING, crashes=LIMIT + 1, crashed_at=AT)
    decision = one(losing(there=pods(3), record=old), nodes(8), AT + STEADY_S)
    assert (decision.record.phase, decision.record.cap, decision.create) == (JobPhase.RUNNING, None, (3,))


def test_spares_stand_in_and_are_not_replaced_either() -> None:
    there = (*pods(4), lost(4))
    decision = one(losing(1, 3, there=there, spares=2), nodes(8), AT)
    assert (decision.record.cap, decision.wanted, decision.spares, decision.create) == (4, 4, 1, ())
    assert one(losing(1, 4, there=there, spares=2), nodes(8), AT).spares == 0


def test_training_that_chooses_its_size_gets_no_more_than_are_left() -> None:
    asks = replace(capped(), autoscales=True)
    asks = replace(asks, record=replace(asks.record, asked=4, asked_at=AT))
    assert one(asks, nodes(8), AT + 60.0).create == ()
    assert one(asks, nodes(8), AT + STEADY_S).create == (3,)
    left = replace(asks, pods=(*pods(2), pod(2, ended=True, running=False, status=75)))
    assert one(left, nodes(8), AT + 60.0).record.cap == 3


def test_refusal_and_cap_both_count() -> None:
    record = replace(capped().record, refusal=Refusal(2, AT + 90.0, "quota"))
    few = capped(there=pods(2), record=record)
    assert one(few, nodes(8), AT + 60.0).create == ()
    assert one(few, nodes(8), AT + 90.0).create == (2,)
    assert gone(one(capped(record=record), nodes(8), AT + 60.0)) == []


def test_pods_are_read_again_before_it_is_decided_what_the_job_has_left() -> None:
    for low in (2, 4):
        first = one(losing(low), nodes(8), AT).record
        assert rests_on_pods(BEYOND, first)
        assert not rests_on_pods(first, first)
    assert rests_on_pods(capped().record, one(capped(there=(*pods(2), lost(2, created=1.0))), nodes(8), AT).record)
    assert not rests_on_pods(capped().record, one(capped(), nodes(8), AT + STEADY_S).record)
    assert not rests_on_pods(BEYOND, replace(BEYOND, crashes=1))
    assert rests_on_pods(running("a", 1, 2, 2).record, one(running("a", 1, 1, 2), nodes(2)).record)
