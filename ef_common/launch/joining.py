"""What `elasticflow run --join RUN` has to know of a job: its launchers leave it in the run directory.

Only the user who has started the job can read that file, because in it is the token that the launcher of a job on one
machine has made. Where connections are encrypted it is not: workers must not have it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ef_common.errors import JobFinished, UsageError
from ef_common.files import read_whole, write_whole
from ef_common.launch import environment, run_directory
from ef_common.launch.finding import NOTHING_TO_JOIN
from ef_common.launch.rendezvous_options import config_of

_FILE = "job.json"
_OF_ONE_NODE = ("is_host", "stands_in", "join")
_OF_SCRIPT = ("module", "no_python", "run_path")
_SHARED = (
    environment.CHECKPOINT,
    environment.CLAIMS,
    environment.AUTOSCALE,
    environment.SCALE_COMMAND,
    environment.SCALE_TIMEOUT,
    environment.AUDIT,
    environment.TLS,
    environment.GRACE,
    environment.HEARTBEAT_TIMEOUT,
    environment.HANG_TIMEOUT,
)


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The options of a job, as another node has to give them.

    Args:
        options: Of torchrun, by name.
        variables: Of the environment.
        command: The script and its arguments.
        start: Options of torchrun that say how the script is started, by name.
        directory: Working directory.
        host: The machine of the whole job; "" if others can join it.
    """

    options: Mapping[str, str]
    variables: Mapping[str, str]
    command: list[str]
    start: Mapping[str, bool]
    directory: str
    host: str


def write(run_dir: Path, args: argparse.Namespace, command: list[str], *, local: bool, token: str) -> None:
    """Leave in the run directory what other nodes have to know.

    Args:
        run_dir: Directory of the run.
        args: torchrun's arguments, by which this node has found the job.
        command: The script and its arguments.
        local: The whole job is on this machine.
        token: One that its launcher has made, so that nobody knows it, and that its workers know; "" for none.

    Raises:
        UsageError: Nothing can be written there.
    """
    known = {name: os.environ[name] for name in _SHARED if name in os.environ}
    job = JobOptions(
        options={
            "rdzv_endpoint": args.rdzv_endpoint,
            "rdzv_backend": args.rdzv_backend,
            "rdzv_id": args.rdzv_id,
            "rdzv_conf": _without(args.rdzv_conf, _OF_ONE_NODE),
            "nnodes": args.nnodes,
            "nproc_per_node": args.nproc_per_node,
        },
        variables={**known, **({environment.TOKEN: token} if token else {})},
        command=command,
        start={name: getattr(args, name) for name in _OF_SCRIPT},
        directory=os.getcwd(),
        host=socket.gethostname() if local else "",
    )
    try:
        write_whole(run_dir / _FILE, json.dumps(asdict(job)).encode(), mode=0o600)
    except OSError as error:
        raise UsageError(
            f"the run directory cannot be written: {error.strerror}. Use another --run-dir. Received: {run_dir}"
        ) from None


def read(run_dir: Path) -> JobOptions:
    """Read it.

    Raises:
        JobFinished: The training is over.
        UsageError: There is no job that could be joined from here.
    """
    received = f"Received: --join={run_dir}"
    launchers = run_directory.read_launchers(run_dir)
    if launchers and all(one.over for one in launchers):
        if any(one.outcome.startswith("finished") for one in launchers):
            raise JobFinished(NOTHING_TO_JOIN)
        raise UsageError(f"the run there has ended. Start it again without --join. {received}")
    try:
        job = JobOptions(**json.loads(read_whole(run_dir / _FILE)))
    except FileNotFoundError:
        raise UsageError(
            "--join takes the directory of a run that `elasticflow run` has started, or the URL at which its nodes "
            f"find each other. {received}"
        ) from None
    except PermissionError:
        raise UsageError(f"only the user who has started that run can join it. {received}") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"{run_dir / _FILE} is not one of this version: {error}") from None
    if job.host not in ("", socket.gethostname()):
        raise UsageError(
            f"the whole job is on machine {job.host}. For a job of several machines, start it with --rdzv-endpoint. "
            f"{received}"
        )
    if job.host and environment.TOKEN not in job.variables and environment.TOKEN not in os.environ:
        raise UsageError(
            f"the job has a token that is not on record: set {environment.TOKEN} for it, and to join it. {received}"
        )
    return job


def _without(conf: str, keys: tuple[str, ...]) -> str:
    return ",".join(f"{key}={value}" for key, value in config_of(conf).items() if key not in keys)
