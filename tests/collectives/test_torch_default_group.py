"""Collectives of `torch.distributed` on a default group whose peers are made up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from ef_common.collectives.torch_default_group import DefaultGroup, install, remove
from ef_common.errors import UnsupportedError

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning")]


class Others:
    """Rank 1 of three, which all have what it has, plus ten times their distance."""

    rank, size, num_lost = 1, 3, 0

    def gather(self, value: Any, call: str) -> list[Any]:
        def of(rank: int) -> Any:
            return tree_map(lambda leaf: leaf + 10 * (rank - 1) if isinstance(leaf, Tensor) else leaf, value)

        return [of(rank) for rank in range(3)][: 3 - self.num_lost]

    def add(self, tensor: Tensor, call: str) -> Tensor:
        return torch.stack(self.gather(tensor, call)).sum(0)


@pytest.fixture
def others() -> Iterator[Others]:
    others = Others()
    group = install(others)
    assert isinstance(group, DefaultGroup)
    yield others
    remove(group)
    assert not dist.is_initialized()


def ones() -> Tensor:
    return torch.ones(2)


def test_rank_and_size_follow_the_peers(others: Others) -> None:
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (1, 3, "elasticflow")
    others.rank, others.size = 0, 2
    assert (dist.get_rank(), dist.get_world_size()) == (0, 2)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, 3.0),
        (dist.ReduceOp.AVG, 1.0),
        (dist.ReduceOp.MIN, -9.0),
        (dist.ReduceOp.MAX, 11.0),
        (dist.ReduceOp.PRODUCT, -99.0),
    ],
)
def test_all_reduce(others: Others, op: Any, expected: float) -> None:
    tensor = ones()
    dist.all_reduce(tensor, op=op)
    assert tensor.tolist() == [expected, expected]


def test_unknown_reduction_raises(others: Others) -> None:
    with pytest.raises(UnsupportedError, match="Expected SUM"):
        dist.all_reduce(torch.ones(2, dtype=torch.int64), op=dist.ReduceOp.BOR)


def test_asynchronous_collective_is_complete_at_once(others: Others) -> None:
    tensor = ones()
    work: Any = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert work.is_completed()
    assert tensor.tolist() == [3.0, 3.0]


def test_gathers(others: Others) -> None:
    parts = [torch.zeros(2) for _ in range(3)]
    dist.all_gather(parts, ones())
    assert torch.stack(parts)[:, 0].tolist() == [-9.0, 1.0, 11.0]
    whole = torch.zeros(6)
    dist.all_gather_into_tensor(whole, ones())
    assert whole[::2].tolist() == [-9.0, 1.0, 11.0]
    dist.gather(ones(), parts, dst=1)
    assert torch.stack(parts)[:, 0].tolist() == [-9.0, 1.0, 11.0]
    found: list[Any] = [None] * 3
    others.gather = lambda value, call: [value] * 3  # type: ignore[method-assign]
    dist.all_gather_object(found, {"rank": 1})
    assert found == [{"rank": 1}] * 3


def test_places_of_lost_workers_have_the_first_ones_value(others: Others) -> None:
    others.num_lost = 1
    parts = [torch.zeros(2) for _ in range(3)]
    dist.all_gather(parts, ones())
    assert torch.stack(parts)[:, 0].tolist() == [-9.0, 1.0, -9.0]


def test_broadcast_and_scatter(others: Others) -> None:
    tensor = ones()
    dist.broadcast(tensor, src=2)
    assert tensor.tolist() == [11.0, 11.0]
    output = torch.zeros(2)
    dist.scatter(output, [ones(), 2 * ones(), 3 * ones()], src=1)
    assert output.tolist() == [-8.0, -8.0]  # the first one that has any


def test_parts_of_each_rank(others: Others) -> None:
    output = torch.zeros(2)
    dist.reduce_scatter(output, [ones(), 2 * ones(), 3 * ones()])
    assert output.tolist() == [6.0, 6.0]
    dist.reduce_scatter_tensor(output, torch.arange(6.0))
    assert output.tolist() == [6.0, 9.0]
    outputs = torch.zeros(3)
    dist.all_to_all_single(outputs, torch.arange(3.0))
    assert outputs.tolist() == [-9.0, 1.0, 11.0]
    tensor = ones()
    dist.reduce(tensor, dst=0)
    assert tensor.tolist() == [1.0, 1.0]
    dist.reduce(tensor, dst=1)
    assert tensor.tolist() == [3.0, 3.0]
    dist.barrier()


def test_what_needs_a_fixed_world_raises(others: Others) -> None:
    with pytest.raises(UnsupportedError, match="Use a collective"):
        dist.send(ones(), dst=0)
    with pytest.raises(UnsupportedError, match="a group of 2"):
        dist.new_group([0, 1])


def test_group_of_all_is_another_of_the_same_peers(others: Others) -> None:
    group: Any = dist.new_group([0, 1, 2])
    tensor = ones()
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [3.0, 3.0]


def test_default_group_of_somebody_else_is_left_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        assert install(Others()) is None
    finally:
        dist.destroy_process_group()
