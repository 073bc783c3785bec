"""Elastic jobs in a cluster of Kubernetes: two that share it, against gang scheduling; and one beside pods that serve.

A third one loses a pod, with a spare and without one. The figures:

* `cluster_makespan`: until two jobs that share the cluster have ended.
* `cluster_pending_pod`: until the first pod of the second job runs, which has to be within two seconds. That is what
  the controller is there for.
* `cluster_pending`: until its first step. It is held against the same two seconds only to show what it costs to start a
  process, which is nearly all imports. No controller can change that, so this figure cannot meet them.
* `cluster_spare`: from the loss of one of two pods to the next step of two workers.
* `cluster_serving`: from the creation of a pod that serves until it runs. `cluster_evicted` is the part of it that is
  ours: from when the scheduler has told a pod of the training to go until that one has ended. `cluster_bound` is from
  then until the scheduler has put the new one there. Up to Kubernetes 1.32, its back-off may be nearly all of this.
* `cluster_lost`: steps that the training had to make again for that.
* `cluster_idle`: the part of the time in which a slot has no pod.

The control plane is a real one, on this machine. A node is a network namespace with one slot, and a pod is a process. A
step is mostly a sleep, so six workers train as fast on two cores as elsewhere; imports are not, so pods take longer to
start here than they would on nodes of their own. All that was seen is kept in `build/cluster.json`, of which
`tests.benchmarks.cluster_pictures` draws the pictures of the documentation.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from ef_common.core.cluster import SharePolicy
from ef_common.kubernetes.reading import seconds
from tests.benchmarks.cluster_lives import WAITS, Lives, held, integral, steps_of, training, waits_of
from tests.benchmarks.figure import Figure, emit, is_quick, of_samples, spread
from tests.benchmarks.processes import ROOT
from tests.faults.hosts import ENOUGH
from tests.kubernetes.cluster import Cluster, Training, cluster, why_not

RESULTS = ROOT / "build" / "cluster.json"
SLOTS, WANTED = 6, 4
WORK = {"epochs": 2, "length": 3200, "step_sleep_s": 0.3, "stop": ""}
"""A minute of four workers: 800 batches of eight samples, one for each worker in each step."""
FIRST_GUESS_S = 20.0
GUARD_S = 900.0
SERVED_SLOTS, NUM_SERVING, NUM_WAVES = 4, 2, 2
CALM_S, WAVE_S = 10.0, 30.0
ENDLESS = {"epochs": 1000, "length": 3200, "step_sleep_s": 0.1, "stop": ENOUGH}
LOSING = {**ENDLESS, "step_sleep_s": 0.05}
STEPS_BEFORE = 100
"""After so many steps of two workers, their spare has imported what it needs."""
TARGET_SPARE = 0.25
MOST_GONE_S, MOST_BOUND_S = 0.5, 1.0
TARGET_MAKESPAN, MOST_PENDING_S, MOST_SERVING_S, MOST_IDLE = 0.75, 2.0, 1.5, 0.05

Found = dict[str, Any]


@contextlib.contextmanager
def _acting(cluster: Cluster, policy: SharePolicy = SharePolicy.FAIR) -> Iterator[tuple[Lives, Path]]:
    """There are a controller, and somebody who watches; afterwards the cluster is empty."""
    cluster.start_controller(f"--policy={policy.value}")
    lives = Lives(cluster.api).start()
    with tempfile.TemporaryDirectory(prefix="ef-bench-") as folder:
        try:
            yield lives, Path(folder)
        finally:
            lives.stop()
            cluster.clear()
            cluster.stop_controllers()


# ------------------------------------------------------------ two jobs


def two_jobs(cluster: Cluster, policy: SharePolicy, *, second_after_s: float) -> Found:
    """Two jobs want four of six slots each; the second one comes later."""
    with _acting(cluster, policy) as (lives, folder):
        began = time.time()
        first = Training(folder / "a", cluster, "a").submit(1, WANTED, options=WORK)
        time.sleep(second_after_s)
        second_at = time.time()
        second = Training(folder / "b", cluster, "b").submit(1, WANTED, options=WORK)
        jobs = {"a": _end(first, began, began), "b": _end(second, second_at, began)}
        rows = lives.as_rows(began)
    end_s = max(job["ended"] for job in jobs.values())
    trained = sum(integral(job["training"], 0.0, end_s) for job in jobs.values())
    pods_at = min(row["running"] for row in rows if row["job"] == "b" and row["running"] is not None)
    found = {
        "policy": policy.value,
        "slots": SLOTS,
        "makespan": end_s,
        "pending": round(jobs["b"]["first_step"] - jobs["b"]["created"], 3),
        "pod_pending": round(pods_at - jobs["b"]["created"], 3),
        "training": round(trained / (SLOTS * end_s), 4),
        "held": round(integral(held(rows), 0.0, end_s) / (SLOTS * end_s), 4),
    }
    return {**found, "jobs": jobs, "pods": rows, "load": os.getloadavg()}


def _end(job: Training, created_at: float, since: float) -> Found:
    """Wait for the end of a job; what has become of it."""
    deadline = time.monotonic() + GUARD_S
    while job.status().get("phase") != "Succeeded":
        job.check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"the training does not end\n{job.tails()}")
        time.sleep(0.1)
    job.audit()
    sizes = training(job.events(), since)
    ended_at = seconds(job.status()["endedAt"])
    return {
        "created": round(created_at - since, 3),
        "first_step": sizes[0][0],
        "ended": round(ended_at - since, 3),
        "training": sizes,
    }


# ------------------------------------------------------------ beside serving


def serving(cluster: Cluster) -> Found:
    """Pods that serve come and go twice; a training has the other slots."""
    with _acting(cluster) as (lives, folder):
        job = Training(folder / "a", cluster, "a").submit(1, SERVED_SLOTS, options=ENDLESS)
        job.guard_s = GUARD_S
        job.wait_for_world(SERVED_SLOTS)
        job.wait_for_steps()
        began = time.time()
        asked: dict[str, float] = {}
        time.sleep(CALM_S)
        for wave in range(NUM_WAVES):
            names = [f"serving-{wave}-{number}" for number in range(NUM_SERVING)]
            for name in names:
                asked[name] = time.time()
                cluster.serve(name)
            time.sleep(WAVE_S)
            for name in names:
                cluster.remove(name)
            time.sleep(WAVE_S)
        end_s = time.time() - began
        job.finish()
        rows, events = lives.as_rows(began), job.events()
    times = [at for at, _ in steps_of(events, began) if 0.0 <= at <= end_s]
    others = [row for row in rows if not row["job"]]
    sizes = training(events, began)
    used = integral(sizes, 0.0, end_s) + integral(held(_from_running(others)), 0.0, end_s)
    return {
        "slots": SERVED_SLOTS,
        "seconds": round(end_s, 3),
        "serving": [round(row["running"] - (asked[row["name"]] - began), 3) for row in others],
        "waits": waits_of(rows),
        "lost": len({event["step"] for event in events if event["kind"] == "step" and event["returned"]}),
        "longest_step": round(max(after - before for before, after in pairwise(times)), 3),
        "idle": round(1 - integral(held(rows), 0.0, end_s) / (SERVED_SLOTS * end_s), 4),
        "not_training_or_serving": round(1 - used / (SERVED_SLOTS * end_s), 4),
        "jobs": {"a": {"training": sizes}},
        "pods": rows,
        "load": os.getloadavg(),
    }


def _from_running(rows: list[Found]) -> list[Found]:
    return [{**row, "bound": row["running"]} for row in rows]


# ------------------------------------------------------------ a spare


def loss(cluster: Cluster, *, spares: int) -> Found:
    """A job of two loses a pod, and goes on with one worker until there are two again."""
    with _acting(cluster) as (_, folder):
        job = Training(folder / "a", cluster, "a").submit(1, 2, options=LOSING, spares=spares)
        before = job.wait_for_world(2)
        job.wait_for_pods(2 + spares)
        job.wait_for("start", 2 + spares)
        job.wait_for_steps(STEPS_BEFORE)
        killed_at = cluster.cut_off(job.members()[0])
        after = job.wait_until(lambda _: _full_steps(job, before), "a step of two workers")
        found = {"spares": spares, "full_again": round(min(after) - killed_at, 3), "load": os.getloadavg()}
        job.finish()
    return found


def _full_steps(job: Training, before: int) -> list[float]:
    """When two workers have made steps, in views later than this one."""
    return [step["time"] for step in job.events("step", world_size=2) if step["generation"] > before]


# ------------------------------------------------------------ all of it


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure; both policies take turns."""
    if (why := why_not()) is not None:
        print(why)
        return {}
    num_rounds = 1 if quick else 3
    kept: dict[str, list[Found]] = {name: [] for name in ("gang", "fair", "serving", "spare", "no_spare")}

    def keep(name: str, measure: Callable[[], Found]) -> Found:
        found = measure()
        kept[name].append(found)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(kept) + "\n")
        figures = {name: value for name, value in found.items() if name not in ("jobs", "pods")}
        print(name, json.dumps(figures), flush=True)
        return found

    with cluster(dict.fromkeys(range(1, SLOTS + 1), 1)) as six:
        quarter_s = FIRST_GUESS_S
        for _ in range(num_rounds):
            before_s = quarter_s
            gang = keep("gang", lambda after_s=before_s: two_jobs(six, SharePolicy.GANG, second_after_s=after_s))
            quarter_s = gang["jobs"]["a"]["ended"] / 4  # alone on its slots, as it is here
            keep("fair", lambda after_s=quarter_s: two_jobs(six, SharePolicy.FAIR, second_after_s=after_s))
    with cluster(dict.fromkeys(range(1, SERVED_SLOTS + 1), 1)) as four:
        for _ in range(num_rounds):
            keep("serving", lambda: serving(four))
        for _ in range(num_rounds):
            keep("spare", lambda: loss(four, spares=1))
            keep("no_spare", lambda: loss(four, spares=0))
    return _figures(kept)


