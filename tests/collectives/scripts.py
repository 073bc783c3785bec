"""Scripts of the members of a group; see `seats`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from typing import Any

import numpy as np
import psutil

from ef_common.errors import GroupBroken
from ef_common.launch.environment import read_environment
from ef_common.session.ports import Group
from tests.collectives.seats import SETTLED_S, RealSeat, Seat

BIG = 1 << 25  # elements: 128 MiB of float32, more than any socket buffers


def broken(act: Any) -> bool:
    """Whether it raises `GroupBroken`; any other error goes on."""
    try:
        act()
    except GroupBroken:
        return True
    return False


# ---------------------------------------------------------------- the contract


def reduce(seat: Seat) -> list[float]:
    group = seat.build()
    tensor = seat.tensor([0.1 * (seat.rank + 1), 1.0 / (seat.rank + 3), -7.0])
    group.all_reduce(tensor).wait()
    return seat.values(tensor)


def reduce_several_at_once(seat: Seat) -> list[list[float]]:
    group = seat.build()
    tensors = [seat.tensor([float(seat.rank + number)] * (number + 1)) for number in range(5)]
    pending = [group.all_reduce(tensor) for tensor in tensors]
    for one in reversed(pending):
        one.wait()
    return [seat.values(tensor) for tensor in tensors]


def reduce_again_and_again(seat: Seat) -> list[float]:
    group = seat.build()
    tensor = seat.tensor([1.0])
    for _ in range(150):
        group.all_reduce(tensor).wait()
        tensor = seat.tensor([value / seat.world_size + 1.0 for value in seat.values(tensor)])
    for _ in range(150):
        group.all_gather(b"x")
    return seat.values(tensor)


def gather_payloads_of_different_sizes(seat: Seat) -> list[list[int]]:
    group = seat.build()
    found = []
    for size in (0, 1, 119, 120, 121, 5000, 1 << 19):
        payload = bytes([seat.rank]) * (size * seat.rank)
        parts = group.all_gather(payload)
        assert all(part == bytes([rank]) * len(part) for rank, part in enumerate(parts))
        found.append([len(part) for part in parts])
    return found


def gather_payloads_with_another_default_device(seat: RealSeat) -> list[list[int]]:
    import torch

    with torch.device("meta"):
        return gather_payloads_of_different_sizes(seat)


def strangers_come(seat: Seat) -> list[float]:
    """How many descriptors of this process strangers at its listeners have cost, and a sum after that."""
    group, process = seat.build(), psutil.Process()
    group.all_gather(b"")  # or a stranger could come before all members have
    connections = process.net_connections if hasattr(process, "net_connections") else process.connections  # psutil < 6
    listeners = [one.laddr for one in connections("tcp") if one.status == psutil.CONN_LISTEN]
    before = process.num_fds()
    for address in listeners * 5:
        with socket.socket() as stranger:
            stranger.settimeout(0.2)
            stranger.connect_ex((address.ip, address.port))
    time.sleep(SETTLED_S)
    tensor = seat.tensor([1.0])
    group.all_reduce(tensor).wait()
    return [len(listeners), process.num_fds() - before, *seat.values(tensor)]


def send_around(seat: Seat) -> list[list[float]]:
    """Each rank sends two tensors and bytes to the next one, and the last one back to the first."""
    group = seat.build()
    mine = [seat.tensor([float(seat.rank)] * 3), seat.tensor([10.0 + seat.rank]), bytearray([seat.rank, 7])]
    room = [seat.tensor([0.0] * 3), seat.tensor([0.0]), bytearray(2)]
    following, previous = (seat.rank + 1) % seat.world_size, (seat.rank - 1) % seat.world_size
    if seat.rank == 0:
        group.send(mine, following)
    group.receive(room, previous)
    if seat.rank != 0:
        group.send(mine, following)
    group.all_gather(b"")
    return [*[seat.values(tensor) for tensor in room[:2]], [*map(float, room[2])]]


def pass_along(seat: Seat) -> list[list[float]]:
    """Rank 0 sends two tensors to rank 1, and each rank but the last passes on what it receives."""
    group = seat.build()
    tensors = [seat.tensor([0.0] * 3), seat.tensor([0.0])]
    last = seat.world_size - 1
    if seat.rank == 0:
        tensors = [seat.tensor([1.0, 2.0, 3.0]), seat.tensor([4.0])]
        group.send(tensors, 1)
    else:
        group.receive(tensors, seat.rank - 1, seat.rank + 1 if seat.rank < last else None)
    group.all_gather(b"")
    return [seat.values(tensor) for tensor in tensors]


def abort_wakes_who_waits(seat: Seat) -> list[bool]:
    """Rank 0 never joins in; the others give up by themselves."""
    group = seat.build()
    seat.meet("built")
    if seat.rank == 0:
        seat.sleep(2 * SETTLED_S)
        return []
    seat.later(SETTLED_S, group.abort)
    found = [broken(lambda: group.all_reduce(seat.tensor([1.0])).wait())]
    group.abort()  # may be repeated
    return [*found, *(use_raises(seat, group))]


def use_raises(seat: Seat, group: Group) -> list[bool]:
    """What is left of a broken group."""
    other = (seat.rank + 1) % seat.world_size
    return [
        broken(lambda: group.all_reduce(seat.tensor([1.0])).wait()),
        broken(lambda: group.all_gather(b"")),
        broken(lambda: group.send([seat.tensor([1.0])], other)),
        broken(lambda: group.receive([seat.tensor([1.0])], other)),
    ]


def abort_wakes_who_receives(seat: Seat) -> bool:
    group = seat.build()
    seat.meet("built")
    if seat.rank == 0:
        seat.sleep(2 * SETTLED_S)
        return True
    seat.later(SETTLED_S, group.abort)
    return broken(lambda: group.receive([seat.tensor([1.0])], 0))


def death_in_a_collective(seat: Seat) -> list[bool]:
    """The last rank dies; the others learn of it at last by the next view, which aborts."""
    group = seat.build()
    seat.meet("built")
    if seat.rank == seat.world_size - 1:
        seat.sleep(SETTLED_S)
        seat.die()
    seat.later(2 * SETTLED_S, group.abort)
    return [broken(lambda: group.all_reduce(seat.tensor([1.0])).wait()), *use_raises(seat, group)]


# ---------------------------------------------------------------- real processes


def abort_wakes_peers(seat: RealSeat) -> bool:
    group = seat.build()
    seat.meet("built")
    if seat.rank == 0:
        seat.sleep(0.3)
        group.abort()
        return True
    return broken(lambda: group.all_reduce(seat.tensor([1.0])).wait())


def reduce_every_type(seat: RealSeat) -> dict[str, list[float]]:
    """What models and data are made of; the ranks' numbers are summed, truths are or-ed."""
    group = seat.build()
    found = {}
    for tensor in tensors_of_all_types(seat, 3):
        group.all_reduce(tensor).wait()
        found[str(tensor.dtype)] = [float(value) for value in tensor.tolist()]
    return found


