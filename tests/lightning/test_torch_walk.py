"""A loader over a stream is walked in the same way in every worker, whatever else the worker does."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ef_common.data import torch_walk
from ef_common.data.torch_walk import WalkedLoader, checksums_of, num_samples
from ef_common.errors import DataWorkersLost
from tests.lightning import walked
from tests.waiting import poll_until

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class Drawing(IterableDataset[Any]):
    """Random numbers of all global generators."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(3):
            yield [float(torch.rand(())), float(np.random.rand()), random.random()]


def drawn(loader: WalkedLoader, number: int) -> list[Any]:
    found = []
    for batch in loader.batches(number):
        found.append([float(value) for value in batch])
        torch.rand(7), np.random.rand(7), random.random()  # the program draws, too
    return found


@pytest.mark.parametrize("num_workers", [0, 1])
def test_random_numbers_of_a_stream_are_those_of_seed_and_pass(num_workers: int) -> None:
    one, other = (WalkedLoader(DataLoader(Drawing(), None, num_workers=num_workers)) for _ in range(2))
    torch.manual_seed(1)
    first = [drawn(one, number) for number in (0, 1, 0)]
    torch.manual_seed(2)
    assert [drawn(other, number) for number in (0, 1)] == first[:2]
    assert first[0] == first[2] != first[1]
    one.seed = 5
    assert drawn(one, 0) != first[0]


def test_random_numbers_of_the_program_do_not_notice_the_stream() -> None:
    def numbers(loader: WalkedLoader | None) -> list[Any]:
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        found = []
        for _ in range(3) if loader is None else loader.batches(0):
            found.append((float(torch.rand(())), np.random.rand(), random.random()))
        return found

    assert numbers(WalkedLoader(DataLoader(Drawing(), None))) == numbers(None)


def test_data_workers_are_seeded_as_if_each_worker_had_rank_0() -> None:
    loader = WalkedLoader(DataLoader(Drawing(), None, num_workers=1))
    loader.worker_init_fn = partial(print, rank=3)
    assert loader.worker_init_fn.keywords == {"rank": 0}
    loader.worker_init_fn = print
    assert loader.worker_init_fn is print


class Told(IterableDataset[Any]):
    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        yield self.epoch


def test_stream_is_told_the_number_of_the_pass_unless_it_is_evaluated() -> None:
    assert list(WalkedLoader(DataLoader(Told(), None)).batches(4)) == [4]
    assert list(WalkedLoader(DataLoader(Told(), None), follows_epochs=False).batches(4)) == [-1]


def test_passes_are_independent_where_nothing_of_this_process_is_left_to_them() -> None:
    assert not WalkedLoader(DataLoader(Drawing(), None)).is_independent
    assert WalkedLoader(DataLoader(Drawing(), None, num_workers=1, persistent_workers=True)).is_independent
    assert WalkedLoader(DataLoader(Told(), None)).is_independent


class Dying(walked.Numbers):
    """Its process kills itself at the eighth sample, the first time or each time."""

    def __init__(self, path: Path, *, again: bool) -> None:
        super().__init__(12)
        self.path, self.again = path, again

    def numbers(self) -> Iterator[int]:
        for number in super().numbers():
            if number == 7 and (self.again or not self.path.exists()):
                self.path.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield number


def test_data_worker_that_dies_costs_a_second_walk_and_nothing_else(tmp_path: Path) -> None:
    loader = WalkedLoader(DataLoader(Dying(tmp_path / "dead", again=False), 2, num_workers=1))
    assert [n for batch in loader.batches(0) for n in batch[0].tolist()] == list(range(12))


def test_data_worker_that_dies_again_and_again_raises_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_walk, "_MAX_RESTARTS", 1)
    loader = WalkedLoader(DataLoader(Dying(tmp_path / "dead", again=True), 2, num_workers=1))
    with pytest.raises(DataWorkersLost, match="died 2 times in a row"):
        list(loader.batches(0))


