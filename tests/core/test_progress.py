from __future__ import annotations

import pytest

from ef_common.core.progress import (
    BOUNDARY,
    FIRST,
    OTHER,
    SETTLING,
    STEP,
    Heard,
    Limits,
    Longest,
    Progress,
    Verdict,
    judge,
    limit_of,
)

LIMITS = Limits(floor_s=10.0, unknown_s=100.0)
NOW = 1000.0


def waits(for_s: float, *, at: tuple[int, int] = (1, 5), kind: str = STEP) -> Progress:
    return Progress(*at, waits=True, kind=kind, for_s=for_s)


def computes(for_s: float, *, at: tuple[int, int] = (1, 5), kind: str = STEP) -> Progress:
    return Progress(*at, waits=False, kind=kind, for_s=for_s)


def verdict(
    *told: Progress,
    earliest: float = 0.0,
    ages: tuple[float, ...] = (),
    fresh: float = 990.0,
    limits: Limits = LIMITS,
    longest: Longest | None = None,
) -> Verdict:
    names = "abcdefg"[: len(told)]
    ages = ages or (0.0,) * len(told)
    heard = {name: Heard(one, NOW - age) for name, one, age in zip(names, told, ages, strict=True)}
    longest = Longest() if longest is None else longest
    return judge(list(names), heard, now=NOW, earliest=earliest, fresh=fresh, longest=longest, limits=limits)


def test_member_that_keeps_all_others_waiting_beyond_the_limit_is_hung() -> None:
    found = verdict(waits(12.0), computes(13.0), waits(11.0))
    assert found.hung == ("b",)
    assert found.why == "b hung: the others have waited for 11.0 s, and the limit is 10.0 s"


@pytest.mark.parametrize(
    "told",
    [
        (waits(12.0), computes(13.0), waits(9.0)),  # one has not waited for long
        (waits(12.0), computes(9.0), waits(12.0)),  # it has moved since
        (waits(12.0), computes(13.0, kind=OTHER), waits(12.0)),  # a checkpoint, say
        (waits(12.0), computes(13.0, kind=FIRST), waits(12.0)),
        (computes(13.0), computes(13.0), computes(13.0)),  # nobody waits for anybody
        (waits(13.0), computes(13.0), computes(13.0)),  # most lag
        (waits(13.0),),
    ],
)
def test_healthy_members_are_left_alone(told: tuple[Progress, ...]) -> None:
    assert verdict(*told) == Verdict()


def test_half_of_the_members_may_be_hung() -> None:
    assert verdict(waits(12.0), computes(13.0)).hung == ("b",)
    assert verdict(waits(12.0), computes(13.0), waits(12.0), computes(12.0)).hung == ("b", "d")


def test_most_of_the_members_are_hung_when_nothing_else_explains_it() -> None:
    assert verdict(waits(99.0), computes(101.0), computes(101.0)).hung == ()
    assert verdict(waits(101.0), computes(101.0), computes(102.0)).hung == ("b", "c")


def test_member_that_waits_for_less_than_the_others_lags() -> None:
    assert verdict(waits(12.0, at=(1, 6)), waits(13.0, at=(1, 5)), waits(11.0, at=(1, 6))).hung == ("b",)
    # It does not come into the new view, where the others settle.
    assert verdict(waits(12.0, at=(2, SETTLING)), waits(13.0), waits(11.0, at=(2, SETTLING))).hung == ("b",)
    # A newcomer has no number yet, and is as far as they are.
    assert verdict(*[waits(12.0, at=(2, SETTLING), kind=OTHER)] * 3) == Verdict()


def test_member_that_has_completed_what_another_still_waits_for_is_hung() -> None:
    assert verdict(waits(12.0), computes(13.0, at=(1, 6))).hung == ("b",)


def test_time_before_the_view_does_not_count() -> None:
    told = (waits(50.0), computes(50.0), waits(50.0))
    assert verdict(*told, earliest=NOW - 9.0) == Verdict()
    assert verdict(*told, earliest=NOW - 11.0).hung == ("b",)


def test_nobody_is_judged_by_old_news_or_none() -> None:
    told = (waits(12.0), computes(13.0), waits(12.0))
    assert verdict(*told, ages=(0.5, 0.0, 0.0)).hung == ("b",)
    assert verdict(*told, ages=(11.0, 0.0, 0.0)) == Verdict()
    assert verdict(*told, ages=(0.0, 0.0, 11.0)) == Verdict()
    heard = {"a": Heard(waits(12.0), NOW)}
    silent = judge(["a", "b"], heard, now=NOW, earliest=0.0, fresh=0.0, longest=Longest(), limits=LIMITS)
    assert silent == Verdict()


def test_time_since_the_newest_news_counts() -> None:
    assert verdict(waits(9.0), computes(9.0), ages=(2.0, 2.0)).hung == ("b",)


def test_nobody_is_hung_without_a_limit() -> None:
    limits = Limits(hang_timeout_s=0.0)
    assert verdict(waits(1e6), computes(1e6), limits=limits) == Verdict()
    assert verdict(waits(1e6), waits(1e6), limits=limits) == Verdict()


def test_if_all_wait_for_the_same_nobody_is_to_blame() -> None:
    assert verdict(waits(90.0), waits(101.0)) == Verdict()
    found = verdict(waits(101.0), waits(102.0))
    assert (found.hung, found.stuck) == ((), True)
    assert found.why == "all members wait, and nothing has moved for 101.0 s"


def test_members_that_wait_for_more_workers_are_not_stuck() -> None:
    assert verdict(waits(500.0, kind=BOUNDARY), waits(500.0, kind=BOUNDARY)) == Verdict()
    assert verdict(waits(500.0, kind=BOUNDARY), computes(500.0)).hung == ("b",)


@pytest.mark.parametrize(
    ("kind", "longest", "limits", "limit_s"),
    [
        (STEP, Longest(), Limits(), 90.0),
        (STEP, Longest(step_s=8.9), Limits(), 90.0),
        (STEP, Longest(step_s=20.0), Limits(), 200.0),
        (STEP, Longest(step_s=20.0, first_s=150.0), Limits(), 300.0),  # a compilation may come again
        (STEP, Longest(other_s=4000.0), Limits(), 90.0),
        (STEP, Longest(step_s=20.0), Limits(hang_timeout_s=3.0), 3.0),
        (FIRST, Longest(), Limits(), 600.0),
        (FIRST, Longest(first_s=400.0), Limits(), 800.0),
        (FIRST, Longest(first_s=400.0), Limits(hang_timeout_s=3.0), 800.0),
        (OTHER, Longest(), Limits(), 600.0),
        (OTHER, Longest(step_s=500.0, first_s=500.0), Limits(), 600.0),
        (OTHER, Longest(other_s=4000.0), Limits(), 8000.0),
        (BOUNDARY, Longest(), Limits(hang_timeout_s=900.0), 900.0),
    ],
)
def test_limit_is_learned_for_each_kind(kind: str, longest: Longest, limits: Limits, limit_s: float) -> None:
    assert limit_of(kind, longest, limits) == limit_s


def test_longest_spans_are_those_of_all_who_have_told() -> None:
    one = Progress(1, 5, waits=True, kind=STEP, for_s=99.0, longest_step_s=1.0, longest_first_s=9.0)
    other = Progress(1, 5, waits=True, kind=STEP, for_s=99.0, longest_step_s=2.0, longest_other_s=7.0)
    assert Longest().and_of(one).and_of(other) == Longest(2.0, 9.0, 7.0)
