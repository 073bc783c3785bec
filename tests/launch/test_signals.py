from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from ef_common.launch.signals import Signals, listening

LONG_S = 600.0
"""Longer than a test may last."""


@pytest.fixture
def signals() -> Iterator[Signals]:
    with listening() as found:
        yield found


def signal_soon(number: signal.Signals) -> None:
    threading.Timer(0.1, os.kill, (os.getpid(), number)).start()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_wait_ends_with_a_signal(signals: Signals, number: signal.Signals) -> None:
    signal_soon(number)
    assert signals.wait(LONG_S) == set()
    assert signals == [number]


def test_signal_before_the_wait_ends_it_and_only_that_one(signals: Signals) -> None:
    for _ in range(3):
        signal.raise_signal(signal.SIGTERM)
    assert signals.wait(LONG_S) == set()
    reader, writer = os.pipe()
    threading.Timer(0.1, os.write, (writer, b"x")).start()
    assert signals.wait(LONG_S, [reader]) == {reader}, "it waits again"
    for end in (reader, writer):
        os.close(end)


def test_signals_that_nobody_waits_for_are_all_noted(signals: Signals) -> None:
    number = (1 << 16) + 10  # more than a pipe holds
    for _ in range(number):
        signals.note(signal.SIGINT)
    assert len(signals) == number
    assert signals.wait(LONG_S) == set()


def test_gentle_signal_counts_only_if_it_is_the_first(signals: Signals) -> None:
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.raise_signal(number)
    assert signals == [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT]


def test_terminations_within_a_second_of_one_are_the_same_wish(
    signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler signals all processes of a job, and the launcher's parent passes its own signal on."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for moment, num_signals in ((100.0, 1), (100.05, 1), (100.9, 1), (101.5, 2), (102.4, 2), (102.6, 3)):
        now[0] = moment
        signal.raise_signal(signal.SIGTERM)
        assert len(signals) == num_signals, "time counts from the first one: a program that repeats it is heeded"


def test_second_interruption_counts_whenever_it_comes(signals: Signals) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
        signal.raise_signal(number)
    assert signals == [signal.SIGTERM, signal.SIGINT, signal.SIGINT]


def test_wait_ends_with_its_time(signals: Signals) -> None:
    assert signals.wait(0.01) == set()


def test_signals_hold_no_files_afterwards() -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with listening():
            pass
    assert os.listdir("/proc/self/fd") == before
