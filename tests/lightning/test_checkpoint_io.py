"""Checkpoints that the user's callbacks ask for, at a URL."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from ef_common.errors import StorageFailed
from ef_common.storage.retries import Retries
from ef_common.storage.store import Store, Writer
from ef_lightning import checkpoint_io, strategy_for
from tests.lightning import training
from tests.lightning.conftest import HOSTS
from tests.storage.conftest import BUCKET, moto  # noqa: F401  # a fixture

pl = importlib.import_module(HOSTS[0])
Regression = training.regression(pl)
strategy = strategy_for(HOSTS[0])

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

URL = "memory://callbacks"


@pytest.fixture(autouse=True)
def store() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    yield fs
    if fs.exists("/callbacks"):
        fs.rm("/callbacks", recursive=True)


def fit(directory: str, **options: Any) -> Any:
    callback = pl.callbacks.ModelCheckpoint(directory, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    options = {"enable_checkpointing": True, "callbacks": [callback], **options}
    trainer = training.trainer(pl, strategy(), **options)
    trainer.fit(Regression(), training.loader())
    return callback


def test_model_checkpoint_at_a_url_is_written_whole_and_loads(store: Any) -> None:
    callback = fit(URL)
    names = {Path(name).name for name in store.ls("/callbacks", detail=False)}
    assert names >= {"step=2.ckpt", "step=4.ckpt"}
    loaded = Regression.load_from_checkpoint(callback.best_model_path)
    with store.open("/callbacks/" + Path(callback.best_model_path).name) as file:
        weights = torch.load(file, weights_only=True)["state_dict"]
    assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())


def test_model_checkpoint_in_a_folder_of_s3_that_is_not_empty_knows_its_files(
    moto: dict[str, Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Improving(Regression):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("left", 100.0 - self.global_step)
            return super().training_step(batch, batch_idx)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)

    monkeypatch.setitem(fsspec.config.conf, "s3", moto)
    url = f"s3://{BUCKET}/callbacks"
    Store(url).create("earlier.ckpt", b"of another run")
    callback = pl.callbacks.ModelCheckpoint(url, "{step}", monitor="left", every_n_train_steps=2, save_top_k=1)
    trainer = training.trainer(pl, strategy(), enable_checkpointing=True, callbacks=[callback], max_epochs=1)
    trainer.fit(Improving(), training.loader())
    trainer.test(dataloaders=training.loader(9), ckpt_path="best")
    assert [entry.name for entry in Store(url).entries("")] == ["earlier.ckpt", "step=8.ckpt"]


@pytest.mark.parametrize("recovers", [True, False])
def test_store_that_fails_is_tried_again_and_nothing_torn_is_left(
    store: Any, monkeypatch: pytest.MonkeyPatch, recovers: bool
) -> None:
    failures = iter(range(2)) if recovers else itertools.count()
    write = Writer.write

    def fail(self: Writer, data: Any) -> int:
        if next(failures, None) is None:
            return write(self, data)
        self.failure = StorageFailed("the store is full")
        raise self.failure

    total = timedelta(minutes=1) if recovers else timedelta(milliseconds=50)
    brief = Retries(timedelta(milliseconds=1), timedelta(milliseconds=2), total=total)
    monkeypatch.setattr(Writer, "write", fail)
    monkeypatch.setattr(checkpoint_io, "Retries", lambda: brief)
    if recovers:
        fit(URL)
        assert store.exists("/callbacks/step=2.ckpt")
    else:
        with pytest.raises(StorageFailed, match="the store is full"):
            fit(URL)
        assert not store.exists("/callbacks/step=2.ckpt")


def test_plugin_of_the_users_is_kept_and_one_that_wraps_gets_ours(tmp_path: Path) -> None:
    plugins = importlib.import_module(f"{HOSTS[0]}.plugins.io")
    own = plugins.TorchCheckpointIO()
    trainer = training.trainer(pl, strategy(), plugins=[own])
    assert trainer.strategy.checkpoint_io is own
    around = plugins.AsyncCheckpointIO()
    trainer = training.trainer(pl, strategy(), plugins=[around])
    assert trainer.strategy.checkpoint_io is around
    assert type(around.checkpoint_io).__name__ == "ElasticFlowCheckpointIO"
    fit(str(tmp_path), plugins=[plugins.AsyncCheckpointIO()])
    assert (tmp_path / "step=2.ckpt").exists()


def test_plugin_that_wraps_another_one_keeps_it(tmp_path: Path) -> None:
    plugins = importlib.import_module(f"{HOSTS[0]}.plugins.io")
    inner = plugins.AsyncCheckpointIO()
    outer = plugins.AsyncCheckpointIO(inner)
    trainer = training.trainer(pl, strategy(), plugins=[outer])
    for _ in range(2):
        assert trainer.strategy.checkpoint_io is outer
        assert outer.checkpoint_io is inner
        assert type(inner.checkpoint_io).__name__ == "ElasticFlowCheckpointIO"
    fit(str(tmp_path), plugins=[plugins.AsyncCheckpointIO(plugins.AsyncCheckpointIO())])
    assert (tmp_path / "step=2.ckpt").exists()


def test_wrapper_of_an_older_lightning_keeps_what_it_wraps() -> None:
    class Wrapper:
        def __init__(self, checkpoint_io: Any = None) -> None:
            self.checkpoint_io = checkpoint_io

    inner = Wrapper()
    outer = Wrapper(inner)
    checkpoint_io.give_innermost(outer, object)
    assert outer.checkpoint_io is inner
    assert type(inner.checkpoint_io) is object
