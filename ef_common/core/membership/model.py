"""The states of the membership machine; the package's head shows what leads from one to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from types import MappingProxyType
from typing import Any, TypeVar

from ef_common.core.membership.actions import Action
from ef_common.core.membership.events import Returned
from ef_common.core.membership.phase import Workers
from ef_common.core.quorum import NO_STORES, Bid, ChainLink, Stores
from ef_common.core.room import NO_DEMAND, Demand
from ef_common.core.view import View


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
        gathering_s: So long, for each member, losses are gathered that follow a view which has not come about yet; 0
            for not at all.
    """

    min_nodes: int = 1
    max_nodes: int = 1_000_000
    last_call_s: float = 1.0
    start_nodes: int | None = None
    loss_notice_s: float = 2.5
    on_minority: str = "wait"
    port: int = 0
    gathering_s: float = 2e-5

    @property
    def patience_s(self) -> float:
        """How long a coordinator waits for a quorum before it steps down."""
        return 2.0 * self.loss_notice_s


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
Known = Mapping[tuple[int, ...], tuple[int, tuple[ChainLink, ...]]]
"""The settled generation and the chain of workers; those that know the same views, as the same objects, share one."""
NOTHING: Mapping[Any, Any] = MappingProxyType({})
NOBODY: frozenset[str] = frozenset()


def _nothing() -> Mapping[Any, Any]:
    return NOTHING


def extended(known: Mapping[_Key, _Value], more: dict[_Key, _Value]) -> Mapping[_Key, _Value]:
    """A mapping that has more entries, or others in place of some.

    N workers that report one after the other cost N copies. A proxy copies its whole dictionary at once, which takes
    some nanoseconds an entry; ``{**known, **more}`` would ask it for each key.
    """
    known = copied(known)
    known.update(more)
    return MappingProxyType(known)


def copied(known: Mapping[_Key, _Value]) -> dict[_Key, _Value]:
    """A copy that may be changed."""
    return known | {} if isinstance(known, MappingProxyType) else {**known}


@dataclass(frozen=True, slots=True)
class Replacement:
    """A member that is to be replaced as soon as a spare is ready, and who has come, when it only has to go yet."""

    straggler: str = ""
    spare: str = ""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a view is held back."""

    why: str
    since: float = inf  # noted by `takeover.try_again`, at the end of the same decision
    last_resort: bool = False  # it lasts for so long that few may go on
    asked: Mapping[Bid, tuple[str, ...]] = field(default_factory=_nothing)  # who tries to get each missing claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Base of the states, and what all of them answer; the package's head shows what leads from one to another.

    Attributes:
        generation: The highest that a worker may know of.
        workers: Those that are connected and count.
        view: The view; None without members.
        chain: The views that a quorum counts in (:mod:`ef_common.core.quorum`).
        closed: The program of a member has ended.
        held: Why a view is held back; "" if none is.
        failed: Whose exception has ended the job, and which.
    """

    generation: int = 0

    @property
    def workers(self) -> Workers:
        return NOTHING

    @property
    def view(self) -> View | None:
        return None

    @property
    def chain(self) -> tuple[ChainLink, ...]:
        return ()

    @property
    def closed(self) -> bool:
        return False

    @property
    def held(self) -> str:
        return ""

    @property
    def failed(self) -> str:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle(Membership):
    """A standby to which no member has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Membership):
    """An exception has ended the job."""

    failed: str = field()


@dataclass(frozen=True, slots=True, kw_only=True)
class Active(Membership):
    """Base of the states in which workers are connected."""

    workers: Workers = field(default_factory=_nothing)
    training: int = 1  # of the members' program: the one that they are in, or came to last
    last_arrival: float = 0.0
    closed: bool = False
    dismissed: frozenset[str] = NOBODY  # workers that are told to end, still connected
    gone: frozenset[str] = NOBODY  # see `quorum`; of the members of the chain
    dead: frozenset[str] = NOBODY  # so it seems: they are not waited for
    stores: Stores = NO_STORES
    demand: Demand = NO_DEMAND  # how many nodes the members want


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering(Active):
    """Members of another coordinator come."""

    since: float = field()
    returned: Mapping[str, Returned] = field(default_factory=_nothing)
    known: Known = field(default_factory=_nothing)  # what those who have returned know
    knowing: Mapping[tuple[int, ...], int] = field(default_factory=_nothing)  # how many of them know it
    out: frozenset[str] = NOBODY  # who is gone, as some view says that somebody has known
    smallest: int = 0  # of these views


@dataclass(frozen=True, slots=True, kw_only=True)
class Leading(Active):
    """Base of the states in which the coordinator issues views."""

    chain: tuple[ChainLink, ...] = ()
    based: bool = True  # likewise see `quorum`
    contested_at: float | None = None  # when it was seen last that others may lead, or look for a quorum


@dataclass(frozen=True, slots=True, kw_only=True)
class Forming(Leading):
    """There are no members: before the first view, and after all have gone."""

    held: str = ""
    last: frozenset[str] = NOBODY  # members that have left together, and were the last, still connected


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving(Leading):
    """There is a view. What its members tell of it is forgotten with the next one."""

    view: View = field()
    announced: bool = False  # that a change is pending
    at_boundary: frozenset[str] = NOBODY
    settled: frozenset[str] = NOBODY
    suspects: Mapping[str, float] = field(default_factory=_nothing)  # and since when each of them does
    replacement: Replacement = Replacement()
    slow: tuple[str, ...] = ()  # the stragglers, the slowest first
    asked: frozenset[str] = NOBODY  # to leave, by us
    shortage: Shortage | None = None
    due: float = inf  # when the view without those who are lost is issued; inf if nobody is, or it is held back
    why: str = ""  # the first of them is lost

    @property
    def held(self) -> str:
        return "" if self.shortage is None else self.shortage.why


Decision = tuple[Membership, tuple[Action, ...], str]
"""The state after, the actions to carry out in order, and the reason."""

AnyActive = TypeVar("AnyActive", bound=Active)


def carry_over(state: Active) -> dict[str, Any]:
    """What a new view, or the end of one, leaves as it is: the fields that are not those of one state alone."""
    base = Leading if isinstance(state, Leading) else Active
    return {one.name: getattr(state, one.name) for one in fields(base)}
