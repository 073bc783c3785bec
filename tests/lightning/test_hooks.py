"""The private parts of Lightning, torchmetrics and torch that ElasticFlow touches are where it expects them.

Each row names a private attribute, how to get there, and who uses it. When a release moves one, its row fails.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
from dataclasses import fields
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric

from ef_common.errors import ProtocolError, UnsupportedError
from ef_lightning import hooks, probe, strategy_for
from ef_lightning import host as hosts
from ef_lightning.probe import HOOKS, Hook
from tests.lightning import training
from tests.lightning.conftest import HOSTS

SOURCES = Path(hooks.__file__).parent
TOUCHING = ("hooks.py", "metrics.py", "data_workers.py", "logs.py")

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@cache
def seen(host: str) -> dict[str, str]:
    """Train a little without us, and look at each hook in the middle of it: present, and of its type?"""
    pl = importlib.import_module(host)
    found: dict[str, str] = {}

    def look(**names: Any) -> None:
        for hook in HOOKS:
            if hook.owner.split(".")[0] in names:
                found[hook.path] = hook.look(names, in_training=True)

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
        "exceptions_module": importlib.import_module(f"{host}.utilities.exceptions"),
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
    found |= {hook.path: hook.look(names, in_training=True) for hook in HOOKS if hook.path not in found}
    here = tuple(map(int, importlib.import_module(host).__version__.split(".")[:2]))
    expected = [hook for hook in HOOKS if here >= hook.since]
    assert [f"{h.path} (used by {h.user}): {found[h.path]}" for h in expected if found[h.path]] == []


@pytest.mark.parametrize("host", HOSTS)
def test_release_that_has_moved_something_is_refused_before_anything_is_trained(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pl = importlib.import_module(host)
    moved = [
        Hook("fit_loop.epoch_loop", "_gone", "nobody"),
        Hook("fit_loop", "advance", "nobody", calls=2),
        Hook("fit_loop", "_later", "nobody", since=(99, 0)),
        Hook("metric", "_in_tests_only", "nobody"),
    ]
    monkeypatch.setattr(probe, "HOOKS", moved)
    monkeypatch.setattr(pl, "__version__", "2.6rc1")
    trainer = training.trainer(pl, strategy_for(host)())
    module = training.regression(pl)()
    before = training.weights(module)
    with pytest.raises(UnsupportedError) as refused:
        trainer.fit(module, training.loader())
    message = str(refused.value)
    assert "needs: fit_loop.epoch_loop._gone: _TrainingEpochLoop has no _gone; fit_loop.advance: advance(" in message
    assert "is not called with 2 arguments" in message
    assert "_later" not in message
    package = host.partition(".")[0].replace("_", "-")
    assert message.endswith(f"or a newer release of ElasticFlow. Received: {package} {pl.__version__}")
    assert training.weights(module) == before


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


@pytest.mark.parametrize("version", [mock.Mock(), object(), 1.5, ["x"], Path("x")])
def test_version_of_a_logger_that_is_no_name_is_not_sent(version: Any, world_of_one: Path) -> None:
    pl = importlib.import_module("lightning.pytorch")

    class Odd(pl.loggers.CSVLogger):  # type: ignore[misc, name-defined]
        version = None

    log = Odd(world_of_one / "logs")
    Odd.version = version
    trainer = training.trainer(pl, logger=log, max_epochs=1)
    trainer.fit(training.regression(pl)(), training.loader(8))
    assert hooks.logger_versions(trainer) == [None]


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


@pytest.mark.parametrize(("interval", "before", "own", "after"), [(0.5, 4, 3, 2), (3, 3, 5, 3), (1.0, 8, 2, 4)])
def test_validations_follow_the_length_of_an_epoch_unless_user_code_says_when(
    interval: float, before: int, own: int, after: int
) -> None:
    fit_loop = SimpleNamespace(max_batches=8)
    trainer = SimpleNamespace(fit_loop=fit_loop, val_check_interval=interval, val_check_batch=before)
    hooks.set_num_batches(trainer, 4)
    assert (fit_loop.max_batches, trainer.val_check_batch) == (4, after)
    trainer.val_check_batch = own
    hooks.set_num_batches(trainer, 8)
    assert (fit_loop.max_batches, trainer.val_check_batch) == (8, own)


def test_batch_that_is_replaced_is_seen_by_the_hooks_after_the_step_where_it_can_be_changed() -> None:
    results = SimpleNamespace(batch=None, batch_size=3)
    trainer = SimpleNamespace(_results=results)
    for old, new in (([1, 2], [1, 2, 3]), ({"a": 1}, {"a": 2}), ((1,), (1, 2))):
        arguments = {"batch": old}
        hooks.set_batch(trainer, arguments, new)
        assert arguments["batch"] == new
        assert results.batch is arguments["batch"]
        assert results.batch_size is None
        assert (arguments["batch"] is old) == isinstance(old, (list, dict))


class Owner:
    """An object with a method."""

    def act(self) -> str:
        return "the class's"


def test_method_that_is_replaced_is_as_it_was_afterwards() -> None:
    plain, special = Owner(), Owner()
    special.act = lambda: "its own"  # type: ignore[method-assign]
    for owner, expected in ((plain, "the class's"), (special, "its own")):
        for number in range(2):
            hooks.replace(owner, "act", lambda original, number=number: lambda: (number, original()))
            assert owner.act() == (number, expected)
            assert copy.deepcopy(owner).act() == expected
        hooks.put_back(owner, "act")
        assert owner.act() == expected
    assert "act" not in vars(plain)


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
