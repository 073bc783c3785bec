"""Which of the data workers that were forked have begun to run, and the end of those that never will.

A process that is forked while another thread holds a lock which the child needs waits for it for ever, before it runs a
line of Python. Python 3.11 and older may hold such a lock themselves (https://github.com/python/cpython/issues/112275),
and so may libraries. Nobody else would notice: such a process lives, and ignores SIGTERM.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import util
from typing import Any

logger = logging.getLogger(__name__)

MAX_WAITS = 120
"""How often a batch is waited for in vain, a quarter of a second each time, before a process counts as one of these."""
_PID = struct.Struct("=q")
_MANY = 4096
_DEATH_S = 2.0


class Births:
    """Hears of each process that multiprocessing forks from this one from now on, once it runs."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)  # nobody may be reading any more
        self._born: set[int] = set()
        util.register_after_fork(self, Births._tell)

    def _tell(self) -> None:
        with suppress(OSError):
            os.write(self._writer, _PID.pack(os.getpid()))

    def hear(self) -> None:
        """Take in what is told: of too many, the last ones would not be."""
        with suppress(BlockingIOError):
            while told := os.read(self._reader, _MANY * _PID.size):
                self._born.update(born for (born,) in _PID.iter_unpack(told))

    def take(self, pid: int) -> bool:
        """Whether this process has begun to run. That it has is told once."""
        self.hear()
        is_born = pid in self._born
        self._born.discard(pid)
        return is_born


class Unborn:
    """Those of a loader's worker processes that have not begun to run.

    Args:
        births: What has been heard since before they were forked.
        workers: All of its processes; those that were not forked are not looked at.
    """

    def __init__(self, births: Births, workers: Iterable[Any]) -> None:
        self._births = births
        self._workers = [worker for worker in workers if getattr(worker._popen, "method", "") == "fork"]
        self._num_waits = 0

    def waited(self) -> None:
        """A batch was waited for in vain: if that has happened too often, end them."""
        self._num_waits += 1
        if self._num_waits == MAX_WAITS:
            self.give_up()

    def give_up(self) -> None:
        """They are waited for no longer: end them, with a warning."""
        if ended := self.end():
            logger.warning(
                "data workers %s have not begun to run, as a lock was held when they were forked; they are started "
                "again. Python 3.12 and newer hold no such lock themselves",
                ", ".join(map(str, ended)),
            )

    def end(self) -> list[int]:
        """End them; returns their process ids."""
        unborn = [worker for worker in self._workers if not self._births.take(worker.pid)]
        for worker in unborn:
            worker.kill()
        for worker in unborn:
            worker.join(_DEATH_S)
        self._workers = []
        return [worker.pid for worker in unborn]


_heard: dict[int, Births] = {}


def births() -> Births:
    """What this process hears, from its first call on. It is called before each fork that matters."""
    pid = os.getpid()
    if pid not in _heard:  # a forked process shares the pipe of the other one
        _heard.clear()
        _heard[pid] = Births()
    _heard[pid].hear()
    return _heard[pid]
