"""Collectives of `torch.distributed` on a default group whose peers are made up."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from ef_common.collectives.torch_default_group import DefaultGroup, install, remove
from ef_common.errors import UnsupportedError, UsageError

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning")]


class Others:
    """Rank 1 of three, which all have what it has, plus ten times their distance."""

    rank, size = 1, 3
    lost: Any = ()

    def gather(self, value: Any, call: str) -> dict[int, Any]:
        def of(rank: int) -> Any:
            return tree_map(lambda leaf: leaf + 10 * (rank - 1) if isinstance(leaf, Tensor) else leaf, value)

        return {rank: of(rank) for rank in range(3) if rank not in self.lost}

    def add(self, tensor: Tensor, call: str) -> Tensor:
        return torch.stack(list(self.gather(tensor, call).values())).sum(0)


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
    others.gather = lambda value, call: dict.fromkeys(range(3), value)  # type: ignore[method-assign]
    dist.all_gather_object(found, {"rank": 1})
    assert found == [{"rank": 1}] * 3


@pytest.mark.parametrize(("lost", "expected"), [((2,), [-9.0, 1.0, -9.0]), ((0,), [1.0, 1.0, 11.0])])
def test_place_of_a_lost_worker_has_the_first_ones_value(
    others: Others, lost: tuple[int, ...], expected: list[float]
) -> None:
    others.lost = lost
    parts = [torch.zeros(2) for _ in range(3)]
    dist.all_gather(parts, ones())
    assert torch.stack(parts)[:, 0].tolist() == expected
    outputs = torch.zeros(3)
    dist.all_to_all_single(outputs, torch.ones(3))
    assert outputs.tolist() == expected


def test_gather_needs_a_place_for_each_worker(others: Others) -> None:
    with pytest.raises(UsageError, match="2 for 3 workers"):
        dist.all_gather([torch.zeros(2) for _ in range(2)], ones())


def test_broadcast_of_another_rank_than_the_lost_one_is_that_rank_s(others: Others) -> None:
    others.lost = (0,)
    tensor = ones()
    dist.broadcast(tensor, src=1)
    assert tensor.tolist() == [1.0, 1.0]


def test_what_a_lost_rank_was_to_send_raises(others: Others) -> None:
    others.lost = (0,)
    tensor, output = ones(), ones()
    with pytest.raises(UnsupportedError, match=r"broadcast was to send are lost.*rank 0"):
        dist.broadcast(tensor, src=0)
    with pytest.raises(UnsupportedError, match=r"scatter was to send are lost.*rank 0"):
        dist.scatter(output, None, src=0)
    with pytest.raises(UnsupportedError, match="broadcast was to send are lost"):
        dist.broadcast_object_list([None], src=0)
    assert tensor.tolist() == output.tolist() == [1.0, 1.0]


class Objects(Others):
    """Rank 1 of three, one of which is lost in the n-th gather."""

    def __init__(self, lost_at: int) -> None:
        self.objects: list[Any] = ["a" * 50, ["b"] * 9, "c"]
        self.lost_at = lost_at
        self.num_gathers = 0

    def gather(self, value: Any, call: str) -> dict[int, Any]:
        self.num_gathers += 1
        contents = [torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8) for obj in self.objects]
        if value.dtype == torch.int64:
            found = [torch.tensor([len(content)]) for content in contents]
        else:
            found = [torch.nn.functional.pad(content, (0, len(value) - len(content))) for content in contents]
        assert torch.equal(found[1][: len(contents[1])], value[: len(contents[1])])  # the rest is not initialized
        return {rank: part for rank, part in enumerate(found) if rank != self.lost or self.num_gathers < self.lost_at}


@pytest.mark.parametrize("lost_at", [1, 2])
@pytest.mark.parametrize(("lost", "expected"), [(0, [1, 1, 2]), (2, [0, 1, 0])])
def test_objects_of_a_lost_worker_are_the_first_ones(lost_at: int, lost: int, expected: list[int]) -> None:
    others = Objects(lost_at)
    others.lost = lost
    group = install(others)
    assert group is not None
    found: list[Any] = [None] * 3
    gathered: list[Any] = [None] * 3
    try:
        dist.all_gather_object(found, others.objects[1])
        others.num_gathers = 0
        dist.gather_object(others.objects[1], gathered, dst=1)
    finally:
        remove(group)
    assert found == gathered == [others.objects[rank] for rank in expected]


def test_broadcast_and_scatter(others: Others) -> None:
    tensor = ones()
    dist.broadcast(tensor, src=2)
    assert tensor.tolist() == [11.0, 11.0]
    output = torch.zeros(2)
    dist.scatter(output, [ones(), 2 * ones(), 3 * ones()], src=1)
    assert output.tolist() == [2.0, 2.0]


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


def test_product_of_a_lone_worker_is_its_value(others: Others, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "gather", lambda value, call: dict.fromkeys(range(3), value))
    tensor = 2 * ones()
    dist.all_reduce(tensor, dist.ReduceOp.PRODUCT)
    assert tensor.tolist() == [2.0, 2.0]
