"""One run of a Trainer (fit, validation, test or prediction), from its setup to its teardown."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from ef_common.collectives import torch_operations as operations
from ef_common.collectives.gradients.module_buffers import ModuleBuffers
from ef_common.collectives.torch_default_group import DefaultGroup, install, remove
from ef_common.data.torch_loader import plain
from ef_common.data.torch_walk import WalkedLoader
from ef_common.errors import UnsupportedError
from ef_common.launch.leaving import leaving_cleanly
from ef_common.launch.process import Worker
from ef_lightning import hooks
from ef_lightning.checks import callbacks_of_one
from ef_lightning.combined_loader import check_joint, combined, joined
from ef_lightning.data_workers import is_stream
from ef_lightning.default_group import Workers
from ef_lightning.evaluated_loader import EvaluatedLoader
from ef_lightning.evaluation import Evaluation
from ef_lightning.evaluation_loader import EvaluationLoader
from ef_lightning.fit import Fit
from ef_lightning.joint_reading import JointLoader, JointReading
from ef_lightning.joint_walk import WalkedLoaders
from ef_lightning.logged import Logged
from ef_lightning.logs import Logs
from ef_lightning.metrics import MetricSync, leaving_no_trace
from ef_lightning.progress import TrainerProgress
from ef_lightning.reading import SampleReading
from ef_lightning.start import agree_on_trainer
from ef_lightning.stream_evaluation import StreamEvaluationLoader
from ef_lightning.throughput import ThroughputMonitors
from ef_lightning.walk_evaluation import WalkEvaluationLoader
from ef_lightning.walk_reading import has_no_positions, tell_cost

if TYPE_CHECKING:
    from ef_lightning.strategy import ElasticMixin

logger = logging.getLogger(__name__)


class Run:
    """The parts of every run: loggers, metrics, a progress bar, loaders of evaluations.

    Args:
        strategy: Whose run it is.
        worker: This process.
        trainer: The Trainer.

    Attributes:
        stays_one: Nobody can join this worker, which is the only one.
        fit: The training of this run; None in any other run.
        logged: The values of `self.log`; None in a process that is not a worker of a job, and before the setup.
    """

    def __init__(self, strategy: ElasticMixin, worker: Worker, trainer: Any) -> None:
        self._strategy, self._worker, self._trainer = strategy, worker, trainer
        self._host, self._session = strategy.host, worker.session
        self.stays_one = self._must_stay_one()
        self.fit = Fit(strategy, worker, trainer, stays_one=self.stays_one) if self._fits else None
        self.logged: Logged | None = None
        self._progress = TrainerProgress(trainer, self._session)
        self._throughput = ThroughputMonitors(trainer, self._session, self._host)
        self._logs: Logs | None = None
        self._metrics: MetricSync | None = None
        self._default_group: DefaultGroup | None = None
        self._workers = Workers(strategy)
        self._evaluation_loaders: list[EvaluatedLoader] = []
        self._has_told_cost = False
        self._to_wrap: list[str] = []

    @property
    def _fits(self) -> bool:
        return bool(self._trainer.state.fn == self._host.get("trainer.states", "TrainerFn").FITTING)

    def _must_stay_one(self) -> bool:
        """Whether the only worker uses callbacks that nobody could catch up with; newcomers are then refused."""
        session, names = self._session, callbacks_of_one(self._trainer)
        if not (self._worker.elastic and session.world_size == 1 and not session.newcomer and names):
            return False
        logger.warning("no worker can join this one while %s is used", ", ".join(sorted(names)))
        return True

    # ------------------------------------------------------------ set-up and teardown

    def set_up_default_group(self) -> None:
        """The members answer calls of `torch.distributed` from here on."""
        if self._worker.elastic and self._default_group is None:
            self._default_group = install(self._workers)
            hooks.exchange_no_sigterm(self._trainer)

    def take_loaders(self) -> None:
        """Take the loaders before the user's `setup` hooks, which may ask how many steps there will be."""
        hooks.keep_samplers(self._trainer)
        if self.fit is not None:
            self.fit.set_up_schedules()
            self.fit.set_up_requests()
            self.fit.set_up_length()
        hooks.surround_stage(self._trainer, leaving_cleanly)
        hooks.combine_loaders(self._trainer, self._combine)
        hooks.surround_evaluation_steps(self._trainer, lambda: self.leaving_no_trace(self.padding))

    def attach_loggers(self) -> None:
        """What loggers receive from here on survives the loss of rank 0."""
        self._logs = Logs(self._trainer, self._session, self._host)
        self._logs.attach()
        self._throughput.attach()

    def set_up(self) -> None:
        """The model is on its device."""
        self._metrics = MetricSync(self._session)
        self._metrics.connect(self._trainer.lightning_module)
        if self._worker.elastic:
            self.logged = Logged(
                self._trainer,
                self._host,
                self._session,
                metrics=self._metrics,
                gather=self._strategy.gather_in_view,
                weight=self._strategy.weight_of_batch,
            )
            self.logged.attach()
        if self._worker.elastic and not self._session.newcomer:
            self._agree_on_start()

    def _agree_on_start(self) -> None:
        """Take over rank 0's weights and loggers in all workers."""
        module, session = self._trainer.lightning_module, self._session
        with leaving_cleanly(), torch.no_grad():
            buffers = ModuleBuffers(module)
            buffers.agree(session)
            first = operations.FirstRankValues([*module.parameters(), *buffers.tensors], session)
            session.run(first)
            if session.completed_in.world_size > 1:
                first.apply()
            agree_on_trainer(self._trainer, self._host, session)

    def end(self) -> None:
        """Release the Trainer."""
        if self.fit is not None:
            self.fit.end()
        for part in (self.logged, self._logs):
            if part is not None:
                part.detach()
        if self._default_group is not None:
            remove(self._default_group)
        if self._metrics is not None:
            self._metrics.disconnect()
        self._progress.end()
        self._throughput.detach()
        self._session.on_last_leave = None
        self._close_evaluation_loaders()
        hooks.release_loaders(self._trainer)
        hooks.leave_evaluation_steps(self._trainer)
        hooks.leave_sigterm(self._trainer)
        hooks.leave_stage(self._trainer)

    # ------------------------------------------------------------ while it runs

    def begin_step(self) -> None:
        """A step of training or evaluation begins, in all workers."""
        self._workers.follow()

    def follow_ranks(self) -> None:
        """There is a new view."""
        if self._logs is not None:
            self._logs.follow_ranks()
        self._progress.follow_ranks()
        self._throughput.follow_view()

    def connect_metrics(self) -> None:
        """Connect metrics that may have been made since the setup."""
        if self._metrics is not None:
            self._metrics.connect(self._trainer.lightning_module)

    def begin_evaluation(self) -> None:
        """A validation or a test begins."""
        self.connect_metrics()
        if self.logged is not None:
            self.logged.begin_evaluation()

    def end_evaluation(self) -> None:
        """All members have the result of the evaluation."""
        if self.logged is not None:
            self.logged.end_evaluation()
        requests = None if self.fit is None else self.fit.requests
        if requests is not None and not self._trainer.sanity_checking:
            requests.settle()
        else:
            self._strategy.barrier("end of an evaluation")

    @property
    def padding(self) -> bool:
        """Whether the current batch is padding, which only keeps this worker in step with the others."""
        if self._trainer.training:
            loader = None if self.fit is None else self.fit.train_loader
            return loader is not None and loader.padding
        return any(loader.padding for loader in self._evaluation_loaders)

    def leaving_no_trace(self, padding: bool) -> AbstractContextManager[None]:
        """Within this context, a padding step counts nowhere."""
        return leaving_no_trace(self._trainer) if padding else nullcontext()

    # ------------------------------------------------------------ loaders

    def _combine(self, loaders: Any, stage: str) -> Any:
        """Set a loop up with these loaders of the user's, which it will have processed one by one."""
        if stage != "train":
            self._close_evaluation_loaders()
        taken = combined(loaders, "max_size_cycle" if stage == "train" else "sequential", self._host)
        if self._reads_together(taken, stage):
            taken = joined(taken, self._host)
        self._to_wrap = [stage] * len(taken.flattened)
        return taken

    def _reads_together(self, taken: Any, stage: str) -> bool:
        """Whether a loop takes a batch of each of several loaders in every step, and ElasticFlow deals them."""
        if self.fit is not None and self.fit.in_trial:
            return False
        if stage != "train" and hooks.combination(taken)[0] == "sequential":
            return False
        # What is no DataLoader is refused, by Lightning or in `wrap`.
        return len(taken.flattened) > 1 and all(isinstance(loader, DataLoader) for loader in taken.flattened)

    def wrap(self, dataloader: Any) -> Any:
        """Wrap a loader of a loop that is being set up. Any other loader is the caller's, and stays as it is."""
        fit = self.fit
        if not self._to_wrap or (fit is not None and fit.in_trial):
            return dataloader
        stage = self._to_wrap.pop()
        if isinstance(dataloader, (list, tuple, dict)) and not dataloader:
            return dataloader  # to Lightning, that is a loader without batches
        if stage == "train" and fit is not None:
            return fit.wrap(dataloader, lambda loader: self._checked(loader, stage))
        evaluation = Evaluation(
            self._session,
            self._trainer,
            log=self._worker.log,
            stage=stage,
            index=len(self._evaluation_loaders),
            contributions=lambda: None if self.logged is None else self.logged.evaluation,
        )
        make = self._joint_evaluation_loader if isinstance(dataloader, JointLoader) else self._evaluation_loader
        loader = make(dataloader, evaluation)
        self._evaluation_loaders.append(loader)
        return loader

    def _evaluation_loader(self, dataloader: object, evaluation: Evaluation) -> EvaluatedLoader:
        loader = self._checked(dataloader, evaluation.stage)
        if is_stream(loader):
            return StreamEvaluationLoader(loader, evaluation)
        if has_no_positions(loader):
            return WalkEvaluationLoader(loader, WalkedLoader(loader, follows_epochs=False), evaluation)
        return EvaluationLoader(loader, SampleReading(loader), evaluation)

    def _joint_evaluation_loader(self, joint: JointLoader, evaluation: Evaluation) -> EvaluatedLoader:
        check_joint(joint, self._host)
        if self._fits and self._trainer.overfit_batches > 0:
            hooks.stop_shuffling(joint.several, self._host, stage=evaluation.stage)
        joint.replace(lambda loader: self._checked(loader, evaluation.stage))
        if not any(map(has_no_positions, joint.loaders)):
            return EvaluationLoader(joint, JointReading(joint), evaluation)
        combine = self._host.get("utilities.combined_loader", "CombinedLoader")
        walked = WalkedLoaders(joint, combine, follows_epochs=False)
        return WalkEvaluationLoader(joint, walked, evaluation, num_samples=lambda batch: None)

    def _checked(self, dataloader: object, stage: str) -> DataLoader[Any]:
        if not isinstance(dataloader, DataLoader):
            raise UnsupportedError(
                "only a torch DataLoader (or a subclass) can be dealt to a changing number of workers. "
                f"Received: {type(dataloader).__module__}.{type(dataloader).__qualname__}"
            )
        hooks.advise_on_workers(self._trainer, self._host, dataloader, stage=stage)
        is_walked = has_no_positions(dataloader) and not is_stream(dataloader)
        if is_walked and self._worker.elastic and not self._has_told_cost:
            self._has_told_cost = True
            tell_cost()
        return plain(dataloader)

    def _close_evaluation_loaders(self) -> None:
        for loader in self._evaluation_loaders:
            loader.close()
        self._evaluation_loaders = []
