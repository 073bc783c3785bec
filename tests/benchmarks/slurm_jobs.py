"""Two jobs on six nodes of Slurm, each of which wants four: elastic, against jobs that get all their nodes or none.

Slurm is a real one, on network namespaces. The second job is submitted when the first one has had a quarter of the time
that it needs alone. A job that gets all or none is one of four nodes, on which `srun` starts the same training. A step
is mostly a sleep, so four workers train as fast on two cores as elsewhere; imports are not.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ef_common.testing.harness_run import Run
from tests.benchmarks.cluster_lives import training
from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.faults import slurm_cluster
from tests.faults.launched import ENVIRON
from tests.faults.slurm_cluster import Cluster
from tests.faults.torchrun_nodes import SCRIPT

NODES, WANTED = 6, 4
WORK = {"epochs": 4, "length": 3200, "step_sleep_s": 0.3, "stop": ""}
"""Two minutes of four workers: 1600 batches of eight samples, one for each worker in each step."""
FIRST_GUESS_S = 35.0
TARGET_MAKESPAN, MOST_PENDING_S = 0.80, 2.0
_GUARD_S = 900.0
_LOOK_S = 0.1

Found = dict[str, Any]


class Job(Run):
    """A training that is submitted when this is made.

    Args:
        directory: Its run directory.
        cluster: Where.
        elastic: Whether it begins with one node.
    """

    def __init__(self, directory: Path, cluster: Cluster, *, elastic: bool) -> None:
        super().__init__(directory)
        self._cluster = cluster
        self.submitted = time.time()
        self.started = self.ended = 0.0
        own = ("--exclusive", f"--output={self.outputs}/%A_%a.txt")
        if elastic:
            said = cluster.elasticflow(
                *("slurm", "submit", f"--nodes=1:{WANTED}", f"--run-dir={directory}", *own, str(SCRIPT)),
                json.dumps(WORK),
                environ=ENVIRON,
            )
            self.number = said.split()[2]
        else:
            run = f"{sys.executable} -m ef_common.cli run --run-dir={directory} {SCRIPT} {json.dumps(json.dumps(WORK))}"
            options = ("--parsable", f"--nodes={WANTED}", "--ntasks-per-node=1", *own, f"--wrap=srun {run}")
            environ = {**ENVIRON, "ELASTICFLOW_TOKEN": "secret"}
            done = cluster.call("sbatch", *options, environ=environ)
            done.check_returncode()
            self.number = done.stdout.strip()

    def look(self) -> bool:
        """Note whether it runs, and whether it has ended; returns the latter."""
        states = self._cluster.ask("squeue", "--noheader", f"--jobs={self.number}", "--format=%T").split()
        if not self.started and any(state != "PENDING" for state in states):
            self.started = time.time()
        if not self.ended and not states:
            self.ended = time.time()
        return bool(self.ended)


def two_jobs(cluster: Cluster, *, elastic: bool, second_after_s: float) -> Found:
    """Both jobs, to their ends."""
    with tempfile.TemporaryDirectory(prefix="ef-bench-") as folder:
        began = time.time()
        jobs = [Job(Path(folder) / "a", cluster, elastic=elastic)]
        while sum(job.look() for job in jobs) < 2:
            if time.time() > began + _GUARD_S:
                raise TimeoutError(jobs[-1].tails())
            if len(jobs) < 2 and time.time() >= began + second_after_s:
                jobs.append(Job(Path(folder) / "b", cluster, elastic=elastic))
            time.sleep(_LOOK_S)
        for job in jobs:
            job.audit()
        sizes = [training(job.events(), began) for job in jobs]
    first, second = jobs
    found = {
        "elastic": elastic,
        "alone_s": round(first.ended - began, 1),
        "makespan": round(max(job.ended for job in jobs) - began, 2),
        "pending": round(second.started - second.submitted, 2),
        "first_step": round(sizes[1][0][0] - (second.submitted - began), 2),
    }
    print(json.dumps(found), sizes, flush=True)
    return found


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure; both ways take turns."""
    if (why := slurm_cluster.why_not()) is not None:
        print(why)
        return {}
    rigid: list[Found] = []
    elastic: list[Found] = []
    quarter_s = FIRST_GUESS_S
    with slurm_cluster.cluster(NODES) as cluster:
        for _ in range(1 if quick else 3):
            rigid.append(two_jobs(cluster, elastic=False, second_after_s=quarter_s))
            quarter_s = rigid[-1]["alone_s"] / 4
            elastic.append(two_jobs(cluster, elastic=True, second_after_s=quarter_s))

    def of(found: list[Found], what: str) -> list[float]:
        return [one[what] for one in found]

    pending = {"gang": of(rigid, "pending"), "until the first step": of(elastic, "first_step")}
    return {
        "slurm_makespan": of_samples(
            of(elastic, "makespan"), of(rigid, "makespan"), target=TARGET_MAKESPAN, unit="s", alone=of(rigid, "alone_s")
        ),
        "slurm_pending": of_samples(of(elastic, "pending"), [MOST_PENDING_S], target=1.0, unit="s", **pending),
    }


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
