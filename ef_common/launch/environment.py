"""The environment of a worker or an agent, read in one place.

=============================  ==================================  ===================================================
ELASTICFLOW_TOKEN              none: loopback only                 The secret of the job, the same on all nodes.
ELASTICFLOW_TLS                `0`                                 `1`: our connections are encrypted, with certificates
                                                                   that follow from the token; or the directory of the
                                                                   certificates.
ELASTICFLOW_RUN_DIR            none: no log                        Directory of the run: the event log goes there.
ELASTICFLOW_CHECKPOINT         none                                URL for checkpoints, if the script names none.
ELASTICFLOW_CLAIMS             where the checkpoints are           URL for claims, if the script names none.
ELASTICFLOW_AUTOSCALE          `off`                               How the job chooses its size, if the script does not
                                                                   say it: `min=1,max=8,policy=throughput`.
ELASTICFLOW_SCALE_COMMAND      none                                Command that the job runs when it wants more or
                                                                   fewer nodes.
ELASTICFLOW_SCALE_TIMEOUT      `60`                                Seconds after which that command is killed.
ELASTICFLOW_AUDIT              `0`                                 `1`: log a hash of the weights after each step.
ELASTICFLOW_NOTICE             none                                `file:///PATH` or `http(s)://…`, polled every second:
                                                                   whether this machine is about to be taken away.
ELASTICFLOW_GRACE              `30`                                Seconds after a notice or a signal after which a
                                                                   worker that has reached no step boundary ends itself.
ELASTICFLOW_HEARTBEAT_TIMEOUT  `5`                                 A worker that is silent for longer is evicted (0.1 to
                                                                   3600 seconds). Read where the coordinator runs.
ELASTICFLOW_HANG_TIMEOUT       learned from the run                A worker that keeps the others waiting in a training
                                                                   step for so many seconds is replaced; `0`: never.
                                                                   Read where the coordinator runs.
ELASTICFLOW_COORDINATOR        set by the launcher                 `HOST:PORT` of the coordinator. Without it, the
                                                                   worker trains alone.
ELASTICFLOW_LOG_FORMAT         `text`                              `json`: ElasticFlow's lines on the terminal are JSON
                                                                   objects.
ELASTICFLOW_CREDENTIALS        set by the launcher                 With TLS: the worker's certificate and its key.
ELASTICFLOW_CRASH_RECORDS      set by the launcher                 Directory in which a worker records what it works on,
                                                                   for its launcher to read.
ELASTICFLOW_STANDBY            set by the launcher                 Port on this node of the standby coordinator that its
                                                                   agent runs.
ELASTICFLOW_NODE               set by the launcher, else the       Name of the node. The workers of a node are admitted
                               host name                           together.
ELASTICFLOW_HOST               set by `run --hosts`                The host, as the list has it.
ELASTICFLOW_METRICS_PORT       none                                Port at which the first worker of a node answers with
                                                                   metrics for Prometheus.
ELASTICFLOW_CONTROLLER         set in a pod of an ElasticJob       `1`: the controller of the cluster starts and ends
                                                                   pods, as many as the job wants.
ELASTICFLOW_RANK_STATUS        set by `elasticflow mpi`            `1`: a rank of MPI says with which status it ends.
ELASTICFLOW_AGENT              set by the launcher                 Process of the agent. Workers leave when it ends.
ELASTICFLOW_ADDRESS            set by the launcher, else as the    Address at which the other workers reach this one.
                               coordinator sees it
LOCAL_RANK                     set by torchrun, else `0`           Index of the worker on its node, from 0.
LOCAL_WORLD_SIZE               set by torchrun, else `1`           Number of workers that the node starts.
=============================  ==================================  ===================================================
"""

from __future__ import annotations

import math
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ef_common.core.autoscale import Autoscale, autoscale_of
from ef_common.core.progress import DEFAULT_HEARTBEAT_TIMEOUT_S
from ef_common.core.view import Member
from ef_common.errors import UsageError
from ef_common.launch.notice_sources import AgentEnd, NoticeSource, source_for
from ef_common.protocol.addresses import Address, parse_address
from ef_common.protocol.auth import Token
from ef_common.terminal import FORMATS, LOG_FORMAT
from ef_common.tls import Credentials