def reduce_many_of_every_type(seat: RealSeat) -> dict[str, list[float]]:
    """The different numbers in the sums of large tensors, which are not added up directly; begun together."""
    group = seat.build()
    tensors = tensors_of_all_types(seat, 1 << 20)
    meeting = group.meet("many", tensors)
    for pending in [group.all_reduce(tensor, "many", meeting) for tensor in tensors]:
        pending.wait()
    return {str(tensor.dtype): sorted({float(value) for value in tensor.tolist()}) for tensor in tensors}


def tensors_of_all_types(seat: RealSeat, size: int) -> list[Any]:
    names = ["float16", "float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool", "bfloat16"]
    if not seat.arrays:
        import torch

        return [torch.full((size,), seat.rank + 1).to(seat.device, getattr(torch, name)) for name in names]
    arrays = [np.full(size, seat.rank + 1, name) for name in names[:-1]]
    with contextlib.suppress(ImportError):  # it comes with TensorFlow, and nothing else makes such arrays
        import ml_dtypes

        arrays.append(np.full(size, seat.rank + 1, ml_dtypes.bfloat16))
    return arrays


def reduce_nothing_and_one_number(seat: RealSeat) -> list[float]:
    group = seat.build()
    empty, one = seat.of(np.empty((0, 3))), seat.of(np.array(1.5))
    pending = [group.all_reduce(tensor) for tensor in (empty, one)]
    for each in pending:
        each.wait()
    return [float(empty.sum()), float(one)]


