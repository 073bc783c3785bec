"""When the membership machine must hear of the time, and of members that are missing."""

from __future__ import annotations

from math import inf

from ef_common.core import membership
from ef_common.core.membership import Membership, Settings
from ef_common.protocol.server_outputs import Probe

_PROBE_S = 0.1


class Ticks:
    """Lets the machine look once at each of its deadlines, and soon after arrivals, so that it sees several at once.

    ::

        resting → due   the newest deadline has come (`arm`); `arrived`, before the first view
        due → resting   `take`; `arm`, if the machine has another deadline by now

    Attributes:
        due: The newest deadline of the machine, until it is taken; inf for none.
        soon: The machine is to look as soon as what has come by now is processed.
    """

    def __init__(self) -> None:
        self.due = inf
        self.soon = False
        self._deadline: float | None = None

    def arm(self, state: Membership, settings: Settings) -> None:
        """The machine has decided."""
        deadline = membership.next_deadline(state, settings)
        if deadline != self._deadline:
            self._deadline = deadline
            self.due = inf if deadline is None else deadline

    def arrived(self, state: Membership) -> None:
        """A worker has come: the first view may be complete."""
        self.soon = self.soon or state.view is None

    def take(self, now: float) -> bool:
        """Whether the machine is to look now."""
        looks = self.soon or now >= self.due
        self.soon = False
        self.due = inf if now >= self.due else self.due
        return looks


class Probes:
    """While members are missing, asks now and then whether their processes still listen.

    ::

        idle → probing   `look`: some are missing
        probing → idle   `look`: none is

    Attributes:
        due: When to look again; inf while nobody is missing.
    """

    def __init__(self) -> None:
        self.due = inf

    def look(self, state: Membership, now: float) -> list[Probe]:
        """Look who is missing, after a decision or when it is time."""
        missing = membership.missing(state)
        self.due = now + _PROBE_S if missing else inf
        return [Probe(member) for member in missing if member.door]
