"""TFRecord files as TensorFlow writes them are shards."""

from __future__ import annotations

from pathlib import Path

import pytest

from ef_common.data.adapters.tf_records import TFRecords
from ef_common.errors import UsageError
from tests.adapters.contract import check_stream

RECORDS = [b"", b"one", b"two" * 1000, b"\x00\xff"]


@pytest.mark.thorough
@pytest.mark.parametrize(("compression", "written"), [(None, ""), ("gzip", "GZIP")])
def test_records_are_those_that_tensorflow_writes(tmp_path: Path, compression: str | None, written: str) -> None:
    tf = pytest.importorskip("tensorflow")
    path = str(tmp_path / "a.tfrecord")
    with tf.io.TFRecordWriter(path, written) as writer:
        for record in RECORDS:
            writer.write(record)
    records = TFRecords([path], compression=compression)
    assert check_stream(records) == [RECORDS]
    assert next(TFRecords(path, len, compression=compression).open(path, 2)) == 3000


def test_records_are_read_from_any_offset_on(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    records = [b"one", b"", b"three"]
    path.write_bytes(b"".join(len(data).to_bytes(8, "little") + bytes(4) + data + bytes(4) for data in records))
    assert check_stream(TFRecords(str(path))) == [records]


@pytest.mark.parametrize("size", [5, 12, 14, 20])
def test_file_that_is_cut_is_named(tmp_path: Path, size: int) -> None:
    whole = (3).to_bytes(8, "little") + bytes(4) + b"one" + bytes(4)
    path = tmp_path / "a.tfrecord"
    path.write_bytes(whole + whole[: size if size < len(whole) else 1])
    records = TFRecords(str(path))
    samples = records.open(str(path), 0)
    assert next(samples) == b"one"
    with pytest.raises(UsageError, match=r"a\.tfrecord, record 1"):
        next(samples)
    with pytest.raises(UsageError, match=r"a\.tfrecord, record 1"):
        next(records.open(str(path), 2))
