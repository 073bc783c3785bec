"""What an agent has to do with coordinators: it finds its job, and hosts the leading coordinator or a standby."""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import secrets
import socket
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path

from ef_common.control.coordinator import Coordinator
from ef_common.control.leader_request import LeaderRequests
from ef_common.core.doors import LOOK, DoorAnswer
from ef_common.core.view import Member
from ef_common.errors import CoordinatorLost, JobFinished, ProtocolError, StorageError, UsageError
from ef_common.launch import environment
from ef_common.launch.certificates import trust_of
from ef_common.launch.door_search import (
    Doors,
    Listed,
    Resolved,
    find_at_doors,
    names_a_group,
    wait_for_name,
)
from ef_common.launch.finding import JOIN_S, NOTHING_TO_JOIN, QUIET_S, Patience, find_job, host_facing, own_host
from ef_common.launch.registry import Registration, Registry
from ef_common.launch.rendezvous_options import RendezvousOptions
from ef_common.launch.told_doors import ToldDoors
from ef_common.machine import is_this_machine
from ef_common.protocol.addresses import LOOPBACK, Address, format_address, is_loopback
from ef_common.protocol.auth import Token
from ef_common.protocol.fields import MAX_NAME_CHARS
from ef_common.storage.claims import place_for
from ef_common.tls import Tls

logger = logging.getLogger(__name__)

_UNNAMED = "none"
"""torchrun's id of a job that the user has not named."""
LINGER_S = 30 * 24 * 3600.0
"""How long a hosting agent whose own workers have ended waits for those of other nodes if there is no coordinator to
which it could hand over: without it, no loss could be survived there. A worker that hangs is evicted, so it is no
reason to wait."""
STANDBY_LINGER_S = 1.0
"""The same time for an agent whose standby has taken over: usually all agents are about to end."""
_AGAIN_S = 0.5
_TELL_S = 2.0
_LOOK_S = 0.2


