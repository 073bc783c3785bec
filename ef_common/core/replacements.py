"""What a job remembers of the stragglers that it has had replaced, so that it never does so in a loop.

A *machine* is the address at which its workers are reached, because the name of a node is another one with each start.
Two rules follow from what is remembered:

* No more than `MOST_PER_HOUR` replacements are asked for in an hour.
* A worker that has come to a machine after a straggler of that machine was to be replaced is not replaced itself: the
  machine is slow then, not the worker. Those that were there before may be, once each. So workers of a job on one
  machine are replaced where they are, and each of them by one newcomer at most. After a day the machine is forgotten.

Times are epoch seconds, as other members and later starts go on with them. One in the future counts as now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ef_common.core.room import NO_DEMAND, Demand, Room
from ef_common.core.view import Member, View

MOST_PER_HOUR = 3
HOUR_S = 3600.0
DAY_S = 86_400.0
_MOST_MACHINES = 64


@dataclass(frozen=True, slots=True)
class SlowWorker:
    """A machine on which a straggler was to be replaced.

    Args:
        at: When that was last (epoch seconds).
        others: Ids of its other workers that were there before, and may still be replaced.
    """

    at: float
    others: frozenset[str]


@dataclass(frozen=True, slots=True)
class Replacements:
    """The replacements that were asked for lately.

    Args:
        asked: When (epoch seconds), the oldest first: those of the last hour, no more than can be of use.
        machines: The machines of their stragglers by address, the oldest first.
        demand: The newest demand that was looked at: a replacement begins with one.

    >>> first, second = Member("w0", "a-1", "10.0.0.1"), Member("w1", "b-1", "10.0.0.2")
    >>> before = Replacements().with_one(first, (first, second), 1000.0)
    >>> before.may_replace(Member("w2", "a-2", "10.0.0.1"), 1060.0), before.may_replace(second, 1060.0)
    (False, True)
    """

    asked: tuple[float, ...] = ()
    machines: Mapping[str, SlowWorker] = field(default_factory=dict)
    demand: Demand = NO_DEMAND

    def num_asked(self, now: float) -> int:
        """How many were asked for in the last hour."""
        return sum(now - at < HOUR_S for at in self.asked)

    def may_replace(self, member: Member, now: float) -> bool:
        """Whether a member may be replaced, by what has happened on its machine."""
        slow = self.machines.get(member.address)
        return slow is None or now - slow.at >= DAY_S or member.id in slow.others

    def candidate(self, room: Room, view: View, now: float) -> Member | None:
        """The straggler to replace, the slowest first; None if there is none."""
        members = {member.id: member for member in view.members}
        found = (members[worker] for worker in room.stragglers if worker in members)
        return next((member for member in found if self.may_replace(member, now)), None)

    def with_one(self, straggler: Member, members: tuple[Member, ...], now: float) -> Replacements:
        """A replacement is asked for now.

        Args:
            straggler: For whom.
            members: Those of the view.
            now: Epoch seconds.
        """
        machine = straggler.address
        others = {member.id for member in members if member.address == machine and self.may_replace(member, now)}
        machines = {name: slow for name, slow in self.machines.items() if now - slow.at < DAY_S and name != machine}
        machines[machine] = SlowWorker(now, frozenset(others - {straggler.id}))
        return replace(
            self,
            asked=(*(min(at, now) for at in self.asked if now - at < HOUR_S), now)[-MOST_PER_HOUR:],
            machines=dict(list(machines.items())[-_MOST_MACHINES:]),
        )

    def heard(self, demand: Demand) -> Replacements:
        """A demand was looked at."""
        return replace(self, demand=demand) if demand > self.demand else self

    def after(self, room: Room, view: View, now: float) -> Replacements:
        """What another member remembers when it hears of the newest demand, so that it can go on as rank 0.

        A replacement begins with a demand for the nodes that are there. The newcomer may have come since. Who asks for
        a node less while there are stragglers lets the slowest go, which counts as well, to be on the safe side.
        """
        if room.demand <= self.demand:
            return self
        news = self.heard(room.demand)
        straggler = self.candidate(room, view, now)
        if straggler is None or not room.wanted <= room.nodes <= room.wanted + 1:
            return news
        return news.with_one(straggler, view.members, now)

    # ------------------------------------------------------------ plain data

    def to_plain(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return {
            "asked": list(self.asked),
            "machines": {name: [slow.at, *sorted(slow.others)] for name, slow in self.machines.items()},
            "demand": list(self.demand),
        }

    @classmethod
    def from_plain(cls, value: Any, *, now: float) -> Replacements:
        """Of plain data.

        Raises:
            KeyError, TypeError, ValueError: It is none.
        """
        return cls(
            tuple(min(float(at), now) for at in value["asked"])[-MOST_PER_HOUR:],
            {
                str(name): SlowWorker(min(float(at), now), frozenset(map(str, ids)))
                for name, (at, *ids) in dict(value["machines"]).items()
            },
            Demand(*map(int, value["demand"])),
        )
