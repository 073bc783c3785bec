"""A registry tells the same to all agents, at each kind of place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ef_common.core.founding import FINISHED, LEFT, Start
from ef_common.errors import InvalidCheckpoint, StorageFailed, ThreadFailed, UsageError
from ef_common.launch.registry import Registration, Registry, Seen
from ef_common.storage.claims import ClaimPlace
from ef_common.storage.store import Store
from tests.waiting import poll_until

LEADER = ("192.0.2.7", 7)


def seen(registry: Registry) -> Seen:
    found = registry.look()
    assert found is not None
    return found


def check(at: Callable[[], ClaimPlace]) -> None:
    first, second = Registry(at(), "none", "a-1"), Registry(at(), "", "b-2")
    assert first.newest() is None
    assert first.look() is None
    assert first.found(1)
    assert not second.found(1)
    assert seen(second).nonce == first.own_nonce != second.own_nonce
    assert seen(second).founder == "a-1"
    first.add(1, ("192.0.2.1", 29400))
    second.add(1, ("::1", 1))
    second.add(1, ("::1", 1))
    assert second.newest() == Start(1)
    assert sorted(seen(first).addresses) == [("192.0.2.1", 29400), ("::1", 1)]
    for beats in range(12):
        first.beat(1, beats, LEADER)
    second.beat(1, 11, ("::1", 1))  # it has seen less
    assert seen(first).addresses[0] == LEADER
    for _ in range(2):
        second.remove(1)
    assert seen(first).addresses == [LEADER, ("192.0.2.1", 29400)]
    assert second.newest() == Start(1, 12)
    assert len(second.place.entries("agents")) == 3
    first.end(1, LEFT)
    second.end(1, FINISHED)
    assert first.newest() == second.newest() == Start(1, 12, LEFT)
    assert second.found(2)
    assert first.newest() == Start(2)
    assert seen(first).addresses == []
    assert seen(first).founder == "b-2"
    assert Registry(at(), "another job", "a-1").newest() is None


def test_records_of_one_agent_are_seen_by_the_others(at: Callable[[], ClaimPlace]) -> None:
    check(at)


def test_records_of_one_agent_are_seen_by_the_others_in_each_store(make: Callable[[], Store]) -> None:
    check(make)


def test_one_of_many_agents_makes_the_start(at: Callable[[], ClaimPlace]) -> None:
    made: list[int] = []

    def found(index: int) -> None:
        if Registry(at(), "none", f"node-{index}").found(1):
            made.append(index)

    threads = [threading.Thread(target=found, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_place_that_does_not_create_exclusively_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Store(f"file://{tmp_path}")
    monkeypatch.setattr(place, "create", lambda name, data, **_: (tmp_path / "any").write_bytes(data))
    with pytest.raises(UsageError, match="does not create files exclusively"):
        Registry(place, "none", "a").found(1)


def test_leader_leaves_signs_of_life_and_hears_of_a_newer_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ef_common.launch.registry.BEAT_S", 0.01)
    registry = Registry(Store(f"file://{tmp_path}"), "none", "a")
    assert registry.found(1)
    leads, newer = threading.Event(), []
    registration = Registration(
        registry, 1, address=LEADER, leads=leads.is_set, on_newer=lambda number: newer.append(number) is None
    )
    registration.start()
    try:
        leads.set()
        poll_until(lambda: registry.newest().beats > 2)  # type: ignore[union-attr]
        assert Registry(registry.place, "none", "b").found(2)
        poll_until(lambda: newer == [2])
    finally:
        registration.end(FINISHED)
    assert registry.newest() == Start(2)
    registry.end(2, LEFT)
    assert registry.newest() == Start(2, 0, LEFT)


def test_place_that_does_not_answer_keeps_no_agent_from_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ef_common.launch.registry._LAST_S", 0.01)
    registry = Registry(Store(f"file://{tmp_path}"), "none", "a")
    assert registry.found(1)
    answers = threading.Event()
    monkeypatch.setattr(registry.place, "delete", lambda name: answers.wait(60))
    Registration(registry, 1, address=LEADER, leads=lambda: True, on_newer=lambda _: True).end(LEFT)
    assert not answers.is_set()
    answers.set()
    poll_until(lambda: registry.newest() == Start(1, 0, LEFT))


def test_signs_of_life_go_on_after_any_error_and_a_newer_start_is_told_until_it_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ef_common.launch.registry.BEAT_S", 0.01)
    registry = Registry(Store(f"file://{tmp_path}"), "none", "a")
    assert registry.found(1)
    newest, errors = registry.newest, [InvalidCheckpoint("torn"), StorageFailed("away"), ValueError("nonsense")]

    def failing() -> Start | None:
        if errors:
            raise errors.pop()
        return newest()

    monkeypatch.setattr(registry, "newest", failing)
    answers = [True, False, False]
    registration = Registration(registry, 1, address=LEADER, leads=lambda: True, on_newer=lambda _: answers.pop())
    registration.start()
    try:
        poll_until(lambda: newest().beats > 2)  # type: ignore[union-attr]
        assert Registry(registry.place, "none", "b").found(2)
        poll_until(lambda: not answers)
    finally:
        registration.end()


def test_end_is_recorded_also_where_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(Store(f"file://{tmp_path}"), "none", "a")
    assert registry.found(1)

    def start(*_: object, **__: object) -> None:
        raise ThreadFailed("the interpreter is about to end")

    monkeypatch.setattr("ef_common.threads.start", start)
    Registration(registry, 1, address=LEADER, leads=lambda: True, on_newer=lambda _: True).end(LEFT)
    assert registry.newest() == Start(1, 0, LEFT)


def test_agent_ends_although_recording_its_end_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ef_common.launch.registry._LAST_S", None)  # it would wait for ever
    registry = Registry(Store(f"file://{tmp_path}"), "none", "a")
    assert registry.found(1)
    monkeypatch.setattr(registry, "end", lambda number, how: 1 / 0)
    Registration(registry, 1, address=LEADER, leads=lambda: True, on_newer=lambda _: True).end(LEFT)
    assert registry.newest() == Start(1)
