"""The progress bar is shown by whoever is rank 0."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from ef_common.testing.harness import Job
from ef_lightning.progress import Progress
from tests.lightning import progress
from tests.lightning.conftest import HOSTS


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["training", "validation"])
@pytest.mark.parametrize("kind", ["tqdm", "rich"])
def test_progress_bar_comes_back_when_rank_0_is_lost(job: Job, kind: str, where: str) -> None:
    workers = job.start_world(2, progress.run, HOSTS[0], kind, where)
    assert sorted(worker.wait() for worker in workers) == [-signal.SIGKILL, 0]
    (survivor,) = [worker for worker in workers if worker.wait() == 0]
    (lost,) = [worker for worker in workers if worker.wait() != 0]
    assert survivor.result()["enabled"]
    assert "Epoch 0" in lost.output.read_text()
    shown = survivor.output.read_text()
    assert "Epoch 0" not in shown  # it was not rank 0 then
    assert "Epoch 1" in shown
    assert "Epoch 2" in shown
    assert "Validation" in shown


class Bar:
    def __init__(self, *, enabled: bool) -> None:
        self.is_enabled = enabled

    def enable(self) -> None:
        self.is_enabled = True


@pytest.mark.parametrize("wanted", [True, False])
def test_progress_bar_that_the_user_has_disabled_stays_so(wanted: bool) -> None:
    bar, session = Bar(enabled=wanted), SimpleNamespace(rank=1)
    trainer: Any = SimpleNamespace(progress_bar_callback=bar)
    shown = Progress(trainer, session)  # type: ignore[arg-type]
    bar.is_enabled = False  # as Lightning's set-up does in all ranks but 0
    shown.follow_ranks()
    assert not bar.is_enabled
    session.rank = 0
    shown.follow_ranks()
    assert bar.is_enabled == wanted
    Progress(SimpleNamespace(progress_bar_callback=None), session).end()  # type: ignore[arg-type]
