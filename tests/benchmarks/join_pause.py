"""A worker joins two others: their longest pause, against torchrun's restart and against memory speed.

The longest time between the ends of two consecutive steps of a node, from the start of the newcomer's process
until all three train; the 50 ms step itself is in it. The second target is absolute: one and a half steps,
plus a copy of the state at the speed of memory.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from tests.benchmarks.elastic_job import OURS, PEER, ElasticJob, Side
from tests.benchmarks.figure import Figure, emit, is_quick, of_samples, spread
from tests.benchmarks.models import state_bytes
from tests.benchmarks.processes import Processes

TARGET = 1 / 40
STEPS_OF_PAUSE = 1.5
_SIZES = ("2m", "33m")


def measure(side: Side, *, num_joins: int, size: str = "tiny") -> tuple[list[float], list[float]]:
    """Let a third node join again and again.

    Returns:
        The longest pauses, and the lengths of a step of two nodes before each join; in seconds.
    """
    pauses, steps = [], []
    with Processes() as processes:
        job = ElasticJob(side, processes, size=size)
        job.add_nodes(2)
        for _ in range(num_joins):
            job.wait_until_steady()
            time.sleep(1.0)
            steps.append(_step_time(job))
            started = time.monotonic()
            job.add_nodes()
            job.wait_until_steady()
            pauses.append(max(_longest_gap(job, index, started) for index in (0, 1)))
            print(f"{side.name}: {size}: a node joins: {pauses[-1]:.3f} s, step {steps[-1]:.3f} s", flush=True)
            job.kill_last_node()
    return pauses, steps


def _step_time(job: ElasticJob) -> float:
    times = [step.time for step in job.steps(job.nodes[0])[-15:]]
    return median(np.diff(times))


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
        for side in (OURS, PEER):
            pauses[side.name] += measure(side, num_joins=1 if quick else 2)[0]
    figures = {"join_pause": of_samples(pauses["ours"], pauses["peer"], target=TARGET, unit="s")}
    for size in _SIZES:
        speed = copy_speed()
        ours, steps = measure(OURS, num_joins=2 if quick else 5, size=size)
        budget = STEPS_OF_PAUSE * median(steps) + state_bytes(size) / speed
        details = {
            "ours": spread(ours),
            "step": spread(steps),
            "state_bytes": state_bytes(size),
            "copy_bytes_per_s": round(speed),
            "peer": f"{STEPS_OF_PAUSE} steps + a copy of the state in memory",
        }
        figures[f"join_pause_{size}"] = Figure(median(ours), budget, 1.0, "s", details)
    return figures


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
