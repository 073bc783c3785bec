"""`elasticflow scale`: orders a number of workers, and watches the run until it has them."""

from __future__ import annotations

import time
from pathlib import Path

from ef_common.launch import run_directory, slurm
from ef_common.report.status import Status, over
from ef_common.story import in_words
from ef_common.terminal import num_workers

_LOOK_S = 0.1


class Scaling:
    """Orders a number of workers from the launcher of a run, or from Slurm.

    Args:
        run_dir: Directory of the run.
        num_workers: Number of workers that the job shall have.

    Raises:
        UsageError: There is no such launcher, or it cannot start that many workers.
    """

    def __init__(self, run_dir: Path, num_workers: int) -> None:
        self._status = Status(run_dir)
        self._status.update()
        self._before = self._status.members
        self._wanted = num_workers
        self._began = time.monotonic()
        job = slurm.job_in(run_dir)
        if job is None:
            run_directory.order(run_dir, num_workers)
        else:
            slurm.scale(job, num_workers)

    @property
    def plan(self) -> str:
        """The order in words."""
        return f"{len(self._before)} → {num_workers(self._wanted)} ordered"

    def wait(self) -> tuple[bool, str]:
        """Wait until the job has the ordered number of workers.

        Returns:
            Whether it has come to that, and what has happened, in words.
        """
        status = self._status
        while True:
            ended = over(status.run_dir)
            status.update()
            if len(status.members) == self._wanted:
                return True, self._told()
            if ended:
                return False, f"the run has ended with {num_workers(len(status.members))}, before it had {self._wanted}"
            time.sleep(_LOOK_S)

    def _told(self) -> str:
        before, now = self._before, self._status.members
        if set(before) == set(now):
            return f"the run has {num_workers(len(now))} already"
        return f"{in_words(before, now)} after {time.monotonic() - self._began:.1f} s"
