"""Who founds a job whose agents know where others of them listen: a pure rule, for agents that share no storage.

A *door* is an address at which an agent of the job listens. Each agent that looks for the job asks all doors that it
knows, over and over. Whoever leads, or knows who leads, says so, and is followed. Otherwise the first door of those
that have answered in the last `FRESH_S` is the candidate, unless it has done nothing about it for `DEFER_S`. It founds
the job with the support of a majority of the doors:

1. *Promise.* The candidate asks for promises, and counts each of them for `FRESH_S`.
2. *Commit.* With those of a majority it asks for commits, and leads as soon as a majority has committed itself at the
   same time. It remains the candidate until then, because it may have commits of which it does not know.

An agent has two parts. :class:`Supporter` is asked, and supports one candidate at a time; :class:`Seeker` asks.

Two majorities of the same doors have one in common, and it commits itself once: a job is founded a second time only if
so many of those that had committed themselves have ended since that the others are no majority, and nobody who knows of
the job can be asked. Doors that an agent learns from a name server may differ from those of another agent for a while.
So they count only when they have not changed for `SETTLED_S`, and each agent adds those of all who have asked it, or
anybody whom it asks, in the last `LATELY_S`. Doors that are told in a file have one more rule
(:mod:`ef_common.core.door_list`).

Cost: while nobody leads, a round of N agents is N² short conversations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

PROMISE_S = 15.0
"""How long a promise lasts that is not renewed."""
FRESH_S = 5.0
"""How long a candidate counts an answer, from the moment in which it has asked."""
SETTLED_S = 2.0
"""How long the doors that a name stands for must have been the same."""
LATELY_S = 5.0
"""How long whoever has asked is known for it."""
DEFER_S = 30.0
"""How long an agent leaves the job to another one that comes before it, and answers, and does not ask for support: that
one may not know, and never learn, that it may found the job."""
MAX_DOORS = 1024
"""How many of those that have asked are kept."""
LOOK, PROMISE, COMMIT = "look", "promise", "commit"
"""What an agent wants of another one: only to know who leads, or its support."""


@dataclass(frozen=True, slots=True)
class DoorAnswer:
    """An agent's answer.

    Args:
        leads: Its coordinator leads the job.
        over: The training is over.
        leader: Where the leader is, as far as it knows or has committed itself; "" for nowhere.
        promised: The door of the candidate that it supports; "" for none.
        granted: The one that asks has got what it wants.
        doors: Of those that have asked it lately.
    """

    leads: bool = False
    over: bool = False
    leader: str = ""
    promised: str = ""
    granted: bool = False
    doors: tuple[str, ...] = ()


class Support(Enum):
    """Whom an agent supports."""

    FREE = auto()  # nobody
    PROMISED = auto()  # a candidate, for a while
    COMMITTED = auto()  # a candidate, until this process ends
    FOLLOWING = auto()  # the leader


class Supporter:
    """The part of an agent that is asked.

    ::

        FREE → PROMISED         `hear`: a candidate asks for a promise or a commit
        PROMISED → FREE         the candidate has not renewed the promise for `PROMISE_S`
        PROMISED → COMMITTED    `hear`: the same candidate asks for a commit
        FREE → FOLLOWING        `follow`
        PROMISED → FOLLOWING    likewise
        COMMITTED → FOLLOWING   likewise: perhaps another one leads by now

    Whoever is committed, or follows, answers that the candidate or the leader leads the job.

    Example:
        >>> supporter = Supporter()
        >>> supporter.hear("node-1", "h1:29400", PROMISE, 0.0).granted
        True
        >>> supporter.hear("node-2", "h2:29400", PROMISE, 1.0).promised
        'h1:29400'
        >>> supporter.hear("node-1", "h1:29400", COMMIT, 2.0).granted
        True
        >>> supporter.hear("node-2", "h2:29400", PROMISE, 1000.0).leader
        'h1:29400'
    """

    def __init__(self) -> None:
        self._promised = ("", "")  # candidate, and its door
        self._until = 0.0
        self._founder = ("", "")  # likewise
        self._leader = ""
        self._asked: dict[str, float] = {}

    def hear(self, candidate: str, door: str, wish: str, now: float) -> DoorAnswer:
        """Somebody asks.

        Args:
            candidate: Its name, which no other process has.
            door: Its door; "" if it has none.
            wish: What it wants.
            now: Time of a monotonic clock, in seconds.
        """
        self._asked = {one: when for one, when in self._asked.items() if now - when < LATELY_S}
        if door and (door in self._asked or len(self._asked) < MAX_DOORS):
            self._asked[door] = now
        supports = self._promised[0] if now < self._until else ""
        is_bound = self.support(now) in (Support.COMMITTED, Support.FOLLOWING)
        if door and wish != LOOK and not is_bound and supports in ("", candidate):
            if wish == COMMIT and supports:
                self._founder = (candidate, door)
            self._promised, self._until = (candidate, door), now + PROMISE_S
            supports = candidate
        granted = wish != LOOK and candidate == (self._founder[0] if self.leader or wish == COMMIT else supports)
        promised = self._promised[1] if supports else ""
        return DoorAnswer(leader=self.leader, promised=promised, granted=granted, doors=tuple(self._asked))

    def support(self, now: float) -> Support:
        """Whom it supports."""
        if self._leader:
            return Support.FOLLOWING
        if self._founder[1]:
            return Support.COMMITTED
        return Support.PROMISED if now < self._until else Support.FREE

    def follow(self, leader: str) -> None:
        """This agent follows the one that leads at this address."""
        self._leader = leader

    @property
    def leader(self) -> str:
        """Where the job is led, as far as is known here."""
        return self._leader or self._founder[1]


@dataclass(frozen=True, slots=True)
class DoorHeard:
    """An answer that has come.

    Args:
        answer: The answer.
        asked_at: When the question was sent.
    """

    answer: DoorAnswer
    asked_at: float


@dataclass(frozen=True, slots=True)
class FollowDoor:
    """The job is led there."""

    door: str


@dataclass(frozen=True, slots=True)
class Lead:
    """This agent has founded the job."""


@dataclass(frozen=True, slots=True)
class JobIsOver:
    """The training is over: there is nothing to do."""


@dataclass(frozen=True, slots=True)
class WaitForDoors:
    """Ask again.

    Args:
        why: What this agent waits for.
        bound: It has committed itself, so it can do nothing but wait.
    """

    why: str
    bound: bool = False


Decision = FollowDoor | Lead | JobIsOver | WaitForDoors


class Seeker:
    """The part of an agent that asks, until it knows what to do.

    ::

        LOOK → PROMISE       it is the candidate: its door is the first that answers, and nobody names a leader
        PROMISE → LOOK       it is the candidate no more
        PROMISE → COMMIT     a majority has promised to support it
        COMMIT → Lead        a majority has committed itself
        LOOK → FollowDoor    a door leads the job, or an address that was named
        PROMISE → FollowDoor likewise
        COMMIT → FollowDoor  likewise
        LOOK → JobIsOver     somebody says that the training is over
        PROMISE → JobIsOver  likewise
        COMMIT → JobIsOver   likewise

    Args:
        settle_s: How long the doors must have been the same before they count.

    Attributes:
        wish: What to ask for next.

    Example:
        >>> seeker, supporter = Seeker(), Supporter()
        >>> def look(now):
        ...     answer = supporter.hear("node-1", "h1:1", seeker.wish, now)
        ...     return seeker.decide("h1:1", ["h1:1"], {"h1:1": DoorHeard(answer, now)}, now)
        >>> [type(look(now)).__name__ for now in (0.0, 0.5, 1.0)]
        ['WaitForDoors', 'WaitForDoors', 'Lead']
    """

    def __init__(self, *, settle_s: float = 0.0) -> None:
        self.wish = LOOK
        self._settle_s = settle_s
        self._doors: tuple[str, ...] = ()
        self._own = ""
        self._since = 0.0
        self._answered: dict[str, float] = {}  # when each has answered last
        self._idle_since: dict[str, float] = {}  # since when each answers, and does not ask for support

    def decide(self, own: str, doors: Sequence[str], answers: Mapping[str, DoorHeard], now: float) -> Decision:
        """What to do after a round.

        Args:
            own: The door of this agent, which it asks like the others; "" if it has none, or must not found the job.
            doors: All that are known, in an order that all agents agree on.
            answers: Those that have come, also from addresses that are no doors.
            now: Time of a monotonic clock, in seconds.
        """
        if (own, tuple(doors)) != (self._own, self._doors):  # whoever may found the job has asked all of them for long
            self._own, self._doors, self._since = own, tuple(doors), now
        said = {door: heard.answer for door, heard in answers.items()}
        if any(answer.over for answer in said.values()):
            return JobIsOver()
        for door in (*doors, *said):
            if door in said and said[door].leads:
                return FollowDoor(door)
        named = sorted({answer.leader for answer in said.values() if answer.leader})
        if self.wish == COMMIT:
            is_founder = own and self._is_supported(answers, now)
            return Lead() if is_founder else WaitForDoors(self._what_lacks(said), bound=True)
        self._answered |= dict.fromkeys(said, now)
        first = self._first(own, said, now)
        if named or not first or first != own or not self._is_settled(now):
            self.wish = LOOK
            return self._wait_for(named, first, said, own)
        self.wish = COMMIT if self.wish == PROMISE and self._is_supported(answers, now) else PROMISE
        return WaitForDoors(self._what_lacks(said))

    def _first(self, own: str, said: Mapping[str, DoorAnswer], now: float) -> str:
        """The first door that has answered lately; those are passed over that have stood idle for long."""
        if not own:
            self._idle_since = {}
        for door in self._doors:
            has_answered = now - self._answered.get(door, -inf) <= FRESH_S
            if has_answered and (own in ("", door) or not self._is_idle(door, said, now)):
                return door
        return ""

    def _is_idle(self, door: str, said: Mapping[str, DoorAnswer], now: float) -> bool:
        if door in said and said[door].promised == door:
            self._idle_since.pop(door, None)
            return False
        return now - self._idle_since.setdefault(door, now) >= DEFER_S

    def _is_supported(self, answers: Mapping[str, DoorHeard], now: float) -> bool:
        supporters = [
            door
            for door in self._doors
            if door in answers and answers[door].answer.granted and now - answers[door].asked_at <= FRESH_S
        ]
        return self._is_settled(now) and is_majority(len(supporters), len(self._doors))

    def _is_settled(self, now: float) -> bool:
        return now - self._since >= self._settle_s

    # ------------------------------------------------------------ words

    def _wait_for(self, named: list[str], first: str, said: Mapping[str, DoorAnswer], own: str) -> WaitForDoors:
        if named:
            bound = own in said and bool(said[own].leader)
            return WaitForDoors(
                f"the job is led from {_list(named)}, as others say, but nobody there confirms it", bound
            )
        if own and own not in self._doors:
            return WaitForDoors(f"the name does not stand for this machine ({own}), but for {_list(self._doors)}")
        if not first:
            return WaitForDoors(f"nobody answers at {_list(self._doors)}")
        if first == own:
            return WaitForDoors(self._what_lacks(said))
        return WaitForDoors(f"{first} is to start the job{self._silent(said)}")

    def _what_lacks(self, said: Mapping[str, DoorAnswer]) -> str:
        number = len(self._doors)
        return f"this agent is to start the job as soon as {number // 2 + 1} of {number} support it{self._silent(said)}"

    def _silent(self, said: Mapping[str, DoorAnswer]) -> str:
        silent = [door for door in self._doors if door not in said]
        return f"; no answer from {_list(silent)}" if silent else ""


def is_majority(number: int, total: int) -> bool:
    """Whether so many are more than half."""
    return 2 * number > total


def _list(doors: Sequence[str]) -> str:
    more = f" and {len(doors) - 8} more" if len(doors) > 8 else ""
    return (", ".join(doors[:8]) or "any address") + more
