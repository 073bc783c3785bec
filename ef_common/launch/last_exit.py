"""The end of a process in which nothing but a command of ours has run, and for which others wait."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn


class LastExit(SystemExit):
    """The command has nothing more to do: its main module may end the process by :func:`end_at_once`."""


def end_at_once(status: int) -> NoReturn:
    """End this process as its interpreter does, but let the system take back what it holds.

    With torch loaded, the interpreter needs half a second of processor time to let go of that, object by object.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads as the interpreter does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there may be none, or its reader has gone
            stream.flush()
    os._exit(status)
