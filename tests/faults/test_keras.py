"""What only Keras has: callbacks that write, and streams of batches."""

from __future__ import annotations

import csv
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ef_common.horovod.library import built_for
from tests.faults.conftest import TrainingJob, check_run, struck
from tests.faults.hosts import ENOUGH, hosted
from tests.faults.test_kill import start_with_fault, view_sizes
from tests.faults.test_restart import kill_all, saved
from tests.horovod_built import needs_horovod

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

Finish = Callable[..., list[dict[str, Any]]]
on_both_backends = hosted("keras-tensorflow", "keras-torch")


@on_both_backends
def test_next_rank_0_goes_on_writing(job: TrainingJob, finish: Finish) -> None:
    # The first epoch is the best: its weights come back at the end, which is no update.
    options = {"length": 53, "epochs": 4, "val_length": 20, "csv": True, "checkpoints": True, "best": "max"}
    fault = {"where": "validation", "epoch": 1, "rank": 0, "generation": 1}
    job.start_world(3, job.train, options, fault)
    first, *others = job.founders(3)
    assert first.wait() == -signal.SIGKILL
    results = finish(others)
    assert struck(job, "validation")["rank"] == 0
    with (job.directory / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1", "2", "3"]
    assert [float(row["loss"]) for row in rows] == pytest.approx(results[0]["history"]["loss"])
    assert (job.directory / "checkpoints" / "last.weights.h5").exists()


@on_both_backends
def test_newcomer_remembers_what_the_others_callbacks_do(job: TrainingJob, finish: Finish) -> None:
    options = {"length": 103, "step_sleep_s": 0.02, "val_length": 20, "best": "max", **job.patient}
    workers = job.start_world(2, job.train, options)
    job.wait_for("epoch_end", epoch=1)
    joiner = job.start(job.train, options)
    job.view(3)
    job.wait_for("admitted")
    results = finish([*workers, joiner])
    assert results[-1]["history"] == results[0]["history"]
    assert results[-1]["remembered"] == results[0]["remembered"] == results[0]["history"]["loss"]
    assert len(results[-1]["history"]["loss"]) == results[0]["epoch"] >= 2


@pytest.mark.parametrize(
    "host", [pytest.param("keras-torch", marks=needs_horovod("torch"))], indirect=True, scope="module"
)
def test_horovod_under_torch_survives_a_kill_within_a_step_and_a_join(job: TrainingJob, finish: Finish) -> None:
    options = {"backend": "horovod", **job.patient}
    victim, others = start_with_fault(job, options, {"where": "backward", "step": 3})
    job.view(2, after=1)
    assert victim.wait() == -signal.SIGKILL
    struck(job, "backward")
    assert all(str(built_for("torch")) in Path(f"/proc/{worker.pid}/maps").read_text() for worker in others)
    joiner = job.start(job.train, options)
    job.view(3, after=2)
    job.wait_for("admitted")
    finish([*others, joiner])
    assert view_sizes(job)[:3] == [3, 2, 3]


@pytest.mark.thorough
@hosted("keras-tensorflow")
@pytest.mark.parametrize("shared", [{}, {"global_batch": 24}], ids=["each", "shared"])
def test_steps_that_xla_compiles_survive_a_kill_and_a_join(
    job: TrainingJob, finish: Finish, shared: dict[str, Any]
) -> None:
    options = {"xla": True, "step_sleep_s": 0.02, **shared, **job.patient}
    victim, others = start_with_fault(job, options, {"where": "reduction", "step": 3})
    job.view(2, after=1)
    assert victim.wait() == -signal.SIGKILL
    struck(job, "reduction")
    joiner = job.start(job.train, options)
    job.view(3, after=2)
    job.wait_for("admitted")
    finish([*others, joiner])
    assert view_sizes(job)[:3] == [3, 2, 3]
    assert "not compiled by XLA" not in joiner.output.read_text()


@on_both_backends
def test_newcomer_with_another_model_ends_alone(job: TrainingJob, finish: Finish) -> None:
    workers = job.start_world(2, job.train, {"step_sleep_s": 0.02, **job.patient})
    job.wait_for_step(2)
    joiner = job.start(job.train, {"wide": True, **job.patient})
    assert joiner.wait() == 1
    assert "cannot go on from the state of the others" in joiner.output.read_text()
    finish(workers)
    assert not job.events("admitted")


@hosted("keras-jax")
@pytest.mark.thorough
def test_training_on_jax_goes_on_from_a_checkpoint_of_the_middle_of_an_epoch(
    make_job: Callable[..., TrainingJob], tmp_path: Path
) -> None:
    job = make_job()
    options = {"length": 103, "step_sleep_s": 0.1, "checkpoint": str(tmp_path / "store"), **job.patient}
    workers = job.start_world(2, job.train, options)
    job.wait_until(lambda events: saved(job, 4), "a checkpoint")
    kill_all(workers)
    again = make_job()
    workers = again.start_world(3, again.train, options)
    again.wait_for("step", worker=workers[0].id)
    (again.directory / ENOUGH).touch()
    check_run(again, workers)
    (resumed,) = {event["resumed"] for event in again.events("run", run=2)}
    first = min(event["step"] for worker in workers for event in worker.events("step"))
    assert first == int(resumed.rpartition("-")[2]) + 1 >= 5


@hosted("keras-tensorflow")
def test_stream_that_is_shuffled_anew_is_walked_alike_by_a_newcomer(job: TrainingJob, finish: Finish) -> None:
    options = {"length": 203, "step_sleep_s": 0.02, "data": "stream", **job.patient}
    workers = job.start_world(3, job.train, options)
    job.wait_for("epoch_end", epoch=0)
    workers[0].kill()
    joiner = job.start(job.train, options)
    job.view(3, after=2)
    (admitted,) = job.wait_for("admitted")
    job.wait_for("epoch_end", epoch=admitted["epoch"] + 1)  # the workers compare what they read in each epoch
    finish([*workers[1:], joiner])
    assert admitted["epoch"] >= 1
    assert view_sizes(job)[:3] == [3, 2, 3]


@hosted("keras-tensorflow")
@pytest.mark.thorough
def test_newcomer_walks_a_stream_while_the_others_train_and_keeps_what_was_returned(
    make_job: Callable[..., TrainingJob],
) -> None:
    job = make_job(heartbeat_timeout_s=4.0)
    options = {"length": 8 * 1200, "epochs": 1, "data": "stream", "read_s": 0.003, "step_sleep_s": 0.02}
    fault = {"where": "forward", "step": 40, "rank": 1, "generation": 1}
    job.start_world(3, job.train, options, fault)
    first, victim, third = job.founders(3)
    assert victim.wait() == -signal.SIGKILL
    job.wait_for_step(240)
    so_far = max(stop for step in job.events("step") for _, stop in step["committed"])
    joiner = job.start(job.train, options)
    job.view(3, after=2)
    check_run(job, [first, third, joiner])
    (walked,) = job.events("walked")
    returned = [start for step in job.events("step") for start, _ in step["returned"]]
    mine = [step for step in job.events("step") if step["worker"] == walked["worker"]]
    admitted_at = mine[0]["committed"][0][0]
    assert walked["epoch"] == mine[0]["epoch"] == 0
    assert returned
    assert max(returned) < walked["cursor"]  # it has passed what comes back at the end
    assert walked["cursor"] >= so_far
    assert 4 * (admitted_at - walked["cursor"]) < walked["cursor"]  # what the others waited for
    (end, *_) = job.events("epoch_end")
    assert end["exact"]


@hosted("keras-tensorflow")
@pytest.mark.thorough
def test_newcomer_that_walked_ahead_begins_anew_when_all_the_others_are_lost(
    make_job: Callable[..., TrainingJob],
) -> None:
    job = make_job(heartbeat_timeout_s=4.0)
    options = {"length": 8 * 150, "epochs": 2, "data": "stream", "step_sleep_s": 0.02}
    (founder,) = job.start_world(1, job.train, {**options, "epochs": 1000}, {"where": "boundary"})
    job.wait_for_step(100)
    joiner = job.start(job.train, options)
    assert founder.wait() == -signal.SIGKILL
    check_run(job, [joiner])
    assert struck(job, "boundary")
    (walked,) = job.events("walked")
    assert (walked["epoch"], walked["cursor"]) > (0, 1)
    assert len(job.events("rollback")) == 1
