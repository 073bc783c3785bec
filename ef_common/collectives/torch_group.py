"""The group of a view on `torch.distributed`'s Gloo, without the global default group.

Three things make it elastic:

* A group is built in milliseconds, its addresses travel over the coordinator (`bootstrap_store`), and
  building it can be abandoned when a newer view is known.
* Gloo cannot interrupt an operation in flight, but the operation fails at once when its sockets do.
  :meth:`TorchGroup.abort` shuts down the sockets of this group (never its listener: Gloo ends the process if
  `accept` fails), so every blocked thread wakes, in the process that aborts and in its peers.
* With one exception: Gloo forgets a message that is half sent or half received when its connection ends, and
  whoever waits for it would wait for ever. Such an operation is *lost*: it is found out after the abort, and
  given up.
* Only errors of communication become `GroupBroken`; every other error reaches the user.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ef_common.collectives.arrays import ByteArrays
from ef_common.collectives.bootstrap_store import BootstrapStore, abandonable
from ef_common.collectives.linked_group import LinkedGroup, Nothing
from ef_common.collectives.links import Links
from ef_common.collectives.sockets import NewSockets, any_ended, own_address
from ef_common.collectives.torch_nccl import UNKNOWN_TYPES, NcclRecord, NcclSums
from ef_common.collectives.torch_tensors import TorchMemory, tensor_of
from ef_common.core.view import View
from ef_common.errors import GroupBroken, ProtocolError
from ef_common.ports import Bootstrap, Group, Pending

logger = logging.getLogger(__name__)

# A slow peer (a long validation, a large checkpoint) is no failure; a dead one is noticed by the coordinator. What Gloo
# has lost keeps its threads, its files and its tensors for so long.
OPERATION_TIMEOUT = timedelta(hours=1)
_FIRST_LOOK_S, _LAST_LOOK_S = 0.02, 0.16  # each costs a third of a millisecond of a core that may be needed
_SETTLE_POLL = timedelta(milliseconds=2)
_IDLE_LOOKS = 3
_SETTLE_S = 2.0
_GLOO_THREADS = ("pt_gloo_runloop", "gloo_tcp_loop")
_FRAME_BYTES = 128
# So much is exchanged directly, in one round; Gloo's ring takes twice as many rounds as there are members.
_DIRECT_BYTES = 1 << 20


class TorchPending:
    """A collective in flight."""

    def __init__(self, work: Any, group: TorchGroup) -> None:
        self._work = work
        self._group = group  # the group must outlive its operations

    def wait(self) -> None:
        """Block until it is complete."""
        self._group.finish(self._work)


class DirectSum:
    """A sum in flight, of a tensor so small that everybody sends it to everybody."""

    def __init__(self, tensor: Tensor, received: Tensor, exchange: TorchPending) -> None:
        self._tensor = tensor
        self._received = received
        self._exchange: TorchPending | None = exchange

    def wait(self) -> None:
        """Block until everything is there, and add it up in rank order, so that all get the same."""
        if self._exchange is None:
            return
        self._exchange.wait()
        self._exchange = None
        first, second, *others = self._received.view(self._tensor.dtype).unbind()
        total = torch.add(first, second, out=self._tensor.view(-1))
        for other in others:
            total.add_(other)


class SumOnDevice:
    """A sum in flight, on a GPU."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish: Callable[[], Any] | None = finish

    def wait(self) -> None:
        """Block until it is complete."""
        if self._finish is not None:
            self._finish()
            self._finish = None


class SumOnHost:
    """A sum in flight, of a tensor on a GPU whose type can be summed on the host only."""

    def __init__(self, tensor: Tensor, group: TorchGroup) -> None:
        self._tensor = tensor
        self._copy = tensor.cpu()
        self._pending = group.all_reduce(self._copy)

    def wait(self) -> None:
        """Block until it is complete."""
        self._pending.wait()
        self._tensor.copy_(self._copy)


