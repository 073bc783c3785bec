"""Data workers read what is dealt, as the user's loader says; one that is killed is no fault of the user's code."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ef_common.data import births
from ef_common.data.torch_loader import PlannedLoader
from ef_common.data.torch_walk import WalkedLoader
from ef_common.errors import DataWorkersLost
from ef_common.launch.ending import has_ended
from ef_lightning import strategy_for
from tests.lightning import training
from tests.lightning.conftest import HOSTS, QUIET
from tests.waiting import poll_until

pytestmark = QUIET


class Bad(Dataset[int]):
    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        if self._number == signal.SIGKILL and get_worker_info() is not None:
            os.kill(os.getpid(), self._number)
        raise ValueError("a bad sample")


class Slow(Dataset[int]):
    """The first sample takes its time."""

    def __init__(self, duration_s: float = 0.0) -> None:
        self.mark = 0
        self._duration_s = duration_s

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == 0:
            time.sleep(self._duration_s)
        return index, self.mark


class Leaving(Dataset[torch.Tensor]):
    """Its process no longer hands over what it has read, and ends a moment later: once, at the third sample.

    So does a process that ends in an orderly way.
    """

    def __init__(self, left: Path) -> None:
        self.left = left

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2 and not self.left.exists():
            os.unlink(resource_sharer._resource_sharer._address)  # type: ignore[attr-defined]
            self.left.touch()
            time.sleep(0.5)
            os._exit(0)
        return torch.tensor(index)


@pytest.fixture
def read() -> Iterator[Callable[..., PlannedLoader]]:
    loaders: list[PlannedLoader] = []

    def make(dataset: Dataset[Any], **kwargs: Any) -> PlannedLoader:
        loader = PlannedLoader(DataLoader(dataset, 1, **{"num_workers": 1, **kwargs}))
        loaders.append(loader)
        loader.begin()
        loader.read(lambda start: iter([[i] for i in range(len(dataset))][start:]))
        return loader

    yield make
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("timeout_s", [0, 20])
def test_data_worker_that_is_killed_again_and_again_raises_what_it_is(read: Any, timeout_s: float) -> None:
    with pytest.raises(DataWorkersLost, match="died 4 times in a row"):
        read(Bad(signal.SIGKILL), timeout=timeout_s).next()


@pytest.mark.parametrize("is_walked", [False, True])
def test_sample_that_a_data_worker_takes_back_as_it_ends_is_read_again(
    read: Any, is_walked: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = Leaving(tmp_path / "left")
    walk = WalkedLoader(DataLoader(dataset, 1, num_workers=1)).batches(0)
    following = partial(next, walk) if is_walked else read(dataset).next
    found = [int(following())]
    poll_until(dataset.left.exists)
    found += [int(following()) for _ in range(2)]
    walk.close()
    assert found == [0, 1, 2]
    assert "FileNotFoundError" in caplog.text


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The second process that is forked from now on never runs a line of Python, and ignores SIGTERM."""
    fork, forked, found = os.fork, iter(range(1000)), []

    def fork_once() -> int:
        is_stuck = next(forked) == 1
        pid = fork()
        if is_stuck and not pid:
            signal.signal(signal.SIGTERM, lambda number, frame: None)
            while True:
                time.sleep(1.0)
        found.extend([pid] * is_stuck)
        return pid

    monkeypatch.setattr(os, "fork", fork_once)
    return found


@pytest.mark.parametrize(("max_waits", "timeout_s"), [(3, 0), (births.MAX_WAITS, 4)])
def test_data_worker_that_does_not_begin_to_run_is_started_again(
    read: Any,
    stuck: list[int],
    max_waits: int,
    timeout_s: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(births, "MAX_WAITS", max_waits)
    loader = read(Slow(), num_workers=2, timeout=timeout_s)
    assert [int(loader.next()[0]) for _ in range(4)] == [0, 1, 2, 3]
    (pid,) = stuck
    assert f"data workers {pid} have not begun to run" in caplog.text
    assert not psutil.pid_exists(pid)


def test_data_workers_are_heard_though_others_have_filled_the_pipe() -> None:
    heard = births.births()
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(heard._writer, births._PID.pack(1))
    assert births.births() is heard
    os.write(heard._writer, births._PID.pack(7))
    assert (heard.take(7), heard.take(7)) == (True, False)


def test_forked_process_hears_of_its_own_data_workers_and_not_of_those_of_the_other_one() -> None:
    heard, forks = births.births(), multiprocessing.get_context("fork")
    own = forks.SimpleQueue()
    child = forks.Process(target=lambda: own.put(births.births() is heard))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert own.get() is False
    assert births.births() is heard


@pytest.mark.parametrize("is_walked", [False, True])
def test_data_worker_that_has_not_begun_to_run_ends_with_the_others(stuck: list[int], is_walked: bool) -> None:
    plain = DataLoader(Slow(), 1, num_workers=2)
    if is_walked:
        batches = WalkedLoader(plain).batches(0)
        next(batches)
        batches.close()
    else:
        loader = PlannedLoader(plain)
        loader.read(lambda start: iter([[0]]))
        loader.next()
        loader.close()
    (pid,) = stuck
    assert not psutil.pid_exists(pid)


def test_exception_of_the_data_set_is_raised_as_it_was(read: Any) -> None:
    with pytest.raises(ValueError, match="a bad sample"):
        read(Bad(0)).next()


def test_timeout_of_a_loader_is_heeded(read: Any) -> None:
    assert read(Slow(0.5), timeout=20).next()[0].tolist() == [0]
    with pytest.raises(RuntimeError, match="timed out"):
        read(Slow(20.0), timeout=0.5).next()


@pytest.mark.skipif("in_order" not in inspect.signature(DataLoader).parameters, reason="this torch has no in_order")
def test_batches_come_in_the_order_in_which_they_are_dealt(read: Any) -> None:
    loader = read(Slow(1.0), num_workers=2, in_order=False)
    assert [loader.next()[0].item() for _ in range(4)] == [0, 1, 2, 3]


class Opened(Dataset[tuple[int, int]]):
    """Each data worker opens it, so that it cannot be read anywhere else. The first one that reads sample 3 dies."""

    opened: range | None = None

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, int]:
        assert self.opened is not None
        if index == 3 and not list(self._folder.iterdir()):
            (self._folder / "read").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.opened[index], os.getpid()


