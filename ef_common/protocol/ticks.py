"""When the membership machine must hear of the time, and of members that are missing."""

from __future__ import annotations

from math import inf

from ef_common.core import membership
from ef_common.core.membership import Forming, Membership, Settings
from ef_common.protocol.server_outputs import Probe

_PROBE_S = 0.1
_SMALL_WORLD = 16
"""Up to so many workers, the machine looks as soon as one has come."""
_LOOK_S = 2e-5
"""Beyond that, it looks again after so long for each of them: N looks would cost the square of their number."""


class Ticks:
    """Lets the machine look once at each of its deadlines, and soon after arrivals, so that it sees several at once.

    ::

        resting → due   the newest deadline has come (`arm`); `arrived`, before the first view
        due → resting   `take`; `arm`, if the machine has another deadline by now

    Attributes:
        due: The newest deadline of the machine, until it is taken; inf for none.
        soon: When the machine is to look because workers have come; what has come by then is processed first.
    """

    def __init__(self) -> None:
        self.due = self.soon = inf
        self._looked_at = -inf
        self._deadline: float | None = None

    def arm(self, state: Membership, settings: Settings) -> None:
        """The machine has decided. If it is to look soon, its deadline, which takes time to find, is asked for then."""
        if self.soon < inf and isinstance(state, Forming):
            return
        deadline = membership.next_deadline(state, settings)
        if deadline != self._deadline:
            self._deadline = deadline
            self.due = inf if deadline is None else deadline

    def arrived(self, state: Membership, now: float) -> None:
        """A worker comes: the first view may be complete with it."""
        if state.view is None and self.soon == inf:
            num_workers = len(state.workers)
            self.soon = max(now, self._looked_at + (_LOOK_S * num_workers if num_workers > _SMALL_WORLD else 0.0))

    def take(self, now: float) -> bool:
        """Whether the machine is to look now."""
        looks = now >= min(self.soon, self.due)
        self.soon = inf if now >= self.soon else self.soon
        self.due = inf if now >= self.due else self.due
        self._looked_at = now if looks else self._looked_at
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
        return [Probe(member) for member in missing if member.liveness_port]
