"""What a worker has received from its coordinator, and how its threads wait for more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ef_common.core.place import Place
from ef_common.core.view import View
from ef_common.errors import CoordinatorLost, GroupBroken, JobFailed, TrainingOver

T = TypeVar("T")
_LOOK_AGAIN_S = 1.0  # waiting in slices lets Ctrl-C through on every platform


class Inbox:
    """The newest view and place, the values relayed in the view, and the end. Written by the reader, read by all.

    Attributes:
        end_met: Who waits, or asks, has been told of the end.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._view: View | None = None
        self._values: dict[str, bytes] = {}
        self._warm_up = False
        self._place: Place | None = None
        self._training = 1
        self._end: Exception | None = None
        self.end_met = threading.Event()

    @property
    def generation(self) -> int:
        """Generation of the newest view, 0 before the first."""
        return 0 if self._view is None else self._view.generation

    @property
    def ended(self) -> bool:
        """Whether nothing more will arrive."""
        return self._end is not None

    # ------------------------------------------------------------ the reader's side

    def put_view(self, view: View) -> None:
        """Take a newer view; the values of the old one are dropped."""
        with self._changed:
            self._view = view
            self._values = {}
            self._changed.notify_all()

    def put_value(self, generation: int, key: str, value: bytes) -> None:
        """Take a value of the newest view; those of other views are dropped."""
        with self._changed:
            if generation == self.generation:
                self._values[key] = value
                self._changed.notify_all()

    def put_warm_up(self) -> None:
        """Note that the job already runs without this worker."""
        with self._changed:
            self._warm_up = True
            self._changed.notify_all()

    def put_place(self, place: Place | None) -> None:
        """Note the place of the members."""
        self._place = place

    def put_training(self, training: int) -> None:
        """Note the training that the members are in."""
        with self._changed:
            self._training = training
            self._changed.notify_all()

    def put_end(self, end: Exception) -> None:
        """Note that nothing more will arrive; the first reason given counts."""
        with self._changed:
            self._end = self._end or end
            self._changed.notify_all()

    # ------------------------------------------------------------ the waiting side

    def place(self) -> Place | None:
        """The place of the members, as far as it is known; does not wait."""
        if self._end is not None:
            raise self._met()
        return self._place

    def training(self) -> int:
        """The training that the members are in, as far as it is known; does not wait."""
        if self._end is not None:
            raise self._met()
        return self._training

    def wait_start(self) -> bool:
        """Wait until it is clear how the worker starts; True to warm up, False if the first view is there."""

        def started() -> bool | None:
            if self._warm_up:
                return True
            return None if self._view is None else False

        return self._wait(started)

    def wait_view(self, after: int, *, training: int | None = None) -> View:
        """Wait for a view newer than `after`; in a newcomer, as long as `training` is not over."""

        def newer() -> View | None:
            # A lost line harms nobody who has a view; every other end concerns this worker itself.
            if self._end is not None and not isinstance(self._end, CoordinatorLost):
                raise self._met()
            if self._view is not None and self._view.generation > after:
                return self._view
            if training is not None and self._training > training:
                raise TrainingOver(f"the others are in training {self._training}")
            return None

        return self._wait(newer)

    def wait_value(self, generation: int, key: str) -> bytes:
        """Wait for a value that a member of the view of `generation` publishes."""

        def published() -> bytes | None:
            if self.generation != generation:
                raise GroupBroken(f"view {generation} has been replaced")
            if key not in self._values and self._end is not None:
                raise GroupBroken(f"no more values of view {generation} can come: {self._end}")
            return self._values.get(key)

        return self._wait(published)

    def wait_failed(self, timeout_s: float) -> bool:
        """Wait for at most this time until nothing more will arrive; returns whether the job has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None, timeout_s)
            return isinstance(self._end, JobFailed)

    def _wait(self, ready: Callable[[], T | None]) -> T:
        with self._changed:
            while True:
                value = ready()
                if value is not None:
                    return value
                if self._end is not None:
                    raise self._met()
                self._changed.wait(_LOOK_AGAIN_S)

    def _met(self) -> Exception:
        self.end_met.set()
        return self._end or CoordinatorLost("nothing more will come")
