"""A loader of a stream that is read by the numbers of its samples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader

from ef_common.core.view import SOLO
from ef_common.data.torch_stream import StreamDataset
from ef_common.session import Session
from ef_lightning.stream_loader import IndexedReading


class Dated:
    """Two shards of three samples, of which the epoch is a part."""

    def __init__(self) -> None:
        self._epoch = -1

    def shards(self) -> list[int]:
        return [0, 10]

    def length(self, shard: int) -> int:
        return 3

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def open(self, shard: int, offset: int) -> Iterator[int]:
        return iter(range(100 * self._epoch + shard + offset, 100 * self._epoch + shard + 3))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_data_workers_that_are_kept_are_told_of_each_epoch(num_workers: int) -> None:
    stream = StreamDataset(Dated())
    loader = DataLoader(stream, 2, num_workers=num_workers, persistent_workers=num_workers > 0)
    session = Session(SOLO.members[0], channel=None, groups=None)  # type: ignore[arg-type]
    reading = IndexedReading(loader, session)
    assert reading.length(1.0, 2) == 6
    try:
        for epoch in range(2):
            order = reading.order(session, seed=0, epoch=epoch, length=6)
            assert reading.at(order, slice(2, 4), length=6) == [2, 3]
            reading.planned.read(lambda skip: iter([[2, 3], [5]][skip:]))
            found = [reading.planned.next().tolist(), reading.planned.next().tolist()]
            assert found == [[100 * epoch + 2, 100 * epoch + 10], [100 * epoch + 12]]
    finally:
        reading.planned.close()
