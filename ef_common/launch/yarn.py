"""An elastic training as a service of YARN, through the REST API of YARN Services: submit it, flex it, end it.

The service has one component, whose containers are nodes of one job. They find each other through the directory of the
run, on a file system that all of them share. YARN flexes only components that it always starts again, so the node that
has seen the end of the training stops the service. Beside the event log, the directory of the run holds::

    Yarnfile     the service, as it was sent
    node.sh      what a container runs
    token        the secret of the nodes, unless the user has set one
    yarn.json    which service it is, and where
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import socket
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ef_common.errors import UsageError
from ef_common.files import write_whole
from ef_common.launch import environment, run_directory
from ef_common.launch.json_record import read_record
from ef_common.launch.run_directory import Unanswered

COMPONENT = "worker"
_RECORD, _YARNFILE, _SCRIPT, _TOKEN = "yarn.json", "Yarnfile", "node.sh", "token"
_PATH = "app/v1/services"
_TIMEOUT_S = 30.0
MAX_NAME = 63
"""Longest name of a service, which is a part of host names."""
_NAME = re.compile(rf"[a-z][a-z0-9-]{{0,{MAX_NAME - 1}}}")
_STATES = ("ACCEPTED", "STARTED", "STABLE", "FLEX", "UPGRADING")
"""Those of a service that has not ended."""


@dataclass(frozen=True, slots=True)
class Resource:
    """What each container has.

    Args:
        cpus: Virtual cores.
        memory_mb: Memory.
        gpus: GPUs, as ``yarn.io/gpu`` counts them.
    """

    cpus: int = 1
    memory_mb: int = 4096
    gpus: int = 0

    def as_json(self) -> dict[str, Any]:
        """As a Yarnfile has it."""
        gpus = {"additional": {"yarn.io/gpu": {"value": self.gpus, "unit": ""}}} if self.gpus else {}
        return {"cpus": self.cpus, "memory": str(self.memory_mb), **gpus}


@dataclass(frozen=True, slots=True)
class Training:
    """What is submitted.

    Args:
        name: Of the service.
        containers: How many there are at the start.
        min_nodes: Nodes, without which the training waits.
        max_nodes: Nodes, of which it has no more.
        resource: Of each container.
        queue: Of YARN; "" for the default one.
        run: Options for `elasticflow run`.
        command: The script and its arguments.
    """

    name: str
    containers: int
    min_nodes: int
    max_nodes: int
    resource: Resource
    queue: str
    run: tuple[str, ...]
    command: tuple[str, ...]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"the name of a service has at most {MAX_NAME} small letters, digits and hyphens, and begins with a "
                f"letter. Received: {self.name}"
            )
        if not self.command or not Path(self.command[0]).is_file():
            received = self.command[0] if self.command else "no script"
            raise UsageError(f"expected options and then a script that is there. Received: {received}")
        _check_number(self.containers, self.max_nodes)


@dataclass(frozen=True, slots=True)
class YarnJob:
    """A service.

    Args:
        url: Of the ResourceManager.
        name: Of the service.
        max_nodes: How many containers it may have.
    """

    url: str
    name: str
    max_nodes: int


@dataclass(frozen=True, slots=True)
class Status:
    """What YARN says of a service.

    Args:
        state: Such as ``STABLE``.
        wanted: How many containers it is to have.
        hosts: Of its containers that run.
        diagnostics: In the words of YARN; "" for none.
    """

    state: str
    wanted: int
    hosts: list[str]
    diagnostics: str


def service_of(training: Training, run_dir: Path) -> dict[str, Any]:
    """The service, as a Yarnfile has it."""
    component = {
        "name": COMPONENT,
        "number_of_containers": training.containers,
        "launch_command": f"bash {shlex.quote(str(run_dir / _SCRIPT))}",
        "resource": training.resource.as_json(),
        "restart_policy": "ALWAYS",
    }
    queue = {"queue": training.queue} if training.queue else {}
    return {"name": training.name, "version": "1.0.0", **queue, "components": [component]}


def script_of(training: Training, run_dir: Path, *, url: str, directory: Path, checkpoint: str) -> str:
    """What a container runs.

    Args:
        training: What is submitted.
        run_dir: Directory of the run, which all nodes share.
        url: Of the ResourceManager.
        directory: Working directory.
        checkpoint: URL of the checkpoints; "" for the directory of the run.
    """
    options = [
        f"--nnodes={training.min_nodes}:{training.max_nodes}",
        f"--run-dir={run_dir}",
        f"--rdzv-endpoint=file://{run_dir}",
        f"--checkpoint={checkpoint or f'file://{run_dir}'}",
        *training.run,
        *training.command,
    ]
    return _NODE.format(
        directory=shlex.quote(str(directory)),
        bin=shlex.quote(str(Path(sys.executable).parent)),
        token=shlex.quote(str(run_dir / _TOKEN)),
        options=shlex.join(options),
        run=shlex.quote(str(run_dir)),
    )


_NODE = """\
#!/bin/bash
# One node of an elastic training. YARN starts it again whenever it ends, until the service is stopped.
cd {directory} || exit 2
export PATH={bin}:$PATH
export ELASTICFLOW_TOKEN="${{ELASTICFLOW_TOKEN:-$(cat {token})}}"

