"""What may happen: the events of the membership machine."""

from __future__ import annotations

from dataclasses import dataclass

from ef_common.core.membership.phase import Phase
from ef_common.core.quorum import ChainLink
from ef_common.core.room import NO_DEMAND, Demand
from ef_common.core.view import Member


class Event:
    """Base of all events."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Arrived(Event):
    """A worker has connected and proved that it knows the token."""

    member: Member


@dataclass(frozen=True, slots=True)
class Ready(Event):
    """A worker has finished its slow work and waits at its first boundary, in this training of its program."""

    worker: str
    training: int = 1


@dataclass(frozen=True, slots=True)
class Begun(Event):
    """A member's program has come to another training."""

    worker: str
    training: int


@dataclass(frozen=True, slots=True)
class AtBoundary(Event):
    """A member waits at the boundary that all members agreed on in the view of `generation`."""

    worker: str
    generation: int


@dataclass(frozen=True, slots=True)
class Challenged(Event):
    """Another coordinator gathers members, too, but this one takes precedence."""


@dataclass(frozen=True, slots=True)
class Settled(Event):
    """A member has built the group of the view of `generation`, and owes nobody anything."""

    worker: str
    generation: int


@dataclass(frozen=True, slots=True)
class Suspected(Event):
    """A member's group of `generation` broke."""

    worker: str
    generation: int


@dataclass(frozen=True, slots=True)
class Leaving(Event):
    """A member wants to leave at a boundary."""

    worker: str


@dataclass(frozen=True, slots=True)
class Straggler(Event):
    """A member is slower than the others and shall be replaced by a spare; "" if no member is slower."""

    worker: str


@dataclass(frozen=True, slots=True)
class Slow(Event):
    """These members are slower than the others, the slowest first."""

    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wanted(Event):
    """Rank 0 tells how many nodes the members want."""

    worker: str
    demand: Demand


@dataclass(frozen=True, slots=True)
class Closed(Event):
    """A member's program ends, after all its trainings have ended; nobody can join any more."""

    worker: str


@dataclass(frozen=True, slots=True)
class Gone(Event):
    """A worker's process ended its connection, or (`goodbye`) ended normally.

    `silent`: all that is known is that its connection broke, or that it has gone to another coordinator.
    """

    worker: str
    why: str
    goodbye: bool = False
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Silent(Event):
    """These workers are silent. They are lost together, since this coordinator may be the one that is cut off."""

    workers: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Returned(Event):
    """A worker of another coordinator has come, or one of ours has come back after losing its connection.

    Args:
        member: The worker.
        phase: Where it stood: MEMBER, LEAVING, WARMING or READY.
        promised: The highest generation that it knows of.
        settled: The newest generation in which it has settled; 0 for none.
        received: The view of that generation and those that it has received since.
        at_boundary: Whether it waits at the boundary of the newest of them.
        suspects: The group of the newest of them broke.
        closed: Its program ends.
        failed: Its own code has raised this.
        store: Its store (see :class:`Stored`), or None if it has not told.
        training: A member's newest training; the one that a newcomer is ready for.
        demand: The newest that it knows (see :class:`Wanted`).
    """

    member: Member
    phase: Phase
    promised: int = 0
    settled: int = 0
    received: tuple[ChainLink, ...] = ()
    at_boundary: bool = False
    suspects: bool = False
    closed: bool = False
    failed: str = ""
    store: str | None = None
    training: int = 1
    demand: Demand = NO_DEMAND


@dataclass(frozen=True, slots=True)
class Stored(Event):
    """A member reports the store that all members have agreed on: a digest of its marker, or "" for none."""

    worker: str
    store: str


@dataclass(frozen=True, slots=True)
class Claimed(Event):
    """A member has tried to acquire a claim and knows whom it names."""

    worker: str
    claim: str
    named: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refused(Event):
    """Nobody listens where this worker's process did. It seems to be dead, unless others answer in its place."""

    worker: str


@dataclass(frozen=True, slots=True)
class Outranked(Event):
    """Another coordinator also gathers members and takes precedence, or it `leads`."""

    leads: bool = False


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """The user's code has raised an exception in a worker; an agent, which is not a worker, may report it.

    Args:
        worker: The reporting worker.
        why: Worker, node and exception, in one line.
        fatal: Whether it ends the job, whoever raised it.
    """

    worker: str
    why: str
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class FailedElsewhere(Event):
    """Another coordinator knows that the job has failed, and why."""

    why: str
