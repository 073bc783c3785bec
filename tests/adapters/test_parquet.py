"""Row groups of Parquet files are shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ef_common.data.adapters.parquet import ParquetRows
from ef_common.errors import UsageError
from tests.adapters.contract import check_stream

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install -e '.[streams]'")


def write(path: Path, numbers: range) -> None:
    from pyarrow import parquet

    table = pyarrow.table({"n": list(numbers), "text": [f"text {n}" for n in numbers]})
    parquet.write_table(table, path, row_group_size=4)


@pytest.fixture
def files(tmp_path: Path) -> str:
    write(tmp_path / "b.parquet", range(10))
    write(tmp_path / "a.parquet", range(10, 13))
    return f"{tmp_path}/*.parquet"


@pytest.mark.parametrize("rows_at_once", [1, 3, 1024])
def test_row_groups_are_shards_of_known_length(files: str, rows_at_once: int) -> None:
    rows = ParquetRows(files, rows_at_once=rows_at_once)
    assert [rows.length(group) for group in rows.shards()] == [3, 4, 4, 2]
    found = check_stream(rows)
    assert [[row["n"] for row in group] for group in found] == [[10, 11, 12], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert found[0][0]["text"] == "text 10"


def test_only_the_columns_asked_for_are_read(files: str) -> None:
    rows = ParquetRows(files, columns=["n"])
    assert next(rows.open(rows.shards()[0], 1)) == {"n": 11}


def test_footers_are_read_once(files: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyarrow import parquet

    rows = ParquetRows(files)
    first = rows.shards()
    monkeypatch.setattr(parquet, "read_metadata", lambda *args: pytest.fail("read again"))
    assert rows.shards() is first


def test_number_of_rows_that_is_none_is_refused(files: str) -> None:
    with pytest.raises(UsageError, match="rows_at_once=0"):
        ParquetRows(files, rows_at_once=0)


def test_file_that_is_no_parquet_is_named_by_pyarrow(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"x" * 100)
    with pytest.raises(pyarrow.ArrowInvalid):
        list(ParquetRows(str(tmp_path / "a.parquet")).shards())


def samples(rows: Any) -> list[Any]:
    return [row for group in rows.shards() for row in rows.open(group, 0)]
