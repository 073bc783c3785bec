"""What becomes of a collective."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ef_common.core.view import Member, View
from ef_common.session.barrier import Barrier
from ef_common.session.collective_log import CollectiveLog
from ef_common.session.current_view import CurrentView
from tests.diagrams import rows

ME, OTHER = Member("w", "n", ""), Member("v", "n", "")
BOTH, ALONE = View(1, (OTHER, ME)), View(2, (ME,))


class Collective:
    """One of them, and the log that it is in."""

    def __init__(self, view: View = BOTH) -> None:
        self.log = CollectiveLog(7, CurrentView(ME, view))
        self._operation = Barrier()
        self._is_confirmed = False

    @property
    def state(self) -> str:
        if self._is_confirmed:
            return "confirmed"
        return "complete" if self.log.newest is self._operation else "in_flight"

    def complete(self) -> None:
        self.log.complete(self._operation, self.log.completed_in)
        self.log.when_confirmed(self._confirm)

    def _confirm(self) -> None:
        self._is_confirmed = True


WITNESSES: dict[str, tuple[Callable[[Collective], None], ...]] = {
    "in_flight → complete": (Collective.complete,),
    "complete → confirmed": (Collective.complete, lambda collective: collective.log.confirm()),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(CollectiveLog) == list(WITNESSES)


@pytest.mark.parametrize("row", WITNESSES)
def test_each_row_of_the_diagram_is_true(row: str) -> None:
    collective = Collective()
    shown = [collective.state]
    for act in WITNESSES[row]:
        act(collective)
        shown.append(collective.state)
    assert row == " → ".join(shown[-2:])
    assert collective.log.completed == 8


def test_collective_of_the_only_member_is_confirmed_at_once() -> None:
    collective = Collective(ALONE)
    collective.complete()
    assert collective.state == "confirmed"


def test_only_member_confirms_nothing_that_it_completed_with_others() -> None:
    collective = Collective()
    collective.log._current.view = ALONE
    collective.complete()
    assert collective.state == "complete"
