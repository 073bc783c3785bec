"""Several training loaders of which one reads a stream: each worker walks through all of them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from ef_common.data import torch_walk
from ef_common.errors import UnsupportedError, UsageError
from ef_lightning import strategy_for
from ef_lightning.joint_reading import LENGTHS, JointLoader
from ef_lightning.joint_walk import WalkedLoaders
from tests.lightning import joint, training
from tests.lightning.conftest import HOSTS

pl = importlib.import_module(HOSTS[0])
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Numbers(IterableDataset[Any]):
    """A stream of this length, whose samples contain how often it has been begun."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.begun = 0

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        return (torch.tensor([100 * self.begun + number]) for number in range(self._length))


class Rows(IterableDataset[Any]):
    """The samples of `training.loader` as a stream."""

    def __init__(self, length: int) -> None:
        self._data = training.data(length)

    def __iter__(self) -> Iterator[Any]:
        return (self._data[index] for index in range(len(self._data)))


def combined(*lengths: int, mode: str) -> list[list[Any]]:
    """The combined batches of a pass over streams of these lengths."""
    loaders = [DataLoader(Numbers(length), 2) for length in lengths]
    given: Any = JointLoader(pl.utilities.CombinedLoader(loaders, mode), mode=mode, unflatten=list)
    found = list(islice(WalkedLoaders(given, pl.utilities.CombinedLoader).batches(0), 50))
    return [[None if part is None else part[:, 0].tolist() for part in parts] for parts in found]


@pytest.mark.parametrize("mode", LENGTHS)
@pytest.mark.parametrize("lengths", [(5, 3), (3, 5), (4, 4), (2, 7, 4), (3, 0), (0, 3)])
def test_batches_are_combined_as_by_lightning(mode: str, lengths: tuple[int, ...]) -> None:
    loader = pl.utilities.CombinedLoader([DataLoader(Numbers(length), 2) for length in lengths], mode)
    expected = []
    iterator = iter(loader)
    while (found := next(iterator, None)) is not None:
        expected.append([None if part is None else part[:, 0].tolist() for part in found[0]])
    assert combined(*lengths, mode=mode) == expected


class Batches(Rows):
    """The same in batches of one."""

    def __iter__(self) -> Iterator[Any]:
        return ([part[None] for part in row] for row in super().__iter__())


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("mode", LENGTHS)
def test_one_process_trains_as_without_elasticflow(mode: str, batched: bool) -> None:
    def fit(strategy: Any) -> Any:
        model = joint.module(pl)()
        trainer = training.trainer(pl, strategy)
        stream = DataLoader(Rows(31), 4) if batched else DataLoader(Batches(9), batch_size=None)
        loaders = {"a": stream, "b": training.loader(7, 3)}
        trainer.fit(model, pl.utilities.CombinedLoader(loaders, mode))
        return model, trainer.global_step

    (plain, plain_steps), (ours, steps) = fit("auto"), fit(strategy_for(HOSTS[0])())
    assert steps == plain_steps
    assert ours.seen == plain.seen
    assert training.weights(ours) == training.weights(plain)


def test_passes_of_loaders_draw_numbers_of_their_own() -> None:
    def passes(seed: int) -> list[Any]:
        loaders = [DataLoader(list(range(length)), 20, shuffle=True) for length in (20, 20, 60)]
        given: Any = JointLoader(
            pl.utilities.CombinedLoader(loaders, "max_size_cycle"), mode="max_size_cycle", unflatten=list
        )
        walked = WalkedLoaders(given, pl.utilities.CombinedLoader)
        walked.seed = seed
        return [[part.tolist() for part in parts] for parts in walked.batches(0)]

    found = passes(1)
    orders = [tuple(parts[index]) for parts in found for index in range(2)]
    assert len(orders) == len(set(orders)) == 6
    assert found == passes(1) != passes(2)


def test_data_workers_of_all_loaders_end_with_the_error_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(torch_walk.processes, "shut_down", ended.append)
    combined = pl.utilities.CombinedLoader([DataLoader(Numbers(9), 2), DataLoader([None])], "min_size")
    given: Any = JointLoader(combined, mode="min_size", unflatten=list)
    with pytest.raises(TypeError, match="NoneType") as raised:
        next(WalkedLoaders(given, pl.utilities.CombinedLoader).batches(0))
    assert len(ended) == 2, raised  # which keeps the frames of the pass


@pytest.mark.parametrize(
    ("settings", "limits", "error"),
    [
        ({"global_batch_size": 4}, {}, UnsupportedError),
        ({}, {"limit_train_batches": 0.5}, UsageError),
    ],
)
def test_what_needs_positions_or_a_length_is_refused(
    settings: dict[str, Any], limits: dict[str, Any], error: type[Exception]
) -> None:
    trainer = training.trainer(pl, strategy_for(HOSTS[0])(**settings), **limits)
    with pytest.raises(error):
        trainer.fit(joint.module(pl)(), [DataLoader(Rows(8), 4), training.loader(8)])
