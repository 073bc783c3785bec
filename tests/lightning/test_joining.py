"""What the hooks of a newcomer see, and what comes of a newcomer that cannot take part."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import WeightedRandomSampler

from ef_common.core import sharding
from ef_common.core.membership import Settings
from ef_common.core.sharding import EpochProgress
from ef_common.testing.harness import Job, WorkerProcess
from tests import warm
from tests.lightning import newcomers, training
from tests.lightning.newcomers import JOINS, LENGTH

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def joined(job: Job, name: str, changes: dict[str, Any] | None = None) -> tuple[list[WorkerProcess], WorkerProcess]:
    """Two workers that train a program, and a newcomer that comes in epoch `JOINS`."""
    workers = job.start_world(2, newcomers.train_until_one_has_come, name)
    job.wait_for("epoch", epoch=JOINS)
    return workers, job.start(newcomers.train, name, changes)


def results(job: Job, name: str) -> list[dict[str, Any]]:
    workers, newcomer = joined(job, name)
    found = [worker.result() for worker in (*workers, newcomer)]
    assert len(job.events("admitted")) == 1
    assert [result["weights"] for result in found[1:]] == [found[0]["weights"]] * 2
    assert len({result["step"] for result in found}) == 1
    job.audit()
    return found


def test_newcomers_sampler_repeats_no_draws(job: Job) -> None:
    """Should the newcomer be of rank 0 one day, then all train in the order that it has drawn."""
    first, second, newcomer = (result["notes"] for result in results(job, "drawing"))
    plain = WeightedRandomSampler([1.0] * LENGTH, LENGTH, generator=torch.Generator().manual_seed(3))
    assert first == second == [list(plain) for _ in range(4)]
    assert newcomer[0] == first[0], "it draws before it knows of the others"
    assert newcomer[-1] not in first


def test_newcomers_hooks_see_epoch_step_optimizer_and_callbacks_of_the_others(job: Job) -> None:
    first, _, newcomer = results(job, "looking")
    notes = dict(newcomer["notes"])
    whole = dict(first["notes"])["start"][-1]
    epoch, step, rate, has_momentum, rank, batches = notes["start"]
    admitted = job.events("admitted")[0]
    assert (epoch, step) == (admitted["epoch"], admitted["step"])
    assert epoch >= JOINS
    assert rate == pytest.approx(0.05 * 0.5**epoch)
    assert has_momentum
    assert rank == 2
    done = step - epoch * whole
    progress = EpochProgress(epoch, newcomers.LENGTH, cursor=done * 2 * training.BATCH_SIZE, steps=done)
    assert batches == sharding.num_steps(progress, 3, batch_size=training.BATCH_SIZE)
    assert notes["epoch"] == notes["batch"] == notes["start"]
    assert notes["gathered"] == 1  # the others are in their step
    assert [name for name, _ in newcomer["notes"]] == ["start", "gathered", "counted", "epoch", "batch", "at the end"]
    assert notes["counted"] == epoch + 1  # the others have counted this epoch
    assert notes["at the end"] == dict(first["notes"])["at the end"] == 4


def test_gradients_that_are_accumulated_by_hand_reach_a_newcomer(job: Job) -> None:
    first, second, newcomer = [result["notes"] for result in results(job, "accumulated_by_hand")]
    assert first == second == pytest.approx(range(1, len(first) + 1))
    assert newcomer == pytest.approx(first[-len(newcomer) :])


def test_newcomer_accumulates_as_a_callback_has_set_it_in_the_others(job: Job) -> None:
    found = results(job, "accumulating")
    for result in found:
        assert all(accumulation == (2 if epoch else 1) for epoch, accumulation in result["notes"])
    assert found[2]["notes"]


@pytest.mark.parametrize("name", ["dated", "dated_in_this_process", "dated_by_a_loader"])
def test_data_set_that_is_told_the_epoch_is_told_the_others_in_a_newcomer(job: Job, name: str) -> None:
    found = results(job, name)
    assert all(current == told for result in found for current, told in result["notes"])
    assert {current for current, _ in found[2]["notes"]} <= {JOINS, JOINS + 1}
    assert found[2]["notes"]


def test_newcomers_hooks_set_what_is_its_own_and_undo_no_step_of_the_others(job: Job) -> None:
    found = results(job, "curriculum")  # of equal weights
    assert all(scale == 1.0 + epoch for result in found for epoch, scale in result["notes"])
    assert found[2]["notes"]


def test_layers_that_are_unfrozen_are_alike_in_newcomers_that_take_over(job: Job) -> None:
    (founder,) = job.start_world(1, partial(newcomers.train, stays=True), "finetuning")
    job.wait_for("epoch", epoch=JOINS)
    others = [job.start(newcomers.train, "finetuning") for _ in range(2)]
    view = job.view(3)
    statistics = job.events("step")[-1]["step"]
    founder.kill()
    first, second = (worker.result() for worker in view[1:])
    assert {worker.name for worker in view[1:]} == {worker.name for worker in others}
    assert first["weights"] == second["weights"]
    assert first["notes"][:3] == [True, False, 0]
    assert second["notes"][:3] == [True, False, 1]
    assert first["notes"][3] == second["notes"][3] == first["step"] - newcomers.LENGTH // 4  # frozen in epoch 0
    assert first["step"] > statistics
    job.audit()


def test_best_value_of_a_training_outlives_those_who_have_seen_it(job: Job) -> None:
    (founder,) = job.start_world(1, partial(newcomers.train, stays=True), "best")
    job.wait_for("epoch", epoch=JOINS)
    newcomer = job.start(newcomers.train, "best")
    job.wait_for("admitted")
    founder.kill()
    assert newcomer.result()["notes"] == [10.0]
    job.audit()


def test_newcomer_has_the_rates_of_a_schedule_that_depends_on_the_number_of_workers(job: Job) -> None:
    found = results(job, "counting_workers")  # of equal weights
    assert len({result["notes"][0] for result in found}) == 1


def test_newcomer_with_another_schedule_ends_alone(job: Job) -> None:
    check_it_ends_alone(job, "counting_workers_early", {}, "gives other learning rates in this worker")


def test_newcomers_hook_finds_its_hyper_parameters_in_the_state_of_the_others(job: Job) -> None:
    *_, newcomer = results(job, "configured")
    assert newcomer["notes"]
    assert all(note == [4, True] for note in newcomer["notes"])


def test_parameters_that_user_code_has_added_are_added_by_a_newcomer(job: Job) -> None:
    found = results(job, "added")
    assert found[0]["notes"] == found[2]["notes"]
    assert [number for number, _ in found[2]["notes"]] == [4, 2]


def test_parameters_that_were_frozen_again_keep_no_newcomer_out(job: Job) -> None:
    results(job, "frozen_again")


@pytest.mark.parametrize("name", ["looking", "curriculum"])
@pytest.mark.parametrize("is_saved", [False, True], ids=["from the start", "from a checkpoint"])
def test_newcomers_that_begin_anew_begin_together(tmp_path: Path, name: str, is_saved: bool) -> None:
    store, gate = str(tmp_path / "store") if is_saved else None, tmp_path / "gate"
    settings = Settings(start_nodes=2, last_call_s=60.0)
    with Job(tmp_path / "run", preload=warm.TORCH, settings=settings) as job:
        founders = [job.start(partial(newcomers.train, stays=True), name, None, store) for _ in range(2)]
        job.wait_for("epoch", epoch=1)
        others = [job.start(newcomers.train, name, None, store, str(gate)) for _ in range(2)]
        job.wait_for("epoch", epoch=2)
        if is_saved:  # in the background
            saved_in_epoch_1 = newcomers.LENGTH // (2 * training.BATCH_SIZE) + 1
            job.wait_until(
                lambda events: [e for e in events if e["kind"] == "checkpoint" and e["step"] >= saved_in_epoch_1]
            )
        for worker in founders:
            worker.kill()
        gate.touch()
        first, second = (worker.result() for worker in others)
        (rollback,) = job.events("rollback")
        assert (rollback["epoch"] >= 1) == is_saved
        assert first["weights"] == second["weights"]
        assert first["step"] == second["step"]
        if name == "looking":
            check_they_begin_at(rollback, first, second, gathered=1 if is_saved else 2)
        job.audit()


def test_newcomer_needs_no_file_that_the_others_have_begun_from(job: Job, tmp_path: Path) -> None:
    file = tmp_path / "pretrained.ckpt"
    pl = importlib.import_module(newcomers.HOST)
    trainer = training.trainer(pl, "auto", max_epochs=1)
    trainer.fit(training.regression(pl)(), training.loader(newcomers.LENGTH))
    trainer.save_checkpoint(file)
    workers = job.start_world(2, partial(newcomers.train, expects=True, begins_from=str(file)), "looking")
    job.wait_for("epoch", epoch=JOINS)
    file.unlink()
    newcomer = job.start(partial(newcomers.train, begins_from=str(file)), "looking")
    first, *others = [worker.result() for worker in (*workers, newcomer)]
    assert len(job.events("admitted")) == 1
    assert all(result["weights"] == first["weights"] for result in others)
    job.audit()


def check_they_begin_at(rollback: Any, *results: dict[str, Any], gathered: int) -> None:
    for result in results:
        notes = dict(result["notes"])
        assert notes["start"][:2] == notes["epoch"][:2] == notes["batch"][:2] == [rollback["epoch"], rollback["step"]]
        assert notes["gathered"] == gathered
        assert notes["at the end"] == 4


WRONG = {
    "model": ({"wrong": "model"}, "Missing key(s) in state_dict"),
    "callback": ({"wrong": "callback"}, "this is not mine"),
}


@pytest.mark.parametrize("what", WRONG)
def test_newcomer_that_cannot_take_in_the_state_ends_alone(job: Job, what: str) -> None:
    changes, reason = WRONG[what]
    check_it_ends_alone(job, "picky", changes, "cannot go on from the state of the others", reason)
    assert not job.events("admitted")


def test_newcomer_with_other_software_ends_alone_without_a_traceback(job: Job) -> None:
    workers = job.start_world(2, newcomers.train_until_one_has_come, "picky")
    job.wait_for("epoch", epoch=JOINS)
    newcomer = job.start(newcomers.train_with_other_software, "picky")
    check_ended_alone(job, workers, newcomer, "elasticflow 0.0.1 (the others: ")
    assert "Traceback" not in newcomer.output.read_text()


def test_hook_of_checkpoints_that_asks_for_the_folder_of_the_logs_lets_newcomers_join(job: Job) -> None:
    found = results(job, "saving")
    (admitted,) = job.events("admitted")
    assert admitted["step"] in {step for result in found for step in result["notes"]}
    assert (job.directory / f"{admitted['step']}.txt").exists()


def test_hook_of_checkpoints_that_exchanges_values_ends_newcomers_alone(job: Job) -> None:
    reason = "on_save_checkpoint, or a state_dict() exchanges values with the other workers"
    check_it_ends_alone(job, "exchanging", {}, "the others cannot send their state", reason)


def test_newcomer_without_parameters_that_were_added_ends_alone(job: Job) -> None:
    workers = job.start_world(2, partial(newcomers.train, expects=True), "added", {"where": "elsewhere"})
    job.wait_for("epoch", epoch=JOINS)
    newcomer = job.start(newcomers.train, "added")
    check_ended_alone(job, workers, newcomer, "cannot find in its model by name", "(none of the model's) in Adam")


def test_newcomer_whose_hooks_raise_ends_alone(job: Job) -> None:
    check_it_ends_alone(job, "picky", {"wrong": "hook"}, "this machine lacks a file", "fails before its first step")


def check_it_ends_alone(job: Job, name: str, changes: dict[str, Any], *texts: str) -> None:
    workers, newcomer = joined(job, name, changes)
    check_ended_alone(job, workers, newcomer, *texts)


def check_ended_alone(job: Job, workers: list[WorkerProcess], newcomer: WorkerProcess, *texts: str) -> None:
    assert newcomer.wait() == 1
    output = newcomer.output.read_text()
    assert [text for text in texts if text not in output] == []
    first, second = (worker.result() for worker in workers)
    assert first["weights"] == second["weights"]
    job.audit()
