"""What a program waits for our import: a plugin against the packages that its user imports anyway.

Each import is made in a new interpreter; what Python takes to start is subtracted from both sides.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from statistics import median

from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.benchmarks.processes import ROOT

_NOTHING = "pass"
_PROGRAMS = {
    "import_ef_lightning": (
        "import torch, lightning.pytorch; from ef_lightning import ElasticFlowStrategy",
        "import torch, lightning.pytorch",
    ),
    "import_ef_keras": ("import torch, keras, ef_keras", "import torch, keras"),
}
_TARGET = 1.15


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure in turns; the first round fills the caches."""
    programs = {_NOTHING, *(program for pair in _PROGRAMS.values() for program in pair)}
    seconds: dict[str, list[float]] = {program: [] for program in programs}
    for number in range(4 if quick else 11):
        for program in sorted(programs):
            found = _seconds(program)
            if number:
                seconds[program].append(found)
    start = median(seconds[_NOTHING])
    net = {program: [found - start for found in all_found] for program, all_found in seconds.items()}
    return {
        name: of_samples(net[ours], net[peer], target=_TARGET, unit="s") for name, (ours, peer) in _PROGRAMS.items()
    }


def _seconds(program: str) -> float:
    begin = time.perf_counter()
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True)
    return time.perf_counter() - begin


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
