"""Files of lines: plain text, or JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ef_common.data.adapters.files import expanded, opened
from ef_common.data.shards import skipped


class TextLines:
    r"""A stream of the lines of files; a file is a shard.

    Args:
        urls: Paths or URLs of the files, or patterns of them (`*`); fsspec opens them.
        parse: Makes a sample of a line, which is text without its end, such as `json.loads`.
        compression: One of fsspec's, such as "gzip"; "infer" follows the names of the files.
        encoding: Of the text.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from pathlib import Path
        >>> with TemporaryDirectory() as folder:
        ...     _ = Path(folder, "a.jsonl").write_text('[1]\n[2]\n[3]\n')
        ...     import json
        ...     lines = TextLines(f"{folder}/*.jsonl", json.loads)
        ...     list(lines.open(lines.shards()[0], 1))
        [[2], [3]]
    """

    def __init__(
        self,
        urls: str | Iterable[str],
        parse: Callable[[str], Any] | None = None,
        *,
        compression: str | None = "infer",
        encoding: str = "utf-8",
    ) -> None:
        self._urls = expanded(urls)
        self._parse = parse
        self._compression = compression
        self._encoding = encoding

    def shards(self) -> Sequence[str]:
        """The files."""
        return self._urls

    def open(self, shard: str, offset: int) -> Iterator[Any]:
        """Samples of a file from this line on; those before are read and not parsed."""
        with opened(shard, compression=self._compression) as file:
            for line in skipped(file, offset, what=shard):
                text = line.decode(self._encoding).removesuffix("\n").removesuffix("\r")
                yield text if self._parse is None else self._parse(text)
