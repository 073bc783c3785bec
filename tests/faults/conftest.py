"""A job of real workers, and what must be true of every run whatever has happened in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness import Job, WorkerProcess
from ef_common.testing.harness_run import Run
from tests.faults.hosts import ENOUGH, HOSTS, Host, Train
from tests.faults.saving import PATTERN


class TrainingJob(Job):
    """A job whose workers train.

    Attributes:
        train: What they do.
        patient: Options of a training that ends when `finish` is called, or at the end of its epochs.
    """

    def __init__(self, directory: Path, host: Host, **kwargs: Any) -> None:
        super().__init__(directory, preload=host.preload, **kwargs)
        self.train: Train = host.train
        self.patient = host.patient


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest) -> Host:
    return HOSTS[getattr(request, "param", "lightning")]


@pytest.fixture
def make_job(tmp_path: Path, host: Host) -> Iterator[Callable[..., TrainingJob]]:
    with ExitStack() as stack:
        yield lambda **kwargs: stack.enter_context(TrainingJob(tmp_path / "run", host, **kwargs))


@pytest.fixture
def job(make_job: Callable[..., TrainingJob]) -> TrainingJob:
    return make_job()


@pytest.fixture
def finish(job: TrainingJob) -> Callable[[Sequence[WorkerProcess]], list[dict[str, Any]]]:
    """Wait for the workers that must have survived, and check what is promised of every run."""
    return lambda survivors: check_run(job, survivors)


def check_run(job: Job, survivors: Sequence[WorkerProcess]) -> list[dict[str, Any]]:
    """The survivors keep their processes, their weights are equal, and the audit holds."""
    (job.directory / ENOUGH).touch()
    results = [worker.result() for worker in survivors]
    assert [result["pid"] for result in results] == [worker.pid for worker in survivors]
    assert len({result["weights"] for result in results}) == 1
    for name in ("step", "epoch", "metrics", "rate", "compensation", "memory"):
        assert all(result.get(name) == results[0].get(name) for result in results), name
    job.audit()
    return results


def check_gentle(run: Run) -> None:
    """No loss has been seen before the end, and no sample was dealt twice."""
    assert not any(event["returned"] for event in run.events("step"))
    assert not [event["reason"] for event in run.events("view") if "gone" in event["reason"].replace("goodbye", "")]


def saved(run: Run) -> list[dict[str, Any]]:
    """What workers have saved that were the last to leave."""
    return [json.loads(path.read_text()) for path in run.directory.glob(PATTERN)]


def check_saved(run: Run, *, of: Collection[str] = ()) -> None:
    """One worker has saved the newest state, once: of all workers, or of those that began together."""
    (only,) = saved(run)
    steps = [event for event in run.events("step") if not of or event["worker"] in of]
    # An update is logged with the next one, so the newest is not, unless its maker was alone.
    assert only["step"] - max(event["step"] for event in steps) in (0, 1)
    if not of:
        run.audit()


def struck(job: Job, where: str) -> dict[str, Any]:
    """The record of the one fault that has struck."""
    (record,) = job.events("fault", what=f"injected:{where}")
    return record
