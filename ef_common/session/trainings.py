"""The trainings of a worker's program."""

from __future__ import annotations

import logging
from typing import Any

from ef_common.session.context import Context

logger = logging.getLogger(__name__)


class Trainings:
    """A program may train several times; trainings are numbered from 1.

    A newcomer joins only where its own program is in the members' training, and skips the trainings that are over.

    ::

        over → under_way   `begin`: members tell the coordinator, newcomers do so when they are ready
        under_way → over   `end`: until the next one, the program may take any time

    Args:
        context: Channel of this worker, the record of its progress, on which nobody relies between two trainings, the
            one for its launcher, and the collectives, which tell whether it holds the state of the members' training.

    Attributes:
        number: Number of the training that the program has reached.
        has_skipped: Whether it has skipped a training that the others had ended already.
        lacks_results: Whether it has skipped a training whose result is not even in a checkpoint.
        first_claiming: The `ef_common.data.claiming` of this process's first training, which counts for all.
    """

    def __init__(self, context: Context) -> None:
        self.number = 1
        self.has_skipped = False
        self.lacks_results = False
        self.first_claiming: Any = None
        self._channel = context.channel
        self._tracker = context.tracker
        self._collectives = context.collectives
        self._record = context.crash_record

    def begin(self, number: int) -> None:
        """The program has come to its n-th training."""
        self.number, self._tracker.rests = number, False
        self._record.begin_training()
        if number > 1 and not self._collectives.is_fresh:
            self._channel.send("begin", number)

    def end(self) -> None:
        """The training has ended normally."""
        self._tracker.rests = True
        self._record.end_training()

    @property
    def are_over(self) -> bool:
        """Whether the program has trained, and is in no training any more."""
        return self._tracker.rests

    @property
    def is_behind(self) -> bool:
        """Whether, in a newcomer, the others are in a later training than its own program.

        Raises:
            CoordinatorLost, JobFinished: It cannot join any more.
        """
        return self._collectives.is_fresh and self._channel.job_training() > self.number

    def skip(self, *, has_result: bool) -> None:
        """Skip this training, which is over in the other workers.

        Args:
            has_result: The program goes on with what has come of it, out of a checkpoint.
        """
        logger.log(
            logging.INFO if has_result else logging.WARNING,
            "training %d of the program is over in the other workers: skipping it, %s",
            self.number,
            "with its result from a checkpoint"
            if has_result
            else "without its result, as there is no checkpoint of it",
        )
        self.has_skipped = True
        self.lacks_results |= not has_result
