"""What a coordinator writes to the log."""

from __future__ import annotations

import logging

from ef_common.core.membership import Membership
from ef_common.core.view import View
from ef_common.protocol import fields

logger = logging.getLogger(__name__)


class Journal:
    """Writes what is new: each kind of trouble once, so that strangers cannot fill the log, and why a view is held."""

    def __init__(self) -> None:
        self._noticed: set[str] = set()
        self._held = ""

    def notice(self, kind: str, message: str, *args: object) -> None:
        """There is trouble."""
        level = logging.DEBUG if kind in self._noticed else logging.WARNING
        self._noticed.add(kind)
        logger.log(level, message, *args)

    def decided(self, before: View | None, state: Membership, reason: str) -> None:
        """A decision has been taken, in this view and for this reason; "" if nothing has changed."""
        if not reason:
            return
        level = logging.INFO if state.view is not before else logging.DEBUG
        if state.held and state.held != self._held:
            level = logging.WARNING
        self._held = state.held
        size = 0 if state.view is None else state.view.world_size
        logger.log(level, "view %d, %d members: %s", state.generation, size, fields.clip(reason))
