"""The data of a `fit`, and data that can be asked for a part.

Of those, each worker reads what it trains on, in an order that all must have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from ef_common.core.checksums import Checksums
from ef_common.core.epochs import Epochs
from ef_common.core.sharding import EpochProgress, Window
from ef_common.session import Session

Coming = Callable[[], Iterator[list[int]]]
"""Makes the positions of the batches that will probably be asked for, one batch after the other."""


class FitSource(Protocol):
    """The data of one `fit` or `evaluate`.

    Attributes:
        epochs: Which positions each epoch has: samples where they can be had one by one, else batches.
        batch_size: Positions of a full batch.
        whole_batches: A position is a batch, of whatever size; else it is a sample.
    """

    epochs: Epochs
    batch_size: int
    whole_batches: bool

    def first(self) -> Any:
        """Any batch, before the first epoch, to build and warm up a model with."""

    def begin(self, epoch: int, *, seed: int, cursor: int = 0) -> None:
        """Begin an epoch in which this many slots have been dealt. Its order is a function of epoch and seed."""

    def batch(self, positions: Sequence[int]) -> Any:
        """The batch of these positions, at most `batch_size` of them, in the structure that a step accepts."""

    def follow(self, progress: EpochProgress, window: Window) -> None:
        """`window` was dealt and `progress` is current: no other past positions will be asked for again."""

    def end(self) -> None:
        """The epoch is over."""


class OrderedSource(FitSource, ABC):
    """Data that can be asked for a part; the module describes it.

    Attributes:
        reads_ahead: Batches are read before they are asked for.
        draws_length: An epoch is as long as the order that rank 0 has drawn for it; `epochs` tells what is expected.
    """

    reads_ahead: bool
    draws_length = False

    def follow(self, progress: EpochProgress, window: Window) -> None:
        """See the protocol."""
        return  # nothing has to be walked

    @abstractmethod
    def agree(self, session: Session) -> int:
        """Adopt the order of rank 0 in an epoch that has begun. All members call this together.

        Returns:
            Positions of the epoch.
        """

    @abstractmethod
    def order(self) -> Any:
        """What a newcomer needs to get this order: a plain tree with arrays."""

    @abstractmethod
    def put_in_order(self, order: Any) -> None:
        """Adopt the order that another worker has reported, in an epoch that has begun."""

    @abstractmethod
    def recall(self, order: Any) -> None:
        """Restore the order of an epoch that was over when a checkpoint was saved."""

    @abstractmethod
    def expect(self, coming: Coming) -> None:
        """Expect requests for these batches next, if the members stay the same."""

    @abstractmethod
    def checksums(self, position: int) -> Checksums:
        """Read a position of this epoch, and return its checksums."""

    @abstractmethod
    def close(self) -> None:
        """Stop reading ahead. May be repeated."""
