"""The batches of a DataLoader over a stream whose samples are read by their numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ef_common.data.indexed_stream import IndexedStream
from ef_common.data.sample import Sample
from ef_common.data.torch_determinism import seed_everything


class IndexedBatches:
    """Reads batches by number; a source of a :class:`~ef_common.data.torch_loader.PlannedLoader`.

    Args:
        stream: The stream.
        collate: Makes a batch of samples.
    """

    def __init__(self, stream: IndexedStream, collate: Callable[[list[Any]], Any]) -> None:
        self._stream = stream
        self._collate = collate

    def __getitems__(self, entries: list[int | Sample]) -> list[Any]:
        """The samples with these numbers."""
        return [self._read(entry) for entry in entries]

    def collate(self, found: list[Any]) -> Any:
        """The batch, made as the user's loader does."""
        return self._collate(found)

    def _read(self, entry: int | Sample) -> Any:
        if isinstance(entry, Sample):
            return self._stream.read(entry.at, partial(seed_everything, entry.key))
        return self._stream.read(entry)
