"""Schedules that count steps follow the samples, whatever the workers do."""

from __future__ import annotations

import importlib
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ef_common.errors import UsageError
from ef_common.testing.harness import Job
from ef_lightning import strategy_for
from tests import warm
from tests.lightning import scheduled
from tests.lightning.compensated import noting
from tests.lightning.conftest import HOSTS
from tests.lightning.scheduled import GLOBAL_BATCH, LENGTH, NUM_STEPS, by_hand, fit, fit_plain, module_of, one_cycle
from tests.lightning.training import BATCH_SIZE

pl = importlib.import_module(HOSTS[0])

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

ENDS = [min(LENGTH, start + BATCH_SIZE) for start in range(0, LENGTH, BATCH_SIZE)]
"""Positions after each update of an epoch in a world of one."""

SCHEDULERS: dict[str, scheduled.MakeScheduler] = {
    "LambdaLR": lambda o, n: lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / (n // 3))),
    "MultiplicativeLR": lambda o, n: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o, n: lr_scheduler.StepLR(o, 3, gamma=0.5),
    "MultiStepLR": lambda o, n: lr_scheduler.MultiStepLR(o, [2, 7]),
    "ConstantLR": lambda o, n: lr_scheduler.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o, n: lr_scheduler.LinearLR(o, total_iters=n),
    "ExponentialLR": lambda o, n: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o, n: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=4), lr_scheduler.CosineAnnealingLR(o, n - 4)], [4]
    ),
    "CosineAnnealingLR": lambda o, n: lr_scheduler.CosineAnnealingLR(o, n),
    "ChainedScheduler": lambda o, n: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o, n: lr_scheduler.ReduceLROnPlateau(o, mode="max", patience=1),
    "CyclicLR": lambda o, n: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o, n: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o, n: lr_scheduler.OneCycleLR(o, 0.1, total_steps=n, cycle_momentum=False),
    "PolynomialLR": lambda o, n: lr_scheduler.PolynomialLR(o, n),
}


