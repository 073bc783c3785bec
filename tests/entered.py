"""What runs between entering and leaving a context."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Entered(ABC):
    """It is left, too, if it cannot be entered whole: what has been started by then does not stay behind."""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None:
        """End what has been started, which may be a part of it or nothing."""

    @abstractmethod
    def _start(self) -> None:
        """Start all of it."""
