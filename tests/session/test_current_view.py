"""The group of the newest view, and the notice of a newer one, which may come at any time."""

from __future__ import annotations

from typing import Any, cast

import pytest

from ef_common.core.view import Member, View
from ef_common.errors import GroupBroken
from ef_common.session.current_view import CurrentView

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
