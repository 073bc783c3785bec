"""A pass of evaluation, in which the remaining workers evaluate every position once.

A pass deals all positions to its members at the start. When the workers have done their shares, all exchange what they
have done, together with the results. Positions that nobody has done, because their worker died and its part of the
result died with it, are dealt again to the remaining workers, until nothing is missing.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from ef_common.collectives import operations
from ef_common.collectives.codec import ARRAYS, Codec
from ef_common.core import sharding
from ef_common.core.sharding import Range
from ef_common.data.dealer import ranges_of
from ef_common.events import EventLog
from ef_common.session import Barrier, Session

logger = logging.getLogger(__name__)


class Coverage:
    """One pass of evaluation over this many positions.

    Args:
        session: The worker's session.
        log: Event log of the worker.
        stage: Name of what is evaluated, for the log.
        index: Number of the data set within its stage.
        codec: For what workers exchange of their results.
    """

    def __init__(self, session: Session, *, log: EventLog, stage: str, index: int = 0, codec: Codec = ARRAYS) -> None:
        self._session = session
        self._log = log
        self._stage, self._index = stage, index
        self._codec = codec
        self._done: list[Range] = []
        self._length = 0
        self._every = (0, 1)
        self._run = 0
        self._logged = True

    @property
    def length(self) -> int:
        """Number of positions."""
        return self._length

    def settle(self) -> None:
        """Agree on the members that get positions. All members call this together, before `begin`."""
        if not self._session.newcomer:
            self._session.run(Barrier("start of an evaluation"))
        self._run = self._session.completed  # a number on which all agree

    def begin(self, length: int, *, logged: bool = True) -> tuple[np.ndarray, int]:
        """Deal all positions.

        Returns:
            This worker's positions, and the number of those of the worker that has most.
        """
        self._done, self._length, self._logged = [], length, logged
        self._every = (0, 1)
        return self._share(np.arange(length), self._session.completed_in.ids)

    def begin_open(self, *, logged: bool = True) -> tuple[int, int]:
        """Deal positions whose number is not known yet; `end_open` tells it.

        Returns:
            This worker's first position, and the distance from each of its positions to the next.
        """
        members = self._session.completed_in.ids
        self._done, self._length, self._logged = [], 0, logged
        self._every = members.index(self._session.worker.id), len(members)
        return self._every

    def end_open(self, length: int) -> None:
        """There were this many positions, of which this worker has done its own."""
        first, distance = self._every
        self._length, self._done = length, self._ranges(np.arange(first, length, distance))

    def exchange(self, result: Any) -> tuple[tuple[np.ndarray, int] | None, list[Any]]:
        """This worker has done its share, with this result over all shares so far (a plain tree).

        Returns:
            What `begin` returns, of the positions that are missing, or None; and the results of all workers, which
            count only when nothing is missing.
        """
        mine = {"worker": self._session.worker.id, "done": [list(r) for r in self._done], "result": result}
        parts, view = operations.gather(self._session, mine, what="state of a metric", codec=self._codec)
        covered = np.zeros(self._length, dtype=bool)
        for part in parts:
            for start, stop in part["done"]:
                covered[start : stop : self._every[1]] = True
        missing = np.flatnonzero(~covered)
        results = [part["result"] for part in parts]
        if len(missing) == 0:
            self._log_pass({part["worker"]: part["done"] for part in parts})
            return None, results
        logger.info("%d positions of this evaluation were lost with their worker; dealt again", len(missing))
        return self._share(missing, view.ids), results

    def exchange_whole(self, length: int, result: Any) -> Any:
        """This worker has evaluated all positions of its own data, as all do if their data differ.

        Args:
            length: Their number.
            result: This worker's, a plain tree.

        Returns:
            The first worker's result, which counts.
        """
        mine = {"worker": self._session.worker.id, "length": length, "result": result}
        parts, _ = operations.gather(self._session, mine, what="state of a metric", codec=self._codec)
        first, *others = parts
        self._length, self._every = first["length"], (0, 1)
        shares: dict[str, Any] = {part["worker"]: [] for part in others}
        self._log_pass({first["worker"]: [[0, self._length]] if self._length else [], **shares})
        return first["result"]

    def _share(self, positions: np.ndarray, members: tuple[str, ...]) -> tuple[np.ndarray, int]:
        rank = members.index(self._session.worker.id) if self._session.worker.id in members else 0
        start, stop = sharding.share(len(positions), len(members), rank)
        share = positions[start:stop]
        self._done += self._ranges(share)
        return share, -(-len(positions) // len(members))

    def _ranges(self, positions: np.ndarray) -> list[Range]:
        """Sorted positions as ranges; where workers take turns, of every so many-th position."""
        _, every = self._every
        found: list[Range] = []
        for turn in np.unique(positions % every).tolist():
            rounds = ranges_of(positions[positions % every == turn] // every)
            found += [(start * every + turn, (stop - 1) * every + turn + 1) for start, stop in rounds]
        return found

    def _log_pass(self, shares: dict[str, Any]) -> None:
        if self._session.newcomer or not self._logged or not self._log.enabled:
            return
        record = {
            "stage": self._stage,
            "run": self._run,
            "loader": self._index,
            "length": self._length,
            "shares": shares,
            "exact": True,
        }
        if self._every[1] > 1:
            record["every"] = self._every[1]
        self._session.when_confirmed(lambda: self._log.write("evaluation", **record))
