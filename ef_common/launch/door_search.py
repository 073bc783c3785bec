"""How an agent finds its job by asking other agents, which a list of hosts or a name with several addresses gives."""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from concurrent.futures import TimeoutError as RoundOver
from dataclasses import replace
from typing import Protocol

from ef_common.core.doors import (
    LOOK,
    SETTLED_S,
    DoorAnswer,
    DoorHeard,
    FollowDoor,
    JobIsOver,
    Lead,
    Seeker,
    WaitForDoors,
)
from ef_common.errors import AuthenticationError, JobFinished, ProtocolError
from ef_common.launch.finding import JOIN_S, NOTHING_TO_JOIN, PATIENCE_S, QUIET_S, Patience
from ef_common.machine import is_this_machine
from ef_common.protocol.addresses import Address, format_address, is_loopback, named_by, parse_address

logger = logging.getLogger(__name__)

LISTED_SETTLED_S = 1.0
"""How long an agent looks before it founds a job at a list: a leader elsewhere tells whoever comes up at the list."""
_LOOK_S = 0.5
_ROUND_S = 4.0
"""How long a round waits for answers; less than a candidate counts one."""
_THREADS = 32


class Doors(Protocol):
    """Where an agent looks for its job. `known` comes first in each round; the others say what follows from it.

    Attributes:
        settle_s: How long the doors must have been the same before they count.
    """

    settle_s: float

    def known(self) -> list[Address]:
        """All addresses that are to be asked now, the one at which this agent may listen among them."""

    def counted(self) -> list[Address]:
        """Those of which a majority has to support whoever founds the job."""

    def candidate(self, own: Address | None) -> Address | None:
        """The door of this agent, if it may found the job; None if it may not."""

    def in_order(self, doors: Iterable[Address]) -> list[Address]:
        """These, and all that always count, in an order on which all agents agree."""

    def believes(self, address: Address) -> bool:
        """Whether a coordinator of another job, or of another version, at this address is an error."""


class Listed:
    """The doors of a list.

    Args:
        doors: They, in their order.
    """

    settle_s = LISTED_SETTLED_S

    def __init__(self, doors: Sequence[Address]) -> None:
        self._doors = tuple(doors)

    def known(self) -> list[Address]:
        """The doors that are known now."""
        return list(self._doors)

    def counted(self) -> list[Address]:
        """Those of which a majority founds the job."""
        return self.known()

    def candidate(self, own: Address | None) -> Address | None:
        """The door of this agent, if it may found the job."""
        return own

    def believes(self, address: Address) -> bool:
        """Whether a coordinator of another job, or of another version, at this address is an error."""
        return True

    def in_order(self, doors: Iterable[Address]) -> list[Address]:
        """All of these, in an order on which all agents agree: first those of the list."""
        others = set(doors) - set(self._doors)
        return [*self._doors, *sorted(others, key=_rank)]


class Resolved:
    """The doors at the addresses of a name, which may come and go.

    Args:
        host: The name.
        port: Of all doors.
    """

    settle_s = SETTLED_S

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._doors: list[Address] = []

    def known(self) -> list[Address]:
        """The doors that are known now; a name server that does not answer changes nothing."""
        self._doors = [(host, self._port) for host in addresses_of(self._host)] or self._doors
        return self._doors

    def counted(self) -> list[Address]:
        """Those of which a majority founds the job, as they were known last."""
        return self._doors

    def candidate(self, own: Address | None) -> Address | None:
        """The door of this agent, if it may found the job."""
        return own

    def believes(self, address: Address) -> bool:
        """Whether a coordinator of another job, or of another version, at this address is an error."""
        return True

    def in_order(self, doors: Iterable[Address]) -> list[Address]:
        """All of these, in an order on which all agents agree: that of their numbers."""
        return self.sorted(doors)

    @staticmethod
    def sorted(doors: Iterable[Address]) -> list[Address]:
        """Addresses in the order of their numbers, and names after them."""
        return sorted(set(doors), key=_rank)


def addresses_of(host: str) -> list[str]:
    """The addresses of a name, those of IPv4 if there are any; none if nobody knows it."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    family = min((one[0] for one in found), key=lambda one: one is not socket.AF_INET, default=None)
    return list(dict.fromkeys(str(address[0]) for one, _, _, _, address in found if one is family))


def wait_for_name(host: str, patience: Patience) -> None:
    """Wait until a name has an address: before, nobody knows whether it stands for this machine, or for several.

    Raises:
        CoordinatorLost: It has none for too long.
    """
    while not addresses_of(host):
        patience.wait(f"{host}, which --rdzv-endpoint names, has no address", pause_s=_LOOK_S)


def names_a_group(host: str) -> bool:
    """Whether this is a name that may stand for several machines, be it that it does so only later."""
    if host == "localhost" or host.split(".")[0] == socket.gethostname().split(".")[0]:
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        addresses = addresses_of(host)
        return len(addresses) > 1 or any(map(is_this_machine, addresses))
    return False


def find_at_doors(
    doors: Doors,
    *,
    open_door: Callable[[Sequence[Address]], Address | None],
    ask: Callable[[Address, str, str], DoorAnswer | None],
    lead: Callable[[], object],
    joins: bool = False,
) -> Address | None:
    """Look until the job is found, or this agent has founded it.

    Args:
        doors: Where to look.
        open_door: Lets the coordinator of this agent listen at one of these that is on this machine; returns it. Where
            somebody answers, it is not asked to.
        ask: Asks at an address, from the door of this agent, with a wish; None if nobody answers.
        lead: Lets the coordinator of this agent lead.
        joins: Whether it only joins a job that runs.

    Returns:
        Where the job is led; None if this agent leads.

    Raises:
        AuthenticationError: An agent has another token, or none, and nobody leads.
        ProtocolError: Somebody there is no agent of ElasticFlow, or one of another version, and nobody leads.
        CoordinatorLost: This agent cannot reach the founder it has committed itself to, or joins and finds no job.
        JobFinished: The training is over.
    """
    seeker = Seeker(settle_s=doors.settle_s)
    patience = Patience(JOIN_S if joins else PATIENCE_S, quiet_s=QUIET_S)
    own: Address | None = None
    answers: dict[str, DoorHeard] = {}
    told: set[Address] = set()
    named: set[Address] = set()
    with _Asking(ask) as asking:
        while True:
            known = doors.known()
            own = own or open_door([one for one in known if format_address(one) not in answers])
            mine = "" if own is None else format_address(own)
            wish = seeker.wish
            targets = dict.fromkeys([*([] if own is None else [own]), *known, *told, *named])
            answers = asking.round(list(targets), mine, wish)
            told = {one for heard in answers.values() for one in _parsed(heard.answer.doors)}
            named = {leader for heard in answers.values() for leader in _parsed([heard.answer.leader])}
            everyone = list(map(format_address, doors.in_order([*doors.counted(), *told])))
            candidate = "" if doors.candidate(own) is None else mine
            match seeker.decide(candidate, everyone, answers, time.monotonic()):
                case JobIsOver():
                    raise JobFinished(NOTHING_TO_JOIN)
                case FollowDoor(door):
                    return parse_address(door, what="the address of the leader")
                case Lead():
                    lead()
                    return None
                case WaitForDoors(why, bound):
                    if own is not None and not candidate and not named:
                        why = f"nobody has told this agent yet where all others are; {why}"
                    for address, refusal in asking.refusals.items():
                        if doors.believes(address):
                            raise refusal
                        why = f"{why}; {refusal}"
                    goes_on = seeker.wish not in (wish, LOOK)  # the next wish follows at once
                    what = "no training is running there" if joins else why
                    patience.wait(what, counts=bound or joins, pause_s=0.0 if goes_on else _LOOK_S)


class _Asking:
    """Asks many at the same time.

    Args:
        ask: Asks one.

    Attributes:
        refusals: What those have said in the last round who have another token or another version.
    """

    def __init__(self, ask: Callable[[Address, str, str], DoorAnswer | None]) -> None:
        self.refusals: dict[Address, AuthenticationError | ProtocolError] = {}
        self._ask = ask
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="elasticflow-seek")
        self._busy: dict[Address, Future[DoorAnswer | None]] = {}

    def __enter__(self) -> _Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def round(self, addresses: Sequence[Address], door: str, wish: str) -> dict[str, DoorHeard]:
        """What those say that answer in time; as soon as one of them leads, no more are waited for."""
        self.refusals = {}
        self._busy = {address: future for address, future in self._busy.items() if not future.done()}
        asked: dict[Future[DoorAnswer | None], tuple[Address, float]] = {}
        for address in addresses:
            if address not in self._busy:  # else its answer comes too late
                future = self._pool.submit(self._ask, address, door, wish)
                asked[future] = (address, time.monotonic())
                self._busy[address] = future
        answers: dict[str, DoorHeard] = {}
        try:
            for future in as_completed(asked, timeout=_ROUND_S):
                address, asked_at = asked[future]
                answer = self._answer(address, future)
                if answer is not None:
                    answers[format_address(address)] = DoorHeard(_as_seen_from(address, answer), asked_at)
                    if answer.leads:
                        break
        except RoundOver:
            logger.debug("some do not answer within %g s", _ROUND_S)
        return answers

    def _answer(self, address: Address, future: Future[DoorAnswer | None]) -> DoorAnswer | None:
        try:
            return future.result()
        except (AuthenticationError, ProtocolError) as error:
            self.refusals[address] = error
            return None


def _as_seen_from(address: Address, answer: DoorAnswer) -> DoorAnswer:
    """What an agent has said; a leader that it reaches on its own machine has the address of that machine."""
    if not answer.leader or is_loopback(address[0]):
        return answer
    return replace(answer, leader=format_address(named_by(address, answer.leader)))


def _parsed(doors: Iterable[str]) -> list[Address]:
    return [parse_address(door, what="an address that an agent has named") for door in doors if door]


def _rank(address: Address) -> tuple[int, int, str, int]:
    """Numbers in their order, and then names."""
    host, port = address
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return 9, 0, host, port
    return number.version, int(number), "", port
