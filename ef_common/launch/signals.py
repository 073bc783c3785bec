"""The signals that end a program, and temporary handlers for them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from math import inf
from multiprocessing import connection
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


SAME_NOTICE_S = 1.0
"""SIGTERMs that come within this time are one. A scheduler signals all processes of a job, and a program that has
started this one and is signalled with it (`srun`, `uv run`) passes its own on."""


class Wishes(list[int]):
    """The signals that have asked this process to end, the oldest first, without those that say nothing new."""

    def __init__(self) -> None:
        super().__init__()
        self._term_at = -inf

    def add(self, number: int) -> bool:
        """Add one, unless it is gentle and not the first, or a SIGTERM that comes with another one.

        A handler may call this, as it takes no lock.

        Returns:
            Whether it was added.
        """
        now = time.monotonic()
        is_repeated = number in GENTLE and bool(self)
        if is_repeated or (number == signal.SIGTERM and now <= self._term_at + SAME_NOTICE_S):
            return False
        if number == signal.SIGTERM:
            self._term_at = now
        self.append(number)
        return True


class Signals(Wishes):
    """The wishes to end. Each one ends a wait here.

    A process that is forked from this one has a copy of the list, which nothing is added to.
    """

    def __init__(self) -> None:
        super().__init__()
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)

    def close(self) -> None:
        """Nobody waits here any more."""
        for end in (self._reader, self._writer):
            os.close(end)

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal."""
        if self.add(number):
            with contextlib.suppress(BlockingIOError):  # there is something to read in any case
                os.write(self._writer, b"\0")

    def wait(self, seconds: float, ends: Iterable[int] = ()) -> set[int]:
        """Wait until there is one more, or one of these is ready, at most so long.

        Args:
            seconds: How long.
            ends: Descriptors to read from, such as the sentinels of processes.

        Returns:
            Which of these are ready.
        """
        ready = {end for end in connection.wait([self._reader, *ends], seconds) if isinstance(end, int)}
        if self._reader in ready:
            os.read(self._reader, 1 << 16)
        return ready - {self._reader}


@contextlib.contextmanager
def listening() -> Iterator[Signals]:
    """Record the signals that ask this process to end, instead of ending by them.

    Whoever ignores SIGHUP (nohup) goes on ignoring it.
    """
    signals = Signals()
    with contextlib.closing(signals), handled([*to_end(), signal.SIGUSR1], signals.note):
        yield signals
