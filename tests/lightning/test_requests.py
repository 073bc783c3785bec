"""What the code of one worker asks of all: all do it at the same step."""

from __future__ import annotations

import importlib
import re
from types import SimpleNamespace
from typing import Any

import pytest

from ef_common.testing.harness import Job
from ef_lightning.host import HOSTS as HOSTS_BY_NAME
from ef_lightning.requests import Requests
from tests.lightning import requested, training
from tests.lightning.conftest import HOSTS

CASES = {
    "a batch": ("stop", "on_train_batch_end", 1, 7),
    "before a batch": ("stop", "on_train_batch_start", 1, 6),
    "the last batch of an epoch": ("stop", "on_train_batch_end", 3, 8),
    "the start of an epoch": ("stop", "on_train_epoch_start", None, 4),
    "the end of an epoch": ("stop", "on_train_epoch_end", None, 8),
    "a validation": ("stop", "on_validation_batch_end", None, 6),
    "the end of a validation": ("stop", "on_validation_end", None, 6),
    "fewer epochs": ("fewer_epochs", "on_train_batch_end", 1, 8),
    "more epochs": ("more_epochs", "on_train_epoch_end", None, 16),
    "fewer steps": ("fewer_steps", "on_train_batch_start", 0, 6),
    "accumulation": ("accumulate", "on_train_epoch_start", None, 4 + 2 + 2),
}
"""What is asked in epoch 1, where, after which batch, and the updates that all workers make then."""


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [(1,), (0, 1)], ids=["one", "all"])
@pytest.mark.parametrize("case", CASES)
def test_all_workers_do_at_the_same_step_what_one_asks_for(job: Job, case: str, ranks: tuple[int, ...]) -> None:
    name, hook, batch, step = CASES[case]
    options = {"val_check_interval": 2} if "validation" in hook else {"limit_val_batches": 0}
    workers = job.start_world(2, requested.run, HOSTS[0], name, hook, batch, ranks, options)
    results = [worker.result() for worker in workers]
    assert [result["step"] for result in results] == [step, step]
    assert results[0] == results[1]
    job.audit()


BEFORE = {
    "setup": ("stop", 0),
    "on_fit_start": ("stop", 0),
    "on_sanity_check_start": ("stop", 0),
    "on_sanity_check_end": ("fewer_batches", 6),
    "on_train_start": ("stop", 0),
}
"""What is asked before the first epoch, and the updates that all workers make then."""


@pytest.mark.processes
@pytest.mark.parametrize("hook", BEFORE)
def test_all_workers_do_what_one_asks_for_before_the_first_epoch(job: Job, hook: str) -> None:
    name, step = BEFORE[hook]
    workers = job.start_world(2, requested.run, HOSTS[0], name, hook, None, (1,), {"num_sanity_val_steps": 1}, 0)
    results = [worker.result() for worker in workers]
    assert [result["step"] for result in results] == [step, step]
    assert results[0] == results[1]
    if step:
        job.audit()


@pytest.mark.processes
def test_sanity_check_is_left_out_by_all_if_one_asks_for_it(job: Job) -> None:
    options = {"num_sanity_val_steps": 1, "max_epochs": 1}
    workers = job.start_world(2, requested.run, HOSTS[0], "no_validation", "setup", None, (1,), options, 0)
    assert [worker.result()["validations"] for worker in workers] == [[], []]


VALIDATIONS = {
    "validate_after_two": ({}, [4, 6, 8, 10, 12]),
    "validate_after_three": ({"val_check_interval": 2}, [2, 4, 7, 11]),
    "validate_twice": ({}, [4, 8, 12]),  # as with Lightning, until it loads the data anew
    "validate_every_other_epoch": ({}, [4, 8]),
    "no_validation": ({}, [4]),
}
"""What is asked when epoch 1 begins, with these options, and after which updates all workers validate."""


@pytest.mark.processes
@pytest.mark.parametrize("name", VALIDATIONS)
def test_all_workers_validate_when_one_asks_for_it(job: Job, name: str) -> None:
    options, expected = VALIDATIONS[name]
    workers = job.start_world(2, requested.run, HOSTS[0], name, "on_train_epoch_start", None, (1,), options)
    assert [worker.result()["validations"] for worker in workers] == [expected, expected]
    job.audit()


