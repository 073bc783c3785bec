"""Lightning's messages before it knows its rank ("GPU available: …"): rank 0 shows them, once per job.

Each worker of an elastic job is started as if it were the only one, so Lightning takes it for rank 0 until a Trainer
runs. Whether it is, or a newcomer, the coordinator says, and no launcher knows it before. So what is announced until
then waits: rank 0 tells it when it has its rank, the others never do, and a program that runs no Trainer tells it at
its end. Warnings do not wait. Under torchrun's own backends Lightning knows the ranks, and announces as it always does.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Iterable

from ef_common.errors import UsageError
from ef_common.launch.c10d import is_plain_torchrun
from ef_common.launch.process import is_alone

_SOURCES = ("utilities.rank_zero", "utilities.seed")
"""Modules of Lightning, in whose loggers' names they are announced; a seed is, whatever the rank."""


class Announcements(logging.Filter):
    """Messages of a process that is a worker of a job, as a filter of Lightning's loggers.

    Attributes:
        rank: The worker's rank, None before it is known.
        runs_trainer: A Trainer of the program has begun to run, so they are rank 0's to tell. This process may never
            know its rank: a newcomer may find that the job is over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rank: int | None = None
        self.runs_trainer = False
        self._held: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Let a message pass, or keep it until the rank is known."""
        if record.levelno > logging.INFO or self.rank == 0:
            return True
        if self.rank is None:
            self._held.append(record)
        return False

    def settle(self, rank: int) -> None:
        """The worker has this rank from now on."""
        self.rank = rank
        held, self._held = self._held, []
        if rank == 0:
            for record in held:
                logging.getLogger(record.name).handle(record)

    def end(self) -> None:
        """The process ends."""
        if self.rank is None and not self.runs_trainer:
            self.settle(0)


def hold(packages: Iterable[str]) -> None:
    """Hold messages back, if this process is a worker of a job.

    Args:
        packages: Import names of Lightning's.
    """
    loggers = [logging.getLogger(f"{package}.{source}") for package in packages for source in _SOURCES]
    if not _is_worker() or any(_of(one) for one in loggers):
        return
    announcements = Announcements()
    for one in loggers:
        one.addFilter(announcements)
    atexit.register(announcements.end)


def begin(package: str) -> None:
    """A Trainer starts, with the Lightning of this import name."""
    for announcements in _of(logging.getLogger(f"{package}.{_SOURCES[0]}")):
        announcements.runs_trainer = True


def settle(package: str, rank: int) -> None:
    """This process has this rank from now on.

    Args:
        package: Import name of the Lightning that the program works with.
        rank: The rank.
    """
    for announcements in _of(logging.getLogger(f"{package}.{_SOURCES[0]}")):
        announcements.settle(rank)


def _of(one: logging.Logger) -> list[Announcements]:
    return [found for found in one.filters if isinstance(found, Announcements)]


def _is_worker() -> bool:
    try:
        return not is_alone() and not is_plain_torchrun()
    except UsageError:  # which the strategy raises
        return False
