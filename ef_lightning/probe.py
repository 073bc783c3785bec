"""The private parts of Lightning, torchmetrics and torch that ElasticFlow touches, and whether they are there.

They are looked for when a training is set up, so that a release of Lightning which has moved one gives one clear error
before anything is trained. The contract tests look for them too, also for those that are there in a training only.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ef_common.errors import UnsupportedError
from ef_lightning.host import Host

TRIED = (2, 6)
"""The newest release of Lightning that the tests were run with."""


@dataclass(frozen=True)
class Hook:
    """A private part.

    Args:
        owner: Path to the object that holds it, from one of the names that :func:`parts_of` gives, or a test's own.
        name: Its name.
        user: Who uses it.
        kind: The type that it has in the middle of a training.
        since: The release of Lightning that brought it; nobody needs it before.
        calls: If it is called or replaced: the number of positional arguments.
        later: It is made in a training.
    """

    owner: str
    name: str
    user: str
    kind: type = object
    since: tuple[int, int] = (0, 0)
    calls: int | None = None
    later: bool = False

    @property
    def path(self) -> str:
        """Where it is."""
        return f"{self.owner}.{self.name}"

    def look(self, parts: Mapping[str, Any], *, in_training: bool) -> str:
        """What is wrong with it; nothing if it is there.

        Args:
            parts: Objects that paths begin with.
            in_training: Everything is there, and of its type. Else what is None is only made later.
        """
        root, *names = self.path.split(".")
        value = parts[root]
        for name in names:
            if value is None and not in_training:
                return ""
            try:
                value = getattr(value, name)
            except AttributeError:
                return f"{type(value).__name__} has no {name}"
            except RuntimeError:  # of a property that is for a training
                if in_training:
                    raise
                return ""
        if in_training and not isinstance(value, self.kind):
            return f"is a {type(value).__name__}, not a {self.kind.__name__}"
        if self.calls is not None:
            try:
                inspect.signature(value).bind(*[None] * self.calls)
            except TypeError as error:
                return f"{self.name}{inspect.signature(value)} is not called with {self.calls} arguments: {error}"
        return ""


HOOKS = (
    Hook("trainer._accelerator_connector", "use_distributed_sampler", "keep_samplers", bool),
    Hook("trainer", "_accelerator_connector", "keep_samplers"),
    Hook("trainer", "_signal_connector", "yield_sigterm"),
    Hook("trainer._signal_connector", "_sigterm_notifier_fn", "yield_sigterm", calls=2),
    Hook("trainer._signal_connector", "_slurm_sigusr_handler_fn", "requeue", calls=2),
    Hook("trainer._accelerator_connector", "cluster_environment", "requeue"),
    Hook("slurm", "auto_requeue", "requeue", bool),
    Hook("slurm", "requeue_signal", "requeue", int),
    Hook("trainer.strategy", "_layer_sync", "layer_sync"),
    Hook("trainer", "_val_check_time_interval", "validation_interval", since=(2, 6)),
    Hook("trainer", "_last_val_time", "last_validation", since=(2, 6), later=True),
    Hook("trainer", "_run_stage", "surround_stage", calls=0),
    Hook("trainer", "_active_loop", "active_evaluation_loop"),
    Hook("trainer", "_results", "logged_values, set_zero_batch_size", dict),
    Hook("trainer._results", "batch_size", "set_zero_batch_size"),
    Hook("trainer", "_logger_connector", "metric_dicts, log_state"),
    Hook("trainer", "_checkpoint_connector", "dump_checkpoint, load_checkpoint"),
    Hook("connector", "_callback_metrics", "metric_dicts", dict),
    Hook("connector", "_logged_metrics", "metric_dicts", dict),
    Hook("connector", "_progress_bar_metrics", "metric_dicts", dict),
    Hook("connector", "_first_loop_iter", "log_state", bool),
    Hook("connector", "_current_fx", "log_state", str),
    Hook("fit_loop", "max_batches", "set_num_batches, set_epoch_length", int),
    Hook("fit_loop", "_data_fetcher", "set_epoch_length"),
    Hook("fit_loop", "_combined_loader", "train_loaders, set_train_limit"),
    Hook("fit_loop", "_data_source", "combine_loaders"),
    Hook("fit_loop._data_source", "dataloader", "combine_loaders", calls=0),
    Hook("fit_loop._combined_loader", "_flattened", "combined_loader", list),
    Hook("fit_loop._combined_loader", "_mode", "combination", str),
    Hook("fit_loop._combined_loader", "_spec", "combination"),
    Hook("val_loop._data_source", "dataloader", "combine_loaders", calls=0),
    Hook("trainer.validate_loop._data_source", "dataloader", "combine_loaders", calls=0),
    Hook("trainer.test_loop._data_source", "dataloader", "combine_loaders", calls=0),
    Hook("trainer.predict_loop._data_source", "dataloader", "combine_loaders", calls=0),
    Hook("data_connector_module", "_worker_check", "advise_on_workers", calls=3),
    Hook("data_connector_module", "_resolve_overfit_batches", "stop_shuffling"),
    Hook("fit_loop", "_last_train_dl_reload_epoch", "loop_fields"),
    Hook("fit_loop._data_fetcher", "length", "set_epoch_length", int),
    Hook("fit_loop._data_fetcher", "fetched", "set_epoch_length", int),
    Hook("fit_loop._data_fetcher", "done", "set_epoch_length", bool),
    Hook("fit_loop._combined_loader", "flattened", "train_loaders", list),
    Hook("fit_loop._combined_loader", "limits", "set_train_limit", list),
    Hook("fit_loop.epoch_loop.batch_progress.current", "ready", "num_batches_started", int),
    Hook("fit_loop.epoch_loop.batch_progress.current", "started", "step_back", int),
    Hook("fit_loop.epoch_loop.batch_progress.current", "processed", "step_back", int),
    Hook("fit_loop.epoch_loop.batch_progress.current", "completed", "step_back", int),
    Hook("fit_loop.epoch_loop.batch_progress.total", "ready", "step_back, num_batches", int),
    Hook("fit_loop.epoch_loop.batch_progress", "is_last_batch", "set_epoch_length", bool),
    Hook("fit_loop.epoch_loop", "_results", "log_state", dict),
    Hook("val_loop", "_results", "log_state", dict),
    Hook("val_loop", "_combined_loader", "set_up_validation"),
    Hook("val_loop", "_evaluation_step", "surround_evaluation_steps", calls=4),
    Hook("trainer.validate_loop", "_evaluation_step", "surround_evaluation_steps", calls=4),
    Hook("trainer.test_loop", "_evaluation_step", "surround_evaluation_steps", calls=4),
    Hook("val_loop", "_max_batches", "set_evaluation_length", list),
    Hook("val_loop", "_data_fetcher", "free_evaluation_length"),
    Hook("val_loop", "_last_val_dl_reload_epoch", "loop_fields"),
    Hook("val_loop", "_seen_batches_per_dataloader", "loop_fields", dict),
    Hook("val_loop._data_fetcher.combined_loader", "_iterator", "free_evaluation_length"),
    Hook("val_loop._data_fetcher.combined_loader._iterator", "limits", "free_evaluation_length"),
    Hook("trainer", "val_check_batch", "set_epoch_length", int),
    Hook("result", "meta", "log_state"),
    Hook("result", "is_tensor", "log_state", bool),
    Hook("result", "has_reset", "log_state", bool),
    Hook("result", "_defaults", "log_state, logged_values", dict),
    Hook("result", "value", "logged_values", torch.Tensor),
    Hook("result", "cumulated_batch_size", "logged_values", torch.Tensor),
    Hook("result.meta.sync", "should", "log_state", bool),
    Hook("result.meta.sync", "rank_zero_only", "log_state", bool),
    Hook("trainer._checkpoint_connector", "_loaded_checkpoint", "load_checkpoint", dict),
    Hook("trainer._checkpoint_connector", "restore_model", "load_checkpoint", calls=0),
    Hook("trainer._checkpoint_connector", "restore_datamodule", "load_checkpoint", calls=0),
    Hook("trainer._checkpoint_connector", "restore_callbacks", "load_checkpoint", calls=0),
    Hook("trainer._checkpoint_connector", "restore_precision_plugin_state", "load_checkpoint", calls=0),
    Hook("trainer._checkpoint_connector", "_restore_modules_and_callbacks", "before_restoring", calls=2),
    Hook("trainer._checkpoint_connector", "_select_ckpt_path", "do_without_best", calls=4),
    Hook("exceptions_module", "_TunerExitException", "end_of_run", type),
    Hook("fit_loop", "_combined_loader_states_to_load", "load_loader_state", list),
    Hook("fit_loop._combined_loader", "_load_state_dicts", "load_loader_state", calls=1),
    Hook("fit_loop", "_restarting", "go_on_between_steps", bool),
    Hook("fit_loop.epoch_loop", "restarting", "restart_between_steps", bool),
    Hook("trainer.lightning_module", "_current_fx_name", "training_step, in_train_batch"),
    Hook("fit_loop.epoch_loop", "_update_learning_rates", "follow_schedules, step_schedulers", calls=2),
    Hook("trainer.lightning_module", "_on_before_batch_transfer", "prepare_batch", calls=1),
    Hook("trainer._results", "batch", "training_step"),
    Hook("result", "_forward_cache", "training_step", torch.Tensor),
    Hook("connector", "should_update_logs", "step_to_log", bool),
    Hook("trainer.precision_plugin", "post_backward", "finish_before_hooks", calls=2),
    Hook("fit_loop.epoch_loop.automatic_optimization", "_make_closure", "surround_passes", calls=3),
    Hook("fit_loop.epoch_loop", "_broadcast_sigterm_tensor", "exchange_no_sigterm", since=(2, 6), calls=0),
    Hook("trainer._signal_connector", "received_sigterm", "yield_sigterm", bool),
    Hook("fit_loop", "run", "surround_decisions", calls=0),
    Hook("fit_loop", "advance", "surround_decisions", calls=0),
    Hook("fit_loop", "on_advance_end", "surround_decisions", calls=0),
    Hook("fit_loop.epoch_loop", "on_advance_end", "surround_decisions", calls=1),
    Hook("fit_loop", "setup_data", "reload_training", calls=0),
    Hook("fit_loop", "on_run_start", "surround_entry", calls=0),
    Hook("fit_loop.epoch_loop", "on_run_start", "surround_entry", calls=1),
    Hook("fit_loop", "reset_restart_stage", "forget_restart", calls=0),
    Hook("fit_loop.epoch_loop", "reset_restart_stage", "forget_restart", calls=0),
    Hook("fit_loop.epoch_loop", "_batches_that_stepped", "step_to_log", int),
    Hook("result", "_computed", "epoch_results, show_result"),
    Hook("result", "_update_count", "epoch_results", int),
    Hook("trainer._results", "_get_cache", "LoggingHooks", calls=2),
    Hook("trainer._results", "_forked_name", "reductions", calls=2),
    Hook("connector", "epoch_end_reached", "LoggingHooks", calls=0),
    Hook("connector", "on_epoch_end", "LoggingHooks", calls=0),
    Hook("fit_loop.epoch_loop", "_get_monitor_value", "LoggingHooks", calls=1),
    Hook("model_checkpoint", "_monitor_candidates", "LoggingHooks", calls=1),
    Hook("timer", "_duration", "limits", float),
    Hook("rate_monitor", "_extract_stats", "show_rates", calls=2),
    Hook("csv_logger", "_version", "set_logger_versions"),
    Hook("csv_logger", "_experiment", "Logs"),
    Hook("csv_logger.experiment", "metrics_keys", "Logs", list),
    Hook("csv_logger.experiment", "metrics_file_path", "Logs", str),
    Hook("csv_logger.experiment", "_check_log_dir_exists", "Logs"),
    Hook("csv_logger", "_prefix", "Logs", str),
    Hook("results_module", "_Metadata", "_empty_result", type),
    Hook("results_module", "_Sync", "_empty_result", type),
    Hook("results_module", "_ResultMetric", "_empty_result", type),
    Hook("overrides_module", "_IndexBatchSamplerWrapper", "recorder_of", type),
    Hook("recorder", "_batch_sampler", "recorded"),
    Hook("recorder", "seen_batch_indices", "EvaluationLoader"),
    Hook("metric", "_sync_dist", "MetricSync.connect"),
    Hook("metric", "_reductions", "MetricSync", dict),
    Hook("metric", "_defaults", "leaving_no_trace", dict),
    Hook("metric", "_update_count", "leaving_no_trace", int),
    Hook("metric", "_computed", "leaving_no_trace"),
    Hook("loader", "_iterator", "PlannedLoader"),
    Hook("iterator", "_shutdown_workers", "PlannedLoader.close"),
    Hook("iterator", "_try_get_data", "PlannedLoader"),
    Hook("iterator", "_worker_pids_set", "PlannedLoader", bool),
    Hook("iterator", "_workers", "PlannedLoader", list),
    Hook("torch._C", "_remove_worker_pids", "PlannedLoader"),
    Hook("torch", "_C", "PlannedLoader"),
)


def parts_of(trainer: Any, host: Host) -> dict[str, Any]:
    """What paths begin with, and is there before a training."""
    connectors = f"{host.name}.trainer.connectors"
    return {
        "trainer": trainer,
        "fit_loop": trainer.fit_loop,
        "val_loop": trainer.fit_loop.epoch_loop.val_loop,
        "connector": getattr(trainer, "_logger_connector", None),
        "results_module": importlib.import_module(f"{connectors}.logger_connector.result"),
        "data_connector_module": importlib.import_module(f"{connectors}.data_connector"),
        "exceptions_module": importlib.import_module(f"{host.name}.utilities.exceptions"),
        "overrides_module": importlib.import_module(f"{host.name}.overrides.distributed"),
        "torch": torch,
    }


def missing(parts: Mapping[str, Any], release: tuple[int, ...], hooks: Iterable[Hook]) -> list[str]:
    """What of Lightning is not where it was, as far as it can be seen now."""
    here = [hook for hook in hooks if hook.owner.partition(".")[0] in parts and not hook.later]
    seen = [hook for hook in here if release >= hook.since]
    found = {hook: hook.look(parts, in_training=False) for hook in seen}
    return [f"{hook.path}: {problem}" for hook, problem in found.items() if problem]


def check_hooks(trainer: Any, host: Host) -> None:
    """Refuse a release of Lightning that has other private parts.

    Raises:
        UnsupportedError: Naming those that are missed, and what to install.
    """
    version: str = importlib.import_module(host.name).__version__
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:2])  # also of 2.7rc1
    try:
        problems = missing(parts_of(trainer, host), release, HOOKS)
    except (ImportError, AttributeError) as error:
        problems = [str(error)]
    if problems:
        package = host.name.partition(".")[0].replace("_", "-")
        tried = ".".join(map(str, TRIED))
        raise UnsupportedError(
            f"ElasticFlow does not fit this release of Lightning, which has moved what it needs: "
            f"{'; '.join(problems)}. "
            f"Use {package} 2.5 to {tried}, or a newer release of ElasticFlow. Received: {package} {version}"
        )
