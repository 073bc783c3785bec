"""A place in a stream means the same only where its shards are the same."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from ef_common.data.torch_stream import StreamDataset
from ef_common.errors import UsageError
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
    """Shards by their first sample, with these lengths instead of the usual one."""

    def __init__(self, *first: int, lengths: dict[int, int] | None = None) -> None:
        self._first = list(first)
        self._lengths = lengths or {}
        self._samples = training.data(100)

    def shards(self) -> list[int]:
        return self._first

    def length(self, shard: int) -> int:
        return self._lengths.get(shard, SIZE)

    def open(self, shard: int, offset: int) -> Iterator[Any]:
        return (self._samples[number] for number in range(shard + offset, shard + self.length(shard)))


def train(
    shards: Shards,
    *,
    elastic: dict[str, Any],
    shuffle: bool = False,
    on_batch: Callable[[Any], object] = lambda loader: None,
    **options: Any,
) -> list[list[int]]:
    """The samples of each batch. `on_batch` is called with the elastic loader when one has been trained."""
    found: list[list[int]] = []
    saves = options.pop("saves", None)

    class Notes(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            found.append(batch[0].tolist())
            on_batch(trainer.strategy._fit.train_loader)

    callbacks = [Notes()]
    if saves is not None:
        callbacks.append(pl.callbacks.ModelCheckpoint(**saves))
    trainer = training.trainer(
        pl,
        strategy(**elastic),
        callbacks=callbacks,
        enable_checkpointing=saves is not None,
        max_epochs=options.pop("max_epochs", 1),
        max_steps=options.pop("max_steps", -1),
    )
    trainer.fit(training.regression(pl)(), DataLoader(StreamDataset(shards, shuffle=shuffle), SIZE), **options)
    return found


@pytest.mark.parametrize("elastic", [{}, {"global_batch_size": SIZE}])
def test_file_of_the_end_of_an_epoch_is_continued_with_other_shards(elastic: dict[str, Any], tmp_path: Path) -> None:
    train(Shards(0, 10, 20), elastic=elastic, saves={"dirpath": tmp_path, "filename": "end"})
    found = train(Shards(10, 20, 30, 40), elastic=elastic, max_epochs=2, ckpt_path=tmp_path / "end.ckpt")
    assert [batch[0] for batch in found] == [10, 20, 30, 40]


FIXED = {"global_batch_size": SIZE}
OTHERS = {
    "other shards": (FIXED, Shards(0, 10, 20, 25, 30), {}, "another list of shards"),
    "other lengths": (FIXED, Shards(0, 10, 20, 30, 40, lengths={0: 3, 40: 5}), {}, "shards of other lengths"),
    "another order": (FIXED, Shards(0, 10, 20, 30, 40), {"shuffle": True}, "another order"),
    "other shards of a stream": ({}, Shards(0, 10, 20, 25, 30), {}, "another list of shards"),
    "another order of a stream": ({}, Shards(0, 10, 20, 30, 40), {"shuffle": True}, "another order"),
}
"""What a start has instead of the shards 0, 10, 20, 30 and 40, and the error."""


@pytest.mark.parametrize("name", OTHERS)
def test_file_of_the_middle_of_an_epoch_is_not_continued_with_other_shards(name: str, tmp_path: Path) -> None:
    elastic, others, settings, message = OTHERS[name]
    saves = {"dirpath": tmp_path, "filename": "middle", "every_n_train_steps": 3}
    train(Shards(0, 10, 20, 30, 40), elastic=elastic, saves=saves)
    with pytest.raises(UsageError, match=message):
        train(others, elastic=elastic, ckpt_path=tmp_path / "middle.ckpt", **settings)
    found = train(Shards(0, 10, 20, 30, 40), elastic=elastic, ckpt_path=tmp_path / "middle.ckpt")
    assert [batch[0] for batch in found] == [30, 40]


@pytest.mark.parametrize("name", ["other shards", "other lengths", "another order"])
def test_newcomer_with_other_shards_is_refused(name: str) -> None:
    elastic, others, settings, message = OTHERS[name]
    states: list[dict[str, Any]] = []
    train(Shards(0, 10, 20, 30, 40), elastic=elastic, on_batch=lambda loader: states.append(loader.state()))

    def check(loader: Any) -> None:
        with pytest.raises(UsageError, match=message):
            loader.take_state(states[0])
        loader.take_state(states[-1], saved=True)  # of the end of the epoch

    train(others, elastic=elastic, on_batch=check, **settings)


def test_state_of_a_release_that_kept_no_list_of_shards_is_accepted() -> None:
    states: list[dict[str, Any]] = []
    train(Shards(0, 10, 20), elastic=FIXED, on_batch=lambda loader: states.append(loader.state()))
    del states[0]["numbering"]
    train(
        Shards(0, 10, 30), elastic=FIXED, on_batch=lambda loader: loader.take_state(states[0], saved=True), max_steps=1
    )
