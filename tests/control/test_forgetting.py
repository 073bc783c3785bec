"""What a coordinator holds in memory, and what its herald does, depend on who is there and not on who has been."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ef_common.control import herald as module
from ef_common.control.coordinator import Coordinator
from ef_common.control.herald import Herald
from ef_common.core.membership import Membership
from ef_common.core.quorum import Link
from ef_common.core.view import Member, View
from ef_common.protocol import server, wire
from tests.control.conftest import in_loop
from tests.waiting import poll_until

VIEW = View(3, (Member("a", "a", ""),))
STATE = Membership(generation=3, view=VIEW, contested=True, contested_at=1000.0)


def sizes_of(coordinator: Coordinator) -> dict[str, int]:
    board = coordinator._server
    sizes = {name: len(value) for name, value in vars(board).items() if isinstance(value, (dict, set))}
    state = board.state
    sizes |= {"state": len(state.workers) + len(state.dismissed) + len(state.dead) + len(state.stores.told)}
    return sizes


def test_coordinator_forgets_newcomers_that_have_come_and_gone(form, dial, monkeypatch):
    monkeypatch.setattr(server, "NUM_FORMER", 4)
    coordinator, _ = form(2)
    board = coordinator._server
    other = View(1, (Member("x", "node-x", "127.0.0.1", standby=9),))  # of a job that has long gone on without it

    def churn(first: int, number: int) -> None:
        for index in range(first, first + number):
            newcomer = dial(coordinator)
            assert isinstance(newcomer.introduce(f"n{index}", standby=1 + index), wire.Welcome)
            newcomer.say(wire.Heartbeat(None))
            newcomer.close()
            late = dial(coordinator)
            assert isinstance(late.introduce(f"l{index}", returning=True, standby=1), wire.Welcome)
            late.say(wire.Return("member", 1, 1, (Link(other),), False, False, False, "", "0f" * 16))
            assert any(isinstance(message, wire.Evicted) for message in iter(late.hear, None))
            late.close()
        poll_until(lambda: len(board._workers) == 2 and not board._out)
        in_loop(coordinator, lambda now: board._sweep())
        poll_until(lambda: set(board._keys) == set(board._workers))
        poll_until(lambda: len(coordinator._serving._open) == 2)

    churn(0, 12)
    before = sizes_of(coordinator)
    churn(12, 60)
    after = sizes_of(coordinator)
    assert after.pop("standbys") <= 2 * 4 + 1
    before.pop("standbys")
    assert after == before


class Board:
    """What a herald looks at."""

    def __init__(self, state: Membership, *ports: int) -> None:
        self.state = state
        self.standbys = {("h", port): None for port in ports}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Let a herald look each quarter of a second; returns whom it has tried to tell, and when."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)

    class FakeConversation:
        def send(self, message: wire.FromWorker) -> None:
            pass

        def close(self) -> None:
            pass

    def make(board: Any, *, cut: tuple[int, ...] = (), refuse: tuple[int, ...] = (), endpoint: Any = None) -> Any:
        tried: list[tuple[int, float]] = []

        def attempt(address: tuple[str, int], *args: object, **kwargs: object) -> FakeConversation:
            tried.append((address[1], clock.now - 1000.0))
            if address[1] in refuse:
                raise ConnectionRefusedError
            if address[1] in cut:
                raise TimeoutError
            return FakeConversation()

        monkeypatch.setattr(module, "Conversation", attempt)
        herald = Herald("c", board, None, port=1, endpoint=endpoint)

        def look_until(seconds: float) -> list[tuple[int, float]]:
            while clock.now < 1000.0 + seconds:
                herald._look()
                clock.now += 0.25
            found, tried[:] = list(tried), []
            return found

        return look_until

    return make


def test_herald_tells_often_while_others_may_come_and_then_no_more(play):
    board = Board(STATE, 1, 2)
    look_until = play(board)
    found = look_until(300)
    assert {port for port, _ in found} == {1, 2}
    assert [when for port, when in found if port == 1] == [5.0 * index for index in range(60)]
    assert look_until(100_000) == []


def test_herald_goes_on_to_try_who_was_not_reached_and_forgets_who_is_refused(play):
    board = Board(STATE, 1, 2, 3)
    look_until = play(board, cut=(2,), refuse=(3,))
    assert [port for port, _ in look_until(300)].count(3) == 1
    later = look_until(1200)
    assert {port for port, _ in later} == {2}
    assert len(later) == 60  # every 15 s
    board.state = replace(board.state, contested_at=2200.0)  # another coordinator gathers
    assert {port for port, _ in look_until(1210)} == {1, 2}


def test_herald_tells_a_standby_that_it_hears_of_later_and_looks_at_the_endpoint_for_ever(play):
    board = Board(STATE, 1)
    look_until = play(board, endpoint=("h", 7))
    look_until(400)
    board.standbys["h", 2] = None
    found = look_until(500)
    assert [port for port, _ in found].count(2) == 1
    assert {port for port, _ in found} == {2, 7}


def test_herald_without_doubt_tells_nobody(play):
    assert play(Board(replace(STATE, contested=False), 1), endpoint=("h", 7))(100) == []
