"""The group of a view on Horovod, for torch tensors. Membership stays ours; Horovod moves the data.

Horovod knows one group per process, and only collectives of all its members. So it is shut down and started anew
for each view, and what goes from one member to another takes :class:`~ef_common.collectives.links.Links`.

When a member is gone, Horovod's thread learns of it only at the other end of its own connections, and would wait
for Gloo's timeout with three members or more. :meth:`HorovodGroup.abort` shuts down the sockets of the group: all
operations fail at once, in this process and in its peers.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from ef_common.collectives import torch_tensors
from ef_common.collectives.horovod_rendezvous import Rendezvous
from ef_common.collectives.links import Links
from ef_common.collectives.sockets import NewSockets, own_address, shut_down
from ef_common.collectives.torch_tensors import TorchTensors
from ef_common.core.view import View
from ef_common.errors import GroupBroken, UsageError
from ef_common.ports import Bootstrap, Group, Pending

logger = logging.getLogger(__name__)

_ABANDON_POLL_S = 0.02
_FIRST_LOOK_S, _LAST_LOOK_S = 0.00005, 0.001
# Horovod remembers how it has agreed on an operation by its name. A name may come again when its last use is over.
_NUM_NAMES = 64
_COMMUNICATION_ERROR = re.compile(
    r"gloo/|shut ?down|connection|connect|timed out|timeout|socket|reset by peer|broken pipe|abort", re.IGNORECASE
)
_AS = {
    torch.bfloat16: torch.float32,
    **dict.fromkeys((torch.bool, torch.uint8, torch.int8, torch.int16), torch.int32),
}
"""Types that Horovod does not sum, and those that hold their values."""


class HorovodPending:
    """A sum in flight."""

    def __init__(self, group: HorovodGroup, handle: int, summed: Tensor, target: Tensor) -> None:
        self._group = group
        self._handle: int | None = handle
        self._summed = summed
        self._target = target

    def wait(self) -> None:
        """Block until it is complete."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        self._group.finish(handle)
        if self._summed is not self._target:
            self._target.copy_(self._summed)


