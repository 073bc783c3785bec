"""`ElasticFlowStrategy`: Lightning's strategy for a world whose size changes.

It only translates. `ef_common.session` handles membership and recovery, `ef_common.collectives` gradients, and
`train_loader` and `evaluation_loader` samples. The state of a run of the Trainer, and of a training, is in `run` and
`fit`: objects that live as long as these.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ef_common.core.autoscale import Autoscale
from ef_common.core.compensation import Compensation, Rule
from ef_common.core.view import View
from ef_common.data import global_batches
from ef_common.data.checkpointer import Checkpointing
from ef_common.data.settings import ElasticSettings
from ef_common.errors import UsageError
from ef_common.launch.failing import ends_in_order
from ef_common.launch.leaving import leaving_cleanly
from ef_common.launch.process import Worker, this_worker
from ef_common.session import Session
from ef_lightning import announcements, hooks
from ef_lightning.checkpoint_io import checkpoint_io_for, give_innermost
from ef_lightning.checks import check_trainer
from ef_lightning.collectives import CollectivesMixin
from ef_lightning.fit import Fit, dropping_gradients, nothing
from ef_lightning.host import LightningHost
from ef_lightning.plain_checkpoint import BETWEEN_STEPS, CHECKPOINT_KEY, restore
from ef_lightning.probe import check_hooks
from ef_lightning.rate_functions import Factors, factors_of
from ef_lightning.repetition import Repetition
from ef_lightning.trainer_run import Run

logger = logging.getLogger(__name__)

BACKENDS = ("gloo", "nccl", "horovod")


class ElasticMixin(CollectivesMixin):
    """Lightning's strategy for a changing set of workers. Its base class is that of the Lightning in use.

    See :func:`ef_lightning.strategy_for`.

    :class:`~ef_common.data.settings.ElasticSettings` describes the settings that all frameworks share in more detail.

    Args:
        backend: Library that moves gradients. "nccl" uses NCCL for tensors on GPUs if each worker has a GPU of its own,
            and Gloo for everything else. "gloo" uses Gloo for everything. "horovod" uses the Horovod that
            `elasticflow horovod build` installs.
        compensation: How the optimizer's settings follow a global batch that grows and shrinks with the number of
            workers.
        schedules: What schedulers that are stepped with updates (`interval="step"`, or by hand) and `max_steps` count.
            "samples": a schedule that was made for the workers of the start ends with the training, however many
            workers there were on the way; see :mod:`ef_common.core.schedule`. "updates": they count updates.
        global_batch_size: Samples of an update, which the workers share, each in forward passes of at most the loader's
            `batch_size`. By default, each worker has a batch of its own.
        deterministic: The weights have the same bits for every number of workers, whatever was lost or joined. Requires
            `global_batch_size`, which must be a multiple of the loader's `batch_size`.
        checkpoint: A URL for checkpoints, from which the same command resumes, or a `Checkpointing`.
        claims: A URL, for example of etcd, where workers claim to continue without others. The default is the place of
            the checkpoints.
        evict_stragglers: Replace a worker that is much slower than the others, once a spare is ready.
        autoscale: How the job chooses its number of nodes: an `Autoscale`, or its arguments in a dict or a text. The
            default is that of the environment; False leaves the number as it is.
        log_workers: The Trainer's loggers get `world_size`, `samples_per_s`, `pause_s`, `lr_scale` and
            `global_batch_size` at each step that Lightning logs. False leaves the logs as they are in Lightning.

    Raises:
        UsageError: The backend or the rule is unknown, or settings contradict each other.
    """

    host: LightningHost
    strategy_name = "elasticflow"
    if TYPE_CHECKING:
        model: Any
        lightning_module: Any
        parallel_devices: Any
        optimizers: Any
        lr_scheduler_configs: Any
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
        autoscale: Autoscale | dict[str, Any] | str | bool | None = None,
        log_workers: bool = True,
        **kwargs: Any,
    ) -> None:
        global_batches.check_size(global_batch_size, deterministic=deterministic)
        if backend not in BACKENDS:
            raise UsageError(f"unknown backend. Expected one of {BACKENDS}. Received: backend={backend!r}")
        super().__init__(**kwargs)
        self.backend = backend
        self.settings = ElasticSettings.of(
            compensation=compensation,
            schedules=schedules,
            global_batch_size=global_batch_size,
            deterministic=deterministic,
            checkpoint=checkpoint,
            claims=claims,
            evict_stragglers=evict_stragglers,
            autoscale=autoscale,
            log_workers=log_workers,
        )
        # Asked for with each batch.
        self._local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("HOROVOD_LOCAL_RANK", "0"))
        self._saved: dict[str, Any] = {}  # of a checkpoint, or of another fit
        self._bind_to_nothing()

    def _bind_to_nothing(self) -> None:
        """No run is set up, and this process is no worker yet."""
        self._worker: Worker | None = None
        self._trainer: Any = None
        self._run: Run | None = None
        self._fit: Fit | None = None  # that of the run
        self.syncs_gradients = True
        self.is_last = False
        self.world_size_at_start = 1  # when the optimizers were made
        self.factors_at_start: Factors = []
        self._shows_world_of_start = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the settings and Lightning's own state. Its own Trainer sets it up, perhaps elsewhere."""
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
        """The worker's session, which exists after `setup_environment`."""
        return self._here.session

    @property
    def continues(self) -> bool:
        """Whether the training that is set up continues from a checkpoint of ElasticFlow's."""
        return bool(self._saved)

    @property
    def _here(self) -> Worker:
        if self._worker is None:
            raise UsageError("the strategy is not set up yet: it has a session once the Trainer runs")
        return self._worker

    @property
    def _running(self) -> Run:
        if self._run is None:
            raise UsageError("the strategy is not set up yet: the Trainer does not run")
        return self._run

    @property
    def is_distributed(self) -> bool:
        """Whether there may be others. If not, Lightning ignores `self.log(sync_dist=True)`, and allows more.

        Outside a run, Lightning's Tuner alone asks, before its own run. In that, its callbacks ask again.
        """
        run = self._run
        return run is not None and self._here.elastic and not run.stays_one

    @property
    def world_size(self) -> int:
        """Size of the world that counts for the next step: membership decides, not the cluster's environment."""
        if self._shows_world_of_start:
            return self.world_size_at_start
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
        """Place of this worker's node in the current view; a newcomer's comes last.

        The first node is one with a local rank 0: that worker alone prepares data if `prepare_data_per_node` is False.
        """
        if self._worker is None:
            return 0
        session = self._worker.session
        if session.newcomer:
            return session.rank
        members = sorted(session.view.members, key=lambda member: member.local_rank > 0)
        nodes = [*dict.fromkeys(member.node for member in members)]
        return nodes.index(session.worker.node) if session.worker.node in nodes else len(nodes)

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
        """Lightning's number of nodes has no meaning here, because membership decides."""
        return 1

    @num_nodes.setter
    def num_nodes(self, value: int) -> None:
        pass

    @property
    def num_processes(self) -> int:
        """The number of processes that this one would start: none."""
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
        trainer = self.lightning_module.trainer
        check_hooks(trainer, self.host)
        announcements.begin(self.host.name)
        with leaving_cleanly():
            self._worker = worker = this_worker(self.backend)
            if self.settings.evict_stragglers:
                worker.session.job.evict_stragglers()
        self.host.set_rank(self.session.rank)
        self._trainer, self._run = trainer, Run(self, worker, trainer)
        self._fit = self._run.fit
        if self._fit is not None:
            self._saved = {}  # of another training
        self.session.on_view = self._follow_ranks

    def _follow_ranks(self, view: View) -> None:
        self.host.set_rank(self.session.rank)
        if self._run is not None:
            self._run.follow_ranks()

    # ------------------------------------------------------------ set-up and teardown

    def setup(self, trainer: Any) -> None:
        """Prepare model and optimizers, and make them equal in all workers."""
        run, fit = self._running, self._fit
        if fit is not None and fit.is_over:
            fit.skip()
        changes = self._here.elastic and not run.stays_one
        check_trainer(trainer, self.host, elastic=changes, saved=fit is not None and fit.checkpoints is not None)
        if fit is not None:
            fit.load_schedules(self._saved.get("schedules"))
        run.attach_loggers()
        super().setup(trainer)  # type: ignore[misc]
        if fit is not None:
            fit.resume_schedules()
        run.set_up()
        self._heed_notices(trainer)
        if fit is not None:
            fit.set_up(self._saved.get("compensation"), self._saved.get("autoscale"))

    def setup_optimizers(self, trainer: Any) -> None:
        """Make optimizers and schedulers; the user's code may ask for the number of workers."""
        self.world_size_at_start = self.world_size
        super().setup_optimizers(trainer)  # type: ignore[misc]
        schedulers = [config.scheduler for config in self.lr_scheduler_configs] if self._here.elastic else []
        self.factors_at_start = factors_of(schedulers)

    @contextmanager
    def showing_world_of_start(self) -> Iterator[None]:
        """Within this context, the number of workers is the one for which the members' optimizers were made."""
        self._shows_world_of_start = True
        try:
            yield
        finally:
            self._shows_world_of_start = False

    def _heed_notices(self, trainer: Any) -> None:
        notices = self._here.notices
        if self._fit is not None:
            notices.start()
        else:
            notices.stop()
        hooks.yield_sigterm(trainer, lambda: notices.active)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all workers."""
        run = self._run
        if run is not None and name == "pre_setup":
            run.set_up_default_group()  # the data are prepared, which Lightning guards with a group, if there is one
        if run is not None and run.fit is not None and name == "run-stage":
            run.fit.end_trial()  # Lightning's first one after the set-up and the callbacks' trials
        super().barrier(name)
        if self._fit is not None and self._fit.requests is not None and name == "run-stage":
            self._fit.requests.attach()
        if run is not None and name == "pre_setup":  # the first one of all: who has passed it together is known to all
            run.take_loaders()

    @property
    def max_steps(self) -> int:
        """The user's limit, while `trainer.max_steps` says when it is reached in the current world."""
        return int(self.lightning_module.trainer.max_steps) if self._fit is None else self._fit.max_steps

    def model_to_device(self) -> None:
        """Move the model to this worker's device."""
        self.model.to(self.root_device)

    def teardown(self) -> None:
        """Release the Trainer; the membership lasts as long as the process."""
        run, fit = self._run, self._fit
        if fit is not None and not self._trainer.interrupted:
            self.session.trainings.end()
        if fit is not None:
            self._saved |= {name: state for name, state in fit.saved().items() if state is not None}
        if run is not None:
            run.end()
        self._trainer = self._run = self._fit = None
        super().teardown()  # type: ignore[misc]

    def on_train_start(self) -> None:
        """Set everything up before the first boundary, where newcomers meet the others."""
        self._running.connect_metrics()
        if self._fit is not None:
            self._fit.begin()

    def on_validation_start(self) -> None:
        """A validation begins."""
        self._running.begin_evaluation()

    on_test_start = on_validation_start

    def on_validation_end(self) -> None:
        """All members have the result of the evaluation."""
        self._running.end_evaluation()

    on_test_end = on_validation_end
    on_predict_end = on_validation_end

    def on_train_end(self) -> None:
        """All members have reached the end of this training."""
        if self._fit is not None:
            self._fit.complete()

    def on_exception(self, exception: BaseException) -> None:
        """Record why this training ends, and tell the others."""
        super().on_exception(exception)  # type: ignore[misc]
        if self._worker is None or ends_in_order(exception):
            return
        self._here.log.write("fault", what=type(exception).__name__, message=str(exception)[:500])
        self._worker.failing.tell_if_heard(exception)

    # ------------------------------------------------------------ data

    def process_dataloader(self, dataloader: object) -> object:
        """Wrap the loaders of a loop that is being set up."""
        return dataloader if self._run is None else self._run.wrap(dataloader)

    @property
    def padding(self) -> bool:
        """Whether the current batch is padding, which keeps step with the others; its samples count elsewhere.

        It does not count in gradients, in what `self.log` reduces, and in torchmetrics objects of the module. Code that
        collects what it sees by itself may ask.
        """
        return self._run is not None and self._run.padding

    def values_adopted(self) -> None:
        """Lightning's dicts of metrics have come from elsewhere."""
        if self._run is not None and self._run.logged is not None:
            self._run.logged.adopt()

    # ------------------------------------------------------------ steps and gradients

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step; every worker reduces gradients in it, even one that has none."""
        self._begin_step()
        fit = self._fit
        step = None if fit is None else fit.global_step
        if step is not None and not step.in_extra_pass:
            step.begin(args[1:])
        if fit is None or fit.in_trial or (not fit.elastic and step is None):
            return super().training_step(*args, **kwargs)  # type: ignore[misc]
        loader = fit.train_loader
        with self._running.leaving_no_trace(loader is not None and loader.padding):
            output = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if not self.lightning_module.automatic_optimization:
            fit.end_manual_step()
        elif output is None:
            return nothing(self.root_device)
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step on a batch of this worker's, or on a padding batch that keeps step with the others."""
        self._begin_step()
        if self.padding:
            hooks.set_zero_batch_size(self._trainer)
        return super().validation_step(*args, **kwargs)  # type: ignore[misc]

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Make a test step in the same way."""
        self._begin_step()
        if self.padding:
            hooks.set_zero_batch_size(self._trainer)
        return super().test_step(*args, **kwargs)  # type: ignore[misc]

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step of a prediction."""
        self._begin_step()
        return super().predict_step(*args, **kwargs)  # type: ignore[misc]

    def _begin_step(self) -> None:
        if self._run is not None:
            self._run.begin_step()

    @property
    def _repetition(self) -> Repetition | None:
        return None if self._fit is None else self._fit.repetition

    @property
    def _in_part(self) -> bool:
        step = None if self._fit is None else self._fit.global_step
        return step is not None and step.in_extra_pass

    def _want_even_shares(self) -> bool:
        loader = None if self._fit is None else self._fit.train_loader
        return loader is None or loader.even_shares()

    def weights_in(self, view: View) -> Sequence[float]:
        """Weight of each member's gradient of the current training batch: the reduction's, or 0 without a share."""
        if self._fit is None:
            return super().weights_in(view)
        shares = self._fit.weights(view, of_batch=True)
        return [weight if share else 0.0 for weight, share in zip(self._fit.weights(view), shares, strict=True)]

    def weight_of_batch(self) -> float:
        """This worker's share of the samples in the newest training batch."""
        view = self.session.completed_in
        weights = super().weights_in(view) if self._fit is None else self._fit.weights(view, of_batch=True)
        return float(weights[self._rank_in(view)])

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate locally: Lightning calls this around all backward passes but the last of an accumulation."""
        before, self.syncs_gradients = self.syncs_gradients, False
        try:
            yield
        finally:
            self.syncs_gradients = before

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Make a backward pass, perhaps of a part of the batch."""
        step = None if self._fit is None else self._fit.global_step
        if step is not None:
            closure_loss = step.weigh(closure_loss, optimizer)
        # In an accumulation, the worker's weight is that of its other batches. A global step drops what is padding.
        drops = step is None and self._fit is not None and self.padding
        with dropping_gradients(self.lightning_module) if drops else nullcontext():
            loss: Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)  # type: ignore[misc]
        return loss

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Begin to reduce gradients as they become ready."""
        if self._fit is not None:
            self._fit.before_backward(closure_loss)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Make the local update, with settings that suit the samples in it."""
        update, fit = super().optimizer_step, self._fit  # type: ignore[misc]
        if fit is None or fit.in_trial:
            return update(optimizer, closure, model, **kwargs)
        closure = partial(fit.result_of, closure, optimizer)
        if fit.compensation is None:
            result = update(optimizer, closure, model, **kwargs)
        else:
            result = fit.compensation.step(update, optimizer, closure, model, **kwargs)
        if fit.workers_log is not None:
            fit.workers_log.write()
        return result

    # ------------------------------------------------------------ checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Let rank 0 write; if it is lost before the others know that it has, the next rank 0 writes."""
        if self._worker is not None and self.session.newcomer:
            return
        state = hooks.move_loader_state_out(checkpoint)
        if state is not None:
            saved = {"compensation": None, "schedules": None, "autoscale": None, **self._saved}
            if self._fit is not None:
                saved |= {name: value for name, value in self._fit.saved().items() if value is not None}
            checkpoint[CHECKPOINT_KEY] = {**state, **saved}
        if self._worker is None or self.is_last:
            super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
            return
        done = False
        while not done:
            writer = self.session.completed_in.ids[0]
            if writer == self.session.worker.id:
                self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            self.barrier("trainer.save_checkpoint")
            done = self._alone or writer in self.session.completed_in.ids

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a file of ours or of any other strategy."""
        path = args[0] if args else kwargs.get("checkpoint_path")
        checkpoints = None if self._fit is None else self._fit.checkpoints
        checkpoint = None if checkpoints is None else checkpoints.load(path)
        if checkpoint is None:
            checkpoint = restore(super().load_checkpoint(*args, **kwargs))  # type: ignore[misc]
        state = checkpoint.pop(CHECKPOINT_KEY, None)
        if state is not None:
            for name in (*BETWEEN_STEPS, "random"):
                state.pop(name, None)
            self._saved = {name: state.pop(name, None) for name in ("compensation", "schedules", "autoscale")}
            hooks.move_loader_state_in(checkpoint, state)
        return checkpoint
