"""SIGKILL of a node: how long until the survivors' next step is complete, against torchrun's own restart.

From the instant of the kill to the end of the first step that the survivors make without the lost node, the
slowest of them counting; the 50 ms step itself is in it. Jobs of four nodes, which lose one after the other.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from dataclasses import dataclass

from ef_common.audit import audit
from ef_common.events import read
from tests.benchmarks.elastic_job import OURS, PEER, SLEEP_S, ElasticJob, Side
from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.benchmarks.processes import Processes

NUM_NODES = 4
TARGET = 1 / 40


@dataclass(frozen=True)
class Loss:
    """What one loss cost.

    Args:
        num_nodes: Nodes before it.
        recovery_s: Time until the survivors' next step.
        kept: The survivors kept their processes.
        num_lost: Steps that had been completed and were made again.
    """

    num_nodes: int
    recovery_s: float
    kept: bool
    num_lost: int


def measure(side: Side, dice: random.Random) -> list[Loss]:
    """Lose all nodes of a job but one."""
    losses = []
    with Processes() as processes:
        job = ElasticJob(side, processes)
        job.add_nodes(NUM_NODES)
        while len(job.nodes) > 1:
            job.wait_until_steady()
            time.sleep(dice.random() * SLEEP_S)  # anywhere in a step
            losses.append(_lose_one(job))
            loss = losses[-1]
            print(f"{side.name}: {loss.num_nodes} nodes, one killed: {loss.recovery_s:.3f} s", flush=True)
        if side is not PEER:
            losses = _check(job, losses)
    return losses


def _lose_one(job: ElasticJob) -> Loss:
    num_nodes = len(job.nodes)
    _, killed = job.kill_last_node()
    resumed = job.first_steps_after(killed)
    kept, num_lost = True, 0
    for node, step in zip(job.nodes, resumed, strict=True):
        before = [s for s in job.steps(node) if s.time < step.time][-1]
        kept &= before.pid == step.pid
        num_lost = max(num_lost, before.number + 1 - step.number)
    return Loss(num_nodes, max(step.time for step in resumed) - killed, kept, num_lost)


def _check(job: ElasticJob, losses: list[Loss]) -> list[Loss]:
    """The event log must say the same: no rollback, and each step and sample once."""
    report = audit(job.run_dir)
    problems = [f"{found.name}: {found.detail}" for found in report.properties if not found.ok]
    problems += ["rollback" for record in read(job.run_dir) if record["kind"] == "rollback"]
    for problem in problems:
        print(f"{job.side.name}: the event log shows {problem}", flush=True)
    if not problems:
        return losses
    return [Loss(loss.num_nodes, loss.recovery_s, loss.kept, max(1, loss.num_lost)) for loss in losses]


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure both sides, in turn."""
    dice = random.Random(0)
    found: dict[tuple[str, int], list[Loss]] = defaultdict(list)
    for index in range(1 if quick else 5):
        for side in (OURS, PEER) if index < 3 else (OURS,):  # the peer takes its time
            for loss in measure(side, dice):
                found[side.name, loss.num_nodes].append(loss)
    figures = {}
    for num_nodes in range(2, NUM_NODES + 1):
        ours, peer = found["ours", num_nodes], found["peer", num_nodes]
        figures[f"loss_recovery_{num_nodes}_nodes"] = of_samples(
            [loss.recovery_s for loss in ours],
            [loss.recovery_s for loss in peer],
            target=TARGET,
            unit="s",
            process_kept={"ours": all(x.kept for x in ours), "peer": all(x.kept for x in peer)},
            steps_lost={"ours": max(x.num_lost for x in ours), "peer": max(x.num_lost for x in peer)},
        )
    return figures


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