COORDINATOR = "ELASTICFLOW_COORDINATOR"
TOKEN = "ELASTICFLOW_TOKEN"
TLS = "ELASTICFLOW_TLS"
CREDENTIALS = "ELASTICFLOW_CREDENTIALS"
NODE = "ELASTICFLOW_NODE"
HOST = "ELASTICFLOW_HOST"
METRICS_PORT = "ELASTICFLOW_METRICS_PORT"
CONTROLLER = "ELASTICFLOW_CONTROLLER"
RANK_STATUS = "ELASTICFLOW_RANK_STATUS"
ADDRESS = "ELASTICFLOW_ADDRESS"
STANDBY = "ELASTICFLOW_STANDBY"
RUN_DIR = "ELASTICFLOW_RUN_DIR"
CHECKPOINT = "ELASTICFLOW_CHECKPOINT"
CLAIMS = "ELASTICFLOW_CLAIMS"
AUTOSCALE = "ELASTICFLOW_AUTOSCALE"
SCALE_COMMAND = "ELASTICFLOW_SCALE_COMMAND"
SCALE_TIMEOUT = "ELASTICFLOW_SCALE_TIMEOUT"
AUDIT = "ELASTICFLOW_AUDIT"
NOTICE = "ELASTICFLOW_NOTICE"
CRASH_RECORDS = "ELASTICFLOW_CRASH_RECORDS"
AGENT = "ELASTICFLOW_AGENT"
GRACE = "ELASTICFLOW_GRACE"
HEARTBEAT_TIMEOUT = "ELASTICFLOW_HEARTBEAT_TIMEOUT"
HANG_TIMEOUT = "ELASTICFLOW_HANG_TIMEOUT"
DEFAULT_GRACE_S = 30.0
DEFAULT_SCALE_TIMEOUT_S = 60.0
_MAX_NODE_CHARS = 100
_FLAGS = {"": False, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """What a worker's environment says.

    Args:
        coordinator: Address of the coordinator, or None for a world of one.
        token: The job token, or None.
        node: Name of the node.
        address: Address at which the others reach this worker; empty if the coordinator shall find out.
        local_rank: Index on the node.
        local_world_size: Number of workers of the node.
        run_dir: Directory of the run, or None.
        checkpoint: URL for checkpoints, or None.
        claims: URL for claims, or None.
        audit: Whether to log a hash of the weights after each step.
        standby: Port of the coordinator that this node keeps ready; 0 for none.
        notice: Where to ask whether this machine is to go, or None.
        crash_records: Directory of the launcher's for the worker's crash record, or None.
        agent: The end of what has started the worker, as a notice: its agent or horovodrun. None if it is not known.
        autoscale: How the job chooses its size, or None.
        scale_command: Command that gives it nodes, or None.
        scale_timeout_s: The command is killed after this time.
        grace_s: How long the worker may take to leave.
        heartbeat_timeout_s: A worker that is silent for longer is evicted.
        hang_timeout_s: How long a worker may keep the others waiting in a step; None to learn it, 0 for no limit.
        metrics_port: Port at which this worker answers with metrics; 0 for none.
        tls: Whether connections are encrypted, and where the certificates are; see `certificates.trust_of`.
        credentials: The identity of this worker, or None.
    """

    coordinator: Address | None
    token: Token | None
    node: str
    address: str = ""
    local_rank: int = 0
    local_world_size: int = 1
    run_dir: Path | None = None
    checkpoint: str | None = None
    audit: bool = False
    standby: int = 0
    notice: NoticeSource | None = None
    crash_records: Path | None = None
    grace_s: float = DEFAULT_GRACE_S
    heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S
    hang_timeout_s: float | None = None
    claims: str | None = field(default=None, repr=False)
    tls: str = ""
    credentials: Credentials | None = None
    agent: NoticeSource | None = None
    autoscale: Autoscale | None = None
    scale_command: str | None = None
    scale_timeout_s: float = DEFAULT_SCALE_TIMEOUT_S
    metrics_port: int = 0

    def member(self) -> Member:
        """Make this process a member, with an id that no other process has."""
        worker = f"{self.node}-{os.getpid()}-{secrets.token_hex(2)}"
        numbers = (self.local_rank, self.local_world_size, self.standby)
        return Member(worker, self.node, self.address, *numbers)


def read_environment(environ: Mapping[str, str] | None = None) -> WorkerEnvironment:
    """Read the environment (by default the process's own).

    Raises:
        UsageError: A variable is malformed.
    """
    env = os.environ if environ is None else environ
    check_log_format(env)
    coordinator = env.get(COORDINATOR)
    local_world_size = _integer(env, "LOCAL_WORLD_SIZE", default=1, low=1)
    # Launchers that know nothing of the number of workers of a node may set a local rank, too, or -1.
    is_told = "LOCAL_WORLD_SIZE" in env or coordinator is not None
    return WorkerEnvironment(
        coordinator=None if coordinator is None else parse_address(coordinator, what=COORDINATOR),
        token=Token(env[TOKEN], source=TOKEN) if TOKEN in env else None,
        node=_node(env),
        address=env.get(ADDRESS, "").strip(),
        local_rank=_integer(env, "LOCAL_RANK", default=0, low=0, high=local_world_size - 1) if is_told else 0,
        local_world_size=local_world_size,
        run_dir=Path(env[RUN_DIR]) if env.get(RUN_DIR) else None,
        checkpoint=env.get(CHECKPOINT, "").strip() or None,
        claims=env.get(CLAIMS, "").strip() or None,
        audit=_flag(env, AUDIT),
        tls=env.get(TLS, "").strip(),
        credentials=Credentials.load(env[CREDENTIALS], source=CREDENTIALS) if env.get(CREDENTIALS) else None,
        standby=_integer(env, STANDBY, default=0, low=0, high=65535),
        notice=source_for(env[NOTICE], what=NOTICE) if env.get(NOTICE) else None,
        crash_records=Path(env[CRASH_RECORDS]) if env.get(CRASH_RECORDS) else None,
        agent=_agent(env),
        autoscale=check_autoscale(env),
        scale_command=env.get(SCALE_COMMAND, "").strip() or None,
        scale_timeout_s=_seconds(env, SCALE_TIMEOUT, default=DEFAULT_SCALE_TIMEOUT_S, low=0.1),
        metrics_port=_integer(env, METRICS_PORT, default=0, low=0, high=65535),
        grace_s=grace_s_in(env),
        heartbeat_timeout_s=_seconds(env, HEARTBEAT_TIMEOUT, default=DEFAULT_HEARTBEAT_TIMEOUT_S, low=0.1, high=3600.0),
        hang_timeout_s=_seconds(env, HANG_TIMEOUT, default=0.0) if env.get(HANG_TIMEOUT, "").strip() else None,
    )


def grace_s_in(env: Mapping[str, str]) -> float:
    """How many seconds a worker may take to leave.

    Raises:
        UsageError: That is no number of seconds.
    """
    return _seconds(env, GRACE, default=DEFAULT_GRACE_S)


def check_log_format(env: Mapping[str, str]) -> None:
    """Refuse an unknown log format.

    Raises:
        UsageError: The log format is unknown.
    """
    if env.get(LOG_FORMAT, "").strip() not in ("", *FORMATS):
        raise UsageError(f"{LOG_FORMAT} must be one of {', '.join(FORMATS)}. Received: {env[LOG_FORMAT]!r}")


def check_autoscale(env: Mapping[str, str]) -> Autoscale | None:
    """How the job chooses its size, as the environment says it; None if it does not.

    Raises:
        UsageError: A setting is unknown or wrong.
    """
    text = env.get(AUTOSCALE, "").strip()
    try:
        return autoscale_of(text or None) or None
    except UsageError as error:
        raise UsageError(f"{error} (in --autoscale or {AUTOSCALE})") from None


def _integer(env: Mapping[str, str], name: str, *, default: int, low: int, high: int = 2**31) -> int:
    text = env.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise UsageError(f"{name} must be an integer from {low} to {high}. Received: {text!r}")
    return value


def _seconds(env: Mapping[str, str], name: str, *, default: float, low: float = 0.0, high: float = math.inf) -> float:
    text = env.get(name, "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not low <= value <= high or value == math.inf:
        limits = f"{low:g} or more" if high == math.inf else f"{low:g} to {high:g}"
        raise UsageError(f"{name} must be a number of seconds, {limits}. Received: {text!r}")
    return value


def _flag(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "").strip().lower()
    if text not in _FLAGS:
        raise UsageError(f"{name} must be 0 or 1. Received: {env[name]!r}")
    return _FLAGS[text]


def _agent(env: Mapping[str, str]) -> NoticeSource | None:
    try:
        return AgentEnd(env[AGENT]) if env.get(AGENT) else None
    except ValueError:
        raise UsageError(f"{AGENT} is set by the launcher only. Received: {env[AGENT]!r}") from None


def _node(env: Mapping[str, str]) -> str:
    node = env.get(NODE, "").strip() or socket.gethostname()
    if len(node) > _MAX_NODE_CHARS or not node.isprintable():
        raise UsageError(f"{NODE} must be a printable name of at most {_MAX_NODE_CHARS} characters. Received: {node!r}")
    return node
