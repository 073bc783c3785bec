"""The list of private parts of Lightning, torchmetrics and torch that ElasticFlow touches, and the search for them.

They are looked for when a run of the Trainer is set up, and by the contract tests; see `ef_common.parts`. A path begins
with the Trainer, with the package ("host"), or with what exists in a training only, whose class is looked at before.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
import torchmetrics
from torch.utils.data import dataloader

from ef_common.parts import Package, Part, check, find, listed
from ef_lightning import hooks, own_files
from ef_lightning.host import LightningHost

RELEASES = {"lightning": ("2.5", "2.6.6"), "torchmetrics": ("1.4", "1.9.0"), "torch": ("2.6", "2.13.0")}
"""The oldest releases that `pyproject.toml` allows, and the newest that the tests were run with."""

_RESULT = "host.trainer.connectors.logger_connector.result"
_FROM_2_6 = (2, 6)

LIGHTNING: tuple[Part, ...] = tuple(
    chain(
        # ------------------------------------------------------------ Trainer and connectors
        listed("trainer", "_accelerator_connector", "keep_samplers"),
        listed("trainer._accelerator_connector", "use_distributed_sampler", "keep_samplers", bool),
        listed("trainer", "_signal_connector", "yield_sigterm"),
        listed("trainer._signal_connector", "_sigterm_notifier_fn(_, _)", "yield_sigterm", replaced=True),
        listed("trainer._signal_connector", "_slurm_sigusr_handler_fn(_, _)", "requeue", replaced=True),
        listed("trainer._signal_connector", "received_sigterm", "_note_sigterm", bool),
        listed("parallel_strategy", "_layer_sync", "layer_sync"),
        listed("parallel_strategy", "_checkpoint_io _launcher", "ElasticMixin"),
        listed("parallel_strategy", "_configure_launcher()", "ElasticMixin", replaced=True),
        listed("host.plugins.precision.Precision", "post_backward(_, _)", "finish_before_hooks", replaced=True),
        listed("trainer", "_val_check_time_interval", "validation_interval", since=_FROM_2_6),
        listed("set_up_trainer", "_last_val_time", "last_validation", since=_FROM_2_6),
        listed("set_up_trainer", "val_check_batch", "set_epoch_length", int),
        listed("trainer", "_run_stage()", "surround_stage", replaced=True),
        listed("trainer", "fit_loop", "train_loaders"),
        listed("fit_loop.epoch_loop", "val_loop", "set_up_validation"),
        listed("trainer", "_active_loop", "active_evaluation_loop"),
        listed("module", "_current_fx_name", "training_step in_train_batch"),
        listed("module", "_on_before_batch_transfer(batch, dataloader_idx=)", "prepare_batch"),
        listed("host.utilities.exceptions", "_TunerExitException()", "end_of_run", type),
        # ------------------------------------------------------------ loaders
        listed("fit_loop", "_data_source _data_fetcher _combined_loader", "combine_loaders set_epoch_length"),
        listed("fit_loop", "_combined_loader_states_to_load", "load_loader_state", list),
        listed("fit_loop", "_last_train_dl_reload_epoch", "loop_fields"),
        listed("fit_loop", "setup_data()", "reload_training"),
        listed("val_loop", "_data_source _data_fetcher _combined_loader", "combine_loaders free_evaluation_length"),
        listed("val_loop", "_last_val_dl_reload_epoch", "loop_fields"),
        listed("val_loop", "_seen_batches_per_dataloader", "loop_fields", dict),
        listed("val_loop", "_max_batches", "set_evaluation_length", list),
        listed("val_loop", "setup_data()", "set_up_validation"),
        listed("trainer.predict_loop", "_data_source _data_fetcher max_batches", "combine_loaders"),
        listed("fit_loop._data_source", "dataloader()", "combine_loaders", replaced=True),
        listed("combined", "_flattened", "_ShowingUsersLoaders", list),
        listed("combined", "_mode _spec", "combination"),
        listed("combined", "_load_state_dicts(states)", "load_loader_state"),
        listed("combined", "_iterator", "free_evaluation_length"),
        listed("combined", "limits", "set_train_limit"),
        listed("combined_iterator", "limits", "free_evaluation_length"),
        listed("fetcher", "length fetched", "set_epoch_length", int),
        listed("fetcher", "done", "set_epoch_length", bool),
        listed("fetcher", "combined_loader", "free_evaluation_length"),
        listed("host.trainer.connectors.data_connector", "_worker_check(_, _, _)", "advise_on_workers"),
        listed("host.trainer.connectors.data_connector", "_resolve_overfit_batches(_, mode=)", "stop_shuffling"),
        listed("host.overrides.distributed", "_IndexBatchSamplerWrapper", "recorder_of", type),
        listed("recorder", "_batch_sampler seen_batch_indices", "recorded EvaluationLoader"),
        # ------------------------------------------------------------ loops
        listed("fit_loop", "max_batches", "set_num_batches", int),
        listed("fit_loop", "_restarting", "go_on_between_steps", bool),
        listed("fit_loop", "run() advance() on_advance_end()", "surround_decisions", replaced=True),
        listed("fit_loop", "on_run_start()", "surround_entry", replaced=True),
        listed("fit_loop", "reset_restart_stage()", "forget_restart"),
        listed("fit_loop.epoch_loop", "restarting", "restart_between_steps", bool),
        listed("fit_loop.epoch_loop", "reset_restart_stage()", "forget_restart"),
        listed("fit_loop.epoch_loop", "on_advance_end(_)", "surround_decisions", replaced=True),
        listed("fit_loop.epoch_loop", "on_run_start(_)", "surround_entry", replaced=True),
        listed("fit_loop.epoch_loop", "_batches_that_stepped", "step_to_log", int),
        listed(
            "fit_loop.epoch_loop",
            "_update_learning_rates(interval, update_plateau_schedulers)",
            "follow_schedules",
            replaced=True,
        ),
        listed(
            "fit_loop.epoch_loop",
            "_broadcast_sigterm_tensor()",
            "exchange_no_sigterm",
            since=_FROM_2_6,
            replaced=True,
        ),
        listed(
            "fit_loop.epoch_loop.automatic_optimization",
            "_make_closure(kwargs, optimizer, batch_idx)",
            "surround_passes",
            replaced=True,
        ),
        listed(
            "fit_loop.epoch_loop.automatic_optimization", "_make_zero_grad_fn(batch_idx, optimizer)", "surround_passes"
        ),
        listed("closure", "closure _zero_grad_fn", "surround_passes"),
        listed("fit_loop.epoch_loop", "_should_accumulate()", "set_epoch_length", replaced=True),
        listed("fit_loop.epoch_loop.batch_progress", "is_last_batch", "set_epoch_length", bool),
        listed("fit_loop.epoch_loop.batch_progress.current", "ready started processed completed", "step_back", int),
        listed("fit_loop.epoch_loop.batch_progress.total", "ready started processed completed", "step_back", int),
        listed("val_loop.batch_progress", "is_last_batch", "mark_evaluation_done", bool),
        listed("val_loop", "_evaluation_step(_, _, _, _)", "surround_evaluation_steps", replaced=True),
        # ------------------------------------------------------------ self.log
        listed("trainer", "_logger_connector", "metric_dicts"),
        listed("connector", "_callback_metrics _logged_metrics _progress_bar_metrics", "metric_dicts", dict),
        listed("connector", "_first_loop_iter", "log_state", bool),
        listed("connector", "_current_fx", "log_state", str),
        listed("connector", "should_update_logs", "step_to_log", bool),
        listed("connector", "epoch_end_reached() on_epoch_end()", "LoggingHooks", replaced=True),
        listed("trainer", "_results", "logged_values", dict),
        listed("fit_loop.epoch_loop", "_results", "log_state", dict),
        listed("val_loop", "_results", "log_state", dict),
        listed("results", "batch batch_size", "step_fields"),
        listed("results", "_get_cache(_, _)", "LoggingHooks", replaced=True),
        listed("results", "_forked_name(_, _)", "reductions"),
        listed("result", "meta", "log_state"),
        listed("result", "is_tensor has_reset", "log_state", bool),
        listed("result", "value cumulated_batch_size _forward_cache", "shown_here", torch.Tensor),
        listed("metadata", hooks.META, "_describe"),
        listed("metadata", "reduce_fx sync is_mean_reduction", "shown_here"),
        listed("sync", "should rank_zero_only", "log_state", bool),
        listed(
            _RESULT, f"_Metadata({', '.join(f'{name}=' for name in hooks.META.split())}, reduce_fx=)", "_empty_result"
        ),
        listed(_RESULT, "_Sync(_should=, fn=, rank_zero_only=) _ResultMetric(_, _)", "_empty_result", type),
        listed("fit_loop.epoch_loop", "_get_monitor_value(_)", "LoggingHooks", replaced=True),
        listed("host.callbacks.ModelCheckpoint", "_monitor_candidates(_)", "LoggingHooks", replaced=True),
        listed("host.callbacks.LearningRateMonitor", "_extract_stats(_, _)", "show_rates", replaced=True),
        listed("throughput_monitor", "_throughputs", "set_workers_measured", dict),
        # ------------------------------------------------------------ checkpoints
        listed("trainer", "_checkpoint_connector", "load_checkpoint"),
        listed("trainer._checkpoint_connector", "_loaded_checkpoint", "load_checkpoint", dict),
        listed("trainer._checkpoint_connector", "dump_checkpoint(weights_only=)", "dump_checkpoint"),
        listed(
            "trainer._checkpoint_connector",
            "restore_model() restore_datamodule() restore_callbacks() restore_precision_plugin_state()",
            "load_checkpoint",
        ),
        listed(
            "trainer._checkpoint_connector",
            "_restore_modules_and_callbacks(_, ...)",
            "before_restoring",
            replaced=True,
        ),
        listed("trainer._checkpoint_connector", "_select_ckpt_path(_, _, ...)", "do_without_best", replaced=True),
        listed("model_checkpoint", " ".join((*own_files.FILES, *own_files.SCORES)), "written_files"),
        listed("model_checkpoint", "_last_time_checked", "private_fields"),
        (
            Part(owner, f"CHECKPOINT_HYPER_PARAMS_{kind}", "HYPER_PARAMETERS", str, equals=key)
            for owner, keys in zip(("module", "host.LightningDataModule"), hooks.HYPER_PARAMETERS, strict=True)
            for kind, key in zip(("KEY", "NAME", "TYPE"), keys, strict=True)
        ),
        # ------------------------------------------------------------ loggers
        listed("csv_logger", "_version", "_set_run"),
        listed("csv_logger", "_experiment _prefix", "Logs"),
        listed("csv_writer", "metrics_keys metrics_file_path", "Logs"),
        listed("csv_writer", "_check_log_dir_exists()", "Logs", replaced=True),
        listed("tensorboard_logger", "_version", "_set_run"),
        listed("wandb_logger", "_wandb_init _id", "_set_run"),
        listed("mlflow_logger", "_mlflow_client _run_id", "_set_run"),
        listed("comet_logger", "_experiment_key _experiment", "_set_run"),
        listed("comet_logger", "_mode", "_set_run", since=(2, 5, 1)),
    )
)

TORCHMETRICS = (
    *listed("metric", "_sync_dist(dist_sync_fn, process_group)", "MetricSync", replaced=True),
    *listed("metric", "_reductions", "MetricSync", dict),
    *listed("metric", "_defaults", "logged_values", dict),
    *listed("metric", "_update_count", "Traces epoch_results", int),
    *listed("metric", "_computed", "Traces epoch_results"),
)

TORCH = (
    *listed("loader", "_iterator _dataset_kind", "PlannedLoader"),
    *listed("loader", "_get_iterator()", "PlannedLoader"),
    *listed("iterator", "_shutdown_workers()", "PlannedLoader"),
    *listed("iterator", "_reset(_)", "PlannedLoader"),
    *listed("iterator", "_try_get_data(_)", "PlannedLoader", replaced=True),
    *listed("iterator", "_worker_pids_set", "PlannedLoader", bool),
    *listed("iterator", "_workers _workers_status", "PlannedLoader", list),
    *listed("torch", "_C _utils", "PlannedLoader"),
    *listed("torch._utils", "ExceptionWrapper", "PlannedLoader"),
    *listed("torch._C", "_remove_worker_pids", "PlannedLoader"),
)

_CLASSES = {
    "module": "LightningModule",
    "parallel_strategy": "strategies.parallel.ParallelStrategy",
    "combined": "utilities.combined_loader.CombinedLoader",
    "combined_iterator": "utilities.combined_loader._Sequential",
    "fetcher": "loops.fetchers._DataFetcher",
    "recorder": "overrides.distributed._IndexBatchSamplerWrapper",
    "set_up_trainer": "loops.fit_loop._FitLoop",  # which sets these when it sets up its loader
    "closure": "loops.optimization.automatic.Closure",
    "results": "trainer.connectors.logger_connector.result._ResultCollection",
    "result": "trainer.connectors.logger_connector.result._ResultMetric",
    "metadata": "trainer.connectors.logger_connector.result._Metadata",
    "sync": "trainer.connectors.logger_connector.result._Sync",
    "model_checkpoint": "callbacks.ModelCheckpoint",
    "throughput_monitor": "callbacks.ThroughputMonitor",
    "csv_logger": "loggers.csv_logs.CSVLogger",
    "csv_writer": "loggers.csv_logs.ExperimentWriter",
    "tensorboard_logger": "loggers.tensorboard.TensorBoardLogger",
    "wandb_logger": "loggers.wandb.WandbLogger",
    "mlflow_logger": "loggers.mlflow.MLFlowLogger",
    "comet_logger": "loggers.comet.CometLogger",
}
"""Classes of what exists only in a training. Lightning's Trainer imports all of them, but no logger's package."""


_OF_TRAINER = {
    "fit_loop": "fit_loop",
    "val_loop": "fit_loop.epoch_loop.val_loop",
    "connector": "_logger_connector",
}


def packages(trainer: Any, host: LightningHost, *, seen: Mapping[str, Any] | None = None) -> list[Package]:
    """The packages and parts to look at.

    Args:
        trainer: The Trainer.
        host: Its class tree.
        seen: Objects of a training, in place of their classes.
    """
    package = importlib.import_module(host.name)
    roots = {
        "host": package,
        "trainer": trainer,
        "torch": torch,
        "metric": torchmetrics.Metric,
        "loader": dataloader.DataLoader,
        "iterator": find(dataloader, "_MultiProcessingDataLoaderIter"),
        **{root: find(trainer, path) for root, path in _OF_TRAINER.items()},
        **{root: find(package, path) for root, path in _CLASSES.items()},
        **(seen or {}),
    }
    lightning = host.name.partition(".")[0].replace("_", "-")
    return [  # what Lightning builds on first: a part of it may be missed in Lightning, too
        Package("torch", torch.__version__, *RELEASES["torch"], parts=TORCH, roots=roots),
        Package("torchmetrics", torchmetrics.__version__, *RELEASES["torchmetrics"], parts=TORCHMETRICS, roots=roots),
        Package(lightning, package.__version__, *RELEASES["lightning"], parts=LIGHTNING, roots=roots),
    ]


def check_hooks(trainer: Any, host: LightningHost) -> None:
    """Refuse releases with other private parts.

    Raises:
        UnsupportedError: Naming what has moved, and what to install.
    """
    check(packages(trainer, host))
