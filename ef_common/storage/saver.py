"""Saving in the background: training hands over a snapshot and continues, whatever the store does.

One thread writes one snapshot at a time, and one more may wait. A newer one takes the place of the one that waits, and
ends the trying again of the one being written; so never more than two are held, however long a store fails or hangs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tenacity

from ef_common import threads
from ef_common.core.lineage import CheckpointId
from ef_common.core.retention import Retention
from ef_common.errors import Fenced, ShareMissing, StorageError, StorageFailed, ThreadFailed
from ef_common.events import EventLog
from ef_common.storage.checkpoints import Checkpoints, Content
from ef_common.storage.failures import describe
from ef_common.storage.retries import Retries

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A state to save, which no longer changes.

    Args:
        id: Under which name.
        content: Reads the host copy; called in the saver's thread, again after a failure.
        on_released: Called once, when the host copy is no longer read: it is saved, given up or dropped. From the
            saver's thread, or within `submit` and `close`.
        complete: The training has ended with it: what to say of the end.
        publishes: False for the shares of a checkpoint that another worker publishes.
    """

    id: CheckpointId
    content: Content
    on_released: Callable[[], None] = lambda: None
    complete: Mapping[str, Any] | None = None
    publishes: bool = True


class _Superseded(StorageFailed):
    """A newer snapshot waits, so this one is not tried again."""