class HorovodGroup:
    """Horovod's group in one view; see :class:`~ef_common.ports.Group` for the contract."""

    def __init__(self, hvd: Any, links: Links, sockets: Sequence[tuple[int, int]]) -> None:
        self._hvd = hvd
        self._links = links
        self._sockets = list(sockets)
        self._lock = threading.Lock()
        self._aborted = False
        self._broken = ""
        self._count: Counter[str] = Counter()
        self._in_use: dict[str, int] = {}

    def _guard(self, act: Callable[[], Any]) -> Any:
        """Run something that communicates; its communication errors become `GroupBroken`, from then on."""
        if self._is_aborted() or self._broken:
            raise GroupBroken(self._broken or "aborted")
        try:
            return act()
        except GroupBroken as broken:
            self._broken = str(broken)
            raise
        except (RuntimeError, ValueError) as error:
            if self._is_aborted() or _COMMUNICATION_ERROR.search(str(error)):
                self._broken = str(error).splitlines()[0][:200]
                raise GroupBroken(self._broken) from None
            raise

    def _is_aborted(self) -> bool:
        return self._aborted  # another thread may have set it meanwhile

    def _name(self, kind: str) -> str:
        """The same for the same operation in each member, and not in use by an earlier one."""
        name = f"{kind}.{self._count[kind] % _NUM_NAMES}"
        self._count[kind] += 1
        if name in self._in_use:
            self._wait(self._in_use[name])
        return name

    def _start(self, kind: str, act: Callable[[str], int]) -> int:
        def start() -> int:
            name = self._name(kind)
            self._in_use[name] = act(name)
            return self._in_use[name]

        return int(self._guard(start))

    def finish(self, handle: int) -> Any:
        """Wait for an operation. Returns its output."""

        def end() -> Any:
            self._wait(handle)
            # Once it is synchronized, Horovod does not know the handle any more: nobody may wait for it again.
            self._in_use = {name: used for name, used in self._in_use.items() if used != handle}
            return self._hvd.synchronize(handle)

        return self._guard(end)

    def _wait(self, handle: int) -> None:
        pause = _FIRST_LOOK_S
        while not self._hvd.poll(handle):  # Horovod's own way of waiting keeps a core busy
            time.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK_S)

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Start to sum a tensor over the members, in place."""
        summed = tensor.detach()
        if tensor.dtype in _AS:
            summed = summed.to(_AS[tensor.dtype])
        kind = f"sum.{summed.dtype}.{summed.numel()}"
        handle = self._start(
            kind, lambda name: self._hvd.allreduce_async_(summed.view(-1), name=name, op=self._hvd.Sum)
        )
        return HorovodPending(self, handle, summed if tensor.dtype in _AS else tensor, tensor)

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Exchange payloads of different sizes."""
        framed = len(payload).to_bytes(8, "big") + payload
        mine = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        handle = self._start("gather", lambda name: self._hvd.allgather_async(mine, name=name))
        rest = self.finish(handle).numpy().tobytes()
        parts = []
        while rest:
            end = 8 + int.from_bytes(rest[:8], "big")
            parts.append(rest[8:end])
            rest = rest[end:]
        return parts

    def send(self, tensors: Sequence[Tensor], target: int) -> None:
        """Send tensors to one rank."""
        self._guard(lambda: torch_tensors.send(self._links, tensors, target))

    def receive(self, tensors: Sequence[Tensor], source: int) -> None:
        """Receive tensors from one rank, in place."""
        self._guard(lambda: torch_tensors.receive(self._links, tensors, source))

    def abort(self) -> None:
        """End Horovod in this process; see the port."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            self._links.close()
            for descriptor, inode in self._sockets:
                shut_down(descriptor, inode)
            self._hvd.shutdown()  # its thread has ended when this returns


class HorovodGroups(TorchTensors):
    """Starts Horovod in each view, on the interface that leads to the other members."""

    def __init__(self) -> None:
        self._hvd = _horovod()
        self._newest: HorovodGroup | None = None

    def build(self, view: View, *, rank: int, bootstrap: Bootstrap) -> Group:
        """Connect to the other members of the view; see the port for the contract."""
        if self._newest is not None:
            self._newest.abort()  # Horovod knows one group at a time
        address = own_address(view, rank)
        with Rendezvous(bootstrap) as rendezvous, NewSockets() as new:
            _set_environment(rank, view.world_size, address, rendezvous.port)
            outcome: list[Exception | None] = []
            thread = threading.Thread(target=self._init, args=(outcome,), daemon=True, name="ef-connect")
            thread.start()
            while not outcome:
                thread.join(_ABANDON_POLL_S)
                if not outcome and bootstrap.replaced():
                    new.look()
                    for descriptor, inode in new.connected(rendezvous.ports):
                        shut_down(descriptor, inode)
        if outcome[0] is not None:
            self._hvd.shutdown()
            raise GroupBroken(f"could not connect: {outcome[0]}")
        self._newest = HorovodGroup(self._hvd, Links(view, rank, bootstrap), new.connected(rendezvous.ports))
        return self._newest

    def _init(self, outcome: list[Exception | None]) -> None:
        try:
            self._hvd.init()
            outcome.append(None)
        except Exception as error:
            outcome.append(error)


def _horovod() -> Any:
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise UsageError(
            f"Horovod is not installed, or not for this torch. Build it: elasticflow horovod build. ({error})"
        ) from None
    return hvd


def _set_environment(rank: int, world_size: int, address: str, port: int) -> None:
    """What Horovod reads when it is started."""
    os.environ.setdefault("HOROVOD_LOG_LEVEL", "fatal")  # a lost member is no error
    os.environ.update(
        HOROVOD_RANK=str(rank),
        HOROVOD_SIZE=str(world_size),
        # Its groups of the workers of one node, and of those of the same place on their nodes, are not used.
        HOROVOD_LOCAL_RANK="0",
        HOROVOD_LOCAL_SIZE="1",
        HOROVOD_CROSS_RANK=str(rank),
        HOROVOD_CROSS_SIZE=str(world_size),
        HOROVOD_HOSTNAME=f"{address}-{rank}",
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
        HOROVOD_ELASTIC="0",
        HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1",
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(port),
        HOROVOD_GLOO_IFACE=os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0] or _interface(address),
    )


def _interface(address: str) -> str:
    """Name of the network interface that has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    raise GroupBroken(f"no network interface has the address {address}")
