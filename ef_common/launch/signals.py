"""The signals that end a program, and temporary handlers for them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
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


class Signals(list[int]):
    """The signals that have asked this process to end, the oldest first. Each one ends a wait here.

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
        """Add one, unless it is gentle and not the first. Handlers may call this, as it takes no lock."""
        if number not in GENTLE or not self:
            self.append(number)
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