class Saver:
    """Publishes snapshots in its own thread.

    Args:
        checkpoints: Where to; `Checkpoints.run` is set.
        retention: Which checkpoints to keep after each publication.
        retries: How to try again.
        log: Event log of the worker; ``checkpoint``, ``checkpoint_failed`` and ``checkpoint_dropped`` go there.
        on_saved: Called in the saver's thread with a checkpoint that was written, and the seconds which that took.

    Example:
        >>> from ef_common.storage.store import Store
        >>> checkpoints = Checkpoints(Store("memory://doctest-saver"))
        >>> run = checkpoints.claim(parent=None)
        >>> with Saver(checkpoints) as saver:
        ...     id = CheckpointId(run, generation=1, step=7)
        ...     saver.submit(Snapshot(id, Content({"weights": lambda file: file.write(b"1, 2")})))
        >>> checkpoints.newest_valid().id == id
        True
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        *,
        retention: Retention | None = None,
        retries: Retries | None = None,
        log: EventLog | None = None,
        on_saved: Callable[[CheckpointId, float], None] | None = None,
    ) -> None:
        self.checkpoints = checkpoints
        self._retention = retention or Retention()
        self._retries = retries or Retries()
        self._log = log or EventLog(None, "saver")
        self._on_saved = on_saved
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        # guarded by _changed
        self._pending: Snapshot | None = None
        self._writing: Snapshot | None = None
        self._closing = False
        self._failure: BaseException | None = None  # why the newest snapshot that was not dropped is not saved
        self._fenced: Fenced | None = None
        self._broken: ThreadFailed | None = None  # the thread has ended, so nothing more is saved
        self._saved: CheckpointId | None = None
        # of the thread alone
        self._reason: str | None = None

    # ------------------------------------------------------------ for the training thread: never blocks

    def start(self) -> None:
        """Start the thread. It does not keep the process alive."""
        self._thread = threads.start(self._work, name="ef-saver", job="saves checkpoints", on_failure=self._break)

    def submit(self, snapshot: Snapshot) -> None:
        """Save this snapshot as soon as the current one is done; it replaces one that waits."""
        with self._changed:
            refused = self._closing or self._fenced is not None or self._broken is not None
            dropped = snapshot if refused else self._pending
            if not refused:
                self._pending = snapshot
                self._changed.notify_all()
        if dropped is not None:
            self._drop(dropped, "saving has ended" if refused else "a newer one is there")

    @property
    def num_held(self) -> int:
        """Snapshots whose host copy is in use: 0, 1 or 2."""
        with self._changed:
            return sum(one is not None for one in (self._pending, self._writing))

    @property
    def failing(self) -> bool:
        """Whether the store has refused the snapshot that is being written."""
        return self._reason is not None

    @property
    def saved(self) -> CheckpointId | None:
        """The newest snapshot that was published."""
        with self._changed:
            return self._saved

    # ------------------------------------------------------------ at the end

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all submitted snapshots are saved, dropped or given up.

        Returns:
            False if that was not so in time.

        Raises:
            ThreadFailed: The saver's thread has failed, so what was submitted may not be saved.
        """
        with self._changed:
            in_time = self._changed.wait_for(self._is_idle, timeout_s)
            if self._broken is not None:
                raise self._broken
            return in_time

    def close(self, timeout_s: float | None = None) -> None:
        """Save the waiting snapshot, and stop.

        Args:
            timeout_s: Wait no longer; then the thread is left behind.

        Raises:
            StorageFailed: The newest snapshot could not be saved: what training did since the one before is lost
                when the process ends. Or it is not saved yet, and the time is over.
            Fenced: A newer start of the job has taken over, so what this one did is not saved.
            ThreadFailed: The saver's thread has failed. What was not saved before is lost when the process ends.
            Exception: What a function of the newest snapshot's content raised.
        """
        in_time = self.stop(timeout_s)
        with self._changed:
            failure, fenced, broken, saved = self._failure, self._fenced, self._broken, self._saved
        if broken is not None:
            raise broken
        if not in_time:
            raise StorageFailed(
                f"{self.checkpoints.store}: the newest checkpoint is not saved in time. The store is slow, or hangs"
            )
        if fenced is not None:
            raise fenced
        if failure is not None:
            if not isinstance(failure, StorageError):
                raise failure
            before = f"the newest one there is {saved.name}" if saved else "none was saved at all"
            raise StorageFailed(f"The newest checkpoint could not be saved, and {before}: {failure}") from None

    def stop(self, timeout_s: float | None = None) -> bool:
        """Like `close`, but raises nothing: for a worker that ends with another error.

        Returns:
            False if the time was over before all was done.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            in_time = self._changed.wait_for(self._is_idle, timeout_s)
            abandoned, self._pending = self._pending, None
        if abandoned is not None:
            self._drop(abandoned, "the time to save it is over")
        if in_time and self._thread is not None:
            self._thread.join()
        return in_time

    def __enter__(self) -> Saver:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.stop(timeout_s=self._retries.longest.total_seconds())

    # ------------------------------------------------------------ the thread

    def _is_idle(self) -> bool:
        return self._pending is None and self._writing is None

    def _work(self) -> None:
        while (snapshot := self._next()) is not None:
            failure: BaseException | None = None
            try:
                self._save(snapshot)
            except BaseException as error:  # of a SystemExit, too, whoever closes must hear
                failure = error
            self._release(snapshot)
            self._finish(snapshot, failure)

    def _break(self, failure: ThreadFailed) -> None:
        with self._changed:
            self._broken = failure
            waiting, self._pending, self._writing = self._pending, None, None
            self._changed.notify_all()
        if waiting is not None:
            self._release(waiting)

    def _next(self) -> Snapshot | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pending is not None or self._closing)
            self._writing, self._pending = self._pending, None
            return self._writing

    def _finish(self, snapshot: Snapshot, failure: BaseException | None) -> None:
        overtaken = isinstance(failure, Fenced) and not failure.final
        if failure is not None:
            self._tell_end(snapshot, failure)
        abandoned: Snapshot | None = None
        with self._changed:
            self._writing = None
            self._failure = None if overtaken else failure
            if failure is None and snapshot.publishes:
                self._saved = snapshot.id
            if isinstance(failure, Fenced) and failure.final:
                self._fenced = failure
                abandoned, self._pending = self._pending, None
            self._changed.notify_all()
        if abandoned is not None:
            self._drop(abandoned, "saving has ended")

    def _save(self, snapshot: Snapshot) -> None:
        attempts = self._retries.attempts(
            before_sleep=lambda state: self._tell_failure(snapshot, state), sleep=self._sleep
        )
        attempts(self._attempt, snapshot)

    def _attempt(self, snapshot: Snapshot) -> None:
        begin = time.monotonic()
        if not snapshot.publishes:
            num_bytes = self.checkpoints.contribute(snapshot.id, snapshot.content)
            seconds = time.monotonic() - begin
            self._log.write("share", id=snapshot.id.name, seconds=seconds, bytes=num_bytes)
            self._reason = None
            return
        manifest = self.checkpoints.publish(snapshot.id, snapshot.content, pause=self._pause)
        seconds = time.monotonic() - begin
        if snapshot.complete is not None:
            self.checkpoints.mark_complete(snapshot.id, snapshot.complete)
        if snapshot.id == self._saved:
            return  # it was there already, and now it is complete
        self._log.write("checkpoint", id=snapshot.id.name, step=snapshot.id.step, seconds=seconds, bytes=manifest.size)
        if self._reason is not None:
            self._reason = None
            _logger.warning("%s: checkpoints are saved again, the newest is %s", self._store, snapshot.id.name)
        if self._on_saved is not None:
            self._on_saved(snapshot.id, seconds)
        self._clean()

    def _clean(self) -> None:
        try:
            removed = self.checkpoints.clean(self._retention)
        except Exception as error:  # the checkpoint is there; the next one cleans up
            _logger.warning("%s: old checkpoints cannot be removed: %s", self._store, describe(error))
            return
        if removed:
            self._log.write("checkpoint_removed", ids=[id.name for id in removed])

    def _sleep(self, seconds: float) -> None:
        with self._changed:
            if self._changed.wait_for(self._is_superseded, seconds):
                raise _Superseded(f"given up for a newer one, after: {self._reason}")

    def _pause(self, seconds: float) -> None:
        with self._changed:
            if self._changed.wait_for(self._is_superseded, seconds):
                raise ShareMissing("a newer one is due, while others still write their shares")

    def _is_superseded(self) -> bool:
        return self._pending is not None

    # ------------------------------------------------------------ what is told

    @property
    def _store(self) -> str:
        return str(self.checkpoints.store)

    def _tell_failure(self, snapshot: Snapshot, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if error is not None:
            self._log_failure(snapshot, error, attempt=state.attempt_number, final=False)
            self._warn_once(error)

    def _tell_end(self, snapshot: Snapshot, error: BaseException) -> None:
        self._log_failure(snapshot, error, attempt=None, final=True)
        if isinstance(error, Fenced):
            consequence = "no more checkpoints are saved by this worker" if error.final else "it is dropped"
            _logger.warning("%s: %s: %s", self._store, error, consequence)
        elif isinstance(error, ShareMissing):
            _logger.warning("%s: checkpoint %s is given up: %s", self._store, snapshot.id.name, error)
        elif isinstance(error, StorageFailed):
            if not isinstance(error, _Superseded):
                self._warn_once(error)
        else:
            _logger.error("%s: checkpoint %s cannot be made", self._store, snapshot.id.name, exc_info=error)

    def _log_failure(self, snapshot: Snapshot, error: BaseException, **fields: Any) -> None:
        self._log.write("checkpoint_failed", id=snapshot.id.name, reason=describe(error), **fields)

    def _warn_once(self, error: BaseException) -> None:
        """Warn of the first failure in a row, and of each one with a new reason."""
        reason = describe(error)
        if reason != self._reason:
            self._reason = reason
            _logger.warning("Saving a checkpoint failed; training goes on, and saving is tried again: %s", reason)

    def _drop(self, snapshot: Snapshot, reason: str) -> None:
        self._log.write("checkpoint_dropped", id=snapshot.id.name, reason=reason)
        self._release(snapshot)

    def _release(self, snapshot: Snapshot) -> None:
        try:
            snapshot.on_released()
        except Exception:  # the thread must live on
            _logger.exception("%s: what was to follow checkpoint %s failed", self._store, snapshot.id.name)
