"""Runs many schedules in several processes."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from ef_common.testing.simulation.schedule import FAMILIES
from ef_common.testing.simulation.simulation import simulate

_CHUNK = 50


@dataclass(slots=True)
class Summary:
    """What became of many schedules.

    Args:
        num_schedules: How many were run.
        num_events: Events in all of them.
        failures: The violation of each seed that failed.
        seen: In how many schedules each rare case happened.
        ends: How many workers ended in which way.
        cpu_s: Processor time.
    """

    num_schedules: int = 0
    num_events: int = 0
    failures: dict[int, str] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0

    def add(self, other: Summary) -> None:
        """Take in another one."""
        self.num_schedules += other.num_schedules
        self.num_events += other.num_events
        self.failures.update(other.failures)
        self.seen.update(other.seen)
        self.ends.update(other.ends)
        self.cpu_s += other.cpu_s


def run_seeds(seeds: Iterable[int], *, family: str = "") -> Summary:
    """Run the schedules of these seeds in a family, one after the other."""
    summary = Summary()
    begin = time.process_time()
    for seed in seeds:
        outcome = simulate(FAMILIES[family](seed))
        summary.num_schedules += 1
        summary.num_events += outcome.num_events
        summary.seen.update(set(outcome.seen))
        summary.ends.update(end or "frozen" for end in outcome.ends.values())
        if outcome.violation is not None:
            summary.failures[seed] = outcome.violation
    summary.cpu_s = time.process_time() - begin
    return summary


def run_campaign(num_schedules: int, *, first_seed: int = 0, jobs: int = 1, family: str = "") -> Summary:
    """Run the schedules of `num_schedules` seeds from `first_seed` on, in `jobs` processes."""
    summary = Summary()
    stop = first_seed + num_schedules
    chunks = [range(low, min(low + _CHUNK, stop)) for low in range(first_seed, stop, _CHUNK)]
    for part in _map(partial(run_seeds, family=family), chunks, jobs):
        summary.add(part)
    return summary


def _map(run: Callable[[Iterable[int]], Summary], chunks: list[range], jobs: int) -> Iterator[Summary]:
    if jobs <= 1:
        yield from map(run, chunks)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(run, chunks)
