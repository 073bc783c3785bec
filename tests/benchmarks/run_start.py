"""From the command to the first step of two workers: `elasticflow run` against plain torchrun with DDP.

The same LightningModule. The target is absolute: half a second more at most.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.benchmarks.processes import Processes

MORE_S = 0.5
_TIMEOUT_S = 120.0
_SCRIPT = Path(__file__).with_name("run_start_worker.py")
_COMMANDS = {
    "elasticflow": ["-m", "ef_common.cli", "run", "--nproc-per-node=2"],
    "ddp": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
}


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure in turns; the first round fills the caches."""
    seconds: dict[str, list[float]] = {strategy: [] for strategy in _COMMANDS}
    for number in range(3 if quick else 8):
        for strategy in _COMMANDS:
            found = _start(strategy)
            if number:
                seconds[strategy].append(found)
    peer = median(seconds["ddp"])
    return {
        "run_start": of_samples(seconds["elasticflow"], seconds["ddp"], target=(peer + MORE_S) / peer, unit="s"),
    }


def _start(strategy: str) -> float:
    with Processes() as processes:
        first = processes.directory / "first"
        options = [f"--run-dir={processes.directory / 'run'}"] if strategy == "elasticflow" else []
        begin = time.time()
        process = processes.start(
            [*_COMMANDS[strategy], *options, str(_SCRIPT), strategy, str(first)],
            name=strategy,
        )
        process.wait(_TIMEOUT_S)
        if process.returncode != 0:
            raise RuntimeError(f"{strategy} has failed: {process.returncode}")
        return float(first.read_text()) - begin


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
