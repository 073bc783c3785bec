"""What the code of one worker asks of all: all do it at the same step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ef_common.testing.harness import Job
from ef_lightning.requests import Requests
from tests.lightning import requested
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


@pytest.mark.processes
def test_worker_that_raises_a_keyboard_interrupt_interrupts_all(job: Job) -> None:
    workers = job.start_world(2, requested.run, HOSTS[0], "interrupt", "on_train_batch_start", 1, (1,), {})
    assert [worker.wait() for worker in workers] == [1, 1]  # Lightning's status for it
    for worker in workers:
        text = worker.output.read_text()
        assert "Traceback" not in text
        assert "JobFailed" not in text
    steps = {worker.name: max(event["step"] for event in worker.events("step")) for worker in workers}
    assert len(set(steps.values())) == 1


@pytest.mark.processes
def test_newcomer_has_the_limits_that_the_others_have_agreed_on(job: Job) -> None:
    options = {"limit_val_batches": 0, "sleep_s": 0.05, "max_epochs": 3}
    more = ("more_epochs", "on_train_batch_end", 0, (0,), options)
    workers = job.start_world(2, requested.run, HOSTS[0], *more)
    job.wait_for_step(6)
    newcomer = job.start(requested.run, HOSTS[0], "stop", "on_fit_end", None, (), options)
    results = [worker.result() for worker in (*workers, newcomer)]
    assert [result["max_epochs"] for result in results] == [4, 4, 4]
    assert len({result["step"] for result in results}) == 1
    job.audit()


class Loops:
    """A Trainer of which only the limits are looked at."""

    def __init__(self) -> None:
        self.should_stop = False
        self.limit_train_batches = self.limit_val_batches = 1.0
        self.check_val_every_n_epoch = self.accumulate_grad_batches = 1
        self.reload_dataloaders_every_n_epochs = 0
        self.fit_loop = SimpleNamespace(max_epochs=3, min_epochs=None, epoch_loop=SimpleNamespace(min_steps=None))


def requests_of(trainer: Any, others: list[dict[str, Any]], *, world_size: int = 2) -> Requests:
    session: Any = SimpleNamespace(completed_in=SimpleNamespace(world_size=world_size), newcomer=False, entering=False)
    kept: dict[str, int] = {"max_steps": -1}
    return Requests(
        trainer,
        session,
        gather=lambda own: [own, *others],
        max_steps=lambda: kept["max_steps"],
        set_max_steps=lambda value: kept.update(max_steps=value),
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


def test_worker_that_is_alone_asks_nobody() -> None:
    trainer = Loops()
    requests = requests_of(trainer, [], world_size=1)
    trainer.should_stop = True
    requests._end_batch()
    assert trainer.should_stop
    assert requests.state()["should_stop"]
