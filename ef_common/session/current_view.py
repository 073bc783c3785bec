"""The newest view that a session has entered, with its group, which ends as soon as a newer view is known."""

from __future__ import annotations

import threading

from ef_common.core.view import Member, View
from ef_common.errors import GroupBroken
from ef_common.session.lone import LoneGroup
from ef_common.session.ports import Group


class CurrentView:
    """Holds the view and its group for the session's thread; :meth:`replace` may be called from any other one.

    ::

        entered → built         `set`: the group is that of the view
        entered → GroupBroken   `set`, and a newer view is known already
        built → replaced        `replace`: a newer view is known, so the group is aborted
        replaced → entered      `view` is set, and the group is still that of the view before

    Args:
        worker: This worker.
        view: The view before the first one.

    Attributes:
        view: What this worker knows. It may be ahead of the others or behind them.
        group: The group.
    """

    def __init__(self, worker: Member, view: View) -> None:
        self.worker = worker
        self.view = view
        self.group: Group = LoneGroup()
        self._built = 0
        self._newest = 0
        self._lock = threading.Lock()

    @property
    def rank(self) -> int:
        """Rank of this worker."""
        return self.view.rank_of(self.worker.id) or 0

    @property
    def is_replaced(self) -> bool:
        """Whether a newer view is known."""
        return self._newest > self._built

    @property
    def is_ousted(self) -> bool:
        """Whether this worker is out of its world of one, which has no group that could break."""
        return self.view.world_size == 1 and self.is_replaced

    def replace(self, generation: int) -> None:
        """A view is known; if it is newer, calls that wait in the group wake up."""
        with self._lock:
            self._newest = max(self._newest, generation)
            if self.is_replaced:
                self.group.abort()

    def set(self, group: Group) -> None:
        """Hold the group of the view.

        Raises:
            GroupBroken: A newer view is known. The notice of it came while this group was being built, and missed it.
        """
        with self._lock:
            self.group, self._built = group, self.view.generation
        if self.is_replaced:
            raise GroupBroken("replaced while it was built")
