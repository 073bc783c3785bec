"""A worker becomes slower than the others: how long until the job is as fast as before, against 60 s.

A job of three workers on this machine, which has them replaced. The time from the beginning of the slowness until the
newest eight steps of all workers together, without the slow one, are at least 0.95 times as fast as those before it.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.faults.hosts import ENOUGH
from tests.faults.test_autoscale import STEP_S, speed
from tests.faults.throttles import SLOW
from tests.launch.test_run import Launched, script

LIMIT_S = 60.0
SETTINGS = "min=3,max=3,every_steps=10"
_NUM_STEPS = 24
_BACK = 0.95
_PATIENCE_S = 240.0


def measure() -> float:
    """Slow down a worker of a new job; the time until the job is as fast as before, in seconds."""
    with tempfile.TemporaryDirectory() as directory:
        job = Launched(Path(directory) / "run")
        options = script(length=100_003, throttled=True, step_sleep_s=STEP_S)
        job.start("--nproc-per-node=3", "--nnodes=1:3", f"--autoscale={SETTINGS}", *options)
        try:
            job.wait_for_world(3)
            job.wait_for_step(_NUM_STEPS)
            before = speed(job)
            victim = job.events("view")[-1]["members"][1]
            (start,) = job.events("start", worker=victim)
            began = time.time()
            (job.directory / SLOW).write_text(str(start["pid"]))
            while victim in job.events("view")[-1]["members"] or speed(job, since=began) < _BACK * before:
                job.check()
                if time.time() > began + _PATIENCE_S:
                    raise TimeoutError("the job is not as fast as before")
                time.sleep(0.2)
            took_s = time.time() - began
            (job.directory / ENOUGH).touch()
            if job.wait():
                raise RuntimeError(job.tails())
            job.audit()
        finally:
            job.end()
    print(f"a straggler of three: as fast as before after {took_s:.1f} s", flush=True)
    return took_s


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    times = [measure() for _ in range(1 if quick else 3)]
    return {"straggler_replaced": of_samples(times, [LIMIT_S], target=1.0, unit="s")}


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
