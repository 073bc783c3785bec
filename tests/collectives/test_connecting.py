"""Connecting in a thread: whatever ends the thread ends the wait for it."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from ef_common.collectives.bootstrap import SharedValues
from ef_common.collectives.bootstrap_store import abandonable
from ef_common.core.view import Member, View
from ef_common.errors import GroupBroken, UsageError
from ef_common.horovod import library
from ef_common.horovod.group import HorovodGroups
from ef_common.horovod.library import Library

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


class Started:
    """Horovod's library, which the program may have started."""

    def __init__(self, *, by_program: bool) -> None:
        self.started = by_program

    def horovod_is_initialized(self) -> bool:
        return self.started


def test_horovod_that_the_program_has_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_load", lambda framework: Started(by_program=True))
    with pytest.raises(UsageError, match=r"the program has called hvd\.init\(\).* Remove hvd\.init\(\)"):
        Library("tensorflow")


def test_horovod_that_the_program_starts_before_the_first_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    loaded = Started(by_program=False)
    monkeypatch.setattr(library, "_load", lambda framework: loaded)
    groups = HorovodGroups(Library("tensorflow"))
    loaded.started = True
    view = View(1, (Member("a", "n", "127.0.0.1"), Member("b", "n", "127.0.0.1")))
    with pytest.raises(UsageError, match=r"Remove hvd\.init\(\)"):
        groups.build(view, rank=0, bootstrap=SharedValues())
