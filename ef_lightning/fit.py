"""One training of a Trainer, from the setup of its run to the teardown."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from ef_common.collectives.gradients.deterministic import DeterministicReducer
from ef_common.collectives.gradients.reducer import GradientReducer
from ef_common.collectives.torch_codec import as_bytes
from ef_common.core import sharding
from ef_common.core.sharding import GlobalBatch
from ef_common.core.view import View
from ef_common.data import global_batches
from ef_common.data.checkpointer import agree_on_place
from ef_common.data.claiming import Claiming
from ef_common.data.meter import Meter
from ef_common.data.torch_determinism import Determinism
from ef_common.data.torch_order import batch_size_of
from ef_common.data.torch_walk import WalkedLoader
from ef_common.data.workers import WorkersWatch, hook_of
from ef_common.errors import UnsupportedError, UsageError
from ef_common.launch.leaving import leaving_cleanly
from ef_common.launch.process import Worker
from ef_common.session import Barrier
from ef_lightning import hooks
from ef_lightning.batch_norm import SyncedBatchNorm
from ef_lightning.checkpoints import TrainerCheckpoints
from ef_lightning.checks import (
    FINDERS,
    callbacks_of_one,
    check_optimizers,
    check_sync_batchnorm,
    check_trainer_for_global_batch,
)
from ef_lightning.combined_loader import check_joint
from ef_lightning.compensation import TrainerCompensation
from ef_lightning.data_workers import is_stream
from ef_lightning.global_batch import GlobalStep
from ef_lightning.joining import Joining
from ef_lightning.joint_reading import JointLoader, JointReading
from ef_lightning.joint_walk import WalkedLoaders, tell_cost_of_several
from ef_lightning.reading import Reading, SampleReading
from ef_lightning.repetition import Repetition
from ef_lightning.requests import Requests
from ef_lightning.schedules import Schedules
from ef_lightning.shared_rates import SharedRates
from ef_lightning.start_file import StartFile
from ef_lightning.state import TrainerState
from ef_lightning.stream_loader import IndexedLoader, IndexedReading, StreamLoader, StreamReading
from ef_lightning.timed_validation import TimedValidation
from ef_lightning.train_loader import ElasticLoader
from ef_lightning.walk_reading import WalkReading, check_settings_for_walk, has_no_positions
from ef_lightning.workers_log import WorkersLog

if TYPE_CHECKING:
    from ef_lightning.strategy import ElasticMixin

logger = logging.getLogger(__name__)

Check = Callable[[object], DataLoader[Any]]


class Fit:
    """The parts of one training.

    In a process that is no worker of a job there are neither reducer, requests nor repetition.

    Args:
        strategy: Whose training it is.
        worker: This process.
        trainer: The Trainer.
        stays_one: Nobody can join this worker, which is the only one.

    Attributes:
        train_loader: The training loader, once Lightning has asked for it.
        elastic: Others may take part in it.
        checkpoints: Checkpoints of the training, if any are taken.
        compensation: How the optimizers follow the global batch; None if the ratio is 1 for ever.
        workers_log: Tells the loggers of the workers; None if there is nothing to tell, or nobody to be told.
        autoscaler: Chooses the number of nodes; None if nothing does.
        schedules: Schedules that follow the samples; None if they count updates.
        requests: Requests of one worker's code that concern all.
        repetition: Makes steps again in which workers have gathered and one was lost.
        reducer: Sums gradients.
        global_step: A step on a batch of fixed size, if that is set.
        is_over: The others have ended it already, so this newcomer is to skip it.
        in_trial: Until the training itself begins, a callback tries out others, which are none of the job's.
    """

    def __init__(self, strategy: ElasticMixin, worker: Worker, trainer: Any, *, stays_one: bool) -> None:
        self._strategy, self._worker, self._trainer = strategy, worker, trainer
        self._session, self._settings = worker.session, strategy.settings
        self.elastic, self._logs = worker.elastic, worker.log.enabled
        self._stays_one = stays_one
        self._first_world_size = 1
        self.in_trial = False
        self.train_loader: ElasticLoader | None = None
        self.compensation: TrainerCompensation | None = None
        self.schedules: Schedules | None = None
        self.workers = WorkersWatch(worker.session)
        self.workers_log: WorkersLog | None = None
        self.requests: Requests | None = None
        self.repetition: Repetition | None = None
        self.reducer: GradientReducer | None = None
        self.global_step: GlobalStep | None = None
        self._deterministic_reducer: DeterministicReducer | None = None
        self._rates = SharedRates(strategy)
        self._determinism: Determinism | None = None
        self._batch_norm: SyncedBatchNorm | None = None
        self._timed_validation: TimedValidation | None = None
        self._joining: Joining | None = None
        self._sanity_steps: float = 0
        self._loss: Tensor | None = None  # of the backward pass, if it is a single number
        self._watch: RemovableHandle | None = None
        self._interval: int | None = None  # put aside while Lightning sets up the training loader
        self._has_told_of_interval = False
        with leaving_cleanly():
            self.is_over = worker.begin_training()
        is_trial = trainer.fast_dev_run  # of which nothing is to be left
        self._claiming, job = (Claiming(None, self._session), None) if is_trial else worker.places(self._settings)
        self.autoscaler = None if is_trial or stays_one else worker.autoscaler(self._settings)
        self.checkpoints = None if job is None else TrainerCheckpoints(job, self._session, trainer)
        self._start_file = StartFile(trainer, self._session, self._choose)

    # ------------------------------------------------------------ set-up, before that of the model

    def _choose(self, path: Any, weights_only: bool | None) -> Any:
        """The file to resume from, in place of the user's."""
        if not self._session.newcomer:
            agree_on_place(self._session, has_place=self.checkpoints is not None)
        return path if self.checkpoints is None else self.checkpoints.find(path, weights_only)

    def set_up_schedules(self) -> None:
        """All workers have passed the first barrier; the user's code makes schedules for these workers."""
        self._first_world_size = self._session.completed_in.world_size
        if self._settings.schedules_follow_samples:
            self.schedules = Schedules(
                self._trainer, self._session, world_size=self._first_world_size, loader=lambda: self.train_loader
            )

    def set_up_length(self) -> None:
        """Lightning asks for the training loader from here on."""
        hooks.settle_after_setup(self._trainer, self.settle_length)

    def set_up_requests(self) -> None:
        """The user's code may make requests from here on."""
        if self._worker.elastic:
            self.requests = Requests(
                self._trainer,
                self._strategy.host,
                self._session,
                gather=partial(self._strategy.gather, call="exchange of what callbacks ask of the Trainer"),
                max_steps=lambda: self.max_steps,
                set_max_steps=self._set_max_steps,
                on_skip=self._skip_epoch,
            )

    def _skip_epoch(self) -> None:
        if self.train_loader is not None:
            self.train_loader.skip()

    def load_schedules(self, saved: dict[str, Any] | None) -> None:
        """Continue with the schedules of a checkpoint."""
        if self.schedules is not None and saved is not None:
            self.schedules.load_state(saved)
            self._forget_train_loader()  # a hook `setup` of the user's may have asked for it

    def resume_schedules(self) -> None:
        """The optimizers are there."""
        if self.schedules is not None and self.follows_samples:
            self.schedules.resume()

    @property
    def follows_samples(self) -> bool:
        """Whether the world may differ in size from the one for which the schedules were made."""
        schedules = self.schedules
        return schedules is not None and (self._worker.elastic or schedules.world_size != self._session.world_size)

    # ------------------------------------------------------------ set-up, after that of the model

    def set_up(self, saved_compensation: dict[str, Any] | None, saved_autoscale: dict[str, Any] | None) -> None:
        """Model and optimizers are there, and equal in all workers."""
        trainer, size = self._trainer, self._settings.global_batch_size
        hooks.finish_before_hooks(trainer, self._finish_backward)
        if size is not None:
            check_trainer_for_global_batch(trainer, size, self._session.world_size)
        if self._settings.deterministic:
            self._determinism = Determinism()
        if self._worker.elastic:
            self._set_up_reduction()
            check_sync_batchnorm(trainer, global_batch_size=size)
            self._set_up_repetition()
        self._set_up_compensation(saved_compensation)
        if self.autoscaler is not None:
            self.autoscaler.load_state(saved_autoscale)
        if trainer.loggers and self._settings.log_workers and (self._worker.elastic or self.compensation is not None):
            meter = Meter(self._session, self.autoscaler) if self._worker.elastic else None
            self.workers_log = WorkersLog(trainer, meter, self.compensation, global_batch_size=size)
        state = self._set_up_state()
        if self._session.newcomer:
            self._sanity_steps = trainer.num_sanity_val_steps
            trainer.num_sanity_val_steps = 0  # the others have done it
            self._joining = Joining(
                trainer,
                self._session,
                state,
                loader=lambda: self.train_loader,
                prepare=self._prepare_boundary,
                requests=self.requests,
            )
            self._joining.attach()
        if self._stays_one and callbacks_of_one(trainer) & FINDERS:
            self.in_trial = True
            self._forget_train_loader()

    def _set_up_reduction(self) -> None:
        trainer, session, strategy = self._trainer, self._session, self._strategy
        check_optimizers(strategy.optimizers)
        self.reducer = GradientReducer(session, trainer.lightning_module, weights=self.weights)
        self.reducer.decides = self._rates.own
        self.reducer.spares_equal = self.reducer.watches = not trainer.lightning_module.automatic_optimization
        if self.reducer.watches:
            self._watch = register_optimizer_step_pre_hook(self._before_step)
        self._measure_noise(self.reducer)
        if not self._settings.deterministic:
            with leaving_cleanly():
                self.reducer.attach()
        interval = hooks.validation_interval(trainer)
        if interval is not None:
            self._timed_validation = TimedValidation(trainer, session, interval_s=interval)

    def _measure_noise(self, reducer: GradientReducer) -> None:
        """Let the autoscaler know the noise of the gradients, where one reduction is one update."""
        autoscaler = self.autoscaler
        one = self._trainer.lightning_module.automatic_optimization and self._settings.global_batch_size is None
        if autoscaler is None or not autoscaler.needs_noise or not one:
            return

        def measures() -> bool:
            loader = self.train_loader
            return loader is not None and autoscaler.measures_noise(loader.dealer.num_updates)

        reducer.measures, reducer.asks, reducer.on_measured = measures, autoscaler.asks, autoscaler.note_squares

    def _set_up_repetition(self) -> None:
        """Allow steps to be repeated where Lightning makes them and each worker makes the same passes."""
        trainer, strategy = self._trainer, self._strategy
        if self._settings.global_batch_size is None and trainer.lightning_module.automatic_optimization:
            self.repetition = repetition = Repetition(
                trainer,
                self._session,
                on_repeat=self._go_back,
                begins=self._begins_update,
                fill=self._filled,
                select=self._select,
            )
            repetition.attach()
            self._batch_norm = SyncedBatchNorm(
                trainer.lightning_module,
                every=hooks.layer_sync(strategy) is not None,
                gather=strategy.gather_statistics,
                in_step=lambda: repetition.in_pass,
                counts=lambda: not strategy.padding,
            )
            self._batch_norm.attach()

    def _set_up_compensation(self, saved: dict[str, Any] | None) -> None:
        settings = self._settings
        changes = self._worker.elastic and settings.global_batch_size is None
        if not changes and settings.compensation.reference_batch_size is None:
            return  # the ratio is 1, for ever
        self.compensation = TrainerCompensation(
            settings.compensation,
            self._trainer,
            self._session,
            log=self._worker.log,
            global_batch_size=settings.global_batch_size,
            world_size=self._first_world_size,
        )
        if saved is not None:
            self.compensation.compensator.resume(saved)
        hooks.show_rates(self._trainer, self._strategy.host, self._compensated)

    def _compensated(self) -> AbstractContextManager[None]:
        compensation, loader = self.compensation, self.train_loader
        return nullcontext() if compensation is None or loader is None else compensation.shown(loader)

    def _set_up_state(self) -> TrainerState:
        strategy, checkpoints = self._strategy, self.checkpoints
        if not self._session.newcomer:
            self._claiming.begin()
        if self._worker.elastic:
            hooks.import_early()
        state = TrainerState(
            self._trainer,
            strategy.host,
            loader=lambda: self.train_loader,
            reducer=self.reducer,
            compensator=None if self.compensation is None else self.compensation.compensator,
            autoscaler=self.autoscaler,
            schedules=self.schedules,
            workers=self.workers,
            checkpoints=checkpoints,
            claiming=self._claiming,
            requests=self.requests,
            adopted=strategy.values_adopted,
            check_start=self._start_file.require,
        )
        if checkpoints is not None:
            checkpoints.attach(state.checkpoint, resume=state.resume, loader=lambda: self.train_loader)
        self._prepare_last_leave()
        self._session.state = state
        return state

    def _prepare_last_leave(self) -> None:
        """Save the state when all leave; if Slurm has asked them to, let it start the job again."""
        strategy, notices, checkpoints = self._strategy, self._worker.notices, self.checkpoints
        requeue = hooks.requeue(self._trainer, strategy.host, notices.take, heeded=lambda: notices.active)

        def leave() -> None:
            if checkpoints is not None:
                checkpoints.leave()
            if requeue is not None and requeue.signal in notices.heard:
                strategy.is_last = True
                with strategy.making_checkpoint():
                    requeue.act()

        if checkpoints is not None or (requeue is not None and self._worker.elastic):
            notices.save_on_last_leave(leave)

    # ------------------------------------------------------------ begin and end

    def begin(self) -> None:
        """The hooks at the start of the training have been called."""
        hooks.know_best(self._trainer)
        if self._joining is not None:  # has prepared before it was admitted
            self._joining.end_start()
        elif not self.in_trial:
            self._prepare_boundary()

    def _prepare_boundary(self) -> None:
        """Set everything up before the first boundary, where newcomers meet the others."""
        if self._session.newcomer:
            self._trainer.num_sanity_val_steps = self._sanity_steps  # in the next fit it is one of the others
            hooks.set_up_validation(self._trainer)
        hooks.load_loader_state(self._trainer)
        if self.requests is not None:
            self.requests.settle()
        if self.schedules is not None and self.train_loader is not None:
            self.train_loader.begin_training()
            if self.follows_samples:
                self.schedules.begin()
        if self.checkpoints is not None:
            self.checkpoints.begin_loops()

    def skip(self) -> None:
        """The others have ended this training: end the `fit`, with the saved result if there is one."""
        has_result = self.checkpoints is not None and self.checkpoints.load_result()
        self._session.trainings.skip(has_result=has_result)
        self._claiming.skip()
        if not has_result:
            hooks.do_without_best(self._trainer)
        raise hooks.end_of_run(self._strategy.host)

    def end_trial(self) -> None:
        """The training itself begins."""
        if self.in_trial:
            self.in_trial = False
            hooks.forget_loaders(self._trainer)

    def complete(self) -> None:
        """All members have reached the end of this training."""
        if self.in_trial:
            return
        if self.schedules is not None:
            self.schedules.end()
        with leaving_cleanly():
            if self.train_loader is not None:
                self.train_loader.finish()
            if self._worker.audit:
                self._log_weights()
            self._session.run(Barrier("end of the training"))
        if self.checkpoints is not None:
            self.checkpoints.finish()
        self._worker.notices.stop()

    def end(self) -> None:
        """Release the Trainer."""
        if self._watch is not None:
            self._watch.remove()
        if self._determinism is not None:
            self._determinism.undo()
        reducers = (self._deterministic_reducer, self.reducer)
        for part in (*reducers, self._joining, self.requests, self.repetition, self._batch_norm, self.schedules):
            if part is not None:
                part.detach()
        if self.autoscaler is not None:
            self.autoscaler.close()
        if self.compensation is not None:
            self.compensation.detach()
            hooks.hide_rates(self._trainer, self._strategy.host)
        if self.checkpoints is not None:
            self.checkpoints.job.stop()
        if self.train_loader is not None:
            self.train_loader.close()
        hooks.leave_backward(self._trainer)
        hooks.leave_epoch_length(self._trainer)
        hooks.leave_setup(self._trainer)
        self._put_interval_back()  # if the loader could not be set up
        self._session.state = None

    def saved(self) -> dict[str, dict[str, Any] | None]:
        """The part that belongs in Lightning's own checkpoints and is passed on to another fit."""
        return {
            "compensation": None if self.compensation is None else self.compensation.compensator.state(),
            "schedules": None if self.schedules is None else self.schedules.state(),
            "autoscale": None if self.autoscaler is None else self.autoscaler.state(),
        }

    # ------------------------------------------------------------ max_steps

    @property
    def max_steps(self) -> int:
        """The user's limit, while `trainer.max_steps` says when it is reached in the current world."""
        return int(self._trainer.max_steps) if self.schedules is None else self.schedules.max_steps

    def _set_max_steps(self, max_steps: int) -> None:
        if self.schedules is None:
            hooks.set_max_steps(self._trainer, max_steps)
        else:
            self.schedules.set_max_steps(max_steps)

    # ------------------------------------------------------------ data

    def wrap(self, dataloader: Any, check: Check) -> ElasticLoader:
        """The loader for the training that is being set up. `check` refuses anything that is not a loader."""
        if isinstance(dataloader, JointLoader):
            check_joint(dataloader, self._strategy.host)
            if self._trainer.overfit_batches > 0:
                hooks.stop_shuffling(dataloader.several, self._strategy.host)
            dataloader.replace(check)
            return self._wrap(dataloader, self._joint_reading(dataloader))
        loader = check(dataloader)
        if is_stream(loader):
            fixed = self._settings.global_batch_size is not None
            return self._wrap(loader, IndexedReading(loader, self._session) if fixed else StreamReading(loader))
        if has_no_positions(loader):
            check_settings_for_walk(self._settings)
            walked, size = WalkedLoader(loader), loader.batch_size
            return self._wrap(loader, WalkReading(loader, walked, batch_size=size, elastic=self._worker.elastic))
        return self._wrap(loader, SampleReading(loader, seeded=self._settings.deterministic))

    def _joint_reading(self, joint: JointLoader) -> Reading:
        if not any(map(has_no_positions, joint.loaders)):
            return JointReading(joint)
        check_settings_for_walk(self._settings)
        if self._worker.elastic:
            tell_cost_of_several()
        # Batches of all loaders weigh the same, because one of them may be short in one loader and not in another.
        return WalkReading(
            joint.several.iterables,
            WalkedLoaders(joint, self._strategy.host.get("utilities.combined_loader", "CombinedLoader")),
            batch_size=sum(loader.batch_size or 1 for loader in joint.loaders),
            num_samples=lambda batch: None,
            elastic=self._worker.elastic,
        )

    def _wrap(self, dataloader: DataLoader[Any] | JointLoader, reading: Reading) -> ElasticLoader:
        worker, global_batch = self._worker, self._global_batch(dataloader)
        loader: ElasticLoader
        if isinstance(reading, StreamReading):
            loader = StreamLoader(reading, self._session, self._trainer, log=worker.log)
        else:
            make: Callable[..., ElasticLoader] = partial(ElasticLoader, dataloader, reading)
            if isinstance(reading, IndexedReading):
                make = partial(IndexedLoader, reading)
            loader = make(
                self._session,
                self._trainer,
                log=worker.log,
                # A world of one that never changes gets the batches of an ordinary loader, a last single sample too.
                min_share=sharding.MIN_SHARE if worker.elastic else 1,
                global_batch=global_batch,
                seeded=self._settings.deterministic,
            )
        if self.autoscaler is not None and not self.in_trial:
            self.autoscaler.follow(loader.dealer, accumulation=int(self._trainer.accumulate_grad_batches))
        if global_batch is not None:
            self._set_up_global_step(loader)
        if worker.elastic or worker.audit or self.follows_samples or self.checkpoints is not None:
            loader.on_boundary = self._between_steps
        loader.on_members = self._plan_schedules
        if worker.elastic:
            loader.on_dealt = self._tell
        loader.on_over = self.skip
        if self.checkpoints is not None:
            loader.on_resume = self.checkpoints.go_on
            loader.on_begin = self.checkpoints.boundary
            loader.on_plan = self.checkpoints.restore_random_state
        if self.train_loader is not None:  # Lightning reloads
            loader.succeed(self.train_loader)
        if self._is_of_other_world:
            self._interval = hooks.put_interval_aside(self._trainer)
        if self.schedules is not None and self.follows_samples:
            loader.follows_samples = True
            loader.is_limited = partial(self.schedules.is_limited, loader)
            if self.train_loader is None:
                loader.planned_steps = partial(self.schedules.planned_steps, loader)
        self.train_loader = loader
        return loader

    @property
    def _is_of_other_world(self) -> bool:
        """Whether the settings may have been made for other workers than those of now."""
        session = self._session
        grown = session.newcomer or session.completed_in.generation > 1
        return self._worker.elastic and (grown or self._strategy.continues)

    def _global_batch(self, dataloader: DataLoader[Any] | JointLoader) -> GlobalBatch | None:
        size = self._settings.global_batch_size
        if size is None:
            return None
        if isinstance(dataloader, JointLoader):
            raise UnsupportedError(
                "global_batch_size says how many samples of one DataLoader an update has, but there are several. Leave "
                "it out, or combine the data sets, for example with torch.utils.data.StackDataset. "
                f"Received: {len(dataloader.loaders)} training DataLoaders"
            )
        batch_size = batch_size_of(dataloader)
        return global_batches.global_batch(size, batch_size, deterministic=self._settings.deterministic)

    def _put_interval_back(self) -> None:
        interval, self._interval = self._interval, None
        if interval is not None:
            hooks.set_interval(self._trainer, interval)

    def settle_length(self) -> None:
        """Lightning has set up the training loader: tell it if nobody knows how many batches there are."""
        self._put_interval_back()
        loader = self.train_loader
        if loader is None or not loader.is_endless:
            return
        if hooks.validates_in_fractions(self._trainer):
            raise UsageError(
                "val_check_interval is a fraction of an epoch, and the training data are a stream of unknown length. "
                "Give the number of batches between two validations, or a time. "
                f"Received: val_check_interval={self._trainer.val_check_interval}"
            )
        hooks.set_num_batches(self._trainer, math.inf)

    def _set_up_global_step(self, loader: ElasticLoader) -> None:
        if self._settings.deterministic and self._deterministic_reducer is None:
            self._deterministic_reducer = DeterministicReducer(self._session, self._trainer.lightning_module)
            self._deterministic_reducer.decides = self._rates.own
        self.global_step = GlobalStep(
            self._trainer,
            self._session,
            loader,
            reducer=lambda: self.reducer,
            deterministic=self._deterministic_reducer,
        )

    def _forget_train_loader(self) -> None:
        if self.train_loader is not None:
            self.train_loader.close()
            self.train_loader = None
        hooks.forget_loaders(self._trainer)

    def _tell(self) -> None:
        """The samples of a step have been dealt."""
        self._tell_of_workers()
        if not self._has_told_of_interval and (interval := hooks.cut_interval(self._trainer)) is not None:
            self._has_told_of_interval = True
            self._tell_of_interval(interval)

    def _tell_of_interval(self, interval: int) -> None:
        if self._session.rank == 0:
            logger.warning(
                "with %d workers, an epoch has fewer batches than val_check_interval=%d, so validations come at its "
                "end. Give a fraction of an epoch (val_check_interval=0.5), or count batches across epochs "
                "(check_val_every_n_epoch=None)",
                self._session.completed_in.world_size,
                interval,
            )

    def _tell_of_workers(self) -> None:
        """Tell the user's code of workers that joined or left."""
        change = self.workers.look()
        if change is None:
            return
        trainer, module = self._trainer, self._trainer.lightning_module
        for callback in trainer.callbacks:
            hook_of(callback)(trainer, module, change)
        hook_of(module)(change)

    def _plan_schedules(self) -> None:
        if self.schedules is not None and self.follows_samples:
            self.schedules.plan()

    def _between_steps(self) -> None:
        if self._worker.audit:
            self._log_weights()
        if self.schedules is not None:
            self.schedules.between_batches()
        if self._timed_validation is not None:
            self._timed_validation.begin_batch()
        if self.checkpoints is not None:
            self.checkpoints.boundary()

    # ------------------------------------------------------------ steps and gradients

    def weights(self, view: View, *, of_batch: bool = False) -> Sequence[float]:
        """Weight of each member's gradient, or of the current batch's part of it."""
        if self.train_loader is None:
            return [1.0 / view.world_size] * view.world_size
        return self.train_loader.weights(view, of_batch=of_batch)

    def end_manual_step(self) -> None:
        """Manual optimization: a training step ends, in which every worker reduces, even without gradients."""
        reducer, loader = self.reducer, self.train_loader
        if reducer is not None and loader is not None and loader.progress.uncommitted:
            loader.dealer.commit(self._reduced(reducer.skip) or self._session.completed_in)

    def result_of(self, closure: Callable[[], Any], optimizer: Optimizer) -> Any:
        """What the closure of an update returns, or None as for a skipped batch if no worker has gradients.

        Lightning's precision plugins do not scale gradients then.

        Raises:
            UsageError: In manual optimization, a backward pass of the user's own has computed gradients for this worker
                alone.
        """
        result = closure()
        self._check_reduced(optimizer)
        has_gradients = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        return result if has_gradients else None

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An optimizer makes a step without Lightning's wrapper, which passes a closure; see `result_of`."""
        if not self.in_trial and not any((*args[1:], kwargs.get("closure"))):
            self._check_reduced(optimizer)

    def _check_reduced(self, optimizer: Optimizer) -> None:
        reducer = self.reducer
        if reducer is None or not reducer.local:
            return
        if any(reducer.is_local(p) for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                "an optimizer is about to make an update by gradients that only this worker has computed, so the "
                "workers' weights would differ. Call self.manual_backward(loss) instead of loss.backward(), and in the "
                "last pass without sync_grad=False: it reduces them over the workers. "
                f"Received: {type(optimizer).__name__}"
            )

    def before_backward(self, loss: Tensor) -> None:
        """Begin to reduce gradients as they become ready, if this is the last pass of an update.

        Args:
            loss: As it is before a precision plugin scales it.
        """
        self._loss = loss.detach() if loss.numel() == 1 else None
        if self.global_step is not None:
            self.global_step.before_backward()
        elif self._strategy.syncs_gradients and self.reducer is not None:
            repetition = self.repetition
            self.reducer.before_backward(overlap=repetition is None or not repetition.in_backward)

    def _finish_backward(self) -> bool:
        """Finish the reduction: gradients and the samples in them are then the same in all workers.

        Returns:
            Whether this was a backward pass that Lightning's hooks are to know of.
        """
        step, loader, loss = self.global_step, self.train_loader, self._loss
        if step is not None:
            step.end_pass(loss)
            if step.in_extra_pass:
                return False
        if not self._strategy.syncs_gradients:
            return True
        contributors = self._session.completed_in
        if step is not None:
            contributors = self._reduced(step.finish) or contributors
            loss = step.loss
        elif self.reducer is not None:
            contributors = self._reduced(self.reducer.after_backward) or contributors
        if loader is not None:
            if self.compensation is not None:
                self.compensation.commit(contributors, loader)
            loader.dealer.commit(contributors, float(loss) if self._logs and loss is not None else None)
        return True

    def _reduced(self, finish: Callable[[], View | None]) -> View | None:
        """Finish a reduction, and read in its flags what others have to report."""
        reducer = self._deterministic_reducer or self.reducer
        requests, timed = self.requests, self._timed_validation
        if reducer is None or requests is None:
            return finish()
        loader = self.train_loader
        if loader is not None:
            reducer.finds = loader.finds()
        reducer.wants_stop = float(requests.pending) + (0.5 if timed is not None and timed.due else 0.0)
        with leaving_cleanly():
            contributors = finish()
        if contributors is None:
            return None  # there was nothing to reduce
        if loader is not None:
            loader.heard(reducer.num_finds)
        self._rates.take(reducer.decided)
        if self.repetition is not None:
            self.repetition.check(contributors)
            self.repetition.end_update()
        requests.hear(reducer.num_stops)
        if timed is not None:
            timed.settle(due=reducer.num_stops % 1 > 0)
        return contributors

    def _begins_update(self) -> bool:
        return self.train_loader is not None and len(self.train_loader.progress.uncommitted) == 1

    def _filled(self) -> Any:
        return None if self.train_loader is None else self.train_loader.filled()

    def _select(self, index: int) -> None:
        if self.train_loader is not None:
            self.train_loader.select(index)

    def _go_back(self, why: str) -> None:
        """A step is about to be repeated."""
        if self.reducer is not None:
            self.reducer.cancel()
        loader = self.train_loader
        if loader is not None:
            logger.info("%s: making the step again", why)
            self._worker.log.write(
                "repeated",
                step=loader.dealer.num_updates + 1,
                epoch=loader.progress.epoch,
                generation=self._session.completed_in.generation,
            )

    # ------------------------------------------------------------ audit

    def _log_weights(self) -> None:
        """Note a hash of the weights after each update."""
        loader = self.train_loader
        if loader is not None:
            state = self._trainer.lightning_module.state_dict().values()
            loader.dealer.log_weights(as_bytes(value).numpy() for value in state if isinstance(value, Tensor))


def nothing(device: torch.device) -> Tensor:
    """The loss of a skipped batch, of which no parameter has a gradient."""
    return torch.zeros((), device=device, requires_grad=True)


@contextmanager
def dropping_gradients(module: Module) -> Iterator[None]:
    """Within this context, backward passes add zeros to the gradients, whatever they compute, NaN too."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    handles = [parameter.register_hook(torch.zeros_like) for parameter in trained]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