class Hosting:
    """The coordinator of an agent, which leads or stands by.

    Args:
        options: Options of the rendezvous.
        run_id: torchrun's id of the job.
        node: Name of this node, which no other agent has.
        local_addr: torchrun's ``--local-addr``: address at which others reach this node.
        founds: It may found the job; else it waits until somebody else leads, and stands by.
        is_alone: There is no agent. It hosts at an endpoint that names one machine, whichever that is.

    Attributes:
        coordinator: It; None if another process of this machine hosts, or it has ended.
    """

    def __init__(
        self,
        options: RendezvousOptions,
        *,
        run_id: str,
        node: str,
        local_addr: str | None = None,
        founds: bool = True,
        is_alone: bool = False,
    ) -> None:
        self.coordinator: Coordinator | None = None
        self._options = options
        self._set_trust(options.token)
        self._run_id = run_id
        self._job = run_id if run_id != _UNNAMED and len(run_id) <= MAX_NAME_CHARS and run_id.isprintable() else ""
        self._node = node
        self._local_addr = local_addr
        self._founds = founds and not options.joins
        self._is_alone = is_alone
        self._endpoint = options.endpoint  # the one of several that is this agent's own
        self._coordinator_at: Address = options.endpoint
        self._endpoints: tuple[Address, ...] = options.doors
        self._is_here = False
        self._inside = ""  # the address of its door, if that is on the loopback interface
        self._is_standby = False
        self._grace_s = environment.DEFAULT_GRACE_S
        self._registration: Registration | None = None

    def _set_trust(self, token: Token | None) -> None:
        self._trust = trust_of(token, self._options.tls)
        self._tls = None if self._trust.coordinator is None else Tls(self._trust.coordinator)

    # ------------------------------------------------------------ the beginning

    def find(self) -> None:
        """Find the job, and host its coordinator or a standby.

        Raises:
            AuthenticationError: The job has another token, or none.
            CoordinatorLost: The registry does not answer, or the job cannot be reached from here.
            JobFinished: The training is over, as the registry or another agent says.
            ProtocolError: At the endpoint is no coordinator, or one of another version.
            UsageError: This agent must host (`is_host`), but cannot bind the endpoint; or the registry is of no use.
        """
        host, port = self._options.endpoint
        if self._options.registry:
            self._find_job(Registry(place_for(self._options.registry), self._run_id, self._node))
            return
        if self._options.doors:
            self._ask_around(Listed(self._options.doors))
            return
        if self._options.is_host is None:
            if not self._options.is_group:
                wait_for_name(host, self._patience())
            if self._options.doors_file and self._local_addr:
                self._ask_around_as_told(Resolved(host, port), self._local_addr)
                return
            if self._options.is_group or names_a_group(host):
                self._ask_around(Resolved(host, port))
                return
            self._is_here = self._is_alone or is_this_machine(host)
        else:
            self._is_here = self._options.is_host
        if self._is_here and not self._options.joins:
            self._host()
        self._coordinator_at = self._coordinator_address(self._options.endpoint)
        self._endpoints = (self._coordinator_at,)
        if self.coordinator is None:
            if not self._options.stands_in:
                self._wait_for_coordinator()
            self._stand_by()

    def _patience(self) -> Patience:
        if self._options.joins:
            return Patience(JOIN_S, quiet_s=QUIET_S)
        return Patience(self._options.join_timeout_s, setting="join_timeout in --rdzv-conf", quiet_s=QUIET_S)

    def _wait_for_coordinator(self) -> None:
        """What is wrong at the endpoint is told here in one line, before a worker starts."""
        at = self._coordinator_at
        patience = self._patience()
        while True:
            try:
                answer = self._requests().seek(at, door="", wish=LOOK, job=self._job)
            except ProtocolError as error:
                raise ProtocolError(f"no coordinator of this version is at {format_address(at)}: {error}") from error
            if answer is None:
                where = f"no coordinator answers at {format_address(at)}, which --rdzv-endpoint names"
                patience.wait(where, pause_s=_LOOK_S)
            elif answer.over:
                raise JobFinished(NOTHING_TO_JOIN)
            else:
                return

    def _ask_around_as_told(self, name: Resolved, own: str) -> None:
        """The same as with the name alone, with what the controller tells beside it."""
        file, port = Path(self._options.doors_file), environment.read_environment().metrics_port
        doors = ToldDoors(name, file=file, own=(own, self._options.endpoint[1]), port=port)
        try:
            self._ask_around(doors)
        finally:
            doors.close()

    def _ask_around(self, doors: Doors) -> None:
        """Lead the job, or follow the one that leads it and keep a standby; this agent is another one's door, too."""
        own: list[Address] = []

        def open_door(known: Sequence[Address]) -> Address | None:
            for host, port in known:
                if is_this_machine(host):
                    with contextlib.suppress(OSError):  # another agent of this machine is there
                        self._start_standby((host if is_loopback(host) else "", port))
                        own.append((host, port))
                        return own[0]
            return None

        def ask(address: Address, door: str, wish: str) -> DoorAnswer | None:
            at = self._reach(address)
            if self.coordinator is not None and address in own:
                bound, port = self.coordinator.address
                at = (bound if is_loopback(bound) else LOOPBACK, port)
            return self._requests().seek(at, door=door, wish=wish, job=self._job)

        def lead() -> None:
            if self.coordinator is None or not self.coordinator.lead():
                raise CoordinatorLost("the coordinator of this agent has ended")
            self._is_standby = False

        opens = open_door if self._founds else lambda known: None  # whoever has a door may be the one to found
        leader = find_at_doors(doors, open_door=opens, ask=ask, lead=lead, joins=self._options.joins)
        if not self._founds:
            open_door(doors.known())
        self._is_here = bool(own)
        if own and self.coordinator is not None and is_loopback(self.coordinator.address[0]):
            self._inside = self.coordinator.address[0]
        self._endpoint = own[0] if own else self._endpoint
        self._coordinator_at = self._coordinator_address(self._endpoint) if leader is None else self._reach(leader)
        if leader is not None and self.coordinator is None:
            self._stand_by()
        if leader is not None and self.coordinator is not None:
            self.coordinator.follow(leader)

    def _reach(self, address: Address) -> Address:
        """Where this agent reaches another one; without a token, those of its machine are on its loopback interface."""
        host, port = address
        is_inside = self._options.token is None and not is_loopback(host) and is_this_machine(host)
        return (LOOPBACK, port) if is_inside else address

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
            if self.coordinator is not None:
                self.coordinator.stop()
                self.coordinator = None

        def ask(nonce: str, addresses: list[Address]) -> Address | None:
            trust_start(nonce)
            leader = self._requests().find_leader(addresses)
            if leader is not None:
                answer = self._requests().seek(leader, door="", wish=LOOK, job=self._job)
                if answer is not None and answer.over:  # it waits for others to end before it records that
                    raise JobFinished(NOTHING_TO_JOIN)
            return leader

        wait_s = JOIN_S if self._options.joins else inf
        job = find_job(registry, find_leader=ask, lead=lead, resign=resign, founds=self._founds, wait_s=wait_s)
        self._coordinator_at = job.leader or (reached_at, self._own_port)
        self._endpoints = (self._coordinator_at,)
        if job.leader is not None:
            self._stand_by()
            try:
                registry.add(job.number, (reached_at, self._own_port))
            except StorageError as error:
                logger.warning("newcomers cannot find the job through this agent: %s", error)

        def fail(number: int) -> bool:
            why = f"the job was started anew (start {number}), as this one had left no sign of life"
            return bool(self.report(why, True))

        self._registration = Registration(
            registry, job.number, address=(reached_at, self._own_port), leads=self._leads, on_newer=fail
        )
        self._registration.start()

    def _leads(self) -> bool:
        return self.coordinator is not None and self.coordinator.leads

    @property
    def _own_port(self) -> int:
        return 0 if self.coordinator is None else self.coordinator.address[1]

    def _coordinator_address(self, endpoint: Address) -> Address:
        """Where the workers of this agent find the coordinator that an endpoint names."""
        host, port = endpoint
        if self.coordinator is not None:
            bound, port = self.coordinator.address
            return (bound if is_loopback(bound) else host, port)
        return self._reach(endpoint) if self._is_here else endpoint

    def _host(self) -> None:
        host, port = self._options.endpoint
        # A name of this machine may resolve to something that others don't reach: listen everywhere.
        address = (host if is_loopback(host) and not self._options.registry else "", port)
        coordinator = self._make(address, standby=not self._founds)
        try:
            coordinator.start()
        except OSError as error:
            if self._options.is_host or self._is_alone or error.errno != errno.EADDRINUSE:
                raise UsageError(
                    f"cannot host the coordinator: {error.strerror}. "
                    f"Received: endpoint={format_address(self._options.endpoint)}"
                ) from error
            logger.info("another process of this machine has port %d: it hosts the coordinator", port)
            return
        self._is_standby = not self._founds
        self._keep(coordinator)

    def _stand_by(self) -> None:
        """Keep a coordinator ready in case the leading one is lost."""
        host = LOOPBACK if is_loopback(self._coordinator_at[0]) else ""
        if self._options.stands_in:
            with contextlib.suppress(OSError):  # it lives
                self._start_standby((host, self._coordinator_at[1]))
                return
        self._start_standby((host, 0))

    def _start_standby(self, address: Address) -> None:
        standby = self._make(address, standby=True)
        standby.start()
        self._is_standby = True
        self._keep(standby)

    def _make(self, address: Address, *, standby: bool = False) -> Coordinator:
        return Coordinator(
            address,
            token=self._trust.token,
            credentials=self._trust.coordinator,
            settings=self._options.settings,
            heartbeat_timeout_s=self._options.heartbeat_timeout_s,
            hang_timeout_s=self._options.hang_timeout_s,
            standby=standby,
            endpoints=self._endpoints if standby else (),
            job=self._job,
        )

    def _keep(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self._grace_s = environment.read_environment().grace_s
        atexit.register(self.leave)

    # ------------------------------------------------------------ meanwhile

    def variables(self) -> dict[str, str]:
        """What the workers of this agent must know of the coordinator, as variables of their environment."""
        variables = {
            environment.COORDINATOR: format_address(self._coordinator_at),
            environment.NODE: self._node,
            environment.ADDRESS: self._reachable_as(),
        }
        if self.coordinator is not None:
            variables[environment.STANDBY] = str(self.coordinator.address[1])
        if self._trust.token is not None:
            variables[environment.TOKEN] = self._trust.token.secret
        if self._trust.worker is not None:
            variables[environment.CREDENTIALS] = self._trust.worker.dump()
        return variables

    def _reachable_as(self) -> str:
        """Where the workers of other nodes reach those of this one; "" if all are on the loopback interface."""
        host, _ = self._endpoint
        if self._local_addr:
            return self._local_addr
        if self._is_here and not is_loopback(host):
            return host  # the name of the host that hosts is by definition one under which all others reach it
        if self._inside or self._trust.token is None:
            return self._inside
        return host_facing(self._coordinator_at)

    def report(self, why: str, fatal: bool) -> str | None:
        """Report that the job has failed; see :class:`~ef_common.control.leader_request.LeaderRequests`."""
        return self._requests().report_failure(self._coordinators, why, fatal=fatal)

    def ask_about(self, worker: str) -> str | None:
        """Ask whether a worker is out; see :class:`~ef_common.control.leader_request.LeaderRequests`."""
        return self._requests().inquire(self._coordinators, worker)

    @property
    def _coordinators(self) -> list[Address]:
        own = [] if self.coordinator is None else [(LOOPBACK, self.coordinator.address[1])]
        return [*own, self._coordinator_at]

    def _requests(self) -> LeaderRequests:
        agent = Member(f"{self._node}-agent-{secrets.token_hex(2)}", self._node, "")
        return LeaderRequests(agent, self._trust.token, self._tls)

    # ------------------------------------------------------------ the end

    def end(self) -> None:
        """End the coordinator. One that leads first hands over, or waits for the workers of other nodes."""
        coordinator = self.coordinator
        if coordinator is None:
            return
        if not self._is_standby and not (coordinator.wait_until_idle(0) or coordinator.hand_over(self._node)):
            logger.warning("this agent hosts the coordinator: waiting for the workers of other nodes to end")
        # A standby has taken over; so another one can, and our launcher may wait for our end.
        self._release(coordinator, STANDBY_LINGER_S if self._is_standby else LINGER_S)
        self.coordinator = None  # until here, a signal has it released at the exit
        self._record_end(coordinator)
        coordinator.stop()
        atexit.unregister(self.leave)

    def leave(self) -> None:
        """After a signal, which prevents `end`: hand over, or serve on, as others may be leaving, too."""
        if self.coordinator is not None:
            self._release(self.coordinator, self._grace_s)
            self._record_end(self.coordinator)
            self.coordinator.stop()
            atexit.unregister(self.leave)

    def _release(self, coordinator: Coordinator, timeout_s: float) -> None:
        """Hand over as soon as another node has a coordinator; without one serve until all have gone, or so long."""
        deadline = time.monotonic() + timeout_s
        while not (coordinator.wait_until_idle(0) or coordinator.hand_over(self._node)):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            coordinator.wait_until_idle(min(left_s, _AGAIN_S))
        coordinator.wait_until_told(_TELL_S)

    def _record_end(self, coordinator: Coordinator) -> None:
        """Tell those who come to the registry how the job has ended, if it has."""
        if self._registration is not None:
            self._registration.end(coordinator.outcome)


def node_name() -> str:
    """A name that no other agent has, even on this machine."""
    return f"{socket.gethostname()[:80]}-{secrets.token_hex(3)}"
