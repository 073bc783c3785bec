"""New jobs that come together are decided on together.

Otherwise each of them would take all that is free, and soon give most of it back to those that come after it. A job
that comes alone waits for nobody. Of several, all wait until no other one has come for a moment, but not for ever.

To the rule (:func:`ef_common.core.cluster.decide`), a job that waits is one that has not been created yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

QUIET_S = 0.5
"""New jobs wait until no other one has come for so long."""
PATIENCE_S = 2.0
"""No job waits longer."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The jobs that have come lately. Times are in seconds, of a clock that is never set back.

    Args:
        waiting: Jobs (uid) that wait for others.
        known: New jobs (uid) that had come when this was found out.
        since: When the first one of those that wait came.
        last: When any job came last.
    """

    waiting: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    since: float = 0.0
    last: float = float("-inf")

    @property
    def until(self) -> float:
        """When those that wait are decided on, if no other job comes."""
        return min(self.last + QUIET_S, self.since + PATIENCE_S)


def arrive(before: Arrivals, new: frozenset[str], now: float) -> Arrivals:
    """Who waits now.

    Args:
        before: What was found out the last time.
        new: All jobs (uid) on which nobody has decided yet, those that have been waiting included.
        now: Time in seconds.
    """
    came, waiting = new - before.known, before.waiting & new
    is_alone = len(came) == 1 and not waiting and now >= before.last + QUIET_S
    after = Arrivals(
        waiting=waiting if is_alone else waiting | came,
        known=new,
        since=before.since if waiting else now,
        last=now if came else before.last,
    )
    return after if now < after.until else replace(after, waiting=frozenset())
