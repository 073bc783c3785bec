"""A world of threads over real Gloo groups: enough to test what runs within one view, in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ef_common.collectives.torch_group import TorchGroups
from ef_common.core.view import Member, View
from ef_common.errors import GroupBroken
from ef_common.ports import Group, Operation

GUARD_S = 60.0


class Exchange:
    """Values that the members of one view publish."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self.is_replaced = False

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            found = self._changed.wait_for(lambda: key in self._values or self.is_replaced, GUARD_S)
            if not found or self.is_replaced:
                raise GroupBroken("replaced")
            return self._values[key]

    def replaced(self) -> bool:
        return self.is_replaced

    def replace(self) -> None:
        with self._changed:
            self.is_replaced = True
            self._changed.notify_all()


def view_of(world_size: int, *, generation: int = 1) -> View:
    members = tuple(Member(f"w{rank}", f"n{rank}", "127.0.0.1") for rank in range(world_size))
    return View(generation, members)


def in_world(world_size: int, act: Callable[[int, Group], Any], *, groups: Callable[[], Any] = TorchGroups) -> list[Any]:
    """Run `act(rank, group)` in as many threads over one new group; their results in rank order."""
    view, exchange, built = view_of(world_size), Exchange(), threading.Barrier(world_size, timeout=GUARD_S)

    def run(rank: int) -> Any:
        group = groups().build(view, rank=rank, bootstrap=exchange)
        built.wait()
        try:
            return act(rank, group)
        finally:
            group.abort()

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(run, rank) for rank in range(world_size)]
        return [future.result(GUARD_S) for future in futures]


class OneView:
    """What a gradient reduction asks of a session, for a view that does not change."""

    def __init__(self, rank: int, group: Group, world_size: int) -> None:
        self.view = self.completed_in = view_of(world_size)
        self.world_size = world_size
        self.group = group
        self.worker = self.view.members[rank]
        self.change_pending = False
        self.agreed: list[float] = []

    def run(self, operation: Operation) -> View:
        operation.run(self.group, self.view)
        return self.view

    def agree(self, num_flags: float) -> None:
        self.agreed.append(num_flags)
