"""Sees an exception that leaves a `fit`, also if the user catches it there.

Keras tells nobody of it, and no frame of ours is around `fit`. So what `fit` calls is called through here, as long as
it runs: whatever comes out of that leaves `fit`, which catches nothing. What is raised before `fit` has its callbacks
is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from types import FrameType
from typing import Any

from ef_keras import hooks


class Guard:
    """Of one `fit`.

    Args:
        frame: The frame of `fit`.
        tell: Called with the first exception that leaves it.
    """

    def __init__(self, frame: FrameType, tell: Callable[[BaseException], None]) -> None:
        self._frame: FrameType | None = frame
        self._tell = tell
        self._undo: list[Callable[[], None]] = []

    def is_of(self, frame: FrameType) -> bool:
        """Whether that is its `fit`."""
        return self._frame is frame

    def put_around(self, owner: Any, name: str, *, also_if_called_by_others: bool = False) -> None:
        """Call a method of this one object through here; by default, what is not called by `fit` itself is let pass."""
        call, own = getattr(owner, name), vars(owner)
        before = own.get(name)

        @wraps(call)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except BaseException as error:
                if also_if_called_by_others or hooks.is_called_by(self._frame):
                    self._leaves(error)
                raise

        def undo() -> None:
            if own.get(name) is guarded:
                del own[name]
                if before is not None:
                    own[name] = before

        own[name] = guarded  # past what Keras tracks
        self._undo.append(undo)

    def put_around_batches(self, iterator: Any, batches: Callable[[], hooks.Batches]) -> None:
        """Let `fit` run over these batches."""

        def guarded() -> Iterator[Any]:
            try:
                yield from batches()
            except Exception as error:
                self._leaves(error)
                raise

        hooks.replace_batches(iterator, guarded)

    def _leaves(self, error: BaseException) -> None:
        if self._frame is not None:
            self.release()
            self._tell(error)

    def release(self) -> None:
        """The `fit` has ended. May be repeated."""
        self._frame = None
        while self._undo:
            self._undo.pop()()
