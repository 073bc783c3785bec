"""The end of a process that others wait for."""

from __future__ import annotations

import contextlib
import gc
import io

import psutil


def end_soon() -> None:
    """Let the interpreter end without collecting garbage: with the frameworks loaded, that takes seconds.

    The collections free memory, which the system does anyway, and finalize what is in cycles, such as open files: these
    are flushed here.
    """
    for thing in gc.get_objects():
        kind = type(thing)  # isinstance would ask lazy modules for their class, and import them
        if issubclass(kind, io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom) and not thing.closed:
            with contextlib.suppress(OSError, ValueError):
                thing.flush()
    gc.freeze()


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended, be it that its parent has not taken note yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
