"""Runs the command, as `elasticflow` and as `python -m ef_common.cli`."""

import io
import os
import signal
import sys

from ef_common.cli import main
from ef_common.launch.last_exit import LastExit, end_at_once

_INIT = 1
"""Process id of the first process of a container."""


def command() -> None:
    """Run the command that the command line names, and end this process.

    The kernel keeps a signal without a handler from the first process of a container. So SIGTERM has one until the
    command sets its own, which may be many seconds later: it first imports torch.
    """
    if os.getpid() == _INIT and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no arrows shows question marks
    try:
        main()
    except LastExit as end:
        end_at_once(int(end.code or 0))


if __name__ == "__main__":
    command()
