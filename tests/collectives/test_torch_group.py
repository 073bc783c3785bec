"""The contract of the port `Group`, on real Gloo groups. What a SIGKILL does is in tests/faults."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ef_common.collectives.torch_group import TorchGroups
from ef_common.errors import GroupBroken
from ef_common.ports import Group
from tests.collectives.world import GUARD_S, Exchange, in_world, view_of


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_reduce_sums_bit_for_bit_equal(world_size: int) -> None:
    def act(rank: int, group: Group) -> torch.Tensor:
        tensor = torch.rand(10_001, generator=torch.Generator().manual_seed(rank))
        group.all_reduce(tensor).wait()
        return tensor

    results = in_world(world_size, act)
    expected = sum(torch.rand(10_001, generator=torch.Generator().manual_seed(r)) for r in range(world_size))
    torch.testing.assert_close(results[0], expected)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8]
)
def test_all_reduce_takes_every_type_that_models_have(dtype: torch.dtype) -> None:
    def act(rank: int, group: Group) -> list[int]:
        tensor = torch.full((3,), rank + 1).to(dtype)
        group.all_reduce(tensor).wait()
        return [int(value) for value in tensor]

    assert in_world(2, act) == [[3, 3, 3]] * 2


def test_all_reduce_several_in_flight_complete_in_any_order_of_waiting() -> None:
    def act(rank: int, group: Group) -> list[float]:
        tensors = [torch.full((100,), float(i + rank)) for i in range(8)]
        pending = [group.all_reduce(tensor) for tensor in tensors]
        for work in reversed(pending):
            work.wait()
        return [float(tensor[0]) for tensor in tensors]

    assert in_world(2, act) == [[2.0 * i + 1 for i in range(8)]] * 2


@pytest.mark.parametrize("sizes", [(0, 0), (0, 5), (119, 120), (121, 3), (100_000, 1)])
def test_all_gather_payloads_of_different_sizes_arrive_in_rank_order(sizes: tuple[int, int]) -> None:
    payloads = [bytes([rank]) * size for rank, size in enumerate(sizes)]
    assert in_world(2, lambda rank, group: group.all_gather(payloads[rank])) == [payloads] * 2


def test_send_and_receive_carry_tensors_in_order() -> None:
    def act(rank: int, group: Group) -> list[torch.Tensor]:
        tensors = [torch.arange(6.0).view(2, 3), torch.tensor([7], dtype=torch.int64)]
        if rank == 0:
            group.send(tensors, 2)
            room = tensors
        else:
            room = [torch.zeros(2, 3), torch.zeros(1, dtype=torch.int64)]
        if rank == 2:
            group.receive(room, 0)
        group.all_gather(b"")
        return room

    results = in_world(3, act)
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[2], strict=True))
    assert not any(tensor.any() for tensor in results[1])


def test_abort_wakes_whoever_waits_here_and_in_peers() -> None:
    entered = threading.Barrier(3, timeout=GUARD_S)

    def act(rank: int, group: Group) -> str:
        if rank == 0:
            entered.wait()
            group.abort()  # without ever joining in
            return "aborted"
        pending = group.all_reduce(torch.ones(10))
        entered.wait()
        with pytest.raises(GroupBroken):
            pending.wait()
        with pytest.raises(GroupBroken):
            group.all_gather(b"x")
        return "woken"

    assert in_world(3, act) == ["aborted", "woken", "woken"]


def test_abort_from_another_thread_wakes_the_one_that_waits() -> None:
    def act(rank: int, group: Group) -> bool:
        if rank == 1:
            return done.wait(GUARD_S)
        pending = group.all_reduce(torch.ones(10))  # rank 1 never joins in
        threading.Timer(0.05, group.abort).start()
        with pytest.raises(GroupBroken):
            pending.wait()
        done.set()
        return True

    done = threading.Event()
    assert in_world(2, act) == [True, True]


def test_abort_twice_and_use_after_it_raise_nothing_else() -> None:
    def act(rank: int, group: Group) -> None:
        group.abort()
        group.abort()
        for use in (
            lambda: group.all_reduce(torch.ones(1)),
            lambda: group.all_gather(b""),
            lambda: group.send([torch.ones(1)], 1 - rank),
            lambda: group.receive([torch.ones(1)], 1 - rank),
        ):
            with pytest.raises(GroupBroken):
                use()

    in_world(2, act)


def test_misuse_is_not_taken_for_a_loss() -> None:
    def act(rank: int, group: Group) -> None:
        with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
            group.all_reduce(torch.ones(4, device="meta")).wait()
        group.all_reduce(torch.ones(4)).wait()  # the group is as good as before

    in_world(2, act)


def test_build_is_abandoned_when_the_view_is_replaced() -> None:
    exchange = Exchange()

    def build() -> None:
        TorchGroups().build(view_of(2), rank=0, bootstrap=exchange)  # the other member never comes

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(build)
        threading.Timer(0.1, exchange.replace).start()
        with pytest.raises(GroupBroken):
            future.result(GUARD_S)
