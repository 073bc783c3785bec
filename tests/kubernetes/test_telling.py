"""Events of a job."""

from __future__ import annotations

from ef_common.kubernetes.kinds import EVENTS, JOBS
from ef_common.kubernetes.telling import Teller
from tests.kubernetes.memory_api import MemoryApi
from tests.kubernetes.objects import job


def told(api: MemoryApi) -> list[str]:
    return [f"{one['reason']} {one['message']}" for one in api.list(EVENTS)[0]]


def test_same_event_is_not_told_twice_in_a_row(api: MemoryApi) -> None:
    teller, thing = Teller(api, wait=lambda: None), api.create(JOBS, job())  # type: ignore[arg-type]
    for message in ("grows", "grows", "shrinks", "grows"):
        teller.tell(thing, "Resized", message)
    assert told(api) == ["Resized grows", "Resized shrinks", "Resized grows"]


def test_event_that_cannot_be_written_is_lost(api: MemoryApi) -> None:
    teller, thing = Teller(api, wait=lambda: None), api.create(JOBS, job())  # type: ignore[arg-type]
    api.down = True
    teller.tell(thing, "Resized", "grows")
    api.down = False
    teller.tell(thing, "Resized", "shrinks")
    assert told(api) == ["Resized shrinks"]


def test_each_event_that_is_written_waits_for_its_turn(api: MemoryApi) -> None:
    waited = list[int]()
    teller, thing = Teller(api, wait=lambda: waited.append(len(told(api)))), api.create(JOBS, job())  # type: ignore[arg-type]
    for message in ("grows", "grows", "shrinks"):
        teller.tell(thing, "Resized", message)
    assert waited == [0, 1]
