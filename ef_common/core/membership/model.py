"""The data types of the membership: the coordinator's state, the events, and the actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from ef_common.core.quorum import NO_STORES, Bid, Link, Stores
from ef_common.core.view import Member, View


class Phase(Enum):
    """The phase of a connected worker."""

    EARLY = "early"  # waits in its set-up for the first view
    WARMING = "warming"  # arrived after the first view, does its slow work
    READY = "ready"  # warm, waits at its first boundary
    MEMBER = "member"  # in the view
    LEAVING = "leaving"  # in the view, asked to leave at the next boundary


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the membership; durations in seconds.

    Args:
        min_nodes: Fewer nodes than this do not train.
        max_nodes: More nodes than this wait as spares.
        last_call_s: How long the first view waits for more nodes after the last arrival.
        start_nodes: Number of nodes expected at the start; the first view waits for no more.
        loss_notice_s: Within this time a lost worker is noticed for sure (the heartbeat timeout, and slack).
        on_minority: Without a quorum "wait" for it, or "continue", and risk that others do so too.
        port: That of this coordinator; it is the standby of the workers of its node.
    """

    min_nodes: int = 1
    max_nodes: int = 1_000_000
    last_call_s: float = 1.0
    start_nodes: int | None = None
    loss_notice_s: float = 2.5
    on_minority: str = "wait"
    port: int = 0

    @property
    def patience_s(self) -> float:
        """How long a coordinator waits for a quorum before it steps down."""
        return 2.0 * self.loss_notice_s


Known = Mapping[tuple[int, ...], tuple[int, tuple[Link, ...]]]
"""The settled generation and the chain of workers; those that know the same views, as the same objects, share one."""


@dataclass(frozen=True, slots=True)
class Membership:
    """State of the coordinator. ``view`` is None before the first view and after the loss of all members."""

    generation: int = 0
    admitted_at: int = 0
    view: View | None = None
    workers: Mapping[str, tuple[Member, Phase]] = field(default_factory=lambda: MappingProxyType({}))
    at_boundary: frozenset[str] = frozenset()
    settled: frozenset[str] = frozenset()
    suspects: frozenset[str] = frozenset()
    suspected_at: float | None = None
    last_arrival: float = 0.0
    announced: bool = False
    training: int = 1  # of the members' program: the one that they are in, or came to last
    ready_for: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))  # the training of the ready ones
    # Of newcomers: the training that they were told to go to. What they say of earlier ones was on its way by then.
    skipped: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    closed: bool = False
    dismissed: frozenset[str] = frozenset()  # newcomers that are told to end, still connected
    last: frozenset[str] = frozenset()  # members that have left together, and were the last, still connected
    chain: tuple[Link, ...] = ()  # see `quorum`
    based: bool = True
    gone: frozenset[str] = frozenset()  # likewise, of the members of the chain
    dead: frozenset[str] = frozenset()  # so it seems: they are not waited for
    idle: bool = False  # a standby to which no member has come
    contested: bool = False  # others may lead, or look for a quorum
    contested_at: float = 0.0  # when that was seen last
    gathering_since: float | None = None
    returned: Mapping[str, Returned] = field(default_factory=lambda: MappingProxyType({}))
    known: Known = field(default_factory=lambda: MappingProxyType({}))  # what those who have returned know
    straggler: str = ""  # a member that is to be replaced as soon as a spare is ready
    replacement: str = ""  # who has come in its place, when it only has to go yet
    held: str = ""  # why a view is held back
    held_since: float | None = None
    failed: str = ""  # whose exception has ended the job, and which
    stores: Stores = NO_STORES
    asked: Mapping[Bid, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))  # who tries to get it
    last_resort: bool = False  # a view is held back for so long that few may go on


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Arrived:
    """A worker has connected and proved that it knows the token."""

    member: Member


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker has finished its slow work and waits at its first boundary, in this training of its program."""

    worker: str
    training: int = 1


@dataclass(frozen=True, slots=True)
class Begun:
    """A member's program has come to another training."""

    worker: str
    training: int


@dataclass(frozen=True, slots=True)
class AtBoundary:
    """A member waits at the boundary that all members agreed on in the view of `generation`."""

    worker: str
    generation: int


