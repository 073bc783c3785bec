"""Other libraries' data sets, as streams of shards."""

from __future__ import annotations

from typing import Any

from ef_common.data.adapters.hugging_face import HuggingFaceShards, is_hugging_face
from ef_common.data.adapters.hugging_face import is_shuffled as is_shuffled_by_hugging_face
from ef_common.data.adapters.web_dataset import TarShards, is_web_dataset
from ef_common.data.shards import ShardStream, is_shard_stream


def shards_of(dataset: Any) -> tuple[ShardStream, bool] | None:
    """The stream of shards that a data set is, and whether its shards are to be shuffled; None if it is none.

    Raises:
        UnsupportedError: It could be one, but not as it is set up.
    """
    if is_shard_stream(dataset):
        return dataset, False
    if is_hugging_face(dataset):
        return HuggingFaceShards(dataset), is_shuffled_by_hugging_face(dataset)
    if is_web_dataset(dataset):
        tars = TarShards(dataset)
        return tars, tars.is_shuffled
    return None
