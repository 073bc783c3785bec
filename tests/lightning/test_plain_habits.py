"""What people do with a plain Trainer: duck-typed loggers, no optimizer, environments of a cluster."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from ef_common.testing.harness import Job
from ef_lightning import strategy_for
from tests.lightning import habits, training
from tests.lightning.conftest import HOSTS

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class DuckLogger:
    """A logger whose class has no `log_metrics`, as a mock has none."""

    name, version, save_dir, log_dir, group_separator = "duck", 0, None, None, "/"

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.log_metrics = lambda metrics, step=None: self.rows.append(dict(metrics))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


@pytest.mark.parametrize("host", HOSTS)
def test_logger_whose_class_has_no_log_metrics_is_called(host: str) -> None:
    pl = importlib.import_module(host)

    class Logging(training.regression(pl)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("batch", float(batch_idx))
            return super().training_step(batch, batch_idx)

    def logged(strategy: Any) -> Any:
        logger = DuckLogger()
        trainer = training.trainer(pl, strategy, logger=[logger], log_every_n_steps=1)
        trainer.fit(Logging(), training.loader(8))
        return logger.rows

    assert logged(strategy_for(host)()) == logged("auto") != []


@pytest.mark.parametrize("where", ["alone", "in_a_job"])
def test_module_without_an_optimizer_is_run(where: str, request: pytest.FixtureRequest) -> None:
    if where == "in_a_job":
        request.getfixturevalue("world_of_one")
    pl = importlib.import_module(HOSTS[0])

    class Fixed(training.regression(pl)):  # type: ignore[misc]
        def configure_optimizers(self) -> None:
            return None

    module = Fixed()
    before = training.weights(module)
    trainer = training.trainer(pl, strategy_for(HOSTS[0])())
    trainer.fit(module, training.loader(8))
    assert (trainer.global_step, training.weights(module)) == (4, before)


@pytest.mark.parametrize("where", ["alone", "in_a_job"])
def test_number_of_steps_is_known_before_the_fit_and_in_the_modules_setup(
    where: str, request: pytest.FixtureRequest
) -> None:
    if where == "in_a_job":
        request.getfixturevalue("world_of_one")
    pl = importlib.import_module(HOSTS[0])

    class Planning(training.regression(pl)):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return training.loader(32)

        def setup(self, stage: str) -> None:
            self.planned = self.trainer.estimated_stepping_batches

    module = Planning()
    trainer = training.trainer(pl, strategy_for(HOSTS[0])())
    trainer.strategy.connect(module)
    trainer.fit_loop._data_source.instance = module
    module.trainer = trainer
    assert trainer.estimated_stepping_batches == 16
    trainer.fit(module)
    assert (module.planned, trainer.global_step) == (16, 16)


@pytest.mark.parametrize("host", HOSTS)
def test_process_alone_validates_by_its_clock(host: str) -> None:
    pl = importlib.import_module(host)

    class Counting(training.regression(pl)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.validated = [*getattr(self, "validated", []), self.global_step]

    def validated(strategy: Any) -> Any:
        module = Counting()
        trainer = training.trainer(pl, strategy, val_check_interval=timedelta(0), check_val_every_n_epoch=None)
        trainer.fit(module, training.loader(8), training.loader(4))
        return module.validated

    assert validated(strategy_for(host)()) == validated("auto") == [0, 1, 2, 3, 4]


# ---------------------------------------------------------------- clusters


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, new_process: None) -> Path:
    """The environment of a task of Slurm's, and a `scontrol` that writes down its arguments: where."""
    for name, value in {"NTASKS": "1", "JOB_ID": "12345", "PROCID": "3", "LOCALID": "2", "NODEID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    said = tmp_path / "said"
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {said}\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return said


def send(trainer: Any, number: int) -> None:
    """Send a signal to this process, and wait until it is taken for a notice, where any are heeded."""
    os.kill(os.getpid(), number)
    notices, session = trainer.strategy._here.notices, trainer.strategy.session
    while notices.active and not session.leaving:
        time.sleep(0.001)


def signalled(pl: Any, number: int, **options: Any) -> tuple[Any, Any]:
    """A training in which Slurm sends a signal after two batches: its Trainer, and the exit status if it has ended."""
    environment = importlib.import_module(f"{pl.__name__}.plugins.environments").SLURMEnvironment
    kept = {signal.SIGTERM, number}
    before = {kind: signal.getsignal(kind) for kind in kept}

    class Signal(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 2:
                assert (trainer.global_rank, trainer.local_rank, trainer.world_size) == (0, 0, 1)
                send(trainer, number)

    strategy = strategy_for(pl.__name__)(checkpoint=options.pop("checkpoint", None))
    plugins = [environment(requeue_signal=number)]
    trainer = training.trainer(pl, strategy, plugins=plugins, callbacks=[Signal()], **options)
    status = None
    try:
        trainer.fit(training.regression(pl)(), training.loader(29))
    except SystemExit as end:
        status = end.code
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
    return trainer, status


@pytest.mark.parametrize("host", HOSTS)
def test_slurm_requeues_a_process_alone_which_trains_on_until_it_is_ended(
    host: str, slurm: Path, tmp_path: Path
) -> None:
    trainer, status = signalled(importlib.import_module(host), signal.SIGUSR2, default_root_dir=tmp_path)
    assert (trainer.global_step, status) == (16, None)
    assert slurm.read_text() == "requeue 12345\n"
    assert (tmp_path / "hpc_ckpt_1.ckpt").exists()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("where", ["alone_with_checkpoints", "in_a_job"])
def test_slurm_requeues_what_leaves_at_its_signal(
    where: str, number: int, slurm: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    options: dict[str, Any] = {"checkpoint": tmp_path / "kept"}
    if where == "in_a_job":
        request.getfixturevalue("world_of_one")
        options = {}
    pl = importlib.import_module(HOSTS[0])
    trainer, status = signalled(pl, number, default_root_dir=tmp_path, **options)
    assert (trainer.global_step < 16, status) == (True, 0)
    assert slurm.read_text() == "requeue 12345\n"
    resumed = training.trainer(pl, "auto")
    module = training.regression(pl)()
    resumed.fit(module, training.loader(29), ckpt_path=tmp_path / "hpc_ckpt_1.ckpt")
    assert resumed.global_step == 16


def test_slurm_does_not_requeue_what_leaves_for_another_reason(slurm: Path, tmp_path: Path, world_of_one: Path) -> None:
    pl = importlib.import_module(HOSTS[0])

    class Term(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                send(trainer, signal.SIGTERM)

    environment = importlib.import_module(f"{HOSTS[0]}.plugins.environments").SLURMEnvironment
    trainer = training.trainer(pl, strategy_for(HOSTS[0])(), plugins=[environment()], callbacks=[Term()])
    with pytest.raises(SystemExit):
        trainer.fit(training.regression(pl)(), training.loader(29))
    assert not slurm.exists()


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_slurm_requeues_two_workers_once(job: Job, tmp_path: Path) -> None:
    said, saved = tmp_path / "said", tmp_path / "saved"
    scontrol = job.directory / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {said}\n')
    scontrol.chmod(0o755)
    workers = job.start_world(2, habits.run_as_tasks_of_slurm, HOSTS[0], str(saved))
    assert [worker.wait() for worker in workers] == [0, 0]
    assert said.read_text() == "requeue 12345\n"
    pl = importlib.import_module(HOSTS[0])
    checkpoint = saved / "hpc_ckpt_1.ckpt"
    step = torch.load(checkpoint)["global_step"]  # they leave as soon as all have heard of it
    assert step >= 2
    resumed = training.trainer(pl, "auto", max_steps=step + 5, max_epochs=-1)
    resumed.fit(training.regression(pl)(), training.loader(habits.LENGTH), ckpt_path=checkpoint)
    assert resumed.global_step == step + 5
    steps = [event["step"] for event in job.events("step")]
    assert 2 <= max(steps) < 200_000  # they have left


# ---------------------------------------------------------------- two workers


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_validation_loaders_that_are_none_leave_two_workers_to_train(run: Callable[..., list[Any]]) -> None:
    first, second = run(2, habits.run_without_validation, HOSTS[0])
    assert first == second
    assert first["step"] == 4


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_module_without_an_optimizer_is_run_by_two_workers(run: Callable[..., list[Any]]) -> None:
    first, second = run(2, habits.run_without_an_optimizer, HOSTS[0])
    assert first == second
    assert (first["step"], first["weights"]) == (4, first["before"])


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_checkpoints_of_two_workers_go_once_through_plugins_that_are_wrapped(
    job: Job, run: Callable[..., list[Any]]
) -> None:
    first, second = run(2, habits.run_with_wrapped_io, HOSTS[0])
    assert first == second
    names = [f"step={step}.ckpt" for step in range(1, 5)]
    assert (job.directory / "written").read_text().splitlines() == names
    assert sorted(path.name for path in (job.directory / "saved").iterdir()) == names
    last = torch.load(job.directory / "saved" / names[-1], weights_only=True)["state_dict"]
    assert [float(value) for tensor in last.values() for value in tensor.double().flatten()] == first["weights"]
