"""torchrun's rendezvous "elasticflow": agents supervise their own workers, and the coordinator decides on membership.

::

    torchrun --nnodes=1:8 --rdzv-backend=elasticflow --rdzv-endpoint=HOST:PORT train.py

Each agent is told that the world is its own node and that nobody ever waits, so it never restarts healthy workers. It
restarts those that crash, as ``--max-restarts`` says: the first time at once, then after growing pauses. It restarts
none when an exception of the user's code has ended the job, and ends the job itself when its workers die at the same
step repeatedly (:mod:`ef_common.launch.restarts`). The agent that can bind the endpoint hosts the coordinator; each
other agent keeps a standby ready. The workers learn everything they need from the environment.

The endpoint may also be a registry: a URL of a shared folder, an object store or etcd, at which agents find the job
wherever it is by then (:mod:`ef_common.launch.finding`). ``--rdzv-id`` tells jobs at one URL apart.

An agent that is told to go passes that on to its workers (:mod:`ef_common.launch.departure`). When these have left, one
that hosts the leading coordinator hands over to the coordinator of another node, and ends.

Keys in ``--rdzv-conf``; others are ignored, as c10d does:

=================  ======================================  ===========================================================
token_file         none                                    File with the secret of the job. It takes precedence over
                                                           `ELASTICFLOW_TOKEN`.
tls                that of the environment                 As `ELASTICFLOW_TLS`, over which it takes precedence.
heartbeat_timeout  that of the environment                 As `ELASTICFLOW_HEARTBEAT_TIMEOUT`, over which it takes
                                                           precedence.
hang_timeout       that of the environment                 As `ELASTICFLOW_HANG_TIMEOUT`, over which it takes
                                                           precedence; 0 to 3600.
last_call_timeout  `1`; `10` in a local `elasticflow run`  Seconds that the first step waits for more nodes after the
                                                           last arrival.
on_minority        `wait`                                  `wait` or `continue`: what workers do that have lost contact
                                                           with others and cannot be sure that those have stopped.
is_host            found from the endpoint                 Whether this agent hosts the coordinator (`1` or `0`).
=================  ======================================  ===========================================================
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config, parse_rendezvous_endpoint

from ef_common.control.coordinator import Coordinator
from ef_common.control.leader_request import find_leader, inquire, report_failure
from ef_common.core.membership import Settings
from ef_common.core.view import Member
from ef_common.errors import JobFinished, StorageError, UsageError
from ef_common.launch import environment
from ef_common.launch.certificates import trust_of
from ef_common.launch.deaths import Deaths, directory_for_notes
from ef_common.launch.departure import SIGNAL, Departure
from ef_common.launch.ending import end_soon
from ef_common.launch.finding import find_job, own_host
from ef_common.launch.frozen import Watch
from ef_common.launch.notice_sources import this_agent
from ef_common.launch.registry import Registration, Registry, registry_of
from ef_common.protocol.addresses import LOOPBACK, Address, format_address, is_loopback
from ef_common.protocol.auth import Token
from ef_common.storage.claims import place_for
from ef_common.storage.failures import redact
from ef_common.tls import Tls

logger = logging.getLogger(__name__)

BACKEND = "elasticflow"
DEFAULT_PORT = 29400
LINGER_S = 30 * 24 * 3600.0
"""How long a hosting agent whose own workers have ended waits for those of other nodes if there is no coordinator to
which it could hand over: without it, no loss could be survived there. A worker that hangs is evicted, so it is no
reason to wait."""
STANDBY_LINGER_S = 1.0
"""The same time for an agent whose standby has taken over: usually all agents are about to end."""
_AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the rendezvous.

    Args:
        endpoint: Host and port of the coordinator, as all agents were told.
        token: The job token, or None.
        is_host: Whether this agent hosts the coordinator; None to find out.
        heartbeat_timeout_s: A worker that is silent for longer is evicted.
        hang_timeout_s: So is one that keeps the others waiting for longer; None to learn it, 0 for no limit.
        settings: Settings of the membership.
        tls: Whether connections are encrypted, and where the certificates are; see `certificates.trust_of`.
        registry: URL at which the agents find each other, in place of the endpoint; "" for none.
        stands_in: The coordinator was there before this agent: if nobody listens at the endpoint any more, its standby
            does, so that others find somebody there.
    """

    endpoint: Address
    token: Token | None
    is_host: bool | None
    heartbeat_timeout_s: float
    hang_timeout_s: float | None
    settings: Settings
    tls: str = ""
    stands_in: bool = False
    registry: str = ""

    @classmethod
    def parse(cls, params: RendezvousParameters) -> Options:
        """Read the options from torchrun's parameters, and the token from the environment.

        Raises:
            UsageError: An option is malformed; the message names it.
        """
        registry = registry_of(params.endpoint)
        if registry and params.get("is_host") is not None:
            raise UsageError(f"is_host is for an endpoint HOST:PORT. Received: --rdzv-endpoint={redact(registry)}")
        try:
            endpoint = (LOOPBACK, 0) if registry else parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
        except ValueError as error:
            raise UsageError(str(error)) from None
        token_file = params.get("token_file")
        variables = environment.read_environment()
        return cls(
            endpoint=endpoint,
            token=Token.from_file(token_file) if token_file else variables.token,
            is_host=_flag(params, "is_host"),
            heartbeat_timeout_s=_seconds(params, "heartbeat_timeout", default=variables.heartbeat_timeout_s, low=0.1),
            hang_timeout_s=_seconds(params, "hang_timeout", default=0.0, low=0.0)
            if params.get("hang_timeout") is not None
            else variables.hang_timeout_s,
            settings=Settings(
                min_nodes=params.min_nodes,
                max_nodes=params.max_nodes,
                last_call_s=_seconds(params, "last_call_timeout", default=1.0, low=0.0),
                on_minority=_choice(params, "on_minority", ("wait", "continue")),
            ),
            tls=str(params.get("tls", variables.tls)),
            stands_in=bool(_flag(params, "stands_in")),
            registry=registry,
        )


