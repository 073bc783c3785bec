"""Notices that this worker must leave: SIGTERM, SIGUSR1 (Slurm's `--signal`), SIGHUP, and sources that are polled.

A notice is a wish and interrupts nothing: the session leaves at the next boundary that all agree on, and the process
ends with status 0. If it has not reached one within the grace time (a validation may be long), it ends itself, as if it
had been killed.

Python calls a handler between any two instructions of the main thread, which may hold any lock. The handler therefore
only puts the notice into a queue that is always safe to use, and a thread does the rest. Launchers that signal whole
process groups, and then each worker again, mean one notice: a SIGTERM counts as a second one only after
`SAME_NOTICE_S`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NoReturn

from ef_common import threads
from ef_common.events import EventLog
from ef_common.launch.notice_sources import NoticeSource
from ef_common.launch.signals import SAME_NOTICE_S
from ef_common.session import Session

logger = logging.getLogger(__name__)

ASK_S = 1.0
"""How often a source is polled, and the coordinator is told again."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_LAST_WORDS_S = 1.0
OUT_OF_TIME = 128 + signal.SIGTERM
"""Exit status of a worker whose grace time is over: what a shell shows for one that SIGTERM has ended."""


class DepartureNotices:
    """Handles the notices to one worker, between `start` and `stop`.

    Args:
        session: The worker's session.
        elastic: Whether it has a coordinator. Without one, notices are handled only if the state can be saved
            (`Session.on_last_leave`).
        sources: Asked every second.
        grace_s: Time after a notice at which the process ends itself.
        log: Event log.

    Attributes:
        heard: The signals that have come.
    """

    def __init__(
        self,
        session: Session,
        *,
        elastic: bool,
        sources: Sequence[NoticeSource] = (),
        grace_s: float,
        log: EventLog,
    ) -> None:
        self.grace_s = grace_s
        self._session = session
        self._elastic = elastic
        self._sources = sources
        self._log = log
        self._process = os.getpid()
        self._heeding = False
        self.heard: set[int] = set()
        self._told: SimpleQueue[tuple[str, float]] = SimpleQueue()
        self._first_term: float | None = None
        self._closed = threading.Event()
        self._watching = False
        self._handler: Callable[[int, Any], None] = self._handle
        self._before: dict[int, Any] = {}
        self._installed: set[int] = set()

    @property
    def active(self) -> bool:
        """Whether notices are handled now."""
        return self._heeding and (self._elastic or self._session.on_last_leave is not None)

    def save_on_last_leave(self, save: Callable[[], None]) -> None:
        """Call `save` if nobody is left when this worker leaves, so that notices work without others, too."""
        self._session.on_last_leave = save
        if self._heeding:
            self.start()

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Handle notices from now on. May be repeated. A handler that is set later may call ours, or not."""
        self._heeding = True
        if not self.active or self._closed.is_set():
            return
        self._install()
        if not self._watching:
            self._watching = True
            threads.start(self._watch, name="elasticflow-notices", job="heeds notices")
            for source in self._sources:
                ask = partial(self._ask, source)
                threads.start(ask, name="elasticflow-notice-source", job="looks for a notice")

    def stop(self) -> None:
        """Stop handling notices, which would have no effect: signals do what they did before."""
        self._heeding = False
        if threading.current_thread() is not threading.main_thread():
            return
        for number in list(self._installed):
            if signal.getsignal(number) == self._handler:  # else somebody calls ours, which passes it on
                signal.signal(number, self._before[number])
                self._installed.remove(number)

    def close(self) -> None:
        """The process is about to end normally, so the grace time no longer applies."""
        self.stop()
        self._closed.set()

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            logger.warning("signals are no notices here: Python sets handlers in the main thread only")
            return
        for number in SIGNALS:
            before = signal.getsignal(number)
            # What is ignored stays so. What did not come from Python is unknown, and could not be put back.
            if number in self._installed or before in (signal.SIG_IGN, None):
                continue
            if before != self._handler:  # which a Trainer may have put back after a training
                self._before[number] = before
                signal.signal(number, self._handler)
            self._installed.add(number)

    # ------------------------------------------------------------ in the handler

    def _handle(self, number: int, frame: Any) -> None:
        before = self._before.get(number, signal.SIG_DFL)
        if os.getpid() != self._process:  # a data worker, signalled with its group; its parent still needs it
            if number == signal.SIGTERM:
                _end_by(number)
        elif self.active:
            self.take(number)
            if callable(before):
                before(number, frame)
        elif callable(before):
            before(number, frame)
        else:
            _end_by(number)

    def take(self, number: int) -> None:
        """Treat a signal as a notice; a handler may call this."""
        self.heard.add(number)
        now = time.monotonic()
        if number == signal.SIGTERM:
            if self._first_term is not None and now > self._first_term + SAME_NOTICE_S:
                _end_by(number)
            self._first_term = self._first_term or now
        self._told.put((signal.Signals(number).name, now))

    # ------------------------------------------------------------ the threads

    def _ask(self, source: NoticeSource) -> None:
        failed = ""
        while not self._closed.wait(ASK_S):
            try:
                if self.active and (what := source.ask()):
                    self._told.put((what, time.monotonic()))
                    return
            except Exception as error:  # what cannot be asked now may be asked later
                if str(error) != failed:
                    logger.warning("no notice can be looked for: %s", error, exc_info=error)
                failed = str(error)

    def _watch(self) -> None:
        what, since = self._told.get()
        self._leave()
        logger.warning("%s: leaving at the next boundary, within %g s", what, self.grace_s)
        try:
            self._log.write("notice", what=what)
        except Exception as error:
            logger.warning("the notice cannot be logged: %s", error, exc_info=error)
        while (left := since + self.grace_s - time.monotonic()) > 0:
            if self._closed.wait(min(left, ASK_S)):
                return
            self._leave()  # again: it may not have been heard while there was no line yet
        self._end_late()

    def _leave(self) -> None:
        try:
            self._session.leave()
        except Exception as error:  # whoever gave the notice waits for the end, which comes with the grace time
            logger.warning("this worker cannot ask to leave: %s", error, exc_info=error)

    def _end_late(self) -> NoReturn:
        in_any_case = threading.Timer(_LAST_WORDS_S, os._exit, (OUT_OF_TIME,))
        in_any_case.daemon = True
        with contextlib.suppress(RuntimeError):  # there can be no more threads
            in_any_case.start()  # the main thread may hang while it writes to the log
        logger.error("the grace time of %g s is over, and no boundary has come: ending at once", self.grace_s)
        os._exit(OUT_OF_TIME)


def _end_by(number: int) -> None:
    """End this process with the signal, as if no handler were set."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
