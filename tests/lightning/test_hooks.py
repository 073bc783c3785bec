"""The private parts of Lightning, torchmetrics and torch that ElasticFlow touches are where its list says.

When a release moves one, the contract test says which. What the list says is also looked for when a training is set up:
each part is taken away here, and changed, to see that.
"""

from __future__ import annotations

import copy
import importlib
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

from ef_common.data import torch_loader
from ef_common.errors import ProtocolError, UnsupportedError
from ef_common.parts import Part
from ef_lightning import hooks, probe, strategy_for
from ef_lightning import host as hosts
from tests import sources
from tests.lightning import training
from tests.lightning.conftest import HOSTS
from tests.parts import assert_one_sentence, changes

SOURCES = Path(hooks.__file__).parent
LOADER = Path(torch_loader.__file__)
TOUCHING = {"hooks.py", "metrics.py", "torch_loader.py", "logs.py", "own_files.py", "state.py"}

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@cache
def seen(host: str) -> dict[str, str]:
    """Train a little without us, and look at each part in the middle of it: present, and of its type?"""
    pl = importlib.import_module(host)
    found: dict[str, str] = {}

    def look(whole: Any, **names: Any) -> None:
        for package in probe.packages(whole, hosts.HOSTS[host], seen=names):
            for part in package.here():
                root = part.owner.partition(".")[0]
                if root in names:
                    found[part.path] = part.look(package.roots, in_training=True)

    class Looking(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            fit_loop, results = trainer.fit_loop, trainer._results
            result = results["training_step.loss"]
            look(
                trainer,
                trainer=trainer,
                host=pl,
                module=trainer.lightning_module,
                fit_loop=fit_loop,
                connector=trainer._logger_connector,
                combined=fit_loop._combined_loader,
                fetcher=fit_loop._data_fetcher,
                results=results,
                result=result,
                metadata=result.meta,
                sync=result.meta.sync,
                set_up_trainer=trainer,
            )

        def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
            loop = trainer.fit_loop.epoch_loop.val_loop
            look(trainer, val_loop=loop, combined_iterator=loop._data_fetcher.combined_loader._iterator)

    class Logging(training.regression(pl)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    trainer = training.trainer(pl, "auto", callbacks=[Looking()], max_epochs=1, num_sanity_val_steps=1)
    trainer.fit(Logging(), training.loader(), training.loader(9))
    look(trainer, **others(host))
    return found


def others(host: str) -> dict[str, Any]:
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
        "parallel_strategy": importlib.import_module(f"{host}.strategies").DDPStrategy(),
        "csv_logger": pl.loggers.CSVLogger("unwritten"),
        "model_checkpoint": pl.callbacks.ModelCheckpoint("unwritten"),
        "throughput_monitor": pl.callbacks.ThroughputMonitor(batch_size_fn=len),
        "recorder": recorder,
        "metric": metric,
        "loader": loader,
        "iterator": iterator,
        "torch": torch,
    }


def ready(host: str, strategy: Any = "auto") -> Any:
    """A Trainer with its module, as it is when it sets up its strategy."""
    pl = importlib.import_module(host)
    trainer = training.trainer(pl, strategy)
    trainer.strategy.connect(training.regression(pl)())
    return trainer


@pytest.mark.parametrize("host", HOSTS)
def test_each_part_is_where_it_is_expected(host: str) -> None:
    found = seen(host)
    assert {path: problem for path, problem in found.items() if problem} == {}
    packages = probe.packages(ready(host), hosts.HOSTS[host])
    assert [root for package in packages for root, value in package.roots.items() if value is None] == []
    assert [problem for package in packages for problem in package.problems()] == []
    classes = {"tensorboard_logger", "wandb_logger", "mlflow_logger", "comet_logger", "csv_writer", "closure"}
    listed = [part for package in packages for part in package.here()]
    assert {part.owner for part in listed if part.path not in found} == classes  # seen as classes only
    assert len({part.path for part in listed}) == len(listed)


@pytest.mark.parametrize("host", HOSTS)
def test_release_that_has_moved_or_changed_a_part_is_refused_at_the_start_in_one_sentence(host: str) -> None:
    trainer, tree = ready(host), hosts.HOSTS[host]
    for package in probe.packages(trainer, tree):
        for part in package.here():
            for change in changes(part, package.roots):
                with pytest.MonkeyPatch.context() as patch:
                    change(patch)
                    with pytest.raises(UnsupportedError) as refused:
                        probe.check_hooks(trainer, tree)
                assert_one_sentence(str(refused.value), package, part)
    probe.check_hooks(trainer, tree)  # all is as it was


@pytest.mark.parametrize("host", HOSTS)
def test_fit_with_a_release_that_has_moved_something_trains_nothing(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pl = importlib.import_module(host)
    trainer = training.trainer(pl, strategy_for(host)())
    monkeypatch.setattr(pl, "__version__", release := f"{pl.__version__}rc1")
    monkeypatch.delattr(type(trainer.fit_loop.epoch_loop), "_update_learning_rates")
    later = Part("fit_loop", "_later", "nobody", since=(99, 0))
    monkeypatch.setattr(probe, "LIGHTNING", (*probe.LIGHTNING, later))
    module = training.regression(pl)()
    before = training.weights(module)
    name = host.partition(".")[0].replace("_", "-")
    oldest, tried = probe.RELEASES["lightning"]
    with pytest.raises(UnsupportedError) as refused:
        trainer.fit(module, training.loader())
    assert str(refused.value) == (
        f"{name} {release} has no `_TrainingEpochLoop._update_learning_rates`, which ElasticFlow relies on: "
        f"use {name} {oldest} to {tried}, or a newer ElasticFlow"
    )
    assert training.weights(module) == before


@pytest.mark.parametrize("host", HOSTS)
def test_meta_data_of_results_has_the_expected_fields(host: str) -> None:
    module = importlib.import_module(f"{host}.trainer.connectors.logger_connector.result")
    described = {*hooks.META.split(), "reduce_fx", "_sync"}
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


@pytest.mark.parametrize("host", HOSTS)
def test_limits_name_all_of_a_timers_time_however_much_is_used_up(host: str, world_of_one: Path) -> None:
    pl = importlib.import_module(host)
    timer = pl.callbacks.Timer(timedelta(seconds=90.5))
    trainer = training.trainer(pl, strategy_for(host)(), callbacks=[timer], max_epochs=1)
    trainer.fit(training.regression(pl)(), training.loader(8), training.loader(8))
    assert timer.time_remaining() < 90.5
    assert hooks.limits(trainer, hosts.HOSTS[host])["max_time_s"] == [90.5]


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


@pytest.mark.parametrize(
    ("interval", "before", "own", "after"), [(0.5, 4, 3, 2), (3, 3, 5, 3), (5, 5, 3, 4), (1.0, 8, 2, 4)]
)
def test_validations_follow_the_length_of_an_epoch_unless_user_code_says_when(
    interval: float, before: int, own: int, after: int
) -> None:
    fit_loop = SimpleNamespace(max_batches=8)
    trainer = SimpleNamespace(
        fit_loop=fit_loop, val_check_interval=interval, val_check_batch=before, check_val_every_n_epoch=1
    )
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


LISTED = {part.name for part in (*probe.LIGHTNING, *probe.TORCHMETRICS, *probe.TORCH)}


def test_private_parts_are_touched_in_few_files_and_all_of_them_are_listed() -> None:
    uses = {
        path.name: sources.private_uses(path) for path in (*SOURCES.glob("*.py"), LOADER) if path.name != "probe.py"
    }
    assert {name: found - LISTED for name, found in uses.items() if found - LISTED} == {}
    assert {name for name, found in uses.items() if found} == TOUCHING


def test_strategy_has_no_name_of_lightnings_that_is_not_listed() -> None:
    for host in HOSTS:
        strategy = strategy_for(host)
        base = importlib.import_module(f"{host}.strategies").ParallelStrategy
        assert sources.shared_names(strategy, base) - LISTED == {"_abc_impl"}  # Python's


def test_each_listed_part_has_a_user() -> None:
    assert sources.unknown_users((*probe.LIGHTNING, *probe.TORCHMETRICS), SOURCES) == set()
    assert sources.unknown_users(probe.TORCH, LOADER.parent) == set()


def test_releases_are_those_that_are_supported_and_tested() -> None:
    assert {name: sources.releases_of(name) for name in probe.RELEASES} == probe.RELEASES
