"""A worker hangs while its heartbeats go on: how long the others pause, against the limit that was set for that.

The longest time between the ends of two consecutive steps of a survivor; the 50 ms step itself is in it. Jobs of three
nodes, of which one hangs again and again: its agent starts it anew each time.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from itertools import pairwise

from ef_common.audit import audit
from tests.benchmarks.elastic_job import OURS, ElasticJob, Node
from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.benchmarks.processes import Processes

LIMIT_S = 3.0
NUM_NODES = 3
TARGET = 1.2
_SIDE = replace(OURS, options=f"{OURS.options},hang_timeout={LIMIT_S:g}")


def measure(num_hangs: int) -> list[float]:
    """Let the last node's worker hang so many times; the pauses of the others, in seconds."""
    pauses = []
    with Processes() as processes:
        job = ElasticJob(_SIDE, processes)
        job.add_nodes(NUM_NODES)
        for _ in range(num_hangs):
            job.wait_until_steady()
            *others, victim = job.nodes
            pids = [_pid(job, node) for node in job.nodes]
            began = time.monotonic()
            os.kill(pids[-1], signal.SIGUSR2)
            _wait_for_another_process(job, victim, pids[-1])
            if [_pid(job, node) for node in others] != pids[:-1]:
                raise RuntimeError("a survivor has not kept its process")
            pauses.append(max(_longest_gap(job, node, began) for node in others))
            print(f"three nodes, one hangs: {pauses[-1]:.3f} s, the limit is {LIMIT_S:g} s", flush=True)
        if not audit(job.run_dir).ok:
            raise RuntimeError("the audit does not hold")
    return pauses


def _pid(job: ElasticJob, node: Node) -> int:
    return job.steps(node)[-1].pid


def _wait_for_another_process(job: ElasticJob, node: Node, pid: int) -> None:
    deadline = time.monotonic() + 60.0
    while _pid(job, node) == pid:
        if time.monotonic() > deadline:
            raise TimeoutError("the hung worker is not replaced")
        time.sleep(0.05)


def _longest_gap(job: ElasticJob, node: Node, began: float) -> float:
    times = [step.time for step in job.steps(node)]
    return max(after - before for before, after in pairwise(times) if after > began)


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure."""
    pauses = measure(3 if quick else 10)
    return {"hang_pause": of_samples(pauses, [LIMIT_S], target=TARGET, unit="s")}


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
