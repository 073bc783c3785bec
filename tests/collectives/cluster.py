"""Members of a job as threads of the test: torch tensors and a group in memory, with the real session or without.

A member that raises `Died` is lost: the others' groups break, and they get the next view.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ef_common.collectives.linked_group import Nothing
from ef_common.core.view import Member, View
from ef_common.errors import GroupBroken
from ef_common.session import Session
from ef_common.session.ports import Group

GUARD_S = 60.0


class Died(Exception):
    """This member is gone, from here on."""


class Meeting:
    """One collective of all members of a view."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: dict[int, Any] = {}
        self.done = threading.Event()
        self.error = ""


class ThreadPending:
    def __init__(self, group: ThreadGroup, meeting: Meeting, tensor: Tensor | None) -> None:
        self._group, self._meeting, self._tensor = group, meeting, tensor

    def wait(self) -> None:
        while not self._meeting.done.wait(0.005):
            self._group.check()
        if self._group.loses_next:
            self._group.loses_next = False
            self._group.wait_for_others()
            self._group.broken = True
            if self._tensor is not None:
                self._tensor.fill_(77)  # what a failed collective leaves behind is anybody's guess
        self._group.check()


class ThreadGroup:
    """One member's end of a group."""

    def __init__(self, cluster: Cluster, view: View, rank: int) -> None:
        self._cluster, self._view, self._rank = cluster, view, rank
        self._number = 0
        self.broken = False
        self.loses_next = False

    def check(self) -> None:
        if self.broken:
            raise GroupBroken("broken")

    def wait_for_others(self) -> None:
        """Wait until all others have entered a collective that this member has not."""
        meeting = self._cluster.meeting(self._view, self._number)
        while len(meeting.values) < meeting.size - 1:
            self.check()
            threading.Event().wait(0.002)

    def _enter(self, value: Any) -> Meeting:
        self.check()
        meeting = self._cluster.meeting(self._view, self._number)
        self._number += 1
        with self._cluster.lock:
            meeting.values[self._rank] = value
            complete = len(meeting.values) == meeting.size
        if complete:
            if isinstance(value, Tensor):
                tensors = [meeting.values[rank] for rank in range(meeting.size)]
                total = functools.reduce(torch.add, tensors)  # as Gloo does: two negative zeros make one
                for tensor in tensors:
                    tensor.copy_(total)
            meeting.done.set()
        return meeting

    def meet(self, call: str, tensors: Sequence[Any] | None = None) -> Any:
        return Nothing()

    def all_reduce(self, tensor: Any, call: str = "", meeting: Any = None) -> ThreadPending:
        tensor = torch.as_tensor(tensor)  # of an array, it is the same memory
        return ThreadPending(self, self._enter(tensor), tensor)

    def all_gather(self, payload: bytes, call: str = "") -> list[bytes]:
        meeting = self._enter(payload)
        ThreadPending(self, meeting, None).wait()
        return [meeting.values[rank] for rank in range(meeting.size)]

    def send(self, tensors: Sequence[Tensor], target: int) -> None:
        self._cluster.mailbox(self._view, self._rank, target).extend(copy.deepcopy(t) for t in tensors)

    def receive(self, tensors: Sequence[Tensor], source: int, target: int | None = None) -> None:
        box = self._cluster.mailbox(self._view, source, self._rank)
        for tensor in tensors:
            while not box:
                self.check()
                threading.Event().wait(0.002)
            tensor[slice(None) if isinstance(tensor, bytearray) else ...] = box.pop(0)
            if target is not None:
                self.send([tensor], target)

    def abort(self) -> None:
        self.broken = True


class Cluster:
    """All members, and their membership."""

    def __init__(self, num_members: int) -> None:
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._members = tuple(Member(f"m{rank}", f"m{rank}", "") for rank in range(num_members))
        self.view = View(1, self._members, admitted_at=1)
        self._meetings: dict[tuple[int, int], Meeting] = {}
        self._mail: dict[tuple[int, int, int], list[Tensor]] = {}
        self._suspects: set[str] = set()
        self._deciding = threading.RLock()  # a member hears of one decision before the next one is made
        self.sessions: list[Session] = []
        self.listeners: list[Callable[[int], None]] = []

    def meeting(self, view: View, number: int) -> Meeting:
        with self.lock:
            return self._meetings.setdefault((view.generation, number), Meeting(view.world_size))

    def mailbox(self, view: View, source: int, target: int) -> list[Tensor]:
        with self.lock:
            return self._mail.setdefault((view.generation, source, target), [])

    def lose(self, worker: str) -> None:
        """The coordinator learns that a member is gone."""
        with self._deciding:
            self._install(tuple(m for m in self.view.members if m.id != worker))

    def suspect(self, worker: str, generation: int) -> None:
        with self._deciding:
            if generation != self.view.generation:
                return
            self._suspects.add(worker)
            if self._suspects.issuperset(self.view.ids):
                self._install(self.view.members)
            else:
                for session in self.sessions:  # their connections to it have ended
                    session.group.abort()

    def _install(self, members: tuple[Member, ...]) -> None:
        with self._changed:
            self._suspects = set()
            self.view = View(self.view.generation + 1, members, admitted_at=1)
            self._changed.notify_all()
        for replace in self.listeners:
            replace(self.view.generation)

    def wait_view(self, after: int) -> View:
        with self._changed:
            assert self._changed.wait_for(lambda: self.view.generation > after, GUARD_S)
            return self.view

    def run(self, act: Callable[[Session, int], Any]) -> list[Any]:
        """Run `act(session, rank)` in each member; their results, None for those that died."""
        self.sessions = [
            Session(member, channel=ThreadChannel(self, member.id), groups=ThreadGroups(self))
            for member in self._members
        ]

        def live(rank: int) -> Any:
            self.sessions[rank].start()
            return act(self.sessions[rank], rank)

        return self._run(live)

    def run_in_view(self, act: Callable[[int, Group], Any]) -> list[Any]:
        """Run `act(rank, group)` in each member, without a session, in one view; their results."""
        return self._run(lambda rank: act(rank, ThreadGroup(self, self.view, rank)))

    def _run(self, act: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * len(self._members)

        def live(rank: int) -> None:
            try:
                results[rank] = act(rank)
            except Died:
                self.lose(f"m{rank}")
            except BaseException as error:
                results[rank] = error
                self.lose(f"m{rank}")

        threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(GUARD_S)
            assert not thread.is_alive()
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            raise errors[0]
        return results


class ThreadChannel:
    """The port `ControlChannel`."""

    def __init__(self, cluster: Cluster, worker: str) -> None:
        self.change_pending = False
        self._cluster, self._worker = cluster, worker

    def start(self, on_view: Callable[[int], None]) -> bool:
        self._cluster.listeners.append(on_view)
        return False

    def send(self, kind: str, generation: int = 0) -> None:
        if kind == "suspect":
            self._cluster.suspect(self._worker, generation)

    def next_view(self, after: int) -> View:
        return self._cluster.wait_view(after)

    def bootstrap(self, generation: int) -> Any:
        return None

    def fail(self, why: str) -> bool:
        return False

    def stop(self) -> None: ...


class ThreadGroups:
    """The port `GroupFactory`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def build(self, view: View, *, rank: int, bootstrap: Any) -> ThreadGroup:
        return ThreadGroup(self._cluster, view, rank)
