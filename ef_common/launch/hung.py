"""Ends a worker whose main thread hangs after the others have continued without it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading

GRACE_S = 2.0
"""How long the main thread may take to come back, and to end as any evicted worker does."""


def end_if_hung(why: str, heard: threading.Event, *, grace_s: float = GRACE_S) -> None:
    """Write the stacks of all threads to standard error; end the process unless the main thread comes back.

    It is killed: whatever holds the main thread could hold a clean-up as well, and `elasticflow run` starts those anew
    that a signal has ended.

    Args:
        why: The coordinator's reason.
        heard: Set as soon as the main thread has heard that it is out.
        grace_s: How long to wait for it.
    """
    try:
        with contextlib.suppress(Exception):  # there may be no standard error
            _write_stacks(why)
    finally:  # the end must come whatever is wrong
        if not heard.wait(grace_s):
            os.kill(os.getpid(), signal.SIGKILL)


def _write_stacks(why: str) -> None:
    stderr = sys.__stderr__
    if stderr is not None:
        number = stderr.fileno()
        os.write(number, f"elasticflow: this worker keeps the others waiting: {why}. What it does:\n".encode())
        faulthandler.dump_traceback(number, all_threads=True)
