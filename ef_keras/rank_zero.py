"""Callbacks that write to a disk or a terminal run only in the worker that is rank 0."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import keras

from ef_common.session import Session
from ef_keras.memories import memory_of, restore

_KINDS = (
    "BackupAndRestore",
    "CSVLogger",
    "ModelCheckpoint",
    "OrbaxCheckpoint",
    "ProgbarLogger",
    "RemoteMonitor",
    "TensorBoard",
)

_ENDS = {
    "on_train_begin": "on_train_end",
    "on_epoch_begin": "on_epoch_end",
    "on_test_begin": "on_test_end",
    "on_predict_begin": "on_predict_end",
}
"""Hooks that begin something, and the hooks at its end."""


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

    It then sees the beginning of all that has begun and has not ended yet: of the training, the epoch and a validation.

    Attributes:
        wrapped: The callback.
    """

    def __init__(self, wrapped: Any, session: Session, hidden: Callable[[], Collection[str]] = frozenset) -> None:
        self._hidden = hidden
        self.wrapped = wrapped
        self._session = session
        self._open: dict[str, Callable[[], object]] = {}
        self._runs = False
        self._memory: dict[str, Any] = {}

    @property
    def memory(self) -> dict[str, Any] | None:
        """What rank 0's callback remembers, as this worker has last heard of it; None if it remembers nothing."""
        return memory_of(self.wrapped) if self._runs or not self._memory else self._memory

    @memory.setter
    def memory(self, memory: dict[str, Any]) -> None:
        self._memory = memory
        if self._runs:
            restore(self.wrapped, memory)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.wrapped, name)
        return partial(self._call, name, found) if name.startswith("on_") else found

    def _call(self, name: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        runs = self._session.rank == 0 and not self._session.newcomer
        if runs and not self._runs:
            self._take_over()
        self._runs = runs
        if name in _ENDS:
            self._open[name] = partial(hook, *args, **kwargs)
        if runs:
            if name == "on_epoch_end" and isinstance(self.wrapped, keras.callbacks.ProgbarLogger) and len(args) == 2:
                epoch, logs = args  # as Keras passes them
                args = epoch, {name: value for name, value in (logs or {}).items() if name not in self._hidden()}
            hook(*args, **kwargs)
        for begin in [begin for begin in self._open if _ENDS[begin] == name]:
            del self._open[begin]

    def _take_over(self) -> None:
        """Begin where the rank 0 before this one has ended."""
        if "on_train_begin" in self._open and isinstance(self.wrapped, keras.callbacks.CSVLogger):
            self.wrapped.append = True  # the file has been begun
        for name, begin in self._open.items():
            if name == "on_train_begin":
                self._begin_training(begin)
            else:
                begin()

    def _begin_training(self, begin: Callable[[], object]) -> None:
        if not isinstance(self.wrapped, keras.callbacks.BackupAndRestore):  # which would go back to what it has saved
            begin()
        restore(self.wrapped, self._memory)
