"""`ElasticFlowStrategy`: Lightning's strategy for a world whose size changes.

It only translates. Membership and recovery are `ef_common.session`'s, gradients `ef_common.collectives`', samples
`train_loader`'s and `evaluation_loader`'s.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ef_common.collectives import codec, operations
from ef_common.collectives.torch_gradients import GradientReducer
from ef_common.core.view import View
from ef_common.errors import JobFinished, Left, MixedImportsError, UnsupportedError, UsageError
from ef_common.events import EventLog
from ef_common.launch.process import Worker, this_worker
from ef_common.session import Barrier, Session
from ef_lightning import hooks
from ef_lightning import host as hosts
from ef_lightning.data_workers import check
from ef_lightning.environment import environment_for
from ef_lightning.evaluation_loader import EvaluationLoader
from ef_lightning.host import Host
from ef_lightning.metrics import MetricSync
from ef_lightning.state import TrainerState, logger_versions, set_logger_versions
from ef_lightning.train_loader import ElasticLoader

logger = logging.getLogger(__name__)

STRATEGY_NAME = "elasticflow"
BACKENDS = ("gloo",)


class ElasticMixin:
    """Everything but the base class, which is one of two (see :func:`strategy_for`).

    Args:
        backend: Data plane; "gloo".

    Raises:
        UsageError: Unknown backend.
    """

    host: Host
    # Without this, Lightning would ignore `self.log(sync_dist=True)`.
    is_distributed = True
    strategy_name = STRATEGY_NAME

    if TYPE_CHECKING:
        model: Any
        lightning_module: Any
        parallel_devices: Any
        local_rank: int
        cluster_environment: Any
        optimizers: Any

    def __init__(self, backend: str = "gloo", **kwargs: Any) -> None:
        if backend not in BACKENDS:
            raise UsageError(f"unknown backend. Expected one of {BACKENDS}. Received: backend={backend!r}")
        super().__init__(cluster_environment=environment_for(self.host), **kwargs)
        self.backend = backend
        self._worker: Worker | None = None
        self._trainer: Any = None
        self._reducer: GradientReducer | None = None
        self._train_loader: ElasticLoader | None = None
        self._evaluation_loaders: list[EvaluationLoader] = []
        self._sync_gradients = True
        self._closed = False

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
        devices = self.parallel_devices or [torch.device("cpu")]
        device: torch.device = devices[self.local_rank % len(devices)]
        return device

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
            self._worker = this_worker()
        except JobFinished:
            _exit_cleanly("the job has finished already; nothing to join")
        self._follow_ranks(self.session.view)
        self.session.on_view = self._follow_ranks

    def _follow_ranks(self, view: View) -> None:
        self.cluster_environment.follow(self.session)
        self.host.set_rank(self.session.rank)

    # ------------------------------------------------------------ set-up and teardown

    def setup(self, trainer: Any) -> None:
        """Prepare model and optimizers, and make them equal in all workers."""
        self._trainer = trainer
        self._check(trainer)
        hooks.keep_samplers(trainer)
        super().setup(trainer)  # type: ignore[misc]
        module = self.lightning_module
        MetricSync(self.session).connect(module)
        if not self.session.newcomer:
            self._agree_on_start(trainer)
        if trainer.state.fn != self.host.get("trainer.states", "TrainerFn").FITTING:
            return
        if self._here.elastic:
            self._reducer = GradientReducer(self.session, module, weights=self._weights)
            self._reducer.attach()
        self.session.state = TrainerState(
            trainer,
            self.host,
            loader=lambda: self._train_loader,
            reduced=self._reduced_names,
            rebuild=self._rebuild_reducer,
        )
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
        versions, _ = operations.gather(self.session, logger_versions(trainer), what="a logger's version")
        set_logger_versions(trainer, versions[0])

    def _check(self, trainer: Any) -> None:
        """Refuse what elastic training cannot keep, before anything runs."""
        host = hosts.of(trainer)
        if host is not None and host is not self.host:
            raise MixedImportsError(
                f"this strategy is for `{self.host.name}`, but the Trainer is of `{host.name}`. Import only one "
                "of the two in your program"
            )
        if getattr(self, "_layer_sync", None) is not None:
            raise UnsupportedError(
                "Trainer(sync_batchnorm=True) needs a fixed process group. Leave it out: ElasticFlow keeps the "
                "BatchNorm statistics of all workers equal"
            )
        if self.root_device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"unsupported device. Expected cpu or cuda. Received: {self.root_device}")

    def teardown(self) -> None:
        """Let go of the Trainer; the membership lasts as long as the process."""
        if self._reducer is not None:
            self._reducer.detach()
            self._reducer = None
        for loader in (self._train_loader, *self._evaluation_loaders):
            if loader is not None:
                loader.close()
        self._train_loader, self._evaluation_loaders = None, []
        if self._worker is not None:
            self.session.state = None
        super().teardown()  # type: ignore[misc]

    def on_train_end(self) -> None:
        """Everybody has come to the end: from here on, nobody can join."""
        with _leaving_cleanly():
            if self._train_loader is not None:
                self._train_loader.finish()
            self.session.run(Barrier())
        self._log_weights()
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
        check(dataloader)
        trainer = self._trainer
        if trainer.training:
            return self._wrap_train_loader(dataloader)
        stages = {"validate": "val", "sanity_check": "val", "test": "test", "predict": "predict"}
        stage = stages[str(trainer.state.stage.value)]
        index = sum(loader.stage == stage for loader in self._evaluation_loaders)
        loader = EvaluationLoader(dataloader, self.session, trainer, log=self._log, stage=stage, index=index)
        self._evaluation_loaders.append(loader)
        return loader

    def _wrap_train_loader(self, dataloader: DataLoader[Any]) -> ElasticLoader:
        previous = self._train_loader
        if previous is not None and not self._trainer.reload_dataloaders_every_n_epochs:
            raise UnsupportedError(
                "several training DataLoaders cannot be dealt together. Combine the data sets instead, for example "
                "with torch.utils.data.StackDataset or ConcatDataset"
            )
        self._train_loader = ElasticLoader(dataloader, self.session, self._trainer, self._log)
        self._train_loader.on_boundary = self._log_weights
        if previous is not None:
            self._train_loader.succeed(previous)
        return self._train_loader

    # ------------------------------------------------------------ gradients

    def _weights(self, view: View) -> Any:
        if self._train_loader is None:
            return [1.0 / view.world_size] * view.world_size
        return self._train_loader.weights(view)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
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
        contributors = self.session.completed_in
        if self._reducer is not None:
            with _leaving_cleanly():
                contributors = self._reducer.after_backward() or contributors
        if self._train_loader is not None:
            loss = float(closure_loss.detach()) if self._log.enabled else None
            self._train_loader.commit(contributors, loss)

    def _reduced_names(self) -> list[str]:
        return [] if self._reducer is None else self._reducer.names()

    def _rebuild_reducer(self, names: list[str]) -> None:
        if self._reducer is not None:
            self._reducer.attach(names)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Keep a batch that only pads out of the running means."""
        if self._train_loader is not None:
            self._train_loader.discount_padding()

    # ------------------------------------------------------------ collectives for Lightning and the user

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the workers: mean, sum, max or min; anything but a tensor comes back as it is."""
        if not isinstance(tensor, Tensor):
            return tensor
        name = str(reduce_op or "mean").lower().rsplit(".", 1)[-1]
        name = "mean" if name == "avg" else name
        if name not in ("mean", "sum", "max", "min"):
            raise UnsupportedError(f"unknown reduction. Expected mean, sum, max or min. Received: {reduce_op!r}")
        with _leaving_cleanly():
            return operations.reduce(self.session, tensor, name)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) of the workers say yes."""
        decisions, _ = self._gather(bool(decision))
        return bool(min(decisions)) if all else bool(max(decisions))

    def barrier(self, name: str | None = None) -> None:
        """Wait for everybody."""
        if self._worker is not None:
            with _leaving_cleanly():
                self.session.run(Barrier())

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank `src`'s value, for everybody. Plain values and tensors only: nothing is unpickled."""
        if self._worker is None or self.session.completed_in.world_size == 1:
            return obj
        values, _ = self._gather(obj if self.session.rank == src else None)
        return values[min(src, len(values) - 1)]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Everybody's tensor, stacked: shape (world size, *tensor.shape)."""
        if sync_grads:
            raise UnsupportedError(
                "all_gather(sync_grads=True) cannot be run again after a loss. Compute the loss from the local "
                "batch; gradients are averaged over the workers"
            )
        values, _ = self._gather(tensor)
        return torch.stack([value.to(tensor.device) for value in values])

    def _gather(self, value: Any) -> tuple[list[Any], View]:
        with _leaving_cleanly():
            return operations.gather(self.session, value)

    # ------------------------------------------------------------ audit

    def _log_weights(self) -> None:
        """In audit mode, note a hash of the weights after each update."""
        if self._here.audit and self._train_loader is not None and self._train_loader.num_updates:
            digest = hashlib.blake2b(digest_size=16)
            for tensor in self.lightning_module.state_dict().values():
                if isinstance(tensor, Tensor):
                    digest.update(codec.as_bytes(tensor).numpy().tobytes())
            self._log.write("weights", step=self._train_loader.num_updates, hash=digest.hexdigest())


@contextmanager
def _leaving_cleanly() -> Generator[None, None, None]:
    """A worker that has nothing more to do here ends with status 0."""
    try:
        yield
    except JobFinished:
        _exit_cleanly("the job has finished; nothing to join")
    except Left as left:
        _exit_cleanly(f"left the job: {left}")


def _exit_cleanly(reason: str) -> None:
    logger.info("%s", reason)
    raise SystemExit(0)


@functools.cache
def strategy_for(host_name: str) -> type[ElasticMixin]:
    """The strategy class for `"lightning.pytorch"` or `"pytorch_lightning"`.

    Raises:
        UsageError: Any other name.
    """
    if host_name not in hosts.HOSTS:
        raise UsageError(f"unknown Lightning. Expected one of {hosts.NAMES}. Received: {host_name!r}")
    host = hosts.HOSTS[host_name]
    base = host.get("strategies.parallel", "ParallelStrategy")
    namespace = {"host": host, "__doc__": ElasticMixin.__doc__, "__module__": __name__}
    return type("ElasticFlowStrategy", (ElasticMixin, base), namespace)


if TYPE_CHECKING:

    class ElasticFlowStrategy(ElasticMixin):
        """The strategy for the Lightning that the program has imported."""


def register() -> None:
    """Make `Trainer(strategy="elasticflow")` known to the Lightning that the program has imported."""
    import sys

    for name in hosts.NAMES:
        if f"{name}.trainer.trainer" in sys.modules:
            registry = hosts.HOSTS[name].get("strategies", "StrategyRegistry")
            if STRATEGY_NAME not in registry:
                registry.register(
                    STRATEGY_NAME,
                    strategy_for(name),
                    description="elastic data-parallel training that keeps its processes",
                )
