"""The private parts of Lightning, torchmetrics and torch that ElasticFlow touches are where it expects them.

Each row names a private attribute, how to get there, and who uses it. When a release moves one, its row fails.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric

from ef_common.errors import ProtocolError
from ef_lightning import hooks
from ef_lightning import host as hosts
from tests.lightning import training
from tests.lightning.conftest import HOSTS

SOURCES = Path(hooks.__file__).parent
TOUCHING = ("hooks.py", "metrics.py", "data_workers.py", "logs.py")

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@dataclass
class Hook:
    """A private attribute.

    Args:
        owner: Expression for the object that holds it, in the names that `seen` collects.
        name: The attribute.
        user: Who uses it.
        kind: Expression for the type that it must have at that moment, or None.
        since: The release of Lightning that brought it; nobody needs it before.
    """

    owner: str
    name: str
    user: str
    kind: str = "object"
    since: tuple[int, int] = (0, 0)

    @property
    def path(self) -> str:
        return f"{self.owner}.{self.name}"

    def look(self, names: dict[str, Any]) -> str:
        """What is wrong with it; nothing if it is there."""
        try:
            value = eval(self.path, dict(names))
        except AttributeError as error:
            return str(error)
        kind = eval(self.kind, {"torch": torch})
        return "" if isinstance(value, kind) else f"is a {type(value).__name__}, not a {self.kind}"


HOOKS = [
    Hook("trainer._accelerator_connector", "use_distributed_sampler", "keep_samplers", "bool"),
    Hook("trainer", "_accelerator_connector", "keep_samplers"),
    Hook("trainer", "_signal_connector", "yield_sigterm"),
    Hook("trainer._signal_connector", "_sigterm_notifier_fn", "yield_sigterm"),
    Hook("trainer._signal_connector", "_slurm_sigusr_handler_fn", "requeue"),
    Hook("trainer._accelerator_connector", "cluster_environment", "requeue"),
    Hook("slurm", "auto_requeue", "requeue", "bool"),
    Hook("slurm", "requeue_signal", "requeue", "int"),
    Hook("trainer.strategy", "_layer_sync", "layer_sync"),
    Hook("trainer", "_val_check_time_interval", "validation_interval", since=(2, 6)),
    Hook("trainer", "_last_val_time", "last_validation", since=(2, 6)),
    Hook("trainer", "_active_loop", "active_evaluation_loop"),
    Hook("trainer", "_results", "logged_values, set_zero_batch_size", "dict"),
    Hook("trainer._results", "batch_size", "set_zero_batch_size"),
    Hook("trainer", "_logger_connector", "metric_dicts, log_state"),
    Hook("trainer", "_checkpoint_connector", "dump_checkpoint, load_checkpoint"),
    Hook("connector", "_callback_metrics", "metric_dicts", "dict"),
    Hook("connector", "_logged_metrics", "metric_dicts", "dict"),
    Hook("connector", "_progress_bar_metrics", "metric_dicts", "dict"),
    Hook("connector", "_first_loop_iter", "log_state", "bool"),
    Hook("connector", "_current_fx", "log_state", "str"),
    Hook("fit_loop", "max_batches", "set_num_batches, set_epoch_length", "int"),
    Hook("fit_loop", "_data_fetcher", "set_epoch_length"),
    Hook("fit_loop", "_combined_loader", "train_loaders, set_train_limit"),
    Hook("fit_loop", "_data_source", "combine_loaders"),
    Hook("fit_loop._data_source", "dataloader", "combine_loaders"),
    Hook("fit_loop._combined_loader", "_flattened", "combined_loader", "list"),
    Hook("fit_loop._combined_loader", "_mode", "combination", "str"),
    Hook("fit_loop._combined_loader", "_spec", "combination"),
    Hook("val_loop._data_source", "dataloader", "combine_loaders"),
    Hook("trainer.validate_loop._data_source", "dataloader", "combine_loaders"),
    Hook("trainer.test_loop._data_source", "dataloader", "combine_loaders"),
    Hook("trainer.predict_loop._data_source", "dataloader", "combine_loaders"),
    Hook("data_connector_module", "_worker_check", "advise_on_workers"),
    Hook("data_connector_module", "_resolve_overfit_batches", "stop_shuffling"),
    Hook("fit_loop", "_last_train_dl_reload_epoch", "loop_fields"),
    Hook("fit_loop._data_fetcher", "length", "set_epoch_length", "int"),
    Hook("fit_loop._data_fetcher", "fetched", "set_epoch_length", "int"),
    Hook("fit_loop._data_fetcher", "done", "set_epoch_length", "bool"),
    Hook("fit_loop._combined_loader", "flattened", "train_loaders", "list"),
    Hook("fit_loop._combined_loader", "limits", "set_train_limit", "list"),
    Hook("fit_loop.epoch_loop.batch_progress.current", "ready", "num_batches_started", "int"),
    Hook("fit_loop.epoch_loop.batch_progress.current", "started", "step_back", "int"),
    Hook("fit_loop.epoch_loop.batch_progress.current", "processed", "step_back", "int"),
    Hook("fit_loop.epoch_loop.batch_progress.current", "completed", "step_back", "int"),
    Hook("fit_loop.epoch_loop.batch_progress.total", "ready", "step_back", "int"),
    Hook("fit_loop.epoch_loop.batch_progress", "is_last_batch", "set_epoch_length", "bool"),
    Hook("fit_loop.epoch_loop", "_results", "log_state", "dict"),
    Hook("val_loop", "_results", "log_state", "dict"),
    Hook("val_loop", "_combined_loader", "set_up_validation"),
    Hook("val_loop", "_evaluation_step", "surround_evaluation_steps"),
    Hook("trainer.validate_loop", "_evaluation_step", "surround_evaluation_steps"),
    Hook("trainer.test_loop", "_evaluation_step", "surround_evaluation_steps"),
    Hook("val_loop", "_max_batches", "set_evaluation_length", "list"),
    Hook("val_loop", "_data_fetcher", "free_evaluation_length"),
    Hook("val_loop", "_last_val_dl_reload_epoch", "loop_fields"),
    Hook("val_loop", "_seen_batches_per_dataloader", "loop_fields", "dict"),
    Hook("val_loop._data_fetcher.combined_loader", "_iterator", "free_evaluation_length"),
    Hook("val_loop._data_fetcher.combined_loader._iterator", "limits", "free_evaluation_length"),
    Hook("trainer", "val_check_batch", "set_epoch_length", "int"),
    Hook("result", "meta", "log_state"),
    Hook("result", "is_tensor", "log_state", "bool"),
    Hook("result", "has_reset", "log_state", "bool"),
    Hook("result", "_defaults", "log_state, logged_values", "dict"),
    Hook("result", "value", "logged_values", "torch.Tensor"),
    Hook("result", "cumulated_batch_size", "logged_values", "torch.Tensor"),
    Hook("result.meta.sync", "should", "log_state", "bool"),
    Hook("result.meta.sync", "rank_zero_only", "log_state", "bool"),
    Hook("trainer._checkpoint_connector", "_loaded_checkpoint", "load_checkpoint", "dict"),
    Hook("trainer._checkpoint_connector", "restore_model", "load_checkpoint"),
    Hook("trainer._checkpoint_connector", "restore_datamodule", "load_checkpoint"),
    Hook("trainer._checkpoint_connector", "restore_callbacks", "load_checkpoint"),
    Hook("trainer._checkpoint_connector", "restore_precision_plugin_state", "load_checkpoint"),
    Hook("trainer._checkpoint_connector", "_restore_modules_and_callbacks", "before_restoring"),
    Hook("fit_loop", "_combined_loader_states_to_load", "load_loader_state", "list"),
    Hook("fit_loop._combined_loader", "_load_state_dicts", "load_loader_state"),
    Hook("fit_loop", "_restarting", "go_on_between_steps", "bool"),
    Hook("fit_loop.epoch_loop", "restarting", "restart_between_steps", "bool"),
    Hook("trainer.lightning_module", "_current_fx_name", "training_step, in_train_batch"),
    Hook("fit_loop.epoch_loop", "_update_learning_rates", "follow_schedules, step_schedulers"),
    Hook("trainer.lightning_module", "_on_before_batch_transfer", "prepare_batch"),
    Hook("trainer._results", "batch", "training_step"),
    Hook("result", "_forward_cache", "training_step", "torch.Tensor"),
    Hook("connector", "should_update_logs", "step_to_log", "bool"),
    Hook("fit_loop.epoch_loop.automatic_optimization", "_make_closure", "surround_passes"),
    Hook("fit_loop.epoch_loop", "_broadcast_sigterm_tensor", "exchange_no_sigterm", since=(2, 6)),
    Hook("trainer._signal_connector", "received_sigterm", "yield_sigterm", "bool"),
    Hook("fit_loop.epoch_loop", "_batches_that_stepped", "step_to_log", "int"),
    Hook("result", "_computed", "epoch_results, show_result"),
    Hook("result", "_update_count", "epoch_results", "int"),
    Hook("trainer._results", "_get_cache", "LoggingHooks"),
    Hook("trainer._results", "_forked_name", "reductions"),
    Hook("connector", "epoch_end_reached", "LoggingHooks"),
    Hook("connector", "on_epoch_end", "LoggingHooks"),
    Hook("fit_loop.epoch_loop", "_get_monitor_value", "LoggingHooks"),
    Hook("model_checkpoint", "_monitor_candidates", "LoggingHooks"),
    Hook("timer", "_duration", "limits", "float"),
    Hook("rate_monitor", "_extract_stats", "show_rates"),
    Hook("csv_logger", "_version", "set_logger_versions"),
    Hook("csv_logger", "_experiment", "Logs"),
    Hook("csv_logger.experiment", "metrics_keys", "Logs", "list"),
    Hook("csv_logger.experiment", "metrics_file_path", "Logs", "str"),
    Hook("csv_logger.experiment", "_check_log_dir_exists", "Logs"),
    Hook("csv_logger", "_prefix", "Logs", "str"),
    Hook("results_module", "_Metadata", "_empty_result", "type"),
    Hook("results_module", "_Sync", "_empty_result", "type"),
    Hook("results_module", "_ResultMetric", "_empty_result", "type"),
    Hook("overrides_module", "_IndexBatchSamplerWrapper", "recorder_of", "type"),
    Hook("recorder", "_batch_sampler", "recorded"),
    Hook("recorder", "seen_batch_indices", "EvaluationLoader"),
    Hook("metric", "_sync_dist", "MetricSync.connect"),
    Hook("metric", "_reductions", "MetricSync", "dict"),
    Hook("metric", "_defaults", "leaving_no_trace", "dict"),
    Hook("metric", "_update_count", "leaving_no_trace", "int"),
    Hook("metric", "_computed", "leaving_no_trace"),
    Hook("loader", "_iterator", "PlannedLoader"),
    Hook("iterator", "_shutdown_workers", "PlannedLoader.close"),
    Hook("iterator", "_try_get_data", "PlannedLoader"),
    Hook("iterator", "_worker_pids_set", "PlannedLoader", "bool"),
    Hook("iterator", "_workers", "PlannedLoader", "list"),
    Hook("torch._C", "_remove_worker_pids", "PlannedLoader"),
    Hook("torch", "_C", "PlannedLoader"),
]


@cache
def seen(host: str) -> dict[str, str]:
    """Train a little without us, and look at each hook in the middle of it: present, and of its type?"""
    pl = importlib.import_module(host)
    found: dict[str, str] = {}

    def look(**names: Any) -> None:
        for hook in HOOKS:
            if hook.owner.split(".")[0] in names:
                found[hook.path] = hook.look(names)

    class Looking(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            look(trainer=trainer, fit_loop=trainer.fit_loop, connector=trainer._logger_connector)
            look(result=trainer._results["training_step.loss"])

        def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
            look(val_loop=trainer.fit_loop.epoch_loop.val_loop)

    class Logging(training.regression(pl)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    strategy = importlib.import_module(f"{host}.strategies").DDPStrategy
    trainer = training.trainer(pl, "auto", callbacks=[Looking()], max_epochs=1)
    trainer.strategy._layer_sync = strategy()._layer_sync  # of parallel strategies only
    trainer.fit(Logging(), training.loader(), training.loader(9))
    return found


def others(host: str, tmp_path: Path) -> dict[str, Any]:
    """Objects that need no training."""
    pl = importlib.import_module(host)
    overrides = importlib.import_module(f"{host}.overrides.distributed")
    loader = DataLoader(training.data(4), 2, num_workers=1)
    iterator = iter(loader)
    list(iterator)
    metric = MeanMetric()
    metric.update(1.0)
    recorder = overrides._IndexBatchSamplerWrapper(loader.batch_sampler)
    iter(recorder)
    return {
        "csv_logger": pl.loggers.CSVLogger(tmp_path),
        "model_checkpoint": pl.callbacks.ModelCheckpoint(tmp_path),
        "rate_monitor": pl.callbacks.LearningRateMonitor(),
        "timer": pl.callbacks.Timer(timedelta(seconds=1)),
        "results_module": importlib.import_module(f"{host}.trainer.connectors.logger_connector.result"),
        "overrides_module": overrides,
        "data_connector_module": importlib.import_module(f"{host}.trainer.connectors.data_connector"),
        "recorder": recorder,
        "slurm": importlib.import_module(f"{host}.plugins.environments").SLURMEnvironment(),
        "metric": metric,
        "loader": loader,
        "iterator": iterator,
        "torch": torch,
    }


@pytest.mark.parametrize("host", HOSTS)
def test_each_hook_is_where_it_is_expected(host: str, tmp_path: Path) -> None:
    names = others(host, tmp_path)
    found = dict(seen(host))
    found |= {hook.path: hook.look(names) for hook in HOOKS if hook.path not in found}
    here = tuple(map(int, importlib.import_module(host).__version__.split(".")[:2]))
    expected = [hook for hook in HOOKS if here >= hook.since]
    assert [f"{h.path} (used by {h.user}): {found[h.path]}" for h in expected if found[h.path]] == []


@pytest.mark.parametrize("host", HOSTS)
def test_meta_data_of_results_has_the_expected_fields(host: str) -> None:
    module = importlib.import_module(f"{host}.trainer.connectors.logger_connector.result")
    described = {*hooks._META.split(), "reduce_fx", "_sync"}
    assert {field.name for field in fields(module._Metadata)} == described


@pytest.mark.parametrize("host", HOSTS)
def test_checkpoint_holds_the_loaders_state_where_it_is_expected(host: str) -> None:
    pl = importlib.import_module(host)
    trainer = training.trainer(pl, "auto")
    stateful = SimpleNamespace(state_dict=lambda: {"place": 1}, load_state_dict=lambda state: None)
    trainer.fit_loop._combined_loader = pl.utilities.CombinedLoader([stateful])
    trainer.strategy.connect(training.regression(pl)())
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    assert hooks.move_loader_state_out(checkpoint) == {"place": 1}
    assert hooks.move_loader_state_out(checkpoint) is None
    hooks.move_loader_state_in(checkpoint, {"place": 2})
    trainer.fit_loop.load_state_dict(checkpoint["loops"]["fit_loop"])
    assert trainer.fit_loop._combined_loader_states_to_load == [{"place": 2}]


@pytest.mark.parametrize("host", HOSTS)
def test_hyper_parameters_are_where_they_are_expected(host: str) -> None:
    pl = importlib.import_module(host)
    kinds = ("KEY", "NAME", "TYPE")
    assert (
        tuple(
            tuple(getattr(owner, f"CHECKPOINT_HYPER_PARAMS_{kind}") for kind in kinds)
            for owner in (pl.LightningModule, pl.LightningDataModule)
        )
        == hooks.HYPER_PARAMETERS
    )


@pytest.mark.parametrize("host", HOSTS)
def test_versions_of_loggers_are_taken_if_they_name_no_other_folder(host: str, tmp_path: Path) -> None:
    pl = importlib.import_module(host)
    trainer = training.trainer(pl, "auto", logger=pl.loggers.CSVLogger(tmp_path))
    for version in (3, "version_3", "2026-11-23", "a.b=c"):
        hooks.set_logger_versions(trainer, [version])
        assert hooks.logger_versions(trainer) == [version]
    for version in (None, "../../x", "..", "/etc", "a/b", "", 1.5, ["x"]):
        hooks.set_logger_versions(trainer, [version])
        assert hooks.logger_versions(trainer) == ["a.b=c"]


RUN_FIELDS = {
    "csv_logs.CSVLogger": {"_version"},
    "tensorboard.TensorBoardLogger": {"_version"},
    "wandb.WandbLogger": {"_wandb_init", "_id", "_experiment"},
    "mlflow.MLFlowLogger": {"_mlflow_client", "_run_id"},
    "comet.CometLogger": {"_experiment_key", "_experiment", "_mode"},
}
"""What names the run of a logger, whose package may not be installed."""


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", RUN_FIELDS)
def test_loggers_keep_the_name_of_their_run_where_it_is_expected(host: str, name: str) -> None:
    module, kind = name.split(".")
    cls = getattr(importlib.import_module(f"{host}.loggers.{module}"), kind)
    source = "".join(inspect.getsource(base.__init__) for base in cls.__mro__[:-1] if "__init__" in vars(base))
    assert [field for field in RUN_FIELDS[name] if f"self.{field} = " not in source.replace(": ", " = ")] == []


@pytest.mark.parametrize("host", HOSTS)
def test_counters_and_reductions_that_there_are_not_are_refused(host: str) -> None:
    pl = importlib.import_module(host)
    trainer = training.trainer(pl, "auto")
    progress = hooks.loop_progress(trainer)
    hooks.load_loop_progress(trainer, progress)
    with pytest.raises(ProtocolError, match=r"trainer\.strategy"):
        hooks.load_loop_progress(trainer, {**progress, "trainer.strategy.model": {}})
    trainer.strategy.connect(training.regression(pl)())
    result = {"key": "a", "reduce_fx": "load", "fields": {}}
    with pytest.raises(ProtocolError, match="load"):
        hooks.load_log_state(trainer, hosts.HOSTS[host], {"place": [True, None], "results": [[result], []]})


@pytest.mark.parametrize("host", HOSTS)
def test_values_are_settled_before_anybody_reads_them(host: str) -> None:
    pl = importlib.import_module(host)
    passed: list[str] = []

    class Noting(training.regression(pl)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            passed.append("validation_step")
            self.log("vl", 1.0)

        def on_train_epoch_end(self) -> None:
            passed.append("on_train_epoch_end")

        def on_validation_epoch_end(self) -> None:
            passed.append("on_validation_epoch_end")

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return [optimizer], [{"scheduler": plateau, "monitor": "loss"}]

        def lr_scheduler_step(self, *args: Any) -> None:
            passed.append("scheduler")

    class Stopping(pl.callbacks.EarlyStopping):  # type: ignore[misc, name-defined]
        def on_train_epoch_end(self, *_: Any) -> None:
            passed.append("callback's on_train_epoch_end")

        def on_validation_end(self, *_: Any) -> None:
            passed.append("callback's on_validation_end")

    class Checkpointing(pl.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_epoch_end(self, *_: Any) -> None:
            passed.append("any callback's on_train_epoch_end")

    callbacks = [Stopping("vl"), Checkpointing()]
    trainer = training.trainer(pl, "auto", callbacks=callbacks, max_epochs=1, num_sanity_val_steps=0)
    watched = hooks.LoggingHooks(
        trainer,
        hosts.HOSTS[host],
        settle=lambda: passed.append("settle"),
        show=lambda original, result, on_step: original(result, on_step),
        candidates=lambda found: found,
    )
    watched.attach()
    trainer.fit(Noting(), training.loader(4), training.loader(4))
    assert passed == [
        "validation_step",
        "on_validation_epoch_end",
        "settle",
        "callback's on_validation_end",
        "settle",
        "any callback's on_train_epoch_end",
        "on_train_epoch_end",
        "settle",
        "callback's on_train_epoch_end",
        "settle",
        "scheduler",
    ]
    watched.detach()
    assert "_get_cache" not in vars(trainer.fit_loop.epoch_loop._results)
    assert "on_epoch_end" not in vars(trainer._logger_connector)


def test_metric_states_are_synchronized_by_one_method() -> None:
    assert not [name for name in vars(MeanMetric) if name == "_sync_dist"]
    assert callable(Metric._sync_dist)


@pytest.mark.parametrize("name", TOUCHING)
def test_no_private_attribute_is_touched_that_is_not_listed(name: str) -> None:
    listed = {hook.name for hook in HOOKS} | {"_C"}.union(*RUN_FIELDS.values())
    assert private_attributes(SOURCES / name) <= listed


def test_no_other_file_touches_private_attributes() -> None:
    files = [path for path in SOURCES.glob("*.py") if path.name not in TOUCHING]
    assert {path.name: found for path in files if (found := private_attributes(path))} == {}


def private_attributes(path: Path) -> set[str]:
    """Private attributes of anything but `self` and `cls` that a file touches."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    foreign = [n for n in nodes if not (isinstance(n.value, ast.Name) and n.value.id in ("self", "cls"))]
    names = {n.attr for n in foreign if n.attr.startswith("_") and not n.attr.startswith("__")}
    return names - {"_replace"}  # of a named tuple
