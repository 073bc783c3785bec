"""MosaicML's `streaming.StreamingDataset`, which cannot be dealt."""

from __future__ import annotations

from typing import Any

from ef_common.data.adapters.classes import is_a

_CLASS = "streaming.base.dataset.StreamingDataset"

REFUSAL = (
    "MosaicML's StreamingDataset divides itself among a fixed number of ranks when it is made, and waits for all of "
    "them. Use webdataset, litdata or elasticflow.streams.ParquetRows, or write a stream with `shards()` and "
    "`open(shard, offset)` that reads MDS shards by streaming.base.format.reader_from_json"
)


def is_mosaic_ml(dataset: Any) -> bool:
    """Whether this is a `streaming.StreamingDataset`."""
    return is_a(dataset, _CLASS)
