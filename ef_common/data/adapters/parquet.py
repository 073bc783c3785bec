"""Parquet files, whose row groups can be read apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ef_common.data.adapters.files import expanded, opened
from ef_common.errors import UsageError


class RowGroup(NamedTuple):
    """A row group of a file."""

    url: str
    number: int
    num_rows: int


class ParquetRows:
    """A stream of the rows of Parquet files, as dicts; a row group is a shard, and knows its length.

    The footers of all files are read once in each worker. Needs `pyarrow`.

    Args:
        urls: Paths or URLs of the files, or patterns of them (`*`); fsspec opens them.
        columns: The columns to read; all by default.
        rows_at_once: Rows that are decoded together.
    """

    def __init__(
        self, urls: str | Iterable[str], *, columns: Sequence[str] | None = None, rows_at_once: int = 1024
    ) -> None:
        if rows_at_once < 1:
            raise UsageError(f"expected a positive number of rows. Received: rows_at_once={rows_at_once}")
        self._urls = expanded(urls)
        self._columns = None if columns is None else list(columns)
        self._rows_at_once = rows_at_once

    def shards(self) -> Sequence[RowGroup]:
        """The row groups of all files."""
        return self._groups

    def length(self, shard: RowGroup) -> int:
        """Its rows."""
        return shard.num_rows

    def open(self, shard: RowGroup, offset: int) -> Iterator[dict[str, Any]]:
        """Rows of a row group from this one on; those before are not turned into Python objects."""
        from pyarrow import parquet

        with opened(shard.url) as file, parquet.ParquetFile(file) as rows:
            for batch in rows.iter_batches(self._rows_at_once, row_groups=[shard.number], columns=self._columns):
                skipped = min(offset, batch.num_rows)
                offset -= skipped
                yield from batch.slice(skipped).to_pylist()

    @cached_property
    def _groups(self) -> list[RowGroup]:
        from pyarrow import parquet

        found: list[RowGroup] = []
        for url in self._urls:
            with opened(url) as file:
                metadata = parquet.read_metadata(file)
                groups = range(metadata.num_row_groups)
                found += [RowGroup(url, number, metadata.row_group(number).num_rows) for number in groups]
        return found
