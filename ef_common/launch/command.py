"""The command line of `elasticflow run`, which is torchrun's with options of our own.

Torchrun's parser reads it. Importing that takes a second, and a job on a list of hosts has no worker in this process;
so a command line of such a job is read here, unless it has more in it than the usual options.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

from ef_common.errors import CoordinatorLost, JobFinished, UsageError
from ef_common.imports import without_collections
from ef_common.launch import environment
from ef_common.launch.hosts import options as hosts_options
from ef_common.launch.mpirun import tell_status
from ef_common.launch.nnodes import DEFAULT_NNODES
from ef_common.launch.rendezvous_options import BACKEND
from ef_common.terminal import FORMATS, LOG_FORMAT, log_as_json, outlive_reader, say

DEFAULT_RESTARTS = 3
LEFT = os.EX_TEMPFAIL
"""Exit status by default if the launcher was told to go before the training was over: it can be started again."""
REFUSED = 2
"""Exit status if the command cannot be run as it is."""
_DEFAULTS = {"nnodes": DEFAULT_NNODES, "rdzv_backend": BACKEND, "max_restarts": DEFAULT_RESTARTS}
_USUAL: dict[str, type] = {
    **dict.fromkeys(("nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf"), str),
    **dict.fromkeys(("local-addr", "role", "log-dir"), str),
    "max-restarts": int,
    "monitor-interval": float,
}
_USUAL_FLAGS = (("-m", "--module"), ("--no-python", "--no_python"))
_USUAL_DEFAULTS = {
    "nproc_per_node": "1",
    "rdzv_endpoint": "",
    "rdzv_id": "none",
    "rdzv_conf": "",
    "role": "default",
    "monitor_interval": 0.1,
    "run_path": False,
}


def main(argv: Sequence[str]) -> int:
    """Run a job, or one node of it, to its end.

    Returns:
        Exit status.
    """
    status = _main(list(argv))
    tell_status(status, os.environ)
    return status


def _main(argv: list[str]) -> int:
    try:
        args = of_hosts(argv)
        if args is not None:
            from ef_common.launch.hosts import job as hosts_job

            prepare(args)
            return hosts_job.main(args, argv)
        try:
            with without_collections():
                from ef_common.launch.run import main as run
        except ImportError as error:
            raise UsageError(
                f"elasticflow run needs torch (pip install 'elasticflow-training[torch]'): {error}"
            ) from None
        return run(argv)
    except JobFinished as finished:
        say(str(finished))
        return 0
    except (UsageError, CoordinatorLost) as error:
        say(str(error), color="red")
        return REFUSED


def prepare(args: argparse.Namespace) -> None:
    """What lines and connections look like."""
    if args.log_format:
        os.environ[LOG_FORMAT] = args.log_format
    if args.tls:
        os.environ[environment.TLS] = args.tls
    environment.check_log_format(os.environ)
    outlive_reader()
    log_as_json()


def add_options(made: argparse.ArgumentParser) -> None:
    """Add our options to torchrun's, and our defaults of those."""
    ours = made.add_argument_group("ElasticFlow")
    ours.add_argument(
        "--join",
        metavar="RUN",
        help="join a job that is running, as one more node: its run directory, which also knows the script and how "
        "the nodes find each other, or the URL at which they do",
    )
    ours.add_argument(
        "--checkpoint", metavar="URL", help="where checkpoints are saved, and resumed from: s3://bucket/run, a path …"
    )
    ours.add_argument(
        "--run-dir",
        metavar="DIR",
        type=hosts_options.path,
        help="directory of the event log (default: a new one in ./elasticflow-runs)",
    )
    ours.add_argument(
        "--tls",
        metavar="1|DIR",
        help="encrypt ElasticFlow's connections: 1 for certificates that follow from the token, or their directory",
    )
    ours.add_argument(
        "--autoscale",
        metavar="SETTINGS",
        help="let the job choose its size: min=1,max=6,policy=throughput,every_steps=50, or `off`; what the script "
        "itself says takes precedence",
    )
    ours.add_argument(
        "--scale-command",
        metavar="COMMAND",
        help="what the job runs when it wants more or fewer nodes, with the numbers in ELASTICFLOW_WANTED and "
        "ELASTICFLOW_NODES",
    )
    ours.add_argument(
        "--left-status",
        metavar="STATUS",
        type=int,
        default=LEFT,
        help="exit status if this node was told to go, by a signal or a notice, before the training was over "
        f"(default: {LEFT}; 130 after Ctrl-C)",
    )
    ours.add_argument(
        "--log-format",
        choices=FORMATS,
        help="how ElasticFlow writes its lines to the terminal (default: text); json: one object in each line",
    )
    hosts_options.add_options(made)
    made.set_defaults(**{name: value for name, value in _DEFAULTS.items() if f"PET_{name.upper()}" not in os.environ})


class _Unusual(Exception):
    """Torchrun's parser knows what this is."""


class _Usual(argparse.ArgumentParser):
    """Of the usual options."""

    def error(self, message: str) -> NoReturn:
        raise _Unusual(message)


def usual() -> argparse.ArgumentParser:
    """A parser of our options and the usual ones of torchrun, which reads them as torchrun does."""
    made = _Usual(add_help=False, allow_abbrev=False)
    for name, kind in _USUAL.items():
        made.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}")), type=kind)
    for names in _USUAL_FLAGS:
        made.add_argument(*names, action="store_true")
    made.add_argument("training_script")
    made.add_argument("training_script_args", nargs=argparse.REMAINDER)
    made.set_defaults(**_USUAL_DEFAULTS)
    add_options(made)
    return made


def of_hosts(argv: Sequence[str]) -> argparse.Namespace | None:
    """The arguments of a job on a list of hosts; None if it is none, or something unusual is among them."""
    if any(name.startswith("PET_") for name in os.environ):
        return None
    try:
        args, unknown = usual().parse_known_args(argv)
    except _Unusual:
        return None
    return args if hosts_options.is_asked_for(args) and not unknown else None