def reduce_without_waiting(seat: RealSeat) -> bool:
    """Rank 0 comes when the others have begun several large sums; if these kept them, all would wait for ever."""
    group = seat.build()
    for is_late in (False, True):  # in the first sums, NCCL connects, and Gloo takes memory for what is on a GPU
        tensors = [seat.of(np.full(1 << 20, 1.0, np.float32)) for _ in range(5)]
        if seat.rank == 0 and is_late:
            seat.meet("begun")
        meeting = group.meet("several", tensors)
        pending = [group.all_reduce(tensor, "several", meeting) for tensor in tensors]
        if seat.rank != 0 and is_late:
            seat.tell("begun")
        for each in pending:
            each.wait()
    return all(bool((tensor == seat.world_size).all()) for tensor in tensors)


def frameworks(seat: RealSeat) -> list[str]:
    """Those that a worker of the engine has imported."""
    group = seat.build()
    group.all_reduce(seat.tensor([1.0])).wait()
    return [name for name in ("torch", "tensorflow", "keras", "horovod") if name in sys.modules]


def misuse_reaches_the_caller(seat: RealSeat) -> list[str]:
    group = seat.build()
    found = []
    for wrong in (
        lambda: group.all_reduce(of_no_memory(seat)).wait(),
        lambda: group.send([seat.tensor([1.0])], 17),
        lambda: group.all_reduce([1.0]).wait(),
        lambda: group.all_reduce(seat.of(np.ones((4, 4)))[:, ::2]).wait(),
        lambda: group.receive([seat.of(np.ones((4, 4)))[:, ::2]], (seat.rank + 1) % 2),
    ):
        try:
            wrong()
        except Exception as error:
            found.append(type(error).__name__)
    group.all_reduce(seat.tensor([1.0, 1.0])).wait()  # the group is as good as before
    return found


def of_no_memory(seat: RealSeat) -> Any:
    if seat.arrays:
        return np.array([object()])
    import torch

    return torch.ones(2, device="meta")


def killed_in_a_large_reduction(seat: RealSeat) -> list[Any]:
    """Messages are half sent and half received when rank 0 dies; then all go on in the next view."""
    group = seat.build()
    big = seat.of(np.ones(BIG, np.float32))

    def add() -> None:
        group.all_reduce(seat.tensor([1.0])).wait()
        if seat.rank == 0:  # whoever has not completed the first sum yet is in it
            seat.later(0.05, seat.die)
        for _ in range(100):
            group.all_reduce(big).wait()

    return [broken(add), *go_on(seat)]


