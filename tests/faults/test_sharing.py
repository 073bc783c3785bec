"""Checkpoints that all workers write together, and what may happen to them meanwhile."""

from __future__ import annotations

import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from lightning.pytorch import Trainer

from ef_common.core.lineage import CheckpointId
from ef_common.storage.checkpoints import Checkpoints
from ef_common.storage.store import Store
from ef_common.testing.harness import WorkerProcess
from tests.faults import stores
from tests.faults.conftest import TrainingJob, check_run, struck
from tests.faults.faults import Striker
from tests.faults.holding import NEVER
from tests.faults.hosts import Host, everywhere, hosted, in_each_framework, in_each_framework_but_jax
from tests.faults.test_checkpoints import OPTIONS, manifests
from tests.faults.training import Net, Options, _loader
from tests.storage.conftest import BUCKET, moto  # noqa: F401  # a fixture

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

SHARED = {**OPTIONS, "wide": True, "share_bytes": 1 << 20, "keep_last": 50}
BITWISE = {**SHARED, "deterministic": True}
FILE, WEIGHTS, MODEL = "lightning.ckpt", "model.weights.h5", "model.keras"


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {**SHARED, "checkpoint": f"obedient://{tmp_path}/store"}


def published(folder: Path, *, num_pieces: int) -> dict[int, Path]:
    """Files of valid checkpoints that so many workers have written (0: rank 0 alone), by step."""
    checkpoints = Checkpoints(Store(folder))
    found = {}
    for name in manifests(folder):
        id = CheckpointId.parse(name)
        assert id is not None
        manifest = checkpoints._checked(id, verify=True, keep=False).manifest
        (file,) = set(manifest.files) & {FILE, WEIGHTS, MODEL}
        if len(manifest.files[file].pieces) == num_pieces:
            found[id.step] = folder / "checkpoints" / name / file
    return found


def weights_of(path: Path) -> bytes:
    """The file, or what is in it, in which the weights are."""
    if path.name != MODEL:
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        return archive.read(WEIGHTS)


def step_of(path: Path) -> int:
    """Updates that the state in a file has seen."""
    if path.name == FILE:
        return int(torch.load(path, weights_only=True)["global_step"])
    with h5py.File(path) as file:
        return int(file["optimizer/vars/0"][()])


def shared(job: TrainingJob, *, step: int = 2, generation: int = 0) -> list[Any]:
    """Wait until one of at least this step and generation is written together."""

    def found(_: Any) -> list[Any]:
        ids = {event["id"] for event in job.events("share")}
        done = [event for event in job.events("checkpoint") if event["id"] in ids and event["step"] >= step]
        return [event for event in done if int(event["id"].split("-")[3]) >= generation]

    return job.wait_until(found, f"a shared checkpoint of step {step}")


def start_slowly(
    job: TrainingJob, world_size: int, options: dict[str, Any], *, last: int, together: bool = True
) -> list[WorkerProcess]:
    """Start workers that do not go on before each checkpoint has been written, up to that of the last step.

    On a slow machine, one would else be taken later than it is due, or by rank 0 alone, as the others are busy; or be
    given up, as the end has come.
    """
    every = options.get("checkpoint_steps", 2)
    steps = range(every, last + 1, every)
    holds = {step + 1: f"saved {step}" for step in steps}
    workers = job.start_world(world_size, job.train, {**options, "holds": holds})
    for step in steps:
        job.wait_until(lambda _, step=step: is_written(job, step, (world_size - 1) * together), f"step {step}")
        (job.directory / holds[step + 1]).touch()
    return workers


def is_written(job: TrainingJob, step: int, num_shares: int) -> bool:
    """A checkpoint of this step or a later one is there, and who has written a share has noted it."""
    ids = {event["id"] for event in job.events("checkpoint") if event["step"] >= step}
    return any(len(job.events("share", id=id)) >= num_shares for id in ids)


