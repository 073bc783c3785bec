"""A checkpoint of 400 MB on the local disk that two workers share, against one that rank 0 writes alone.

In one training, in turns: how long rank 0 stands still, and how long the writing takes. Both workers use the memory and
the disk of one machine, so this shows what sharing costs, and not what several nodes gain by it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from ef_common.testing.harness import Job
from tests.benchmarks.checkpoint_shares_worker import KINDS, train
from tests.benchmarks.figure import Figure, emit, is_quick, of_samples

NUM_ROUNDS = 7
_PRELOAD = ("torch", "lightning.pytorch", "ef_lightning", "ef_common.launch.process")


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure both."""
    with (
        tempfile.TemporaryDirectory(prefix="ef-bench-") as folder,
        Job(Path(folder) / "run", preload=_PRELOAD) as job,
    ):
        workers = job.start_world(2, train, f"{folder}/store", 2 if quick else NUM_ROUNDS)
        found = next(worker.result() for worker in workers if worker.result()["writes"]["alone"])
    pauses = {kind: [1e3 * seconds for seconds in found["pauses"][kind][1:]] for kind in KINDS}
    writes = {kind: found["writes"][kind][1:] for kind in KINDS}
    return {
        "checkpoint_shared_pause": of_samples(pauses["shared"], pauses["alone"], target=1.0, unit="ms"),
        "checkpoint_shared_write": of_samples(writes["shared"], writes["alone"], target=1.0, unit="s"),
    }


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
