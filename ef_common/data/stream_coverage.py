"""A pass of evaluation over a stream, in which the remaining workers evaluate every sample once.

Workers read lanes of shards, as in training. All of them make the same number of steps. When nothing is left, they
exchange their results. What lost workers have read comes back then, as their part of the result died with them, and is
dealt to the others, until nothing is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from ef_common.collectives import operations
from ef_common.collectives.codec import ARRAYS, Codec
from ef_common.core.streams import stream as streams
from ef_common.core.streams.pieces import Lane, LaneFindings, clipped
from ef_common.core.streams.stream import Plan, Stream
from ef_common.data.bad_shards import note_bad_shard
from ef_common.data.stream_turns import StreamTurns
from ef_common.events import EventLog
from ef_common.session import Barrier, Session

logger = logging.getLogger(__name__)


class StreamCoverage:
    """One pass of evaluation over a stream.

    Cost: a small gather for each step.

    Args:
        session: The worker's session.
        turns: The steps of the stream.
        log: Event log of the worker.
        stage: Name of what is evaluated, for the log.
        index: Number of the data set within its stage.
        codec: For what workers exchange of their results.
    """

    def __init__(
        self,
        session: Session,
        turns: StreamTurns,
        *,
        log: EventLog,
        stage: str,
        index: int = 0,
        codec: Codec = ARRAYS,
    ) -> None:
        self._session = session
        self._turns = turns
        self._log = log
        self._stage, self._index = stage, index
        self._codec = codec
        self._run = 0
        self._logged = True

    def settle(self) -> None:
        """Agree on the members that read. All members call this together, before `begin`."""
        if not self._session.newcomer:
            self._session.run(Barrier("start of an evaluation"))
        self._run = self._session.completed  # a number on which all agree

    def begin(self, plan: Plan, shards: Sequence[Any], *, epoch: int, logged: bool = True) -> None:
        """Begin a pass over these shards, after this epoch of the training."""
        self._turns.begin(plan, Stream(len(shards)))
        self._logged = logged
        self._turns.on_fault = lambda rest, why: note_bad_shard(
            self._session, self._log, epoch=epoch, rest=rest, name=shards[rest.shard], reason=why
        )

    def deal(self) -> Mapping[str, Lane] | None:
        """The parts of the next step by member; None if nothing is left to read."""
        parts = self._turns.deal()
        if parts is not None:
            self._turns.stream = streams.as_one_step(self._turns.stream)
        return parts

    def exchange(self, result: Any, *, whole: bool = True) -> tuple[bool, list[Any]]:
        """This worker has read its part, with this result over all that it has read (a plain tree).

        Args:
            result: Of this worker.
            whole: The stream was read to its end.

        Returns:
            Whether nothing is missing, and the results of all workers, which count only then.
        """
        mine = {"worker": self._session.worker.id, "result": result}
        parts, view = operations.gather(self._session, mine, what="state of a metric", codec=self._codec)
        before = self._turns.stream
        self._turns.stream = streams.give_back(before, view.ids)
        if self._turns.stream is not before and whole:
            logger.info("a worker was lost with what it has evaluated; its samples are dealt again")
            return False, []
        self._log_pass(whole=whole)
        return True, [part["result"] for part in parts]

    def _log_pass(self, *, whole: bool) -> None:
        if self._session.newcomer or not self._logged or not self._log.enabled:
            return
        done = self._turns.stream.dealt[-1] if self._turns.stream.dealt else {}
        lengths = self._lengths(done)
        first = dict(zip(lengths, accumulate(lengths.values(), initial=0), strict=False))
        record = {
            "stage": self._stage,
            "run": self._run,
            "loader": self._index,
            "length": sum(lengths.values()),
            "shares": {
                member: [(first[shard] + start, first[shard] + stop) for shard, start, stop in pieces]
                for member, pieces in done.items()
            },
            "exact": whole,
        }
        if skipped := clipped(self._turns.skipped, LaneFindings(lengths)):
            record["skipped_positions"] = [
                (first[shard] + start, first[shard] + stop) for shard, start, stop in skipped
            ]
        self._session.when_confirmed(lambda: self._log.write("evaluation", **record))

    def _lengths(self, done: Mapping[str, Lane]) -> dict[int, int]:
        """The number of samples of each shard, in the order of the positions: one shard comes after the other."""
        lengths: dict[int, int] = {}
        for shard, _, stop in (*(piece for of_member in done.values() for piece in of_member), *self._turns.skipped):
            lengths[shard] = max(stop, lengths.get(shard, 0))
        lengths |= {shard: end for shard, end in self._turns.ends.items() if end or shard in lengths}
        return dict(sorted(lengths.items()))
