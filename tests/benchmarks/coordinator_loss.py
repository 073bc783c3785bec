"""SIGKILL of the node whose agent hosts the coordinator, of three: how long until the survivors' next step is complete.

Counted as in `loss_recovery`. There is no peer: without the agent that hosts torchrun's rendezvous, all agents end.
"""

from __future__ import annotations

import random
import time

from ef_common.audit import audit
from tests.benchmarks.elastic_job import OURS, SLEEP_S, ElasticJob
from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.benchmarks.processes import Processes

NUM_NODES = 3
ALLOWED_S = 0.5 + SLEEP_S
NUM_ROUNDS = 7


def measure(dice: random.Random) -> float:
    """Seconds of one loss.

    Raises:
        RuntimeError: A survivor has lost its process, or the audit fails.
    """
    with Processes() as processes:
        job = ElasticJob(OURS, processes)
        job.add_nodes(NUM_NODES)
        job.wait_until_steady()
        before = {node.name: job.steps(node)[-1].pid for node in job.nodes}
        time.sleep(dice.random() * SLEEP_S)
        _, killed = job.kill_node(0)
        resumed = job.first_steps_after(killed)
        if any(before[node.name] != step.pid for node, step in zip(job.nodes, resumed, strict=True)):
            raise RuntimeError("a survivor has lost its process")
        report = audit(job.run_dir)
        if not all(found.ok for found in report.properties):
            raise RuntimeError(f"the audit fails: {report}")
        return max(step.time for step in resumed) - killed


def run(*, quick: bool) -> dict[str, Figure]:
    """Lose the coordinator of several jobs."""
    dice = random.Random(0)
    ours = [measure(dice) for _ in range(2 if quick else NUM_ROUNDS)]
    return {"coordinator_loss": of_samples(ours, [ALLOWED_S], target=1.0, unit="s")}


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
