"""The signals that end a program, and temporary handlers for them."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from types import FrameType


def to_end() -> list[signal.Signals]:
    """SIGINT, SIGTERM and SIGHUP; without SIGHUP where it is ignored, as `nohup` does, and must stay so."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM] if ignored else [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@contextlib.contextmanager
def handled(numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Set this handler for these signals within the context. Main thread only, as Python sets no handlers elsewhere."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, one in before.items():
            signal.signal(number, one)


GENTLE = (signal.SIGHUP, signal.SIGUSR1)
"""They count only as the first signal: the end of the terminal or of the process that has launched this one, and what
schedulers send ahead. A job that is about to stop then has the time for its checkpoint."""


@contextlib.contextmanager
def listening() -> Iterator[list[int]]:
    """Record the signals that ask this process to end, instead of ending by them.

    Whoever ignores SIGHUP (nohup) goes on ignoring it.
    """
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number not in GENTLE or not signals:
            signals.append(number)

    with handled([*to_end(), signal.SIGUSR1], note):
        yield signals
