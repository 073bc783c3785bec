"""All workers learn which shard their lists differ in first."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from ef_common.collectives import operations
from ef_common.core.view import Member, View
from ef_common.data.shard_list import agree_on_shards
from ef_common.errors import UsageError


class Workers:
    """Workers in threads, which gather values together."""

    def __init__(self, num_workers: int) -> None:
        self._barrier = threading.Barrier(num_workers)
        self._values: list[Any] = [None] * num_workers
        self._view = View(1, tuple(Member(str(rank), f"node{rank}", "") for rank in range(num_workers)))

    def gather(self, session: Any, value: Any, *, what: str) -> tuple[list[Any], View]:
        self._values[session.rank] = value
        self._barrier.wait(10)
        found = list(self._values)
        self._barrier.wait(10)
        return found, self._view


def agree(lists: list[list[Any]], monkeypatch: pytest.MonkeyPatch) -> list[str | UsageError]:
    """What each worker returns or raises."""
    monkeypatch.setattr(operations, "gather", Workers(len(lists)).gather)

    def one(rank: int) -> str | UsageError:
        session: Any = SimpleNamespace(rank=rank)
        try:
            return agree_on_shards(session, lists[rank])
        except UsageError as error:
            return error

    with ThreadPoolExecutor(len(lists)) as pool:
        return list(pool.map(one, range(len(lists))))


def test_lists_that_are_the_same_have_one_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = agree([["a", "b"], ["a", "b"]], monkeypatch)

    assert isinstance(first, str)
    assert first == second


@pytest.mark.parametrize("place", [0, 1, 63, 64, 65, 4999, 9999])
def test_first_shard_that_differs_is_named_in_all_workers(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = [list(range(10_000)) for _ in range(3)]
    lists[2][place:] = [-1] * (10_000 - place)

    for error in agree(lists, monkeypatch):
        assert f"shard {place} is {place} and -1" in str(error)
        assert "rank 0 (node node0) and rank 2 (node node2)" in str(error)


def test_list_that_is_shorter_lacks_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in agree([list(range(500)), list(range(300))], monkeypatch):
        assert "shard 300 is 300 and no such shard" in str(error)
