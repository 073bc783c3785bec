"""An agent that is told to go by SIGUSR1, as by Slurm's ``--signal``, lets its workers leave at a step boundary.

SIGTERM, SIGINT and SIGHUP are torchrun's: it passes them on to the workers, and ends after these. SIGUSR1 would end the
agent at once, and its worker would not know.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import psutil

from ef_common import threads

logger = logging.getLogger(__name__)

SIGNAL = signal.SIGUSR1
_LOOK_S = 0.1


class Departure:
    """The departure of an agent, between `listen` and `stop`.

    Attributes:
        told: Whether the agent was told to go.
    """

    def __init__(self) -> None:
        self.told = False
        self._stopped = threading.Event()
        self._before: Any = None
        self._end: Callable[[], NoReturn] | None = None

    def listen(self) -> None:
        """Heed SIGUSR1, unless it is ignored. Main thread only, as Python sets no handlers elsewhere."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(SIGNAL) is not signal.SIG_IGN:
            self._before = signal.signal(SIGNAL, self._hear)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [SIGNAL])  # whoever has forked us may have blocked it until now

    @contextlib.contextmanager
    def before_workers(self, end: Callable[[], NoReturn]) -> Iterator[None]:
        """Within this there are no workers yet, and the agent may wait for another machine: SIGUSR1 ends that wait.

        Args:
            end: Called in the handler. It raises what ends the agent.
        """
        self._end = end
        try:
            yield
        finally:
            self._end = None

    def stop(self) -> None:
        """Heed it no more."""
        self._stopped.set()
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(SIGNAL, self._before)
            self._before = None

    def _hear(self, number: int, frame: Any) -> None:
        if not self.told:
            self.told = True
            if self._end is not None:
                self._end()
            threads.start(self._pass_on, name="elasticflow-departure", job="tells the workers to leave")

    def _pass_on(self) -> None:
        """Tell each worker once; some may be starting."""
        passed_on: set[psutil.Process] = set()
        problem = ""
        while not self._stopped.is_set():
            try:
                _tell_workers(passed_on)
            except Exception as error:  # the agent ends only after its workers, so they must learn of it
                if str(error) != problem:
                    logger.warning("workers cannot be told to leave yet: %s", error, exc_info=error)
                problem = str(error)
            self._stopped.wait(_LOOK_S)


def _tell_workers(passed_on: set[psutil.Process]) -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            # A child that still has our program would lose the signal, and other children are no workers.
            if child not in passed_on and "LOCAL_RANK" in child.environ():
                child.send_signal(SIGNAL)
                passed_on.add(child)
