"""Feeds the real `judge` with the members' progress, and acts on its verdicts."""

from __future__ import annotations

from collections.abc import Callable

from ef_common.core.membership import Membership, is_at_work
from ef_common.core.progress import Heard, Limits, Longest, Progress, judge
from ef_common.core.view import View
from ef_common.testing.simulation.scheduler import Scheduler

BEAT_S = 0.5
LOOK_S = 0.25
FRESH_S = 2.0
GRACE_S = 2.0
"""So long a worker that is told that it hung may take to come back."""
HUNG = "hung"


class Watch:
    """Looks at the members now and then.

    Args:
        scheduler: The clock.
        limits: Who is taken for hung.
        evict: Called with a member and the reason.
        renew: Called with the reason when all wait, and none is to blame.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        limits: Limits,
        evict: Callable[[str, str], None],
        renew: Callable[[str], None],
    ) -> None:
        self.limits = limits
        self.viewed_at = 0.0
        self.longest = Longest()
        self._scheduler = scheduler
        self._evict = evict
        self._renew = renew
        self._heard: dict[str, Heard] = {}
        self._state = Membership()
        self._view: View | None = None

    def start(self) -> None:
        """Begin."""
        self._scheduler.after(LOOK_S, self._look)

    def follow(self, state: Membership) -> None:
        """The coordinator has decided."""
        self._state = state
        if state.view is not self._view:
            self._view, self.viewed_at = state.view, self._scheduler.now

    def hear(self, worker: str, progress: Progress) -> None:
        """A member tells."""
        self._heard[worker] = Heard(progress, self._scheduler.now)
        self.longest = self.longest.and_of(progress)

    def _look(self) -> None:
        self._scheduler.after(LOOK_S, self._look)
        state, now = self._state, self._scheduler.now
        if state.view is None or not is_at_work(state):
            return
        verdict = judge(
            [worker for worker in state.view.ids if worker in state.workers],
            self._heard,
            now=now,
            earliest=self.viewed_at,
            fresh=now - FRESH_S,
            longest=self.longest,
            limits=self.limits,
        )
        for worker in verdict.hung:
            self._evict(worker, f"{HUNG}: {verdict.why}")
        if verdict.stuck:
            self._renew(verdict.why)
