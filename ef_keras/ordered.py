"""Data that can be asked for a part: each worker reads what it trains on, in an order that all must have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ef_common.core.sharding import EpochProgress, Window
from ef_common.session import Session
from ef_keras.comparison import Checksums
from ef_keras.epochs import Epochs

Coming = Callable[[], Iterator[list[int]]]
"""Makes the positions of the batches that will probably be asked for, one batch after the other."""


class OrderedSource(ABC):
    """See the module, and :class:`~ef_keras.sources.Source`.

    Attributes:
        reads_ahead: Batches are read before they are asked for.
    """

    epochs: Epochs
    batch_size: int
    whole_batches: bool
    reads_ahead: bool

    @abstractmethod
    def first(self) -> Any:
        """See the protocol."""

    @abstractmethod
    def begin(self, epoch: int, *, seed: int, cursor: int = 0) -> None:
        """See the protocol."""

    @abstractmethod
    def batch(self, positions: Sequence[int]) -> Any:
        """See the protocol."""

    @abstractmethod
    def end(self) -> None:
        """See the protocol."""

    @abstractmethod
    def follow(self, progress: EpochProgress, window: Window) -> None:
        """See the protocol."""

    @abstractmethod
    def agree(self, session: Session) -> None:
        """Have the order of the first worker, in an epoch that has begun. All members call this together."""

    @abstractmethod
    def order(self) -> Any:
        """What a newcomer needs to have this order: a plain tree with arrays."""

    @abstractmethod
    def put_in_order(self, order: Any) -> None:
        """Have the order that another worker has told, in an epoch that has begun."""

    @abstractmethod
    def recall(self, order: Any) -> None:
        """Remember the order of an epoch that was over when a checkpoint was saved."""

    @abstractmethod
    def expect(self, coming: Coming) -> None:
        """These will probably be asked for next, if nobody comes or goes."""

    @abstractmethod
    def checksums(self, position: int) -> Checksums:
        """Read a position of this epoch, and tell what it is."""

    @abstractmethod
    def close(self) -> None:
        """End what reads ahead. May be repeated."""
