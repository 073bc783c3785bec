"""Checkpoints of a job whose workers, or whose store, fail meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ef_common.storage.checkpoints import Checkpoints
from ef_common.storage.store import Store
from tests.faults import stores
from tests.faults.conftest import TrainingJob, check_run
from tests.faults.holding import NEVER
from tests.faults.hosts import hosted
from tests.storage.conftest import BUCKET, gcs, moto  # noqa: F401  # fixtures

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

OPTIONS = {"global_batch": 40, "batch_size": 5, "length": 403, "epochs": 2, "step_sleep_s": 0.05}


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {**OPTIONS, "checkpoint": f"obedient://{tmp_path}/store"}


def saved(job: TrainingJob, step: int = 2, **fields: Any) -> list[Any]:
    return job.wait_until(
        lambda _: [event for event in job.events("checkpoint", **fields) if event["step"] >= step],
        f"a checkpoint of step {step}",
    )


def wait_for_file(job: TrainingJob, path: Path) -> None:
    job.wait_until(lambda _: path.exists(), path.name)


def manifests(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in (folder / "checkpoints").glob("*/manifest.json"))


@hosted("lightning", "keras-torch")
@pytest.mark.thorough
def test_next_rank_0_goes_on_saving_and_cleans_up(
    job: TrainingJob, tmp_path: Path, host: Any, options: dict[str, Any]
) -> None:
    options = {**options, "claims": str(tmp_path / "claims"), "holds": {4: "go on"}}
    job.start_world(3, stores.TRAIN[host.name], options)
    first, *others = job.view(3)
    saved(job)
    (tmp_path / stores.KILL).touch()
    (job.directory / "go on").touch()
    assert first.wait() == -signal.SIGKILL
    torn = (tmp_path / stores.KILLED).read_text()
    check_run(job, others)
    newest = Checkpoints(Store(tmp_path / "store")).newest_valid()
    assert newest is not None
    assert newest.id.step == 22
    assert newest.id.generation > int(torn.split("-")[3])
    folders = sorted(path.name for path in (tmp_path / "store" / "checkpoints").iterdir())
    assert folders == manifests(tmp_path / "store")
    assert torn not in folders
    assert len({event["worker"] for event in job.events("checkpoint")}) == 2
    assert len(list((tmp_path / "claims" / "markers").iterdir())) == 1
    assert not (tmp_path / "store" / "markers").exists()


@hosted("lightning", "lightning-horovod", "keras-tensorflow", "keras-torch")
@pytest.mark.parametrize("others", [True, False], ids=["others save", "newcomer saves"])
def test_newcomer_that_differs_in_whether_checkpoints_are_taken_ends_alone(
    job: TrainingJob, tmp_path: Path, others: bool
) -> None:
    plain = {"step_sleep_s": 0.02, **job.patient}
    saving = {**plain, "checkpoint": str(tmp_path / "store"), "share_bytes": 0}
    workers = job.start_world(2, job.train, saving if others else plain)
    job.wait_for_step(2)
    joiner = job.start(job.train, plain if others else saving)
    assert joiner.wait() == 1
    output = joiner.output.read_text()
    assert "CannotJoin: worker " in output
    assert "Set checkpoint= or ELASTICFLOW_CHECKPOINT alike on all nodes" in output
    assert "Traceback" not in output
    check_run(job, workers)
    assert not job.events("admitted")
    assert bool(job.events("checkpoint")) == others


@hosted("lightning", "lightning-horovod", "keras-tensorflow", "keras-torch")
def test_first_workers_of_which_only_some_take_checkpoints_say_so(job: TrainingJob, tmp_path: Path) -> None:
    plain = {"step_sleep_s": 0.02}
    places = [{**plain, "checkpoint": str(tmp_path / "store")}, plain]
    workers = [
        job.start(job.train, options, node="one", environ={"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank)})
        for rank, options in enumerate(places)
    ]
    assert [worker.wait() for worker in workers] == [1, 1]
    outputs = [worker.output.read_text() for worker in workers]
    assert any("UsageError: some workers have a place for checkpoints, and others have none" in one for one in outputs)
    assert not any("CallMismatch" in one for one in outputs)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.thorough
def test_full_store_holds_up_nobody_and_makes_the_end_fail(
    job: TrainingJob, small_disk: Path, options: dict[str, Any]
) -> None:
    options = {**options, "checkpoint": str(small_disk / "store"), "holds": {4: "go on"}}
    workers = job.start_world(2, stores.train_lightning, options, 1.0)
    saved(job)
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(1 << 20))
    (job.directory / "go on").touch()
    job.wait_for("checkpoint_failed")
    assert {worker.wait() for worker in workers} == {1}
    assert max(event["step"] for event in job.events("step")) == 22
    job.audit()
    reasons = {event["reason"] for event in job.events("checkpoint_failed", final=False)}
    assert all("the store is full" in reason for reason in reasons)
    outputs = [worker.output.read_text() for worker in workers]
    assert any("Saving a checkpoint failed; training goes on" in output for output in outputs)
    for output in outputs:
        assert "StorageFailed: The newest checkpoint could not be saved" in output
        assert "the store is full" in output
    assert Checkpoints(Store(small_disk / "store")).newest_valid() is not None


def test_store_that_hangs_holds_up_nobody_and_costs_one_copy(
    job: TrainingJob, tmp_path: Path, options: dict[str, Any]
) -> None:
    workers = job.start_world(2, stores.train_lightning, {**options, "holds": {4: "go on"}})
    (begun,) = saved(job)[-1:]
    (tmp_path / stores.HANG).touch()
    (job.directory / "go on").touch()
    wait_for_file(job, tmp_path / stores.HANGING)
    job.wait_for_step(begun["step"] + 12)  # six checkpoints would have been due
    num = len(job.events("checkpoint"))
    job.wait_for_step(begun["step"] + 14)
    assert len(job.events("checkpoint")) == num
    (tmp_path / stores.HANG).unlink()
    results = check_run(job, workers)
    assert sorted(result["copies"] for result in results) == [0, 1]
    newest = Checkpoints(Store(tmp_path / "store")).newest_valid()
    assert newest is not None
    assert newest.id.step == results[0]["step"] == 22


def test_worker_that_was_cut_off_publishes_nothing_over_the_others(
    make_job: Callable[..., TrainingJob], tmp_path: Path, options: dict[str, Any]
) -> None:
    job = make_job(heartbeat_timeout_s=2.0)
    job.start_world(3, stores.linger_when_evicted, {**options, "holds": {4: "hang", 8: "stopped"}})
    first, *others = job.view(3)
    saved(job)
    (tmp_path / stores.HANG).touch()
    (job.directory / "hang").touch()
    wait_for_file(job, tmp_path / stores.HANGING)
    first.kill(signal.SIGSTOP)
    (tmp_path / stores.HANG).unlink()
    (job.directory / "stopped").touch()
    job.view(2, after=1)
    saved(job, worker=others[0].id)
    before = manifests(tmp_path / "store")
    first.kill(signal.SIGCONT)
    (failed,) = job.wait_for("checkpoint_failed", worker=first.id)
    assert "must not be published: generation" in failed["reason"]
    (job.directory / "enough").touch()
    assert first.result() == "evicted"
    weights = [worker.result() for worker in others]
    assert weights[0] == weights[1]
    job.audit()
    ours = [name for name in manifests(tmp_path / "store") if "generation-000001" in name]
    assert set(ours) <= set(before)
    newest = Checkpoints(Store(tmp_path / "store")).newest_valid()
    assert newest is not None
    assert newest.id.step == 22


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_job_is_started_again_from_an_object_store_by_more_workers(
    make_job: Callable[..., TrainingJob], request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    server = request.getfixturevalue("moto" if kind == "s3" else "gcs")
    options = {**OPTIONS, "checkpoint": f"{kind}://{BUCKET}/{tmp_path.name}", "checkpoint_options": server}
    job = make_job()
    workers = job.start_world(2, job.train, {**options, "holds": {6: NEVER}})
    saved(job, 4)
    for worker in workers:
        worker.kill(signal.SIGSTOP)
    for worker in workers:
        worker.kill()
    again = make_job()
    results = check_run(again, again.start_world(3, again.train, options))
    assert {result["step"] for result in results} == {22}
    assert {result["world_size"] for result in results} == {3}
    (resumed,) = {event["resumed"] for event in again.events("run", run=2)}
    assert int(resumed.rpartition("-")[2]) >= 4


@hosted("lightning", "keras-tensorflow", "keras-torch")
@pytest.mark.parametrize("has_store", [True, False])
def test_members_and_newcomers_tell_which_store_they_have(job: TrainingJob, tmp_path: Path, has_store: bool) -> None:
    options = {**job.patient, "checkpoint": str(tmp_path / "store")} if has_store else job.patient
    workers = job.start_world(2, job.train, options)
    job.wait_for_step(2)
    workers.append(job.start(job.train, options))
    job.view(3)
    server = job.coordinator._server
    assert server is not None
    job.wait_until(lambda events: len(server.state.stores.told) == 3, "what all three have")
    (store,) = set(server.state.stores.told.values())
    assert len(store) == (32 if has_store else 0)
    check_run(job, workers)
