"""Workers that run the same tests come together for each of them, also when one of them dies."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.peers.meetings import Meetings, connect, options, serve

LONG_S = 60.0


class FakeJob:
    """A job with an address of its own."""

    def __init__(self, opened: list[FakeJob]) -> None:
        opened.append(self)
        self.address = "127.0.0.1", len(opened)
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def opened() -> list[FakeJob]:
    return []


@pytest.fixture
def meetings(opened: list[FakeJob]) -> Meetings:
    return Meetings(2, lambda: FakeJob(opened), patience_s=LONG_S)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_workers_at_a_test_get_the_same_job_and_the_next_test_ends_it(
    meetings: Meetings, opened: list[FakeJob], threads: ThreadPoolExecutor
) -> None:
    for place in range(3):
        other = threads.submit(meetings.come, "b", place)
        assert meetings.come("a", place) == other.result() == f"127.0.0.1:{place + 1}"
        assert [job.stopped for job in opened] == [True] * place + [False]
    meetings.close()
    assert all(job.stopped for job in opened)


def test_worker_that_is_slow_to_wake_has_the_job_though_the_other_is_at_the_next_test(
    meetings: Meetings, threads: ThreadPoolExecutor
) -> None:
    def run(worker: str) -> list[str | None]:
        return [meetings.come(worker, place) for place in range(200)]

    a, b = threads.submit(run, "a"), threads.submit(run, "b")
    assert a.result() == b.result() == [f"127.0.0.1:{place + 1}" for place in range(200)]


def test_test_that_the_others_process_has_died_in_front_of_has_no_job(
    meetings: Meetings, opened: list[FakeJob], threads: ThreadPoolExecutor
) -> None:
    left_behind = threads.submit(meetings.come, "a", 3)
    successor = threads.submit(meetings.come, "b", 4)
    assert left_behind.result() is None
    assert not opened
    assert meetings.come("a", 4) == successor.result() == "127.0.0.1:1"


def test_worker_whose_others_do_not_come_is_told(opened: list[FakeJob]) -> None:
    meetings = Meetings(2, lambda: FakeJob(opened), patience_s=0)
    with pytest.raises(TimeoutError, match="have not come to test 7"):
        meetings.come("a", 7)
    assert not opened


def test_other_processes_come_over_a_connection(meetings: Meetings, threads: ThreadPoolExecutor) -> None:
    access = serve(meetings)
    found: list[Future[str | None]] = [threads.submit(connect(*access), worker, 5) for worker in ("a", "b")]
    assert [future.result() for future in found] == ["127.0.0.1:1"] * 2


def test_workers_are_nodes_of_their_own() -> None:
    assert options(2) == ["--dist=each", *(f"--tx=popen//env:ELASTICFLOW_NODE=peer-{number}" for number in (0, 1))]