def options_of_a_local_job(conf: str, *, min_nodes: int, max_nodes: int, last_call_s: float) -> Options:
    """Options of the coordinator of a job on this machine.

    Args:
        conf: torchrun's ``--rdzv-conf``.
        min_nodes: Nodes, without which the job waits.
        max_nodes: Nodes, of which it has no more.
        last_call_s: Default of ``last_call_timeout``.

    Raises:
        UsageError: An option is malformed; the message names it.
    """
    try:
        config = _parse_rendezvous_config(conf)
    except ValueError as error:
        raise UsageError(f"{error} Received: --rdzv-conf={conf}") from None
    config.setdefault("last_call_timeout", f"{last_call_s}")
    return Options.parse(RendezvousParameters(BACKEND, f"{LOOPBACK}:0", "local", min_nodes, max_nodes, None, **config))


def _seconds(params: RendezvousParameters, key: str, *, default: float, low: float) -> float:
    text = params.get(key, default)
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = -1.0
    if not low <= value <= 3600:
        raise UsageError(f"{key} in --rdzv-conf must be {low:g} to 3600 seconds. Received: {key}={text}")
    return value


def _flag(params: RendezvousParameters, key: str) -> bool | None:
    try:
        return params.get_as_bool(key)
    except ValueError:
        raise UsageError(f"{key} in --rdzv-conf must be 0 or 1. Received: {key}={params.get(key)}") from None


def _choice(params: RendezvousParameters, key: str, choices: tuple[str, ...]) -> str:
    """The chosen one of these values; the first by default."""
    value = str(params.get(key, choices[0]))
    if value not in choices:
        raise UsageError(f"{key} in --rdzv-conf must be one of {', '.join(choices)}. Received: {key}={value}")
    return value


