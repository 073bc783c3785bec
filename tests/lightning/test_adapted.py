"""Data sets of other libraries are recognized, and each sample of theirs counts once."""

from __future__ import annotations

import importlib.util
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness import Job
from tests import warm
from tests.lightning import adapted
from tests.lightning.conftest import HOSTS
from tests.lightning.test_walked import everything

HOST = HOSTS[0]
pytestmark = [pytest.mark.processes, pytest.mark.thorough, pytest.mark.timeout(300)]

LIBRARIES = {"parquet": "pyarrow", "datasets, shuffled": "datasets", "datasets, map-style": "datasets"}
STREAMS = ["parquet", "webdataset", "litdata", "datasets", "datasets, shuffled"]


def needs(kind: str) -> None:
    library = LIBRARIES.get(kind, kind)
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install -e '.[streams]'")


@pytest.fixture(params=STREAMS)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    needs(request.param)
    (tmp_path / "data").mkdir()
    if request.param in adapted.WRITERS:
        adapted.WRITERS[request.param](tmp_path / "data")
    return str(request.param)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shards_of_a_library_are_shared(
    run: Callable[..., list[Any]], tmp_path: Path, kind: str, num_workers: int
) -> None:
    results = run(2, adapted.run, HOST, kind, str(tmp_path / "data"), {"num_workers": num_workers})
    assert everything(results) == [list(range(adapted.LENGTH))] * 2
    assert results[0]["weights"] == results[1]["weights"]


def test_newcomer_and_loss_repeat_and_lose_nothing(job: Job, tmp_path: Path, kind: str) -> None:
    folder, notes = str(tmp_path / "data"), tmp_path / "notes.json"
    (stays,) = job.start_world(1, adapted.until, HOST, kind, folder, 3, None)
    dies = job.start(adapted.until, HOST, kind, folder, 3, str(notes))
    comes = job.start(adapted.until, HOST, kind, folder, 3, None)
    results = [stays.result(), comes.result()]
    assert dies.wait() == -signal.SIGKILL
    job.audit()
    counted, _ = json.loads(notes.read_text())  # without the step in which it died
    assert everything([*results, {"seen": [counted]}]) == [list(range(adapted.LENGTH))] * 2


def test_job_that_loses_one_by_a_notice_and_then_all_goes_on_with_others(job: Job, tmp_path: Path, kind: str) -> None:
    folder, store = str(tmp_path / "data"), str(tmp_path / "store")
    told, *others = job.start_world(3, adapted.with_checkpoints, HOST, kind, folder, store, 4)
    job.wait_for_step(2)
    told.kill(signal.SIGTERM)
    assert told.wait() == 0
    job.wait_for("checkpoint")
    for worker in others:
        worker.kill()
    job.audit()
    with Job(tmp_path / "again", preload=warm.TORCH) as again:
        workers = again.start_world(4, adapted.with_checkpoints, HOST, kind, folder, store, 1000)
        results = [worker.result() for worker in workers]
        again.audit()
    rest, second = map(set, everything(results))  # a share of one sample is a batch with two of it
    assert 0 < len(rest) < adapted.LENGTH  # by the audit, these and what the checkpoint had used are all, each once
    assert second == set(range(adapted.LENGTH))
    assert len({str(result["weights"]) for result in results}) == 1


def test_map_style_data_set_of_hugging_face_is_dealt(run: Callable[..., list[Any]], tmp_path: Path) -> None:
    needs("datasets")
    results = run(2, adapted.run, HOST, "datasets, map-style", str(tmp_path))
    assert everything(results) == [list(range(adapted.LENGTH))] * 2


def test_loader_that_keeps_its_own_place_is_dealt(run: Callable[..., list[Any]]) -> None:
    needs("torchdata")
    results = run(2, adapted.stateful, HOST)
    assert everything(results) == [list(range(29))] * 2
