"""Programs that train more than once, try again after an exception, or have callbacks that nobody can catch up with."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ef_common.audit import audit
from ef_common.launch import process
from ef_common.testing.harness import HarnessError, Job
from ef_lightning import strategy_for
from tests import warm
from tests.lightning import training
from tests.lightning.compensated import noting
from tests.lightning.conftest import HOSTS

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def evaluated(pl: Any) -> Any:
    class Evaluated(training.regression(pl)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch), sync_dist=True)

        test_step = validation_step

    return Evaluated


def program(host: str, strategy: str = "elasticflow") -> list[Any]:
    """Pre-trains, evaluates, fine-tunes with a second Trainer, and trains on with the first one."""
    pl = importlib.import_module(host)
    module, other = evaluated(pl)(), evaluated(pl)()
    first = training.trainer(pl, strategy, max_epochs=1)
    found: list[Any] = []
    first.fit(module, training.loader(32), training.loader(9))
    found.append(first.validate(module, training.loader(9), verbose=False))
    other.load_state_dict(module.state_dict())
    second = training.trainer(pl, strategy, max_epochs=2)
    second.fit(other, training.loader(16), training.loader(9))
    found.append(second.test(other, training.loader(9), verbose=False))
    first.fit_loop.max_epochs = 2
    first.fit(module, training.loader(32), training.loader(9))
    found += [first.current_epoch, second.current_epoch, training.weights(module), training.weights(other)]
    return found


def test_program_trains_and_evaluates_several_times_in_a_job_of_one(world_of_one: Path) -> None:
    ours = program(HOSTS[0])
    report = audit(world_of_one)
    assert report.ok, str(report)
    assert report["samples"].detail.count("training") == 3
    assert ours == program(HOSTS[0], "auto")


def with_best(host: str, folder: Path, lost_by: int | None = None, max_epochs: int = 4) -> dict[str, Any]:
    """Trains for two epochs and evaluates the best weights, which are those of the first; then for some more.

    Args:
        host: The class tree.
        folder: For checkpoints, and for the files of a ModelCheckpoint that keeps the better ones.
        lost_by: Rank of the worker that does not see the file of the best weights.
        max_epochs: In the end.
    """
    pl = importlib.import_module(host)

    class Worsening(evaluated(pl)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", float(abs(self.current_epoch - 3)) + 9.0 * (self.current_epoch == 1), sync_dist=True)

    module = Worsening()
    best = pl.callbacks.ModelCheckpoint(folder / "best", monitor="val")
    strategy = strategy_for(host)(checkpoint=str(folder / "store"))
    trainer = training.trainer(pl, strategy, callbacks=[best], enable_checkpointing=True)
    loaders = {"train_dataloaders": training.loader(32), "val_dataloaders": training.loader(9)}
    trainer.fit(module, **loaders)
    found = {"trained": training.weights(module)}
    if lost_by == trainer.global_rank:
        best.best_model_path = str(folder / "lost.ckpt")
    trainer.test(module, training.loader(9), ckpt_path="best", verbose=False)
    found |= {"tested": training.weights(module)}
    trainer.fit_loop.max_epochs = max_epochs
    trainer.fit(module, **loaders)
    trainer.test(module, training.loader(9), ckpt_path="best", verbose=False)
    return {**found, "best": training.weights(module), "step": trainer.global_step}


@pytest.mark.usefixtures("new_process")
def test_program_that_starts_again_does_without_the_best_weights_that_it_has_removed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = with_best(HOSTS[0], tmp_path)
    assert first["trained"] != first["tested"]
    assert "does not exist any more" not in caplog.text
    monkeypatch.setattr(process, "_this", None)  # another process
    assert with_best(HOSTS[0], tmp_path) == {**first, "tested": first["trained"]}
    assert caplog.text.count("does not exist any more") == 1
    assert len(list((tmp_path / "best").iterdir())) == 1


@pytest.mark.processes
@pytest.mark.parametrize("lost_by", [0, 1])
def test_workers_of_which_one_does_without_the_best_weights_evaluate_the_same(tmp_path: Path, lost_by: int) -> None:
    results = []
    for name, rank in (("first", None), ("second", lost_by)):
        with Job(tmp_path / name, preload=warm.TORCH) as job:
            workers = job.start_world(2, with_best, HOSTS[0], tmp_path, rank, 2)
            results += [worker.result() for worker in workers]
    first = results[0]
    tested = first["trained"] if lost_by == 0 else first["tested"]
    assert results[1] == first
    assert [result["tested"] for result in results[2:]] == [tested, tested]


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("host", HOSTS)
def test_program_trains_and_evaluates_several_times_with_two_workers(run: Callable[..., list[Any]], host: str) -> None:
    first, second = run(2, program, host)  # and audits what they have logged
    assert first == second
    assert first[2:4] == [2, 2]


def test_second_fit_has_the_reference_batch_of_its_own_start(world_of_one: Path, tmp_path: Path) -> None:
    pl = importlib.import_module(HOSTS[0])
    trainer = training.trainer(pl, strategy_for(HOSTS[0])(), max_epochs=1)
    kept = noting(pl, "on_train_end", lambda trainer: trainer.strategy._fit.compensation.compensator.state())
    trainer.callbacks.append(kept)
    trainer.fit(training.regression(pl)(), training.loader(32))
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(training.regression(pl)(), training.loader(32, 8))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(training.regression(pl)(), training.loader(32, 8), ckpt_path=tmp_path / "first.ckpt")
    batches = [state["reference_batch_size"] for state in kept.notes]
    assert batches == [training.BATCH_SIZE, 8, training.BATCH_SIZE]


@pytest.mark.parametrize("where", ["alone", "in_a_job"])
@pytest.mark.parametrize("again", ["same_trainer", "another_trainer"])
def test_exception_that_the_program_catches_ends_no_job_of_one(
    where: str, again: str, request: pytest.FixtureRequest
) -> None:
    run_dir = request.getfixturevalue("world_of_one") if where == "in_a_job" else None
    request.getfixturevalue("new_process")
    pl = importlib.import_module(HOSTS[0])

    class Failing(training.regression(pl)):  # type: ignore[misc]
        fails = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.fails and self.trainer.global_step == 3:
                raise MemoryError("too large a batch")
            return super().training_step(batch, batch_idx)

    module = Failing()
    trainer = training.trainer(pl, strategy_for(HOSTS[0])())
    with pytest.raises(MemoryError, match="too large"):
        trainer.fit(module, training.loader(32, 8))
    module = Failing()
    module.fails = False
    if again == "another_trainer":
        trainer = training.trainer(pl, strategy_for(HOSTS[0])())
    trainer.fit(module, training.loader(32))
    worker = process._this
    assert worker is not None
    worker.failing.tell_postponed()
    worker.session.stop()  # would raise if the job had failed
    undisturbed = Failing()
    undisturbed.fails = False
    training.trainer(pl, "auto").fit(undisturbed, training.loader(32))
    if again == "another_trainer":
        assert training.weights(module) == training.weights(undisturbed)
    if run_dir is not None:
        report = audit(run_dir)
        assert report.ok, str(report)


def averaged(host: str, gate: Path) -> int:
    """Waits in its third step until there is this file."""
    pl = importlib.import_module(host)

    class Waiting(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            while trainer.global_step == 2 and not gate.exists():
                time.sleep(0.01)

    callbacks = [pl.callbacks.StochasticWeightAveraging(0.01), Waiting()]
    trainer = training.trainer(pl, callbacks=callbacks)
    trainer.fit(training.regression(pl)(), training.loader(32))
    return int(trainer.global_step)


@pytest.mark.processes
def test_newcomer_is_refused_where_nobody_could_catch_up_and_the_only_worker_goes_on(job: Job, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    (worker,) = job.start_world(1, averaged, HOSTS[0], gate)
    job.view(1)
    newcomer = job.start(averaged, HOSTS[0], gate)
    with pytest.raises(HarnessError, match="swaps schedulers"):
        newcomer.result()
    gate.touch()
    assert worker.result() == 16
    job.audit()