class ElasticFlowRendezvous(RendezvousHandler):
    """An agent's part: it may host the coordinator, and keeps torchrun out of membership.

    Args:
        options: Options of the rendezvous.
        run_id: torchrun's id of the job.
        local_addr: torchrun's ``--local-addr``: address at which others reach this node.
    """

    def __init__(self, options: Options, *, run_id: str, local_addr: str | None = None) -> None:
        self._options = options
        self._set_trust(options.token)
        self._run_id = run_id
        self._local_addr = local_addr
        self._coordinator: Coordinator | None = None
        self._closed = False
        self._coordinator_at: Address = options.endpoint
        self._is_standby = False
        self._grace_s = environment.DEFAULT_GRACE_S
        self._deaths: Deaths | None = None
        self._watch: Watch | None = None
        self._departure = Departure()
        self._registration: Registration | None = None
        self._node = f"{socket.gethostname()[:80]}-{secrets.token_hex(3)}"
        self._has_begun = False
        self._given_token: str | None = None

    def _set_trust(self, token: Token | None) -> None:
        self._trust = trust_of(token, self._options.tls)
        self._tls = None if self._trust.coordinator is None else Tls(self._trust.coordinator)

    def start(self) -> None:
        """Host the coordinator if this agent must, and prepare the environment that workers inherit.

        Raises:
            CoordinatorLost: The registry does not answer, or the job cannot be reached from here.
            JobFinished: The registry says that the training is over.
            UsageError: This agent must host (`is_host`), but cannot bind the endpoint; or the registry is of no use.
        """
        host, _ = self._options.endpoint
        is_here = False
        if self._options.registry:
            self._find_job(Registry(place_for(self._options.registry), self._run_id, self._node))
        else:
            is_here = _is_this_machine(host) if self._options.is_host is None else self._options.is_host
            if is_here:
                self._host()
            self._coordinator_at = self._coordinator_address(is_here)
            if self._coordinator is None:
                self._stand_by()
        self._deaths = Deaths(directory_for_notes(), node=self._node, report=self._report)
        self._watch = Watch(self._deaths.directory, self._ask_about)
        self._watch.start()
        self._departure.listen()
        self._given_token = os.environ.get(environment.TOKEN)
        os.environ.update(self._variables(self._coordinator_at, is_here=is_here))

    def _find_job(self, registry: Registry) -> None:
        """Lead the job, or follow the one that leads it and keep a standby; others find it through either."""
        reached_at = LOOPBACK if self._trust.token is None else self._local_addr or own_host()

        def trust_start(nonce: str) -> None:
            """Addresses on record may be another job's by now, which may have the same token."""
            token = self._options.token
            self._set_trust(None if token is None else token.for_start(nonce))

        def lead() -> Address:
            trust_start(registry.own_nonce)
            self._host()
            return (reached_at, self._own_port)

        def resign() -> None:
            if self._coordinator is not None:
                self._coordinator.stop()
                self._coordinator = None

        def ask(nonce: str, addresses: list[Address]) -> Address | None:
            trust_start(nonce)
            return find_leader(addresses, self._agent(), self._trust.token, tls=self._tls)

        job = find_job(registry, find_leader=ask, lead=lead, resign=resign)
        self._coordinator_at = job.leader or (reached_at, self._own_port)
        if job.leader is not None:
            self._stand_by()
            try:
                registry.add(job.number, (reached_at, self._own_port))
            except StorageError as error:
                logger.warning("newcomers cannot find the job through this agent: %s", error)

        def fail(number: int) -> bool:
            why = f"the job was started anew (start {number}), as this one had left no sign of life"
            return bool(self._report(why, True))

        self._registration = Registration(
            registry, job.number, address=(reached_at, self._own_port), leads=self._leads, on_newer=fail
        )
        self._registration.start()

    def _leads(self) -> bool:
        return self._coordinator is not None and self._coordinator.leads

    @property
    def _own_port(self) -> int:
        return 0 if self._coordinator is None else self._coordinator.address[1]

    def _coordinator_address(self, is_here: bool) -> Address:
        """Where the workers of this agent find the coordinator."""
        host, port = self._options.endpoint
        if self._coordinator is not None:
            bound, port = self._coordinator.address
            return (bound if is_loopback(bound) else host, port)
        if is_here and self._options.token is None and not is_loopback(host):
            return (LOOPBACK, port)  # another agent of this machine hosts it, on its loopback interface
        return (host, port)

    def _host(self) -> None:
        host, port = self._options.endpoint
        coordinator = Coordinator(
            # A name of this machine may resolve to something that others don't reach: listen everywhere.
            (host if is_loopback(host) and not self._options.registry else "", port),
            token=self._trust.token,
            credentials=self._trust.coordinator,
            settings=self._options.settings,
            heartbeat_timeout_s=self._options.heartbeat_timeout_s,
            hang_timeout_s=self._options.hang_timeout_s,
        )
        try:
            coordinator.start()
        except OSError as error:
            if self._options.is_host or error.errno != errno.EADDRINUSE:
                raise UsageError(
                    f"cannot host the coordinator: {error.strerror}. "
                    f"Received: endpoint={format_address(self._options.endpoint)}"
                ) from error
            logger.info("another process of this machine has port %d: it hosts the coordinator", port)
            return
        self._keep(coordinator)

    def _stand_by(self) -> None:
        """Keep a coordinator ready in case the leading one is lost."""
        host = LOOPBACK if is_loopback(self._coordinator_at[0]) else ""
        if self._options.stands_in:
            with contextlib.suppress(OSError):  # it lives
                self._keep(self._start_standby((host, self._coordinator_at[1])))
                return
        self._keep(self._start_standby((host, 0)))

    def _start_standby(self, address: Address) -> Coordinator:
        standby = Coordinator(
            address,
            token=self._trust.token,
            credentials=self._trust.coordinator,
            settings=self._options.settings,
            heartbeat_timeout_s=self._options.heartbeat_timeout_s,
            hang_timeout_s=self._options.hang_timeout_s,
            standby=True,
            endpoint=self._coordinator_at,
        )
        standby.start()
        self._is_standby = True
        return standby

    def _keep(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._grace_s = environment.read_environment().grace_s
        atexit.register(self._serve_leavers)

    def _serve_leavers(self) -> None:
        """After a signal, which prevents `shutdown`: hand over, or serve on, as others may be leaving, too."""
        if self._coordinator is not None:
            self._release(self._coordinator, self._grace_s)
            self._record_end(self._coordinator)
            self._coordinator.stop()

    def _release(self, coordinator: Coordinator, timeout_s: float) -> None:
        """Hand over as soon as another node has a coordinator; without one serve until all have gone, or so long."""
        deadline = time.monotonic() + timeout_s
        while not (coordinator.wait_until_idle(0) or coordinator.hand_over(self._node)):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            coordinator.wait_until_idle(min(left_s, _AGAIN_S))

    def _record_end(self, coordinator: Coordinator) -> None:
        """Tell those who come to the registry how the job has ended, if it has."""
        if self._registration is not None:
            self._registration.end(coordinator.outcome)

    def _variables(self, coordinator: Address, *, is_here: bool) -> dict[str, str]:
        host, _ = self._options.endpoint
        # The name of the host that hosts is by definition one under which all others reach it.
        reachable_as = self._local_addr or (host if is_here and not is_loopback(host) else "")
        variables = {
            environment.COORDINATOR: format_address(coordinator),
            environment.NODE: self._node,
            environment.ADDRESS: reachable_as,
            environment.AGENT: this_agent(),
        }
        if self._coordinator is not None:
            variables[environment.STANDBY] = str(self._coordinator.address[1])
        if self._trust.token is not None:
            variables[environment.TOKEN] = self._trust.token.secret
        if self._trust.worker is not None:
            variables[environment.CREDENTIALS] = self._trust.worker.dump()
        if self._deaths is not None:
            variables[environment.NOTES] = str(self._deaths.directory)
        return variables

    def _report(self, why: str, fatal: bool) -> str:
        return report_failure(self._coordinators, self._agent(), self._trust.token, why, fatal=fatal, tls=self._tls)

    def _ask_about(self, worker: str) -> str | None:
        return inquire(self._coordinators, self._agent(), self._trust.token, worker, tls=self._tls)

    @property
    def _coordinators(self) -> list[Address]:
        own = [] if self._coordinator is None else [(LOOPBACK, self._coordinator.address[1])]
        return [*own, self._coordinator_at]

    def _agent(self) -> Member:
        return Member(f"{self._node}-agent-{secrets.token_hex(2)}", self._node, "")

    # ------------------------------------------------------------ torchrun's interface

    def get_backend(self) -> str:
        """Name of the backend."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """False, because workers do not need the agent's store."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a world of this node alone, at once or, after repeated deaths of workers, after a pause.

        Raises:
            ChildFailedError, JobFailed: The job has failed, so they are not started again.
            SignalException: This agent was told to go.
        """
        if self._departure.told:
            raise SignalException("this agent was told to go, and starts no workers", sigval=SIGNAL)
        if self._has_begun and self._deaths is not None:
            self._deaths.before_restart()
        self._has_begun = True
        store = HashStore()
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo.build(0, store, LOOPBACK))

    def is_closed(self) -> bool:
        """Whether `set_closed` was called."""
        return self._closed

    def set_closed(self) -> None:
        """Note that torchrun closes the rendezvous; the workers close the job itself."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0, because the coordinator handles newcomers."""
        return 0

    def get_run_id(self) -> str:
        """Id of the job, as torchrun was told."""
        return self._run_id

    def shutdown(self) -> bool:
        """End; an agent with the leading coordinator first hands over, or waits for the workers of other nodes."""
        if self._given_token is not None:  # the next job of this process is not to take that of the workers for it
            os.environ[environment.TOKEN] = self._given_token
        if self._watch is not None:
            self._watch.stop()
        if self._deaths is not None:
            self._deaths.at_the_end()
        self._end_coordinator()
        self._departure.stop()
        atexit.register(end_soon)
        return True

    def _end_coordinator(self) -> None:
        coordinator = self._coordinator
        if coordinator is None:
            return
        if not self._is_standby and not (coordinator.wait_until_idle(0) or coordinator.hand_over(self._node)):
            logger.warning("this agent hosts the coordinator: waiting for the workers of other nodes to end")
        # A standby has taken over; so another one can, and our launcher may wait for our end.
        self._release(coordinator, STANDBY_LINGER_S if self._is_standby else LINGER_S)
        self._coordinator = None  # until here, a signal has it released at the exit
        self._record_end(coordinator)
        coordinator.stop()
        atexit.unregister(self._serve_leavers)


def _is_this_machine(host: str) -> bool:
    """Whether a name or address is one of this machine: only then can a socket be bound to it."""
    try:
        candidates = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, _, _, address in candidates:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create the handler of one agent, and start it.

    Raises:
        UsageError: An option is malformed, or this agent must host and cannot.
        SystemExit: The training is over.
    """
    handler = ElasticFlowRendezvous(Options.parse(params), run_id=params.run_id, local_addr=params.local_addr)
    try:
        handler.start()
    except JobFinished as finished:
        logger.warning("%s", finished)
        raise SystemExit(0) from None
    return handler


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Entry point of the group ``torchrun.handlers``."""
    return create_handler
