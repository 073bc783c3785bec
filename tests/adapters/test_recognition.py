"""What is recognized as a stream of shards, and what is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from ef_common.data.adapters.recognition import shards_of
from ef_common.data.torch_loader import is_stateful, plain
from ef_common.data.torch_order import is_computed
from ef_common.errors import UnsupportedError


class Plain(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Sharded(Plain):
    def shards(self) -> list[int]:
        return [1]

    def open(self, shard: int, offset: int) -> Any:
        return iter(())


def test_data_set_without_shards_is_none_and_one_with_shards_is_its_own_stream() -> None:
    assert shards_of(Plain()) is None
    data = Sharded()
    assert shards_of(data) == (data, False)


def test_data_set_of_mosaic_ml_is_refused() -> None:
    mosaic: Any = type("StreamingDataset", (Plain,), {"__module__": "streaming.base.dataset"})
    with pytest.raises(UnsupportedError, match="divides itself among a fixed number of ranks"):
        shards_of(mosaic())


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_loader_that_keeps_its_own_place_is_read_as_a_plain_one() -> None:
    loading = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed: .[streams]")
    stateful = loading.StatefulDataLoader(
        list(range(7)), 3, shuffle=True, num_workers=1, multiprocessing_context="fork"
    )
    assert is_stateful(stateful)
    found = plain(stateful)
    assert type(found) is DataLoader
    assert is_computed(found)
    assert sorted(n for batch in found for n in batch.tolist()) == list(range(7))
    assert (found.batch_size, found.num_workers) == (3, 1)
    assert found.multiprocessing_context is stateful.multiprocessing_context
    ordinary: DataLoader[Any] = DataLoader([1])
    assert plain(ordinary) is ordinary
