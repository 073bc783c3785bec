"""A worker that writes a file if everybody leaves, in place of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from ef_common.launch.environment import read_environment
from ef_common.launch.process import Worker

PATTERN = "saved-*.json"


def save_on_last_leave(worker: Worker, step: Callable[[], int]) -> None:
    """Have the worker note its number of updates, each time in a file of its own."""
    run_dir = read_environment().run_dir or Path()

    def save() -> None:
        number = len(list(run_dir.glob(PATTERN)))
        path = run_dir / f"saved-{worker.session.worker.id}-{number}.json"
        path.write_text(json.dumps({"worker": worker.session.worker.id, "step": step()}))

    worker.notices.save_on_last_leave(save)
