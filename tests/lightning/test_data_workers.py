"""A data worker that is killed is no fault of the user's code, however often it happens."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ef_common.errors import DataWorkersLost
from ef_lightning.data_workers import PlannedLoader


class Bad(Dataset[int]):
    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        if self._number == signal.SIGKILL and get_worker_info() is not None:
            os.kill(os.getpid(), self._number)
        raise ValueError("a bad sample")


@pytest.fixture
def read() -> Iterator[object]:
    loaders: list[PlannedLoader] = []

    def make(number: int) -> PlannedLoader:
        loader = PlannedLoader(DataLoader(Bad(number), 1, num_workers=1))
        loaders.append(loader)
        loader.read(lambda start: iter([[0]][start:]))
        return loader

    yield make
    for loader in loaders:
        loader.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_data_worker_that_is_killed_again_and_again_raises_what_it_is(read) -> None:
    with pytest.raises(DataWorkersLost, match="died 4 times in a row"):
        read(signal.SIGKILL).next()


def test_exception_of_the_data_set_is_raised_as_it_was(read) -> None:
    with pytest.raises(ValueError, match="a bad sample"):
        read(0).next()
