"""Who founds a job that has a name: a pure rule, for agents that share a place with exclusive creation.

A job is started for the n-th time by whoever creates the record of that start, which only one agent can. The agent that
leads leaves signs of life there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

BEAT_S = 3.0
"""How often the leader leaves a sign of life."""
LEASE_S = 15.0
"""A start without a sign of life for this long has ended; measured by whoever waits, so clocks need not agree."""
FINISHED, LEFT = "finished", "left"
"""How a start has ended: the training is over, or all workers were told to go."""


@dataclass(frozen=True, slots=True)
class Start:
    """What is recorded of a start.

    Args:
        number: Counted from 1.
        beats: Signs of life so far.
        end: How it has ended; "" if that is not known.
    """

    number: int
    beats: int = 0
    end: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """Make this start, unless somebody else does."""

    number: int


@dataclass(frozen=True, slots=True)
class FollowStart:
    """Somebody leads this start."""

    number: int


@dataclass(frozen=True, slots=True)
class Over:
    """The training is over: there is nothing to do."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Look again. A leader may be about to come, or is cut off from here, or has ended.

    Args:
        signs: Whether there has been a sign of life since the first look.
    """

    signs: bool


Decision = Found | FollowStart | Over | Wait


class FoundingState(Enum):
    """What an agent does that comes to a job."""

    LOOKING = auto()  # it knows of no leader that does not answer
    WAITING = auto()  # it watches the signs of life of a leader that does not answer


class Founding:
    """An agent that comes to a job, and looks until it knows what to do.

    ::

        LOOKING → Found         there is no start, or the newest one has ended as its leader has said
        LOOKING → Over          the training is over
        LOOKING → FollowStart   the leader of the newest start answers
        LOOKING → WAITING       it does not
        WAITING → Found         the newest start has ended, or its leader has left no sign of life for `LEASE_S`
        WAITING → Over          the training is over
        WAITING → FollowStart   the leader answers

    Example:
        >>> founding = Founding()
        >>> founding.decide(None, answered=False, now=0.0)
        Found(number=1)
        >>> founding.decide(Start(1), answered=False, now=1.0), founding.decide(Start(1), answered=False, now=16.0)
        (Wait(signs=False), Found(number=2))
    """

    def __init__(self) -> None:
        self._seen: Start | None = None
        self._since = 0.0
        self._signs = False

    @property
    def state(self) -> FoundingState:
        """What it does."""
        return FoundingState.LOOKING if self._seen is None else FoundingState.WAITING

    def decide(self, start: Start | None, *, answered: bool, now: float) -> Decision:
        """What to do.

        Args:
            start: The newest start on record; None if there is none.
            answered: Whether its leader has answered.
            now: Time of a monotonic clock, in seconds, taken before the record was read.
        """
        if start is None:
            return Found(1)
        if start.end == FINISHED:
            return Over()
        if start.end:  # also if its leader still answers: it is about to end
            return Found(start.number + 1)
        if answered:
            return FollowStart(start.number)
        if start != self._seen:
            self._signs = self._seen is not None
            self._seen, self._since = start, now
        if now - self._since >= LEASE_S:
            return Found(start.number + 1)
        return Wait(self._signs)
