"""Under horovodrun, the worker of rank 0 starts a coordinator in its own process, and the others find it.

::

    horovodrun -np 2 --min-np 1 --max-np 8 --host-discovery-script ./discover.sh python train.py
    horovodrun -np 2 python train.py

horovodrun manages hosts and processes: it starts workers, notices their end, gives up hosts, and observes --max-np,
--elastic-timeout, --reset-limit and --blacklist-cooldown-range. As everywhere, the coordinator issues the views, so
survivors keep their processes. :mod:`ef_common.horovod.rounds` decides what the workers tell horovodrun's
elastic driver, and when. It does not tell the workers the number of --min-np: with fewer, it waits for more, and ends
the job if none come; meanwhile the remaining workers continue to train.

The coordinator's address and the job token are in horovodrun's key-value store. Anybody who reaches that server may
read and write there, and it even executes what is written to it (it unpickles the addresses of workers). A token that
is made here therefore keeps out only strangers who reach nothing but the coordinator: use horovodrun on networks that
you trust. A token in ELASTICFLOW_TOKEN is not written there, but horovodrun puts the whole environment on the command
lines of the workers, where everybody on the machine can read it. Workers do not get the secret that horovodrun shares
with the processes which look for network interfaces, so no token can be derived from it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from ef_common.core.membership import Settings
from ef_common.errors import AuthenticationError, CoordinatorLost, JobFinished, ProtocolError, UsageError
from ef_common.horovod.driver import FINISHED_KEY, STATUS_LEFT, Driver, WatchedChannel
from ef_common.horovod.store import RendezvousStore, StoreLost
from ef_common.launch.coordinator_process import START_S, start_coordinator
from ef_common.launch.environment import COORDINATOR, WorkerEnvironment
from ef_common.launch.horovodrun_end import HorovodrunEnd
from ef_common.protocol.addresses import Address, format_address, parse_address
from ef_common.protocol.auth import Token
from ef_common.protocol.introduction import HELP
from ef_common.session.ports import ControlChannel
from ef_common.tls import Credentials

logger = logging.getLogger(__name__)

T = TypeVar("T")
GATHER_S = 60.0
"""How long rank 0 waits for the other workers of the start; then it starts without them."""
LAST_CALL_S = 0.5
"""All have begun when they learn where the coordinator is, so the first view waits no longer for the next one."""
COORDINATOR_KEY = "coordinator"
_LOOK_S = 0.05
_LOOKS_PER_S = 200  # of all workers together


@dataclass(frozen=True, slots=True)
class HorovodrunEnvironment:
    """What horovodrun tells a worker; read once, since Horovod as a data plane sets these variables later.

    Args:
        rank: Rank when horovodrun started it.
        size: Number of processes then.
        host: Name of its host, as the driver has it.
        local_rank: Index on the host.
        local_size: Number of processes on the host then.
        store: Host and port of horovodrun's server.
        elastic: There is an elastic driver.
        interface: Network interface to use.
    """

    rank: int
    size: int
    host: str
    local_rank: int
    local_size: int
    store: Address
    elastic: bool
    interface: str


def is_horovodrun(environ: Mapping[str, str] | None = None) -> bool:
    """Whether horovodrun started this worker and no coordinator was named.

    Horovod as our data plane leaves variables behind, too: with HOROVOD_ELASTIC=0, which horovodrun never sets.
    """
    env = os.environ if environ is None else environ
    return "HOROVOD_RANK" in env and COORDINATOR not in env and env.get("HOROVOD_ELASTIC") != "0"


def read_horovodrun_environment(environ: Mapping[str, str] | None = None) -> HorovodrunEnvironment:
    """Read horovodrun's variables.

    Raises:
        UsageError: One is missing or malformed, or Horovod cannot be imported here.
    """
    env = os.environ if environ is None else environ
    if find_spec("horovod") is None:
        raise UsageError(
            "HOROVOD_RANK is set, so horovodrun has started this worker, but this Python has no Horovod. "
            "Install it here (elasticflow horovod build), or unset HOROVOD_RANK."
        )
    try:
        return HorovodrunEnvironment(
            rank=int(env["HOROVOD_RANK"]),
            size=int(env["HOROVOD_SIZE"]),
            host=env["HOROVOD_HOSTNAME"],
            local_rank=int(env["HOROVOD_LOCAL_RANK"]),
            local_size=int(env["HOROVOD_LOCAL_SIZE"]),
            store=(env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(env["HOROVOD_GLOO_RENDEZVOUS_PORT"])),
            elastic=env.get("HOROVOD_ELASTIC") == "1",
            interface=env.get("HOROVOD_GLOO_IFACE", ""),
        )
    except (KeyError, ValueError) as error:
        raise UsageError(
            "expected the variables that horovodrun sets with Gloo (HOROVOD_RANK, HOROVOD_GLOO_RENDEZVOUS_ADDR, "
            f"...); with MPI (horovodrun --mpi) it does not. Problem: {error}"
        ) from None


@dataclass(slots=True)
class HorovodJob:
    """A job under horovodrun.

    Args:
        environment: The worker's environment, with the coordinator in it.
        driver: The connection to the elastic driver, if there is one.
    """

    environment: WorkerEnvironment
    driver: Driver | None = None

    def watch(self, channel: ControlChannel, worker: str) -> ControlChannel:
        """The channel, whose events are reported to the driver."""
        return channel if self.driver is None else WatchedChannel(channel, self.driver, worker)

    def leave(self) -> int:
        """This worker leaves. Returns its exit status: without an elastic driver, any other than 0 ends all workers."""
        if self.driver is None:
            return 0
        self.driver.dismissed(left=True)
        return STATUS_LEFT

    def close(self) -> None:
        """End the job after the worker's own connection is closed."""
        if self.driver is not None:
            self.driver.close()