class Uneven(IterableDataset[int]):
    """The first data worker has less to read. The other one ends badly, once the first one has ended."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        yield info.id
        if info.id == 1:
            yield from range(2, 6)
            self.end()
            yield 6


def fail(error: type[Exception]) -> None:
    raise error("file 17 is corrupt")


@pytest.mark.parametrize("error", [RuntimeError, ConnectionError, EOFError, FileNotFoundError])
def test_exception_of_a_data_worker_is_raised_at_once_after_another_one_has_ended(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    batches = WalkedLoader(DataLoader(Uneven(partial(fail, error)), None, num_workers=2)).batches(0)
    found = [next(batches) for _ in range(6)]
    workers = batches.gi_frame.f_locals["iterator"]._workers
    poll_until(lambda: not workers[0].is_alive())
    with pytest.raises(error, match="file 17 is corrupt"):
        next(batches)
    assert found == list(range(6))
    assert not caplog.records


def leave_once(path: Path) -> None:
    if not path.exists():
        path.touch()
        os._exit(0)


class Prefetching:
    """An iterator of the user's around one of torch's that is kept."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.iterator)


class Keeping(DataLoader[Any]):
    """Reads with a loader of its own, whose data workers live from pass to pass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reader = DataLoader(*args, **kwargs)

    def __iter__(self) -> Any:
        return Prefetching(iter(self.reader))


def test_data_workers_that_the_user_keeps_live_from_walk_to_walk() -> None:
    loader = WalkedLoader(Keeping(walked.Numbers(6), 2, num_workers=1, persistent_workers=True))
    for number in range(2):
        assert [n for batch in loader.batches(number) for n in batch[0].tolist()] == list(range(6))


def test_data_worker_that_leaves_with_status_0_counts_as_lost(tmp_path: Path) -> None:
    loader = WalkedLoader(DataLoader(Uneven(partial(leave_once, tmp_path / "left")), None, num_workers=2))
    assert list(loader.batches(0)) == list(range(7))
    assert (tmp_path / "left").exists()


def test_exception_of_the_stream_is_raised_as_it_was() -> None:
    class Bad(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            raise RuntimeError("a bad stream")

    with pytest.raises(RuntimeError, match="a bad stream"):
        list(WalkedLoader(DataLoader(Bad(), 2)).batches(0))


def test_checksum_of_one_element_is_that_of_its_value_whatever_its_stride_is() -> None:
    assert checksums_of(torch.arange(6.0).reshape(3, 2)[1:2, 1]) == checksums_of(torch.tensor([3.0]))


def test_checksums_tell_batches_of_all_types_apart() -> None:
    batch = {
        "half": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "array": np.arange(3),
        "texts": ["one", "two"],
        "number": 1,
        "bytes": b"x",
        "unknown": object(),
        "sparse": torch.eye(2).to_sparse(),
    }
    changes: dict[str, Any] = {
        "half": torch.tensor([1.0, 3.0], dtype=torch.bfloat16),
        "scalar": torch.tensor(4),
        "array": np.arange(3)[::-1],
        "texts": ["one", "three"],
        "number": 2,
        "bytes": b"y",
    }
    assert checksums_of(batch) == checksums_of({**batch, "unknown": object()})
    assert checksums_of(batch)[-2:] == [None, None]
    for name, value in changes.items():
        assert checksums_of({**batch, name: value}) != checksums_of(batch), name


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(5, 2), 5),
        ([torch.zeros(5, 2), torch.zeros(5)], 5),
        ({"text": ["a", "b", "c"], "label": torch.zeros(3)}, 3),
        ({"scalar": torch.tensor(1), "rows": np.zeros((4, 1))}, 4),
        (torch.tensor(1), None),
        (object(), None),
    ],
)
def test_samples_of_a_batch(batch: Any, expected: int | None) -> None:
    assert num_samples(batch) == expected
