"""The group of the newest view that a session has entered, which ends as soon as a newer view is known."""

from __future__ import annotations

import threading

from ef_common.errors import GroupBroken
from ef_common.session.lone_group import LoneGroup
from ef_common.session.ports import Group


class CurrentGroup:
    """Holds the group for the session's thread; :meth:`replace` may be called from any other one.

    Attributes:
        group: The group.
    """

    def __init__(self) -> None:
        self.group: Group = LoneGroup()
        self._generation = 0
        self._newest = 0
        self._lock = threading.Lock()

    @property
    def is_replaced(self) -> bool:
        """Whether a newer view is known."""
        return self._newest > self._generation

    def replace(self, generation: int) -> None:
        """A view is known; if it is newer, calls that wait in the group wake up."""
        with self._lock:
            self._newest = max(self._newest, generation)
            if self.is_replaced:
                self.group.abort()

    def set(self, group: Group, generation: int) -> None:
        """Hold the group of a view.

        Raises:
            GroupBroken: A newer view is known. The notice of it came while this group was being built, and missed it.
        """
        with self._lock:
            self.group, self._generation = group, generation
        if self.is_replaced:
            raise GroupBroken("replaced while it was built")
