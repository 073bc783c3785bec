"""Evaluation of a stream without positions: each worker walks through it, and evaluates its share of the batches.

In each step the members take the next batches in turn. When the stream is over, all exchange what they have done, as
with other data (:mod:`ef_lightning.evaluation_loader`); for what a lost worker had, the others walk again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader

from ef_common.core.epochs import ENDLESS, Epochs
from ef_common.core.sharding import EpochProgress, Window
from ef_common.data.torch_walk import checksums_of, num_samples
from ef_common.data.walked_stream import WalkedStream
from ef_common.errors import UsageError
from ef_lightning.evaluated_loader import EvaluatedLoader
from ef_lightning.evaluation import Evaluation
from ef_lightning.joint_reading import JointLoader
from ef_lightning.order import before_limit
from ef_lightning.walk_reading import REMEDY, Walked, limited_batches


class _Taken(NamedTuple):
    """A batch; its samples count elsewhere if it is padding."""

    batch: Any
    num_samples: int
    padding: bool = False


class WalkEvaluationLoader(EvaluatedLoader):
    """Wraps one of the user's evaluation DataLoaders over a stream, or several that are read together.

    Args:
        loader: The user's loader, or what stands for several.
        walked: Makes the passes over it.
        evaluation: What it is evaluated for.
        num_samples: Samples of a batch, or None if all batches weigh the same.
    """

    def __init__(
        self,
        loader: DataLoader[Any] | JointLoader,
        walked: Walked,
        evaluation: Evaluation,
        *,
        num_samples: Callable[[Any], int | None] = num_samples,
    ) -> None:
        shown = loader.several.iterables if isinstance(loader, JointLoader) else None
        super().__init__(loader, walked, evaluation, shown=shown)
        self._walked, self._count = walked, num_samples
        self._coverage = evaluation.coverage()
        self._compares = False
        self._stream = self._begin_walk()
        self._share: Iterator[_Taken] = iter(())
        self._num_samples = 0
        self._read: list[int] = []  # of each walk: the number of batches, and their fingerprint

    def __len__(self) -> int:
        """Batches of a worker in a whole pass, before Lightning applies its limit; a huge number if nobody knows."""
        return before_limit(int(min(self._num_steps(), ENDLESS)), self._evaluation.limit)

    def _begin(self) -> None:
        self._coverage.settle()
        self._evaluation.set_num_batches(self._num_steps())
        self._compares = self._evaluation.world_size > 1
        self._stream = self._begin_walk()
        self._read, self._num_samples = [], 0
        self._share = self._turns()

    def _batch(self) -> Any:
        self._evaluation.free_length()
        while (taken := next(self._share, None)) is None:
            if not self._take_missing():
                self.padding = False
                self._stream.close()
                self._end()
        self.padding = taken.padding
        self._num_samples += 0 if taken.padding else taken.num_samples
        return taken.batch

    def close(self) -> None:
        """End the data workers."""
        self._stream.close()

    def _num_positions(self) -> int:
        """Batches of all workers in a pass, at most; a sanity check takes fewer."""
        evaluation, limit = self._evaluation, self._evaluation.limit
        length = limited_batches(self._loader, limit, name=evaluation.limit_name)
        steps: list[float] = [limit] if isinstance(limit, int) else []
        if not evaluation.is_logged:
            steps.append(evaluation.num_sanity_steps)
        return int(min([length, *(number * evaluation.world_size for number in steps)]))

    def _num_steps(self) -> float:
        length = self._num_positions()
        return math.inf if length >= ENDLESS else -(-length // self._evaluation.world_size)

    def _begin_walk(self) -> WalkedStream:
        return WalkedStream(
            self._walked.batches,
            Epochs(ENDLESS),
            checksums=checksums_of if self._compares else None,
            num_samples=self._count,
            is_open=True,
        )

    def _turns(self) -> Iterator[_Taken]:
        """This worker's share of a stream whose length nobody needs to know: the members take turns."""
        turn, world_size = self._coverage.begin_open(logged=self._evaluation.is_logged)
        stream, limit, start = self._stream, self._num_positions(), 0
        stream.begin(0)
        while start < limit:
            stop = min(start + world_size, limit)
            self._follow(start, stop, limit)
            if stream.ended_at is not None:
                stop = min(stop, stream.ended_at)
            if start < stop and start + turn < stop:
                yield self._take(start + turn)
            elif start < stop and self._evaluation.is_reduced:  # all log equally often
                yield self._take(start)._replace(padding=True)
            if stream.ended_at is not None:
                break
            start = stop
        length = stop if limit else 0
        self._read = [length, stream.fingerprint]
        self._coverage.end_open(length)

    def _rest(self, share: np.ndarray, largest: int) -> Iterator[_Taken]:
        """What a lost worker had, as far as this one takes it over: all walk through the stream again."""
        stream = self._stream = self._begin_walk()
        stream.begin(0)
        limit = self._coverage.length
        taken = None
        for position in share.tolist():
            self._follow(position, position + 1, limit)
            taken = self._take(position)
            yield taken
        if self._evaluation.is_reduced:
            for _ in range(largest - len(share)):
                if taken is None:
                    self._follow(0, 1, limit)
                    taken = self._take(0)
                yield taken._replace(padding=True)
        self._follow(limit - 1, limit, limit)
        self._read += [stream.cursor, stream.fingerprint]  # of one walk more

    def _follow(self, start: int, stop: int, limit: int) -> None:
        self._stream.follow(EpochProgress(0, limit), Window(start, stop, ("one",)))

    def _take(self, position: int) -> _Taken:
        return _Taken(self._stream.batch([position]), self._stream.num_samples_at(position))

    def _take_missing(self) -> bool:
        """Exchange what is done, and take a share of what is missing. False if nothing is missing."""
        num, self._num_samples = self._num_samples, 0
        missing, results = self._coverage.exchange({**self._evaluation.result(num), "read": self._read})
        read = {result["worker"]: result["read"] for result in results}
        if any(found != self._read[:2] * (len(found) // 2) for found in read.values()):
            raise UsageError(
                "the workers evaluate different data, or in another order each time, so that samples would count twice "
                f"or never. {REMEDY}. Received: number of batches and their checksum, of each time {read}"
            )
        if missing is not None:
            self._share = self._rest(*missing)
            return True
        self._evaluation.complete(results)
        return False
