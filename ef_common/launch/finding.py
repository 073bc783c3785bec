"""How an agent finds its job through a registry: it follows the leader, or founds the job, or hears that it is over."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from ef_common import threads
from ef_common.core.founding import FollowStart, Found, Founding, Over, Wait
from ef_common.errors import (
    AuthenticationError,
    CoordinatorLost,
    JobFinished,
    ProtocolError,
    StorageError,
    StorageFailed,
    StorageRefused,
)
from ef_common.launch.registry import Registry
from ef_common.machine import source_address
from ef_common.protocol.addresses import Address, format_address, is_loopback

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""How long an agent waits for a registry that does not answer, or for a leader that lives and cannot be reached."""
ANSWER_S = 20.0
"""After so long, a registry has not answered: clients of object stores try for minutes, and say nothing."""
QUIET_S = 5.0
"""How long an agent says nothing of others that are late: those of one start are not there at the same moment."""
REMIND_S = 60.0
"""How often an agent that goes on waiting says for what."""
NOTHING_TO_JOIN = "the training is over: there is nothing to join"
JOIN_S = 10.0
"""How long an agent that only joins waits where no training is running: its leader may just be replaced."""
_LOOK_S = 0.5
_REACH_S = 5.0
_T = TypeVar("_T")
_NOWHERE = "192.0.2.1"  # of a network for documentation; nothing is sent there


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job that was found.

    Args:
        number: Of its start.
        leader: Where its coordinator listens; None if this agent has founded it, and leads.
    """

    number: int
    leader: Address | None


def find_job(
    registry: Registry,
    *,
    find_leader: Callable[[str, list[Address]], Address | None],
    lead: Callable[[], Address],
    resign: Callable[[], None],
    founds: bool = True,
    wait_s: float = inf,
) -> FoundJob:
    """Look until the job is found. The coordinator of a founder listens before anybody can hear of it.

    Args:
        registry: Where to look.
        find_leader: Asks the coordinators of the start with this nonce where the leading one is.
        lead: Starts a coordinator that leads; returns where others reach it.
        resign: Ends that one, because somebody else has founded the job.
        founds: This one may found the job; else it waits for somebody who does.
        wait_s: For so long.

    Raises:
        AuthenticationError: The job runs, and has another token, or none.
        CoordinatorLost: The registry does not answer, the job runs where nobody can be reached from here, or nobody has
            founded it.
        JobFinished: The training is over.
        ProtocolError: The job runs, with another version of the protocol.
        StorageRefused: The registry cannot be read or written.
    """
    founding = Founding()
    patience, for_founder = Patience(), Patience(wait_s, quiet_s=QUIET_S)
    while True:
        now = time.monotonic()
        try:
            seen = _in_time(registry.look)
        except StorageError as error:
            _bear(registry, error, patience)
            continue
        leader, refusal = None, None
        try:
            leader = find_leader(seen.nonce, seen.addresses) if seen is not None and seen.addresses else None
        except (AuthenticationError, ProtocolError) as error:  # the address may be another job's by now
            refusal = error
        start = None if seen is None else seen.start
        match founding.decide(start, answered=leader is not None, now=now):
            case Over():
                raise JobFinished(NOTHING_TO_JOIN)
            case FollowStart(number):
                return FoundJob(number, leader)
            case Found() if not founds:
                for_founder.wait(f"no training is running at {registry.place}")
            case Found(number):
                address = lead()
                if _make(registry, number, address, patience):
                    return FoundJob(number, None)
                resign()
            case Wait(signs=True) if refusal is not None:
                raise refusal
            case Wait(signs=True) if seen is not None:
                where = ", ".join(map(format_address, seen.addresses)) or "none on record"
                patience.wait(
                    f"the job runs, which node {seen.founder} has started, but no agent of it can be reached from here "
                    f"(addresses: {where})"
                )
            case Wait():  # for the lease at most
                time.sleep(_LOOK_S)


def _make(registry: Registry, number: int, address: Address, patience: Patience) -> bool:
    """Make a start, and record where its leader is; False if somebody else has made it."""
    while True:
        try:
            if not _in_time(registry.found, number):
                return False
            _in_time(registry.add, number, address)
        except StorageError as error:  # it may be done, or not: the same again finds out
            _bear(registry, error, patience)
        else:
            return True


def _in_time(act: Callable[..., _T], *args: object) -> _T:
    """What a registry answers. One that hangs may do later what it was asked to, as one that has failed may."""
    answer: Future[_T] = Future()

    def ask() -> None:
        try:
            answer.set_result(act(*args))
        except Exception as error:
            answer.set_exception(error)

    threads.start(ask, name="elasticflow-registry", job="asks the registry", on_failure=answer.set_exception)
    try:
        return answer.result(ANSWER_S)
    except NoAnswer:
        raise StorageFailed(f"no answer within {ANSWER_S:g} s") from None


def _bear(registry: Registry, error: StorageError, patience: Patience) -> None:
    """Wait until the registry may answer again; one that refuses does not do so by itself."""
    if isinstance(error, StorageRefused):
        raise StorageRefused(f"agents cannot find each other at {registry.place}: {error}") from error
    patience.wait(f"the registry {registry.place} does not answer: {error}")


class Patience:
    """Waits, says for what, repeats that each minute, and gives up in the end.

    Args:
        limit_s: How long it waits.
        setting: What sets that, if something does.
        quiet_s: How long it says nothing. It then says one reason a minute: who is late may be another one each time.
    """

    def __init__(self, limit_s: float = PATIENCE_S, *, setting: str = "", quiet_s: float = 0.0) -> None:
        self._limit_s = limit_s
        self._setting = f" ({setting})" if setting else ""
        self._quiet_s = quiet_s
        self._began = time.monotonic()
        self._since: float | None = None
        self._said, self._said_at = "", inf

    def wait(self, why: str, *, counts: bool = True, pause_s: float = _LOOK_S) -> None:
        """Wait for a moment.

        Args:
            why: For what.
            counts: Whether it may give up: it does if this has counted for so long without a break.
            pause_s: Length of the moment.

        Raises:
            CoordinatorLost: It gives up.
        """
        now = time.monotonic()
        self._since = (self._since or now) if counts else None
        if self._since is not None and now - self._since > self._limit_s:
            raise CoordinatorLost(f"{why}. That has not changed within {self._limit_s:g} s{self._setting}")
        is_news = not self._said if self._quiet_s else why != self._said
        if is_news and now - self._began >= self._quiet_s:
            logger.warning("%s; waiting", why)
            self._said, self._said_at = why, now
        elif now - self._said_at >= REMIND_S:
            logger.warning("%s; still waiting after %.0f s", why, now - self._began)
            self._said, self._said_at = why, now
        time.sleep(pause_s)


def own_host() -> str:
    """An address under which other machines are likely to reach this one: that of its default route, else its name."""
    return source_address(_NOWHERE) or socket.gethostname()


def host_facing(coordinator: Address) -> str:
    """Where the other workers of a job reach those of this machine, which may lie beyond what their coordinator sees.

    A worker next to its coordinator comes from the loopback interface, and on Debian a machine's own name stands for
    an address there. Under such an address, other machines would only find themselves.

    Args:
        coordinator: Where the coordinator listens.

    Returns:
        The address from which this machine reaches it; its own host if it is on this machine; "" if it listens on the
        loopback interface, as do all of the job then.
    """
    host = coordinator[0]
    if is_loopback(host):
        return ""
    try:
        with socket.create_connection(coordinator, timeout=_REACH_S) as probe:
            own = str(probe.getsockname()[0])
    except OSError:  # it may not be there yet, or be gone while this machine has a standby
        own = source_address(host) or own_host()
    return host if is_loopback(own) else own