trap 'kill -USR1 $node 2>/dev/null' TERM    # it leaves at the next step
elasticflow run {options} &
node=$!
while kill -0 $node 2>/dev/null; do wait $node; done
wait $node
status=$?
if [ $status -le 1 ]; then elasticflow yarn stop {run}; fi    # the training is over, or has failed
exit $status
"""


def submit(training: Training, place: Path, *, url: str, checkpoint: str) -> YarnJob:
    """Submit a training.

    Args:
        training: It.
        place: Directory of the run, on a file system that all nodes share.
        url: Of the ResourceManager.
        checkpoint: URL of the checkpoints; "" for the directory of the run.

    Raises:
        UsageError: YARN refuses it, or does not answer; or the training in that directory is under way.
    """
    before = job_in(place)
    if before is not None and status_of(before).state in _STATES:
        raise UsageError(f"service {before.name} trains there. Use another --run-dir. Received: {place}")
    job = YarnJob(url, training.name, training.max_nodes)
    otherwise = f"YARN may have accepted the service all the same: `elasticflow yarn status {place}` tells"
    with run_directory.removed_if_refused(place, otherwise=otherwise):
        run_directory.create(training.command[0], place, local=False)
        if environment.TOKEN not in os.environ or not (place / _TOKEN).exists():
            token = os.environ.get(environment.TOKEN) or secrets.token_hex(16)
            write_whole(place / _TOKEN, f"{token}\n".encode(), mode=0o600)
        script = script_of(training, place, url=url, directory=Path.cwd(), checkpoint=checkpoint)
        write_whole(place / _SCRIPT, script.encode())
        service = service_of(training, place)
        run_directory.write_json(place / _YARNFILE, service)
        run_directory.write_json(place / _RECORD, asdict(job))
        _ask(url, "POST", "", service)
    return job


def job_in(place: Path) -> YarnJob | None:
    """The service that was submitted with this directory of a run; None for a run that YARN does not know.

    Raises:
        UsageError: Its file cannot be read.
    """
    return read_record(YarnJob, place / _RECORD)


def scale(job: YarnJob, containers: int) -> None:
    """Let a service have so many containers.

    Raises:
        UsageError: YARN refuses it, or so many are not allowed.
    """
    _check_number(containers, job.max_nodes)
    body = {"name": COMPONENT, "number_of_containers": containers}
    _ask(job.url, "PUT", f"{job.name}/components/{COMPONENT}", body)


def stop(job: YarnJob) -> None:
    """End a service; its nodes are told to go.

    Raises:
        UsageError: YARN refuses it.
    """
    _ask(job.url, "PUT", job.name, {"state": "STOPPED"})


def status_of(job: YarnJob) -> Status:
    """What YARN says of a service.

    Raises:
        UsageError: YARN does not answer, or not as its specification says.
    """
    said = _ask(job.url, "GET", job.name)
    try:
        component: dict[str, Any] = next((one for one in said.get("components", []) if one["name"] == COMPONENT), {})
        hosts = [str(one.get("bare_host") or one.get("ip") or one["id"]) for one in component.get("containers", [])]
        wanted = int(component.get("number_of_containers", 0))
        return Status(str(said["state"]), wanted, hosts, str(said.get("diagnostics") or ""))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"YARN's answer is none that its REST API describes ({error!r}). Received: {said}") from None


def _check_number(containers: int, most: int) -> None:
    if not 1 <= containers <= most:
        raise UsageError(f"this service can have 1 to {most} containers. Received: {containers}")


def _ask(url: str, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Ask the ResourceManager.

    Raises:
        UsageError: It refuses, in its own words, or is not there.
        Unanswered: It does not say whether it has done that.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"the ResourceManager is at http://HOST:8088 or https://HOST:8090. Received: --url={url}")
    user = urllib.parse.urlencode({"user.name": os.environ.get("HADOOP_USER_NAME") or os.environ.get("USER") or "root"})
    request = urllib.request.Request(
        f"{url.rstrip('/')}/{_PATH}{f'/{path}' if path else ''}?{user}",
        data=None if body is None else json.dumps(body).encode(),
        method=method,
        headers={"Content-Type": "application/json", "Accept": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return _parsed(response.read())
    except urllib.error.HTTPError as error:
        said = _parsed(error.read()).get("diagnostics") or error.reason
        if error.code == HTTPStatus.UNAUTHORIZED:
            said = f"{said} (Kerberos is not supported here)"
        kind = Unanswered if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR else UsageError
        raise kind(f"YARN refuses that with status {error.code}: {said}") from None
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        kind = UsageError if isinstance(reason, (ConnectionRefusedError, socket.gaierror)) else Unanswered
        raise kind(f"no ResourceManager answers: {reason}. Received: --url={url}") from None


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content) if content.strip() else {}
    except ValueError:
        return {"diagnostics": content.decode(errors="replace").strip()[:200]}
    return found if isinstance(found, dict) else {"diagnostics": str(found)[:200]}
