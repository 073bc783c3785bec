"""Reads ahead what will probably be needed, in threads or processes of its own.

What is expected changes with the members. Nothing is handed out but what is asked for: what was read for nobody is
dropped, so reading ahead decides nothing about who trains on what.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from ef_common.data.seeds import seed_python
from ef_common.errors import DataWorkersLost

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_MAX_RESTARTS = 3

_data: Any = None  # of a process that reads


class ReadAhead:
    """Reads entries of a sequence ahead of their use.

    Args:
        data: Asked for its entries, by `data[index]`.
        num_readers: Threads or processes.
        processes: Whether to use processes. Each has a copy of the data, made when it begins.
        num_ahead: Entries that are read, or have been read, before they are asked for; at most.
        key: Maps an index to the key of the random numbers of NumPy and Python with which a process reads it.
    """

    def __init__(
        self,
        data: Any,
        *,
        num_readers: int,
        processes: bool,
        num_ahead: int,
        key: Callable[[int], Sequence[int]] = lambda index: [index],
    ) -> None:
        self._data = data
        self._num_readers, self._processes = num_readers, processes
        self.num_ahead = num_ahead
        self._key = key
        self._pool: Executor | None = None
        self._pending: dict[int, Future[Any]] = {}
        self._num_restarts = 0

    def expect(self, indices: Sequence[int]) -> None:
        """Expect requests for these entries, in this order. Earlier expectations are dropped."""
        wanted = dict.fromkeys(indices[: self.num_ahead])
        for index in [index for index in self._pending if index not in wanted]:
            self._pending.pop(index).cancel()
        for index in wanted:
            if index not in self._pending:
                self._pending[index] = self._submit(index)

    def take(self, index: int) -> Any:
        """Return an entry; an exception from reading it is raised here.

        Raises:
            DataWorkersLost: The processes die again and again.
        """
        while True:
            future = self._pending.pop(index, None) or self._submit(index)
            try:
                found = future.result()
            except BrokenProcessPool as error:
                self._begin_again(error)
            else:
                self._num_restarts = 0
                return found

    def pause(self) -> None:
        """Wait until nothing is being read. Entries that were read stay."""
        wait(self._pending.values())

    def drop(self) -> None:
        """Forget everything read or expected: the data are about to change, so processes need fresh copies."""
        if self._processes:
            self.close()
            return
        for future in self._pending.values():
            future.cancel()
        self.pause()
        self._pending.clear()

    def close(self) -> None:
        """End the threads or processes once their current reads have finished. May be repeated."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()

    def _submit(self, index: int) -> Future[Any]:
        while True:
            if self._pool is None:
                self._pool = self._start()
            if not self._processes:
                return self._pool.submit(self._data.__getitem__, index)
            try:
                return self._pool.submit(_read, index, list(self._key(index)))
            except BrokenProcessPool as error:
                self._begin_again(error)

    def _start(self) -> Executor:
        if self._processes:
            return ProcessPoolExecutor(self._num_readers, initializer=_begin, initargs=(self._data, os.getpid()))
        return ThreadPoolExecutor(self._num_readers, thread_name_prefix="reads-ahead")

    def _begin_again(self, error: BrokenProcessPool) -> None:
        self._num_restarts += 1
        if self._num_restarts > _MAX_RESTARTS:
            raise DataWorkersLost(
                f"the processes that read the data have died {self._num_restarts} times in a row. They may need more "
                f"memory than there is: use fewer of them, or threads. Received: {error}"
            ) from error
        logger.warning("processes that read the data have died; starting them again: %s", error)
        self.close()


def _begin(data: Any, parent: int) -> None:
    """In a reading process: end with the parent, and leave its signals alone."""
    global _data
    _data = data
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    if multiprocessing.get_start_method() == "forkserver":  # the server lives as long as those that it has forked
        threading.Thread(target=_end_with_parent, name="ef-parent", daemon=True).start()
    elif sys.platform == "linux":  # it holds the parent's connections, which must not outlive it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _end_with_parent() -> None:
    try:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
    finally:
        os._exit(1)


def _read(index: int, key: Sequence[int]) -> Any:
    seed_python(key)
    return _data[index]