def stopped_in_a_large_transfer(seat: RealSeat) -> list[Any]:
    """Rank 0 stops with half of a message on its way in either direction, and is killed then."""
    group = seat.build()
    seat.meet("built")
    if seat.rank == 0:
        seat.later(0.02, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        group.receive([seat.of(np.empty(BIG, np.float32))], 1)
        group.send([seat.of(np.empty(BIG, np.float32))], 1)
        time.sleep(60)
    first = broken(lambda: [transfer(group, seat) for _ in range(100)])
    return [first, *go_on(seat)]


def stopped_at_rest(seat: RealSeat) -> list[Any]:
    """Rank 0 stops between two operations, and the others wait for it in the next one."""
    group = seat.build()
    group.all_reduce(seat.tensor([1.0])).wait()
    if seat.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
    first = broken(lambda: group.all_reduce(seat.tensor([1.0])).wait())
    return [first, *go_on(seat)]


def transfer(group: Group, seat: RealSeat) -> None:
    if seat.rank == 1:
        group.send([seat.of(np.ones(BIG, np.float32))], 0)
    else:
        group.all_reduce(seat.tensor([1.0])).wait()  # waits for rank 0


def killed_while_a_group_is_built(seat: RealSeat) -> list[Any]:
    """Rank 0 dies before it has connected to anybody."""
    if seat.rank == 0:
        seat.sleep(0.3)
        seat.die()
    return [broken(seat.build), *go_on(seat)]


def addresses_of_connections(seat: RealSeat) -> list[str]:
    """This process's own ends of its connections to others, but for the one to the coordinator."""
    group = seat.build()
    group.all_reduce(seat.tensor([1.0])).wait()
    part = [seat.of(np.zeros(1 << 20, np.uint8))]
    if seat.rank == 0:
        group.send(part, 1)
    else:
        group.receive(part, 0)
    coordinator = read_environment().coordinator
    mine = [one for one in psutil.net_connections("tcp") if one.pid == os.getpid()]
    found = [one for one in mine if one.status == psutil.CONN_ESTABLISHED]
    own = {one.laddr for one in found}
    group.all_reduce(seat.tensor([1.0])).wait()
    return sorted({one.laddr.ip for one in found if one.raddr != coordinator and one.raddr not in own})


def killed_while_gpus_are_connected(seat: RealSeat) -> list[Any]:
    """Rank 0 dies when the others have begun to connect with NCCL."""
    group = seat.build()
    seat.meet("built")
    if seat.rank == 0:
        seat.later(0.3, seat.die)
    first = broken(lambda: [group.all_reduce(seat.tensor([1.0])).wait() for _ in range(100_000)])
    return [first, *go_on(seat)]


def failed_sum_leaves_its_tensor_alone(seat: RealSeat) -> list[Any]:
    """Rank 0 meets the others, and sums nothing. What they do with their tensors after the abort, nobody undoes."""
    import torch

    group = seat.build()
    group.all_reduce(seat.tensor([1.0])).wait()
    tensors = [seat.of(np.full(1 << 20, 5.0, np.float32)) for _ in range(3)]
    meeting = group.meet("several", tensors)
    meeting.wait()
    pending = [] if seat.rank == 0 else [group.all_reduce(tensor, "several", meeting) for tensor in tensors]
    seat.meet("begun")
    if seat.rank == 0:
        return [True, True]
    seat.sleep(SETTLED_S)
    group.abort()
    for tensor in tensors:
        tensor.fill_(7.0)
    found = all(broken(one.wait) for one in pending)
    seat.sleep(SETTLED_S)
    torch.cuda.synchronize()
    return [found, all(bool((tensor == 7.0).all()) for tensor in tensors)]


def sums_are_of(seat: RealSeat) -> bool:
    """Whether NCCL makes the sums of this worker's view."""
    group = seat.build()
    group.all_reduce(seat.tensor([1.0])).wait()
    return bool(group._sums._process_group)  # type: ignore[attr-defined]


def share_a_gpu(seat: RealSeat) -> list[Any]:
    """Whether NCCL makes the sums of members that NCCL sees on one host, and a sum."""
    del os.environ["NCCL_HOSTID"]
    is_nccl = sums_are_of(seat)
    tensor = seat.tensor([seat.rank + 1.0])
    seat.group.all_reduce(tensor).wait()  # type: ignore[union-attr]
    return [is_nccl, *seat.values(tensor)]


def go_on(seat: RealSeat) -> list[Any]:
    """Build the group of the next view and use it."""
    seat.next_view()
    group = seat.build()
    tensor = seat.of(np.full(1000, float(seat.rank)))
    group.all_reduce(tensor).wait()
    return [seat.world_size, sorted(set(tensor.tolist()))]
