"""Callbacks that write to a disk or a terminal run only in the worker that is rank 0."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import keras

from ef_common.session import Session
from ef_keras.memories import restore

_KINDS = (
    "BackupAndRestore",
    "CSVLogger",
    "ModelCheckpoint",
    "OrbaxCheckpoint",
    "ProgbarLogger",
    "RemoteMonitor",
    "TensorBoard",
)


def only_on_rank_zero(callbacks: Any, session: Session, *, hidden: Callable[[], Collection[str]] = frozenset) -> None:
    """Call those callbacks of a list that write only in rank 0.

    Args:
        callbacks: Keras's list of callbacks; changed in place.
        session: The worker's session.
        hidden: Tells what the progress bar leaves out of an epoch's logs.
    """
    for index, callback in enumerate(callbacks.callbacks):
        if any(kind.__name__ in _KINDS and kind.__module__.startswith("keras.") for kind in type(callback).__mro__):
            callbacks.callbacks[index] = OnRankZero(callback, session, hidden)


def unwrapped(callback: Any) -> Any:
    """The user's callback behind this one, if there is one."""
    return callback.wrapped if isinstance(callback, OnRankZero) else callback


class OnRankZero:
    """Stands in for a callback that runs only in rank 0. If this worker becomes rank 0, the callback begins then.

    Attributes:
        wrapped: The callback.
        memory: Fields of rank 0's callback, as this worker has last heard of them.
    """

    def __init__(self, wrapped: Any, session: Session, hidden: Callable[[], Collection[str]] = frozenset) -> None:
        self._hidden = hidden
        self.wrapped = wrapped
        self.memory: dict[str, Any] = {}
        self._session = session
        self._in_fit = False
        self._has_begun = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.wrapped, name)
        return partial(self._call, name, found) if name.startswith("on_") else found

    def _call(self, name: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._in_fit = self._in_fit or name == "on_train_begin"
        if self._session.rank != 0 or self._session.newcomer:
            return
        if self._in_fit and not self._has_begun and name != "on_train_begin":
            if isinstance(self.wrapped, keras.callbacks.CSVLogger):
                self.wrapped.append = True  # the rank 0 before this one has begun the file
            self.wrapped.on_train_begin()
            restore(self.wrapped, self.memory)
        self._has_begun = self._in_fit
        if name == "on_epoch_end" and isinstance(self.wrapped, keras.callbacks.ProgbarLogger) and len(args) == 2:
            epoch, logs = args  # as Keras passes them
            args = epoch, {name: value for name, value in (logs or {}).items() if name not in self._hidden()}
        hook(*args, **kwargs)
