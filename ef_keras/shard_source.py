"""A stream of shards: each worker reads its own parts of the shards, which are dealt while they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ef_common.core.epochs import Epochs
from ef_common.core.sharding import EpochProgress, Window
from ef_common.data.dealer import Dealer
from ef_common.data.lane_ahead import LaneAhead
from ef_common.data.ordered_stream import OrderedStream
from ef_common.data.stream_epochs import Lanes, StreamEpochs
from ef_common.errors import ProtocolError
from ef_common.events import EventLog
from ef_common.session import Session
from ef_keras import hooks
from ef_keras.stream_data import StreamData


@dataclass(frozen=True, slots=True)
class ShardReading:
    """How a stream is read in batches.

    Attributes:
        stream: The stream.
        lanes: Reads this worker's part of it.
        batch_size: Samples of a batch.
        first: Reads a first batch before anything is dealt, in the structure that a step accepts.
        made_of: Turns a batch that was read into that structure.
    """

    stream: OrderedStream
    lanes: Lanes
    batch_size: int
    first: Callable[[], Any]
    made_of: Callable[[Any], Any]


class ShardSource:
    """The source for a stream of shards; see :class:`~ef_keras.ordered.FitSource`.

    Its positions are given to samples when they are dealt, so that a batch cannot be asked for by them: there is the
    one that was dealt last. A worker without a share of a step keeps step with the batch that it had before.

    Args:
        reading: How it is read.
        epochs: Their limit is that of `steps_per_epoch`: the next epoch goes on in the stream.
    """

    whole_batches = False

    def __init__(self, reading: ShardReading, epochs: Epochs) -> None:
        self.epochs = epochs
        self.batch_size = reading.batch_size
        self._stream, self._lanes, self._made_of = reading.stream, reading.lanes, reading.made_of
        self._newest = reading.first()
        self._seed = 0
        self._streamed: StreamEpochs | None = None

    def attach(self, dealer: Dealer, session: Session, log: EventLog) -> None:
        """Deal the stream with this dealer from here on."""
        limit = self.epochs.limit
        self._streamed = StreamEpochs(self._stream, self._lanes, dealer, session, log=log, limit=limit)

    @property
    def _epochs(self) -> StreamEpochs:
        if self._streamed is None:
            raise ProtocolError("the stream has no dealer yet")
        return self._streamed

    # ------------------------------------------------------------ the protocol

    def first(self) -> Any:
        """See the protocol."""
        return self._newest

    def begin(self, epoch: int, *, seed: int, cursor: int = 0) -> None:
        """See the protocol."""
        self._seed = seed

    def batch(self, positions: object) -> Any:
        """The batch that was dealt last."""
        found = self._lanes.batch
        if found is not None:
            self._newest = self._made_of(found)
        return self._newest

    def follow(self, progress: EpochProgress, window: Window) -> None:
        """See the protocol."""

    def end(self) -> None:
        """See the protocol."""

    def close(self) -> None:
        """Stop reading ahead. May be repeated."""
        self._lanes.close()

    # ------------------------------------------------------------ dealing

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, also in the dealer. All members call this together."""
        self._epochs.begin(epoch, seed=self._seed)

    def deal(self) -> Window | None:
        """Deal the next step; None if the epoch is over."""
        return self._epochs.dealing.deal()

    def finds(self) -> bool:
        """Before a reduction: whether the others must hear what this worker has found in its next batch."""
        return self._epochs.dealing.turns.finds()

    def heard(self, num_finds: float) -> None:
        """A reduction has completed in which this many members had found something."""
        self._epochs.dealing.turns.heard(num_finds)

    def num_steps(self, progress: EpochProgress, step_size: int) -> int | None:
        """Steps of the epoch, if they keep this size; None as long as nobody knows."""
        if not progress.remaining:
            return progress.steps
        limit = self.epochs.limit
        return None if limit is None else progress.steps - (progress.cursor - limit) // step_size

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """What a newcomer needs, besides the dealer's state."""
        return self._epochs.state()

    def load_state(self, state: dict[str, Any] | None, *, seed: int, saved: bool) -> None:
        """Continue from this state, of the others or of a checkpoint (`saved`). The dealer has loaded its own."""
        self._epochs.load_state(state, seed=seed, saved=saved)


def reading_of(data: StreamData, stream: OrderedStream) -> ShardReading:
    """How the stream of an `ef_keras.dataset` is read, which this process does in a thread.

    Args:
        data: The data.
        stream: Its stream, or the same in another order.
    """
    return ShardReading(
        stream,
        LaneAhead(stream, data.batch_size, collate=data.collate),
        data.batch_size,
        first=lambda: hooks.as_batch(data.first()[0]),
        made_of=hooks.as_batch,
    )
