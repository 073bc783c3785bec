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
