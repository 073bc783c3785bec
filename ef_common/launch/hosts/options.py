"""The options of `elasticflow run --hosts`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ORPHAN_S = 300.0
"""A node leaves when it has heard nothing of its launcher for this long, unless the user says otherwise."""


def path(text: str) -> Path:
    """A path on the command line; shells leave the ``~`` of ``--option=~/path`` alone."""
    return Path(os.path.expanduser(text))


def add_options(made: argparse.ArgumentParser) -> None:
    """The options of a job on several hosts."""
    ours = made.add_argument_group("ElasticFlow on hosts that ssh reaches")
    ours.add_argument(
        "--hosts",
        metavar="FILE",
        type=path,
        help="run the job on these hosts: lines `host` or `host slots=N`, which may change while it runs",
    )
    ours.add_argument(
        "--host-discovery-script",
        metavar="COMMAND",
        help="the same with what this command prints, as horovodrun has it: lines `host` or `host:N`",
    )
    ours.add_argument(
        "--ssh-command",
        metavar="COMMAND",
        default="ssh",
        help="how a host is reached, for example `ssh -p 2222 -i key` (default: ssh)",
    )
    ours.add_argument(
        "--remote-python",
        metavar="PATH",
        default=sys.executable,
        help="the Python of the hosts (default: that of this command, at the same path)",
    )
    ours.add_argument(
        "--launcher-timeout",
        metavar="SECONDS",
        type=float,
        default=ORPHAN_S,
        help="nodes that have heard nothing of this launcher for so long save a checkpoint and leave; 0: they train "
        f"to the end (default: {ORPHAN_S:g})",
    )


def is_asked_for(args: argparse.Namespace) -> bool:
    """Whether the command line is one of such a job."""
    return args.hosts is not None or args.host_discovery_script is not None
