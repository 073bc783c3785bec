"""Copies of rank 0's values at a start, over the real session; members are threads, and may be lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ef_common.collectives import operations
from ef_common.collectives.operations import FirstRankArrays
from ef_common.collectives.torch_operations import FirstRankValues
from ef_common.session import Session
from tests.collectives.cluster import Cluster, Died, ThreadGroup

Copy = Callable[[Session, float], list[float]]


def copy_arrays(session: Session, value: float) -> list[float]:
    first = FirstRankArrays([np.full((2, 3), value, np.float32), np.zeros((0, 3)), np.array(value)], session)
    session.run(first)
    return [float(number) for array in first.apply() for number in array.reshape(-1)]


def copy_tensors(session: Session, value: float) -> list[float]:
    tensors = [torch.full((2, 3), value).t(), torch.zeros(0, 3), torch.tensor(value, dtype=torch.bfloat16)]
    first = FirstRankValues(tensors, session)
    session.run(first)
    first.apply()
    return [float(number) for tensor in tensors for number in tensor.reshape(-1)]


@pytest.fixture(params=[copy_arrays, copy_tensors])
def copy(request: pytest.FixtureRequest) -> Copy:
    return request.param


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Everything that any member sums."""
    summed, all_reduce = [], ThreadGroup.all_reduce

    def spy(group: ThreadGroup, tensor: Any, call: str = "", meeting: Any = None) -> Any:
        summed.append(tensor)
        return all_reduce(group, tensor, call, meeting)

    monkeypatch.setattr(ThreadGroup, "all_reduce", spy)
    return summed


def test_values_that_differ_become_those_of_the_first_member(copy: Copy, sums: list[Any]) -> None:
    found = Cluster(3).run(lambda session, rank: copy(session, rank + 1.0))

    assert found == [[1.0] * 7] * 3
    assert sums


def test_nothing_is_sent_if_all_hold_the_same(copy: Copy, sums: list[Any]) -> None:
    found = Cluster(3).run(lambda session, rank: copy(session, 5.0))

    assert found == [[5.0] * 7] * 3
    assert sums == []


def test_difference_in_one_value_of_one_member_is_found(sums: list[Any]) -> None:
    def member(session: Session, rank: int) -> list[Any]:
        first = FirstRankArrays([np.array([1, 2, 3 if rank < 2 else 4])], session)
        session.run(first)
        return [array.tolist() for array in first.apply()]

    assert Cluster(3).run(member) == [[[1, 2, 3]]] * 3
    assert sums


def test_first_of_the_survivors_is_copied_if_the_first_member_is_lost(copy: Copy) -> None:
    def member(session: Session, rank: int) -> list[float]:
        if rank == 0:
            raise Died
        return copy(session, rank + 1.0)

    assert Cluster(3).run(member) == [None, [2.0] * 7, [2.0] * 7]


@pytest.mark.parametrize("equal", [True, False])
def test_member_that_misses_the_result_receives_it(copy: Copy, equal: bool) -> None:
    def member(session: Session, rank: int) -> list[float]:
        session.group.loses_next = rank == 1  # type: ignore[attr-defined]
        found = copy(session, 1.0 if equal else rank + 1.0)
        operations.gather(session, rank)
        return found

    assert Cluster(2).run(member) == [[1.0] * 7] * 2
