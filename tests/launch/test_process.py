from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ef_common.errors import UsageError
from ef_common.horovod import library
from ef_common.launch import process
from ef_common.launch.process import this_worker


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """This process is no worker, before the test and after it."""
    for name in ("COORDINATOR", "NODE"):
        monkeypatch.delenv(f"ELASTICFLOW_{name}", raising=False)
    monkeypatch.setenv("ELASTICFLOW_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(process, "_this", None)
    yield
    if process._this is not None:
        process._this.session.stop()


def test_worker_is_made_once() -> None:
    assert this_worker() is this_worker("gloo")


def test_second_engine_in_one_process_is_refused() -> None:
    this_worker("gloo")
    with pytest.raises(UsageError, match=r"Expected: engine='gloo'. Received: engine='horovod'"):
        this_worker("horovod")


def test_unknown_engine_is_refused_also_where_none_is_needed() -> None:
    with pytest.raises(UsageError, match="Received: engine='mpi'"):
        this_worker("mpi")


def test_worker_that_is_alone_needs_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    assert this_worker("horovod").session.world_size == 1


def test_one_of_several_that_would_each_train_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(UsageError, match="each of them would run a training of its own"):
        this_worker()
    monkeypatch.setenv("ELASTICFLOW_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setattr(process, "groups_of", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # one that `elasticflow run` has started goes on
        this_worker()


def test_engine_that_is_not_installed_is_refused_before_anybody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICFLOW_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    monkeypatch.setattr(process, "CoordinatorClient", lambda *args: pytest.fail("a worker was announced"))
    with pytest.raises(UsageError, match="elasticflow horovod build"):
        this_worker("horovod")
