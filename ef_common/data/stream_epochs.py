"""The epochs of a stream of shards in a training: each has a list of shards, which all workers agree on, and a plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from ef_common.collectives import operations
from ef_common.core.streams.pieces import Piece
from ef_common.core.streams.stream import Plan
from ef_common.data.bad_shards import note_bad_shard
from ef_common.data.dealer import Dealer
from ef_common.data.ordered_stream import OrderedStream
from ef_common.data.shard_list import agree_on_shards, check_shards
from ef_common.data.stream_dealer import StreamDealer, is_over
from ef_common.data.stream_turns import Reader, StreamTurns
from ef_common.errors import UsageError
from ef_common.events import EventLog
from ef_common.session import Session


class Lanes(Reader, Protocol):
    """Reads the lanes of this worker, epoch by epoch.

    Attributes:
        num_lanes: How many suit its data workers. It reads as many as there are.
        ahead: Samples of a lane that may be read ahead of what has been dealt.
        batch: The batch that was dealt last; None if it has no samples.
    """

    num_lanes: int
    ahead: int

    @property
    def batch(self) -> Any:
        """See the attribute."""

    def begin(self, shards: Sequence[Any], *, epoch: int, seed: int) -> None:
        """Begin an epoch of these shards, or go on in one."""

    def pause(self) -> None:
        """Between two epochs: nothing is being read."""

    def close(self) -> None:
        """Stop reading. May be repeated."""


def turns_of(session: Session, lanes: Lanes) -> StreamTurns:
    """The steps of a stream that is read in these lanes; the members exchange the ends of its shards."""
    return StreamTurns(session, reader=lanes, gather=partial(operations.gather, session, what="the ends of shards"))


def opened(stream: OrderedStream, lanes: Lanes, *, epoch: int, seed: int) -> Sequence[Any]:
    """Begin an epoch of a stream that is read in these lanes, or go on in one. Returns its shards."""
    stream.seed = seed
    stream.set_epoch(epoch)
    shards = stream.shards()
    lanes.begin(shards, epoch=epoch, seed=seed)
    return shards


def plan_of(stream: OrderedStream, shards: Sequence[Any], lanes: Lanes, *, batch_size: int) -> Plan:
    """The plan of an epoch of these shards."""
    return Plan(
        stream.order(len(shards)),
        batch_size=batch_size,
        num_lanes=lanes.num_lanes,
        ahead=lanes.ahead,
        length=lambda shard: stream.length(shards[shard]),
    )


class StreamEpochs:
    """Deals the epochs of a stream.

    Args:
        stream: The stream.
        lanes: Read it.
        dealer: Counts the positions.
        session: The worker's session.
        log: Event log.
        limit: Positions after which an epoch is over although the stream is not: the next epoch goes on in it. The
            last step of an epoch is a whole one, so there may be a few more.

    Attributes:
        dealing: Deals the steps.
    """

    def __init__(
        self,
        stream: OrderedStream,
        lanes: Lanes,
        dealer: Dealer,
        session: Session,
        *,
        log: EventLog,
        limit: int | None = None,
    ) -> None:
        self._stream = stream
        self._lanes = lanes
        self._dealer = dealer
        self._session = session
        self._log = log
        turns = turns_of(session, lanes)
        turns.on_fault = self._note_fault
        self.dealing = StreamDealer(dealer, session, turns)
        self.dealing.limit = limit
        self._shards: Sequence[Any] = ()
        self._digest = ""

    def begin(self, epoch: int, *, seed: int) -> None:
        """Begin an epoch. All members call this together.

        Raises:
            UsageError: The workers have different lists of shards.
        """
        dealing = self.dealing
        if dealing.limit is not None and not dealing.stream.is_over:
            dealing.go_on(epoch)
            return
        self._lanes.pause()
        self._shards = opened(self._stream, self._lanes, epoch=epoch, seed=seed)
        self._digest = agree_on_shards(self._session, self._shards)
        dealing.begin(epoch, self._plan(), len(self._shards))

    def _plan(self) -> Plan:
        return plan_of(self._stream, self._shards, self._lanes, batch_size=self._dealer.batch_size)

    def _note_fault(self, rest: Piece, why: str) -> None:
        name, epoch = self._shards[rest.shard], self._dealer.progress.epoch
        note_bad_shard(self._session, self._log, epoch=epoch, rest=rest, name=name, reason=why)

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """How far the stream is: a plain tree with arrays."""
        return {**self.dealing.state(), "digest": self._digest, **self._stream.shuffling()}

    def load_state(self, state: dict[str, Any] | None, *, seed: int, saved: bool) -> None:
        """Continue from there. The dealer has loaded its own state.

        At the end of a pass, other shards are no error: the next pass begins with those that there are then.

        Args:
            state: The others' state, or that of a checkpoint.
            seed: Seed of the run.
            saved: It is that of a checkpoint.

        Raises:
            UsageError: It is the state of other data, or this worker has another list of shards, or another order.
        """
        if state is None and not self._dealer.progress.remaining:
            return  # the next epoch begins a pass
        if state is None:
            raise UsageError(
                "the checkpoint was made with a data set of another kind: it has no place in a stream. Use a "
                "checkpoint of the end of an epoch, or train on from its weights"
            )
        self._digest = str(state["digest"])
        if is_over(state):
            self._shards = range(int(state["shards"]))  # none of them is read again
        else:
            self._shards = opened(self._stream, self._lanes, epoch=int(state["began"]), seed=seed)
            check_shards(self._shards, self._digest)
            self._stream.check_shuffling(state)
        self.dealing.load_state(state, self._plan(), saved=saved)