@dataclass(frozen=True, slots=True)
class Challenged:
    """Another coordinator gathers members, too, but this one takes precedence."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A member has built the group of the view of `generation`, and owes nobody anything."""

    worker: str
    generation: int


@dataclass(frozen=True, slots=True)
class Suspected:
    """A member's group of `generation` broke."""

    worker: str
    generation: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """A member wants to leave at a boundary."""

    worker: str


@dataclass(frozen=True, slots=True)
class Straggler:
    """A member is slower than the others and shall be replaced by a spare; "" if no member is slower."""

    worker: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A member's program ends, after all its trainings have ended; nobody can join any more."""

    worker: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A worker's process ended its connection, or (`goodbye`) ended normally.

    `silent`: all that is known is that its line broke, or that it has gone to another coordinator.
    """

    worker: str
    why: str
    goodbye: bool = False
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Silent:
    """These workers are silent. They are lost together, since this coordinator may be the one that is cut off."""

    workers: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Returned:
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
    """

    member: Member
    phase: Phase
    promised: int = 0
    settled: int = 0
    received: tuple[Link, ...] = ()
    at_boundary: bool = False
    suspects: bool = False
    closed: bool = False
    failed: str = ""
    store: str | None = None
    training: int = 1


@dataclass(frozen=True, slots=True)
class Stored:
    """A member reports the store that all members have agreed on: a digest of its marker, or "" for none."""

    worker: str
    store: str


@dataclass(frozen=True, slots=True)
class Claimed:
    """A member has tried to acquire a claim and knows whom it names."""

    worker: str
    claim: str
    named: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Nobody listens where this worker's process did. It seems to be dead, unless others answer in its place."""

    worker: str


@dataclass(frozen=True, slots=True)
class Outranked:
    """Another coordinator also gathers members and takes precedence, or it `leads`."""

    leads: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Failed:
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
class FailedElsewhere:
    """Another coordinator knows that the job has failed, and why."""

    why: str


Event = (
    Arrived
    | Ready
    | Begun
    | AtBoundary
    | Settled
    | Suspected
    | Leaving
    | Straggler
    | Closed
    | Gone
    | Silent
    | Returned
    | Stored
    | Claimed
    | Refused
    | Outranked
    | Challenged
    | FailedElsewhere
    | Tick
    | Failed
)


# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Welcome:
    """Tell a worker how to start: to warm up (the job already runs), or to wait for the first view.

    `training`: the one that the members are in, so that a newcomer's program passes over those before it.
    """

    worker: str
    warm_up: bool
    training: int = 1


@dataclass(frozen=True, slots=True)
class Install:
    """Send the view to its members and to the workers that it drops (they leave or are evicted)."""

    view: View
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the members of this view that a change is pending."""

    view: View


@dataclass(frozen=True, slots=True)
class Skip:
    """Tell a newcomer that the members are in this training: its program passes over those before it."""

    worker: str
    training: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Tell a worker that the job has ended."""

    worker: str


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Tell a worker that the others continue without it."""

    worker: str
    why: str


@dataclass(frozen=True, slots=True)
class Redirect:
    """Tell a worker that this coordinator is a standby, and where the coordinator is."""

    worker: str


@dataclass(frozen=True, slots=True)
class Republish:
    """Tell the other members of this view that a member is back, and may lack what they have published to it.

    Args:
        view: The view.
        worker: The member.
    """

    view: View
    worker: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Tell the members of this view that it continues under this coordinator."""

    view: View


@dataclass(frozen=True, slots=True)
class StepDown:
    """End all connections: nothing more is decided here until members come again."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Tell a worker that the job has failed."""

    worker: str
    why: str


@dataclass(frozen=True, slots=True)
class Claim:
    """Let a worker try to acquire a claim for these members."""

    worker: str
    bid: Bid


@dataclass(frozen=True, slots=True)
class Agree:
    """Tell the members of this view that all of them have the same store."""

    view: View


@dataclass(frozen=True, slots=True)
class Resign:
    """Ask a member to leave, because it is replaced."""

    worker: str


Action = (
    Welcome
    | Install
    | Announce
    | Skip
    | Finish
    | Dismiss
    | Redirect
    | Republish
    | Resume
    | StepDown
    | Abort
    | Claim
    | Agree
    | Resign
)
Decision = tuple[Membership, tuple[Action, ...], str]
