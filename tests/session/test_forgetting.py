"""What a worker that lives on holds in memory depends on the others that are there, and not on those that have been."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from ef_common.core.view import Member, View
from ef_common.errors import GroupBroken
from ef_common.protocol import wire
from ef_common.protocol.view_patch import ViewPatch
from ef_common.session import Barrier, Session
from ef_common.session.progress_tracker import ProgressTracker
from tests.protocol import test_client
from tests.reachable import num_reachable

FEW, MANY = 20, 200
ME = test_client.VIEW.members[0]


def view_after(view: View) -> View:
    """One worker has been lost since, and another one has come."""
    number = view.generation + 1
    members = ME, Member(f"x{number:04}", f"m{number:04}", "10.0.0.2", standby=1000)
    return View(number, members, admitted_at=view.generation, reason=f"worker x{number - 1:04} was lost")


def growth(change: Callable[[], object], root: object) -> int:
    """Number of objects that many changes add to what a few have left."""
    for _ in range(FEW):
        change()
    before = num_reachable(root)
    for _ in range(MANY):
        change()
    return num_reachable(root) - before


class Group:
    """Everybody says what this worker says; it breaks at the first barrier after the changes of a view."""

    def __init__(self, view: View) -> None:
        self._size, self.is_broken = view.world_size, False

    def all_gather(self, payload: bytes, call: str = "") -> list[bytes]:
        if self.is_broken:
            raise GroupBroken("lost")
        return [payload] * self._size

    def send(self, tensors: Any, target: int) -> None: ...

    def abort(self) -> None:
        self.is_broken = True


class Groups:
    def build(self, view: View, *, rank: int, bootstrap: Any) -> Group:
        return Group(view)


class Channel:
    """The next view is there whenever it is waited for."""

    change_pending = False

    def __init__(self) -> None:
        self.view = View(0, (ME,))

    def start(self, on_view: Any) -> bool:
        return False

    def send(self, kind: str, generation: int = 0) -> None: ...

    def bootstrap(self, generation: int) -> None: ...

    def next_view(self, after: int) -> View:
        self.view = view_after(self.view)
        return self.view


def test_session_holds_no_more_after_many_recoveries() -> None:
    channel, clock = Channel(), lambda: 0.0
    session = Session(
        ME, channel=cast(Any, channel), groups=cast(Any, Groups()), clock=clock, tracker=ProgressTracker(clock)
    )
    session.start()

    def recover() -> None:
        session.begin_step(8)
        session.run(Barrier())
        session.agree(0.0)
        cast(Any, session.group).is_broken = True
        session.run(Barrier())
        session.when_confirmed(partial(bool))  # functions are not counted
        session.boundary()

    assert growth(recover, session) == 0
    assert session.view.generation == FEW + MANY + 1


def test_worker_s_end_of_the_control_plane_holds_no_more_after_many_views() -> None:
    client, link = test_client.member()
    view = test_client.VIEW

    def now() -> float:
        return float(view.generation)

    def hear(message: wire.FromCoordinator) -> None:
        client.receive(link, wire.encode(message), now())

    def change() -> None:
        nonlocal view
        before, view = view, view_after(view)
        client.send("suspect", before.generation)
        hear(wire.NewView(before.generation, ViewPatch.between(before, view)))
        client.publish(view.generation, "listener/0", b"here")
        hear(wire.Relayed(view.generation, (("listener/1", b"there"),)))
        assert client.value(view.generation, "listener/1") == b"there"
        client.send("settled", view.generation)
        client.tick(now())
        client.outputs.clear()

    assert growth(change, client) == 0
    assert client.generation == FEW + MANY + 1
