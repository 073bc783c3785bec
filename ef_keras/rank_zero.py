"""Callbacks that write to a disk or a terminal: in one worker, the first, whoever that is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras

from ef_common.session import Session

_SILENT = ("ProgbarLogger", "TensorBoard", "CSVLogger", "BackupAndRestore", "RemoteMonitor")
_SAVING = ("ModelCheckpoint", "OrbaxCheckpoint")
_SAVES = ("save", "save_weights", "export")


def only_on_rank_zero(callbacks: Any, session: Session) -> None:
    """Let those callbacks of a list that write be heard in rank 0 only.

    Args:
        callbacks: Keras's list of callbacks; changed in place.
        session: The worker's session.
    """
    for index, callback in enumerate(callbacks.callbacks):
        kinds = {kind.__name__ for kind in type(callback).__mro__ if kind.__module__.startswith("keras.")}
        if kinds.intersection(_SILENT):
            callbacks.callbacks[index] = Silent(callback, session)
        elif kinds.intersection(_SAVING):
            callbacks.callbacks[index] = Saving(callback, session)


def unwrapped(callback: Any) -> Any:
    """The user's callback behind one of these."""
    return callback.wrapped if isinstance(callback, Silent | Saving) else callback


class Silent:
    """Stands for a callback that hears of nothing but in rank 0. If this worker becomes it, the callback begins."""

    def __init__(self, wrapped: Any, session: Session) -> None:
        self.wrapped = wrapped
        self._session = session
        self._in_fit = False
        self._has_begun = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.wrapped, name)
        return partial(self._hear, name, found) if name.startswith("on_") else found

    def _hear(self, name: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._in_fit = self._in_fit or name == "on_train_begin"
        if self._session.rank != 0 or self._session.newcomer:
            return
        if self._in_fit and not self._has_begun and name != "on_train_begin":
            if isinstance(self.wrapped, keras.callbacks.CSVLogger):
                self.wrapped.append = True  # the rank 0 before this one has begun the file
            self.wrapped.on_train_begin()
        self._has_begun = self._in_fit
        hook(*args, **kwargs)


class Saving:
    """Stands for a callback that decides in all ranks when to save, and saves in rank 0."""

    def __init__(self, wrapped: Any, session: Session) -> None:
        self.wrapped = wrapped
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def set_model(self, model: Any) -> None:
        """Show it a model that only rank 0 can save."""
        self.wrapped.set_model(_SavedByOne(model, self._session))


class _SavedByOne:
    """A model, but saved by rank 0 only."""

    def __init__(self, model: Any, session: Session) -> None:
        self.__dict__.update(_model=model, _session=session)

    def __getattr__(self, name: str) -> Any:
        if name in _SAVES and self._session.rank != 0:
            return lambda *args, **kwargs: None
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)
