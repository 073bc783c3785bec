"""The group of the newest view, and the notice of a newer one, which may come at any time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from ef_common import errors
from ef_common.core.view import Member, View
from ef_common.errors import GroupBroken
from ef_common.session.current_view import CurrentView
from tests.diagrams import rows

WORKER = Member("w", "n", "")


class Group:
    aborted = False

    def abort(self) -> None:
        self.aborted = True


def entered(generation: int, *others: Member) -> CurrentView:
    current = CurrentView(WORKER, View(0, (WORKER,)))
    current.view = View(generation, (*others, WORKER))
    return current


def test_notice_of_a_newer_view_ends_the_group() -> None:
    current, group = entered(2, Member("v", "n", "")), Group()
    current.replace(2)  # its own
    current.set(cast(Any, group))
    current.replace(1)
    assert not group.aborted
    assert not current.is_replaced
    current.replace(3)
    assert group.aborted
    assert current.is_replaced
    assert not current.is_ousted  # the group shows it
    assert current.rank == 1


def test_group_that_was_replaced_while_it_was_built_is_of_no_use() -> None:
    current, group = entered(2), Group()
    current.replace(3)
    with pytest.raises(GroupBroken, match="replaced while it was built"):
        current.set(cast(Any, group))
    assert cast(Any, current.group) is group  # whoever ends the session ends it


def test_worker_is_ousted_from_its_world_of_one_by_a_newer_view() -> None:
    current = entered(2)
    current.set(cast(Any, Group()))
    assert not current.is_ousted
    current.replace(3)
    assert current.is_ousted


def state(current: CurrentView) -> str:
    if current.view.generation > current._built:
        return "entered"
    return "replaced" if current.is_replaced else "built"


def builds(current: CurrentView) -> None:
    current.set(cast(Any, Group()))


def hears_of_another(current: CurrentView) -> None:
    current.replace(3)


def enters(current: CurrentView) -> None:
    current.view = View(3, (WORKER,))


WITNESSES: dict[str, tuple[Callable[[CurrentView], None], ...]] = {
    "entered → built": (builds,),
    "entered → GroupBroken": (hears_of_another, builds),
    "built → replaced": (builds, hears_of_another),
    "replaced → entered": (builds, hears_of_another, enters),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(CurrentView) == list(WITNESSES)


@pytest.mark.parametrize("row", WITNESSES)
def test_each_row_of_the_diagram_is_true(row: str) -> None:
    current = entered(2)
    *first, last = WITNESSES[row]
    for act in first:
        act(current)
    before, after = row.split(" → ")
    assert state(current) == before
    if hasattr(errors, after):
        with pytest.raises(getattr(errors, after)):
            last(current)
    else:
        last(current)
        assert state(current) == after
