"""The worker processes of a DataLoader's iterator: their deaths, and their end."""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import torch
from torch._utils import ExceptionWrapper

from ef_common.data.births import Unborn, births

_DEATH_S = 2.0
"""How long a data worker whose connection has ended may take to end."""
_NOTICE_S = 0.25
"""How long `next` waits for a batch before it looks whether the data workers live."""
DEATH_ERRORS = (RuntimeError, OSError, EOFError)
"""What `next`, or a new pass, may raise when a data worker dies; `died_with` tells whether one has."""
_PLAIN = torch.utils.data.DataLoader._get_iterator
_FOUND = "DataLoader worker (pid(s)"
"""How torch begins what it says of data workers whose end it has not expected."""


def begin(loader: Any) -> Any:
    """Begin a pass over a loader; returns its iterator, whose `next` alone notices a dead data worker.

    torch's handler of SIGCHLD raises in whatever the main thread does at that moment; in the middle of an
    optimizer step, that would leave half of an update applied.
    """
    heard = births() if getattr(loader, "num_workers", 0) else None
    iterator: Any = iter(loader)
    inner = getattr(iterator, "iterator", iterator) if has_own_iterator(loader) else iterator
    if heard is not None and getattr(inner, "_worker_pids_set", False):
        torch._C._remove_worker_pids(id(inner))
        inner._worker_pids_set = False
        inner._unborn = Unborn(heard, inner._workers)
        inner._try_get_data = functools.partial(_try_often, inner._try_get_data, inner._unborn)
    return iterator


def has_own_iterator(loader: Any) -> bool:
    """Whether a DataLoader's class wraps torch's iterator, as PyTorch Geometric's do to complete its batches."""
    return getattr(type(loader), "_get_iterator", _PLAIN) is not _PLAIN


def _of_torch(iterator: Any) -> Any:
    """The iterator that has the data workers: this one, or the one that it wraps. Others' are their own affair."""
    inner = getattr(iterator, "iterator", None)
    return inner if hasattr(inner, "_unborn") else iterator


def died_with(iterator: Any, error: BaseException) -> bool:
    """Whether an error of `next`, or of a new pass, comes from the death of a data worker."""
    if _is_of_worker(error):
        return False
    if _FOUND in str(error):
        return True  # torch has marked this worker as ended
    # A connection of the worker's may end a moment before the worker itself does.
    return _died(_of_torch(iterator), 0.0 if isinstance(error, RuntimeError) else _DEATH_S)


def _is_of_worker(error: BaseException) -> bool:
    """Whether code in a data worker has raised this error, and torch raises it again in this process."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code is ExceptionWrapper.reraise.__code__


def _died(iterator: Any, patience_s: float) -> bool:
    """Whether a data worker dies within this time, or has died. One whose part of a stream has ended may end."""
    workers = zip(getattr(iterator, "_workers", ()), getattr(iterator, "_workers_status", ()), strict=True)
    sentinels = [worker.sentinel for worker, goes_on in workers if goes_on or worker.exitcode]
    return bool(sentinels and connection.wait(sentinels, patience_s))


def shut_down(iterator: Any) -> None:
    """End the data workers of an iterator, if it has any."""
    iterator = _of_torch(iterator)
    if hasattr(iterator, "_shutdown_workers"):
        vars(iterator).pop("_try_get_data", None)  # else it would refer to itself, and stay
        if hasattr(iterator, "_unborn"):
            iterator._unborn.end()
        iterator._shutdown_workers()


def _try_often(try_once: Callable[[float], tuple[bool, Any]], unborn: Unborn, timeout: float = 0.0) -> tuple[bool, Any]:
    """Wait for a batch, and check often whether the data workers live, and have begun to run.

    Args:
        try_once: torch's own function, which waits for some seconds.
        unborn: The data workers that have not begun to run.
        timeout: Seconds after which torch raises an error, as the user's loader says. Otherwise it calls this again.
    """
    found: tuple[bool, Any] = (False, None)
    for _ in range(max(1, math.ceil(timeout / _NOTICE_S))):
        found = try_once(_NOTICE_S)
        if found[0]:
            return found
        unborn.waited()
    if timeout:
        unborn.give_up()  # so that torch's error comes from their end
    return found