@pytest.mark.processes
@pytest.mark.parametrize("name", ["clip", "clip_values", "log_often"])
def test_all_workers_clip_and_log_as_one_asks_for(job: Job, name: str) -> None:
    options = {"limit_val_batches": 0}
    workers = job.start_world(2, requested.run, HOSTS[0], name, "on_train_batch_end", 1, (1,), options)
    results = [worker.result() for worker in workers]
    assert results[0] == results[1]


@pytest.mark.processes
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("ranks", [(1,), (0, 1)], ids=["one", "all"])
def test_all_workers_leave_out_the_rest_of_an_epoch_from_the_same_batch_on(
    job: Job, batch: int, ranks: tuple[int, ...]
) -> None:
    workers = job.start_world(2, requested.run, HOSTS[0], "skip", "", batch, ranks, {})
    results = [worker.result() for worker in workers]
    assert [result["step"] for result in results] == [8 + batch] * 2
    assert results[0] == results[1]
    committed = [event for event in job.events("step", worker=workers[0].id) if event["epoch"] == 1]
    assert sum(stop - start for event in committed for start, stop in event["committed"]) == 8 * batch
    job.audit()


@pytest.mark.processes
def test_worker_is_lost_while_the_others_hear_whether_a_batch_is_left_out(job: Job) -> None:
    workers = job.start_world(3, requested.run, HOSTS[0], "die", "on_train_batch_start", 1, (1,), {})
    statuses = [worker.wait() for worker in workers]
    assert sorted(statuses) == [-9, 0, 0]
    first, second = (worker.result() for worker, status in zip(workers, statuses, strict=True) if not status)
    assert first == second
    job.audit()


@pytest.mark.processes
def test_worker_that_is_alone_leaves_out_the_rest_of_an_epoch_as_without_elasticflow(job: Job) -> None:
    worker = job.start(requested.run, HOSTS[0], "skip", "", 3, (0,), {})
    expected = requested.run(HOSTS[0], "skip", "", 3, (0,), {"strategy": "auto"})
    assert worker.result() == expected


@pytest.mark.processes
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_validation_batch_end"])
def test_worker_that_raises_a_keyboard_interrupt_interrupts_all(job: Job, hook: str) -> None:
    batch = 1 if "train" in hook else None
    workers = job.start_world(2, requested.run, HOSTS[0], "interrupt", hook, batch, (1,), {})
    assert [worker.wait() for worker in workers] == [1, 1]  # Lightning's status for it
    ended = []
    for worker in workers:
        text = worker.output.read_text()
        assert "Traceback" not in text
        assert "JobFailed" not in text
        ended += re.findall(r"^ended after (\d+) updates$", text, re.MULTILINE)
    # Not by the event log: the newest update is logged with the next exchange, which one of them may not have ended.
    assert len(ended) == 2
    assert len(set(ended)) == 1


@pytest.mark.processes
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_worker_that_raises_a_keyboard_interrupt_interrupts_the_evaluation_of_all(job: Job, stage: str) -> None:
    workers = job.start_world(2, requested.evaluate, HOSTS[0], stage)
    assert [worker.wait() for worker in workers] == [1, 1]
    for worker in workers:
        text = worker.output.read_text()
        assert "Traceback" not in text
        assert "JobFailed" not in text


@pytest.mark.processes
def test_newcomer_has_the_limits_that_the_others_have_agreed_on(job: Job) -> None:
    options = {"limit_val_batches": 0, "max_epochs": 3, "expects": 2}
    more = ("more_epochs", "on_train_batch_end", 0, (0,), options)
    workers = job.start_world(2, requested.run, HOSTS[0], *more)
    job.wait_for_step(6)
    newcomer = job.start(requested.run, HOSTS[0], "stop", "on_fit_end", None, (), options)
    results = [worker.result() for worker in (*workers, newcomer)]
    assert [result["max_epochs"] for result in results] == [4, 4, 4]
    assert len({result["step"] for result in results}) == 1
    job.audit()


