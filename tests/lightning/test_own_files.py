"""Files that a ModelCheckpoint has written, and files that somebody says it has."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

from ef_lightning import own_files
from tests.lightning import training
from tests.lightning.conftest import HOSTS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("host", HOSTS)
def test_fields_of_a_checkpoint_callback_are_those_that_are_expected(host: str, tmp_path: Path) -> None:
    callback = importlib.import_module(host).callbacks.ModelCheckpoint(tmp_path / "best")
    known = {*own_files.FILES, *own_files.SCORES}
    assert known <= {*vars(callback)}
    assert {*callback.state_dict()} - known == {"monitor", "dirpath"}
    assert callback.FILE_EXTENSION == ".ckpt"


def owner_of_files(host: str, tmp_path: Path, dirpath: Any, logs: str = "logs") -> tuple[Any, Any]:
    pl = importlib.import_module(host)
    callback = pl.callbacks.ModelCheckpoint(dirpath)
    log = pl.loggers.CSVLogger(logs)
    return training.trainer(
        pl, "auto", logger=log, default_root_dir=tmp_path / "root", callbacks=[callback], enable_checkpointing=True
    ), callback


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("logs", ["logs", "logs/", "../logs", ""])
@pytest.mark.parametrize("dirpath", ["/a/best", "memory://bucket/best", "memory://bucket/best/"])
def test_files_that_a_store_names_are_kept_if_they_are_below_own_folders(
    host: str,
    dirpath: str,
    logs: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    trainer, callback = owner_of_files(host, tmp_path, dirpath, logs)
    own = [f"{dirpath.rstrip('/')}/x=1.ckpt", f"{tmp_path}/root/deep/er.ckpt"]
    own += [os.path.join(logs, "version_0/a.ckpt"), f"{os.path.abspath(logs)}/version_0/a.ckpt"]
    assert own_files.written_files(trainer, callback, {"best_k_models": dict.fromkeys(own, 1.0)}) == {
        "best_k_models": dict.fromkeys(own, 1.0)
    }
    for name in own_files.FILES:
        for path in ("", *own):
            assert own_files.written_files(trainer, callback, {name: path}) == {name: path}
    assert "forgets" not in caplog.text


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    "foreign",
    [
        "/a.ckpt",
        "s3://other/a.ckpt",
        "http://evil/a.ckpt",
        "{own}/../a.ckpt",
        "{own}er/a.ckpt",
        "a.ckpt",
        "{own}/data",
        3,
    ],
)
def test_files_that_a_store_names_elsewhere_are_forgotten(
    host: str, foreign: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = f"{tmp_path}/best"
    foreign = foreign.format(own=own) if isinstance(foreign, str) else foreign
    trainer, callback = owner_of_files(host, tmp_path, own, f"{tmp_path}/logs")
    scores = {f"{own}/1.ckpt": 1.0, foreign: 2.0}
    state = {
        "dirpath": "/x",
        "best_model_path": foreign,
        "best_model_score": 2.0,
        "best_k_models": scores,
        "kth_value": 1,
    }
    checkpoint = {"callbacks": {callback.state_key: state}}
    own_files.forget_foreign_files(trainer, checkpoint)
    forgotten = {
        "best_model_path": "",
        "best_model_score": None,
        "best_k_models": {f"{own}/1.ckpt": 1.0},
        "kth_value": 1,
    }
    assert checkpoint["callbacks"] == {callback.state_key: {"dirpath": own, **forgotten}}
    assert own_files.written_files(trainer, callback, {**state, "FILE_EXTENSION": "/x"}) == forgotten
    assert "ModelCheckpoint forgets files of an earlier run that are not below" in caplog.text
    for nonsense in (
        {"callbacks": {callback.state_key: 3}},
        {"callbacks": {callback.state_key: {"best_k_models": 3}}},
        {},
    ):
        own_files.forget_foreign_files(trainer, nonsense)