def assert_equal(first: Any, second: Any, path: str = "") -> None:
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), path
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), path
        for key, value in first.items():
            assert_equal(value, second[key], f"{path}/{key}")
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second), path
        for index, value in enumerate(first):
            assert_equal(value, second[index], f"{path}/{index}")
    else:
        assert first == second, path


@pytest.mark.thorough
@in_each_framework_but_jax
def test_shared_checkpoint_is_the_one_that_rank_0_writes_alone(tmp_path: Path, host: Host) -> None:
    for name, share_bytes in (("shared", 1 << 20), ("alone", 1 << 40)):
        options = {**BITWISE, "checkpoint": str(tmp_path / name), "share_bytes": share_bytes}
        with TrainingJob(tmp_path / f"run-{name}", host) as job:
            check_run(job, start_slowly(job, 3, options, last=20, together=name == "shared"))
            sharing = {event["worker"] for event in job.events("share")}
            assert len(sharing) == (2 if name == "shared" else 0)
            assert not job.events("checkpoint_failed")
    ours, alone = published(tmp_path / "shared", num_pieces=3), published(tmp_path / "alone", num_pieces=0)
    # One is due at each second step. It is taken later if the one before is still being written then.
    assert set(ours) <= set(range(2, 22))
    assert len({step // 2 for step in ours}) == len(ours)
    both = sorted(set(ours) & set(alone))
    assert len(both) >= 2
    for step in both:
        assert weights_of(ours[step]) == weights_of(alone[step])
        assert step_of(ours[step]) == step
    assert not list((tmp_path / "shared").glob("checkpoints/*/*.*-*"))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Lightning, of what it suggests
@pytest.mark.thorough
def test_shared_checkpoint_is_one_for_plain_lightning(
    job: TrainingJob, tmp_path: Path, options: dict[str, Any]
) -> None:
    check_run(job, job.start_world(3, stores.train_lightning, options))
    path = max(published(tmp_path / "store", num_pieces=3).items())[1]
    chosen = Options(**options)
    net = Net(chosen, Striker(None))
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(net, _loader(chosen), ckpt_path=path)
    saved = torch.load(path, weights_only=True)
    assert trainer.global_step >= saved["global_step"] > 0
    again = Net.load_from_checkpoint(path, options=chosen, striker=Striker(None))
    assert_equal(dict(again.state_dict()), saved["state_dict"])


@in_each_framework_but_jax
def test_job_that_shared_is_started_again_by_fewer_with_the_same_bits(
    make_job: Callable[..., TrainingJob], tmp_path: Path, host: Host
) -> None:
    with TrainingJob(tmp_path / "undisturbed", host) as undisturbed:
        plain = {**BITWISE, "step_sleep_s": 0.0}
        (expected,) = check_run(undisturbed, undisturbed.start_world(1, undisturbed.train, plain))
    options = {**BITWISE, "checkpoint": str(tmp_path / "store")}
    job = make_job()
    workers = job.start_world(3, job.train, {**options, "holds": {8: NEVER}})
    shared(job, step=6)
    for worker in workers:
        worker.kill(signal.SIGSTOP)
    for worker in workers:
        worker.kill()
    again = make_job()
    results = check_run(again, again.start_world(2, again.train, options))
    assert {result["weights"] for result in results} == {expected["weights"]}
    (resumed,) = {event["resumed"] for event in again.events("run", run=2)}
    assert int(resumed.rpartition("-")[2]) >= 6


@pytest.mark.thorough
def test_shares_are_joined_in_an_object_store(
    make_job: Callable[..., TrainingJob],
    moto: dict[str, Any],  # noqa: F811
    tmp_path: Path,
) -> None:
    place = f"s3://{BUCKET}/{tmp_path.name}"
    large = {**SHARED, "width": 40000, "checkpoint": place, "checkpoint_options": moto, "checkpoint_steps": 4}
    job = make_job()
    check_run(job, job.start_world(3, job.train, large))
    assert len({event["worker"] for event in job.events("share")}) == 2
    checkpoints = Checkpoints(Store(place, moto))
    ids = {event["id"] for event in job.events("share")} & {event["id"] for event in job.events("checkpoint")}
    id = CheckpointId.parse(max(ids))
    assert id is not None
    found = checkpoints._checked(id, verify=True, keep=True)
    assert len(found.manifest.files[FILE].pieces) == 3
    with checkpoints.open(found, FILE) as file:
        saved = torch.load(file, weights_only=True)
    assert saved["global_step"] == id.step
    names = [entry.name for entry in checkpoints.store.entries(f"checkpoints/{id.name}")]
    assert names == [FILE, "manifest.json"]


def check_shared(job: TrainingJob, store: Path, host: Host, **more: Any) -> None:
    """Workers write all checkpoints of a training together, but for the last one, and each is of its step."""
    # Of 13 steps.
    training = {"length": 203, "epochs": 1, "global_batch": None, "checkpoint_steps": 5}
    options = {**SHARED, **training, **more, "checkpoint": str(store)}
    results = check_run(job, start_slowly(job, 2, options, last=10))
    together = published(store, num_pieces=2)
    assert len(together) >= 2
    for step, path in together.items():
        assert step_of(path) == step
    assert set(published(store, num_pieces=0)) == {results[0]["step"]}
    assert not job.events("checkpoint_failed")


@everywhere
def test_shared_checkpoints_where_batches_are_the_workers_own_are_valid(
    job: TrainingJob, tmp_path: Path, host: Host
) -> None:
    check_shared(job, tmp_path / "store", host, batch_size=8)


@hosted("lightning", "lightning-horovod")
def test_shared_checkpoints_of_an_accumulating_and_validating_training_are_valid(
    job: TrainingJob, tmp_path: Path, host: Host
) -> None:
    limits = {"val_check_interval": 0.5}
    check_shared(job, tmp_path / "store", host, batch_size=4, accumulate=2, val_length=30, limits=limits)


# ---------------------------------------------------------------- faults


HANG, STRUCK, HEALED = "hang", "struck", "healed"
HOLDS = {4: HANG, 8: STRUCK, 12: HEALED}
"""The store hangs, something happens to workers, and the store hangs no more."""


def hang_in_shares(job: TrainingJob, tmp_path: Path, workers: list[WorkerProcess]) -> CheckpointId:
    """Have all workers wait while they write their shares; which checkpoint that is."""
    before = {path.name for path in (tmp_path / "store" / "checkpoints").iterdir()}
    for path in tmp_path.glob(f"{stores.HANGING}*"):
        path.unlink()
    (tmp_path / stores.HANG).touch()
    (job.directory / HANG).touch()
    paths = [tmp_path / f"{stores.HANGING}-{worker.pid}" for worker in workers]
    job.wait_until(lambda _: all(path.exists() for path in paths), "all hang")
    names = {path.parent.name for path in (tmp_path / "store" / "checkpoints").glob("*/*.shared")} - before
    id = CheckpointId.parse(max(names))
    assert id is not None
    return id


@pytest.mark.parametrize("moment", ["issue", "wait"])
@pytest.mark.parametrize("rank", [0, 2])
@hosted("lightning", "keras-tensorflow")
def test_worker_that_is_killed_while_all_agree_costs_that_checkpoint_at_most(
    job: TrainingJob, tmp_path: Path, rank: int, moment: str
) -> None:
    fault = {"where": "plan", "rank": rank, "moment": moment, "generation": 1}
    options = {**SHARED, "checkpoint": str(tmp_path / "store")}
    job.start_world(3, job.train, options, fault)
    workers = job.founders(3)
    assert workers[rank].wait() == -signal.SIGKILL
    check_run(job, [worker for worker in workers if worker is not workers[rank]])
    struck(job, "plan")
    both = published(tmp_path / "store", num_pieces=2)
    assert both
    for step, path in both.items():
        assert step_of(path) == step
    assert not published(tmp_path / "store", num_pieces=3)
    generations = [int(name.split("-")[3]) for name in manifests(tmp_path / "store")]
    assert set(generations) == {2}


@pytest.mark.parametrize("rank", [0, 2])
@in_each_framework
def test_worker_that_is_killed_while_shares_are_written_costs_that_checkpoint_alone(
    job: TrainingJob, host: Host, tmp_path: Path, options: dict[str, Any], rank: int
) -> None:
    job.start_world(3, stores.TRAIN[host.name], {**options, "epochs": 4, "holds": HOLDS})
    workers = job.view(3)
    shared(job)
    torn = hang_in_shares(job, tmp_path, workers)
    workers[rank].kill()
    (job.directory / STRUCK).touch()
    others = [worker for worker in workers if worker is not workers[rank]]
    job.view(2, after=1)
    (tmp_path / stores.HANG).unlink()
    (job.directory / HEALED).touch()
    newer = shared(job, generation=torn.generation + 1)
    assert all(event["id"] != torn.name for event in job.events("checkpoint"))
    check_run(job, others)
    assert torn.name not in manifests(tmp_path / "store")
    assert not (tmp_path / "store" / "checkpoints" / torn.name).exists()
    failed = [event for event in job.events("checkpoint_failed") if event["id"] == torn.name]
    assert [event["worker"] for event in failed] == ([others[0].id] if rank else [])
    if rank:
        assert "was lost before it had written its share" in failed[0]["reason"]
        warnings = [line for line in others[0].output.read_text().splitlines() if "is given up" in line]
        assert len(warnings) == 1
    step = newer[0]["step"]
    path = published(tmp_path / "store", num_pieces=2)[step]
    assert step_of(path) == step
    found = Checkpoints(Store(tmp_path / "store")).newest_valid()
    assert found is not None
    assert found.id.step == 44


@pytest.mark.thorough
def test_worker_that_was_cut_off_while_it_wrote_its_share_spoils_nothing(
    make_job: Callable[..., TrainingJob], tmp_path: Path, options: dict[str, Any]
) -> None:
    job = make_job(heartbeat_timeout_s=2.0)
    job.start_world(3, stores.linger_when_evicted, {**options, "epochs": 4, "holds": HOLDS})
    workers = job.view(3)
    shared(job)
    torn = hang_in_shares(job, tmp_path, workers)
    *others, last = workers
    last.kill(signal.SIGSTOP)
    (job.directory / STRUCK).touch()
    (tmp_path / stores.HANG).unlink()
    job.view(2, after=1)
    (job.directory / HEALED).touch()
    shared(job, generation=torn.generation + 1)
    last.kill(signal.SIGCONT)
    job.wait_until(
        lambda _: (
            job.events("share", worker=last.id, id=torn.name)
            or job.events("checkpoint_failed", worker=last.id, id=torn.name)
        ),
        "the late one has tried",
    )
    (job.directory / "enough").touch()
    assert last.result() == "evicted"
    weights = [worker.result() for worker in others]
    assert weights[0] == weights[1]
    job.audit()
    assert torn.name not in manifests(tmp_path / "store")
    assert len(published(tmp_path / "store", num_pieces=2)) >= 1
    found = Checkpoints(Store(tmp_path / "store")).newest_valid()
    assert found is not None
    assert found.id.step == 44


def test_all_are_told_to_go_while_shares_are_written_and_the_last_state_is_saved(
    job: TrainingJob, tmp_path: Path, options: dict[str, Any]
) -> None:
    job.start_world(3, stores.train_lightning, {**options, "epochs": 4, "holds": {4: HANG, 8: STRUCK}})
    workers = job.view(3)
    shared(job)
    hang_in_shares(job, tmp_path, workers)
    for worker in workers:
        worker.kill(signal.SIGTERM)
    job.wait_until(lambda _: len(job.events("notice")) >= 3, "all are told")
    (tmp_path / stores.HANG).unlink()
    (job.directory / STRUCK).touch()
    assert {worker.wait() for worker in workers} == {0}
    found = Checkpoints(Store(tmp_path / "store")).newest_valid(keep=True)
    assert found is not None
    newest = max(event["step"] for event in job.events("step"))
    assert found.id.step - newest in (0, 1)  # an update is logged with the next one
    job.audit()
