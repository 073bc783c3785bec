"""Orders for nodes: none delays or breaks the training, and what goes wrong is one line."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from ef_common.data import provisioners
from ef_common.data.provisioners import NO_ROOM_S, Orders, ScaleCommand


class Nodes:
    """A place with so many nodes at most."""

    def __init__(self, most: int = 8) -> None:
        self.most = most
        self.given: list[tuple[int, int]] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def provide(self, nodes: int, *, present: int) -> None:
        self.may_go_on.wait(10)
        self.given.append((present, nodes))
        if nodes > self.most:
            raise RuntimeError(f"there are only {self.most}")

    def stop(self) -> None:
        self.may_go_on.set()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(provisioners, "say", lambda text, **_: lines.append(text))
    return lines


def finish(orders: Orders) -> None:
    while (thread := orders._thread) is not None:
        thread.join(10)


def test_order_is_given_and_says_nothing(said: list[str]) -> None:
    nodes = Nodes()
    orders = Orders(nodes, name="the place", repeats=True)
    orders.scale_to(4, present=3)
    finish(orders)
    assert nodes.given == [(3, 4)]
    assert (orders.most, said) == (None, [])


def test_refused_order_is_one_line_and_no_room_for_a_while(said: list[str]) -> None:
    clock = Clock()
    orders = Orders(Nodes(most=3), name="the place", repeats=True, clock=clock)
    orders.scale_to(4, present=3)
    finish(orders)
    (line,) = said
    assert "the place" in line
    assert "there are only 3" in line
    assert orders.most == 3
    clock.now += NO_ROOM_S
    assert orders.most is None


def test_refused_release_is_said_and_limits_nothing(said: list[str]) -> None:
    orders = Orders(Nodes(most=1), name="the place", repeats=True)
    orders.scale_to(2, present=3)
    finish(orders)
    assert len(said) == 1
    assert orders.most is None


def test_slow_place_delays_nobody_and_gets_the_newest_order() -> None:
    nodes = Nodes()
    nodes.may_go_on.clear()
    orders = Orders(nodes, name="the place", repeats=True)
    for number in (2, 3, 4, 5):
        orders.scale_to(number, present=1)
    nodes.may_go_on.set()
    finish(orders)
    assert nodes.given[-1] == (1, 5)
    assert len(nodes.given) <= 2


def command(text: str, *, timeout_s: float = 10.0, environ: Mapping[str, str] = MappingProxyType({})) -> ScaleCommand:
    return ScaleCommand(text, environ={"PATH": "/usr/bin:/bin", **environ}, timeout_s=timeout_s)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "told"


def test_command_is_told_both_numbers_and_is_not_this_worker(file: Path) -> None:
    text = (
        f'echo "$ELASTICFLOW_NODES $ELASTICFLOW_WANTED $ELASTICFLOW_RUN_DIR [$RANK$ELASTICFLOW_COORDINATOR]" > {file}'
    )
    given = {"RANK": "0", "ELASTICFLOW_COORDINATOR": "a:1", "ELASTICFLOW_RUN_DIR": "runs/1"}
    command(text, environ=given).provide(4, present=2)
    assert file.read_text() == "2 4 runs/1 []\n"


def test_command_may_leave_nodes_in_the_background(file: Path) -> None:
    command(f"(sleep 30; touch {file}) & echo $! > {file}", timeout_s=5.0).provide(2, present=1)
    os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("text", "timeout_s", "why"),
    [
        ("echo first; echo no quota left >&2; exit 3", 10.0, "status 3 (no quota left)"),
        ("exit 1", 10.0, "status 1"),
        ("sleep 30", 0.1, "had not ended after 0.1 s"),
        ("/no/such/command", 10.0, "status 127"),
    ],
)
def test_command_that_fails_or_hangs_says_why(text: str, timeout_s: float, why: str, said: list[str]) -> None:
    orders = Orders(command(text, timeout_s=timeout_s), name="the scale command", repeats=False)
    orders.scale_to(2, present=1)
    finish(orders)
    (line,) = said
    assert why in line
    assert orders.most == 1


def test_command_that_runs_at_the_end_is_killed(said: list[str]) -> None:
    place = command("sleep 30")
    orders = Orders(place, name="the scale command", repeats=False)
    orders.scale_to(2, present=1)
    while place._process is None:
        pass
    orders.close()
    finish(orders)
    assert "when the training ended" in said[0]


def test_thread_that_has_failed_is_replaced_with_the_next_order(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [RuntimeError("nobody reads what it says")]

    def say(text: str, **_: object) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(provisioners, "say", say)
    nodes = Nodes(most=4)
    orders = Orders(nodes, name="the place", repeats=True)
    orders.scale_to(5, present=3)
    finish(orders)
    assert not failures
    orders.scale_to(4, present=3)
    finish(orders)
    assert nodes.given == [(3, 5), (3, 4)]