@pytest.mark.processes
def test_newcomer_that_asks_to_stop_before_it_is_admitted_stops_all(job: Job) -> None:
    options = {"limit_val_batches": 0, "max_epochs": 50, "expects": 2}
    workers = job.start_world(2, requested.run, HOSTS[0], "stop", "on_fit_start", None, (), options)
    job.wait_for_step(3)
    newcomer = job.start(requested.run, HOSTS[0], "stop", "on_fit_start", None, (1, 2), options, 0)
    results = [worker.result() for worker in (*workers, newcomer)]
    assert len({result["step"] for result in results}) == 1
    assert results[0]["step"] < 16
    assert {event["world_size"] for event in job.events("step")} == {2, 3}
    job.audit()


class Loops:
    """A Trainer of which only the limits are looked at."""

    def __init__(self) -> None:
        self.should_stop = False
        self.limit_train_batches = self.limit_val_batches = 1.0
        self.check_val_every_n_epoch = self.accumulate_grad_batches = 1
        self.reload_dataloaders_every_n_epochs = self.num_sanity_val_steps = 0
        self.val_check_interval, self.val_check_batch = 1.0, 4
        self.log_every_n_steps = 50
        self.gradient_clip_val = self.gradient_clip_algorithm = None
        loops = {"epoch_loop": SimpleNamespace(min_steps=None), "max_batches": 4}
        self.fit_loop = SimpleNamespace(max_epochs=3, min_epochs=None, **loops)


def requests_of(trainer: Any, others: list[dict[str, Any]], *, world_size: int = 2, host: str = HOSTS[0]) -> Requests:
    session: Any = SimpleNamespace(completed_in=SimpleNamespace(world_size=world_size), newcomer=False, entering=False)
    kept: dict[str, int] = {"max_steps": -1}
    return Requests(
        trainer,
        HOSTS_BY_NAME[host],
        session,
        gather=lambda own: [own, *others],
        max_steps=lambda: kept["max_steps"],
        set_max_steps=lambda value: kept.update(max_steps=value),
        on_skip=lambda: None,
    )


def test_lowest_rank_decides_where_several_ask() -> None:
    trainer = Loops()
    requests = requests_of(trainer, [{"limit_val_batches": 0}, {"limit_val_batches": 7, "accumulate_grad_batches": 3}])
    trainer.fit_loop.max_epochs = 9
    assert requests.pending
    requests.settle()
    assert not requests.pending
    assert (trainer.fit_loop.max_epochs, trainer.limit_val_batches, trainer.accumulate_grad_batches) == (9, 0, 3)


def test_what_is_asked_is_taken_back_until_all_know_of_it() -> None:
    trainer = Loops()
    requests = requests_of(trainer, [{}])
    trainer.should_stop = True
    requests._end_batch()
    assert not trainer.should_stop
    assert requests.pending
    requests.hear(0.5)  # a validation is due
    requests._end_batch()
    assert not trainer.should_stop
    requests.hear(1.0)
    requests._end_batch()
    assert trainer.should_stop
    assert not requests.pending


def test_newcomer_in_its_first_hooks_keeps_what_it_asks_for_without_an_exchange() -> None:
    trainer = Loops()
    requests = requests_of(trainer, [])
    requests._gather = None  # type: ignore[assignment]
    requests._session.entering = True
    trainer.should_stop = True
    requests.settle()
    assert not trainer.should_stop
    assert requests.pending


@pytest.mark.parametrize("host", HOSTS)
def test_newcomer_shows_an_accumulation_that_a_callback_has_set_after_the_check_of_that(host: str) -> None:
    pl = importlib.import_module(host)
    callback = pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})
    trainer = Loops()
    trainer.callbacks, trainer.strategy, trainer.current_epoch = [callback], None, 1  # type: ignore[attr-defined]
    requests = requests_of(trainer, [], host=host)
    requests._session.entering = True
    requests.load_state({**requests.state(), "accumulate_grad_batches": 2, "max_epochs": 9})
    assert (trainer.accumulate_grad_batches, trainer.fit_loop.max_epochs) == (1, 9)
    callback.on_train_start(trainer, training.regression(pl)())
    requests.settle()
    assert trainer.accumulate_grad_batches == 2
    callback.on_train_epoch_start(trainer)
    requests.settle()
    assert trainer.accumulate_grad_batches == 2
    assert not requests.pending


def test_worker_that_is_alone_asks_nobody() -> None:
    trainer = Loops()
    requests = requests_of(trainer, [], world_size=1)
    trainer.should_stop = True
    requests._end_batch()
    assert trainer.should_stop
    assert requests.state()["should_stop"]
