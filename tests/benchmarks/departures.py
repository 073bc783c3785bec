"""A node is told to go: how long the others pause, and how soon its worker's process and its agent have ended.

Jobs of three nodes with steps of 50 ms. The agent that hosts the coordinator, another agent, or the worker of the
former is told by SIGUSR1 or SIGTERM. The longest time between the ends of two steps of the others is held against one
step and 0.1 s, the end of the worker's process after its last step against 0.5 s.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from itertools import pairwise

import psutil

from ef_common.audit import audit
from ef_common.launch.ending import has_ended
from tests.benchmarks.elastic_job import OURS, SLEEP_S, ElasticJob, Node
from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.benchmarks.processes import Processes

MOST_GAP_S, MOST_END_S = SLEEP_S + 0.1, 0.5
NUM_NODES = 3
WHOM = ("the agent that leads", "another agent", "the worker of the agent that leads")
_LOOK_S = 0.005
_GUARD_S = 60.0


@dataclass(frozen=True)
class Departure:
    """What was seen of one.

    Args:
        gap_s: Longest time between two steps of the others.
        worker_s: From the worker's last step to the end of its process.
        agent_s: From the signal to the end of the agent.
        status: Exit status of the agent.
    """

    gap_s: float
    worker_s: float
    agent_s: float
    status: int


def measure(whom: str, number: signal.Signals) -> Departure:
    """Tell one node of a new job to go."""
    with Processes() as processes:
        job = ElasticJob(OURS, processes)
        job.add_nodes(NUM_NODES)
        job.wait_until_steady()
        going = job.nodes.pop(1 if whom == "another agent" else 0)
        worker = psutil.Process(job.steps(going)[-1].pid)
        began = time.monotonic()
        os.kill(worker.pid if "worker" in whom else going.agent.pid, number)
        worker_ended = _wait_for_end(worker)
        status = going.agent.wait(_GUARD_S)
        agent_s = time.monotonic() - began
        job.first_steps_after(time.monotonic() + 1.0)
        departure = Departure(
            max(_longest_gap(job, node, began) for node in job.nodes),
            worker_ended - job.steps(going)[-1].time,
            agent_s,
            status,
        )
        if not audit(job.run_dir).ok:
            raise RuntimeError("the audit does not hold")
    print(
        f"{number.name} to {whom}: the others' longest step {departure.gap_s:.3f} s, the worker's process ends "
        f"{departure.worker_s:.3f} s after its last step, the agent {agent_s:.3f} s after the signal (status {status})",
        flush=True,
    )
    return departure


def _wait_for_end(process: psutil.Process) -> float:
    deadline = time.monotonic() + _GUARD_S
    while not has_ended(process):
        if time.monotonic() > deadline:
            raise TimeoutError("the worker does not end")
        time.sleep(_LOOK_S)
    return time.monotonic()


def _longest_gap(job: ElasticJob, node: Node, began: float) -> float:
    times = [step.time for step in job.steps(node)]
    return max(after - before for before, after in pairwise(times) if after > began)


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure."""
    found = [
        measure(whom, number)
        for _ in range(1 if quick else 3)
        for whom in WHOM
        for number in (signal.SIGUSR1, signal.SIGTERM)
    ]
    gaps, ends = [one.gap_s for one in found], [one.worker_s for one in found]
    agents = [round(one.agent_s, 3) for one in found]
    return {
        "departure_gap": of_samples(gaps, [MOST_GAP_S], target=1.0, unit="s"),
        "departure_end": of_samples(ends, [MOST_END_S], target=1.0, unit="s", agents=agents),
    }


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