def join_horovodrun(
    environment: WorkerEnvironment, *, gather_s: float = GATHER_S, credentials: Credentials | None = None
) -> HorovodJob:
    """Start the coordinator (the first worker of rank 0), or find out where it is (all others).

    Args:
        environment: The worker's environment, without a coordinator.
        gather_s: How long rank 0 waits for the other workers of the start.
        credentials: Identity of the coordinator, if connections are encrypted.

    Raises:
        CoordinatorLost: No coordinator could be started, or reached in time.
        JobFinished: The job is over.
        UsageError: horovodrun's variables are missing, or Horovod is.
    """
    given = read_horovodrun_environment()
    if "LOCAL_RANK" not in os.environ:  # for whoever chooses a device by it
        os.environ.update(LOCAL_RANK=str(given.local_rank), LOCAL_WORLD_SIZE=str(given.local_size))
    store = RendezvousStore(given.store)
    driver = None
    if given.elastic:
        driver = Driver(
            store,
            host=given.host,
            local_rank=given.local_rank,
            size=given.size,
            local_size=given.local_size,
            interface=given.interface,
        )
    with contextlib.ExitStack() as undone:
        try:
            if driver is not None:  # before the search, as hosts may come meanwhile
                undone.callback(driver.stop)
                driver.register()
            found = _Search(store, given, environment, gather_s, credentials).run()
        except StoreLost as error:
            raise CoordinatorLost(str(error)) from error
        undone.pop_all()
    # Workers are admitted one by one, wherever they run.
    environment = replace(
        environment,
        coordinator=found.address,
        token=found.token,
        node=given.host,
        local_rank=0,
        local_world_size=1,
        agent=HorovodrunEnd(given.store, size=given.size),
    )
    if driver is not None:
        driver.start({COORDINATOR_KEY: found.describe()})
    return HorovodJob(environment, driver)


@dataclass(frozen=True, slots=True)
class CoordinatorEntry:
    """Where the coordinator is.

    Args:
        address: Its host and port.
        token: The job token.
        secret: Whether the token is to be kept out of the store.
    """

    address: Address
    token: Token
    secret: bool

    def describe(self) -> bytes:
        """What newcomers read in the store."""
        what = {"address": format_address(self.address)}
        return json.dumps(what if self.secret else {**what, "token": self.token.secret}).encode()

    @classmethod
    def parse(cls, value: bytes, token: Token | None) -> CoordinatorEntry:
        """Inverse of `describe`, where `token` is this worker's own.

        Raises:
            ProtocolError: It is malformed.
            AuthenticationError: It holds no token, and this worker has none.
        """
        try:
            what = json.loads(value)
            address = parse_address(what["address"], what="the published address of the coordinator")
            published = None if token is not None else what.get("token")
            token = token or (published and Token(published, source="the published token"))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ProtocolError(f"horovodrun's store holds no address of a coordinator: {error}") from error
        if token is None:
            raise AuthenticationError("ELASTICFLOW_TOKEN is set where rank 0 runs, and not here")
        return cls(address, token, secret=published is None)


@dataclass(frozen=True, slots=True)
class _Search:
    """How a worker finds its coordinator."""

    store: RendezvousStore
    given: HorovodrunEnvironment
    environment: WorkerEnvironment
    gather_s: float
    credentials: Credentials | None

    def run(self) -> CoordinatorEntry:
        """Announce this worker, and start the coordinator or find it."""
        self.store.put(_started(self.given.rank), b"1")
        found = self._published()
        if found is None and self.given.rank == 0:
            return self._begin()
        found = found or self._wait_for(self._published, START_S)
        if found is None:
            raise CoordinatorLost(f"rank 0 has published no coordinator within {START_S:g} s. {HELP}")
        return found

    def _begin(self) -> CoordinatorEntry:
        """Start the coordinator, and publish it when all workers are there, so that they share the first view."""
        secret = self.environment.token is not None
        token = self.environment.token or Token(secrets.token_hex(16))
        address, _ = start_coordinator(
            self.store.own_host(),
            token,
            Settings(last_call_s=LAST_CALL_S),
            heartbeat_timeout_s=self.environment.heartbeat_timeout_s,
            hang_timeout_s=self.environment.hang_timeout_s,
            credentials=self.credentials,
            log=self._log(),
        )
        deadline = time.monotonic() + self.gather_s
        for rank in range(self.given.size):
            if not self._wait_for(partial(self.store.get, _started(rank)), deadline - time.monotonic()):
                logger.warning("rank %d of horovodrun's workers has not come: starting without it", rank)
        found = CoordinatorEntry(address, token, secret=secret)
        self.store.put(COORDINATOR_KEY, found.describe())
        return found

    def _log(self) -> Path | None:
        run_dir = self.environment.run_dir
        if run_dir is None:
            return None
        run_dir.mkdir(parents=True, exist_ok=True)
        return run_dir / "coordinator.log"

    def _published(self) -> CoordinatorEntry | None:
        if self.store.get(FINISHED_KEY):
            raise JobFinished("the job has ended")
        value = self.store.get(COORDINATOR_KEY)
        return None if value is None else CoordinatorEntry.parse(value, self.environment.token)

    def _wait_for(self, ask: Callable[[], T | None], timeout_s: float) -> T | None:
        deadline = time.monotonic() + timeout_s
        pause_s = max(_LOOK_S, self.given.size / _LOOKS_PER_S)
        while (value := ask()) is None and time.monotonic() < deadline:
            time.sleep(pause_s)
        return value


def _started(rank: int) -> str:
    return f"started-{rank}"
