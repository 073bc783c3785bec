"""The process group of a view on Horovod, which moves data and does not decide on membership.

Horovod has one group per process, and only collectives of all its members. It is therefore restarted for each view, and
messages from one member to another use :class:`~ef_common.collectives.peer_connections.PeerConnections`.

When a member is gone, only the threads at the other ends of its connections notice it; with three members or more, the
rest would wait for Gloo's timeout. :meth:`HorovodGroup.abort` shuts down the sockets of the group, so all operations
fail at once, in this process and in its peers.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import psutil

from ef_common import threads
from ef_common.collectives.array_memory import Memory
from ef_common.collectives.library_sockets import NewSockets, own_address, shut_down
from ef_common.collectives.linked_group import LinkedGroup, Nothing
from ef_common.collectives.peer_connections import PeerConnections
from ef_common.core.calls import HEADER_BYTES, call_in, header, length_in
from ef_common.core.view import View
from ef_common.errors import GroupBroken, UsageError
from ef_common.horovod.rendezvous import Rendezvous, environment_of
from ef_common.session.ports import Bootstrap, Group, Meeting, Pending
from ef_common.tls import Tls

logger = logging.getLogger(__name__)

_ABANDON_POLL_S = 0.02
_LOOK_S = 0.1
# Horovod remembers how it has agreed on an operation by its name, so the first use of a name takes longer. It may
# come again when its last use is over: so many operations of one kind are in flight at most.
_NUM_NAMES = 16
_DEFAULTS = {
    "HOROVOD_LOG_LEVEL": "fatal",  # a lost member is no error
    "HOROVOD_CYCLE_TIME": "100",  # ms; who has nothing to do takes part so often (ours begins a cycle when it has)
    "HOROVOD_FUSION_THRESHOLD": str(1 << 20),  # bytes; to copy large buckets into one costs more than it saves
}
"""What a user may set otherwise."""


class HorovodFlight(Protocol):
    """A Horovod operation in flight."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for at most this time; returns whether the operation is over."""

    def result(self) -> bytes:
        """The gathered bytes; a sum is in its tensor. Call this once, when the operation is over.

        Raises:
            RuntimeError, ValueError: It failed.
        """


class HorovodBinding(Protocol):
    """Horovod as a process with a certain framework uses it."""

    @property
    def memory(self) -> Memory:
        """How to access the memory of its tensors."""

    def init(self) -> None:
        """Start Horovod with the settings in the environment.

        Raises:
            UsageError: The program has started it, so no other group can be built.
        """

    def shutdown(self) -> None:
        """Stop Horovod; nothing is in flight when this returns."""

    def all_reduce(self, name: str, tensor: Any) -> HorovodFlight:
        """Start to sum a tensor in place; it must not be empty."""

    def all_gather(self, name: str, payload: bytes) -> HorovodFlight:
        """Start to gather the bytes of all members in rank order; none may be empty."""


class HorovodPending:
    """A sum in flight."""

    def __init__(self, group: HorovodGroup, name: str, flight: HorovodFlight) -> None:
        self._group = group
        self._name = name
        self._flight: HorovodFlight | None = flight

    def wait(self) -> None:
        """Block until it is complete."""
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self._group.finish(self._name, flight)


