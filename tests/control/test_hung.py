"""Members that keep the others waiting, for ever or in each step, over real connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ef_common.control.coordinator import Coordinator
from ef_common.core.progress import Limits, Progress
from ef_common.errors import Evicted
from ef_common.protocol import wire
from ef_common.session.progress_tracker import NUM_FIRST, ProgressTracker


class Member:
    """A client with a pace, and what it is told of itself."""

    def __init__(self, join: Callable[..., Any], coordinator: Coordinator, name: str) -> None:
        self.tracker = ProgressTracker(time.monotonic)
        self.told: list[str] = []
        self.was_told = threading.Event()
        self.heard: threading.Event | None = None
        self.worker = join(coordinator, name, tracker=self.tracker, on_hung=self._on_hung)

    def _on_hung(self, why: str, heard: threading.Event) -> None:
        self.told.append(why)
        self.heard = heard
        self.was_told.set()

    def train(self) -> None:
        """Some steps, and the beginning of another one."""
        self.tracker.wait(1, 0)
        for number in range(NUM_FIRST):
            self.tracker.go_on(1, number)
            self.tracker.begin_step(8)
            self.tracker.wait(1, number)
            self.tracker.go_on(1, number + 1)
            self.tracker.end_step()
        self.tracker.begin_step(8)


def form(serve: Any, join: Any, limits: Limits, number: int) -> list[Member]:
    coordinator = serve(number, heartbeat_timeout_s=0.4, hang_timeout_s=limits.hang_timeout_s)
    coordinator._server.liveness.limits = limits
    members = [Member(join, coordinator, f"w{index}") for index in range(number)]
    for member in members:
        member.worker.started()
        member.train()
    return members


def test_member_that_keeps_the_others_waiting_is_evicted_and_told_why(serve, join) -> None:
    members = form(serve, join, Limits(hang_timeout_s=0.5), 3)
    hung, *others = members
    began = time.monotonic()
    for member in others:
        member.tracker.wait(1, NUM_FIRST)
    view = others[0].worker.client.next_view(1)
    assert time.monotonic() - began > 0.4
    assert (set(view.ids), view.generation) == ({"w1", "w2"}, 2)
    assert view.reason.startswith("w0 gone (w0 hung: the others have waited for")
    assert hung.was_told.wait(30)
    assert hung.heard is not None
    assert not hung.heard.is_set()
    with pytest.raises(Evicted, match="w0 hung"):
        hung.worker.client.next_view(1)
    assert hung.heard.is_set()
    assert not any(member.told for member in others)


def test_members_of_which_none_is_to_blame_get_a_new_view(serve, join) -> None:
    members = form(serve, join, Limits(floor_s=0.5, unknown_s=0.5), 2)
    for member in members:
        member.tracker.wait(1, NUM_FIRST)
    view = members[0].worker.client.next_view(1)
    assert (set(view.ids), view.reason) == ({"w0", "w1"}, "the group broke for all")
    # Who does not come into that one is the one to blame.
    members[1].tracker.wait(2, -1)
    assert members[1].worker.client.next_view(2).ids == ("w1",)
    assert members[0].was_told.wait(30)


def test_member_that_is_silent_is_not_told_that_it_hung(serve, dial, join) -> None:
    coordinator = serve(2, heartbeat_timeout_s=0.4, hang_timeout_s=0.1)
    silent = dial(coordinator)
    assert isinstance(silent.introduce("silent"), wire.Welcome)
    worker = join(coordinator, "lively").started()
    silent.say(wire.Heartbeat(None, Progress(1, 0, waits=False, kind="step", for_s=0.0)))
    assert worker.client.next_view(1).ids == ("lively",)
    (evicted,) = [message for message in silent.hear_all() if isinstance(message, wire.Eviction)]
    assert (evicted.hung, evicted.reason[:10]) == (False, "silent for")
