"""A switch between network namespaces, which can lose, delay and slow down what it carries, with any kernel."""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import multiprocessing
import os
import random
import selectors
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.managers import BaseManager
from pathlib import Path

TUN = Path("/dev/net/tun")
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_MAX_FRAME_BYTES = 2048
_MAX_TURN = 64
"""So many frames of one node are carried before those of the next one."""
_MAX_QUEUED_S = 0.2
_LONG_S = 3600.0


@dataclass(frozen=True)
class Way:
    """What happens to frames on their way from one node to another.

    Attributes:
        loss: Probability that one is lost.
        delay_s: How much longer they take.
        bytes_per_s: How many get through; 0 for no limit.
    """

    loss: float = 0.0
    delay_s: float = 0.0
    bytes_per_s: float = 0.0


class Switch:
    """Carries frames between nodes. It can be told how at any time, from any thread.

    It is in a process of its own (:func:`in_a_process`): what a test computes would delay frames for seconds.
    """

    def __init__(self) -> None:
        self._ports: dict[int, int] = {}
        self._ways: dict[tuple[int, int], Way] = {}
        self._free_at: dict[tuple[int, int], float] = {}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()
        self._random = random.Random(0)
        self._stopped = threading.Event()
        self._parent = os.getppid()
        self._thread = threading.Thread(target=self._carry, name="switch")
        self._num_lost = 0

    def set_all(self, way: Way) -> None:
        """This is how frames go between any two nodes."""
        self._ways = {(one, other): way for one in self._ports for other in self._ports}

    def cut(self, *some: int, direction: str = "", spared: Sequence[int] = ()) -> None:
        """Cut these nodes off from all others but those spared: what goes "in" is lost, what comes "out", or both."""
        lost = Way(loss=1.0)
        pairs = [(one, other) for one in some for other in self._ports if other not in (*some, *spared)]
        ways = dict(self._ways)
        if direction != "in":
            ways.update(dict.fromkeys(pairs, lost))
        if direction != "out":
            ways.update({(other, one): lost for one, other in pairs})
        self._ways = ways

    def heal(self) -> None:
        """Nothing is lost or late any more."""
        self._ways = {}

    def num_lost(self) -> int:
        """How many frames it has lost."""
        return self._num_lost

    # ------------------------------------------------------------ life

    def plug(self, node: int, namespace: str) -> None:
        """Make the interface of a node."""
        port = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        self._ports[node] = port
        name = f"eft{os.getpid() % 10**6}n{node}"
        fcntl.ioctl(port, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
        become = ("address", f"02:00:00:00:00:{node:02x}", "netns", namespace, "name", "eth0")
        subprocess.run(["ip", "link", "set", name, *become], check=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End; the interfaces go with it."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()
        for port in self._ports.values():
            os.close(port)

    # ------------------------------------------------------------ in the thread

    def _carry(self) -> None:
        with selectors.DefaultSelector() as selector:
            for node, port in self._ports.items():
                selector.register(port, selectors.EVENT_READ, node)
            while not self._stopped.is_set():
                if os.getppid() != self._parent:  # the tests were killed
                    os._exit(1)
                wait_s = self._late[0][0] - time.monotonic() if self._late else _LONG_S
                for key, _ in selector.select(min(max(wait_s, 0.0), 0.1)):
                    self._take(key.data, key.fd)
                while self._late and self._late[0][0] <= time.monotonic():
                    _, _, node, frame = heapq.heappop(self._late)
                    self._hand(node, frame)

    def _take(self, source: int, port: int) -> None:
        with contextlib.suppress(OSError):  # no more frames, or the interface is down
            for _ in range(_MAX_TURN):
                frame = os.read(port, _MAX_FRAME_BYTES)
                everybody = frame[0] & 1
                for target in self._ports:
                    if target != source and (everybody or frame[5] == target):
                        self._send(source, target, frame)

    def _send(self, source: int, target: int, frame: bytes) -> None:
        way = self._ways.get((source, target))
        if way is None:
            self._hand(target, frame)
            return
        now = due = time.monotonic()
        if way.bytes_per_s:
            due = max(now, self._free_at.get((source, target), 0.0)) + len(frame) / way.bytes_per_s
        if self._random.random() < way.loss or due > now + _MAX_QUEUED_S:
            self._num_lost += 1
            return
        self._free_at[source, target] = due
        heapq.heappush(self._late, (due + way.delay_s, next(self._numbers), target, frame))

    def _hand(self, node: int, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # its interface is down, or its queue is full
            os.write(self._ports[node], frame)


class _Manager(BaseManager):
    """Keeps a switch in a process of its own."""


_Manager.register("make", Switch)


@contextlib.contextmanager
def in_a_process() -> Iterator[Switch]:
    """A switch which does not wait for the interpreter of this process."""
    with _Manager(ctx=multiprocessing.get_context("spawn")) as manager:
        yield manager.make()  # type: ignore[attr-defined]  # a method that was registered
