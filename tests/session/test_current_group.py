"""The group of the newest view, and the notice of a newer one, which may come at any time."""

from __future__ import annotations

from typing import Any, cast

import pytest

from ef_common.errors import GroupBroken
from ef_common.session.current_group import CurrentGroup


class Group:
    aborted = False

    def abort(self) -> None:
        self.aborted = True


def test_notice_of_a_newer_view_ends_the_group() -> None:
    current, group = CurrentGroup(), Group()
    current.replace(2)  # its own
    current.set(cast(Any, group), 2)
    current.replace(1)
    assert not group.aborted
    assert not current.is_replaced
    current.replace(3)
    assert group.aborted
    assert current.is_replaced


def test_group_that_was_replaced_while_it_was_built_is_of_no_use() -> None:
    current, group = CurrentGroup(), Group()
    current.replace(3)
    with pytest.raises(GroupBroken, match="replaced while it was built"):
        current.set(cast(Any, group), 2)
    assert cast(Any, current.group) is group  # whoever ends the session ends it
