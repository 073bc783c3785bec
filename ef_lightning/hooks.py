"""The private parts of Lightning that ElasticFlow touches, all in this module except those of loggers (`logs`).

Everything here reads or sets attributes of one Trainer's own objects. They are listed in `probe`, by which a training
that is set up with another release of Lightning tells what has moved, and so does `tests/lightning/test_hooks.py`.
"""

from __future__ import annotations

import builtins
import importlib.util
import logging
import math
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_unflatten

from ef_common.errors import ProtocolError
from ef_lightning.host import LightningHost

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- methods of single objects


class ReplacedMethod(partial[Any]):
    """A function that replaces a method of one object. A copy of the object has the original method.

    Attributes:
        owner: The object.
        name: Name of the method.
        own: The object's own attribute of this name, if any: a hook that the user's code has set on it.
    """

    owner: Any
    name: str
    own: Any

    def __reduce__(self) -> tuple[Any, ...]:
        """Found again in the copy, which has no attributes of its own at that moment."""
        return _method, (self.owner, self.name, self.own)


def _method(owner: Any, name: str, own: Any) -> Any:
    return getattr(owner, name) if own is None else own


def replace(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace a method of this one object by the result of `make`, once."""
    own = vars(owner).pop(name, None)
    if isinstance(own, ReplacedMethod):
        own = own.own
    replacement = ReplacedMethod(make(_method(owner, name, own)))
    replacement.owner, replacement.name, replacement.own = owner, name, own
    setattr(owner, name, replacement)


def put_back(owner: Any, name: str) -> None:
    """Restore the method if it was replaced."""
    replaced = vars(owner).get(name)
    if isinstance(replaced, ReplacedMethod):
        delattr(owner, name)
        if replaced.own is not None:
            setattr(owner, name, replaced.own)


# ---------------------------------------------------------------- set-up


def keep_samplers(trainer: Any) -> None:
    """Keep Lightning from putting distributed samplers into the loaders: ElasticFlow deals the samples."""
    trainer._accelerator_connector.use_distributed_sampler = False


def combine_loaders(trainer: Any, combine: Callable[[Any, str], Any]) -> None:
    """Let each loop take the user's loaders from `combine` whenever it asks for them.

    Args:
        trainer: The Trainer.
        combine: Given what the user gave, and the stage ("train", or "val", "test", "predict"); returns a
            CombinedLoader.
    """
    for stage, loops in {"train": (trainer.fit_loop,), **_evaluation_loops(trainer)}.items():
        for loop in loops:
            replace(loop._data_source, "dataloader", partial(_combining, combine, stage))


def release_loaders(trainer: Any) -> None:
    """Undo `combine_loaders`."""
    for loop in (trainer.fit_loop, *(loop for loops in _evaluation_loops(trainer).values() for loop in loops)):
        put_back(loop._data_source, "dataloader")


def _evaluation_loops(trainer: Any) -> dict[str, tuple[Any, ...]]:
    """The loops that evaluate, by the name of the Trainer's limit for them."""
    return {
        "val": (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop),
        "test": (trainer.test_loop,),
        "predict": (trainer.predict_loop,),
    }


def _logging_evaluations(trainer: Any) -> tuple[Any, ...]:
    """The loops that evaluate whose steps may log, which those of a prediction may not."""
    loops = _evaluation_loops(trainer)
    return (*loops["val"], *loops["test"])


def _combining(combine: Callable[[Any, str], Any], stage: str, ask: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: combine(ask(), stage)


def combination(combined: Any) -> tuple[str, Callable[[list[Any]], Any]]:
    """The mode of a CombinedLoader, and the function that arranges a list of batches like its loaders."""
    spec = combined._spec
    return combined._mode, lambda batches: tree_unflatten(batches, spec)


def stop_shuffling(combined: Any, host: LightningHost, *, stage: str = "train") -> None:
    """Recreate the loaders of a CombinedLoader without shuffling, as `overfit_batches` requires."""
    stages = host.get("trainer.states", "RunningStage")
    resolve = host.get("trainer.connectors.data_connector", "_resolve_overfit_batches")
    resolve(combined, mode=stages.TRAINING if stage == "train" else stages.VALIDATING)


def advise_on_workers(trainer: Any, host: LightningHost, dataloader: Any, *, stage: str) -> None:
    """Give Lightning's advice on the number of data workers, which it omits for anything but a DataLoader."""
    host.get("trainer.connectors.data_connector", "_worker_check")(trainer, dataloader, f"{stage}_dataloader")


def yield_sigterm(trainer: Any, heeded: Callable[[], bool]) -> None:
    """Where notices are handled, keep Lightning from ending the training by an exception after this batch."""
    replace(
        trainer._signal_connector,
        "_sigterm_notifier_fn",
        lambda notify: lambda number, frame: None if heeded() else _note_sigterm(trainer, notify, number, frame),
    )


def _note_sigterm(trainer: Any, notify: Callable[..., None], *args: Any) -> None:
    """Do as Lightning does, without the collective that it runs in a handler if there is a default group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        trainer._signal_connector.received_sigterm = True
    else:
        notify(*args)


def exchange_no_sigterm(trainer: Any) -> None:
    """Keep Lightning from a collective before each batch, which it runs where there is a default group."""
    loop = trainer.fit_loop.epoch_loop
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        replace(loop, "_broadcast_sigterm_tensor", lambda original: lambda: None)


def leave_sigterm(trainer: Any) -> None:
    """Undo `yield_sigterm`."""
    put_back(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor")


class Requeue(NamedTuple):
    """Lightning's reaction to Slurm's signal: save everything, and let Slurm start the job again."""

    signal: int
    act: Callable[[], None]


def requeue(
    trainer: Any, host: LightningHost, take: Callable[[int], None], *, heeded: Callable[[], bool]
) -> Requeue | None:
    """Where notices are handled, treat the signal with which Slurm announces the end of a job as one.

    Args:
        trainer: The Trainer.
        host: Its class tree.
        take: Called with the signal.
        heeded: Whether notices are handled now.

    Returns:
        What is to be done once the workers have left; None if no environment of Slurm asks for it.
    """
    environment = trainer.strategy.cluster_environment
    if not isinstance(environment, host.get_fabric("plugins.environments", "SLURMEnvironment")):
        return None
    if not environment.auto_requeue or environment.requeue_signal is None:
        return None
    connector, number = trainer._signal_connector, int(environment.requeue_signal)
    handle = type(connector)._slurm_sigusr_handler_fn.__get__(connector)
    replace(
        connector,
        "_slurm_sigusr_handler_fn",
        lambda original: lambda number, frame: take(number) if heeded() else original(number, frame),
    )
    return Requeue(number, lambda: handle(number, None))


def layer_sync(strategy: Any) -> Any:
    """The object with which `Trainer(sync_batchnorm=True)`, or a plugin, would synchronize layers."""
    return strategy._layer_sync


def validation_interval(trainer: Any) -> float | None:
    """Seconds between two validations, if `val_check_interval` is a duration."""
    interval: float | None = getattr(trainer, "_val_check_time_interval", None)  # since Lightning 2.6
    return interval


def last_validation(trainer: Any) -> float:
    """The time, on a monotonic clock, at which Lightning validated last or began to train."""
    return float(trainer._last_val_time)


def set_last_validation(trainer: Any, at: float) -> None:
    """Set that time. At infinity no validation is due, and at minus infinity one is."""
    trainer._last_val_time = at


def set_up_validation(trainer: Any) -> None:
    """Set up the validation loaders now, if that has not been done yet.

    Lightning does it at different moments (sanity check, first validation), with collectives. A newcomer must not be
    the only one that still has it before it; if the others have it before them, too, it does it again with them
    (`load_loop_fields`).
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    if trainer.enable_validation and loop._combined_loader is None:
        trainer.validating = True
        loop.setup_data()
        trainer.training = True


def limits(trainer: Any, host: LightningHost) -> dict[str, Any]:
    """How long a training may last, as JSON."""
    timers = [callback for callback in trainer.callbacks if isinstance(callback, host.get("callbacks", "Timer"))]
    return {
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.strategy.max_steps,
        # Of all of a Timer's time, as it measures none of a prediction's.
        "max_time_s": [timer.time_remaining("predict") for timer in timers],
    }


def module_modes(trainer: Any) -> dict[str, Any]:
    """The modes that `train`, `eval` and a callback that freezes BatchNorm layers have set in each module."""
    modules = dict(trainer.lightning_module.named_modules())
    return {
        "evaluating": [name for name, module in modules.items() if not module.training],
        "tracking": {
            name: bool(module.track_running_stats)
            for name, module in modules.items()
            if hasattr(module, "track_running_stats")
        },
    }


def set_module_modes(trainer: Any, modes: dict[str, Any]) -> None:
    """Set what :func:`module_modes` returned in another worker."""
    evaluating, tracking = set(modes["evaluating"]), modes["tracking"]
    for name, module in trainer.lightning_module.named_modules():
        module.training = name not in evaluating
        if name in tracking:
            module.track_running_stats = tracking[name]


# ---------------------------------------------------------------- loaders and their lengths


def settle_after_setup(trainer: Any, settle: Callable[[], None]) -> None:
    """Call `settle` each time that the training loop has set up its loader, and has asked for its length."""

    def make(original: Callable[[], None]) -> Callable[[], None]:
        def setup_data() -> None:
            original()
            settle()

        return setup_data

    replace(trainer.fit_loop, "setup_data", make)


def leave_setup(trainer: Any) -> None:
    """Undo `settle_after_setup`."""
    put_back(trainer.fit_loop, "setup_data")


def validates_in_fractions(trainer: Any) -> bool:
    """Whether `val_check_interval` is a fraction of an epoch."""
    interval = getattr(trainer, "val_check_interval", None)
    return isinstance(interval, float) and interval != 1.0


def reload_epoch(trainer: Any) -> float | None:
    """The epoch in which the user was asked for the training loader, if later epochs ask again."""
    return trainer.fit_loop._last_train_dl_reload_epoch if trainer.reload_dataloaders_every_n_epochs else None


def reload_training(trainer: Any) -> None:
    """Ask for the training loader again, as Lightning does in epochs in which that is due."""
    fit_loop, epoch = trainer.fit_loop, trainer.fit_loop._last_train_dl_reload_epoch
    fit_loop._last_train_dl_reload_epoch = -math.inf
    fit_loop.setup_data()
    fit_loop._last_train_dl_reload_epoch = epoch


def train_loaders(trainer: Any) -> list[Any]:
    """The training loaders that are set up."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def forget_loaders(trainer: Any) -> None:
    """Make a fit ask for its loaders again."""
    trainer.fit_loop._combined_loader = None
    trainer.fit_loop.epoch_loop.val_loop._combined_loader = None


def recorder_of(batch_sampler: Any) -> Any:
    """Lightning's wrapper that records which samples are predicted, if it has wrapped a batch sampler."""
    return batch_sampler if type(batch_sampler).__name__ == "_IndexBatchSamplerWrapper" else None


def recorded(recorder: Any) -> Any:
    """The batch sampler that a recorder has wrapped."""
    return recorder._batch_sampler


def num_batches_started(trainer: Any) -> int:
    """Batches of this epoch that the training loop has fetched."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def num_batches(trainer: Any) -> int:
    """Batches of all epochs that the training loop has fetched, as Lightning's checkpoints count them as well."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.ready)


def num_batches_running(trainer: Any) -> int:
    """One if the training loop has fetched a batch that it has not finished, otherwise zero."""
    counts = trainer.fit_loop.epoch_loop.batch_progress.current
    return int(counts.ready - counts.processed)


def step_back(trainer: Any, num_batches: int) -> None:
    """Count these batches as not fetched: they begin an accumulation and are lost."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for counts in (progress.current, progress.total):
        for name in ("ready", "started", "processed", "completed"):
            setattr(counts, name, max(0, getattr(counts, name) - num_batches))


def set_train_limit(trainer: Any, num_batches: float) -> None:
    """Set the batches of the resumed epoch, which Lightning asked for before it knew where it continues."""
    trainer.fit_loop._combined_loader.limits = [num_batches]


def set_num_batches(trainer: Any, num_batches: float) -> None:
    """Set the batches of an epoch, from which `trainer.estimated_stepping_batches` is computed.

    Validations go with it, unless user code has set after how many batches there is one.
    """
    follows = _own_val_check_batch(trainer) is None
    trainer.fit_loop.max_batches = num_batches
    if follows and getattr(trainer, "val_check_batch", None) not in (None, math.inf):
        trainer.val_check_batch = _val_check_batch(trainer)


def _val_check_batch(trainer: Any) -> float | None:
    """Batches between two validations, as Lightning computes them from `val_check_interval`.

    With more workers, an epoch may have fewer batches than that, where Lightning would never validate.
    """
    # A Trainer that validates by time has no such attribute.
    interval, num_batches = getattr(trainer, "val_check_interval", None), trainer.fit_loop.max_batches
    if isinstance(interval, float):
        return max(1, int(num_batches * interval)) if math.isfinite(num_batches) else math.inf
    if not isinstance(interval, int):
        return None
    return interval if trainer.check_val_every_n_epoch is None else min(interval, num_batches)


def _own_val_check_batch(trainer: Any) -> float | None:
    """The same if user code has set it; None while it follows from `val_check_interval`."""
    shown: float | None = getattr(trainer, "val_check_batch", None)  # a new Trainer of Lightning 2.5 has none
    return None if shown in (None, _val_check_batch(trainer)) else shown


def put_interval_aside(trainer: Any) -> int | None:
    """Let Lightning set up a loader with fewer batches than `val_check_interval`, which it would refuse.

    Returns:
        The number, which is to be set again (`set_interval`); None if it is none, or concerns all epochs together.
    """
    interval = getattr(trainer, "val_check_interval", None)
    if not isinstance(interval, int) or trainer.check_val_every_n_epoch is None:
        return None
    trainer.val_check_interval = 1.0
    return interval


def set_interval(trainer: Any, interval: int) -> None:
    """Undo `put_interval_aside`: validate after so many batches, or at the end of a shorter epoch."""
    trainer.val_check_interval = interval
    trainer.val_check_batch = _val_check_batch(trainer)


def cut_interval(trainer: Any) -> int | None:
    """`val_check_interval`, if it is a number of batches that this epoch does not have."""
    interval, shown = getattr(trainer, "val_check_interval", None), getattr(trainer, "val_check_batch", None)
    if not isinstance(interval, int) or shown is None or shown >= interval or not trainer.enable_validation:
        return None
    return interval if _own_val_check_batch(trainer) is None else None


def set_epoch_length(trainer: Any, num_batches: float, *, in_batch: bool) -> None:
    """Tell the training loop how many batches this epoch has now.

    Args:
        trainer: The Trainer.
        num_batches: Batches of the whole epoch.
        in_batch: A batch is being processed, and its update has just been made: whether it is the last one was
            settled when it was fetched, and must be settled again.
    """
    fit_loop = trainer.fit_loop
    fetcher = fit_loop._data_fetcher
    set_num_batches(trainer, num_batches)
    fetcher.length = num_batches
    fetcher.fetched = num_batches_started(trainer)
    fetcher.done = fetcher.fetched >= num_batches if in_batch else False
    leave_epoch_length(trainer)
    if in_batch:
        fit_loop.epoch_loop.batch_progress.is_last_batch = fetcher.done
        # A short accumulation ends with the last batch of an epoch. If this is not the last one any more, its update
        # still counts for loggers and schedulers.
        replace(fit_loop.epoch_loop, "_should_accumulate", lambda original: lambda: False)


def leave_epoch_length(trainer: Any) -> None:
    """Let the training loop decide again whether a batch ends an accumulation."""
    put_back(trainer.fit_loop.epoch_loop, "_should_accumulate")


def surround_stage(trainer: Any, surround: Callable[[], AbstractContextManager[None]]) -> None:
    """Run everything in a run that follows its setup within a context."""

    def make(run: Callable[[], Any]) -> Callable[[], Any]:
        def run_stage() -> Any:
            with surround():
                return run()

        return run_stage

    replace(trainer, "_run_stage", make)


def leave_stage(trainer: Any) -> None:
    """Undo `surround_stage`."""
    put_back(trainer, "_run_stage")


def active_evaluation_loop(trainer: Any) -> Any:
    """The loop of the current validation, test or prediction."""
    return trainer._active_loop if trainer.fit_loop is not trainer._active_loop else None


def surround_evaluation_steps(trainer: Any, surround: Callable[[], AbstractContextManager[None]]) -> None:
    """Run each step of a validation or a test, with the hooks around it, within a context."""
    for loop in _logging_evaluations(trainer):
        replace(loop, "_evaluation_step", lambda step: partial(_within, surround, step))


def leave_evaluation_steps(trainer: Any) -> None:
    """Undo `surround_evaluation_steps`."""
    for loop in _logging_evaluations(trainer):
        put_back(loop, "_evaluation_step")


def _within(surround: Callable[[], AbstractContextManager[None]], act: Callable[..., None], *args: Any) -> None:
    with surround():
        act(*args)


def set_evaluation_length(loop: Any, index: int, num_batches: float) -> None:
    """Tell an evaluation loop and progress bars how many batches it will take from one of its loaders."""
    lengths = loop._max_batches if hasattr(loop, "_max_batches") else loop.max_batches  # a prediction has the latter
    lengths[index] = num_batches


def free_evaluation_length(loop: Any) -> None:
    """Let the loader, and not a number of batches set in advance, decide when an evaluation is over."""
    fetcher = loop._data_fetcher
    fetcher.length = None
    fetcher.done = False
    combined = fetcher.combined_loader
    if combined._iterator is not None:
        combined._iterator.limits = None


def mark_evaluation_done(loop: Any) -> None:
    """Mark the batch that the loop processed last as the last one."""
    loop.batch_progress.is_last_batch = True


def end_of_run(host: LightningHost) -> BaseException:
    """An exception that ends a run of the Trainer from anywhere in it, as one that has finished.

    Of the hooks that come at the end, only `teardown` is called. Lightning has it for callbacks that try things out.
    """
    end: BaseException = host.get("utilities.exceptions", "_TunerExitException")()
    return end


def do_without_best(trainer: Any) -> None:
    """Evaluate the current weights, because this Trainer does not know its best or last checkpoint."""

    def replaced(select: Callable[..., Any]) -> Callable[..., Any]:
        def selected(state_fn: Any, path: Any, **kwargs: Any) -> Any:
            if path in (None, "best", "last"):
                path, kwargs = None, {**kwargs, "model_provided": True}  # else the best one is meant, too
            return select(state_fn, path, **kwargs)

        return selected

    replace(trainer._checkpoint_connector, "_select_ckpt_path", replaced)


def do_without_lost(trainer: Any, is_lost: Callable[[str], bool]) -> None:
    """Evaluate the current weights, because the file from which others would be loaded is lost.

    Args:
        trainer: The Trainer.
        is_lost: Whether this is so, given the file's path.
    """

    def replaced(select: Callable[..., Any]) -> Callable[..., Any]:
        def selected(state_fn: Any, path: Any, **kwargs: Any) -> Any:
            found = select(state_fn, path, **kwargs)
            evaluates = found is not None and state_fn.value != "fit"
            return None if evaluates and is_lost(str(found)) else found

        return selected

    replace(trainer._checkpoint_connector, "_select_ckpt_path", replaced)


def know_best(trainer: Any) -> None:
    """Undo `do_without_best` and `do_without_lost`."""
    put_back(trainer._checkpoint_connector, "_select_ckpt_path")


# ---------------------------------------------------------------- self.log


def metric_dicts(trainer: Any) -> dict[str, dict[str, Any]]:
    """The three dicts of logged metrics, which callbacks, loggers and the progress bar read."""
    connector = trainer._logger_connector
    names = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
    return {name: getattr(connector, name) for name in names}


def monitored(trainer: Any) -> dict[str, Any]:
    """The dict of logged metrics from which checkpoints and schedulers take those that they monitor."""
    return metric_dicts(trainer)["_callback_metrics"]


def log_state(trainer: Any) -> dict[str, Any]:
    """What training and validation have logged: keys and how each is reduced, without the values.

    The end of an epoch reduces all of them in this order, so it must be the same in all workers.
    """
    connector = trainer._logger_connector
    return {
        # Whether the next `self.log` is the first one of its hook in this epoch, and resets it.
        "place": [connector._first_loop_iter, connector._current_fx],
        "results": [[_describe(*item) for item in results.items()] for results in _results(trainer)],
    }


def load_log_state(trainer: Any, host: LightningHost, state: dict[str, Any]) -> None:
    """Load what the others have logged, without values."""
    connector = trainer._logger_connector
    connector._first_loop_iter, connector._current_fx = state["place"]
    modules = dict(trainer.lightning_module.named_modules())
    for results, described in zip(_results(trainer), state["results"], strict=True):
        results.clear()
        for item in described:
            results[item["key"]] = _empty_result(host, trainer, item, modules)


def without_lost_metrics(trainer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A saved :func:`log_state` without the torchmetrics objects that the module no longer has, with a warning."""
    modules = dict(trainer.lightning_module.named_modules())

    def is_lost(described: dict[str, Any]) -> bool:
        return not described["is_tensor"] and described["fields"]["metric_attribute"] not in modules

    lost = sorted({item["fields"]["name"] for results in state["results"] for item in results if is_lost(item)})
    if lost:
        logger.warning("the checkpoint has logged metrics that the module no longer has. Received: %s", ", ".join(lost))
    return {**state, "results": [[item for item in results if not is_lost(item)] for results in state["results"]]}


def _results(trainer: Any) -> list[Any]:
    epoch_loop = trainer.fit_loop.epoch_loop
    return [epoch_loop._results, epoch_loop.val_loop._results]


META = "fx name prog_bar logger on_step on_epoch enable_graph add_dataloader_idx dataloader_idx metric_attribute"


_REDUCTIONS = ("mean", "sum", "min", "max")


def reduction_of(reduce_fx: Callable[..., Any]) -> str:
    """Name of the function that `self.log(reduce_fx=...)` reduces with."""
    return str(reduce_fx.__name__)


def _describe(key: str, result: Any) -> dict[str, Any]:
    meta = result.meta
    return {
        "key": key,
        "is_tensor": result.is_tensor,
        "has_reset": result.has_reset,
        "reduce_fx": reduction_of(meta.reduce_fx),
        "builtin": meta.reduce_fx in (sum, min, max),
        "sync": [meta.sync.should, meta.sync.rank_zero_only],
        "dtypes": {name: getattr(result, name).dtype for name in result._defaults},
        "fields": {name: getattr(meta, name) for name in META.split()},
    }


def _empty_result(host: LightningHost, trainer: Any, described: dict[str, Any], modules: dict[str, Any]) -> Any:
    module = "trainer.connectors.logger_connector.result"
    if described["reduce_fx"] not in _REDUCTIONS:
        raise ProtocolError(f"unknown reduction of a metric. Received: {described['reduce_fx']!r}")
    reduce_fx = getattr(builtins if described["builtin"] else torch, described["reduce_fx"])
    meta = host.get(module, "_Metadata")(reduce_fx=reduce_fx, **described["fields"])
    should, rank_zero_only = described["sync"]
    meta.sync = host.get(module, "_Sync")(_should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only)
    result = host.get(module, "_ResultMetric")(meta, described["is_tensor"]).to(trainer.strategy.root_device)
    result.has_reset = described["has_reset"]
    for name, dtype in described["dtypes"].items():
        setattr(result, name, getattr(result, name).to(dtype))
    if not described["is_tensor"]:
        result.value = modules[meta.metric_attribute]
    return result


def logged_values(trainer: Any) -> dict[str, dict[str, Tensor]]:
    """Accumulated values of `self.log` in the current loop: key → field → value."""
    results = {key: result for key, result in (trainer._results or {}).items() if result.is_tensor}
    return {key: {name: getattr(r, name) for name in r._defaults} for key, r in results.items()}


def set_logged_values(trainer: Any, values: dict[str, dict[str, Tensor]]) -> None:
    """Go back to these values; keys that were not logged then stay known, without values."""
    for key, result in (trainer._results or {}).items():
        if result.is_tensor:
            for name, value in values.get(key, result._defaults).items():
                setattr(result, name, value.clone().to(getattr(result, name).dtype))
            result._update_count = max(result._update_count, key in values)


def live_keys(trainer: Any) -> set[str]:
    """Keys that `self.log` has filled in the current loop since they were reset."""
    return {key for key, result in (trainer._results or {}).items() if not result.has_reset}


def empty_others(trainer: Any, live: Collection[str]) -> None:
    """Treat all other keys as reset."""
    for key, result in (trainer._results or {}).items():
        if key not in live:
            result.has_reset = True


def epoch_results(trainer: Any) -> dict[str, dict[str, Any]]:
    """Values of `self.log` that the current loop shows at its end: key → what it is and holds.

    A value is *pending* until it has been computed. Of a torchmetrics object, nothing but its name is told.
    """
    return {
        key: {
            **_describe(key, result),
            "pending": result._computed is None,
            "totals": {name: getattr(result, name) for name in result._defaults},
        }
        for key, result in (trainer._results or {}).items()
        if result.meta.on_epoch and not result.has_reset and (result._update_count or not result.is_tensor)
    }


def show_result(trainer: Any, host: LightningHost, described: dict[str, Any], value: Tensor | None) -> Any:
    """Show a value at the end of the current loop, even where it was not logged.

    Args:
        trainer: The Trainer.
        host: The class tree.
        described: Its entry in :func:`epoch_results`.
        value: None for a torchmetrics object, which is computed now.

    Returns:
        What is shown.
    """
    results, key = trainer._results, described["key"]
    if key not in results:
        results[key] = _empty_result(host, trainer, described, dict(trainer.lightning_module.named_modules()))
    result = results[key]
    result.has_reset = False
    result._computed = None if value is None else value.to(result.value.device)
    if value is None:
        _forget_computed(result.value)
        result.compute()
    return result._computed


def _forget_computed(metric: Any) -> None:
    for part in metric.modules():
        if hasattr(part, "_computed"):
            part._computed = None


def computed(result: Any) -> Any:
    """The value that a result shows at the end of an epoch; None while it is pending."""
    return result._computed


def shown_here(result: Any) -> Any:
    """The value that this worker alone would show for a pending one."""
    if not result.is_tensor:
        value = result.value.compute()
        _forget_computed(result.value)
    elif result.meta.is_mean_reduction:
        value = result.value / result.cumulated_batch_size
    else:
        value = result.value
    return value.detach() if isinstance(value, Tensor) and not result.meta.enable_graph else value


def reductions(trainer: Any) -> dict[str, str]:
    """How to reduce a batch's logged values, by the name that is shown; "first" if it is reduced already."""
    known = {}
    for results in {id(r): r for r in (*_results(trainer), trainer._results or {})}.values():
        for result in results.values():
            for name in (*results._forked_name(result, True), results._forked_name(result, False)[1]):
                is_common = result.meta.sync.should or result.meta.sync.rank_zero_only
                known[name] = "first" if is_common else reduction_of(result.meta.reduce_fx)
    return known


def in_batch(trainer: Any) -> bool:
    """Whether values of a batch, and not of an epoch, are shown now."""
    return trainer._logger_connector._first_loop_iter is not None


class LoggingHooks:
    """The places that all workers pass, and where logged values are shown or decided by.

    Args:
        trainer: The Trainer.
        host: The class tree.
        settle: Called when an epoch's values are complete, before anybody reads them, and again when the hooks at its
            end may have logged more.
        show: Called with Lightning's own function, a result and whether the batch's value is wanted; what is shown.
        candidates: Called with the values of a batch that a ModelCheckpoint decides by; those that it gets.
    """

    def __init__(
        self,
        trainer: Any,
        host: LightningHost,
        *,
        settle: Callable[[], None],
        show: Callable[[Callable[..., Any], Any, bool], Any],
        candidates: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self._trainer, self._host = trainer, host
        self._settle, self._show, self._candidates = settle, show, candidates
        self._hooked: list[tuple[Any, str]] = []

    def attach(self) -> None:
        """Call the functions from now on."""
        trainer, connector = self._trainer, self._trainer._logger_connector
        self._hook(connector, "epoch_end_reached", self._epoch_end_reached)
        self._hook(connector, "on_epoch_end", self._settled_first)
        self._hook(trainer.fit_loop.epoch_loop, "_get_monitor_value", self._monitor_value)
        for loop in (trainer.fit_loop.epoch_loop, *_logging_evaluations(trainer)):
            self._hook(loop._results, "_get_cache", self._show)
        monitoring = [c for c in trainer.callbacks if isinstance(c, self._monitoring)]
        for callback in monitoring[:1]:  # Lightning calls these last
            self._hook(callback, "on_train_epoch_end", self._settled_first)
        for callback in monitoring:
            if isinstance(callback, self._host.get("callbacks", "ModelCheckpoint")):
                self._hook(callback, "_monitor_candidates", self._monitor_candidates)

    def detach(self) -> None:
        """Leave everything as it was."""
        for owner, name in self._hooked:
            put_back(owner, name)
        self._hooked.clear()

    @property
    def _monitoring(self) -> tuple[type, ...]:
        return self._host.get("callbacks", "Checkpoint"), self._host.get("callbacks", "EarlyStopping")

    def _hook(self, owner: Any, name: str, act: Callable[..., Any]) -> None:
        replace(owner, name, lambda original: partial(act, original))
        self._hooked.append((owner, name))

    def _epoch_end_reached(self, original: Callable[[], None]) -> None:
        original()
        if active_evaluation_loop(self._trainer) is None:
            self._settle()

    def _settled_first(self, original: Callable[..., None], *args: Any) -> None:
        self._settle()
        original(*args)

    def _monitor_value(self, original: Callable[[str], Any], key: str) -> Any:
        value = original(key)
        if not in_batch(self._trainer):
            return value
        return self._candidates({} if value is None else {key: value}).get(key)

    def _monitor_candidates(self, original: Callable[[Any], dict[str, Any]], trainer: Any) -> dict[str, Any]:
        found = original(trainer)
        return self._candidates(found) if in_batch(trainer) and trainer.training else found


def set_zero_batch_size(trainer: Any) -> None:
    """Exclude the current padding batch from what `self.log` averages over samples."""
    if trainer._results is not None:
        trainer._results.batch_size = 0


# ---------------------------------------------------------------- loops and checkpoints


def loop_progress(trainer: Any) -> dict[str, Any]:
    """Counters of the fit loop and its children, by name."""
    progress = dict(trainer.fit_loop.state_dict())
    progress["state_dict"] = {}  # the loader's state goes its own way
    return progress


def load_loop_progress(trainer: Any, state: dict[str, Any]) -> None:
    """Set these counters, without the restart that loading a checkpoint would announce."""
    known = loop_progress(trainer)
    for name, value in state.items():
        if name not in known:
            raise ProtocolError(
                f"the loops of this release of Lightning count nothing of this name. Received: {name!r}"
            )
        *path, last = name.split(".")
        owner = trainer.fit_loop
        for part in path:
            owner = getattr(owner, part)
        if last == "state_dict":
            owner.on_load_checkpoint(value)
        else:
            getattr(owner, last).load_state_dict(value)


def loop_fields(trainer: Any) -> dict[str, Any]:
    """Other fields that the loops decide by, which no checkpoint holds."""
    fit_loop, val_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop
    return {
        "train_reload_epoch": fit_loop._last_train_dl_reload_epoch,
        "val_reload_epoch": val_loop._last_val_dl_reload_epoch,
        "val_is_set_up": val_loop._combined_loader is not None,
        "val_batches_seen": dict(val_loop._seen_batches_per_dataloader),
        "should_stop": bool(trainer.should_stop),
    }


def load_loop_fields(trainer: Any, fields: dict[str, Any]) -> None:
    """Set what :func:`loop_fields` returned in another worker."""
    fit_loop, val_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop
    fit_loop._last_train_dl_reload_epoch = fields["train_reload_epoch"]
    val_loop._last_val_dl_reload_epoch = fields["val_reload_epoch"]
    if not fields["val_is_set_up"]:
        val_loop._combined_loader = None
    val_loop._seen_batches_per_dataloader.update(fields["val_batches_seen"])
    trainer.should_stop = fields["should_stop"]


def load_loader_state(trainer: Any) -> None:
    """Give the training loader its state, unless Lightning has.

    It does not after the end of an epoch, nor if the loader was set up (for `estimated_stepping_batches`) before.
    """
    fit_loop = trainer.fit_loop
    states, fit_loop._combined_loader_states_to_load = fit_loop._combined_loader_states_to_load, []
    if states:
        fit_loop._combined_loader._load_state_dicts(states)
        iter(fit_loop._data_fetcher)


def restart_between_steps(trainer: Any) -> None:
    """The resumed state was saved between two steps, so the epoch's loop need not guess what was done."""
    trainer.fit_loop.epoch_loop.restarting = False


def go_on_between_steps(trainer: Any, host: LightningHost) -> None:
    """The state is complete again: the epoch ends normally, and callbacks have what they set at its start."""
    trainer.fit_loop._restarting = False
    for callback in trainer.callbacks:
        if isinstance(callback, host.get("callbacks", "GradientAccumulationScheduler")):
            callback.on_train_epoch_start(trainer)


# ---------------------------------------------------------------- schedules and limits


def follow_schedules(trainer: Any, due: Callable[[int], int]) -> None:
    """Where Lightning steps a scheduler after an update, make as many steps as `due` says.

    Args:
        trainer: The Trainer.
        due: Given the number of the scheduler among `trainer.lr_scheduler_configs`.
    """

    def follow(make: Callable[[str, bool], None]) -> Callable[[str, bool], None]:
        def update(interval: str, update_plateau_schedulers: bool) -> None:
            if interval == "step":
                step_schedulers(trainer, due, plateau=update_plateau_schedulers)
            else:
                make(interval, update_plateau_schedulers)

        return update

    replace(trainer.fit_loop.epoch_loop, "_update_learning_rates", follow)


def unfollow_schedules(trainer: Any) -> None:
    """Undo `follow_schedules` and the wrappers for manual optimization."""
    put_back(trainer.fit_loop.epoch_loop, "_update_learning_rates")
    put_back(trainer.lightning_module, "lr_schedulers")


def step_schedulers(trainer: Any, due: Callable[[int], int], *, plateau: bool = False) -> None:
    """Make the due steps as Lightning makes them: with the user's hook, and counted."""
    if not trainer.lightning_module.automatic_optimization:
        return
    loop, strategy = trainer.fit_loop.epoch_loop, trainer.strategy
    make, configs = type(loop)._update_learning_rates, strategy.lr_scheduler_configs
    for number, config in enumerate(configs):
        if config.interval != "step" or config.reduce_on_plateau != plateau:
            continue
        times, frequency = due(number), config.frequency
        strategy.lr_scheduler_configs, config.frequency = [config], 1
        try:
            make_steps(config.scheduler, times, partial(make, loop, "step", plateau), shown=plateau)
        finally:
            strategy.lr_scheduler_configs, config.frequency = configs, frequency


def wrap_schedulers(module: Any, due: Callable[[int], int]) -> None:
    """Where user code steps a scheduler of `self.lr_schedulers()`, make as many steps as `due` says."""

    def wrap(find: Callable[[], Any]) -> Callable[[], Any]:
        known: dict[int, tuple[Any, Any]] = {}

        def stepped(number: int, scheduler: Any) -> Any:
            """The wrapped scheduler, which user code asks for in each batch; it is made once."""
            if number not in known or known[number][0] is not scheduler:
                known[number] = (scheduler, _stepped_by(partial(due, number), scheduler))
            return known[number][1]

        def lr_schedulers() -> Any:
            found = find()
            if isinstance(found, list):
                return [stepped(number, one) for number, one in enumerate(found)]
            return None if found is None else stepped(0, found)

        return lr_schedulers

    replace(module, "lr_schedulers", wrap)


def _stepped_by(due: Callable[[], int], scheduler: Any) -> Any:
    """The same scheduler in its own class, whose fields are those of the original."""
    shown = isinstance(scheduler, ReduceLROnPlateau)

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        make_steps(scheduler, due(), partial(scheduler.step, *args, **kwargs), shown=shown)

    cls = type(scheduler)
    wrapped: Any = object.__new__(type(cls.__name__, (cls,), {"step": step}))
    wrapped.__dict__ = vars(scheduler)
    return wrapped


def make_steps(scheduler: Any, times: int, step: Callable[[], None], *, shown: bool) -> None:
    """Step a scheduler several times in one update.

    One that is shown a value (`ReduceLROnPlateau`) is shown it again as long as that is right: a value that is no
    better stands for all these updates without a better one, and a cooldown goes by with them. But a better value has
    nothing worse after it, and what has reduced the rate once does not reduce it again.
    """
    for _ in range(times):
        step()
        if shown and not (getattr(scheduler, "num_bad_epochs", 0) or getattr(scheduler, "in_cooldown", False)):
            return


def surround_passes(
    trainer: Any,
    surround: Callable[[Callable[..., Any], bool, dict[str, Any]], Callable[..., Any]],
    *,
    begins: Callable[[], bool],
) -> None:
    """Let another function do what Lightning does with a batch (forward, zero_grad, backward).

    Args:
        trainer: The Trainer.
        surround: Called with Lightning's own function, whether the batch is the first one of an accumulation, and the
            arguments of the training step; the function that is called instead.
        begins: Whether the batch is the first one since an update. Lightning expects that of every n-th batch, but
            there are others after what was the end of an epoch until a worker was lost in its update.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def make_closure(kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
            inner = original(kwargs, optimizer, batch_idx)
            is_first = batch_idx % trainer.accumulate_grad_batches == 0
            if not is_first and begins():
                is_first, inner._zero_grad_fn = True, loop._make_zero_grad_fn(0, optimizer)
            outer = copy(inner)  # an object that holds a method of its own would live until the garbage is collected
            outer.closure = surround(inner.closure, is_first, kwargs)
            return outer

        return make_closure

    replace(loop, "_make_closure", make)


def leave_passes(trainer: Any) -> None:
    """Undo `surround_passes`."""
    put_back(trainer.fit_loop.epoch_loop.automatic_optimization, "_make_closure")


def finish_before_hooks(trainer: Any, finish: Callable[[], bool]) -> None:
    """Call a function at the end of each backward pass, before the hooks `on_after_backward`.

    Args:
        trainer: The Trainer.
        finish: Returns whether the hooks are to be called.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def post_backward(loss: Tensor, module: Any) -> Any:
            return original(loss, module) if finish() else loss.detach()

        return post_backward

    replace(trainer.precision_plugin, "post_backward", make)


def leave_backward(trainer: Any) -> None:
    """Undo `finish_before_hooks`."""
    put_back(trainer.precision_plugin, "post_backward")


def step_fields(trainer: Any) -> tuple[Any, ...]:
    """Fields in which Lightning records the current batch."""
    results = trainer._results
    return trainer.lightning_module._current_fx_name, results.batch, results.batch_size


def set_step_fields(trainer: Any, fields: tuple[Any, ...]) -> None:
    """Restore these fields."""
    module, results = trainer.lightning_module, trainer._results
    module._current_fx_name, results.batch, results.batch_size = fields


def set_batch(trainer: Any, arguments: dict[str, Any], batch: Any) -> None:
    """Continue with another batch, in the training step and in later hooks where the batch can be changed."""
    old = arguments["batch"]
    if type(old) is type(batch) is list:
        old[:], batch = batch, old
    elif type(old) is type(batch) is dict:
        old.update(batch)
        batch = old
    arguments["batch"] = batch
    results = trainer._results
    results.batch, results.batch_size = batch, None


def in_train_batch(trainer: Any) -> bool:
    """Whether the module's code for a batch is running, and not that for an epoch or an evaluation."""
    return trainer.lightning_module._current_fx_name in ("training_step", "on_train_batch_start", "on_train_batch_end")


def set_max_steps(trainer: Any, max_steps: int) -> None:
    """Set the number of updates after which the training ends."""
    trainer.fit_loop.epoch_loop.max_steps = max_steps


def run_time_limits(trainer: Any) -> dict[str, Any]:
    """Settings that user code may change in a training and that control its loops or updates, without `max_steps`."""
    shown = {name: getattr(trainer, name, None) for name in _LIMITS_OF_TRAINER}
    shown.update({name: getattr(trainer.fit_loop, name) for name in ("max_epochs", "min_epochs")})
    shown["min_steps"] = trainer.fit_loop.epoch_loop.min_steps
    shown["should_stop"] = bool(shown["should_stop"])
    shown["val_check_batch"] = _own_val_check_batch(trainer)
    algorithm = trainer.gradient_clip_algorithm
    shown["gradient_clip_algorithm"] = None if algorithm is None else str(getattr(algorithm, "value", algorithm))
    return shown


_LIMITS_OF_TRAINER = (
    "should_stop",
    "limit_train_batches",
    "limit_val_batches",
    "check_val_every_n_epoch",
    "accumulate_grad_batches",
    "reload_dataloaders_every_n_epochs",
    "num_sanity_val_steps",
    "val_check_interval",
    "log_every_n_steps",
    "gradient_clip_val",
)


def set_run_time_limit(trainer: Any, host: LightningHost, name: str, value: Any) -> None:
    """Set one of these settings."""
    if name in _LIMITS_OF_TRAINER:
        setattr(trainer, name, value)
    elif name == "val_check_batch":
        trainer.val_check_batch = _val_check_batch(trainer) if value is None else value
    elif name == "gradient_clip_algorithm":
        known = host.get("utilities.enums", "GradClipAlgorithmType")
        trainer.gradient_clip_algorithm = None if value is None else known(value)
    elif name == "min_steps":
        trainer.fit_loop.epoch_loop.min_steps = value
    else:
        setattr(trainer.fit_loop, name, value)


def surround_decisions(
    trainer: Any,
    host: LightningHost,
    *,
    batch: Callable[[], None],
    epoch: Callable[[], None],
    skip: Callable[[Any], Any],
) -> None:
    """Call functions before the loops of a training decide how to continue.

    Args:
        trainer: The Trainer.
        host: Its class tree.
        batch: Called when the hooks at the end of a batch have been.
        epoch: Called when those at the start of an epoch have been, and those at its end; and before the training.
        skip: Given what the module's `on_train_batch_start` returns, if it has one; what Lightning is to think of it:
            after -1, it leaves out the rest of the epoch.
    """

    def after(original: Callable[[], None]) -> Callable[[], None]:
        def on_advance_end() -> None:
            original()
            epoch()

        return on_advance_end

    replace(trainer.fit_loop.epoch_loop, "on_advance_end", partial(_before, batch))
    replace(trainer.fit_loop, "run", partial(_before, epoch))
    replace(trainer.fit_loop, "advance", partial(_before, epoch))
    replace(trainer.fit_loop, "on_advance_end", after)
    module = trainer.lightning_module
    if host.get("utilities.model_helpers", "is_overridden")("on_train_batch_start", module):
        replace(module, "on_train_batch_start", lambda original: lambda *args: skip(original(*args)))


def leave_decisions(trainer: Any) -> None:
    """Undo `surround_decisions`."""
    put_back(trainer.lightning_module, "on_train_batch_start")
    put_back(trainer.fit_loop, "run")
    put_back(trainer.fit_loop.epoch_loop, "on_advance_end")
    put_back(trainer.fit_loop, "advance")
    put_back(trainer.fit_loop, "on_advance_end")


def _before(first: Callable[[], None], original: Callable[..., None]) -> Callable[..., None]:
    def both(*args: Any) -> None:
        first()
        original(*args)

    return both


def surround_entry(trainer: Any, *, training: Callable[[], None], batches: Callable[[], None]) -> None:
    """Call functions on the way to the first batch of a training.

    Args:
        trainer: The Trainer.
        training: Called before the hooks at the start of the training.
        batches: Called after those at the start of an epoch, when its counters of batches have been reset.
    """

    def after(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def on_run_start(data_fetcher: Any) -> None:
            original(data_fetcher)
            batches()

        return on_run_start

    replace(trainer.fit_loop, "on_run_start", partial(_before, training))
    replace(trainer.fit_loop.epoch_loop, "on_run_start", after)


def leave_entry(trainer: Any) -> None:
    """Undo `surround_entry`."""
    put_back(trainer.fit_loop, "on_run_start")
    put_back(trainer.fit_loop.epoch_loop, "on_run_start")


def forget_restart(trainer: Any) -> None:
    """The state loaded from a file has been replaced, so the loops do not begin where it ended."""
    fit_loop = trainer.fit_loop
    fit_loop._restarting = fit_loop.epoch_loop.restarting = False
    for loop in (fit_loop, fit_loop.epoch_loop):
        loop.reset_restart_stage()


def in_epoch(loops: dict[str, Any]) -> bool:
    """Whether, by these counters, the hooks at an epoch's start have been called and those at its end have not."""
    current = loops["epoch_progress"]["current"]
    return bool(current["started"] > current["processed"])


HYPER_PARAMETERS = tuple(
    (f"{owner}hyper_parameters", f"{owner}hparams_name", f"{owner}hparams_type") for owner in ("", "datamodule_")
)
"""Where a checkpoint holds the module's and the data module's, whose argument they are, and their class."""


def import_early() -> None:
    """Import what Lightning imports on the first checkpoint dump: all would wait for it when a newcomer joins."""
    if importlib.util.find_spec("omegaconf") is not None:
        importlib.import_module("omegaconf")


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """The content that Lightning would write into a checkpoint file."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return checkpoint


def add_hyper_parameters(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Add the hyper-parameters that a checkpoint lacks, because the user's hooks may read them."""
    for owner, (key, *_) in zip((trainer.lightning_module, trainer.datamodule), HYPER_PARAMETERS, strict=True):
        if owner is not None and owner.hparams:
            kept = checkpoint.get(key)
            checkpoint[key] = {**owner.hparams, **kept} if isinstance(kept, dict) else copy(owner.hparams)


def load_checkpoint(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Load model, data module, callbacks and precision from a checkpoint, as Lightning does when it resumes."""
    connector = trainer._checkpoint_connector
    previous = connector._loaded_checkpoint
    connector._loaded_checkpoint = checkpoint
    try:
        connector.restore_model()
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
    finally:
        connector._loaded_checkpoint = previous


def before_restoring(
    trainer: Any, choose: Callable[[Any, bool | None], Any], *, do_without: Callable[[FileNotFoundError], bool]
) -> None:
    """Let `choose` decide, once, which file `fit` resumes from.

    Args:
        trainer: The Trainer.
        choose: Given the file that the user named, and `weights_only` (None before Lightning 2.6, which knows it).
        do_without: Whether to go on without the file if it cannot be found.
    """
    connector = trainer._checkpoint_connector

    def replaced(restore: Callable[..., None]) -> Callable[..., None]:
        def chosen(path: Any = None, *args: Any, **kwargs: Any) -> None:
            put_back(connector, "_restore_modules_and_callbacks")
            weights_only = args[0] if args else kwargs.get("weights_only")
            try:
                restore(choose(path, weights_only), *args, **kwargs)
            except FileNotFoundError as error:
                if connector._loaded_checkpoint or not do_without(error):  # a hook of the user's may have raised it
                    raise
                restore(None, *args, **kwargs)

        return chosen

    replace(connector, "_restore_modules_and_callbacks", replaced)


def forget_last_batch(checkpoint: dict[str, Any]) -> None:
    """In a checkpoint between two epochs: the batch before was the last of its epoch, but the next one has begun."""
    checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False


def move_loader_state_out(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Take our loader's state out of a checkpoint: a Trainer without ElasticFlow could not place it."""
    fit_loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    states = fit_loop.pop("combined_loader", None)
    return states[0] if states else None


def move_loader_state_in(checkpoint: dict[str, Any], state: dict[str, Any]) -> None:
    """Put it back where Lightning passes it to the loader."""
    checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = [state]


# ---------------------------------------------------------------- loggers


def logger_versions(trainer: Any) -> list[Any]:
    """Version of each logger; None if it has none that a folder or a run could be named by."""
    versions = [getattr(logger, "version", None) for logger in trainer.loggers]
    return [version if isinstance(version, (int, str)) else None for version in versions]


def set_logger_versions(trainer: Any, versions: Sequence[Any]) -> None:
    """Make this worker's loggers write where rank 0's do, in case it becomes rank 0."""
    for log, version in zip(trainer.loggers, versions, strict=True):
        is_name = isinstance(version, int) or (isinstance(version, str) and re.fullmatch(r"\w[\w.=-]*", version))
        if is_name:  # a store may have named a folder elsewhere
            _set_run(log, version)


def _set_run(log: Any, version: Any) -> None:
    fields = vars(log)
    if "_version" in fields:  # CSV, TensorBoard
        log._version = version
    elif "_wandb_init" in fields:
        log._id = log._wandb_init["id"] = version
    elif "_mlflow_client" in fields:
        log._run_id = version
    elif "_experiment_key" in fields and log._experiment_key != version:  # Comet, which begins one when it is made
        if log._experiment is not None:
            log._experiment.end()
        log._experiment, log._experiment_key, log._mode = None, version, "get"


def log_dir(trainer: Any, host: LightningHost) -> Any:
    """This worker's own `trainer.log_dir`, which Lightning broadcasts from rank 0."""
    if not trainer.loggers:
        return trainer.default_root_dir
    first = trainer.loggers[0]
    has_folder = isinstance(first, (host.get("loggers", "TensorBoardLogger"), host.get("loggers", "CSVLogger")))
    return first.log_dir if has_folder else first.save_dir


def step_to_log(trainer: Any) -> int | None:
    """Number of the current step, as loggers know it; None if it is not logged (`log_every_n_steps`)."""
    if not trainer._logger_connector.should_update_logs:
        return None
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def show_rates(trainer: Any, host: LightningHost, shown: Callable[[], AbstractContextManager[None]]) -> None:
    """Make each LearningRateMonitor read the parameter groups within this context."""
    for callback in _rate_monitors(trainer, host):
        replace(callback, "_extract_stats", lambda extract: partial(_shown_stats, extract, shown))


def hide_rates(trainer: Any, host: LightningHost) -> None:
    """Undo `show_rates`."""
    for callback in _rate_monitors(trainer, host):
        put_back(callback, "_extract_stats")


def _rate_monitors(trainer: Any, host: LightningHost) -> list[Any]:
    return [c for c in trainer.callbacks if isinstance(c, host.get("callbacks", "LearningRateMonitor"))]


def _shown_stats(
    extract: Callable[..., dict[str, Any]],
    shown: Callable[[], AbstractContextManager[None]],
    trainer: Any,
    interval: str,
) -> dict[str, Any]:
    with shown():  # a rate may be a tensor, which is another number afterwards
        return {k: float(v) if isinstance(v, Tensor) else v for k, v in extract(trainer, interval).items()}


def set_workers_measured(monitor: Any, world_size: int) -> None:
    """Tell a ThroughputMonitor how many workers there are, by which it multiplies what it measures in its own."""
    for throughput in monitor._throughputs.values():
        throughput.world_size = world_size


def prepare_batch(trainer: Any, batch: Any) -> Any:
    """Prepare a batch as the training loop does before a step."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def training_step(trainer: Any, batch: Any, arguments: Sequence[Any]) -> Any:
    """Make a training step inside another one. It logs for the epoch; the other's values remain those of the step.

    Args:
        trainer: The Trainer.
        batch: The batch.
        arguments: The others of `training_step`.
    """
    results = trainer._results
    outer = step_fields(trainer)
    caches = {key: result._forward_cache for key, result in results.items()}
    set_step_fields(trainer, ("training_step", batch, None))
    try:
        return trainer.strategy.training_step(batch, *arguments)
    finally:
        set_step_fields(trainer, outer)
        for key, cache in caches.items():
            results[key]._forward_cache = cache
