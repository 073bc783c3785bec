"""Other libraries' data sets, as streams of shards."""

from __future__ import annotations

from typing import Any

from ef_common.data.adapters.hugging_face import HuggingFaceShards, is_hugging_face
from ef_common.data.adapters.hugging_face import is_shuffled as is_shuffled_by_hugging_face
from ef_common.data.adapters.lit_data import LitDataChunks, is_lit_data
from ef_common.data.adapters.mosaic_ml import REFUSAL, is_mosaic_ml
from ef_common.data.adapters.web_dataset import TarShards, is_web_dataset
from ef_common.data.shards import ShardStream, is_shard_stream
from ef_common.errors import UnsupportedError


def shards_of(dataset: Any) -> tuple[ShardStream, bool] | None:
    """The stream of shards that a data set is, and whether its shards are to be shuffled; None if it is none.

    Raises:
        UnsupportedError: It could be one, but not as it is set up.
    """
    if is_shard_stream(dataset):
        return dataset, False
    if is_hugging_face(dataset):
        return HuggingFaceShards(dataset), is_shuffled_by_hugging_face(dataset)
    if is_lit_data(dataset):
        chunks = LitDataChunks(dataset)
        return chunks, chunks.is_shuffled
    if is_mosaic_ml(dataset):
        raise UnsupportedError(REFUSAL)
    if is_web_dataset(dataset):
        tars = TarShards(dataset)
        return tars, tars.is_shuffled
    return None
