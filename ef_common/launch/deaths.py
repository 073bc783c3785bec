"""What a torchrun agent does, in addition to torchrun, when its workers have died.

It counts deaths, waits before restarts, and ends when the job has failed: because of an exception of the user's code,
which a worker has recorded, or because workers die at one step repeatedly.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ef_common.errors import JobFailed
from ef_common.launch import environment
from ef_common.launch.restarts import Death, Restarts
from ef_common.launch.torchrun_agent import failures_of
from ef_common.session.crash_record import read_failure, write_failure

logger = logging.getLogger(__name__)

_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Loss:
    """The death of one worker, whose siblings live.

    Args:
        death: It.
        why: Why the job has failed; "" if it goes on.
        pause_s: How long to wait before the worker is started again.
    """

    death: Death
    why: str
    pause_s: float


class Deaths:
    """Handles deaths of the workers of one agent.

    Args:
        directory: Where they record what they work on.
        node: Name of the node.
        report: Called with a reason, and whether it ends the job in any case: tells the coordinator, and returns why
            the job has failed; "" if it goes on; None if nobody knows.
    """

    def __init__(self, directory: Path, *, node: str, report: Callable[[str, bool], str | None]) -> None:
        self.directory = directory
        self._restarts = Restarts(directory)
        self._node = node
        self._report = report
        self._over = False

    def before_restart(self, *, told: Callable[[], bool]) -> None:
        """Torchrun's agent will restart its workers: wait for as long as is useful.

        Args:
            told: Whether the agent was told to go, which ends the wait.

        Raises:
            ChildFailedError: They must not be restarted: the agent ends as it does when no restarts are left.
            JobFailed: They must not be restarted, and it is unknown how they have died.
        """
        failures = failures_of(inspect.currentframe())
        death, why = self._record(failures)
        if why:
            self._over = True
            raise ChildFailedError("the job has failed", dict(failures)) if failures else JobFailed(why)
        count = self._restarts.count
        logger.warning(
            "a worker died %s (%s); restarting it%s (death %d in a row)",
            death.where,
            death.how,
            f" in {count.pause_s:g} s" if count.pause_s else "",
            count.in_a_row,
        )
        _wait(count.pause_s, until=told)

    def of_one(self, local_rank: int, status: int) -> Loss:
        """One worker has died, and others of this node live.

        Args:
            local_rank: Local rank of the worker.
            status: Its exit status, minus the signal that ended it.
        """
        restarts = Restarts(self.directory, local_rank)
        death, why = self._judge(restarts, [(local_rank, status)])
        return Loss(death, why, restarts.count.pause_s)

    def at_the_end(self) -> None:
        """The agent ends, perhaps because its workers have died and no restarts were left."""
        error = sys.exc_info()[1]
        if isinstance(error, ChildFailedError) and not self._over:
            self._over = True
            self._record(error.failures)

    def _record(self, failures: Mapping[int, ProcessFailure]) -> tuple[Death, str]:
        """Record the death of workers; returns how they died, and why the job has failed, if it has."""
        ordered = sorted(failures.values(), key=lambda failure: failure.timestamp)
        statuses: list[tuple[int, int | None]] = [(failure.local_rank, failure.exitcode) for failure in ordered]
        death, why = self._judge(self._restarts, statuses or [(0, None)])
        if why:
            logger.error("the job has failed: %s", why)
        return death, why

    def _judge(self, restarts: Restarts, statuses: Sequence[tuple[int, int | None]]) -> tuple[Death, str]:
        death = restarts.died(statuses)
        why = read_failure(self.directory)
        if not why and (often := restarts.too_often(death, node=self._node)):
            why = self._report(often, True) or often
        elif not why and death.crash is None and death.status == 1:
            text = f"a worker of node {self._node} raised an exception before it had joined; see its output there"
            answer = self._report(text, False)
            why = answer or ""
            if answer == "":
                restarts.excuse()
        if why:
            write_failure(self.directory, why)
        return death, why


def _wait(seconds: float, *, until: Callable[[], bool]) -> None:
    over = time.monotonic() + seconds
    while (left_s := over - time.monotonic()) > 0 and not until():
        time.sleep(min(left_s, _LOOK_S))


def directory_for_records() -> Path:
    """The launcher's directory, which the launcher removes; otherwise a temporary one of this process."""
    if given := os.environ.get(environment.CRASH_RECORDS):
        return Path(given)
    directory = Path(tempfile.mkdtemp(prefix="elasticflow-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory
