"""The state that a newcomer receives: the content of a Lightning checkpoint, and what a checkpoint omits.

A checkpoint is enough to start a new Trainer. A newcomer goes on in the middle of an epoch with others, and a
difference in what anybody logs, monitors or saves would make the workers' next collectives differ.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

from ef_common.collectives.gradients.left import left_gradients, take_gradients
from ef_common.collectives.gradients.reducer import GradientReducer
from ef_common.collectives.torch_codec import TENSORS, as_bytes
from ef_common.data.autoscaler import Autoscaler
from ef_common.data.claiming import Claiming
from ef_common.data.compensator import Compensator
from ef_common.data.transfer import StateTransfer
from ef_common.data.workers import WorkersWatch
from ef_common.errors import ElasticFlowError, UnsupportedError
from ef_lightning import hooks, own_files
from ef_lightning.checkpoints import TrainerCheckpoints
from ef_lightning.host import LightningHost
from ef_lightning.metrics import extremes_of, take_extremes
from ef_lightning.parameter_groups import follow, groups_of
from ef_lightning.plain_checkpoint import CHECKPOINT_KEY
from ef_lightning.random_state import random_state
from ef_lightning.rate_functions import Factors, check_factors, factors_of, functions_of, unchanged
from ef_lightning.requests import Requests
from ef_lightning.saved_modules import put_back, take_out
from ef_lightning.schedules import Schedules
from ef_lightning.train_loader import ElasticLoader
from ef_lightning.weights import take_weights, unsaved_weights

logger = logging.getLogger(__name__)

_SMALL_BYTES = 1 << 16
_CHUNK_BYTES = 8 << 20
_NOT_SENT = (*(key for keys in hooks.HYPER_PARAMETERS for key in keys), "loops")


class TrainerState:
    """The state of one Trainer, in the form of the session's port `State`.

    Args:
        trainer: The Trainer, with its optimizers.
        host: Its class tree.
        loader: The training loader; None before it is set up.
        reducer: Reduces the gradients; None in a world that never changes.
        compensator: The ratio of the run; None if there is nothing to compensate.
        claiming: Its claims.
        workers: Notices changes of the workers.
        autoscaler: Chooses the number of nodes, if anything does.
        schedules: Its schedules, if they follow the samples.
        checkpoints: Checkpoints of the training, if any are taken.
        requests: Requests of the user's code to all workers.
        adopted: Called when Lightning's dicts of metrics have come from elsewhere.
        check_start: Raises if this worker's start cannot be that of all.

    Attributes:
        has_hooks: In a newcomer: whether code of the user's is called between :meth:`adopt` and :meth:`adopt_again`.
    """

    def __init__(
        self,
        trainer: Any,
        host: LightningHost,
        *,
        loader: Callable[[], ElasticLoader | None],
        reducer: GradientReducer | None,
        compensator: Compensator | None,
        claiming: Claiming,
        workers: WorkersWatch,
        autoscaler: Autoscaler | None = None,
        schedules: Schedules | None = None,
        checkpoints: TrainerCheckpoints | None = None,
        requests: Requests | None = None,
        adopted: Callable[[], None] = lambda: None,
        check_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.has_hooks = True
        self._requests = requests
        self._adopted = adopted
        self._check_start = check_start
        self._claiming = claiming
        self._workers = workers
        self._transfer = StateTransfer(TENSORS, claiming, lambda: None if checkpoints is None else checkpoints.job)
        self._schedules = schedules
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._host = host
        self._loader = loader
        self._reducer = reducer
        self._compensator = compensator
        self._autoscaler = autoscaler
        # The length of an epoch on which `configure_optimizers` may have based its schedules: a world that has
        # another size now would give another one.
        self._num_batches_at_start = trainer.num_training_batches if hooks.train_loaders(trainer) else None
        self._incoming: list[Tensor] = []
        self._packed: list[Tensor] = []
        self._received: dict[str, Any] | None = None

    @property
    def in_epoch(self) -> bool:
        """Whether the received training had begun, and :meth:`adopt_again` has not been called since."""
        return self._received is not None

    def prepare(self) -> None:
        """Prepare memory for the coming state, because the others will wait for it.

        A page that is touched for the first time may cost more than all that is then written to it. Besides the
        state itself, that is the memory of the first gradients, let go of when the state is there.
        """
        saved = self._trainer.lightning_module.state_dict().values()  # whatever get_extra_state returns is among it
        kinds = [(value.dtype, value.shape) for value in saved if isinstance(value, Tensor) and value.nbytes]
        for optimizer in self._trainer.optimizers:
            kinds += state_kinds(optimizer)
        kinds += [(p.dtype, p.shape) for p in self._trainer.lightning_module.parameters() if p.requires_grad]
        loader = self._loader()
        if loader is not None:
            order = loader.state()["order"]
            if isinstance(order, np.ndarray):
                kinds.append((torch.from_numpy(order).dtype, torch.Size(order.shape)))
        self._transfer.prepared = [torch.empty(shape, dtype=dtype, device="cpu").zero_() for dtype, shape in kinds]

    # ------------------------------------------------------------ port

    def describe(self) -> bytes:
        """Header of this worker's state."""
        return self._transfer.describe(self._collect_for_newcomers)

    def tensors(self, header: bytes | None) -> Sequence[Tensor]:
        """The state as few large tensors of bytes."""
        tensors = self._transfer.leaves(header)
        packed = _pack(tensors)
        if header is not None:
            self._incoming, self._packed = tensors, packed
        return packed

    def adopt(self, header: bytes) -> None:
        """Continue from the received state."""
        _unpack(self._packed, self._incoming)
        self._incoming, self._packed = [], []
        self._transfer.adopt(header, self._adopt)

    def adopt_again(self) -> None:
        """In a newcomer, after its own start hooks: restore what all workers share, as it was received."""
        state, self._received = self._received, None
        if state is not None:
            self._take_over(state, whole=self.has_hooks)  # else weights and callbacks are as they were
            check_factors(self._factors(), state.get("factors", []))  # a saved state has none

    def restore(self) -> bool:
        """All who had a state are lost: load the newest saved one, if there is one."""
        self._claiming.begin_again()
        checkpoint = None if self._checkpoints is None else self._checkpoints.saved()
        if checkpoint is None:
            self._begin_again()
            return False
        saved = checkpoint.pop(CHECKPOINT_KEY)
        running = TENSORS.loads(saved.pop("running").numpy().tobytes())
        running["logged"] = hooks.without_lost_metrics(self._trainer, running["logged"])
        running["checkpoint_callbacks"] = [
            own_files.written_files(self._trainer, callback, private)
            for callback, private in zip(
                self._host.callbacks(self._trainer, "ModelCheckpoint"), running["checkpoint_callbacks"], strict=True
            )
        ]
        agreed = {name: saved.pop(name, None) for name in ("compensation", "schedules", "autoscale")}
        state = {**agreed, "requests": None, "gradients": saved.pop("gradients", None), **running}
        self._adopt({**state, "checkpoint": checkpoint, "loader": None})
        loader = self._loader()
        if loader is not None:
            loader.go_back(saved)
        return True

    def _begin_again(self) -> None:
        """Nothing was saved, so this is the start: the training begins with the workers of this view.

        The others take it from this one's state.
        """
        self._check_start()
        world_size, loader = self._trainer.strategy.session.view.world_size, self._loader()
        if self._compensator is not None:
            self._compensator.begin_again(world_size)
        if self._schedules is not None:
            self._schedules.begin_again(world_size)
        num_batches = self._num_batches_at_start
        if loader is not None and num_batches is not None:
            num_batches = loader.steps_in_world(world_size)
        self._set_up_optimizers(num_batches, world_size)

    # ------------------------------------------------------------ collect

    def _collect_for_newcomers(self) -> dict[str, Any]:
        """What newcomers take in.

        Raises:
            UnsupportedError: A hook of checkpoints has failed. That keeps newcomers out, and ends no member.
        """
        try:
            return self._collect()
        except ElasticFlowError:
            raise
        except Exception as error:
            if self._trainer.strategy.session.newcomer:  # the job starts, and none has trained yet
                raise
            logger.exception("a newcomer cannot join: on_save_checkpoint, or a state_dict(), has failed")
            what = "on_save_checkpoint, or a state_dict(), has failed in the worker whose output has the traceback"
            raise UnsupportedError(f"{what}. Received: {error!r}") from error

    def _collect(self) -> dict[str, Any]:
        with self._trainer.strategy.making_checkpoint():  # in one member, while the others wait for the end of that
            checkpoint = hooks.dump_checkpoint(self._trainer)
        for key in _NOT_SENT:
            checkpoint.pop(key, None)
        loader = self._loader()
        return {
            **self._running(),
            "modules": take_out(checkpoint, self._trainer.lightning_module),
            "checkpoint": checkpoint,
            "weights": unsaved_weights(self._trainer.lightning_module, checkpoint.get("state_dict")),
            "own_optimizer_states": list(map(is_own_state, self._trainer.optimizers, checkpoint["optimizer_states"])),
            **self._agreed(),
            "loader": None if loader is None else loader.state(),
            "requests": None if self._requests is None else self._requests.state(),
            "buffers": None if self._reducer is None else self._reducer.kinds(),
            "gradients": self._left_gradients(),
            "factors": self._factors(),
            "workers": self._workers.state(),
        }

    @property
    def _schedulers(self) -> list[Any]:
        return [config.scheduler for config in self._trainer.strategy.lr_scheduler_configs]

    def _factors(self) -> Factors:
        """What functions of schedules give that depend on nothing but the step, and maybe the world of the start."""
        strategy = self._trainer.strategy
        with strategy.showing_world_of_start():
            return unchanged(strategy.factors_at_start, factors_of(self._schedulers))

    def _left_gradients(self) -> dict[str, Tensor] | None:
        """What a module that optimizes manually may be accumulating; Lightning makes an update between boundaries."""
        module = self._trainer.lightning_module
        if module.automatic_optimization:
            return None
        return left_gradients(module, None if self._reducer is None else set(self._reducer.names()))

    def checkpoint(self) -> dict[str, Any]:
        """The content of a checkpoint file: everything that Lightning resumes from, and the rest under our key."""
        checkpoint = hooks.dump_checkpoint(self._trainer)
        if not hooks.num_batches_started(self._trainer):
            hooks.forget_last_batch(checkpoint)
        running = TENSORS.dumps({**self._running(), "values": hooks.logged_values(self._trainer)}, what="state")
        checkpoint[CHECKPOINT_KEY] = {
            **(hooks.move_loader_state_out(checkpoint) or {}),
            **self._agreed(),
            "running": torch.frombuffer(bytearray(running), dtype=torch.uint8),
            "gradients": self._left_gradients(),
            "random": random_state(),
        }
        return checkpoint

    def _agreed(self) -> dict[str, Any]:
        return {
            "compensation": None if self._compensator is None else self._compensator.state(),
            "schedules": None if self._schedules is None else self._schedules.state(),
            "autoscale": None if self._autoscaler is None else self._autoscaler.state(),
        }

    def _running(self) -> dict[str, Any]:
        """What Lightning's checkpoints lack and a worker needs to continue in the middle of a training."""
        trainer, module = self._trainer, self._trainer.lightning_module
        return {
            "trainable": [name for name, p in module.named_parameters() if p.requires_grad],
            "frozen": [name for name, p in module.named_parameters() if not p.requires_grad],
            "modes": hooks.module_modes(trainer),
            "groups": [groups_of(optimizer, module) for optimizer in trainer.optimizers],
            "reduced": [] if self._reducer is None else self._reducer.names(),
            "num_batches_at_start": self._num_batches_at_start,
            "world_size_at_start": trainer.strategy.world_size_at_start,
            "loops": hooks.loop_progress(trainer),
            "fields": hooks.loop_fields(trainer),
            "metrics": hooks.metric_dicts(trainer),
            "logged": hooks.log_state(trainer),
            "extremes": extremes_of(module),
            "checkpoint_callbacks": written_by(trainer, self._host),
            "loggers": hooks.logger_versions(trainer),
        }

    # ------------------------------------------------------------ adopt

    def _adopt(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        taken = state.get("modules", {})  # not in a saved state
        modules = put_back(state["checkpoint"], taken, trainer.lightning_module)
        self._received = state if hooks.in_epoch(state["loops"]) else None
        # The user's own hooks will be called with it: what they change in it must not be what is taken in again. The
        # validation stays set up until then, so that Lightning does not do it again meanwhile.
        shared = [*modules, *self._copied_when_loaded(state)] if self.has_hooks else tree_leaves(state)
        self._take_over({**_copied(state, shared), "fields": {**state["fields"], "val_is_set_up": True}})
        hooks.set_logger_versions(trainer, state["loggers"])
        if self._received is None:
            hooks.load_loop_fields(trainer, state["fields"])
        if self._compensator is not None and state["compensation"] is not None:
            self._compensator.load_state(state["compensation"])
        if self._autoscaler is not None:
            self._autoscaler.load_state(state.get("autoscale"))
        self._workers.load_state(state.get("workers"))
        loader = self._loader()
        if loader is not None and state["loader"] is not None:
            loader.load_state(state["loader"])
        if self._requests is not None and state["requests"] is not None:
            self._requests.load_state(state["requests"])

    def _copied_when_loaded(self, state: dict[str, Any]) -> list[Any]:
        """The leaves of a state that keep their values, whatever becomes of what is loaded from them."""
        checkpoint = state["checkpoint"]
        weights = tree_leaves((checkpoint.get("state_dict"), state.get("weights")))
        if self._trainer.strategy.root_device.type == "cpu":
            return weights  # torch's optimizers take over the tensors themselves
        return weights + [leaf for leaf in tree_leaves(checkpoint["optimizer_states"]) if _is_moved(leaf)]

    def _take_over(self, state: dict[str, Any], *, whole: bool = True) -> None:
        """Take over what code in one worker can change but must be equal in all."""
        trainer = self._trainer
        if whole:
            self._load_checkpoint(state)
        self._load_optimizers(state)
        hooks.load_loop_fields(trainer, state["fields"])
        self._load_running(state)
        self._take_gradients(state)
        if "values" in state:  # of a checkpoint
            hooks.set_logged_values(trainer, state["values"])
        if self._schedules is not None and state["schedules"] is not None:
            self._schedules.load_state(state["schedules"])

    def _take_gradients(self, state: Mapping[str, Any]) -> None:
        if state.get("gradients") is not None:
            take_gradients(self._trainer.lightning_module, state["gradients"])

    def _load_checkpoint(self, state: dict[str, Any]) -> None:
        load_written(self._trainer, self._host, state["checkpoint_callbacks"])
        hooks.add_hyper_parameters(self._trainer, state["checkpoint"])
        hooks.load_checkpoint(self._trainer, state["checkpoint"])
        if "weights" in state:  # not in a saved state
            take_weights(self._trainer.lightning_module, state["weights"])

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Continue between the two steps of a checkpoint. Lightning has loaded the rest of it."""
        trainer, state = self._trainer, TENSORS.loads(saved["running"].numpy().tobytes())
        state["logged"] = hooks.without_lost_metrics(trainer, state["logged"])
        hooks.load_loop_fields(trainer, state["fields"])
        self._load_running(state)
        self._take_gradients(saved)
        if trainer.strategy.session.rank == 0:
            hooks.set_logged_values(trainer, state["values"])
        hooks.go_on_between_steps(trainer, self._host)
        if self._requests is not None:
            self._requests.settle()  # a callback has set the accumulation

    def _load_running(self, state: dict[str, Any]) -> None:
        trainer, trainable, frozen = self._trainer, set(state["trainable"]), state.get("frozen")
        for name, parameter in trainer.lightning_module.named_parameters():
            # A checkpoint may have another name for it: `ModelPruning` appends "_orig". Older ones name no frozen ones.
            if name in trainable or frozen is None or name in frozen:
                parameter.requires_grad_(name in trainable)
        if "modes" in state:
            hooks.set_module_modes(trainer, state["modes"])
        hooks.load_loop_progress(trainer, state["loops"])
        for name, metrics in hooks.metric_dicts(trainer).items():
            metrics.clear()
            metrics.update(state["metrics"][name])
        self._adopted()
        hooks.load_log_state(trainer, self._host, state["logged"])
        take_extremes(trainer.lightning_module, state.get("extremes", {}))
        if self._reducer is not None:
            self._reducer.attach(state["reduced"], state.get("buffers"))

    def _load_optimizers(self, state: dict[str, Any]) -> None:
        trainer, strategy = self._trainer, self._trainer.strategy
        checkpoint = state["checkpoint"]
        self._set_up_optimizers(state["num_batches_at_start"], state.get("world_size_at_start"))
        # Lightning's stand-in for no optimizer saves nothing.
        saved_groups = [saved.get("param_groups", ()) for saved in checkpoint["optimizer_states"]]
        for optimizer, wanted, saved in zip(trainer.optimizers, state.get("groups", ()), saved_groups, strict=False):
            if saved:
                follow(optimizer, trainer.lightning_module, wanted, saved)
        groups = [len(saved) for saved in saved_groups]
        own = [len(optimizer.param_groups) for optimizer in trainer.optimizers]
        if own != groups or len(strategy.lr_scheduler_configs) != len(checkpoint["lr_schedulers"]):
            raise ElasticFlowError(
                "the others have other optimizers or schedulers, so this worker cannot catch up with them. Make "
                "them in configure_optimizers. Expected parameter groups and number of schedulers: "
                f"{groups}, {len(checkpoint['lr_schedulers'])}. Received: {own}, {len(strategy.lr_scheduler_configs)}"
            )
        strategy.load_optimizer_state_dict(checkpoint)
        is_own = state.get("own_optimizer_states", ())  # not in a saved state
        for optimizer, saved, own_state in zip(
            trainer.optimizers, checkpoint["optimizer_states"], is_own, strict=False
        ):
            if own_state:
                keep_types(optimizer, saved)
        for config, saved in zip(strategy.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(saved)

    def _set_up_optimizers(self, num_batches: float | None, world_size: int | None) -> None:
        """Take over optimizers and schedulers of workers who had epochs of this many batches and were this many."""
        trainer, strategy = self._trainer, self._trainer.strategy
        # A state has everything that the number of workers may have changed, except functions.
        is_other_world = world_size not in (None, strategy.world_size_at_start)
        makes_again = is_other_world and bool(functions_of(self._schedulers))
        if world_size is not None:
            strategy.world_size_at_start = world_size
        if num_batches is not None and num_batches != self._num_batches_at_start:
            hooks.set_num_batches(trainer, num_batches)
            makes_again = True
        if makes_again:
            with strategy.showing_world_of_start():
                strategy.setup_optimizers(trainer)
        self._num_batches_at_start = num_batches
        for callback in self._host.callbacks(self._trainer, "BaseFinetuning"):
            callback.on_fit_start(trainer, trainer.lightning_module)  # adds the groups of what is unfrozen


def state_kinds(optimizer: Optimizer) -> list[tuple[torch.dtype, torch.Size]]:
    """Types and shapes of an optimizer's future state for its parameters, from a step on tiny ones.

    Nothing for an optimizer that cannot make such a step: it is for speed alone.
    """
    kinds = []
    for group in optimizer.param_groups:
        for shape_length in {p.ndim for p in group["params"]}:
            tiny = torch.nn.Parameter(torch.ones((2,) * shape_length))
            tiny.grad = torch.ones_like(tiny)
            probe = copy.copy(optimizer)
            probe.state = defaultdict(dict)
            probe.param_groups = [{**group, "params": [tiny]}]
            try:
                probe.step()
            except Exception as error:
                logger.debug("%s makes no step on a tiny parameter: %r", type(optimizer).__name__, error)
                continue
            kept = [v for v in probe.state[tiny].values() if isinstance(v, Tensor) and v.shape == tiny.shape]
            similar = [p for p in group["params"] if p.ndim == shape_length]
            kinds += [(value.dtype, p.shape) for p in similar for value in kept]
    return kinds


def is_own_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> bool:
    """Whether what is saved of an optimizer are its tensors, and not what a hook of the user's has made of them."""
    own = {id(leaf) for leaf in tree_leaves(list(optimizer.state.values()))}
    return all(id(leaf) in own for leaf in tree_leaves(saved.get("state", ())) if isinstance(leaf, Tensor))


def keep_types(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give an optimizer that has loaded this state the very values in it.

    torch casts what is loaded to the type of its parameter. Those from whom the state comes keep theirs, in float32 for
    parameters in bfloat16, say, and would make other updates.

    Args:
        optimizer: The optimizer; one whose class has a `state_dict` of its own is left alone.
        saved: What it has loaded.
    """
    if type(optimizer).state_dict is not Optimizer.state_dict:
        return
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    numbers = chain.from_iterable(group["params"] for group in saved.get("param_groups", ()))
    for number, parameter in zip(numbers, parameters, strict=False):
        loaded, values = optimizer.state.get(parameter), saved["state"].get(number)
        if loaded and values and tree_structure(loaded) == tree_structure(values):
            optimizer.state[parameter] = tree_map(_with_type, loaded, values)


def _with_type(loaded: Any, saved: Any) -> Any:
    is_cast = isinstance(loaded, Tensor) and isinstance(saved, Tensor) and loaded.dtype != saved.dtype
    return saved.to(loaded.device) if is_cast else loaded


def _is_moved(leaf: Any) -> bool:
    """Whether this part of an optimizer's state goes to the device of a parameter. A count of steps may not."""
    return isinstance(leaf, Tensor) and leaf.numel() > 1


def _copied(state: dict[str, Any], shared: Sequence[Any]) -> dict[str, Any]:
    """A deep copy that shares those tensors and modules that are among these leaves."""
    return copy.deepcopy(state, {id(leaf): leaf for leaf in shared if isinstance(leaf, Tensor | torch.nn.Module)})


def private_fields(callback: Any) -> dict[str, Any]:
    """Fields of a ModelCheckpoint that it does not save: where it writes, what it has written."""
    return {k: v for k, v in vars(callback).items() if TENSORS.knows(v) and k != "_last_time_checked"}


def written_by(trainer: Any, host: LightningHost) -> list[dict[str, Any]]:
    """The fields that each ModelCheckpoint of a Trainer does not save."""
    return [private_fields(callback) for callback in host.callbacks(trainer, "ModelCheckpoint")]


def load_written(trainer: Any, host: LightningHost, written: Sequence[dict[str, Any]]) -> None:
    """Give each of them these fields."""
    for callback, private in zip(host.callbacks(trainer, "ModelCheckpoint"), written, strict=True):
        vars(callback).update(private)


# ---------------------------------------------------------------- packing


def _pack(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Large tensors as views of their bytes, small ones copied together: few messages, no needless copy."""
    large, chunks = _sort([as_bytes(tensor) for tensor in tensors])
    return large + [torch.cat(chunk) for chunk in chunks]


def _unpack(packed: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy the small tensors out again; the large ones hold their bytes already."""
    large, chunks = _sort([as_bytes(tensor) for tensor in tensors])
    for together, chunk in zip(packed[len(large) :], chunks, strict=True):
        for target, part in zip(chunk, torch.split(together, [t.numel() for t in chunk]), strict=True):
            target.copy_(part)


def _sort(flat: Sequence[Tensor]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The large tensors, and the others in chunks that are sent together."""
    large: list[Tensor] = []
    chunks: list[list[Tensor]] = []
    room = 0
    for tensor in flat:
        if tensor.numel() > _SMALL_BYTES:
            large.append(tensor)
        elif tensor.numel():
            if room < tensor.numel():
                chunks.append([])
                room = _CHUNK_BYTES
            chunks[-1].append(tensor)
            room -= tensor.numel()
    return large, chunks
