"""A worker joins two others: their longest pause, against torchrun's restart and against memory speed.

The longest time between the ends of two consecutive steps of a node, from the start of the newcomer's process
until all three train; the 50 ms step itself is in it. The second target is absolute: one and a half steps,
plus a copy of the state at the speed of memory. It counts in steps of two nodes; that of three, which the pause
ends with, is longer where they share cores, and stands beside it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from tests.benchmarks.elastic_job import OURS, PEER, ElasticJob, Side
from tests.benchmarks.figure import Figure, emit, is_quick, of_samples, spread
from tests.benchmarks.models import state_bytes
from tests.benchmarks.processes import Processes

TARGET = 1 / 40
STEPS_OF_PAUSE = 1.5
_SIZES = ("2m", "33m")
# A newcomer takes the others for dead if their keep-alives are late, and trains alone; losses are not measured here.
_PEER = replace(PEER, options=PEER.options.replace("max_attempt=2", "max_attempt=4"))


@dataclass
class Joins:
    """What was seen of some joins, in seconds.

    Attributes:
        pauses: The longest of each.
        steps_before: A step of two nodes, before each.
        steps_after: A step of three nodes, after each: longer, for two cores.
    """

    pauses: list[float] = field(default_factory=list)
    steps_before: list[float] = field(default_factory=list)
    steps_after: list[float] = field(default_factory=list)


def measure(side: Side, *, num_joins: int, size: str = "tiny") -> Joins:
    """Let a third node join again and again."""
    joins = Joins()
    with Processes() as processes:
        job = ElasticJob(side, processes, size=size)
        job.add_nodes(2)
        for _ in range(num_joins):
            job.wait_until_steady()
            time.sleep(1.0)
            joins.steps_before.append(_step_time(job))
            started = time.monotonic()
            job.add_nodes()
            job.wait_until_steady()
            joins.pauses.append(max(_longest_gap(job, index, started) for index in (0, 1)))
            time.sleep(1.0)
            joins.steps_after.append(_step_time(job))
            print(
                f"{side.name}: {size}: a node joins: {joins.pauses[-1]:.3f} s, "
                f"step {joins.steps_before[-1]:.3f} → {joins.steps_after[-1]:.3f} s",
                flush=True,
            )
            job.kill_last_node()
    return joins


def _step_time(job: ElasticJob) -> float:
    recent = [step for step in job.steps(job.nodes[0])[-15:] if step.world_size == len(job.nodes)]
    return median(np.diff([step.time for step in recent]))


def _longest_gap(job: ElasticJob, index: int, since: float) -> float:
    times = [step.time for step in job.steps(job.nodes[index])]
    first = max(0, int(np.searchsorted(times, since)) - 1)
    return float(np.diff(times[first:]).max())


def copy_speed() -> float:
    """Bytes a second that a copy in memory moves."""
    source = np.ones(1 << 28, dtype=np.uint8)
    target = np.ones_like(source)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return source.nbytes / median(times)


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure both sides, in turn."""
    pauses: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(1 if quick else 3):
        for side in (OURS, _PEER):
            pauses[side.name] += measure(side, num_joins=1 if quick else 2).pauses
    figures = {"join_pause": of_samples(pauses["ours"], pauses["peer"], target=TARGET, unit="s")}
    for size in _SIZES:
        speed = copy_speed()
        joins = measure(OURS, num_joins=2 if quick else 5, size=size)
        transfer = state_bytes(size) / speed
        budget = STEPS_OF_PAUSE * median(joins.steps_before) + transfer
        details = {
            "ours": spread(joins.pauses),
            "step_before": spread(joins.steps_before),
            "step_after": spread(joins.steps_after),
            "budget_by_steps_after": STEPS_OF_PAUSE * median(joins.steps_after) + transfer,
            "state_bytes": state_bytes(size),
            "copy_bytes_per_s": round(speed),
            "peer": f"{STEPS_OF_PAUSE} steps + a copy of the state in memory",
        }
        figures[f"join_pause_{size}"] = Figure(median(joins.pauses), budget, 1.0, "s", details)
    return figures


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