def _figures(kept: dict[str, list[Found]]) -> dict[str, Figure]:
    def of(name: str, what: str) -> list[float]:
        return [found[what] for found in kept[name]]

    gang = {"training": of("gang", "training"), "pending": of("gang", "pending")}
    makespan = of_samples(of("fair", "makespan"), of("gang", "makespan"), target=TARGET_MAKESPAN, unit="s", gang=gang)
    served = [one for found in kept["serving"] for one in found["serving"]]
    details = {what: of("serving", what) for what in ("not_training_or_serving", "longest_step")}
    parts = {what: [waits[what] for found in kept["serving"] for waits in found["waits"]] for what in WAITS}
    others = {what: spread(parts[what]) for what in ("told", "started")}
    return {
        "cluster_makespan": makespan,
        "cluster_pending": of_samples(of("fair", "pending"), [MOST_PENDING_S], target=1.0, unit="s"),
        "cluster_pending_pod": of_samples(of("fair", "pod_pending"), [MOST_PENDING_S], target=1.0, unit="s"),
        "cluster_spare": of_samples(
            of("spare", "full_again"), of("no_spare", "full_again"), target=TARGET_SPARE, unit="s"
        ),
        "cluster_serving": of_samples(served, [MOST_SERVING_S], target=1.0, unit="s", **others),
        "cluster_evicted": of_samples(parts["gone"], [MOST_GONE_S], target=1.0, unit="s"),
        "cluster_bound": of_samples(parts["bound"], [MOST_BOUND_S], target=1.0, unit="s"),
        "cluster_lost": Figure(sum(of("serving", "lost")), 1.0, 0.0, "steps"),
        "cluster_idle": of_samples(of("serving", "idle"), [MOST_IDLE], target=1.0, unit="share", **details),
    }


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
