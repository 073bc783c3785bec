"""Where the workers of a job come together for each of the peers' tests.

The workers are those of ``pytest --dist=each``: processes that run the same tests in the same order. The process that
has started them holds the meetings, and each of them asks there for the job of its next test.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Protocol, cast

from ef_common.launch.environment import NODE


def options(num_workers: int) -> list[str]:
    """Options of pytest for so many workers. A process that takes the place of a dead one has its environment."""
    return ["--dist=each", *(f"--tx=popen//env:{NODE}=peer-{number}" for number in range(num_workers))]


class Job(Protocol):
    """What is opened for a test: a coordinator."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""

    def stop(self) -> None:
        """End it."""


class Meetings:
    """Brings the workers together before each test, and opens a job for it.

    A worker that dies comes back as a new process, behind the test that it died in. If it died between two tests, the
    others wait at the first of them, which has no job then.

    Args:
        num_workers: So many come to each test.
        open_job: Opens the job of a test.
        patience_s: So long a worker waits for the others, who may be in the test before.
    """

    def __init__(self, num_workers: int, open_job: Callable[[], Job], *, patience_s: float) -> None:
        self._num_workers = num_workers
        self._open_job = open_job
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._places: dict[str, int] = {}
        self._job: tuple[int, Job] | None = None

    def come(self, worker: str, place: int) -> str | None:
        """Come to a test, and wait for the others.

        Args:
            worker: Name of the worker, which the process after it has too.
            place: Of the test, in the list of all.

        Returns:
            Address of the job, or None if another worker has passed this test.

        Raises:
            TimeoutError: The others have not come.
        """
        with self._changed:
            self._places[worker] = place
            if self._is_complete(place) and set(self._places.values()) == {place}:
                self.close()  # all have left the test before
                self._job = place, self._open_job()
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._is_complete(place), self._patience_s):
                raise TimeoutError(f"the others have not come to test {place} in {self._patience_s} s: {self._places}")
            if self._job is None or self._job[0] != place:
                return None
            return "{}:{}".format(*self._job[1].address)

    def close(self) -> None:
        """End the newest job."""
        if self._job is not None:
            self._job[1].stop()
        self._job = None

    def _is_complete(self, place: int) -> bool:
        return len(self._places) == self._num_workers and min(self._places.values()) >= place


def serve(meetings: Meetings) -> tuple[str, int, str]:
    """Let other processes of this machine come, as long as this process lives. Returns what they need to `connect`."""
    key = secrets.token_hex()
    listener = Listener(("127.0.0.1", 0), authkey=key.encode())
    threading.Thread(target=_accept, args=(listener, meetings), daemon=True).start()
    host, port = cast(tuple[str, int], listener.address)
    return host, port, key


def connect(host: str, port: int, key: str) -> Callable[[str, int], str | None]:
    """`Meetings.come` of the process that serves them. It raises EOFError where that raises anything."""
    connection = Client((host, port), authkey=key.encode())

    def come(worker: str, place: int) -> str | None:
        connection.send((worker, place))
        return cast("str | None", connection.recv())

    return come


def _accept(listener: Listener, meetings: Meetings) -> None:
    while True:
        connection = listener.accept()
        threading.Thread(target=_answer, args=(connection, meetings), daemon=True).start()


def _answer(connection: Connection[Any, Any], meetings: Meetings) -> None:
    with connection, suppress(EOFError, ConnectionError):  # the worker has ended
        while True:
            connection.send(meetings.come(*connection.recv()))