def _open(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.opened = range(4)  # type: ignore[attr-defined]


def test_batch_that_is_not_in_the_plan_is_read_in_a_data_worker_and_the_plan_goes_on(read: Any, tmp_path: Path) -> None:
    loader = read(Opened(tmp_path), num_workers=2, worker_init_fn=_open, prefetch_factor=1)
    found = [loader.next(), loader.fetch([3]), loader.fetch([0]), loader.next(), loader.fetch([2])]
    found += [loader.next(), loader.next()]
    assert [batch[0].item() for batch in found] == [0, 3, 0, 1, 2, 2, 3]
    assert os.getpid() not in {batch[1].item() for batch in found}
    assert list(tmp_path.iterdir())
    with pytest.raises(StopIteration):
        loader.next()
    assert loader.fetch([1])[0].item() == 1
    with pytest.raises(StopIteration):
        loader.next()


class Complete:
    """Completes what torch's iterator reads."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def _reset(self, *args: Any) -> None:
        self.iterator._reset(*args)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return [*next(self.iterator), "complete"]


class Wrapping(DataLoader[Any]):
    """Completes each batch in an iterator that wraps torch's, as PyTorch Geometric's loaders do."""

    def _get_iterator(self) -> Any:
        return Complete(super()._get_iterator())


class Generating(DataLoader[Any]):
    """Completes each batch in a generator, which cannot begin again."""

    def _get_iterator(self) -> Any:
        return ([*batch, "complete"] for batch in super()._get_iterator())


@pytest.mark.parametrize("kind", [Wrapping, Generating])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_batch_that_is_not_in_the_plan_comes_from_an_iterator_of_the_loaders_own(kind: Any, num_workers: int) -> None:
    loader = PlannedLoader(kind(Slow(), 1, num_workers=num_workers))
    loader.read(lambda start: iter([[0], [1], [2]][start:]))
    found = [loader.next(), loader.fetch([3]), loader.next(), loader.next()]
    loader.close()
    assert [(int(index), last) for index, _, last in found] == [(n, "complete") for n in (0, 3, 1, 2)]


def test_data_worker_of_a_wrapped_iterator_that_dies_during_a_step_costs_a_second_read(tmp_path: Path) -> None:
    loader = PlannedLoader(Wrapping(Opened(tmp_path), 1, num_workers=1, worker_init_fn=_open))
    loader.read(lambda start: iter([[0], [1], [2], [3]][start:]))
    found = [loader.next(), loader.next()]
    reader = psutil.Process(int(found[0][1]))
    poll_until(lambda: has_ended(reader))  # torch would raise here
    found += [loader.next(), loader.next()]
    loader.close()
    assert [(int(index), last) for index, _, last in found] == [(n, "complete") for n in range(4)]
    assert list(tmp_path.iterdir())


@pytest.mark.parametrize("persistent", [False, True])
def test_data_workers_see_the_data_set_of_their_epoch_unless_the_user_keeps_them(read: Any, persistent: bool) -> None:
    dataset = Slow()
    loader = read(dataset, persistent_workers=persistent)
    seen = []
    for mark in range(3):
        dataset.mark = mark
        loader.begin()
        for _ in range(2):  # a new plan within the epoch
            loader.read(lambda start: iter([[3]][start:]))
            seen.append(loader.next()[1].item())
    assert seen == ([0] * 6 if persistent else [0, 0, 1, 1, 2, 2])


def test_each_epoch_reads_what_its_hooks_have_set() -> None:
    pl = importlib.import_module(HOSTS[0])
    dataset, train, val = Slow(), [], []

    class Module(training.regression(pl)):  # type: ignore[misc]
        def on_train_epoch_start(self) -> None:
            dataset.mark = self.current_epoch

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            train.append(batch[1].item() - self.current_epoch)
            return sum(parameter.sum() for parameter in self.parameters())

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            val.append(batch[1].item() - self.current_epoch)

    trainer = training.trainer(pl, strategy_for(HOSTS[0])(), num_sanity_val_steps=0, max_epochs=3)
    trainer.fit(Module(), DataLoader(dataset, num_workers=1), DataLoader(dataset, num_workers=1))
    assert train == val == [0] * 12
