"""Schedules and limits in manual optimization: a batch may have several backward passes, or a step several batches."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lightning import scheduled, training
from tests.lightning.compensated import noting
from tests.lightning.conftest import HOSTS
from tests.lightning.scheduled import accumulating, adversarial, fit, fit_plain, sharpness_aware, steps_of_schedulers
from tests.lightning.training import BATCH_SIZE
from tests.waiting import two_steps

pl = importlib.import_module(HOSTS[0])

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

PROGRAMS: dict[str, Callable[..., Any]] = {
    "two_optimizers": adversarial,
    "two_passes_and_a_step": sharpness_aware,
    "a_step_of_four_batches": accumulating,
}
STEPS_OF_BATCH = {"two_optimizers": 2.0, "two_passes_and_a_step": 1.0, "a_step_of_four_batches": 0.25}
LENGTH = 10 * BATCH_SIZE


def loader(batch_size: int = BATCH_SIZE) -> Any:
    return training.loader(LENGTH, batch_size)


def found(module: Any, trainer: Any) -> list[Any]:
    rates = [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers]
    return [module.rates, module.max_steps, rates, trainer.global_step, steps_of_schedulers(trainer)]


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 4},
        {"max_epochs": -1, "max_steps": 7},
        {"max_epochs": -1, "max_steps": 60},
        {"max_epochs": -1, "max_steps": 13, "limit_train_batches": 4},
    ],
)
def test_job_of_one_has_the_rates_and_the_limit_of_plain_lightning(program: str, options: dict[str, Any]) -> None:
    plain, module = (PROGRAMS[program](pl, num_batches=40) for _ in range(2))
    expected = found(plain, fit_plain(pl, plain, loader=loader(), **options))
    assert found(module, fit(pl, module, world_size=None, loader=loader(), **options)) == expected


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("max_batches", [16, 24, 36])
def test_job_goes_on_from_a_plain_checkpoint_to_the_limit_of_plain_lightning(
    program: str, max_batches: int, tmp_path: Path
) -> None:
    plain, rest, module = (PROGRAMS[program](pl, num_batches=40) for _ in range(3))
    first = fit_plain(pl, plain, loader=loader(), max_epochs=2)
    first.save_checkpoint(tmp_path / "plain.ckpt")
    for others in (rest, module):  # what the program counts by itself is in no checkpoint
        if hasattr(plain, "num_batches"):
            others.num_batches = plain.num_batches
    max_steps = int(max_batches * STEPS_OF_BATCH[program])  # once there are none left to be made
    options = {"loader": loader(), "max_epochs": -1, "max_steps": max_steps, "ckpt_path": tmp_path / "plain.ckpt"}
    expected = found(rest, fit_plain(pl, rest, **options))
    assert found(module, fit(pl, module, world_size=None, **options)) == expected


@pytest.mark.parametrize("program", ["two_optimizers", "two_passes_and_a_step"])
def test_smaller_world_has_the_rates_of_the_reference_world_at_the_same_samples(program: str) -> None:
    plain, module = (PROGRAMS[program](pl, num_batches=20) for _ in range(2))
    fit_plain(pl, plain, loader=loader(2 * BATCH_SIZE), max_epochs=4)
    trainer = fit(pl, module, world_size=2, loader=loader(), max_epochs=4)
    assert module.rates == [rate for rate in plain.rates for _ in range(2)]
    assert set(steps_of_schedulers(trainer)) == {20}


@pytest.mark.parametrize("program", PROGRAMS)
def test_larger_world_comes_to_the_end_of_the_schedule(program: str, world_of_one: Path) -> None:
    module = PROGRAMS[program](pl, num_batches=80)
    trainer = fit(pl, module, world_size=1, batch_size=BATCH_SIZE, loader=loader(2 * BATCH_SIZE), max_epochs=8)
    assert trainer.global_step == 40 * STEPS_OF_BATCH[program]
    assert set(steps_of_schedulers(trainer)) == {min(80, 80 * STEPS_OF_BATCH[program])}
    assert all(optimizer.param_groups[0]["lr"] == pytest.approx(0) for optimizer in trainer.optimizers)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("max_batches", [8, 12, 28])
def test_limit_is_one_of_samples_in_each_world(program: str, max_batches: int, world_of_one: Path) -> None:
    pace = STEPS_OF_BATCH[program]
    for world_size, batch_size in ((2, None), (1, BATCH_SIZE)):
        larger = batch_size is not None
        module = PROGRAMS[program](pl, num_batches=80)
        trainer = fit(
            pl,
            module,
            world_size=world_size,
            batch_size=batch_size,
            loader=loader(2 * BATCH_SIZE if larger else BATCH_SIZE),
            max_epochs=-1,
            max_steps=int(max_batches * pace),
        )
        num_batches = max_batches // 2 if larger else 2 * max_batches
        assert len(module.rates) == pytest.approx(num_batches, abs=3 if pace < 1 else 0)
        assert trainer.global_step == -(-num_batches * pace // 1)
        assert trainer.max_steps == max_batches * pace


def test_schedule_that_is_stepped_twice_in_a_batch_makes_twice_as_many_steps() -> None:
    class Twice(type(sharpness_aware(pl, num_batches=40))):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any) -> None:
            self.lr_schedulers().step()

    plain, module = Twice(), Twice()
    fit_plain(pl, plain, loader=loader(2 * BATCH_SIZE), max_epochs=4)
    trainer = fit(pl, module, world_size=2, loader=loader(), max_epochs=4)
    assert steps_of_schedulers(trainer) == [40]
    assert module.rates[::2] == plain.rates


def test_what_stands_for_a_scheduler_is_made_once() -> None:
    seen = noting(pl, "on_train_batch_end", lambda trainer: trainer.lightning_module.lr_schedulers())
    fit(pl, adversarial(pl, num_batches=40), world_size=2, loader=loader(), callbacks=[seen])
    assert {id(one) for both in seen.notes for one in both} == {id(one) for one in seen.notes[0]}
    assert len({type(one) for both in seen.notes for one in both}) == 2


@pytest.mark.processes
def test_two_optimizers_in_a_batch_follow_the_samples_while_workers_come_and_go(tmp_path: Path, job: Any) -> None:
    num_epochs, num_steps = 3, 20
    options = {
        "length": 2 * num_steps * BATCH_SIZE,
        "num_batches": num_epochs * num_steps,
        "sleep_s": 0.02,
        "max_epochs": -1,
        "max_steps": 2 * num_epochs * num_steps,
        "loses_at": 20,
        "gains_at": (60, 2),
    }
    first, lost = job.start_world(2, scheduled.run_adversarial, options)
    job.wait_for_step(8)
    lost.kill()
    (job.directory / scheduled.KILLED).touch()
    job.wait_until(two_steps(1), "steps of one")
    other = job.start(scheduled.run_adversarial, options)
    job.wait_for("view", 2, world_size=2, generation=3)
    results = [worker.result() for worker in (first, other)]
    job.audit()
    assert all(result["steps"] == [num_epochs * num_steps] * 2 for result in results)
    assert all(result["rates"] == pytest.approx([0, 0]) for result in results)
    assert results[0]["step"] > 2 * num_epochs * num_steps
    assert results[0]["step"] == results[1]["step"]
