"""Connecting in a thread: whatever ends the thread ends the wait for it."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from ef_common.collectives.bootstrap import SharedValues
from ef_common.collectives.bootstrap_store import abandonable
from ef_common.core.view import Member, View
from ef_common.errors import GroupBroken
from ef_common.horovod.group import HorovodGroups

GUARD_S = 60.0


def leave() -> None:
    raise SystemExit("out of order")


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit("x")], ids=repr)
def test_error_of_connecting_is_raised_whatever_it_is(error: BaseException) -> None:
    def connect() -> None:
        raise error

    with pytest.raises(type(error)):
        abandonable(connect, lambda: False, name="c")


def test_horovod_that_leaves_when_it_connects_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))

    class Binding:
        init = staticmethod(leave)

        def shutdown(self) -> None:
            pass

    raised: list[BaseException] = []

    def build() -> None:
        try:
            view = View(1, (Member("a", "n", "127.0.0.1"), Member("b", "n", "127.0.0.1")))
            binding: Any = Binding()
            HorovodGroups(binding).build(view, rank=0, bootstrap=SharedValues())
        except GroupBroken as broken:
            raised.append(broken)

    thread = threading.Thread(target=build, daemon=True)
    thread.start()
    thread.join(GUARD_S)
    assert not thread.is_alive()
    assert [str(one) for one in raised] == ["could not connect: out of order"]
