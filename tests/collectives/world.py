"""A world that does not change: enough to test what runs within one view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ef_common.core.view import Member, View
from ef_common.session.agreements import Agreements
from ef_common.session.ports import Group, Operation
from tests.collectives.cluster import Cluster


def view_of(world_size: int, *, generation: int = 1) -> View:
    members = tuple(Member(f"w{rank}", f"n{rank}", "127.0.0.1") for rank in range(world_size))
    return View(generation, members)


def in_world(world_size: int, act: Callable[[int, Group], Any]) -> list[Any]:
    """Run `act(rank, group)` in as many threads over one group; their results in rank order."""
    return Cluster(world_size).run_in_view(act)


class OneView:
    """What a gradient reduction asks of a session, for a view that does not change."""

    def __init__(self, rank: int, group: Group, world_size: int) -> None:
        self.view = self.completed_in = view_of(world_size)
        self.world_size = world_size
        self.group = group
        self.worker = self.view.members[rank]
        self.change_pending = False
        self.agreements = Agreements()
        self.agreed: list[float] = []
        self.wishes: list[float] = []
        self.newest: Any = None
        self.after: Callable[[Operation], None] = lambda operation: None

    def run(self, operation: Operation) -> View:
        operation.run(self.group, self.view)
        self.newest = operation
        self.after(operation)
        return self.view

    def agree(self, num_flags: float, num_wishes: float = 0.0) -> None:
        self.agreed.append(num_flags)
        self.wishes.append(num_wishes)
