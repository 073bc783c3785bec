"""The process group of a view on `torch.distributed`'s Gloo, without the global default group.

Several properties make it elastic:

* A group is built in milliseconds, its addresses travel through the coordinator (`bootstrap_store`), and building it
  can be abandoned when a newer view is known.
* Gloo cannot interrupt an operation in flight, but the operation fails at once when its sockets do.
  :meth:`TorchGroup.abort` shuts down the sockets of this group, so every blocked thread wakes up, in this process and
  in its peers. It never shuts down the listener, because Gloo ends the process if `accept` fails.
* There is one exception: Gloo forgets a message that is half sent or half received when its connection ends, and a
  thread that waits for it would wait forever. Such a *lost* operation is detected after the abort, and given up. Gloo
  keeps the tensors that it was given, so it gets others over the same memory, which are emptied then.
* Members that meet in different collectives would end the process in Gloo, or use each other's numbers. Small messages
  therefore name their call (`torch_exchange`), and large ones begin only when all members are known to be in one call
  (`torch_queue`).
* Only communication errors become `GroupBroken`; every other error reaches the user.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ef_common import threads
from ef_common.collectives.bootstrap_store import BootstrapStore, abandonable
from ef_common.collectives.library_sockets import Address, NewSockets, address_of, any_ended, keep_out, own_address
from ef_common.collectives.linked_group import LinkedGroup, Nothing
from ef_common.collectives.peer_connections import PeerConnections
from ef_common.collectives.torch_exchange import Exchange, Exchanges, add_up, sum_of
from ef_common.collectives.torch_nccl import UNKNOWN_TYPES, NcclRecord, NcclSums
from ef_common.collectives.torch_queue import Queue
from ef_common.collectives.torch_tensors import TorchMemory, bytes_of, tensor_of
from ef_common.core.view import View
from ef_common.errors import GroupBroken, ProtocolError
from ef_common.session.ports import Bootstrap, Group, Meeting, Pending
from ef_common.tls import Tls

logger = logging.getLogger(__name__)

# A slow peer (a long validation, a large checkpoint) is no failure; a dead one is noticed by the coordinator. What Gloo
# has lost keeps its threads and its files for so long.
OPERATION_TIMEOUT = timedelta(hours=1)
# Gloo begins to connect when all members have come, so each of them is about to do its part. It tries five times: a
# group that is given up while Gloo waits for a member that has died keeps its threads and its files for so long.
CONNECT_TIMEOUT = timedelta(seconds=30)
_FIRST_LOOK_S, _LAST_LOOK_S = 0.02, 0.16  # each costs a third of a millisecond of a core that may be needed
_SETTLE_POLL = timedelta(milliseconds=2)
_IDLE_LOOKS = 3
_SETTLE_S = 2.0
_WIDER = {torch.int16: torch.int32}  # neither Gloo nor NCCL sums the first
_GLOO_THREADS = ("pt_gloo_runloop", "gloo_tcp_loop")


class TorchPending:
    """A collective in flight."""

    def __init__(self, work: Any, group: TorchGroup) -> None:
        self._work = work
        self._group = group  # the group must outlive its operations

    def wait(self) -> None:
        """Block until it is complete."""
        self._group.finish(self._work)

    def is_over(self) -> bool:
        """Whether the collective is complete or has failed; never waits."""
        return bool(self._work.is_completed())


class WaitSequence:
    """What is waited for and done one after the other, each once."""

    def __init__(self, *acts: Callable[[], object]) -> None:
        self._acts = deque(acts)

    def wait(self) -> None:
        """Block until all is complete."""
        while self._acts:
            self._acts[0]()
            self._acts.popleft()


class TorchGroup(LinkedGroup):
    """Gloo group of one view; see :class:`~ef_common.session.ports.Group` for the contract.

    Args:
        process_group: Gloo's.
        view: The members.
        rank: Rank of this one.
        sockets: (descriptor, inode) of its connections.
        peers: Connections to the other members.
        sums: Sums of tensors on GPUs, unless Gloo sums them.
    """

    def __init__(
        self,
        process_group: Any,
        view: View,
        rank: int,
        sockets: Sequence[tuple[int, int]],
        peers: PeerConnections,
        sums: NcclSums | None = None,
    ) -> None:
        super().__init__(view, peers, sockets, TorchMemory())
        self._sums = sums
        self._process_group = process_group
        self._exchanges = Exchanges(view.world_size, rank)
        self._queue = Queue()
        self._lost = False
        self._flying: dict[Any, Sequence[Tensor]] = {}

    def start(self, act: Callable[..., Any], *tensors: Tensor) -> TorchPending:
        """Begin an operation: `act(process_group, *tensors)`, with other tensors over the memory of these."""
        held = [self._process_group]  # before the guard looks: `abort` takes it away
        given = [_over_memory_of(tensor) for tensor in tensors]
        work = self._guard(lambda: act(held[0], *given))
        with self._lock:
            if self._process_group is held[0]:
                self._flying[work] = given
            else:  # aborted before this began, so it is lost, and whoever lets go of the group last waits for it
                _close_in_thread([held.pop(), {work: given}], daemon=True)
        return TorchPending(work, self)

    def finish(self, work: Any) -> None:
        """Wait for an operation."""
        self._guard(partial(self._wait, work))
        self._flying.pop(work, None)

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

    def _is_direct(self, tensor: Tensor) -> bool:
        return tensor.nbytes <= self._exchanges.most_bytes and tensor.device.type == "cpu"

    def meet(self, call: str, tensors: Sequence[Any] | None = None) -> Meeting:
        """Start to compare the calls of the members; see the port."""
        if tensors is None:
            return self._meet(call)
        summed = [tensor_of(tensor) for tensor in tensors]
        return Nothing() if all(map(self._is_direct, summed)) else self._meet(sum_of(call, summed))

    def _meet(self, call: str) -> Exchange:
        self._queue.flush()
        return self._exchanges.begin(self, call)

    def all_reduce(self, tensor: Any, call: str = "", meeting: Meeting | None = None) -> Pending:
        """Start to sum a tensor, or an array, over the members, in place."""
        summed = tensor_of(tensor)
        if not summed.numel():
            return Nothing()
        if self._is_direct(summed):
            flat, what = bytes_of(summed).numpy(), sum_of(call, [summed])
            take = partial(add_up, summed, self._exchanges.rank)
            return self._queue.begin(Nothing(), lambda: self._exchanges.begin(self, what, flat, take=take))
        if summed.dtype in _WIDER:
            wide = summed.to(_WIDER[summed.dtype])
            pending = self.all_reduce(wide, call, meeting)
            return WaitSequence(pending.wait, lambda: summed.copy_(wide))
        if summed.is_cuda and summed.dtype in UNKNOWN_TYPES:  # which can only be summed on the host
            copy = summed.cpu()
            pending = self.all_reduce(copy, call, meeting)
            return WaitSequence(pending.wait, lambda: summed.copy_(copy))
        met = meeting if isinstance(meeting, Exchange) else self._meet(sum_of(call, [summed]))
        if summed.is_cuda:
            return self._all_reduce_on_device(summed, met)
        return self._queue.begin(met, lambda: self.start(_all_reduce, summed))

    def _all_reduce_on_device(self, tensor: Tensor, meeting: Exchange) -> Pending:
        if not tensor.is_contiguous():
            raise ValueError(f"expected a contiguous tensor. Received: shape={tuple(tensor.shape)}, {tensor.stride()=}")
        sums = self._sums
        if sums is not None and not sums.is_settled:
            meeting.wait()  # whoever is in another call does not connect with NCCL
        pending = None if sums is None else self._guard(partial(sums.start, tensor))
        if sums is None or pending is None:
            return self._queue.begin(meeting, lambda: self.start(_all_reduce, tensor))
        # The sum may have begun before all have met.
        return WaitSequence(meeting.wait, partial(self._guard, partial(sums.finish, pending)))

    def all_gather(self, payload: bytes, call: str = "") -> list[bytes]:
        """Exchange payloads: one round if all are small, otherwise a second one for those that are not."""
        self._queue.flush()
        is_small = 0 < len(payload) <= self._exchanges.most_bytes
        content = np.frombuffer(payload, np.uint8) if is_small else None
        found: list[tuple[int, bytes]] = []
        self._exchanges.begin(
            self,
            call or "a gather",
            content,
            length=len(payload),
            take=lambda room: found.extend(room.messages()),
        ).wait()
        found.insert(self._exchanges.rank, (len(payload), payload))
        lengths, parts = [length for length, _ in found], [part for _, part in found]
        return parts if max(lengths) <= self._exchanges.most_bytes else self._gather_large(payload, parts, lengths)

    def _gather_large(self, payload: bytes, parts: Sequence[bytes], lengths: Sequence[int]) -> list[bytes]:
        """Complete the parts. Gloo gathers what is equally long; padded, one of 8 MiB would take as much from each."""
        whole: list[Tensor] = [_room(0)] * len(parts)
        large = [rank for rank, length in enumerate(lengths) if length > self._exchanges.most_bytes]
        for rank in large:
            mine = rank == self._exchanges.rank
            whole[rank] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if mine else _room(lengths[rank])
        if len(set(lengths)) == 1:
            own, received = whole[self._exchanges.rank], [torch.empty_like(part) for part in whole]
            self.start(lambda group, own, *received: group.allgather([[*received]], [own]), own, *received).wait()
            whole = received
        else:
            for flight in [self.start(partial(_broadcast, rank), whole[rank]) for rank in large]:
                flight.wait()
        return [whole[rank].numpy().tobytes() if rank in large else part for rank, part in enumerate(parts)]

    def abort(self) -> None:
        """Shut down the group's sockets: waiting calls here and in peers fail at once.

        When this returns, no operation of the group touches its tensors any more.
        """
        with self._lock:
            self._cut()
            if self._sums is not None:
                self._sums.abort()
            if not self._lost:
                self._lost = not _settle(tuple(self._flying))  # meanwhile, other threads finish some of them
                self._let_go()

    def _let_go(self) -> None:
        """Release the process group in a thread, because that waits for its own threads and for lost operations.

        The interpreter waits for that thread at its end, unless an operation is lost: a thread that is ended in
        the middle of a C++ destructor takes the process with it.
        """
        gone, self._process_group = self._process_group, None
        if gone is not None:
            dropped = [gone, self._flying]
            self._flying = {}
            _close_in_thread(dropped, daemon=self._lost)


def _room(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def _over_memory_of(tensor: Tensor) -> Tensor:
    memory = tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    return tensor.new_empty(0).set_(*memory)


def _all_reduce(group: Any, tensor: Tensor) -> Any:
    return group.allreduce([tensor])


def _broadcast(root: int, group: Any, tensor: Tensor) -> Any:
    return group.broadcast(tensor, root)


def _settle(flying: Collection[Any]) -> bool:
    """Wait until every operation has ended, or some are lost; returns whether all have ended."""
    deadline = time.monotonic() + _SETTLE_S
    num_idle = 0
    while not all(_has_ended(work) for work in flying):
        num_idle = num_idle + 1 if _gloo_is_idle() else 0
        if num_idle >= _IDLE_LOOKS or time.monotonic() > deadline:
            return False
    return True


def _has_ended(work: Any) -> bool:
    """Whether an operation has ended; waits for it a little.

    Torch keeps something for ever of each thread that waits for an operation with success, so this does not wait for
    one that has ended already: a thread that closes a group is a new one each time.
    """
    if work.is_completed():
        return True
    try:
        work.wait(_SETTLE_POLL)
    except RuntimeError:
        return bool(work.is_completed())
    return True


def _gloo_is_idle() -> bool:
    """Whether no Gloo thread is running, so that nothing more comes of operations with closed sockets."""
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


def _close_in_thread(dropped: list[Any], *, daemon: bool) -> None:
    threads.start(partial(_wait_and_drop, dropped), name="ef-close-group", job="lets go of a group", daemon=daemon)


def _wait_and_drop(dropped: list[Any]) -> None:
    """Keep objects whose release would block until a lost operation times out, and release them here."""
    flying = dropped.pop()
    try:
        if not _settle(flying):
            for tensor in chain.from_iterable(flying.values()):
                tensor.set_()  # or their memory would be kept for as long, too
        for work in flying:
            try:
                if not work.is_completed():
                    work.wait()
            except RuntimeError as error:
                logger.debug("a lost operation has ended: %s", error)
    finally:  # the traceback of an exception would hold the group
        dropped.clear()


class TorchGroups:
    """Builds Gloo groups on the interface that :func:`~ef_common.collectives.library_sockets.own_address` chooses.

    Args:
        nccl: Whether NCCL sums what is on GPUs, if each member has one of its own.
        tls: The identity of this worker, if peer connections between nodes are encrypted.
    """

    def __init__(self, *, nccl: bool = False, tls: Tls | None = None) -> None:
        self._tls = tls
        self._record = NcclRecord() if nccl else None
        self._has_warned = False

    def build(self, view: View, *, rank: int, bootstrap: Bootstrap) -> Group:
        """Connect to the other members of the view; see the port for the contract."""
        with NewSockets() as new:
            device = dist.ProcessGroupGloo.create_device(hostname=own_address(view, rank))
        listener = new.listener()
        if listener is None:
            raise GroupBroken("Gloo listens nowhere")
        try:
            return abandonable(
                lambda: self._connect(view, rank, bootstrap, device=device, listener=listener),
                bootstrap.replaced,
                name=f"ef-connect-{view.generation}",
            )
        except RuntimeError as error:
            raise GroupBroken(f"could not connect: {str(error).splitlines()[0][:200]}") from None
        finally:  # all have connected, or nobody shall any more: Gloo may listen for minutes yet
            self._keep_out(listener)

    def _connect(
        self, view: View, rank: int, bootstrap: Bootstrap, *, device: Any, listener: tuple[int, int]
    ) -> TorchGroup:
        host, port = address_of(*listener)
        keys = [f"listener/{member}" for member in range(view.world_size)]
        bootstrap.put(keys[rank], f"{host} {port}".encode())
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._timeout = CONNECT_TIMEOUT
        options._threads = 2
        store = BootstrapStore(bootstrap, awaited=keys)
        with NewSockets() as new:
            process_group = dist.ProcessGroupGloo(store, rank, view.world_size, options)
        process_group._set_default_timeout(OPERATION_TIMEOUT)
        listeners = {_address_in(bootstrap.get(key), other) for other, key in enumerate(keys)}
        sockets = new.connected(listeners)
        sums = None
        if self._record is not None:
            sums = NcclSums(view, rank, bootstrap, record=self._record, is_cut=partial(any_ended, sockets))
        peers = PeerConnections(view, rank, bootstrap, tls=self._tls)
        return TorchGroup(process_group, view, rank, sockets, peers, sums)

    def _keep_out(self, listener: tuple[int, int]) -> None:
        try:
            keep_out(*listener)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "the kernel does not keep strangers from Gloo's ports, so each who connects costs this worker a "
                    "file descriptor until the next view: %s",
                    error,
                )


def _address_in(published: bytes, rank: int) -> Address:
    host, _, port = published.decode("ascii", "replace").rpartition(" ")
    try:
        return str(ipaddress.ip_address(host)), int(port)
    except ValueError:
        raise ProtocolError(f"rank {rank} has published no address. Received: {published[:50]!r}") from None
