"""Values over time in bounded memory: the number of buckets and points is limited, however long the run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_BUCKETS = 1024
MAX_POINTS = 1024
FIRST_WIDTH_S = 0.05
_FARTHEST_S = 1e9  # 30 years: what is later comes from a broken clock


@dataclass(slots=True)
class Bucket:
    """The events of one span of time.

    Args:
        samples: Samples trained in it; those of a step are spread evenly over its duration.
        num_losses: Number of losses of all workers' steps in it.
        loss_sum: Sum of these losses.
        loss_min: The smallest.
        loss_max: The largest.
    """

    samples: float = 0.0
    num_losses: int = 0
    loss_sum: float = 0.0
    loss_min: float = math.inf
    loss_max: float = -math.inf

    def merge(self, other: Bucket) -> None:
        """Add the events of the next span."""
        self.samples += other.samples
        self.num_losses += other.num_losses
        self.loss_sum += other.loss_sum
        self.loss_min = min(self.loss_min, other.loss_min)
        self.loss_max = max(self.loss_max, other.loss_max)


@dataclass
class Buckets:
    """The samples and losses of a run, in buckets of equal width.

    Where the run outgrows them, neighbours merge and the width doubles, so sums, means, minima and maxima stay exact.
    A value costs O(1), and a step O(buckets that it spans).

    Attributes:
        width_s: Width of a bucket.
        buckets: Number i begins `i * width_s` after the beginning.
    """

    width_s: float = FIRST_WIDTH_S
    buckets: list[Bucket] = field(default_factory=list)

    def add_loss(self, moment_s: float, loss: float) -> None:
        """Add a worker's loss; the moment counts from the beginning of the run."""
        if not math.isfinite(loss):
            return
        bucket = self._at(moment_s)
        bucket.num_losses += 1
        bucket.loss_sum += loss
        bucket.loss_min = min(bucket.loss_min, loss)
        bucket.loss_max = max(bucket.loss_max, loss)

    def add_samples(self, begin_s: float, end_s: float, samples: float) -> None:
        """Add the samples of a step that was made between two moments."""
        self._at(end_s)  # first: it may widen them
        begin_s, end_s = max(begin_s, 0.0), min(max(end_s, 0.0), _FARTHEST_S)
        first, last = int(begin_s / self.width_s), int(end_s / self.width_s)
        if first >= last:
            self._at(end_s).samples += samples
            return
        rate = samples / (end_s - begin_s)
        for index in range(first, last + 1):
            start, stop = max(begin_s, index * self.width_s), min(end_s, (index + 1) * self.width_s)
            self.buckets[index].samples += rate * max(stop - start, 0.0)

    def _at(self, moment_s: float) -> Bucket:
        moment_s = min(max(moment_s, 0.0), _FARTHEST_S)
        while (index := int(moment_s / self.width_s)) >= MAX_BUCKETS:
            self._double()
        while len(self.buckets) <= index:
            self.buckets.append(Bucket())
        return self.buckets[index]

    def _double(self) -> None:
        self.width_s *= 2
        for bucket, following in zip(self.buckets[::2], self.buckets[1::2], strict=False):
            bucket.merge(following)
        self.buckets = self.buckets[::2]


@dataclass
class Levels:
    """A value that holds until the next one, such as the number of workers.

    Of more than `MAX_POINTS` changes, every second one is left out, but never the first or the newest.

    Attributes:
        points: Moments from the beginning of the run in seconds, and values.
    """

    points: list[tuple[float, float]] = field(default_factory=list)

    def note(self, moment_s: float, value: float) -> None:
        """Note that this value holds from now on."""
        if self.points and self.points[-1][1] == value:
            return
        self.points.append((max(moment_s, 0.0), value))
        if len(self.points) > MAX_POINTS:
            newest = self.points.pop()
            self.points = [*self.points[::2], newest]

    def columns(self) -> Iterator[list[float]]:
        """The moments and the values."""
        yield [round(moment, 3) for moment, _ in self.points]
        yield [value for _, value in self.points]
