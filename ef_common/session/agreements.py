"""What all members have agreed to do at a step boundary."""

from __future__ import annotations

from ef_common.core.view import View


class Agreements:
    """Follow from the sums of the members' flags, in collectives that all of them complete.

    What one member knows alone (its view, say) must never decide whether it waits at a boundary: another may be a view
    behind, pass the boundary, and wait in the next collective for ever.

    ::

        change   none → agreed   all members know of one
                 agreed → none   a view has admitted and released workers since then
        wish     none → heard    one member has it
                 heard → none    the next boundary, which grants it if the members are the same

    Attributes:
        wish: Whether this worker wants all members to act together at the next boundary.
    """

    def __init__(self) -> None:
        self.wish = False
        self._change_in: int | None = None
        self._wish_in: int | None = None

    @property
    def change_agreed(self) -> bool:
        """Whether all members know of a change and make it at the next boundary."""
        return self._change_in is not None

    def hear(self, num_flags: float, num_wishes: float, view: View) -> None:
        """A collective has completed.

        Args:
            num_flags: Sum of the members' `change_pending`.
            num_wishes: Sum of the members' `wish`.
            view: The view in which it has completed.
        """
        if num_wishes:  # a step may have several reductions, and the wish is in one of them
            self._wish_in = view.generation
            self.wish = False
        if num_flags >= view.world_size and self._change_in is None:
            self._change_in = view.generation

    def change_alone(self, view: View) -> None:
        """The only member of a view decides for a change."""
        self._change_in = view.generation

    def enter(self, view: View) -> None:
        """A view holds. It may be one that the change has led to, or one after a loss."""
        if view.admitted_at > (self._change_in or 0):
            self._change_in = None

    def take_wish(self, view: View) -> bool:
        """At a step boundary: whether all members know of a wish, and have not changed since. It is asked once.

        Args:
            view: The view in which the newest collective has completed. All members have completed it, so all get the
                same answer.
        """
        heard, self._wish_in = self._wish_in, None
        return heard is not None and heard == view.generation
