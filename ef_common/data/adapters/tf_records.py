"""TFRecord files, read without TensorFlow.

A record is its length (8 bytes, little-endian), a checksum of that (4 bytes), the data, and their checksum (4 bytes).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any

from ef_common.data.adapters.files import expanded, opened
from ef_common.errors import UsageError

_LENGTH = struct.Struct("<Q")
_CHECKSUM_BYTES = 4
_HEADER_BYTES = _LENGTH.size + _CHECKSUM_BYTES


class TFRecords:
    """A stream of the records of TFRecord files; a file is a shard.

    Args:
        urls: Paths or URLs of the files, or patterns of them (`*`); fsspec opens them.
        parse: Makes a sample of the bytes of a record, such as a function that calls `tf.io.parse_single_example`.
        compression: "gzip" if the files were written so, or "infer": by the names of the files.
    """

    def __init__(
        self,
        urls: str | Iterable[str],
        parse: Callable[[bytes], Any] | None = None,
        *,
        compression: str | None = "infer",
    ) -> None:
        self._urls = expanded(urls)
        self._parse = parse
        self._compression = compression

    def shards(self) -> Sequence[str]:
        """The files."""
        return self._urls

    def open(self, shard: str, offset: int) -> Iterator[Any]:
        """Samples of a file from this record on; of those before, only the lengths are read.

        Raises:
            UsageError: The file is cut.
        """
        with opened(shard, compression=self._compression) as file:
            number = 0
            while header := file.read(_HEADER_BYTES):
                if number < offset:
                    _skip(file, _length(header, shard, number), shard, number)
                else:
                    data = _data(file, _length(header, shard, number), shard, number)
                    yield data if self._parse is None else self._parse(data)
                number += 1


def _length(header: bytes, shard: str, number: int) -> int:
    if len(header) < _HEADER_BYTES:
        raise _cut(shard, number)
    return int(_LENGTH.unpack_from(header)[0])


def _data(file: IO[bytes], length: int, shard: str, number: int) -> bytes:
    data = file.read(length + _CHECKSUM_BYTES)
    if len(data) < length + _CHECKSUM_BYTES:
        raise _cut(shard, number)
    return data[:length]


def _skip(file: IO[bytes], length: int, shard: str, number: int) -> None:
    file.seek(length + _CHECKSUM_BYTES - 1, 1)
    if not file.read(1):  # to seek behind the end of a file is no error
        raise _cut(shard, number)


def _cut(shard: str, number: int) -> UsageError:
    return UsageError(f"a TFRecord file ends within a record, or is none. Received: file {shard}, record {number}")
