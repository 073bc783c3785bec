"""Files of a `ModelCheckpoint` name a place in a stream, whose shards may be others at another start."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from ef_common.data.torch_stream import StreamDataset
from ef_lightning import strategy_for
from tests.lightning import training
from tests.lightning.conftest import HOSTS

SIZE = 4
"""Samples of a shard, and of a batch."""

pl = importlib.import_module(HOSTS[0])
strategy = strategy_for(HOSTS[0])

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Shards:
    """Shards by their first sample."""

    def __init__(self, *first: int) -> None:
        self._first = list(first)
        self._samples = training.data(100)

    def shards(self) -> list[int]:
        return self._first

    def length(self, shard: int) -> int:
        return SIZE

    def open(self, shard: int, offset: int) -> Iterator[Any]:
        return (self._samples[number] for number in range(shard + offset, shard + SIZE))


def train(shards: Shards, *, elastic: dict[str, Any], **options: Any) -> list[list[int]]:
    """The samples of each batch."""
    found: list[list[int]] = []
    saves = options.pop("saves", None)

    class Notes(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            found.append(batch[0].tolist())

    callbacks = [Notes()]
    if saves is not None:
        callbacks.append(pl.callbacks.ModelCheckpoint(**saves))
    trainer = training.trainer(
        pl, strategy(**elastic), callbacks=callbacks, enable_checkpointing=True, max_epochs=options.pop("max_epochs", 1)
    )
    trainer.fit(training.regression(pl)(), DataLoader(StreamDataset(shards), SIZE), **options)
    return found


@pytest.mark.parametrize("elastic", [{}, {"global_batch_size": SIZE}])
def test_file_of_the_end_of_an_epoch_is_continued_with_other_shards(elastic: dict[str, Any], tmp_path: Path) -> None:
    train(Shards(0, 10, 20), elastic=elastic, saves={"dirpath": tmp_path, "filename": "end"})
    found = train(Shards(10, 20, 30, 40), elastic=elastic, max_epochs=2, ckpt_path=tmp_path / "end.ckpt")
    assert [batch[0] for batch in found] == [10, 20, 30, 40]
