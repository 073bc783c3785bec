"""The store through which torch's process groups find their peers, as long as a view holds."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from ef_common import threads
from ef_common.errors import GroupBroken, ProtocolError
from ef_common.session.ports import Bootstrap

T = TypeVar("T")
_ABANDON_POLL_S = 0.02
_WORD_BYTES = 8
_MAX_VALUE_BYTES = 1024 * 1024
_WINDOW_BITS, _MEMORY_LEVEL = 9, 1
"""As little as zlib can work with. By default it takes 260 kB for a moment, and malloc keeps those in the arena of each
thread that has ever connected; what is compressed here repeats itself after a few bytes."""


class BootstrapStore(dist.Store):  # type: ignore[misc, name-defined]
    """The part of a store that process groups need to exchange addresses.

    Args:
        bootstrap: Bootstrap of the view.
        prefix: Prefix of the keys.
        awaited: Values of the bootstrap for which the first reader waits, however long it takes: those that members
            publish as they come.
    """

    def __init__(self, bootstrap: Bootstrap, *, prefix: str = "", awaited: Sequence[str] = ()) -> None:
        super().__init__()
        self._bootstrap = bootstrap
        self._prefix = prefix
        self._awaited = awaited

    def set(self, key: str, value: Any) -> None:
        """Publish an address."""
        self._bootstrap.put(self._prefix + key, pack(value.encode() if isinstance(value, str) else bytes(value)))

    def get(self, key: str) -> bytes:
        """Wait for an address."""
        self._wait_for_members()
        return unpack(self._bootstrap.get(self._prefix + key))

    def wait(self, keys: Iterable[str], timeout: timedelta | None = None) -> None:
        """Wait for several; `get` ends when the view is replaced, so no timeout is needed."""
        self._wait_for_members()
        for key in keys:
            self._bootstrap.get(self._prefix + key)

    def _wait_for_members(self) -> None:
        for key in self._awaited:
            self._bootstrap.get(key)
        self._awaited = ()


def pack(value: bytes) -> bytes:
    """Compress a value of Gloo's: it ends with a number of 8 bytes for each member, which mostly grow by one.

    Each member gets those of all others, so they would be most of what a coordinator has to send for a large view.
    """
    head = len(value) % _WORD_BYTES
    words = np.frombuffer(value, "<u8", offset=head)
    steps = np.diff(words, prepend=np.uint64(0))
    packing = zlib.compressobj(wbits=_WINDOW_BITS, memLevel=_MEMORY_LEVEL)
    return bytes([head]) + packing.compress(value[:head] + steps.tobytes()) + packing.flush()


def unpack(packed: bytes) -> bytes:
    """Inverse of :func:`pack`.

    Raises:
        ProtocolError: No member has packed this.
    """
    try:
        packing = zlib.decompressobj()
        content, head = packing.decompress(packed[1:], _MAX_VALUE_BYTES), packed[0]
        if not packing.eof:
            raise ValueError("it is incomplete, or too long")
        steps = np.frombuffer(content, "<u8", offset=head)
    except (zlib.error, IndexError, ValueError) as error:
        raise ProtocolError(f"a member has published what is no address: {error}") from None
    return content[:head] + np.cumsum(steps, dtype="<u8").tobytes()


def abandonable(connect: Callable[[], T], is_void: Callable[[], bool], *, name: str) -> T:
    """Connect in a thread, because Gloo and NCCL wait forever for a member that died while they connected.

    Args:
        connect: Connects.
        is_void: Whether nobody needs the connection any more.
        name: Name of the thread.

    Raises:
        GroupBroken: The view was replaced. The thread is left alone.
        Exception: Whatever `connect` raises.
    """
    outcome: list[T] = []
    errors: list[BaseException] = []
    finished = threading.Event()

    def run() -> None:
        try:
            outcome.append(connect())
        except BaseException as error:
            errors.append(error)
        finally:
            finished.set()

    threads.start(run, name=name, job="connects to the other members")
    while not finished.wait(_ABANDON_POLL_S):
        if is_void():
            raise GroupBroken("replaced while it was built")
    if errors:
        raise errors.pop()  # what it holds goes with it: in this list, its own traceback would keep it
    return outcome.pop()
