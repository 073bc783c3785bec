"""The state of a training between two steps, which a plugin provides so that it can be saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ef_common.storage.checkpoints import Content
from ef_common.storage.layout import FileLayout, Path, Slice
from ef_common.storage.shares import SharedFile

Release = Callable[[], None]
"""Lets go of a copy."""


class Source(Protocol):
    """A training whose state can be saved."""

    def num_bytes(self) -> int:
        """Size of the state that all members hold."""

    def state(self, *, whole: bool) -> SourceState:
        """The state of the training.

        Args:
            whole: Also what the other members do not have; else only what they have is asked for.
        """


class SourceState(Protocol):
    """A state that is valid until the next step. Nothing of it has been copied yet."""

    @property
    def file(self) -> str:
        """Name of the file that all members can write together."""

    def copy(self) -> tuple[Content, Release]:
        """A copy of the whole state."""

    def content(self, file: SharedFile) -> Content:
        """The content of a checkpoint in which the members write the shared file together."""

    def layout(self) -> FileLayout:
        """The layout of that file.

        Raises:
            UnsupportedError: The members cannot write it together.
        """

    def kind_of(self, path: Path) -> str:
        """Type and shape of the array at this place; something else if there is none."""

    def copy_parts(self, parts: Sequence[Slice]) -> tuple[Callable[[Slice], Any], Release]:
        """Copies of parts of its arrays, each as bytes."""
