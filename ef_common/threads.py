"""Threads whose failures do not go unnoticed: an exception is logged and reported to the waiting thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ef_common.errors import ThreadFailed

logger = logging.getLogger(__name__)


def start(
    run: Callable[[], object],
    *,
    name: str,
    job: str,
    on_failure: Callable[[ThreadFailed], object] = lambda failure: None,
    daemon: bool = True,
) -> threading.Thread:
    """Run something in a thread of its own.

    Args:
        run: What to run.
        name: The name of the thread.
        job: What the thread does, as it completes "the thread that …".
        on_failure: Called in the thread with an error if `run` raises anything; it wakes the waiting threads.
        daemon: The interpreter does not wait for the thread at its end.

    Raises:
        ThreadFailed: The thread cannot be started.

    Example:
        >>> from queue import SimpleQueue
        >>> told = SimpleQueue()
        >>> thread = start(lambda: 1 / 0, name="divider", job="divides", on_failure=told.put)
        >>> told.get()
        ThreadFailed('the thread that divides has failed: ZeroDivisionError: division by zero')
    """

    def body() -> None:
        try:
            run()
        except BaseException as error:  # a thread ends without a word even by a SystemExit
            failure = failed(job, error)
            try:
                on_failure(failure)
            finally:
                logger.error("%s", failure, exc_info=error)

    thread = threading.Thread(target=body, name=name, daemon=daemon)
    try:
        thread.start()
    except RuntimeError as error:  # the machine lets this process have no more threads
        raise failed(job, error) from error
    return thread


def failed(job: str, error: BaseException) -> ThreadFailed:
    """The error that the waiting threads raise.

    Args:
        job: What the thread does, as it completes "the thread that …".
        error: What it has raised.
    """
    failure = ThreadFailed(f"the thread that {job} has failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
