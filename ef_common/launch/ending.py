"""The end of the interpreter in a process that others wait for."""

from __future__ import annotations

import contextlib
import gc
import io


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
