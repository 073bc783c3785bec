"""How many calls the controller makes in a second."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Thread, current_thread, get_ident, main_thread
from typing import Any

import pytest

from ef_common.kubernetes.controller import Controller
from ef_common.kubernetes.kinds import EVENTS, JOBS, PODS, Kind
from ef_common.kubernetes.limiter import Limiter
from ef_common.kubernetes.metrics import Metrics
from tests.kubernetes.memory_api import MemoryApi
from tests.kubernetes.objects import job
from tests.waiting import poll_until


class Clock:
    """Time passes only while somebody waits."""

    def __init__(self) -> None:
        self.now, self.waits = 100.0, list[float]()

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def test_so_many_pass_at_once_and_then_so_many_in_a_second() -> None:
    clock = Clock()
    limiter = Limiter(4.0, 3.0, clock=lambda: clock.now, sleep=clock.sleep)
    for _ in range(5):
        limiter.wait()
    assert clock.waits == [0.25, 0.25]
    clock.now += 100.0
    for _ in range(4):
        limiter.wait()
    assert clock.waits == [0.25, 0.25, 0.25]


def test_threads_share_the_limit() -> None:
    """No time passes, so each one that must wait comes after all that waited before."""
    waits: list[float] = []
    inside: list[None] = []
    crowds: list[int] = []

    def clock() -> float:
        inside.append(None)
        time.sleep(1e-4)  # others have their turn
        crowds.append(len(inside))
        inside.pop()
        return 0.0

    limiter = Limiter(4.0, 3.0, clock=clock, sleep=waits.append)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: limiter.wait(), range(43)))
    assert set(crowds) == {1}, "one at a time"
    assert sorted(waits) == pytest.approx([number / 4 for number in range(1, 41)])


def test_each_call_of_a_controller_waits_for_its_turn(api: MemoryApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists and watches of its copies are few, and have pauses of their own."""
    turns: Counter[int] = Counter()  # by thread
    hasty = set[str]()
    waits = Limiter.wait

    def wait(self: Limiter) -> None:
        turns[get_ident()] += 1
        waits(self)

    def counted(method: str) -> Callable[..., Any]:
        call = getattr(api, method)

        def act(kind: Kind, *args: Any, **kwargs: Any) -> Any:
            if not turns[get_ident()] and method != "list" and current_thread() is not main_thread():  # the kubelets
                hasty.add(f"{method} {kind.plural}")
            turns[get_ident()] = max(0, turns[get_ident()] - 1)
            return call(kind, *args, **kwargs)

        return act

    monkeypatch.setattr(Limiter, "wait", wait)
    controller = Controller(api, namespace="system", metrics=Metrics())  # type: ignore[arg-type]
    api.create(JOBS, job(disruptionBudget=False, ttlSecondsAfterFinished=0))
    for method in ("get", "list", "create", "replace", "change", "delete"):
        monkeypatch.setattr(api, method, counted(method))
    thread = Thread(target=controller.run)
    thread.start()
    poll_until(lambda: len(api.list(PODS)[0]) == 4)
    poll_until(lambda: len(api.list(EVENTS)[0]) > 0)
    api.change(JOBS, "here", "a", {"spec": {"workers": 2}})
    poll_until(lambda: len(api.list(PODS)[0]) == 2)
    api.run_pods(0)
    poll_until(lambda: not api.list(JOBS)[0])
    controller.stop()
    thread.join()
    assert {"create events", "create leases", "replace leases", "delete pods", "delete elasticjobs"} <= {
        " ".join(one.split()[:2]) for one in api.calls
    }
    assert not hasty
