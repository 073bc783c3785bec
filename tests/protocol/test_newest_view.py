"""The newest view of a worker, and the values of its members."""

from __future__ import annotations

import pytest

from ef_common.core.view import Member, View
from ef_common.errors import GroupBroken, ProtocolError
from ef_common.protocol import wire
from ef_common.protocol.newest_view import NewestView
from ef_common.protocol.view_patch import NO_VIEW, ViewPatch

FIRST = View(1, (Member("a", "n", ""), Member("b", "m", "")))
SECOND = View(2, (FIRST.members[1],))


def holding(view: View) -> NewestView:
    newest = NewestView()
    newest.replace(view)
    return newest


def test_values_are_those_of_the_newest_view_alone() -> None:
    newest = holding(FIRST)
    newest.hear(wire.Relayed(1, (("0", b"theirs"),)))
    newest.hear(wire.Relayed(2, (("1", b"of another view"),)))
    newest.publish(wire.Relay(1, "2", b"own"))
    newest.publish(wire.Relay(2, "3", b"of another view"))
    assert [newest.value(1, key) for key in "0123"] == [b"theirs", None, b"own", None]
    assert newest.published == [wire.Relay(1, "2", b"own")]
    newest.replace(SECOND)
    assert newest.published == []
    assert newest.value(2, "0") is None
    with pytest.raises(ProtocolError, match="view 1 came after view 2"):
        newest.replace(FIRST)
    assert newest.view is SECOND
    with pytest.raises(GroupBroken, match="view 1 has been replaced"):
        newest.value(1, "0")


def test_patch_is_of_this_view_or_of_none() -> None:
    newest = NewestView()
    assert newest.generation == 0
    assert newest.patched(wire.NewView(0, ViewPatch.between(NO_VIEW, FIRST))) == FIRST
    patch = wire.NewView(1, ViewPatch.between(FIRST, SECOND))
    with pytest.raises(ProtocolError, match="view 2 changes view 1, and not view 0"):
        newest.patched(patch)
    assert holding(FIRST).patched(patch) == SECOND
    with pytest.raises(ProtocolError, match="expected ranks below 0"):
        holding(FIRST).patched(wire.NewView(0, patch.patch))
    assert holding(FIRST).patched(wire.NewView(0, ViewPatch.between(NO_VIEW, SECOND))) == SECOND
