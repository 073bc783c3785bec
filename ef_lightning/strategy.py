"""`ElasticFlowStrategy`: Lightning's strategy for a world whose size changes.

It only translates. Membership and recovery are `ef_common.session`'s, gradients `ef_common.collectives`', samples
`train_loader`'s and `evaluation_loader`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ef_common.collectives import torch_operations as operations
from ef_common.collectives.gradients.reducer import GradientReducer
from ef_common.collectives.torch_codec import as_bytes
from ef_common.core.view import View
from ef_common.errors import JobFinished, UnsupportedError, UsageError
from ef_common.events import EventLog
from ef_common.launch.leaving import exit_cleanly, leaving_cleanly
from ef_common.launch.process import Worker, this_worker
from ef_common.session import Barrier, Session
from ef_lightning import hooks
from ef_lightning.checks import check_optimizers, check_trainer
from ef_lightning.collectives import CollectivesMixin
from ef_lightning.environment import environment_for
from ef_lightning.evaluation_loader import EvaluationLoader
from ef_lightning.host import Host
from ef_lightning.metrics import Contributions, MetricSync, leaving_no_trace
from ef_lightning.state import TrainerState
from ef_lightning.train_loader import ElasticLoader, LoneLoader

BACKENDS = ("gloo", "horovod")
CHECKPOINT_KEY = "elasticflow"
"""Where a checkpoint file holds how far its epoch is."""


class ElasticMixin(CollectivesMixin):
    """Everything but the base class, which is one of two (see :func:`ef_lightning.registry.strategy_for`).

    Args:
        backend: Data plane: "gloo", or "horovod" (see `elasticflow horovod build`).

    Raises:
        UsageError: Unknown backend.
    """

    host: Host
    # Without this, Lightning would ignore `self.log(sync_dist=True)`.
    is_distributed = True
    strategy_name = "elasticflow"

    if TYPE_CHECKING:
        model: Any
        lightning_module: Any
        parallel_devices: Any
        local_rank: int
        cluster_environment: Any
        optimizers: Any
        checkpoint_io: Any

    def __init__(self, backend: str = "gloo", **kwargs: Any) -> None:
        if backend not in BACKENDS:
            raise UsageError(f"unknown backend. Expected one of {BACKENDS}. Received: backend={backend!r}")
        super().__init__(cluster_environment=environment_for(self.host), **kwargs)  # type: ignore[call-arg]
        self.backend = backend
        self._worker: Worker | None = None
        self._trainer: Any = None
        self._reducer: GradientReducer | None = None
        self._metrics: MetricSync | None = None
        self._train_loader: ElasticLoader | None = None
        self._evaluation_loaders: list[EvaluationLoader] = []
        self._sync_gradients = True

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
    def root_device(self) -> torch.device:
        """Device of this worker."""
        devices: list[torch.device] = self.parallel_devices or [torch.device("cpu")]
        return devices[0] if len(devices) == 1 else devices[self.local_rank % len(devices)]

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
        return {"num_replicas": self.session.completed_in.world_size, "rank": self.session.rank}

    def _configure_launcher(self) -> None:
        """The launcher (torchrun, or nothing) has started this process already."""
        self._launcher = None

    def setup_environment(self) -> None:
        """Become a worker of the job, or a world of one."""
        super().setup_environment()  # type: ignore[misc]
        try:
            self._worker = this_worker(self.backend)
        except JobFinished:
            exit_cleanly("the job has finished already; nothing to join")
        self._follow_ranks(self.session.view)
        self.session.on_view = self._follow_ranks

    def _follow_ranks(self, view: View) -> None:
        self.cluster_environment.follow(self.session)
        self.host.set_rank(self.session.rank)
        if self._trainer is not None and self.session.rank == 0:
            hooks.take_over_logs(self._trainer, self.host)

    # ------------------------------------------------------------ set-up and teardown

    def setup(self, trainer: Any) -> None:
        """Prepare model and optimizers, and make them equal in all workers."""
        check_trainer(trainer, self.host, elastic=self._here.elastic)
        self._trainer = trainer
        hooks.keep_samplers(trainer)
        super().setup(trainer)  # type: ignore[misc]
        self._metrics = MetricSync(self.session)
        self._metrics.connect(self.lightning_module)
        if self._here.elastic and not self.session.newcomer:
            self._agree_on_start(trainer)
        if trainer.state.fn != self.host.get("trainer.states", "TrainerFn").FITTING:
            return
        if self._here.elastic:
            check_optimizers(self.optimizers)
            self._reducer = GradientReducer(self.session, self.lightning_module, weights=self._weights)
            self._reducer.attach()
        self.session.state = TrainerState(trainer, self.host, loader=lambda: self._train_loader, reducer=self._reducer)
        if self.session.newcomer:
            trainer.num_sanity_val_steps = 0  # the others have done it

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
        versions, _ = operations.gather(self.session, hooks.logger_versions(trainer), what="a logger's version")
        hooks.set_logger_versions(trainer, versions[0])

    def teardown(self) -> None:
        """Let go of the Trainer; the membership lasts as long as the process."""
        if self._reducer is not None:
            self._reducer.detach()
            self._reducer = None
        if self._metrics is not None:
            self._metrics.disconnect()
            self._metrics = None
        for loader in (self._train_loader, *self._evaluation_loaders):
            if loader is not None:
                loader.close()
        self._train_loader, self._evaluation_loaders = None, []
        self._trainer = None
        if self._worker is not None:
            self.session.state = None
        super().teardown()  # type: ignore[misc]

    def on_train_start(self) -> None:
        """Have everything set up before the first boundary, where newcomers meet the others."""
        self._connect_metrics()
        hooks.set_up_validation(self._trainer)

    def on_validation_start(self) -> None:
        """Metrics may have been made since the set-up."""
        self._connect_metrics()
        if self._metrics is not None:
            self._metrics.evaluation = Contributions(self._trainer)

    on_test_start = on_validation_start

    def on_validation_end(self) -> None:
        """Everybody has the result of the evaluation."""
        if self._metrics is not None:
            self._metrics.evaluation = None
        with leaving_cleanly():
            self.session.run(Barrier())

    on_test_end = on_validation_end
    on_predict_end = on_validation_end

    def _connect_metrics(self) -> None:
        if self._metrics is not None:
            self._metrics.connect(self.lightning_module)

    def on_train_end(self) -> None:
        """Everybody has come to the end: from here on, nobody can join."""
        with leaving_cleanly():
            if self._train_loader is not None:
                self._train_loader.finish()
            self._log_weights()
            self.session.run(Barrier())
        self.session.close()

    def on_exception(self, exception: BaseException) -> None:
        """Note why this worker ends."""
        if self._worker is not None and not isinstance(exception, SystemExit):
            self._log.write("fault", what=type(exception).__name__, message=str(exception)[:500])

    # ------------------------------------------------------------ data

    def process_dataloader(self, dataloader: object) -> object:
        """Wrap the user's loaders."""
        if not isinstance(dataloader, DataLoader):
            raise UnsupportedError(
                "only a torch DataLoader (or a subclass) can be dealt to a changing number of workers. "
                f"Received: {type(dataloader).__module__}.{type(dataloader).__qualname__}"
            )
        if self._trainer.training:
            return self._wrap_train_loader(dataloader)
        return self._wrap_evaluation_loader(dataloader)

    def _wrap_train_loader(self, dataloader: DataLoader[Any]) -> ElasticLoader:
        kind = ElasticLoader if self._here.elastic or self._log.enabled else LoneLoader
        # A world of one that never changes gets the batches of an ordinary loader, a last single sample too.
        limits = {} if self._here.elastic else {"min_share": 1}
        loader = kind(dataloader, self.session, self._trainer, log=self._log, **limits)
        if self._here.audit:
            loader.on_boundary = self._log_weights
        if self._train_loader is not None:  # Lightning reloads
            loader.succeed(self._train_loader)
        self._train_loader = loader
        return loader

    def _wrap_evaluation_loader(self, dataloader: DataLoader[Any]) -> EvaluationLoader:
        stages = {"validate": "val", "sanity_check": "val", "test": "test", "predict": "predict"}
        stage = stages[str(self._trainer.state.stage.value)]
        old = hooks.evaluation_loaders(self._trainer)
        if self._evaluation_loaders and self._evaluation_loaders == old:  # Lightning reloads
            self._close_evaluation_loaders()
        loader = EvaluationLoader(
            dataloader,
            self.session,
            self._trainer,
            log=self._log,
            stage=stage,
            index=len(self._evaluation_loaders),
            contributions=lambda: None if self._metrics is None else self._metrics.evaluation,
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
        if not self._here.elastic:
            return super().training_step(*args, **kwargs)  # type: ignore[misc]
        loader = self._train_loader
        with self._keeping_step(loader is not None and loader.padding):
            output = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if not self.lightning_module.automatic_optimization:
            if self._reducer is not None and loader is not None and loader.progress.uncommitted:
                with leaving_cleanly():
                    loader.commit(self._reducer.skip() or self.session.completed_in)
        elif output is None:
            return _nothing(self.root_device)
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """A step on a batch of this worker's, or on one that only keeps step with the others."""
        with self._keeping_step(any(loader.padding for loader in self._evaluation_loaders)):
            return super().validation_step(*args, **kwargs)  # type: ignore[misc]

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The same."""
        with self._keeping_step(any(loader.padding for loader in self._evaluation_loaders)):
            return super().test_step(*args, **kwargs)  # type: ignore[misc]

    def _keeping_step(self, padding: bool) -> Any:
        return leaving_no_trace(self._trainer) if padding else nullcontext()

    def _weights(self, view: View) -> Any:
        if self._train_loader is None:
            return [1.0 / view.world_size] * view.world_size
        return self._train_loader.weights(view)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate locally: Lightning calls this around all backward passes but the last of an accumulation."""
        self._sync_gradients = False
        try:
            yield
        finally:
            self._sync_gradients = True

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Begin to reduce gradients as they become ready."""
        if self._sync_gradients and self._reducer is not None:
            self._reducer.before_backward()

    def post_backward(self, closure_loss: Tensor) -> None:
        """Finish the reduction: the gradients are everybody's, and so are the samples in them."""
        if not self._sync_gradients:
            return
        worker, loader = self._here, self._train_loader
        contributors = worker.session.completed_in
        if self._reducer is not None:
            with leaving_cleanly():
                contributors = self._reducer.after_backward() or contributors
        if loader is not None:
            loader.commit(contributors, float(closure_loss.detach()) if worker.log.enabled else None)

    # ------------------------------------------------------------ checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Rank 0 writes; if it is lost before the others know that it has, the next one does."""
        if self.session.newcomer:
            return
        state = hooks.move_loader_state_out(checkpoint)
        if state is not None:
            checkpoint[CHECKPOINT_KEY] = state
        done = False
        while not done:
            writer = self.session.completed_in.ids[0]
            if writer == self.session.worker.id:
                self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            self.barrier()
            done = self._alone or writer in self.session.completed_in.ids

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a file of ours, or of any other strategy."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        state = checkpoint.pop(CHECKPOINT_KEY, None)
        if state is not None:
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
