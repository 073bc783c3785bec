"""A job that chooses its size, in virtual time: the throughput of each size is given, and nothing else is real."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ef_common.core.autoscale import Policy, Situation
from ef_common.core.throughput import NUM_PARTS, Measure, SpeedHistory

WARM_UP_STEPS = 10
WINDOW_STEPS = 184


class Change(NamedTuple):
    at: float
    before: int
    after: int
    reason: str


def steady(_: float) -> float:
    return 1.0


@dataclass
class Job:
    """Trains, measures in windows, and asks the policy after each.

    Args:
        curve: Samples per second of so many nodes.
        policy: The policy; None for a fixed size.
        drift: Factor of the throughput of all sizes at a time.
        noise: Relative standard deviation of the measure of a window.
        seen_noise: The same, as far as the spread of the measure's parts shows it; None for what it is.
        pause_s: Pause of the training at a change of size.
        num_samples: Length of the training.
        room: The most nodes that can be had.
    """

    curve: Callable[[int], float]
    policy: Policy | None = None
    size: int = 1
    least: int = 1
    most: int = 6
    local_batch: int = 32
    pause_s: float = 1.0
    drift: Callable[[float], float] = steady
    noise: float = 0.0
    seen_noise: float | None = None
    seed: int = 0
    num_samples: float = math.inf
    tells_length: bool = True
    room: int = 10**6
    history: SpeedHistory = field(default_factory=SpeedHistory)
    now: float = 0.0
    trained: float = 0.0
    worker_s: float = 0.0
    num_windows: int = 0
    changes: list[Change] = field(default_factory=list)
    begin: float = field(init=False)

    def __post_init__(self) -> None:
        self.begin = self.now
        self._random = random.Random(self.seed)
        self._is_warm = False

    @property
    def elapsed_s(self) -> float:
        return self.now - self.begin

    @property
    def is_over(self) -> bool:
        return self.trained >= self.num_samples * (1 - 1e-12)

    def run(self, seconds: float = math.inf) -> Job:
        end = self.now + seconds
        while self.now < end and not self.is_over:
            self._train_a_window()
            if not self.is_over:
                self._decide()
        return self

    def lose(self, size: int) -> None:
        """The job shrinks, or grows, by itself."""
        self._change(size, "by itself")

    def changes_since(self, at: float) -> list[Change]:
        return [change for change in self.changes if change.at >= at]

    def busiest_hour(self, since: float) -> int:
        times = [change.at for change in self.changes_since(since)]
        return max((sum(one <= other < one + 3600.0 for other in times) for one in times), default=0)

    def _train_a_window(self) -> None:
        throughput = self.curve(self.size) * self.drift(self.now)
        self._train(0 if self._is_warm else WARM_UP_STEPS, throughput)
        begin = self.now
        trained = self._train(WINDOW_STEPS, throughput)
        if self.now == begin:
            return
        self._is_warm, self.num_windows = True, self.num_windows + 1
        found = trained / (self.now - begin) * max(0.05, 1 + self._random.gauss(0, self.noise))
        seen = self.noise if self.seen_noise is None else self.seen_noise
        spread = found * seen * math.sqrt(NUM_PARTS)
        self.history = self.history.with_measure(Measure(self.size, found, spread, self.now - begin, self.now))

    def _train(self, steps: int, throughput: float) -> float:
        samples = min(steps * self.local_batch * self.size, self.num_samples - self.trained)
        self._pass(samples / throughput)
        self.trained += samples
        return samples

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        self.worker_s += seconds * self.size

    @property
    def situation(self) -> Situation:
        known = self.num_samples < math.inf and self.tells_length
        return Situation(
            size=self.size,
            least=self.least,
            most=max(self.least, min(self.most, self.room)),
            now=self.now,
            history=self.history,
            batch_size=self.local_batch * self.size,
            elapsed_s=self.elapsed_s,
            worker_s=self.worker_s,
            remaining_samples=self.num_samples - self.trained if known else None,
        )

    def _decide(self) -> None:
        target = None if self.policy is None else self.policy.decide(self.situation)
        if target is None:
            return
        situation = self.situation
        assert situation.least <= target.size <= situation.most
        assert target.reason
        assert "\n" not in target.reason
        self.history = self.history.with_wanted(target.size)
        if target.size != self.size:
            self._change(target.size, target.reason)

    def _change(self, size: int, reason: str) -> None:
        self.changes.append(Change(self.now, self.size, size, reason))
        self._pass(self.pause_s)
        self.history = self.history.with_change(self.pause_s)
        self.size, self._is_warm = size, False


def wandering(seed: int, depth: float, *, period_s: float = 300.0) -> Callable[[float], float]:
    """A drift of the throughput of all sizes by up to `depth`: pieces of straight lines between random values."""
    values: dict[int, float] = {}

    def value(piece: int) -> float:
        if piece not in values:
            values[piece] = 1 + depth * random.Random(f"{seed} {piece}").uniform(-1, 1)
        return values[piece]

    def drift(at: float) -> float:
        piece, part = divmod(at, period_s)
        return value(int(piece)) * (1 - part / period_s) + value(int(piece) + 1) * part / period_s

    return drift


def capped(cap: float, slope: float = 100.0) -> Callable[[int], float]:
    """A shared resource gives no more than `cap` nodes need."""
    return lambda size: slope * min(size, cap)


def amdahl(share: float, slope: float = 100.0) -> Callable[[int], float]:
    return lambda size: slope * size / (1 + share * (size - 1))


def best_by_rule(curve: Callable[[int], float], most: int, threshold: float) -> int:
    """Where Or et al.'s rule stops with full knowledge, one node at a time."""
    size = 1
    while size < most and (curve(size + 1) / curve(size) - 1) * size > threshold:
        size += 1
    return size


def sizes(job: Job) -> Iterator[int]:
    yield from (change.after for change in job.changes)
