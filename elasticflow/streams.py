"""Streams of shards made of common kinds of data: a table of contents, which imports only what is asked for.

>>> from elasticflow.streams import StreamDataset, TextLines
>>> data = StreamDataset(TextLines("data/*.txt"), shuffle=True)    # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ef_common.data.adapters.lines import TextLines
    from ef_common.data.adapters.parquet import ParquetRows
    from ef_common.data.adapters.tf_data import TFDataFiles
    from ef_common.data.adapters.tf_records import TFRecords
    from ef_common.data.shards import ShardStream
    from ef_common.data.torch_stream import StreamDataset

__all__ = ["StreamDataset", "ShardStream", "TextLines", "ParquetRows", "TFRecords", "TFDataFiles"]

_CONTENTS = {
    "StreamDataset": "ef_common.data.torch_stream",
    "ShardStream": "ef_common.data.shards",
    "TextLines": "ef_common.data.adapters.lines",
    "ParquetRows": "ef_common.data.adapters.parquet",
    "TFRecords": "ef_common.data.adapters.tf_records",
    "TFDataFiles": "ef_common.data.adapters.tf_data",
}


def __getattr__(name: str) -> Any:
    if name in _CONTENTS:
        return getattr(importlib.import_module(_CONTENTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
