"""What the groups of all engines share: they break once and for good, and connect members with each other."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from ef_common.collectives.array_memory import Memory
from ef_common.collectives.library_sockets import shut_down
from ef_common.collectives.peer_connections import PeerConnections
from ef_common.core.calls import mismatch
from ef_common.core.view import View
from ef_common.errors import CallMismatch, GroupBroken

_COMMUNICATION_ERROR = re.compile(
    r"gloo/|shut ?down|connection|connect|timed out|timeout|socket|reset by peer|broken pipe|abort", re.IGNORECASE
)


_LINGER_S = 1.0
"""In a mismatch: the end of the member that finds it first must not keep the others from finding it."""


class LinkedGroup:
    """The part of a group that is the same for each engine.

    ::

        sound → broken     a call has found a broken connection, or members in different calls
        sound → aborted    `abort`: all connections end
        broken → aborted   likewise

    From then on, each call raises `GroupBroken`.

    Args:
        view: The members.
        peers: Connections to the other members.
        sockets: (descriptor, inode) of the engine's own connections.
        memory: Access to the memory of the engine's tensors.
    """

    def __init__(self, view: View, peers: PeerConnections, sockets: Sequence[tuple[int, int]], memory: Memory) -> None:
        self._view = view
        self._peers = peers
        self._sockets = list(sockets)
        self._memory = memory
        self._lock = threading.Lock()
        self._aborted = False
        self._broken = ""

    def _guard(self, act: Callable[[], Any]) -> Any:
        """Run something that communicates; its communication errors become `GroupBroken`, now and later."""
        if self._is_aborted() or self._broken:
            raise GroupBroken(self._broken or "aborted")
        try:
            return act()
        except GroupBroken as broken:
            self._broken = str(broken)
            raise
        except (RuntimeError, ValueError) as error:
            if self._is_aborted() or _COMMUNICATION_ERROR.search(str(error)):
                self._broken = (str(error).splitlines() or ["aborted"])[0][:200]
                raise GroupBroken(self._broken) from None
            raise

    def mismatch(self, calls: Sequence[str]) -> CallMismatch:
        """The error for members that are in these calls, in rank order. The group cannot be used afterwards."""
        self._broken = "members are in different calls"
        time.sleep(_LINGER_S)
        return CallMismatch(mismatch(calls, self._view.members))

    def _is_aborted(self) -> bool:
        return self._aborted  # another thread may have set it meanwhile

    def _cut(self) -> None:
        """End all connections once, under the lock: waiting calls here and in peers fail at once."""
        if not self._aborted:
            self._aborted = True
            self._peers.close()
            for descriptor, inode in self._sockets:
                shut_down(descriptor, inode)

    def send(self, tensors: Sequence[Any], target: int) -> None:
        """Send tensors to one rank."""
        parts = [memoryview(one) if isinstance(one, bytearray) else self._memory.read(one) for one in tensors]
        self._guard(lambda: self._peers.send(parts, target))

    def receive(self, tensors: Sequence[Any], source: int, target: int | None = None) -> None:
        """Receive tensors from one rank, in place, and pass them on to another one as they arrive."""
        with ExitStack() as stack:
            parts = [stack.enter_context(self._room(tensor)) for tensor in tensors]
            self._guard(lambda: self._peers.receive(parts, source, target))

    def _room(self, tensor: Any) -> AbstractContextManager[memoryview]:
        return memoryview(tensor) if isinstance(tensor, bytearray) else self._memory.room(tensor)


class Nothing:
    """The sum of a tensor without elements, or an unnecessary meeting."""

    def wait(self) -> None:
        """It is complete from the start."""

    def is_open(self) -> bool:
        """Nobody needs to be waited for."""
        return True
