"""Proves that a built Horovod works: two processes sum a tensor with it.

`python -m ef_common.horovod.proof FRAMEWORK` is one of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ef_common.collectives.bootstrap import SharedValues
from ef_common.horovod.build import BuildError
from ef_common.horovod.rendezvous import Rendezvous, environment_of

_NUM_PROCESSES = 2
_TIMEOUT_S = 180.0


def prove(framework: str) -> None:
    """Sum a tensor in two processes of this environment.

    Args:
        framework: "torch" or "tensorflow".

    Raises:
        BuildError: The build does not work; the message has the output of a process.
    """
    command = [sys.executable, "-m", "ef_common.horovod.proof", framework]
    with Rendezvous(SharedValues()) as rendezvous:
        processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **_environment(rank, rendezvous)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(_NUM_PROCESSES)
        ]
        try:
            outputs = [process.communicate(timeout=_TIMEOUT_S)[0] for process in processes]
        except subprocess.TimeoutExpired:
            raise BuildError(f"Horovod for {framework} did not sum anything within {_TIMEOUT_S:g} s") from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode:
            raise BuildError(f"Horovod for {framework} does not work here. The end of its output:\n{output[-2000:]}")


def _environment(rank: int, rendezvous: Rendezvous) -> Mapping[str, str]:
    return {
        **environment_of(rank, _NUM_PROCESSES, rendezvous, interface="lo"),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMP_NUM_THREADS": "1",
        # From wherever this runs: the children must find the same package.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
    }


def _sum_once(framework: str) -> float:
    if framework == "torch":
        import horovod.torch as hvd
        import torch

        hvd.init()
        total = hvd.allreduce(torch.full((1000,), hvd.rank() + 1.0), op=hvd.Sum, name="proof")
        return float(total.sum())
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    total = hvd.allreduce(tf.fill([1000], hvd.rank() + 1.0), op=hvd.Sum, name="proof")
    return float(tf.reduce_sum(total))


if __name__ == "__main__":
    received, expected = _sum_once(sys.argv[1]), 1000.0 * sum(range(1, _NUM_PROCESSES + 1))
    sys.exit(0 if received == expected else f"a wrong sum. Expected: {expected}. Received: {received}")
