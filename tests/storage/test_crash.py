"""Processes that die while they save."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ef_common.core.lineage import CheckpointId
from ef_common.core.retention import Retention
from ef_common.storage.checkpoints import Checkpoints
from ef_common.storage.store import Store
from tests.storage import crash

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
def test_sigkill_at_any_line_of_a_save_leaves_a_valid_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.storage.crash", str(tmp_path), "29"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    ends = dict(line.split() for line in done.stdout.splitlines())
    killed = [name for name, end in ends.items() if end == "killed"]
    assert len(killed) > 80

    found = []
    for name in ends:
        checkpoints = Checkpoints(Store(tmp_path / name))
        newest = checkpoints.newest_valid()
        assert newest is not None, name
        assert newest.manifest.progress == {"step": newest.id.step}
        found.append(newest.id)
        go_on(checkpoints, newest.id)
    # The one before, until the manifest of the new one is there.
    assert found == sorted(found)
    assert set(found) == {crash.FIRST, crash.SECOND}
    assert found[-1] == crash.SECOND


def go_on(checkpoints: Checkpoints, parent: CheckpointId) -> None:
    """The next start saves as if nothing had been, and leaves nothing of what broke."""
    third = CheckpointId(checkpoints.claim(parent), 1, 30)
    checkpoints.publish(third, crash.content(30))
    checkpoints.clean(Retention(keep_last=1))
    assert [entry.name for entry in checkpoints.store.entries("checkpoints")] == [third.name]
