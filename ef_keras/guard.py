"""Notices when an exception leaves a `fit`, even if the user catches it.

Keras reports no exceptions, and no frame of ours surrounds `fit`. While it runs, everything that `fit` calls is
therefore called through here: an exception that comes out of such a call leaves `fit`, which catches nothing.
Exceptions that are raised before `fit` has its callbacks are not seen.

A KeyboardInterrupt may also be raised in `fit` itself, between two such calls. The wrappers then stay in place, and the
next call finds that its `fit` no longer runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import wraps
from types import FrameType
from typing import Any

from ef_keras import hooks


class Guard:
    """The guard of one `fit`. Creating one ends an earlier one of the model that has ended unseen.

    Args:
        frame: The frame of `fit`.
        model: Its model.
        leave: Called once, with the exception that leaves `fit`; with None if it has ended unseen.
    """

    def __init__(self, frame: FrameType, model: Any, leave: Callable[[BaseException | None], None]) -> None:
        self._frame: FrameType | None = frame
        self._model = model
        self._leave = leave
        self._thread = threading.get_ident()
        self._undo: list[Callable[[], None]] = []
        before = hooks.guard_of(model)
        if before is not None and before.has_ended():
            before.end(None)
        hooks.set_guard(model, self)

    def is_of(self, frame: FrameType) -> bool:
        """Whether this is its `fit`."""
        return self._frame is frame

    def has_ended(self) -> bool:
        """Whether its `fit` has ended without being noticed. This is unknown in another thread."""
        frame = self._frame
        return frame is not None and threading.get_ident() == self._thread and not hooks.is_running(frame)

    def put_around(self, owner: Any, name: str, *, also_if_called_by_others: bool = False) -> None:
        """Route calls of a method of this one object through the guard; by default, only those by `fit` itself."""
        call, own = getattr(owner, name), vars(owner)
        before = own.get(name)

        @wraps(call)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self.has_ended():
                self.end(None)
                return getattr(owner, name)(*args, **kwargs)
            try:
                return call(*args, **kwargs)
            except BaseException as error:
                if also_if_called_by_others or hooks.is_called_by(self._frame):
                    self.end(error)
                raise

        def undo() -> None:
            if own.get(name) is guarded:
                del own[name]
                if before is not None:
                    own[name] = before

        own[name] = guarded  # past what Keras tracks
        self._undo.append(undo)

    def put_around_batches(self, iterator: Any, batches: Callable[[], hooks.Batches]) -> None:
        """Let `fit` iterate over these batches."""

        def guarded() -> Iterator[Any]:
            try:
                yield from batches()
            except GeneratorExit:  # an epoch is cut short, or its `fit` has ended
                raise
            except BaseException as error:
                self.end(error)
                raise

        hooks.replace_batches(iterator, guarded)

    def end(self, error: BaseException | None) -> None:
        """An exception leaves `fit`, or `fit` has ended unnoticed."""
        if self._frame is not None:
            self.release()
            self._leave(error)

    def release(self) -> None:
        """The `fit` has ended. May be repeated."""
        self._frame = None
        if hooks.guard_of(self._model) is self:
            hooks.set_guard(self._model, None)
        while self._undo:
            self._undo.pop()()