def expected(plain: list[float], *, accumulate: int = 1, num_epochs: int = 2) -> list[float]:
    """Rate of each update in a world of one: that of the plain update which takes its last sample."""
    per_epoch = -(-NUM_STEPS // accumulate)
    ends = [end for number, end in enumerate(ENDS, 1) if number % accumulate == 0 or number == len(ENDS)]
    steps = [-(-end // GLOBAL_BATCH) for end in ends]
    return [plain[epoch * per_epoch + -(-step // accumulate) - 1] for epoch in range(num_epochs) for step in steps]


def test_all_schedulers_of_torch_are_tried() -> None:
    named = {name for name in lr_scheduler.__all__ if inspect.isclass(getattr(lr_scheduler, name))}
    assert set(SCHEDULERS) == named - {"LRScheduler"}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_smaller_world_has_the_rates_of_the_reference_world_at_the_same_samples(name: str) -> None:
    config = {"monitor": "falling"} if name == "ReduceLROnPlateau" else {}
    plain, module = (module_of(pl, SCHEDULERS[name], **config) for _ in range(2))
    fit_plain(pl, plain)
    fit(pl, module)
    assert module.num_updates == plain.num_updates == 2 * NUM_STEPS
    assert module.rates == expected(plain.rates)
    assert module.rates[-1] == plain.rates[-1]


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("frequency", [1, 2, 4])
def test_frequency_and_accumulation_are_those_of_the_reference_world(frequency: int, accumulate: int) -> None:
    plain, module = (module_of(pl, SCHEDULERS["ExponentialLR"], frequency=frequency) for _ in range(2))
    fit_plain(pl, plain, accumulate_grad_batches=accumulate)
    trainer = fit(pl, module, accumulate_grad_batches=accumulate)
    assert module.rates == pytest.approx(expected(plain.rates, accumulate=accumulate))
    made = [config.scheduler.last_epoch for config in trainer.strategy.lr_scheduler_configs]
    assert made == [2 * sum(step % frequency == 0 for step in steps_of_updates(accumulate))]


def steps_of_updates(accumulate: int) -> list[int]:
    return [step for step in range(1, NUM_STEPS + 1) if step % accumulate == 0 or step == NUM_STEPS]


def test_schedule_per_epoch_is_left_alone() -> None:
    module = module_of(pl, SCHEDULERS["ExponentialLR"], interval="epoch")
    fit(pl, module)
    assert module.rates == pytest.approx([0.05] * len(ENDS) + [0.045] * len(ENDS))


def test_schedule_that_follows_updates_makes_a_step_after_each() -> None:
    module = module_of(pl, SCHEDULERS["ExponentialLR"])
    fit(pl, module, schedules="updates")
    assert module.rates == pytest.approx([0.05 * 0.9**step for step in range(2 * len(ENDS))])


def test_unknown_way_of_following_is_refused() -> None:
    with pytest.raises(UsageError, match=r"\('samples', 'updates'\). Received: schedules='steps'"):
        strategy_for(HOSTS[0])(schedules="steps")


def test_epoch_that_is_limited_to_a_number_of_batches_has_them_in_each_world() -> None:
    plain, module = (module_of(pl, SCHEDULERS["OneCycleLR"]) for _ in range(2))
    fit_plain(pl, plain, limit_train_batches=3)
    fit(pl, module, limit_train_batches=3)
    assert module.rates == plain.rates


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("max_steps", [1, 7, 2 * NUM_STEPS])
def test_max_steps_are_those_of_the_reference_world(max_steps: int, host: str) -> None:
    tree = importlib.import_module(host)
    plain, module = (module_of(tree, SCHEDULERS["OneCycleLR"]) for _ in range(2))
    fit_plain(tree, plain, max_steps=max_steps, max_epochs=-1)
    trainer = fit(tree, module, max_steps=max_steps, max_epochs=-1)
    epochs, rest = divmod(max_steps, NUM_STEPS)
    num_updates = epochs * len(ENDS) + rest * GLOBAL_BATCH // BATCH_SIZE
    assert trainer.global_step == num_updates == module.max_steps
    assert module.num_updates == trainer.max_steps == max_steps
    assert module.rates[-1] == plain.rates[-1]
    assert sorted(set(module.rates)) == sorted(set(plain.rates))


@pytest.mark.parametrize("every", [1, 2])
def test_schedule_that_is_stepped_by_hand_follows_the_samples(every: int) -> None:
    plain, module = (by_hand(pl, one_cycle, every) for _ in range(2))
    fit_plain(pl, plain)
    fit(pl, module)
    assert module.rates[-1] == pytest.approx(plain.rates[-1], abs=0.01)
    assert set(module.rates) <= set(plain.rates)
    if every == 1:
        assert module.rates == expected(plain.rates)


def test_training_goes_on_from_a_checkpoint_in_another_world(tmp_path: Path) -> None:
    def save(trainer: Any) -> None:
        trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    whole = module_of(pl, SCHEDULERS["OneCycleLR"])
    fit(pl, whole, callbacks=[noting(pl, "on_train_batch_end", save)])
    for step in (4, len(ENDS), len(ENDS) + 2):
        rest = module_of(pl, SCHEDULERS["OneCycleLR"])
        fit(pl, rest, ckpt_path=tmp_path / f"{step}.ckpt")
        assert rest.num_updates == whole.num_updates
        assert rest.rates == whole.rates[step:]


@pytest.mark.processes
def test_rates_follow_the_samples_while_workers_come_and_go(tmp_path: Path) -> None:
    length, epochs = 30 * BATCH_SIZE, 4
    options = {"length": length, "sleep_s": 0.05, "max_epochs": epochs}
    with Job(tmp_path, preload=warm.TORCH) as job:
        first, lost = job.start_world(2, scheduled.run, options)
        job.wait_for_step(4)
        lost.kill()
        job.view(1, after=1)
        steps = max(event["step"] for event in job.events("step"))
        job.wait_for_step(steps + 3)
        others = [job.start(scheduled.run, options) for _ in range(2)]
        job.view(3)
        results = [worker.result() for worker in (first, *others)]
        job.audit()
        updates = {event["step"]: event for event in first.events("step")}
    num_steps = length // (2 * BATCH_SIZE)
    cycle = rates_of_one_cycle(epochs * num_steps)
    rates = results[0]["rates"]
    done = [0] * epochs
    sizes = set()
    for rate, update in zip(rates, (updates[number] for number in sorted(updates)), strict=True):
        epoch, committed, returned = update["epoch"], size(update["committed"]), size(update["returned"])
        end = done[epoch] + committed + returned  # a worker that is lost in an update was counted on before it
        assert rate == pytest.approx(cycle[epoch * num_steps + math.ceil(end / (2 * BATCH_SIZE)) - 1])
        done[epoch] += committed
        sizes.add(committed)
    assert done == [length] * epochs
    assert sizes >= {BATCH_SIZE, 2 * BATCH_SIZE, 3 * BATCH_SIZE}
    assert rates[-1] == pytest.approx(cycle[-1])
    for result in results:
        assert result["num_updates"] == epochs * num_steps
        assert result["rates"] == rates[-len(result["rates"]) :]


def size(ranges: list[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)


def rates_of_one_cycle(num_updates: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.05)
    scheduler = one_cycle(optimizer, num_updates)
    rates = []
    for _ in range(num_updates):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates
