"""Losses and joins in an elastic `fit` of Keras on TensorFlow, and in Horovod's own elastic training.

A loss counts from the SIGKILL of a worker to the end of the survivors' next step; its budget is a quarter of a second
and one step. A join counts as the longest time between the ends of two steps of those that were there. The step of
50 ms is in both.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from tests.benchmarks.elastic_job import OURS, SLEEP_S, ElasticJob
from tests.benchmarks.figure import Figure, emit, is_quick, of_samples, spread
from tests.benchmarks.horovod_job import HorovodJob
from tests.benchmarks.processes import Processes

NUM_WORKERS = 4
BUDGET_S = 0.25
TARGET_JOIN = 1 / 8
NUM_JOBS = {"ours": 5, "horovod": 3}  # the peer takes its time
_OURS = replace(OURS, worker="tests.benchmarks.keras_elastic_worker")


def _start(side: str, processes: Processes) -> Any:
    return ElasticJob(_OURS, processes) if side == "ours" else HorovodJob(processes)


def measure(side: str, dice: random.Random) -> tuple[dict[int, float], float]:
    """One job of two workers; two join it, and then all but one are lost.

    Returns:
        Seconds of recovery by the number of workers before the loss, and of the longest pause at a join.
    """
    losses, pauses = {}, []
    with Processes() as processes:
        job = _start(side, processes)
        job.add_nodes(2)
        while len(job.nodes) < NUM_WORKERS:
            job.wait_until_steady()
            before, started = list(job.nodes), time.monotonic()
            job.add_nodes()
            job.wait_until_steady()
            pauses.append(max(_longest_gap(job, node, started) for node in before))
        while len(job.nodes) > 1:
            job.wait_until_steady()
            time.sleep(dice.random() * SLEEP_S)  # anywhere in a step
            num = len(job.nodes)
            _, killed = job.kill_last_node()
            losses[num] = max(step.time for step in job.first_steps_after(killed)) - killed
    print(f"{side}: losses {losses}, joins {pauses}", flush=True)
    return losses, max(pauses)


def _longest_gap(job: Any, node: Any, since: float) -> float:
    times = [step.time for step in job.steps(node)]
    return float(np.diff(times[max(0, int(np.searchsorted(times, since)) - 1) :]).max())


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure both sides, in turn."""
    dice = random.Random(0)
    losses: dict[tuple[str, int], list[float]] = defaultdict(list)
    pauses: dict[str, list[float]] = defaultdict(list)
    for index in range(1 if quick else max(NUM_JOBS.values())):
        for side, number in NUM_JOBS.items():
            if index < number:
                found, pause = measure(side, dice)
                pauses[side].append(pause)
                for num, loss in found.items():
                    losses[side, num].append(loss)
    figures = {}
    for num in range(2, NUM_WORKERS + 1):
        ours, peer = losses["ours", num], losses["horovod", num]
        details = {
            "ours": spread(ours),
            "horovod": spread(peer),
            "ratio_to_horovod": round(median(ours) / median(peer), 3),
            "peer": f"{BUDGET_S} s and a step",
        }
        figures[f"keras_loss_{num}_workers"] = Figure(median(ours), BUDGET_S + SLEEP_S, 1.0, "s", details)
    figures["keras_join"] = of_samples(pauses["ours"], pauses["horovod"], target=TARGET_JOIN, unit="s")
    return figures


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
