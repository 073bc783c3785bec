"""Training on data that each worker walks through: their end, their comparison, and the way of a newcomer to them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from ef_common.core.checksums import Checksums
from ef_common.core.sharding import Window
from ef_common.core.watermark import Watermark
from ef_common.data.comparison import compare, differ
from ef_common.data.dealer import Dealer
from ef_common.data.walked_stream import WalkedStream
from ef_common.errors import UsageError
from ef_common.events import EventLog
from ef_common.session import Session

logger = logging.getLogger(__name__)

_STEPS_BETWEEN_CHECKS = 100
_SECONDS_BETWEEN_REPORTS = 10.0


class Walk:
    """The walk of a worker through a stream whose batches a dealer deals.

    All members call these methods in the same steps. What they have read is compared in the first step of each epoch
    and in every hundredth one, in one small exchange.

    Args:
        stream: The stream.
        dealer: Deals its batches.
        session: The worker's session.
        log: Event log.
        remedy: What users do about workers that read different data; one or more sentences without the last stop.
        noise: What users do about batches of which some parts differ and others tell that they are the same ones
            (images that are augmented, and their labels), which is worth a warning then; None if it is an error.
    """

    def __init__(
        self,
        stream: WalkedStream,
        dealer: Dealer,
        session: Session,
        *,
        log: EventLog,
        remedy: str,
        noise: str | None = None,
    ) -> None:
        self.stream = stream
        self._dealer = dealer
        self._session = session
        self._log = log
        self._remedy = remedy
        self._noise = noise
        self._has_warned = False
        self._is_due = False

    def begin(self, epoch: int) -> None:
        """An epoch begins, in all members."""
        self.stream.begin(epoch)
        self._is_due = True  # its first step compares

    # ------------------------------------------------------------ a step

    def finds_end(self) -> bool:
        """With data of unknown length: whether they turn out to end before, in or right behind the next window.

        The epoch has its length then. All workers walk as far, so all find the end in the same step.
        """
        stream, dealer = self.stream, self._dealer
        if not stream.is_open or dealer.progress.remaining == 0:
            return False
        progress, window = dealer.next_window(dealer.progress, self._session.completed_in.ids)
        stream.follow(progress, window)
        if stream.ended_at is None or stream.ended_at >= progress.length:
            return False
        dealer.end_at(stream.ended_at)
        return True

    def follow(self, window: Window) -> None:
        """Walk on to the end of a window that has been dealt, and check that all have read the same."""
        self.stream.follow(self._dealer.progress, window)
        steps, is_due = self._dealer.progress.steps, self._is_due
        self._is_due = False
        if self._session.completed_in.world_size > 1 and (is_due or not steps % _STEPS_BETWEEN_CHECKS):
            self._check()

    def _check(self) -> None:
        progress, cursor = self._dealer.progress, self.stream.cursor

        def note(found: Checksums) -> None:
            self._log.write("read", epoch=progress.epoch, position=cursor, checksums=list(found))

        self._session.entering = False  # a newcomer has read its first window, and meets the others here
        everybody = compare(self._session, self.stream.fingerprints.parts, self._denoise, note)
        if differ(everybody):
            raise UsageError(
                f"the workers read different data at step {progress.steps} of epoch {progress.epoch}, so that "
                f"samples would be used twice or never. {self._remedy}. Received: checksums {everybody}"
            )
        if self._session.rank == 0:
            self._warn_of_noise(everybody[self._session.worker.id])

    def _denoise(self, everybody: dict[str, Checksums]) -> Checksums:
        """This worker's fingerprints, with None for parts that differ by noise, if that may be."""
        found = self.stream.fingerprints
        return found.parts if self._noise is None else found.without_noise(everybody.values())

    def _warn_of_noise(self, found: Checksums) -> None:
        parts = [part for part, value in enumerate(found) if value is None]
        if parts and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the workers read the same batches, but of their parts (numbered from 0) these differ: %s. %s",
                parts,
                self._noise,
            )

    # ------------------------------------------------------------ newcomers

    def tell_watermark(self) -> None:
        """Report the place to newcomers, which walk to it, unless an update of what was dealt is still to come."""
        progress = self._dealer.progress
        if progress.uncommitted:
            return
        self._session.job.tell_watermark(
            Watermark(progress.epoch, progress.cursor, progress.returned, self._session.trainings.number)
        )

    def catch_up(self) -> None:
        """In a newcomer, before the others wait for it: walk to their place.

        Each time that it comes to where they were, they have gone on. If they are not nearer than the last time, they
        are as fast as this worker is, and the rest has to be walked while they wait.

        Raises:
            JobFinished: The job has ended meanwhile.
        """
        stream, target, lag, report = self.stream, None, math.inf, _Report()
        training = self._session.trainings.number
        while (newest := self._session.job.watermark()) is not None and newest.training == training:
            if target is None or not stream.lag(target) or newest.epoch > target.epoch:
                target, before, lag = newest, lag, stream.lag(newest)
                if not 0 < lag < before:
                    break
            stream.approach(target)
            report(lambda: f"batch {stream.cursor} of epoch {stream.epoch}, {stream.lag(newest)} behind the others")
        self._log.write("walked", epoch=stream.epoch, cursor=stream.cursor)

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """What those who continue compare with what they have read.

        If that is nothing yet, as at the first step of an epoch, the first batch is read, so that a newcomer that reads
        other data is found alone, and not in the comparison of all.
        """
        stream, progress = self.stream, self._dealer.progress
        if stream.epoch == progress.epoch and not stream.cursor and progress.remaining:
            stream.go_to(1, progress.returned, keep_from=0)
        return {
            "cursor": stream.cursor,
            "fingerprints": stream.fingerprints.parts,
            "due": self._is_due,
            "ordinal": stream.ordinal,
        }

    def load_state(self, state: dict[str, Any] | None, *, saved: bool) -> None:
        """The dealer continues from the others' state, or from a checkpoint: walk to its place.

        If what was read on the way differs, and more iterators were made over the data there than here, in an earlier
        training that this worker has skipped, then as many are made, and the way is walked again.

        Args:
            state: What `state` returned there; None if nothing was recorded.
            saved: It is a checkpoint's. Its data may have changed since, which is worth a warning and no error, because
                the training could never be continued then.

        Raises:
            UsageError: This worker reads other data than the others.
        """
        stream, progress = self.stream, self._dealer.progress
        self._is_due = True if saved or state is None else bool(state["due"])
        stream.begin(progress.epoch, cursor=progress.cursor)
        start = min(progress.cursor, progress.length)
        target = start if state is None else max(start, state["cursor"])
        self._walk_to(target, keep_from=start)
        if state is None or self._has_read(state):
            return
        if not (stream.fingerprints.parts and state.get("fingerprints")):
            return  # one of both was alone, and has not made any
        if stream.align(state.get("ordinal", 0)):
            self._walk_to(target, keep_from=start)
            if self._has_read(state):
                return
        found = self._denoise({"the others": state["fingerprints"]}) if stream.cursor == state["cursor"] else ()
        if None in found:
            self._warn_of_noise(found)
            return
        if not saved and stream.cursor == state["cursor"]:
            raise UsageError(
                f"this worker reads other data in epoch {progress.epoch} than the others, so that samples would be "
                f"used twice or never. {self._remedy}. Expected: checksums {state['fingerprints']} (batches read: "
                f"{state['cursor']}). Received: {stream.fingerprints.parts}"
            )
        if saved:
            logger.warning(
                "the first %d batches of epoch %d are others than those that were read before the checkpoint was "
                "saved, so that samples may be used twice or never in this epoch. %s",
                target,
                progress.epoch,
                self._remedy,
            )

    def _walk_to(self, target: int, *, keep_from: int) -> None:
        stream, returned, report = self.stream, self._dealer.progress.returned, _Report()
        while stream.cursor < target and stream.ended_at is None:
            stream.go_to(stream.cursor + 1, returned, keep_from=keep_from)
            report(lambda: f"batch {stream.cursor} of {target} in epoch {stream.epoch}")

    def _has_read(self, state: dict[str, Any]) -> bool:
        found = self.stream.fingerprints.parts
        return (self.stream.cursor, found) == (state["cursor"], state.get("fingerprints", found))


class _Report:
    """Logs how far a long walk is, now and then."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _SECONDS_BETWEEN_REPORTS

    def __call__(self, place: Callable[[], str]) -> None:
        """Log the place, if it is time to."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SECONDS_BETWEEN_REPORTS
            logger.info("walking through the stream to where the training is: %s", place())
