"""Callbacks that write to a disk or a terminal run only in the worker that is rank 0."""

from __future__ import annotations

import csv
import os
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from itertools import takewhile
from pathlib import Path
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

_WRITE = ("on_train_batch_end", "on_epoch_end", "on_train_end")
"""Hooks in which files are written."""


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
    A hook in which the rank 0 before this one was lost may have left a torn file, so it is called again (`call_again`).
    A `CSVLogger` begins only when it is known whether the training goes on from a checkpoint (`open_file`).

    Attributes:
        wrapped: The callback.
        ran: Whether the newest hook was called in this worker; None if that is not one that writes.
    """

    def __init__(self, wrapped: Any, session: Session, hidden: Callable[[], Collection[str]] = frozenset) -> None:
        self._hidden = hidden
        self.wrapped = wrapped
        self.ran: bool | None = None
        self._session = session
        self._open: dict[str, Callable[[], object]] = {}
        self._runs = False
        self._memory: dict[str, Any] = {}
        self._call_again: Callable[[], None] = lambda: None

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

    def call_again(self) -> None:
        """Rank 0 was lost in the newest hook: call it in this worker, if that is rank 0 now.

        The worker may have been lost after the hook was complete. What would do harm twice is not done again: a row of
        a CSV file, and a step of Orbax's, whose files have their names only once they are complete.
        """
        self._call_again()

    def open_file(self, *, append: bool, again_from: int | None) -> None:
        """The training has begun: let a `CSVLogger` begin, which would have replaced its file before.

        Args:
            append: The file has rows of this training.
            again_from: First epoch whose rows will be written again.
        """
        is_rank_0 = self._session.rank == 0 and not self._session.newcomer
        if not is_rank_0 or not isinstance(self.wrapped, keras.callbacks.CSVLogger):
            return
        self._runs = True  # perhaps not yet when the training began, in a rank 0 that is lost
        if again_from is not None and not self.wrapped.append:
            _cut(self.wrapped, again_from)
        self._begin_file(self._open["on_train_begin"], append=append)

    def _begin_file(self, begin: Callable[[], object], *, append: bool) -> None:
        file = self.wrapped
        own, file.append = file.append, append or file.append
        file.append_header = True
        try:
            begin()
        finally:
            file.append = own

    def _call(self, name: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        runs = self._session.rank == 0 and not self._session.newcomer
        if runs and not self._runs:
            self._take_over()
        self._runs = runs
        if name in _ENDS:
            self._open[name] = partial(hook, *args, **kwargs)
        is_early = name == "on_train_begin" and isinstance(self.wrapped, keras.callbacks.CSVLogger)
        if runs and not is_early:
            if name == "on_epoch_end" and isinstance(self.wrapped, keras.callbacks.ProgbarLogger) and len(args) == 2:
                epoch, logs = args  # as Keras passes them
                args = epoch, {name: value for name, value in (logs or {}).items() if name not in self._hidden()}
            hook(*args, **kwargs)
        ended = {begin: self._open.pop(begin) for begin in list(self._open) if _ENDS[begin] == name}
        self.ran = runs if name in _WRITE else None
        self._call_again = partial(self._repeat, ended, name, hook, *args, **kwargs)

    def _repeat(
        self, ended: dict[str, Callable[[], object]], name: str, hook: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        self._open |= ended
        is_done = name != "on_train_end" and _is_done(self.wrapped, *args)
        self._call(name, _nothing if is_done else hook, *args, **kwargs)

    def _take_over(self) -> None:
        """Begin where the rank 0 before this one has ended."""
        for name, begin in self._open.items():
            if name == "on_train_begin":
                self._begin_training(begin)
            else:
                begin()

    def _begin_training(self, begin: Callable[[], object]) -> None:
        if isinstance(self.wrapped, keras.callbacks.CSVLogger):
            self._begin_file(begin, append=True)
        elif not isinstance(self.wrapped, keras.callbacks.BackupAndRestore):  # which would go back to what it has saved
            begin()
        restore(self.wrapped, self._memory)


def _is_done(callback: Any, epoch: int, logs: dict[str, Any] | None = None) -> bool:
    """Whether what a callback does at the end of an epoch must not be done again: a row of a file is there already."""
    if any(
        kind.__name__ == "OrbaxCheckpoint" and kind.__module__.startswith("keras.") for kind in type(callback).__mro__
    ):
        return True
    if not isinstance(callback, keras.callbacks.CSVLogger):
        return False
    try:
        with Path(callback.filename).open(newline="") as file:
            rows = deque(csv.DictReader(file, delimiter=callback.sep), maxlen=1)
    except (OSError, ValueError, csv.Error):  # the last row may be torn
        return False
    expected = {"epoch": str(epoch), "loss": str((logs or {}).get("loss"))}
    return any(all(row.get(name, value) == value for name, value in expected.items()) for row in rows)


def _cut(callback: Any, first_epoch: int) -> None:
    """End a CSV file before the row of an epoch, or before one that is torn."""

    def is_kept(line: bytes) -> bool:
        epoch = line.split(callback.sep.encode(), 1)[0]
        return line.endswith(b"\n") and not (epoch.isdigit() and int(epoch) >= first_epoch)

    path = Path(callback.filename)
    if path.is_file():
        kept = takewhile(is_kept, path.read_bytes().splitlines(keepends=True))
        os.truncate(path, sum(map(len, kept)))


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What takes the place of a hook that is done."""