class TorchGroup(LinkedGroup):
    """Gloo group of one view; see :class:`~ef_common.ports.Group` for the contract.

    Args:
        process_group: Gloo's.
        world_size: Number of members.
        sockets: (descriptor, inode) of its connections.
        links: To the other members.
        sums: Of tensors on GPUs, if Gloo is not to sum them.
    """

    def __init__(
        self,
        process_group: Any,
        world_size: int,
        sockets: Sequence[tuple[int, int]],
        links: Links,
        sums: NcclSums | None = None,
    ) -> None:
        super().__init__(links, sockets, TorchMemory())
        self._sums = sums
        self._process_group = process_group
        self._world_size = world_size
        self._lost = False
        self._flying: set[Any] = set()

    def _start(self, act: Callable[[Any], Any]) -> TorchPending:
        held = [self._process_group]  # before the guard looks: `abort` takes it away
        work = self._guard(lambda: act(held[0]))
        with self._lock:
            if self._process_group is held[0]:
                self._flying.add(work)
            else:  # aborted before this began, so it is lost, and whoever lets go of the group last waits for it
                _close_in_thread([held.pop(), {work}], daemon=True)
        return TorchPending(work, self)

    def finish(self, work: Any) -> None:
        """Wait for an operation."""
        self._guard(partial(self._wait, work))
        self._flying.discard(work)

    def _wait(self, work: Any) -> None:
        look_again = _FIRST_LOOK_S
        while not self._lost:
            try:
                work.wait(timedelta(seconds=look_again))
            except RuntimeError:
                look_again = min(2 * look_again, _LAST_LOOK_S)
                if work.is_completed():
                    work.wait()  # it may have failed, or succeeded after all
                    return
                if self._is_aborted():  # it may have begun when the sockets were down already
                    self.abort()
            else:
                return
        raise GroupBroken("aborted, and lost by Gloo")

    def _is_direct(self, num_bytes: int) -> bool:
        return num_bytes * self._world_size <= _DIRECT_BYTES

    def _exchange(self, message: Tensor) -> tuple[Tensor, TorchPending]:
        """Start to send these bytes to everybody. Returns shape (world size, bytes), once it is complete."""
        shape = (self._world_size, message.numel())
        sent, received = message.expand(shape).contiguous(), torch.empty(shape, dtype=torch.uint8)
        return received, self._start(lambda group: group.alltoall_base(received, sent, [], []))

    def all_reduce(self, tensor: Any) -> Pending:
        """Start to sum a tensor, or an array, over the members, in place."""
        summed = tensor_of(tensor)
        if not summed.numel():
            return Nothing()
        if summed.is_cuda:
            return self._all_reduce_on_device(summed)
        if self._is_direct(summed.nbytes) and summed.device.type == "cpu":
            received, exchange = self._exchange(summed.view(-1).view(torch.uint8))
            return DirectSum(summed, received, exchange)
        return self._start(lambda group: group.allreduce([summed]))

    def _all_reduce_on_device(self, tensor: Tensor) -> Pending:
        if not tensor.is_contiguous():
            raise ValueError(f"expected a contiguous tensor. Received: shape={tuple(tensor.shape)}, {tensor.stride()=}")
        if tensor.dtype in UNKNOWN_TYPES:
            return SumOnHost(tensor, self)
        sums = self._sums
        pending = None if sums is None else self._guard(partial(sums.start, tensor))
        if sums is None or pending is None:
            return self._start(lambda group: group.allreduce([tensor]))
        return SumOnDevice(partial(self._guard, partial(sums.finish, pending)))

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Exchange payloads: one round if all are small, else a second one with the largest size."""
        frames = self._gather_frames(payload[: _FRAME_BYTES - 8], len(payload), _FRAME_BYTES)
        largest = max(length for length, _ in frames)
        if largest > _FRAME_BYTES - 8:
            frames = self._gather_frames(payload, len(payload), largest + 8)
        return [data for _, data in frames]

    def _gather_frames(self, payload: bytes, length: int, size: int) -> list[tuple[int, bytes]]:
        framed = length.to_bytes(8, "big") + payload
        mine = torch.frombuffer(bytearray(framed.ljust(size, b"\0")), dtype=torch.uint8)
        if self._is_direct(size):
            frames, exchange = self._exchange(mine)
        else:
            frames = torch.empty(self._world_size, size, dtype=torch.uint8)
            exchange = self._start(lambda group: group.allgather([list(frames.unbind())], [mine]))
        exchange.wait()
        result = []
        for frame in frames.numpy():
            raw = frame.tobytes()
            count = int.from_bytes(raw[:8], "big")
            result.append((count, raw[8 : 8 + count]))
        return result

    def abort(self) -> None:
        """Shut down the group's sockets: whoever waits, here or in a peer, gets an error at once.

        When this returns, no operation of the group touches its tensors any more.
        """
        with self._lock:
            self._cut()
            if self._sums is not None:
                self._sums.abort()
            if not self._lost:
                self._settle()
                self._bury()

    def _settle(self) -> None:
        """Wait until every operation has ended, or is lost."""
        flying = tuple(self._flying)
        deadline = time.monotonic() + _SETTLE_S
        num_idle = 0
        while not all(_has_ended(work) for work in flying):
            num_idle = num_idle + 1 if _gloo_is_idle() else 0
            if num_idle >= _IDLE_LOOKS or time.monotonic() > deadline:
                self._lost = True
                return

    def _bury(self) -> None:
        """Let go of the process group in a thread: it waits for threads of its own then, and for what is lost.

        The interpreter waits for that thread at its end, unless an operation is lost: a thread that is ended in
        the middle of a C++ destructor takes the process with it.
        """
        gone, self._process_group = self._process_group, None
        if gone is not None:
            grave = [gone, self._flying]
            self._flying = set()
            _close_in_thread(grave, daemon=self._lost)


def _has_ended(work: Any) -> bool:
    try:
        work.wait(_SETTLE_POLL)
    except RuntimeError:
        return bool(work.is_completed())
    return True


def _gloo_is_idle() -> bool:
    """Whether no thread of Gloo is running: nothing more comes of an operation whose sockets are down then."""
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
                _, _, rest = file.read().partition("(")
        except OSError:
            continue
        name, _, state = rest.rpartition(") ")
        if name in _GLOO_THREADS and state[:1] not in ("S", "I"):
            return False
    return True


def _close_in_thread(grave: list[Any], *, daemon: bool) -> None:
    threading.Thread(target=_wait_and_drop, args=(grave,), daemon=daemon, name="ef-bury").start()


def _wait_and_drop(grave: list[Any]) -> None:
    """Keep what would block until that is over (Gloo's timeout, for a lost operation); then let go of it here."""
    for work in grave.pop():
        try:
            work.wait()
        except RuntimeError as error:
            logger.debug("a lost operation has ended: %s", error)
    grave.clear()


class TorchGroups(ByteArrays):
    """Builds Gloo groups, on the interface that GLOO_SOCKET_IFNAME names or that leads to the other members.

    Args:
        nccl: Whether NCCL sums what is on GPUs, if each member has one of its own.
    """

    def __init__(self, *, nccl: bool = False) -> None:
        self._record = NcclRecord() if nccl else None

    def build(self, view: View, *, rank: int, bootstrap: Bootstrap) -> Group:
        """Connect to the other members of the view; see the port for the contract."""
        with NewSockets() as listeners:
            device = _device(view, rank)
        port = listeners.listening()
        try:
            return abandonable(
                lambda: _connect(view, rank, bootstrap, device, port, self._record),
                bootstrap.replaced,
                name=f"ef-connect-{view.generation}",
            )
        except RuntimeError as error:
            raise GroupBroken(f"could not connect: {str(error).splitlines()[0][:200]}") from None


def _device(view: View, rank: int) -> Any:
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface.split(",")[0])
    return dist.ProcessGroupGloo.create_device(hostname=own_address(view, rank))


def _port_in(published: bytes, rank: int) -> int:
    try:
        return int(published)
    except ValueError:
        raise ProtocolError(f"rank {rank} has published no port. Received: {published[:20]!r}") from None


def _connect(
    view: View, rank: int, bootstrap: Bootstrap, device: Any, port: int, record: NcclRecord | None
) -> TorchGroup:
    bootstrap.put(f"port/{rank}", str(port).encode())
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [device]
    options._timeout = OPERATION_TIMEOUT
    options._threads = 2
    with NewSockets() as new:
        process_group = dist.ProcessGroupGloo(BootstrapStore(bootstrap), rank, view.world_size, options)
    ports = {_port_in(bootstrap.get(f"port/{other}"), other) for other in range(view.world_size)}
    sockets = new.connected(ports)
    sums = None
    if record is not None:
        sums = NcclSums(view, rank, bootstrap, record=record, is_cut=partial(any_ended, sockets))
    return TorchGroup(process_group, view.world_size, sockets, Links(view, rank, bootstrap), sums)
