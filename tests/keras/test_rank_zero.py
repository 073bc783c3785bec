"""What the next rank 0 does again of the hooks in which the one before it was lost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("keras")

import keras

from ef_keras.rank_zero import OnRankZero, _is_done

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # TensorFlow's tensors, with NumPy 2


@pytest.mark.parametrize(
    ("content", "is_done"),
    [
        (b"epoch,loss\n0,0.25\n1,0.5\n", True),
        (b"epoch,loss\n0,0.25\n", False),
        (b"epoch,loss\n0,0.25\n1,0.75\n", False),  # of a start before this one
        (b"epoch,loss\n0,0.25\n1,\xe2\x82", False),  # torn within a character
        (b'epoch,loss\n0,0.25\n1,"0.5\0', False),
        (b"", False),
        (None, False),
    ],
)
def test_row_of_a_csv_file_is_not_written_twice(tmp_path: Path, content: bytes | None, is_done: bool) -> None:
    file = tmp_path / "log.csv"
    if content is not None:
        file.write_bytes(content)
    assert _is_done(keras.callbacks.CSVLogger(file), 1, {"loss": 0.5}) == is_done


def test_callback_that_writes_a_whole_file_is_called_again() -> None:
    assert not _is_done(keras.callbacks.ModelCheckpoint("x.keras"), 1, {})


BEFORE = b"epoch;loss\r\n0;0.5\r\n1;0.25\r\n2;0."


@pytest.mark.parametrize(
    ("own", "append", "again_from", "content"),
    [
        (False, False, None, b"epoch;loss;val_loss\r\n1;0.75;NA\r\n"),
        (False, True, 1, b"epoch;loss\r\n0;0.5\r\n1;0.75;NA\r\n"),
        (False, True, 0, b"epoch;loss\r\n1;0.75;NA\r\n"),
        (False, True, 3, b"epoch;loss\r\n0;0.5\r\n1;0.25\r\n1;0.75;NA\r\n"),  # the last one was torn
        (False, True, None, BEFORE + b"1;0.75;NA\r\n"),
        (True, True, 1, BEFORE + b"1;0.75;NA\r\n"),  # there may be other rows of the user's
    ],
)
def test_csv_file_waits_until_it_is_known_whether_the_training_goes_on(
    tmp_path: Path, own: bool, append: bool, again_from: int | None, content: bytes
) -> None:
    file = tmp_path / "log.csv"
    file.write_bytes(BEFORE)
    logger = keras.callbacks.CSVLogger(file, separator=";", append=own)
    session: Any = SimpleNamespace(rank=0, newcomer=False)
    callback: Any = OnRankZero(logger, session)
    callback.on_train_begin()
    assert file.read_bytes() == BEFORE
    callback.open_file(append=append, again_from=again_from)
    callback.on_epoch_end(1, {"loss": 0.75})
    callback.on_train_end()
    assert file.read_bytes() == content
    assert logger.append == own


def test_csv_file_of_the_next_fit_is_a_new_one(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_bytes(BEFORE)
    logger = keras.callbacks.CSVLogger(file)
    session: Any = SimpleNamespace(rank=0, newcomer=False)
    for append in (True, False):
        callback: Any = OnRankZero(logger, session)
        callback.on_train_begin()
        callback.open_file(append=append, again_from=None)
        callback.on_epoch_end(0, {"loss": 0.75})
        callback.on_train_end()
    assert file.read_bytes() == b"epoch,loss,val_loss\r\n0,0.75,NA\r\n"


def test_csv_file_is_begun_by_the_rank_0_that_is_left_when_the_checkpoint_is_known(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_bytes(BEFORE)
    session: Any = SimpleNamespace(rank=1, newcomer=False)
    callback: Any = OnRankZero(keras.callbacks.CSVLogger(file), session)
    callback.on_train_begin()
    session.rank = 0  # the one before it is lost
    callback.open_file(append=False, again_from=None)
    callback.on_epoch_end(0, {"loss": 0.75})
    callback.on_train_end()
    assert file.read_bytes() == b"epoch,loss,val_loss\r\n0,0.75,NA\r\n"


def test_csv_file_is_left_to_rank_0(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_bytes(BEFORE)
    session: Any = SimpleNamespace(rank=1, newcomer=False)
    callback: Any = OnRankZero(keras.callbacks.CSVLogger(file), session)
    callback.on_train_begin()
    callback.open_file(append=False, again_from=None)
    assert file.read_bytes() == BEFORE
    session.rank = 0  # the one before it is lost
    callback.on_epoch_end(2, {"loss": 0.75})
    assert file.read_bytes().startswith(BEFORE)
    callback.on_train_end()
