"""The end of a process that others wait for."""

from __future__ import annotations

import contextlib
import gc
import io
from itertools import compress

import psutil

_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


class InOrder(SystemExit):
    """This worker has nothing more to do in the job, and so its process ends."""


def end_soon() -> None:
    """Let the interpreter end without collecting garbage: with the frameworks loaded, that takes seconds.

    The collections free memory, which the system does anyway, and finalize what is in cycles, such as open files: these
    are flushed here.
    """
    things = gc.get_objects()  # hundreds of thousands: no line of Python runs for each
    kinds = list(map(type, things))
    numbers = list(map(id, kinds))
    known = dict(zip(numbers, kinds, strict=True))
    buffered = {number for number, kind in known.items() if issubclass(kind, _BUFFERED)}
    for thing in compress(things, map(buffered.__contains__, numbers)):
        if not thing.closed:
            with contextlib.suppress(OSError, ValueError):
                thing.flush()
    gc.freeze()


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended, be it that its parent has not taken note yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
