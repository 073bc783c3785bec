"""How fast something goes on that comes in steps."""

from __future__ import annotations

import pytest

from ef_common.launch.speed import Speed


def test_speed_is_that_of_the_last_ten_seconds() -> None:
    speed = Speed()
    assert speed.at(0.0) == 0.0
    for second in range(31):
        speed.note(float(second), second * (100.0 if second > 15 else 10.0))
    assert speed.at(30.0) == pytest.approx(100.0)


def test_speed_of_long_steps_is_that_of_the_last_one_and_falls_when_nothing_happens() -> None:
    speed = Speed()
    for second in range(61):
        speed.note(float(second), 300.0 * (second // 30))
    assert speed.at(60.0) == pytest.approx(10.0)
    assert speed.at(89.0) == pytest.approx(10.0)
    assert speed.at(120.0) < 7.0


def test_speed_of_steps_of_a_minute_is_the_same_at_each_moment_between_them() -> None:
    speed = Speed()
    for minute in range(4):
        speed.count(60.0 * minute, 512)
        if minute:
            moments = [60.0 * minute + second for second in range(60)]
            assert [speed.at(moment) for moment in moments] == pytest.approx([512 / 60] * 60)


def test_speed_of_steps_of_five_seconds_is_right_just_after_a_step() -> None:
    speed = Speed()
    for number in range(10):
        speed.count(5.0 * number, 40)
    assert [speed.at(moment) for moment in (45.0, 49.0)] == pytest.approx([8.0, 8.0])


def test_speed_after_a_long_silence_is_zero() -> None:
    speed = Speed()
    for minute in range(3):
        speed.count(60.0 * minute, 512)
    assert speed.at(120.0 + 61.0) == pytest.approx(512 / 61)  # one that is a second late
    assert speed.at(120.0 + 301.0) == 0.0


def test_speed_after_a_long_pause_is_that_since_then() -> None:
    speed = Speed()
    for second in range(20):
        speed.count(float(second), 8)
    for second in range(620, 623):
        speed.count(float(second), 8)
    assert speed.at(622.0) == 8.0
