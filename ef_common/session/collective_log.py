"""The log of the collectives that a worker has completed.

Nobody completes collective n+1 before everybody has completed n. One result is therefore enough to bring those behind
up to date, and the log forgets all others. The view in which a collective completed names its contributors. It is part
of the result, so all survivors agree on whose samples an update contains.
"""

from __future__ import annotations

from collections.abc import Callable

from ef_common.core.replay import FRESH
from ef_common.core.view import View
from ef_common.session.current_view import CurrentView
from ef_common.session.ports import Operation


class CollectiveLog:
    """What became of each logical collective.

    ::

        in_flight → complete   `complete`: in this view, or in another member, which hands the result on
        complete → confirmed   `confirm`: everybody has completed it, since the next one is complete, so it survives

    Args:
        completed: Number of collectives that this worker has completed; `FRESH` as long as it holds no state.
        current: The view of this worker.

    Attributes:
        completed_in: The view in which the newest collective has completed. Whatever must be equal in all members
            (whose samples come next, the divisor of a mean) is a function of it, and never of the newest view, which a
            worker may know before the others. After a planned change a barrier advances it.
        newest: The newest collective, with its result.
    """

    def __init__(self, completed: int, current: CurrentView) -> None:
        self.completed = completed
        self.completed_in = current.view
        self.newest: Operation | None = None
        self._current = current
        self._unconfirmed: list[Callable[[], None]] = []

    @property
    def is_fresh(self) -> bool:
        """Whether this worker holds no state yet."""
        return self.completed == FRESH

    def complete(self, operation: Operation, view: View) -> None:
        """The collective in flight has completed in a view."""
        self.completed += 1
        self.completed_in = view
        self.newest = operation

    def when_confirmed(self, act: Callable[[], None]) -> None:
        """Call `act` once the newest collective is confirmed."""
        self._unconfirmed.append(act)
        if self.completed_in.world_size == 1 and not self._current.is_ousted:
            self.confirm()

    def confirm(self) -> None:
        """The newest collective is confirmed."""
        acts, self._unconfirmed = self._unconfirmed, []
        for act in acts:
            act()
