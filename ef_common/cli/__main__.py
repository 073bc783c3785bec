"""Runs the command, as `elasticflow` and as `python -m ef_common.cli`."""

import io
import sys

from ef_common.cli import main
from ef_common.launch.last_exit import LastExit, end_at_once


def command() -> None:
    """Run the command that the command line names, and end this process."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no arrows shows question marks
    try:
        main()
    except LastExit as end:
        end_at_once(int(end.code or 0))


if __name__ == "__main__":
    command()
