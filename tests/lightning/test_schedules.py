"""Schedules that count steps follow the samples, whatever the workers do."""

from __future__ import annotations

import importlib
import inspect
import math
import signal
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ef_common.core.membership import Settings
from ef_common.errors import UsageError
from ef_common.testing.harness import Job
from ef_lightning import strategy_for
from tests import warm
from tests.lightning import scheduled, training
from tests.lightning.compensated import noting
from tests.lightning.conftest import HOSTS
from tests.lightning.scheduled import (
    GLOBAL_BATCH,
    LENGTH,
    NUM_STEPS,
    WORLD_SIZE,
    by_hand,
    fit,
    fit_plain,
    module_of,
    one_cycle,
)
from tests.lightning.training import BATCH_SIZE
from tests.waiting import two_steps

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


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name", sorted(SCHEDULERS.keys() - {"ReduceLROnPlateau"}))
def test_larger_world_has_the_rates_of_the_reference_world_at_the_same_samples(name: str) -> None:
    plain, module = (module_of(pl, SCHEDULERS[name]) for _ in range(2))
    rates = final_rates(fit_plain(pl, plain, loader=training.loader(LENGTH)))
    in_one = training.loader(LENGTH, GLOBAL_BATCH)
    trainer = fit(pl, module, world_size=1, batch_size=BATCH_SIZE, loader=in_one)
    ends = [min(LENGTH, start + GLOBAL_BATCH) for start in range(0, LENGTH, GLOBAL_BATCH)]
    ours = [plain.rates[epoch * len(ENDS) + -(-end // BATCH_SIZE) - 1] for epoch in range(2) for end in ends]
    assert module.num_updates == plain.num_updates == 2 * len(ENDS)
    assert module.rates == pytest.approx([plain.rates[0], *ours[1:]])  # a schedule begins after the first update
    assert final_rates(trainer) == pytest.approx(rates)


def final_rates(trainer: Any) -> list[float]:
    return [group["lr"] for group in trainer.optimizers[0].param_groups]


class Valued(type(module_of(pl, one_cycle))):  # type: ignore[misc]
    """Shows a value to its schedule after each update."""

    def __init__(self, value: Callable[[int], float], by_hand: bool = False, **options: Any) -> None:
        super().__init__()
        self.value, self.options, self.automatic_optimization = value, options, not by_hand

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        value = self.value(self.global_step)
        self.log("value", value)
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        scheduler.step(value)
        return None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 1.0)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, **self.options)
        if not self.automatic_optimization:
            return [optimizer], [scheduler]
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": "value"}]


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(
    ("value", "options", "rate"),
    [
        (lambda step: 0.9**step, {"patience": 2}, 1.0),  # better in each update
        (lambda step: 0.9 ** (step // 2), {"patience": 4}, 1.0),  # in each second one: four of eight are no better
        (lambda step: 0.9 ** (step // 2), {"patience": 3}, 1e-4),
        (lambda step: 1.0, {"patience": 33}, 1.0),  # the first is the best, of 40 updates the first 7 have it
        (lambda step: 1.0, {"patience": 32}, 0.1),
        (lambda step: 1.0, {"patience": 0}, 1e-9),  # each value once
        (lambda step: 1.0, {"patience": 3, "cooldown": 4}, 1e-4),
    ],
)
def test_plateau_is_told_in_a_larger_world_by_what_was_no_better(
    value: Callable[[int], float], options: dict[str, Any], rate: float, by_hand: bool
) -> None:
    module = Valued(value, by_hand, eps=0.0, **options)
    loader = training.loader(40 * BATCH_SIZE, 4 * BATCH_SIZE)
    trainer = fit(pl, module, world_size=1, batch_size=BATCH_SIZE, loader=loader, max_epochs=1)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(rate)


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


@pytest.mark.parametrize("limit", [NUM_STEPS, 7, len(ENDS) - 1])
def test_limit_that_is_none_in_the_reference_world_is_none_in_a_smaller_one(limit: int) -> None:
    plain, module = (module_of(pl, SCHEDULERS["OneCycleLR"]) for _ in range(2))
    fit_plain(pl, plain, limit_train_batches=limit)
    trainer = fit(pl, module, limit_train_batches=limit)
    assert trainer.global_step == 2 * len(ENDS)
    assert module.rates == expected(plain.rates)


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


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("ends_by", ["max_steps", "should_stop"])
@pytest.mark.parametrize("stepped", ["by_lightning", "by_hand"])
def test_training_that_ended_in_the_middle_of_an_epoch_goes_on_to_a_larger_limit(
    stepped: str, ends_by: str, tmp_path: Path
) -> None:
    """Each update stands for two of the reference world, and an epoch has four."""

    def train(max_steps: int, **options: Any) -> Any:
        make = SCHEDULERS["ExponentialLR"]
        module = module_of(pl, make) if stepped == "by_lightning" else by_hand(pl, one_cycle_of(40), 1)
        loader = training.loader(8 * BATCH_SIZE, 2 * BATCH_SIZE)
        return fit(pl, module, loader=loader, max_epochs=-1, max_steps=max_steps, **options)

    def stop(trainer: Any) -> None:  # as a Timer does when `max_time` is over
        trainer.should_stop = ends_by == "should_stop" and trainer.global_step == 11

    ending = noting(pl, "on_train_batch_end", stop)
    first = train(22 if ends_by == "max_steps" else 24, world_size=1, batch_size=BATCH_SIZE, callbacks=[ending])
    first.save_checkpoint(tmp_path / "first.ckpt")
    longer = train(26, ckpt_path=tmp_path / "first.ckpt")
    assert (first.global_step, longer.global_step) == (11, 13)


def one_cycle_of(num_updates: int) -> scheduled.MakeScheduler:
    return lambda optimizer, _: scheduled.one_cycle(optimizer, num_updates)


def test_epoch_that_user_code_cuts_short_does_not_count_as_a_whole_one() -> None:
    class Cutting(type(module_of(pl, one_cycle))):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 0 and batch_idx == 6 else None

    trainer = fit(pl, Cutting(), max_epochs=-1, max_steps=NUM_STEPS)
    passed = 6 * BATCH_SIZE // GLOBAL_BATCH
    assert trainer.global_step == 6 + (NUM_STEPS - passed) * WORLD_SIZE


RESTARTS: dict[str, tuple[int, int]] = {  # batch size, and batches whose gradients are accumulated
    "smaller_batches": (BATCH_SIZE, 1),
    "larger_batches": (2 * BATCH_SIZE, 1),
    "accumulated_batches": (BATCH_SIZE, 2),
    "larger_accumulated_batches": (2 * BATCH_SIZE, 2),
}


@pytest.mark.parametrize("where", ["alone", "in_a_job"])
@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize("limit", [{}, {"max_steps": 24, "max_epochs": -1}])
def test_start_from_a_checkpoint_keeps_the_schedule_of_another_batch(
    restart: str, where: str, limit: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    batch_size, accumulate = RESTARTS[restart]
    samples = 16 * BATCH_SIZE

    class Stop(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2 * 16:
                trainer.save_checkpoint(tmp_path / "first.ckpt")
                trainer.should_stop = True

    first, rest = (module_of(pl, scheduled.decaying) for _ in range(2))
    options = {"max_epochs": 4, **limit}
    fit(pl, first, world_size=2, loader=training.loader(samples), callbacks=[Stop()], **options)
    if where == "in_a_job":
        request.getfixturevalue("world_of_one")
    loader = training.loader(samples, batch_size)
    options |= {"ckpt_path": tmp_path / "first.ckpt", "accumulate_grad_batches": accumulate}
    trainer = fit(pl, rest, loader=loader, **options)
    total = 24 if limit else 32
    assert first.num_updates == rest.num_updates == total
    assert scheduled.steps_of_schedulers(trainer) == [total]
    per_epoch = samples // (batch_size * accumulate)
    assert trainer.global_step == 32 + per_epoch * (1 if limit else 2)


def test_process_alone_hands_the_reference_world_on(tmp_path: Path) -> None:
    def saved(trainer: Any, name: str) -> Any:
        trainer.save_checkpoint(tmp_path / name)
        return torch.load(tmp_path / name, weights_only=True)["elasticflow"]["schedules"]

    def module() -> Any:
        return module_of(pl, SCHEDULERS["ExponentialLR"])

    first = fit(pl, module(), world_size=1, max_epochs=1)
    there = {"world_size": 1, "batch_size": [BATCH_SIZE, 1], "accumulate": 1}
    assert saved(first, "first.ckpt").items() >= there.items()
    larger = training.loader(LENGTH, 2 * BATCH_SIZE)
    second = fit(pl, module(), loader=larger, ckpt_path=tmp_path / "first.ckpt", max_epochs=2)
    assert saved(second, "second.ckpt").items() >= there.items()


@pytest.mark.usefixtures("world_of_one")
def test_loader_that_grows_in_a_training_has_a_step_of_the_schedule_for_each_update() -> None:
    class Growing(type(module_of(pl, one_cycle))):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return training.loader(48, 4 + 2 * self.trainer.current_epoch)

    options = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 1}
    plain, module = (Growing() for _ in range(2))
    for one in (plain, module):
        one.configure_optimizers = MethodType(by_exponent, one)
    training.trainer(pl, "auto", **options).fit(plain)
    training.trainer(pl, strategy_for(HOSTS[0])(compensation="none"), **options).fit(module)
    assert module.rates == plain.rates


def by_exponent(module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    return [optimizer], [{"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


@pytest.mark.processes
def test_newcomer_that_comes_when_an_epoch_begins_ends_with_the_others(tmp_path: Path) -> None:
    """Each epoch has one update of two workers, so nobody can come at another time."""
    options = {"length": 2 * BATCH_SIZE, "sleep_s": 0.0, "max_epochs": -1, "max_steps": 150, "gains_at": (75, 3)}
    with Job(tmp_path, preload=warm.TORCH) as job:
        founders = job.start_world(2, scheduled.run, options)
        job.wait_for_step(3)
        workers = [*founders, job.start(scheduled.run, options)]
        results = [worker.result() for worker in workers]
        job.audit()
    assert len({result["step"] for result in results}) == 1
    assert {result["rates"][-1] for result in results} == {rates_of_one_cycle(150)[-1]}


@pytest.mark.processes
def test_start_with_one_worker_of_a_larger_batch_keeps_the_schedule_of_two(tmp_path: Path) -> None:
    path = tmp_path / "first.ckpt"
    options = {"length": 16 * BATCH_SIZE, "sleep_s": 0.0, "max_epochs": 4}
    results = []
    for number, more in ((2, {"save": (16, path)}), (1, {"ckpt_path": path, "batch_size": 2 * BATCH_SIZE})):
        with Job(tmp_path / f"of {number}", preload=warm.TORCH) as job:
            workers = job.start_world(number, scheduled.run, {**options, **more})
            results += [worker.result() for worker in workers]
            job.audit()
    cycle = rates_of_one_cycle(32)
    assert results[0]["rates"] == results[1]["rates"] == pytest.approx(cycle[:16])
    assert results[2]["rates"] == pytest.approx(cycle[16:])
    assert {result["num_updates"] for result in results} == {32}


@pytest.mark.processes
def test_rates_follow_the_samples_while_workers_come_and_go(tmp_path: Path) -> None:
    length, epochs = 30 * BATCH_SIZE, 4
    options = {"length": length, "sleep_s": 0.02, "max_epochs": epochs, "loses_at": 10, "gains_at": (40, 3)}
    with Job(tmp_path, preload=warm.TORCH) as job:
        first, lost = job.start_world(2, scheduled.run, options)
        job.wait_for_step(4)
        lost.kill()
        (job.directory / scheduled.KILLED).touch()
        job.wait_until(two_steps(1), "steps of one")
        others = [job.start(scheduled.run, options) for _ in range(2)]
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


@pytest.mark.processes
def test_workers_that_begin_again_are_those_that_settings_are_meant_for(tmp_path: Path) -> None:
    """All are lost, and nothing was saved."""
    options = {"length": 24 * BATCH_SIZE, "sleep_s": 0.05, "max_epochs": 2, "compensation": "auto"}
    with Job(tmp_path, preload=warm.TORCH, settings=Settings(min_nodes=2, last_call_s=0.0)) as job:
        pair = {"LOCAL_WORLD_SIZE": "2"}
        staying = {**options, "stays_at": 6}
        lost = [job.start(scheduled.run, staying, node="first", environ=pair) for _ in range(2)]
        lost.append(job.start(scheduled.run, staying, node="second"))
        job.wait_for_step(3)
        for worker in lost:
            worker.kill(signal.SIGSTOP)
        for worker in lost:
            worker.kill()
        newcomers = [job.start(scheduled.run, options, node=node) for node in ("third", "fourth")]
        results = [worker.result() for worker in newcomers]
        job.audit()
        (begun,) = job.events("rollback")
        first = [event for event in job.events("view") if event["generation"] == begun["generation"]]
        batches = {event["reference_batch_size"] for event in job.events("compensation", worker=first[0]["worker"])}
    assert {event["world_size"] for event in first} == {2}
    assert batches == {2 * BATCH_SIZE}
    for result in results:
        assert result["num_updates"] == 24
        assert result["rates"] == pytest.approx(rates_of_one_cycle(24))  # neither compensated nor stretched


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
