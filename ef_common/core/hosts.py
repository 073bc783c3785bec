"""Which hosts of a list have a node of a training: a pure rule for the launcher that reaches them.

A connection is less than a node: a node that is cut off trains on, and is found again when its host is called again.
Each host that is or was wanted is in one of these states::

    WAITING → CALLED        `decide`: it is due, so a connection is made, which starts a node
    CALLED → RUNNING        `runs`
    CALLED → WAITING        `lost`: no connection could be made; `ended`
    RUNNING → CUT           `lost`
    RUNNING → WAITING       `ended`
    CUT → RECALLED          `decide`: it is due, so a connection to that node is made
    RECALLED → RUNNING      `runs`
    RECALLED → CUT          `lost`
    RECALLED → WAITING      `ended`
    WAITING → FORGOTTEN     `decide`: the host is not wanted any more, or the job ends
    CALLED → FORGOTTEN      `ended`, if it leaves; `decide`: the job has ended, and the node is not reached for `LAST_S`
    RUNNING → FORGOTTEN     `ended`, if it leaves
    CUT → FORGOTTEN         `decide`: the job has ended, and the node is not reached for `LAST_S`
    RECALLED → FORGOTTEN    `ended`, if it leaves; `decide`: the job has ended, and the node is not reached for `LAST_S`

A host that is no longer wanted, or not with so many workers, *leaves*: its node is told to leave. If the host is wanted
with another number of workers, it is called again when it has been forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ef_common.core.doubling import doubled_s

LONGEST_PAUSE_S = 30.0
AFTER_END_S = 10.0
"""How long a host rests whose node has ended by itself: if the whole job is over, that is known by then."""
STEADY_S = 60.0
"""A node that has run for so long has not failed often."""
LAST_S = 30.0
"""At the end of the job, how long a node is waited for that cannot be reached. It ends by itself."""
KILLED = 128
"""Exit statuses above this: a signal has ended the node."""
FAILED, REFUSED = 1, 2


@dataclass(frozen=True, slots=True)
class Host:
    """A host of the list.

    Args:
        name: As ssh takes it.
        slots: Workers that it may have.
    """

    name: str
    slots: int


class HostState(Enum):
    """Of a host."""

    WAITING = "waiting"  # it has no node, and no connection
    CALLED = "called"  # a connection is made, which starts a node
    RUNNING = "running"  # there is a node, and a connection to it
    CUT = "cut"  # there is a node, as far as is known, and no connection
    RECALLED = "recalled"  # a connection to that node is made


class HostsVerdict(Enum):
    """How the job has ended."""

    FINISHED = "finished"
    FAILED = "failed"
    REFUSED = "refused"  # every node has, before its training began
    STOPPED = "stopped"  # as it was told to
    NOBODY = "nobody"  # no host could be had for long


_CALL = {HostState.WAITING: HostState.CALLED, HostState.CUT: HostState.RECALLED}
_LOSE = {HostState.CALLED: HostState.WAITING, HostState.RUNNING: HostState.CUT, HostState.RECALLED: HostState.CUT}
_RUN = (HostState.CALLED, HostState.RECALLED)
_THERE = (HostState.RUNNING, HostState.CUT, HostState.RECALLED)


@dataclass(slots=True)
class _Node:
    slots: int
    state: HostState = HostState.WAITING
    leaving: bool = False
    tries: int = 0  # that have failed since it was steady
    due: float = 0.0  # when it may be called
    since: float | None = None  # when it began to run
    status: int | None = None  # of the node that has ended last


def shares(hosts: Sequence[Host], most: int | None) -> dict[str, int]:
    """How many workers each host has, if there are at most so many: the first hosts of the list have theirs.

    Example:
        >>> shares([Host("a", 2), Host("b", 2), Host("c", 2)], 3)
        {'a': 2, 'b': 1}
    """
    found: dict[str, int] = {}
    left = sum(host.slots for host in hosts) if most is None else most
    for host in hosts:
        if left > 0:
            found[host.name] = min(host.slots, left)
            left -= found[host.name]
    return found


class HostStates:
    """The hosts of a job. Times are seconds of one monotonic clock.

    Args:
        patience_s: The job is given up if no host has a node for this long.
        now: The time.

    Example:
        >>> hosts = HostStates(patience_s=600.0, now=0.0)
        >>> hosts.want([Host("a", 1), Host("b", 1)])
        >>> hosts.decide(0.0)
        [Host(name='a', slots=1), Host(name='b', slots=1)]
        >>> hosts.runs("a", 1.0), hosts.lost("b", 1.0), hosts.decide(1.5), hosts.decide(2.0)
        (None, None, [], [Host(name='b', slots=1)])
        >>> hosts.ended("a", 0, 9.0), hosts.lost("b", 9.0), hosts.decide(9.0), hosts.verdict(9.0)
        (None, None, [], <HostsVerdict.FINISHED: 'finished'>)
    """

    def __init__(self, *, patience_s: float, now: float) -> None:
        self._patience_s = patience_s
        self._hosts: tuple[Host, ...] = ()
        self._most: int | None = None
        self._nodes: dict[str, _Node] = {}
        self._ran_at = now  # when a node was last known
        self._closing: tuple[HostsVerdict, float] | None = None

    # ------------------------------------------------------------ what is wanted

    def want(self, hosts: Sequence[Host]) -> None:
        """These are the hosts of the list now."""
        self._hosts = tuple(hosts)

    def limit(self, num_workers: int) -> None:
        """There shall be no more workers than these."""
        self._most = num_workers

    def close(self, verdict: HostsVerdict, now: float) -> None:
        """The job ends: no node is started any more. If it was stopped, all are told to leave; else they end anyway.

        The first verdict counts, unless the training turns out to be finished.
        """
        if self._closing is None or verdict is HostsVerdict.FINISHED:
            self._closing = (verdict, now)

    @property
    def num_slots(self) -> int:
        """How many workers the list allows."""
        return sum(host.slots for host in self._hosts)

    @property
    def num_workers(self) -> int:
        """How many workers the hosts have whose nodes run, and are not told to leave."""
        return sum(node.slots for node in self._nodes.values() if node.state is HostState.RUNNING and not node.leaving)

    def leaves(self, name: str) -> bool:
        """Whether the node of a host is to leave."""
        node = self._nodes.get(name)
        return node is None or node.leaving

    def state_of(self, name: str) -> HostState | None:
        """The state of a host; None for one that is not known."""
        node = self._nodes.get(name)
        return None if node is None else node.state

    # ------------------------------------------------------------ what is to be done

    def decide(self, now: float) -> list[Host]:
        """Whom to call now; they count as called."""
        if self._closing is None:
            self._compare(shares(self._hosts, self._most), now)
        else:
            self._let_go(*self._closing, now)
        called = []
        for name, node in self._nodes.items():
            if node.state in _CALL and now >= node.due:
                node.state = _CALL[node.state]
                called.append(Host(name, node.slots))
        return called

    def _compare(self, wanted: Mapping[str, int], now: float) -> None:
        for name, node in list(self._nodes.items()):
            if node.state is HostState.WAITING:
                node.slots = wanted.get(name, 0)
                if not node.slots:
                    del self._nodes[name]
            elif wanted.get(name) != node.slots:
                node.leaving = True
        for name, slots in wanted.items():
            self._nodes.setdefault(name, _Node(slots, due=now))

    def _let_go(self, verdict: HostsVerdict, since: float, now: float) -> None:
        for name, node in list(self._nodes.items()):
            node.leaving = node.leaving or verdict is HostsVerdict.STOPPED
            unreachable = node.state is not HostState.RUNNING and now >= since + LAST_S
            if node.state is HostState.WAITING or unreachable:
                del self._nodes[name]

    # ------------------------------------------------------------ what has happened

    def runs(self, name: str, now: float) -> None:
        """The node of a host runs."""
        node = self._nodes.get(name)
        if node is not None and node.state in _RUN:
            node.state, node.since = HostState.RUNNING, now

    def lost(self, name: str, now: float) -> None:
        """The connection to a host is lost, or none could be made."""
        node = self._nodes.get(name)
        if node is not None and node.state in _LOSE:
            node.state = _LOSE[node.state]
            self._pause(node, now)

    def ended(self, name: str, status: int, now: float) -> None:
        """The node of a host has ended.

        Args:
            name: Of the host.
            status: Exit status of its `elasticflow run`.
            now: The time.
        """
        node = self._nodes.get(name)
        if node is None or node.state not in _LOSE:  # there is no connection on which it could tell that
            return
        if status == 0:  # one that leaves has another status
            self.close(HostsVerdict.FINISHED, now)
        if node.leaving:
            del self._nodes[name]  # if it is wanted with another number of workers, it is called at once
            return
        node.state, node.status = HostState.WAITING, status
        self._pause(node, now)
        if status <= KILLED:
            node.due = max(node.due, now + AFTER_END_S)

    def _pause(self, node: _Node, now: float) -> None:
        if node.since is not None and now >= node.since + STEADY_S:
            node.tries = 0
        node.since = None
        node.due = now + doubled_s(1.0, node.tries, most_s=LONGEST_PAUSE_S)
        node.tries += 1

    def verdict(self, now: float) -> HostsVerdict | None:
        """How the job has ended; None while it goes on."""
        nodes = self._nodes.values()
        if self._closing is not None:
            return None if self._nodes else self._closing[0]
        if any(node.state in _THERE for node in nodes):
            self._ran_at = now
        elif now >= self._ran_at + self._patience_s:
            return HostsVerdict.NOBODY
        statuses = {node.status for node in nodes} - {None}
        if (
            any(node.state is not HostState.WAITING and not self._was_never_there(node) for node in nodes)
            or not statuses
        ):
            return None
        if statuses <= {FAILED, REFUSED}:
            return HostsVerdict.FAILED if FAILED in statuses else HostsVerdict.REFUSED
        return None

    @staticmethod
    def _was_never_there(node: _Node) -> bool:
        """Whether a host has had no node, and is called again: it is no reason to wait."""
        return node.state is HostState.CALLED and node.status is None and node.tries > 0
