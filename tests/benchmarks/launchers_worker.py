"""Two steps of a training on two nodes; notes when the first one has ended. Arguments: the strategy, and the file."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from tests.benchmarks.lightning_module import Module, trainer
from tests.benchmarks.models import loader
from tests.benchmarks.run_start_worker import Note


def main() -> None:
    """Train."""
    warnings.simplefilter("ignore")
    strategy, path = sys.argv[1:]
    if strategy == "elasticflow":
        import ef_lightning  # noqa: F401  # registers it
    num_nodes = {"ddp": 2}.get(strategy, 1)
    run = trainer(Note(Path(path)), strategy=strategy, max_steps=2, num_nodes=num_nodes)
    run.fit(Module("2m"), loader(64))


if __name__ == "__main__":
    main()
