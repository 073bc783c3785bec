"""Under torchrun's own backends (c10d, static), the worker of rank 0 hosts the coordinator.

The processes survive losses. Joins are torchrun's business: it restarts all workers when a node joins, and the
restarted ones come here again.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from ef_common.control.coordinator import Coordinator
from ef_common.core.membership import Settings
from ef_common.errors import CoordinatorLost, UsageError
from ef_common.launch.environment import COORDINATOR, WorkerEnvironment
from ef_common.launch.finding import host_facing
from ef_common.protocol.addresses import LOOPBACK, Address, format_address, is_loopback, parse_address
from ef_common.protocol.introduction import HELP
from ef_common.tls import Credentials

logger = logging.getLogger(__name__)

LINGER_S = 300.0
_KEY = "elasticflow/coordinator"
_LOOK_AGAIN_S = 0.1
_PROBE_S = 5.0


@dataclass(frozen=True, slots=True)
class TorchrunEnvironment:
    """What torchrun tells a worker under its own backend.

    Args:
        rank: Rank of the worker when torchrun started it.
        node: Index of its node.
        num_nodes: Number of nodes.
        master_addr: Address of the node of rank 0.
    """

    rank: int
    node: int
    num_nodes: int
    master_addr: str


@dataclass(slots=True)
class C10dJob:
    """A job under torchrun's own backend.

    Args:
        environment: The worker's environment, with the coordinator in it.
        store: torchrun's store; rank 0 may be serving it, so it is kept.
        coordinator: The coordinator, in the process that hosts it.
    """

    environment: WorkerEnvironment
    store: Store
    coordinator: Coordinator | None = None

    def close(self, linger_s: float = LINGER_S) -> None:
        """End the job after the worker's own connection is closed; the hosting worker first waits for the others."""
        if self.coordinator is None:
            return
        if not self.coordinator.wait_until_idle(0):
            logger.info("this worker hosts the coordinator: waiting up to %g s for the others", linger_s)
            self.coordinator.wait_until_idle(linger_s)
        self.coordinator.stop()
        self.coordinator = None


def is_plain_torchrun(environ: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun started this worker under another rendezvous than ours."""
    env = os.environ if environ is None else environ
    return "TORCHELASTIC_RUN_ID" in env and COORDINATOR not in env


def read_torchrun_environment(environ: Mapping[str, str] | None = None) -> TorchrunEnvironment:
    """Read torchrun's variables.

    Raises:
        UsageError: One is missing or malformed.
    """
    env = os.environ if environ is None else environ
    try:
        return TorchrunEnvironment(
            rank=int(env["RANK"]),
            node=int(env["GROUP_RANK"]),
            num_nodes=int(env["GROUP_WORLD_SIZE"]),
            master_addr=env["MASTER_ADDR"],
        )
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"expected the variables that torchrun sets (RANK, GROUP_RANK, ...). Problem: {error}"
        ) from None


def host_or_find_coordinator(
    environment: WorkerEnvironment, *, timeout_s: float = 60.0, credentials: Credentials | None = None
) -> C10dJob:
    """Host the coordinator in this process (rank 0), or find out where it is (all others).

    Args:
        environment: The worker's environment, without a coordinator.
        timeout_s: How long to wait for rank 0.
        credentials: Identity of the coordinator, if connections are encrypted.

    Raises:
        CoordinatorLost: No coordinator could be reached in time.
        UsageError: torchrun's variables are missing.
    """
    torchrun = read_torchrun_environment()
    store = _join_store(timeout_s)
    coordinator = None
    if torchrun.rank == 0:
        coordinator = _host(torchrun, environment, credentials)
        address = _address_for_others(coordinator, torchrun)
        store.set(_KEY, format_address(address))
    else:
        address = _find(store, timeout_s)
    # Two agents of one machine are two nodes, and share a host name.
    node = f"{socket.gethostname()[:80]}-{torchrun.node}"
    reached_at = environment.address or host_facing(address)
    return C10dJob(replace(environment, coordinator=address, node=node, address=reached_at), store, coordinator)


def _join_store(timeout_s: float) -> Store:
    """The store at MASTER_ADDR:MASTER_PORT, served by the agent or by rank 0, as torch's env:// finds it."""
    store: Store = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_s))))[0]
    return store


def _host(
    torchrun: TorchrunEnvironment, environment: WorkerEnvironment, credentials: Credentials | None
) -> Coordinator:
    host = torchrun.master_addr
    coordinator = Coordinator(
        (host if is_loopback(host) else "", 0),
        token=environment.token,
        # The first view waits for all nodes that torchrun started; later ones may be of any size.
        settings=Settings(min_nodes=1, max_nodes=torchrun.num_nodes, last_call_s=LINGER_S),
        heartbeat_timeout_s=environment.heartbeat_timeout_s,
        hang_timeout_s=environment.hang_timeout_s,
        credentials=credentials,
    )
    coordinator.start()
    return coordinator


def _address_for_others(coordinator: Coordinator, torchrun: TorchrunEnvironment) -> Address:
    bound, port = coordinator.address
    return (LOOPBACK if is_loopback(bound) else torchrun.master_addr, port)


def _find(store: Store, timeout_s: float) -> Address:
    """Read the address that rank 0 publishes.

    The store may be older than this round of workers, and then holds the address of a process that is dead:
    whoever does not answer is a leftover, and rank 0 is about to publish its own.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        address = parse_address(store.get(_KEY).decode(), what="the published address of the coordinator")
        try:
            socket.create_connection(address, timeout=_PROBE_S).close()
            return address
        except OSError as error:
            if time.monotonic() > deadline:
                raise CoordinatorLost(
                    f"rank 0 published {format_address(address)} as its coordinator, which cannot be reached "
                    f"({error}). {HELP}"
                ) from error
        time.sleep(_LOOK_AGAIN_S)
