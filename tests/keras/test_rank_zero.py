"""What the next rank 0 does again of the hooks in which the one before it was lost."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("keras")

import keras

from ef_keras.rank_zero import _is_done

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
