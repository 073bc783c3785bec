"""What loggers write: only rank 0 writes, and a new rank 0 repeats what may have been lost.

When rank 0 is killed, what it was about to write may be lost. All workers call their loggers, which do nothing except
in rank 0; each worker remembers these calls until a later collective has shown that rank 0 has made them too. A new
rank 0 repeats the calls that it remembers. A row that is already in a CSV file is left out; other loggers may receive a
value twice, but none is lost.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from ef_common.session import Session
from ef_lightning import hooks
from ef_lightning.host import LightningHost


class _Call(NamedTuple):
    completed: int  # collectives, when it was made
    logger: Any
    metrics: dict[str, Any]
    step: int | None


class Logs:
    """The loggers of one Trainer, from `attach` to `detach`.

    Args:
        trainer: The Trainer.
        session: The worker's session.
        host: The class tree.
    """

    def __init__(self, trainer: Any, session: Session, host: LightningHost) -> None:
        self._loggers: list[Any] = list(trainer.loggers)
        self._session = session
        self._host = host
        self._calls: list[_Call] = []
        self._is_writer = session.rank == 0

    def attach(self) -> None:
        """Remember from now on what rank 0 must write."""
        for logger in self._loggers:
            # A method that `rank_zero_only` has wrapped; others write in every worker.
            if hasattr(getattr(type(logger), "log_metrics", None), "__wrapped__"):
                hooks.replace(logger, "log_metrics", partial(self._remembering, logger))

    def detach(self) -> None:
        """Leave the loggers as they were."""
        for logger in self._loggers:
            hooks.put_back(logger, "log_metrics")
        self._calls.clear()

    def _remembering(self, logger: Any, log_metrics: Callable[..., None]) -> Callable[..., None]:
        def remember(metrics: Mapping[str, Any], step: int | None = None, *args: Any, **kwargs: Any) -> None:
            session = self._session
            if not session.newcomer:
                call = _Call(session.completed, logger, dict(metrics), step)
                self._calls = [*self._unwritten, call]
            log_metrics(metrics, step, *args, **kwargs)
            if session.rank == 0 and self._is_csv(logger):
                logger.save()  # callbacks do not; what is in this process only would be lost with it

        return remember

    @property
    def _unwritten(self) -> list[_Call]:
        """Calls that no collective has followed yet; rank 0 joins one only after everything before it."""
        return [call for call in self._calls if call.completed == self._session.completed]

    def _is_csv(self, logger: Any) -> bool:
        return isinstance(logger, self._host.get("loggers", "CSVLogger"))

    def follow_ranks(self) -> None:
        """There is a new view. A new rank 0 continues to write where the previous one stopped."""
        was_writer, self._is_writer = self._is_writer, self._session.rank == 0
        if self._is_writer and not was_writer:
            self._take_over()

    def _take_over(self) -> None:
        for logger in self._loggers:
            if self._is_csv(logger) and logger._experiment is None:
                logger._experiment = self._keeping_writer(logger.log_dir)
        for call in self._unwritten:
            if not self._is_written(call):
                call.logger.log_metrics(call.metrics, call.step)
                call.logger.save()

    def _keeping_writer(self, directory: str) -> Any:
        """Replace Lightning's CSV writer, which would delete existing metrics, by one that appends."""
        writer_class = self._host.get("loggers.csv_logs", "ExperimentWriter")
        writer = type("KeepingWriter", (writer_class,), {"_check_log_dir_exists": lambda self: None})(directory)
        if os.path.isfile(writer.metrics_file_path):
            with open(writer.metrics_file_path, newline="") as file:
                writer.metrics_keys = list(next(csv.reader(file), []))
        return writer

    def _is_written(self, call: _Call) -> bool:
        """A CSV file has a row of this step with these metrics."""
        if not self._is_csv(call.logger):
            return False
        path = call.logger.experiment.metrics_file_path
        if not os.path.isfile(path):
            return False
        prefix = f"{call.logger._prefix}{call.logger.LOGGER_JOIN_CHAR}" if call.logger._prefix else ""
        names = {f"{prefix}{name}" for name in call.metrics} | {"step"}
        with open(path, newline="") as file:
            return any(
                row["step"] == str(call.step) and names == {name for name, value in row.items() if value}
                for row in csv.DictReader(file)
            )