class HorovodGroup(LinkedGroup):
    """Horovod's group in one view; see :class:`~ef_common.session.ports.Group` for the contract."""

    def __init__(
        self, horovod: HorovodBinding, view: View, *, peers: PeerConnections, sockets: Sequence[tuple[int, int]]
    ) -> None:
        super().__init__(view, peers, sockets, horovod.memory)
        self._horovod = horovod
        self._generation = view.generation
        self._ended = False
        self._count: Counter[str] = Counter()
        self._in_use: dict[str, HorovodFlight] = {}

    def _start(self, kind: str, act: Callable[[str], HorovodFlight]) -> tuple[str, HorovodFlight]:
        """Start an operation. Returns its name and the operation."""

        def start() -> tuple[str, HorovodFlight]:
            name = self._name(kind)
            self._in_use[name] = act(name)
            return name, self._in_use[name]

        started: tuple[str, HorovodFlight] = self._guard(start)
        return started

    def _name(self, kind: str) -> str:
        """A name that is the same for this operation in each member, and not used by an earlier one."""
        name = f"{self._generation}.{kind}.{self._count[kind] % _NUM_NAMES}"
        self._count[kind] += 1
        if name in self._in_use:
            self._wait(self._in_use[name])
        return name

    def finish(self, name: str, flight: HorovodFlight) -> bytes:
        """Wait for an operation. Returns its output."""

        def end() -> bytes:
            self._wait(flight)
            if self._in_use.get(name) is flight:
                del self._in_use[name]
            return flight.result()

        output: bytes = self._guard(end)
        return output

    def _wait(self, flight: HorovodFlight) -> None:
        while not flight.wait(_LOOK_S):
            if self._has_ended() and not flight.wait(0):
                raise GroupBroken("aborted")  # it began as Horovod ended, which has not seen it

    def _has_ended(self) -> bool:
        return self._ended  # another thread may have set it meanwhile

    def meet(self, call: str, tensors: Sequence[Any] | None = None) -> Meeting:
        """Nothing: sums of different calls cannot be distinguished here, only gathers."""
        return Nothing()

    def all_reduce(self, tensor: Any, call: str = "", meeting: Meeting | None = None) -> Pending:
        """Start to sum a tensor over the members, in place."""
        if not tensor.nbytes:
            return Nothing()
        kind = f"sum.{tensor.dtype}.{tensor.nbytes}"
        return HorovodPending(self, *self._start(kind, lambda name: self._horovod.all_reduce(name, tensor)))

    def all_gather(self, payload: bytes, call: str = "") -> list[bytes]:
        """Exchange payloads of different sizes."""
        framed = header(call or "a gather", len(payload)) + payload
        rest = memoryview(self.finish(*self._start("gather", lambda name: self._horovod.all_gather(name, framed))))
        calls, parts = [], []
        while rest:
            frame = bytes(rest[:HEADER_BYTES])
            end = HEADER_BYTES + length_in(frame)
            calls.append(call_in(frame))
            parts.append(bytes(rest[HEADER_BYTES:end]))
            rest = rest[end:]
        if len(set(calls)) > 1:
            raise self.mismatch(calls)
        return parts

    def abort(self) -> None:
        """End Horovod in this process; see the port."""
        with self._lock:
            if not self._aborted:
                self._cut()
                self._horovod.shutdown()
                self._ended = True


class HorovodGroups:
    """Starts Horovod in each view, on the interface that leads to the other members.

    Args:
        horovod: The framework's Horovod.
        tls: The identity of this worker, if peer connections between nodes are encrypted.
    """

    def __init__(self, horovod: HorovodBinding, *, tls: Tls | None = None) -> None:
        self._horovod = horovod
        self._tls = tls
        self._newest: HorovodGroup | None = None

    def build(self, view: View, *, rank: int, bootstrap: Bootstrap) -> Group:
        """Connect to the other members of the view; see the port for the contract."""
        self._end()  # Horovod knows one group at a time
        atexit.unregister(self._end)
        atexit.register(self._end)  # or its thread would wait for the others at the very end
        interface = _interface(own_address(view, rank))
        with Rendezvous(bootstrap) as rendezvous, NewSockets() as new:
            for name, value in _DEFAULTS.items():
                os.environ.setdefault(name, value)
            os.environ.update(environment_of(rank, view.world_size, rendezvous, interface=interface))
            outcome: list[BaseException | None] = []
            thread = threads.start(partial(self._init, outcome), name="ef-connect", job="connects Horovod")
            while not outcome:
                thread.join(_ABANDON_POLL_S)
                if not outcome and bootstrap.replaced():
                    new.look()
                    for descriptor, inode in (
                        *new.connected(rendezvous.listeners),
                        *new.listening(rendezvous.listeners),
                    ):
                        shut_down(descriptor, inode)
        if isinstance(outcome[0], UsageError):
            raise outcome[0]
        if outcome[0] is not None:
            self._horovod.shutdown()
            raise GroupBroken(f"could not connect: {outcome[0]}")
        peers = PeerConnections(view, rank, bootstrap, tls=self._tls)
        self._newest = HorovodGroup(self._horovod, view, peers=peers, sockets=new.connected(rendezvous.listeners))
        return self._newest

    def _init(self, outcome: list[BaseException | None]) -> None:
        try:
            self._horovod.init()
            outcome.append(None)
        except BaseException as error:  # whatever it is, somebody waits for the outcome
            outcome.append(error)

    def _end(self) -> None:
        if self._newest is not None:
            self._newest.abort()
            self._newest = None


def _interface(address: str) -> str:
    """Name of the network interface with this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    raise GroupBroken(f"no network interface has the address {address}")
