"""`ElasticFlowStrategy`: Lightning's strategy for a world whose size changes.

It only translates. Membership and recovery are `ef_common.session`'s, gradients `ef_common.collectives`', samples
`train_loader`'s and `evaluation_loader`'s.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ef_common.collectives import torch_operations as operations
from ef_common.collectives.gradients.deterministic import DeterministicReducer
from ef_common.collectives.gradients.reducer import GradientReducer
from ef_common.collectives.torch_codec import as_bytes
from ef_common.collectives.torch_default_group import DefaultGroup, install, remove
from ef_common.core import sharding
from ef_common.core.compensation import Compensation, Rule
from ef_common.core.sharding import GlobalBatch
from ef_common.core.view import View
from ef_common.data import global_batches
from ef_common.data.checkpointer import Checkpointing
from ef_common.data.claiming import Claiming, place_of
from ef_common.data.torch_determinism import Determinism
from ef_common.errors import UnsupportedError, UsageError
from ef_common.events import EventLog
from ef_common.launch.failing import is_users
from ef_common.launch.leaving import leaving_cleanly
from ef_common.launch.process import Worker, is_alone, this_worker
from ef_common.session import Barrier, Session
from ef_common.storage.claims import place_for
from ef_lightning import hooks
from ef_lightning.batch_norm import SyncedBatchNorm
from ef_lightning.checkpoint_io import checkpoint_io_for, give_innermost
from ef_lightning.checkpoints import TrainerCheckpoints
from ef_lightning.checks import (
    FINDERS,
    callbacks_of_one,
    check_optimizers,
    check_sync_batchnorm,
    check_trainer,
    check_trainer_for_global_batch,
)
from ef_lightning.collectives import CollectivesMixin
from ef_lightning.combined_loader import check_joint, combined, joined
from ef_lightning.compensation import TrainerCompensation
from ef_lightning.default_group import Workers
from ef_lightning.evaluation_loader import EvaluationLoader
from ef_lightning.global_batch import GlobalStep
from ef_lightning.host import Host
from ef_lightning.joint_reading import JointLoader, JointReading
from ef_lightning.logged import Logged
from ef_lightning.logs import Logs
from ef_lightning.metrics import MetricSync, leaving_no_trace
from ef_lightning.plain_checkpoint import CHECKPOINT_KEY, restore
from ef_lightning.probe import check_hooks
from ef_lightning.progress import Progress
from ef_lightning.reading import Reading, SampleReading
from ef_lightning.repetition import Repetition
from ef_lightning.requests import Requests
from ef_lightning.schedules import Schedules, check_schedules
from ef_lightning.start import agree_on_trainer
from ef_lightning.state import TrainerState
from ef_lightning.timed_validation import TimedValidation
from ef_lightning.train_loader import ElasticLoader, LoneLoader

logger = logging.getLogger(__name__)

BACKENDS = ("gloo", "nccl", "horovod")


class ElasticMixin(CollectivesMixin):
    """Everything but the base class, which is one of two (see :func:`ef_lightning.registry.strategy_for`).

    Args:
        backend: Data plane: "nccl" sums what is on GPUs with NCCL, if each worker has one of its own, and all else with
            Gloo; "gloo" sums everything with Gloo; "horovod", see `elasticflow horovod build`.
        compensation: How the optimizers' settings follow a global batch that grows and shrinks with the world: a
            :class:`~ef_common.core.compensation.Compensation`, or its rule. A process that is no worker of a job has
            nothing to compensate, unless a reference batch is named.
        schedules: "samples": schedulers that are stepped with updates (`interval="step"`, or by hand) and `max_steps`
            follow the samples, so that a schedule that was made for the workers of the start ends with the training,
            whatever the workers did; see :mod:`ef_common.core.schedule`. "updates": they count updates.
        global_batch_size: Samples of an update, however many workers there are. They share them, each in forward
            passes of the loader's `batch_size` at most. By default each worker has a batch of the loader's.
        deterministic: The weights have the same bits for every number of workers, whatever was lost or joined; with
            `global_batch_size`, a multiple of the loader's `batch_size`.
        checkpoint: A URL for checkpoints that are taken while the training goes on, and that the same command starts
            from (`s3://bucket/run`, `/mnt/shared/run`, …), or a
            :class:`~ef_common.data.checkpointer.Checkpointing`; by default that of `ELASTICFLOW_CHECKPOINT`.
        claims: Where workers claim that they go on without others that are silent: a URL that all reach, of
            etcd (`etcd://host:2379,host:2379/prefix`, see :class:`~ef_common.storage.etcd.Etcd`) or of what checkpoints
            can be kept in; by default that of `ELASTICFLOW_CLAIMS`, else where the checkpoints are.
        evict_stragglers: A worker whose throughput is below 0.8 of the others' for a minute is replaced as soon as a
            newcomer waits for which there is no room (`max_nodes`): that one comes in first, then the slow one ends,
            with status 0. Without it, stragglers are reported only.

    Raises:
        UsageError: Unknown backend or rule, or settings that contradict each other.
    """

    host: Host
    strategy_name = "elasticflow"
    if TYPE_CHECKING:
        model: Any
        lightning_module: Any
        parallel_devices: Any
        optimizers: Any
        _checkpoint_io: Any

    def __init__(
        self,
        backend: str = "nccl",
        *,
        compensation: Compensation | Rule = "auto",
        schedules: str = "samples",
        global_batch_size: int | None = None,
        deterministic: bool = False,
        checkpoint: Checkpointing | str | Path | None = None,
        claims: str | Path | None = None,
        evict_stragglers: bool = False,
        **kwargs: Any,
    ) -> None:
        global_batches.check_size(global_batch_size, deterministic=deterministic)
        if backend not in BACKENDS:
            raise UsageError(f"unknown backend. Expected one of {BACKENDS}. Received: backend={backend!r}")
        super().__init__(**kwargs)
        self.backend = backend
        self.compensation = Compensation.of(compensation)
        self.schedules = check_schedules(schedules)
        self.global_batch_size = global_batch_size
        self.deterministic = deterministic
        self.checkpoint = Checkpointing.of(checkpoint)
        self.claims = None if claims is None else place_for(claims)
        self.evict_stragglers = evict_stragglers
        # Asked for with each batch.
        self._local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("HOROVOD_LOCAL_RANK", "0"))
        self._saved_compensation: dict[str, Any] | None = None
        self._saved_schedules: dict[str, Any] | None = None
        self._bind_to_nothing()

    def _bind_to_nothing(self) -> None:
        """No run is set up, and this process is no worker yet."""
        self._checkpoints: TrainerCheckpoints | None = None
        self._worker: Worker | None = None
        self._trainer: Any = None
        self._reducer: GradientReducer | None = None
        self._global_step: GlobalStep | None = None
        self._deterministic_reducer: DeterministicReducer | None = None
        self._determinism: Determinism | None = None
        self._compensation: TrainerCompensation | None = None
        self._schedules: Schedules | None = None
        self._logs: Logs | None = None
        self._metrics: MetricSync | None = None
        self._logged: Logged | None = None
        self._progress: Progress | None = None
        self._train_loader: ElasticLoader | None = None
        self._evaluation_loaders: list[EvaluationLoader] = []
        self._to_wrap: list[str] = []
        self._first_world_size = 1
        self._sync_gradients = True
        self._claiming: Claiming | None = None
        self._timed_validation: TimedValidation | None = None
        self._requests: Requests | None = None
        self._repetition: Repetition | None = None
        self._default_group: DefaultGroup | None = None
        self._batch_norm: SyncedBatchNorm | None = None
        self._is_last = False
        self._skips = False
        self._sanity_steps: float = 0
        self._stays_one = False
        self._in_trial = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the settings and what Lightning keeps here. It is set up by its own Trainer, maybe elsewhere."""
        cls = type(self)
        unbound = object.__new__(cls)
        cls._bind_to_nothing(unbound)
        return {**super().__getstate__(), **vars(unbound)}  # type: ignore[misc]

    def __repr__(self) -> str:
        """Lightning prints this where it takes the strategy for one of the other class tree."""
        return f"<ElasticFlowStrategy for a Trainer of {self.host.name}>"

    # ------------------------------------------------------------ environment

    @property
    def session(self) -> Session:
        """The worker's session; there is one after `setup_environment`."""
        return self._here.session

    @property
    def _here(self) -> Worker:
        if self._worker is None:
            raise UsageError("the strategy is not set up yet: it has a session once the Trainer runs")
        return self._worker

    @property
    def _log(self) -> EventLog:
        return self._here.log

    @property
    def is_distributed(self) -> bool:
        """Whether there may be others: if not, Lightning ignores `self.log(sync_dist=True)`, and allows for more."""
        if self._worker is None:
            return not is_alone()
        return self._worker.elastic and not self._stays_one

    @property
    def world_size(self) -> int:
        """Size of the world that counts for the next step: membership decides, not the cluster's environment."""
        return 1 if self._worker is None else self._worker.session.completed_in.world_size

    @property
    def global_rank(self) -> int:
        """Rank in the current view."""
        return 0 if self._worker is None else self._worker.session.rank

    @property
    def local_rank(self) -> int:
        """Index of the worker on its node."""
        return self._local_rank

    @property
    def node_rank(self) -> int:
        """Nodes have no fixed rank; the worker's own rank serves."""
        return self.global_rank

    @property
    def root_device(self) -> torch.device:
        """Device of this worker."""
        devices: list[torch.device] = self.parallel_devices or [torch.device("cpu")]
        return devices[0] if len(devices) == 1 else devices[self.local_rank % len(devices)]

    @property
    def checkpoint_io(self) -> Any:
        """Writes the files that callbacks ask for."""
        if self._checkpoint_io is None:
            self._checkpoint_io = checkpoint_io_for(self.host)()
        else:
            give_innermost(self._checkpoint_io, checkpoint_io_for(self.host))
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, value: Any) -> None:
        self._checkpoint_io = value

    @property
    def num_nodes(self) -> int:
        """Lightning's number of nodes means nothing here: membership decides."""
        return 1

    @num_nodes.setter
    def num_nodes(self, value: int) -> None:
        pass

    @property
    def num_processes(self) -> int:
        """Processes that this one would start: none."""
        return 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """World size and rank."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        """The launcher (torchrun, or nothing) has started this process already."""
        self._launcher = None

    def setup_environment(self) -> None:
        """Become a worker of the job, or a world of one."""
        super().setup_environment()  # type: ignore[misc]
        check_hooks(self.lightning_module.trainer, self.host)
        with leaving_cleanly():
            self._worker = this_worker(self.backend)
            if self.evict_stragglers:
                self._worker.session.evict_stragglers()
        self._progress = Progress(self.lightning_module.trainer, self.session)
        self._follow_ranks(self.session.view)
        self.session.on_view = self._follow_ranks
        self._trainer = trainer = self.lightning_module.trainer
        self._stay_one_if_needed(trainer)
        self._set_up_checkpoints(trainer)

    def _take_loaders(self, trainer: Any) -> None:
        """Before the hooks `setup` of the user's, which may ask how many steps there will be."""
        self._first_world_size = self.session.completed_in.world_size
        hooks.keep_samplers(trainer)
        if self._fits(trainer):
            self._set_up_schedules(trainer)
        hooks.combine_loaders(trainer, self._combine)
        hooks.surround_evaluation_steps(trainer, lambda: self._leaving_no_trace(self.padding))

    def _fits(self, trainer: Any) -> bool:
        return bool(trainer.state.fn == self.host.get("trainer.states", "TrainerFn").FITTING)

    def _stay_one_if_needed(self, trainer: Any) -> None:
        """The only worker may use callbacks that nobody could catch up with. A newcomer that has them is refused."""
        session, names = self.session, callbacks_of_one(trainer)
        if self._here.elastic and session.world_size == 1 and not session.newcomer and names:
            logger.warning("no worker can join this one while %s is used", ", ".join(sorted(names)))
            self._stays_one = True

    def _set_up_checkpoints(self, trainer: Any) -> None:
        here, self._skips = self._here, False
        if not self._fits(trainer):
            return
        self._saved_schedules = None  # of another training
        with leaving_cleanly():
            self._skips = here.begin_training()
        hooks.know_best(trainer)
        if trainer.fast_dev_run:
            return  # of a trial nothing is to be left
        settings = Checkpointing.of(self.checkpoint, default=here.checkpoint)
        if settings is not None:
            settings = settings.of_training(next(here.trainings))
        place = place_of(self.claims, here.claims, checkpoints=settings, elastic=here.elastic)
        self._claiming = Claiming(place, here.session)
        if settings is not None:
            self._checkpoints = TrainerCheckpoints(
                settings, here.session, trainer, log=here.log, excluded=self._claiming.excluded
            )

    def _follow_ranks(self, view: View) -> None:
        self.host.set_rank(self.session.rank)
        if self._logs is not None:
            self._logs.follow_ranks()
        if self._progress is not None:
            self._progress.follow_ranks()

    # ------------------------------------------------------------ set-up and teardown

    def setup(self, trainer: Any) -> None:
        """Prepare model and optimizers, and make them equal in all workers."""
        if self._skips:
            self._skip_training()
        changes = self._here.elastic and not self._stays_one
        check_trainer(trainer, self.host, elastic=changes, saved=self._checkpoints is not None)
        fitting = self._fits(trainer)
        self._load_schedules()
        self._logs = Logs(trainer, self.session, self.host)
        self._logs.attach()
        super().setup(trainer)  # type: ignore[misc]
        self._metrics = MetricSync(self.session)
        self._metrics.connect(self.lightning_module)
        if self._here.elastic:
            self._logged = Logged(
                trainer,
                self.host,
                self.session,
                metrics=self._metrics,
                gather=self._gather_in_view,
                weight=self._weight_of_batch,
            )
            self._logged.attach()
        if self._here.elastic and not self.session.newcomer:
            self._agree_on_start(trainer)
        self._heed_notices(trainer, fitting)
        if not fitting:
            return
        if self.global_batch_size is not None:
            check_trainer_for_global_batch(trainer, self.global_batch_size, self.session.world_size)
        if self.deterministic:
            self._determinism = Determinism()
        if self._here.elastic:
            check_optimizers(self.optimizers)
            self._reducer = GradientReducer(self.session, self.lightning_module, weights=self._weights)
            if not self.deterministic:
                self._reducer.attach()
            self._requests = Requests(
                trainer,
                self.session,
                gather=self._gather,
                max_steps=lambda: self.max_steps,
                set_max_steps=self._set_max_steps,
            )
            interval = hooks.validation_interval(trainer)
            if interval is not None:
                self._timed_validation = TimedValidation(trainer, self.session, interval_s=interval)
            check_sync_batchnorm(trainer, global_batch_size=self.global_batch_size)
            self._set_up_repetition(trainer)
        self._set_up_compensation(trainer)
        checkpoints = self._checkpoints
        claiming = self._claiming or Claiming(None, self.session)
        if not self.session.newcomer:
            claiming.begin()
        state = TrainerState(
            trainer,
            self.host,
            loader=lambda: self._train_loader,
            reducer=self._reducer,
            compensator=None if self._compensation is None else self._compensation.compensator,
            schedules=self._schedules,
            checkpoints=checkpoints,
            claiming=claiming,
            requests=self._requests,
            adopted=lambda: None if self._logged is None else self._logged.adopt(),
        )
        if checkpoints is not None:
            checkpoints.attach(state.checkpoint, resume=state.resume, loader=lambda: self._train_loader)
        self._prepare_last_leave(trainer)
        self.session.state = state
        if self.session.newcomer:
            self._sanity_steps = trainer.num_sanity_val_steps
            trainer.num_sanity_val_steps = 0  # the others have done it
        if self._stays_one and callbacks_of_one(trainer) & FINDERS:
            self._begin_trial(trainer)

    def _skip_training(self) -> None:
        """The others have ended this training: the `fit` ends, too, with the result of it if that was saved."""
        has_result = self._checkpoints is not None and self._checkpoints.load_result()
        self.session.skip_training(has_result=has_result)
        if self._claiming is not None:
            self._claiming.skip()
        if not has_result:
            hooks.do_without_best(self._trainer)
        raise hooks.end_of_run(self.host)

    def _set_up_default_group(self) -> None:
        if self._here.elastic and self._default_group is None:
            self._default_group = install(Workers(self))
            hooks.exchange_no_sigterm(self._trainer)

    def _set_up_repetition(self, trainer: Any) -> None:
        """Steps can be made again where Lightning makes them, and each worker makes the same passes."""
        if self.global_batch_size is None and self.lightning_module.automatic_optimization:
            self._repetition = repetition = Repetition(trainer, self.session, on_repeat=self._go_back)
            repetition.attach()
            self._batch_norm = SyncedBatchNorm(
                self.lightning_module,
                every=hooks.layer_sync(self) is not None,
                gather=self.gather_statistics,
                in_step=lambda: repetition.in_pass,
                counts=lambda: not self.padding,
            )
            self._batch_norm.attach()

    def _go_back(self) -> None:
        """A step is about to be made again."""
        if self._reducer is not None:
            self._reducer.cancel()
        loader, session = self._train_loader, self.session
        if loader is not None:
            logger.info("a worker was lost in a step that had its values: making the step again")
            self._log.write(
                "repeated",
                step=loader.dealer.num_updates + 1,
                epoch=loader.progress.epoch,
                generation=session.completed_in.generation,
            )

    def _begin_trial(self, trainer: Any) -> None:
        """Until the training itself begins, a callback tries out others, which are none of the job's."""
        self._in_trial = True
        self._forget_train_loader(trainer)

    def _forget_train_loader(self, trainer: Any) -> None:
        if self._train_loader is not None:
            self._train_loader.close()
            self._train_loader = None
        hooks.forget_loaders(trainer)

    def _end_trial(self) -> None:
        if self._in_trial:
            self._in_trial = False
            hooks.forget_loaders(self._trainer)

    def barrier(self, name: str | None = None) -> None:
        """Wait for everybody."""
        if name == "pre_setup":  # the data are prepared, which Lightning guards with a group of its own if there is one
            self._set_up_default_group()
        if name == "run-stage":  # Lightning's first one after the set-up and the callbacks' trials
            self._end_trial()
        super().barrier(name)
        if name == "pre_setup":  # Lightning's first one of all: who has passed it together is known to all
            self._take_loaders(self._trainer)

    def _heed_notices(self, trainer: Any, fitting: bool) -> None:
        notices = self._here.notices
        if fitting:
            notices.start()
        else:
            notices.stop()
        hooks.yield_sigterm(trainer, lambda: notices.active)

    def _prepare_last_leave(self, trainer: Any) -> None:
        """Have the state saved when all leave; if Slurm has told them to, have it start the job again."""
        notices, checkpoints = self._here.notices, self._checkpoints
        requeue = hooks.requeue(trainer, self.host, notices.take, heeded=lambda: notices.active)

        def leave() -> None:
            if checkpoints is not None:
                checkpoints.leave()
            if requeue is not None and requeue.signal in notices.heard:
                self._is_last = True
                with self.session.alone("on_save_checkpoint, or a state_dict()"):
                    requeue.act()

        if checkpoints is not None or (requeue is not None and self._here.elastic):
            notices.save_on_last_leave(leave)

    def _set_up_compensation(self, trainer: Any) -> None:
        changes = self._here.elastic and self.global_batch_size is None
        if not changes and self.compensation.reference_batch_size is None:
            return  # the ratio is 1, for ever
        self._compensation = TrainerCompensation(
            self.compensation,
            trainer,
            self.session,
            log=self._log,
            global_batch_size=self.global_batch_size,
            world_size=self._first_world_size,
        )
        if self._saved_compensation is not None:
            self._compensation.compensator.resume(self._saved_compensation)
        hooks.show_rates(trainer, self.host, self._compensated)

    def _set_up_schedules(self, trainer: Any) -> None:
        if self.schedules != "samples" or self.global_batch_size is not None:
            return  # an update is one update in each world
        self._schedules = Schedules(
            trainer, self.session, world_size=self._first_world_size, loader=lambda: self._train_loader
        )

    def _load_schedules(self) -> None:
        schedules, saved = self._schedules, self._saved_schedules
        if schedules is None or saved is None:
            return
        schedules.load_state(saved)
        self._forget_train_loader(self._trainer)  # a hook `setup` of the user's may have asked for it

    @property
    def _follows_samples(self) -> bool:
        """The world may have another size than the one for which the schedules were made."""
        schedules = self._schedules
        return schedules is not None and (self._here.elastic or schedules.world_size != self.session.world_size)

    @property
    def max_steps(self) -> int:
        """The user's limit, while `trainer.max_steps` says when it is reached in the world of now."""
        return int(self.lightning_module.trainer.max_steps if self._schedules is None else self._schedules.max_steps)

    def _set_max_steps(self, max_steps: int) -> None:
        if self._schedules is None:
            hooks.set_max_steps(self._trainer, max_steps)
        else:
            self._schedules.set_max_steps(max_steps)

    def _compensated(self) -> AbstractContextManager[None]:
        compensation, loader = self._compensation, self._train_loader
        return nullcontext() if compensation is None or loader is None else compensation.shown(loader)

    def model_to_device(self) -> None:
        """Move the model to this worker's device."""
        self.model.to(self.root_device)

    def _agree_on_start(self, trainer: Any) -> None:
        """Rank 0's weights and loggers are everybody's."""
        module = self.lightning_module
        first = operations.FirstRankValues([*module.parameters(), *module.buffers()], self.session)
        with torch.no_grad():
            self.session.run(first)
            if self.session.completed_in.world_size > 1:
                first.apply()
        self._saved_compensation = agree_on_trainer(
            trainer, self.host, self.session, compensation=self._saved_compensation
        )

    def teardown(self) -> None:
        """Let go of the Trainer; the membership lasts as long as the process."""
        ended = self._trainer is not None and self._fits(self._trainer) and not self._trainer.interrupted
        if self._worker is not None and ended:
            self.session.end_training()
        if self._determinism is not None:
            self._determinism.undo()
            self._determinism = None
        self._global_step = None
        reducers = (self._deterministic_reducer, self._reducer)
        for part in (*reducers, self._requests, self._repetition, self._batch_norm, self._logged, self._logs):
            if part is not None:
                part.detach()
        self._deterministic_reducer = self._reducer = None
        self._requests = self._repetition = self._batch_norm = self._logged = self._logs = None
        if self._compensation is not None:
            hooks.hide_rates(self._trainer, self.host)
            self._saved_compensation = self._compensation.compensator.state()  # for `save_checkpoint`, and another fit
            self._compensation = None
        if self._schedules is not None:
            self._saved_schedules = self._schedules.state()
            self._schedules.detach()
            self._schedules = None
        self._timed_validation, self._stays_one, self._in_trial = None, False, False
        if self._default_group is not None:
            remove(self._default_group)
            self._default_group = None
        if self._metrics is not None:
            self._metrics.disconnect()
            self._metrics = None
        if self._progress is not None:
            self._progress.end()
            self._progress = None
        if self._checkpoints is not None:
            self._checkpoints.stop()
            self._checkpoints = None
        if self._worker is not None:
            self.session.on_last_leave = None
        if self._train_loader is not None:
            self._train_loader.close()
            self._train_loader = None
        self._close_evaluation_loaders()
        self._to_wrap = []
        if self._trainer is not None:
            hooks.release_loaders(self._trainer)
            hooks.leave_evaluation_steps(self._trainer)
            hooks.leave_sigterm(self._trainer)
        self._trainer = None
        if self._worker is not None:
            self.session.state = None
        super().teardown()  # type: ignore[misc]

    def on_train_start(self) -> None:
        """Have everything set up before the first boundary, where newcomers meet the others."""
        self._begin_progress()
        self._connect_metrics()
        if self._in_trial:
            return
        if self.session.newcomer:
            self._trainer.num_sanity_val_steps = self._sanity_steps  # in the next fit it is one of the others
            hooks.set_up_validation(self._trainer)
        hooks.load_loader_state(self._trainer)
        if self._requests is not None:
            self._requests.attach()
        if self._schedules is not None and self._train_loader is not None:
            self._train_loader.begin_training()
            if self._follows_samples:
                self._schedules.begin()
        if self._checkpoints is not None:
            self._checkpoints.begin_loops()

    def on_validation_start(self) -> None:
        """Metrics may have been made since the set-up."""
        if not self._trainer.sanity_checking:
            self._begin_progress()
        self._connect_metrics()
        if self._logged is not None:
            self._logged.begin_evaluation()

    on_test_start = on_validation_start

    def on_validation_end(self) -> None:
        """Everybody has the result of the evaluation."""
        if self._logged is not None:
            self._logged.end_evaluation()
        if self._requests is not None and not self._trainer.sanity_checking:
            self._requests.settle()
        else:
            self.barrier()

    on_test_end = on_validation_end
    on_predict_end = on_validation_end

    def on_predict_start(self) -> None:
        """A prediction begins."""
        self._begin_progress()

    def _begin_progress(self) -> None:
        if self._progress is not None:
            self._progress.begin()

    def _connect_metrics(self) -> None:
        if self._metrics is not None:
            self._metrics.connect(self.lightning_module)

    def on_train_end(self) -> None:
        """Everybody has come to the end of this training."""
        if self._in_trial:
            return
        with leaving_cleanly():
            if self._train_loader is not None:
                self._train_loader.finish()
            self._log_weights()
            self.session.run(Barrier())
        if self._checkpoints is not None:
            self._checkpoints.finish()
        self._here.notices.stop()

    def on_exception(self, exception: BaseException) -> None:
        """Note why this training ends, and tell the others.

        Where there are none, the program may catch the exception and train again, so newcomers are told at its end.
        """
        super().on_exception(exception)  # type: ignore[misc]
        if self._worker is None or isinstance(exception, SystemExit):
            return
        self._log.write("fault", what=type(exception).__name__, message=str(exception)[:500])
        session = self.session
        if session.newcomer or session.world_size > 1 or not is_users(exception):
            self._worker.failing.tell(exception)
        else:
            self._worker.failing.postpone(exception)

    # ------------------------------------------------------------ data

    def _combine(self, loaders: Any, stage: str) -> Any:
        """A loop is being set up with these loaders of the user's, which it will have processed one by one."""
        if stage != "train":
            self._close_evaluation_loaders()
        taken = combined(loaders, "max_size_cycle" if stage == "train" else "sequential", self.host)
        if stage == "train" and len(taken.flattened) > 1:
            taken = joined(taken, self.host)
        self._to_wrap = [stage] * len(taken.flattened)
        return taken

    def process_dataloader(self, dataloader: object) -> object:
        """Wrap the loaders of a loop that is being set up. Any other is the caller's own, and left as it is."""
        if not self._to_wrap or self._in_trial:
            return dataloader
        stage = self._to_wrap.pop()
        if isinstance(dataloader, (list, tuple, dict)) and not dataloader:
            return dataloader  # to Lightning, that is a loader without batches
        if isinstance(dataloader, JointLoader):
            check_joint(dataloader, self.host)
            if self._trainer.overfit_batches > 0:
                hooks.stop_shuffling(dataloader.several, self.host)
            for loader in dataloader.loaders:
                self._checked(loader, stage)
            return self._wrap_train_loader(dataloader, JointReading(dataloader))
        loader = self._checked(dataloader, stage)
        if stage == "train":
            return self._wrap_train_loader(loader, SampleReading(loader, seeded=self.deterministic))
        return self._wrap_evaluation_loader(loader, stage)

    def _checked(self, dataloader: object, stage: str) -> DataLoader[Any]:
        if not isinstance(dataloader, DataLoader):
            raise UnsupportedError(
                "only a torch DataLoader (or a subclass) can be dealt to a changing number of workers. "
                f"Received: {type(dataloader).__module__}.{type(dataloader).__qualname__}"
            )
        hooks.advise_on_workers(self._trainer, self.host, dataloader, stage=stage)
        return dataloader

    def _wrap_train_loader(self, dataloader: DataLoader[Any] | JointLoader, reading: Reading) -> ElasticLoader:
        global_batch = self._global_batch(dataloader)
        is_plain = not (
            global_batch or self._here.elastic or self._log.enabled or self._checkpoints or self._follows_samples
        )
        kind = LoneLoader if is_plain else ElasticLoader
        # A world of one that never changes gets the batches of an ordinary loader, a last single sample too.
        min_share = sharding.MIN_SHARE if self._here.elastic else 1
        loader = kind(
            dataloader,
            reading,
            self.session,
            self._trainer,
            log=self._log,
            min_share=min_share,
            global_batch=global_batch,
            seeded=self.deterministic,
        )
        if global_batch is not None:
            if self.deterministic and self._deterministic_reducer is None:
                self._deterministic_reducer = DeterministicReducer(self.session, self.lightning_module)
            self._global_step = GlobalStep(
                self._trainer,
                self.session,
                loader,
                reducer=lambda: self._reducer,
                deterministic=self._deterministic_reducer,
            )
        loader.on_boundary = self._between_steps
        loader.on_members = self._plan_schedules
        loader.on_over = self._skip_training
        if self._checkpoints is not None:
            loader.on_resume = self._checkpoints.go_on
            loader.on_begin = self._checkpoints.boundary
            loader.on_plan = self._checkpoints.restore_random_state
        if self._train_loader is not None:  # Lightning reloads
            loader.succeed(self._train_loader)
        elif self._schedules is not None:
            loader.planned_world_size = self._schedules.world_size
        self._train_loader = loader
        return loader

    def _plan_schedules(self) -> None:
        if self._schedules is not None and self._follows_samples:
            self._schedules.plan()

    def _between_steps(self) -> None:
        self._log_weights()
        if self._timed_validation is not None:
            self._timed_validation.begin_batch()
        if self._checkpoints is not None:
            self._checkpoints.boundary()

    def _global_batch(self, dataloader: DataLoader[Any] | JointLoader) -> GlobalBatch | None:
        if self.global_batch_size is None:
            return None
        if isinstance(dataloader, JointLoader):
            raise UnsupportedError(
                "global_batch_size says how many samples of one DataLoader an update has, but there are several. Leave "
                "it out, or combine the data sets, for example with torch.utils.data.StackDataset. "
                f"Received: {len(dataloader.loaders)} training DataLoaders"
            )
        # A loader without a batch size is refused where it is wrapped.
        batch_size = dataloader.batch_size or self.global_batch_size
        return global_batches.global_batch(self.global_batch_size, batch_size, deterministic=self.deterministic)

    def _wrap_evaluation_loader(self, dataloader: DataLoader[Any], stage: str) -> EvaluationLoader:
        loader = EvaluationLoader(
            dataloader,
            self.session,
            self._trainer,
            log=self._log,
            stage=stage,
            index=len(self._evaluation_loaders),
            contributions=lambda: None if self._logged is None else self._logged.evaluation,
        )
        self._evaluation_loaders.append(loader)
        return loader

    def _close_evaluation_loaders(self) -> None:
        for loader in self._evaluation_loaders:
            loader.close()
        self._evaluation_loaders = []

    # ------------------------------------------------------------ steps and gradients

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """A step; every worker reduces gradients in it, also one that has none."""
        step = self._global_step
        if step is not None and not step.in_extra_pass:
            step.begin(args[1:])
        if self._in_trial or (not self._here.elastic and step is None):
            return super().training_step(*args, **kwargs)  # type: ignore[misc]
        loader = self._train_loader
        with self._leaving_no_trace(loader is not None and loader.padding):
            output = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if not self.lightning_module.automatic_optimization:
            if self._reducer is not None and loader is not None and loader.progress.uncommitted:
                loader.commit(self._reduced(self._reducer.skip) or self.session.completed_in)
        elif output is None:
            return _nothing(self.root_device)
        return output

    @property
    def _in_part(self) -> bool:
        return self._global_step is not None and self._global_step.in_extra_pass

    @property
    def padding(self) -> bool:
        """The batch at hand only keeps step with the other workers: its samples count elsewhere.

        It does not count in gradients, in what `self.log` reduces, and in torchmetrics objects of the module. Code that
        collects what it sees by itself may ask.
        """
        if self._trainer is None:
            return False
        if self._trainer.training:
            return self._train_loader is not None and self._train_loader.padding
        return any(loader.padding for loader in self._evaluation_loaders)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """A step on a batch of this worker's, or on one that only keeps step with the others."""
        if self.padding:
            hooks.set_zero_batch_size(self._trainer)
        return super().validation_step(*args, **kwargs)  # type: ignore[misc]

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The same."""
        if self.padding:
            hooks.set_zero_batch_size(self._trainer)
        return super().test_step(*args, **kwargs)  # type: ignore[misc]

    def _leaving_no_trace(self, padding: bool) -> AbstractContextManager[None]:
        return leaving_no_trace(self._trainer) if padding else nullcontext()

    def _want_even_shares(self) -> None:
        if self._train_loader is not None:
            self._train_loader.even_shares()

    def _weights(self, view: View) -> Sequence[float]:
        if self._train_loader is None:
            return [1.0 / view.world_size] * view.world_size
        return self._train_loader.weights(view)

    def _weight_of_batch(self) -> float:
        view = self.session.completed_in
        return float(self._weights(view)[self._rank_in(view)])

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate locally: Lightning calls this around all backward passes but the last of an accumulation."""
        before, self._sync_gradients = self._sync_gradients, False
        try:
            yield
        finally:
            self._sync_gradients = before

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """A backward pass, maybe of a part of the batch."""
        if self._global_step is not None:
            closure_loss = self._global_step.weigh(closure_loss, optimizer)
        loss: Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)  # type: ignore[misc]
        return loss

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Begin to reduce gradients as they become ready."""
        if self._global_step is not None:
            self._global_step.before_backward()
        elif self._sync_gradients and self._reducer is not None:
            repetition = self._repetition
            self._reducer.before_backward(overlap=repetition is None or not repetition.in_backward)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Finish the reduction: the gradients are everybody's, and so are the samples in them."""
        step = self._global_step
        if step is not None:
            step.end_pass(closure_loss)
            if step.in_extra_pass:
                return
        if not self._sync_gradients:
            return
        worker, loader = self._here, self._train_loader
        contributors = worker.session.completed_in
        if step is not None:
            contributors = self._reduced(step.finish) or contributors
            closure_loss = step.loss
        elif self._reducer is not None:
            contributors = self._reduced(self._reducer.after_backward) or contributors
        if loader is not None:
            if self._compensation is not None:
                self._compensation.commit(contributors, loader)
            loader.commit(contributors, float(closure_loss.detach()) if worker.log.enabled else None)

    def _reduced(self, finish: Callable[[], View | None]) -> View | None:
        """Finish a reduction, and hear in its flags what others have to tell."""
        reducer = self._deterministic_reducer or self._reducer
        requests, timed = self._requests, self._timed_validation
        if reducer is None or requests is None:
            return finish()
        reducer.wants_stop = float(requests.pending) + (0.5 if timed is not None and timed.due else 0.0)
        with leaving_cleanly():
            contributors = finish()
        if contributors is None:
            return None  # there was nothing to reduce
        if self._repetition is not None:
            self._repetition.check(contributors)
            self._repetition.end_update()
        requests.hear(reducer.num_stops)
        if timed is not None:
            timed.settle(due=reducer.num_stops % 1 > 0)
        return contributors

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """The local update, with settings that suit the samples in it."""
        update = super().optimizer_step  # type: ignore[misc]
        if self._compensation is None or self._in_trial:
            return update(optimizer, closure, model, **kwargs)
        return self._compensation.step(update, optimizer, closure, model, **kwargs)

    # ------------------------------------------------------------ checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Rank 0 writes; if it is lost before the others know that it has, the next one does."""
        if self._worker is not None and self.session.newcomer:
            return
        state = hooks.move_loader_state_out(checkpoint)
        compensation = self._saved_compensation
        if self._compensation is not None:
            compensation = self._compensation.compensator.state()
        if state is not None:
            schedules = self._saved_schedules if self._schedules is None else self._schedules.state()
            checkpoint[CHECKPOINT_KEY] = {**state, "compensation": compensation, "schedules": schedules}
        if self._worker is None or self._is_last:
            super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
            return
        done = False
        while not done:
            writer = self.session.completed_in.ids[0]
            if writer == self.session.worker.id:
                self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            self.barrier()
            done = self._alone or writer in self.session.completed_in.ids

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a file of ours, or of any other strategy."""
        path = args[0] if args else kwargs.get("checkpoint_path")
        checkpoint = None if self._checkpoints is None else self._checkpoints.load(path)
        if checkpoint is None:
            checkpoint = restore(super().load_checkpoint(*args, **kwargs))  # type: ignore[misc]
        state = checkpoint.pop(CHECKPOINT_KEY, None)
        if state is not None:
            for name in ("running", "random"):
                state.pop(name, None)
            self._saved_compensation = state.pop("compensation", None)
            self._saved_schedules = state.pop("schedules", None)
            hooks.move_loader_state_in(checkpoint, state)
        return checkpoint

    # ------------------------------------------------------------ audit

    def _log_weights(self) -> None:
        """In audit mode, note a hash of the weights after each update, once it is sure to be everybody's."""
        loader = self._train_loader
        # Between accumulated batches, buffers differ until the next reduction, as they do under DDP.
        if self._here.audit and loader is not None and loader.dealer.num_updates and not loader.progress.uncommitted:
            digest = hashlib.blake2b(digest_size=16)
            for tensor in self.lightning_module.state_dict().values():
                if isinstance(tensor, Tensor):
                    digest.update(as_bytes(tensor).numpy().tobytes())
            record = {"step": loader.dealer.num_updates, "hash": digest.hexdigest()}
            self.session.when_confirmed(lambda: self._log.write("weights", **record))


def _nothing(device: torch.device) -> Tensor:
    """The loss of a batch that is skipped: no parameter has a gradient of it."""
    return torch.zeros((), device=device, requires_grad=True)
