"""The private parts of Lightning's loops that ElasticFlow touches, and nothing else does.

Everything here reads or sets attributes of one Trainer's own objects. `tests/lightning/test_hooks.py` fails with
the name of what moved when a release of Lightning changes one.
"""

from __future__ import annotations

import math
from typing import Any


def keep_samplers(trainer: Any) -> None:
    """Keep Lightning from putting distributed samplers into the loaders: ElasticFlow deals the samples."""
    trainer._accelerator_connector.use_distributed_sampler = False


def num_batches_started(trainer: Any) -> int:
    """Batches of this epoch that the training loop has fetched."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def set_epoch_length(trainer: Any, num_batches: int, *, in_batch: bool) -> None:
    """Tell the training loop how many batches this epoch has now.

    Args:
        trainer: The Trainer.
        num_batches: Batches of the whole epoch.
        in_batch: A batch is being processed: whether it is the last one was settled when it was fetched, and
            must be settled again.
    """
    fit_loop = trainer.fit_loop
    fetcher = fit_loop._data_fetcher
    fit_loop.max_batches = num_batches
    fetcher.length = num_batches
    fetcher.fetched = num_batches_started(trainer)
    fetcher.done = fetcher.fetched >= num_batches if in_batch else False
    if in_batch:
        fit_loop.epoch_loop.batch_progress.is_last_batch = fetcher.done
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch not in (None, math.inf):
        trainer.val_check_batch = max(1, int(num_batches * trainer.val_check_interval))


def active_evaluation_loop(trainer: Any) -> Any:
    """The loop that runs a validation, a test or a prediction now."""
    return trainer._active_loop if not trainer.fit_loop is trainer._active_loop else None


def free_evaluation_length(loop: Any) -> None:
    """Let the loader, not a number of batches settled in advance, tell when an evaluation is over."""
    fetcher = loop._data_fetcher
    fetcher.length = None
    fetcher.done = False
    combined = fetcher.combined_loader
    if combined._iterator is not None:
        combined._iterator.limits = None


def mark_evaluation_done(loop: Any) -> None:
    """The batch that the loop processed last was the last one."""
    loop.batch_progress.is_last_batch = True


def combined_loader(trainer: Any) -> Any:
    """The loader that combines the user's training loaders."""
    return trainer.fit_loop._combined_loader


def metric_dicts(trainer: Any) -> dict[str, dict[str, Any]]:
    """The three dicts of logged metrics, which callbacks, loggers and the progress bar read."""
    connector = trainer._logger_connector
    names = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
    return {name: getattr(connector, name) for name in names}


def epoch_results(trainer: Any) -> Any:
    """Running results of `self.log` in this training epoch."""
    return trainer.fit_loop.epoch_loop._results


def loop_progress(trainer: Any) -> dict[str, Any]:
    """Counters of the fit loop and its children, by name."""
    return dict(trainer.fit_loop.state_dict())


def load_loop_progress(trainer: Any, state: dict[str, Any]) -> None:
    """Set these counters, without the restart that loading a checkpoint would announce."""
    for name, value in state.items():
        *path, last = name.split(".")
        owner = trainer.fit_loop
        for part in path:
            owner = getattr(owner, part)
        if last == "state_dict":
            owner.on_load_checkpoint(value)
        else:
            getattr(owner, last).load_state_dict(value)
    trainer.fit_loop._combined_loader_states_to_load = []


def set_zero_batch_size(trainer: Any) -> None:
    """The batch at hand is padding: what `self.log` averages over samples must not count it."""
    epoch_results(trainer).batch_size = 0
