"""Small messages between all members over Gloo, each with a header that names the call it belongs to.

Gloo ends the process if a message is longer than what was expected, and takes a shorter one for it. So a message is
received into memory that has room for any of them, and believed only if its header tells the call of this member.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ef_common.core.calls import HEADER_BYTES, LENGTH_BYTES, call_in, header, length_in
from ef_common.errors import CallMismatch

# So much is exchanged directly, in one round; Gloo's ring takes twice as many rounds as there are members.
_DIRECT_BYTES = 1 << 20
_ALIGNMENT_BYTES = 16
Bytes = NDArray[np.uint8]


class Flight(Protocol):
    """A Gloo operation in flight."""

    def wait(self) -> None:
        """Block until it is complete."""

    def is_over(self) -> bool:
        """Whether the operation is complete or has failed; never waits."""


class Carrier(Protocol):
    """The group that carries the messages.

    It holds its `Exchanges`, which therefore do not hold it: once it is aborted, its memory is free at once, and does
    not wait for the garbage collector.
    """

    def start(self, act: Callable[..., object], *tensors: Tensor) -> Flight:
        """Start an operation on Gloo's process group and these tensors."""

    def mismatch(self, calls: Sequence[str]) -> CallMismatch:
        """The error for members that are in these calls, in rank order."""


class ExchangeMemory:
    """Memory for messages to and from all others. Pages that are never written to take no memory.

    Attributes:
        rows: For what each of them sends, in rank order.
        flat: The same memory in the form that Gloo accepts.
        calls: The calls in their headers.
    """

    __slots__ = ("_sent", "calls", "flat", "rows")

    def __init__(self, num_others: int, num_bytes: int) -> None:
        self.rows = np.empty((num_others, num_bytes), np.uint8)
        self.flat = torch.from_numpy(self.rows.reshape(-1))
        self.calls = self.rows[:, LENGTH_BYTES:HEADER_BYTES]
        self._sent = np.empty(num_others * num_bytes, np.uint8)

    def to_send(self, num_bytes: int) -> Bytes:
        """A row of this length for each member that is sent to."""
        num_others = len(self.rows)
        return self._sent[: num_others * num_bytes].reshape(num_others, num_bytes)

    def frames(self) -> list[bytes]:
        """The headers of the others, in rank order."""
        return [row.tobytes() for row in self.rows[:, :HEADER_BYTES]]

    def contents(self, length: int) -> list[Bytes]:
        """What the others have sent, all of it of this length, in rank order, as parts of the memory."""
        return [row[HEADER_BYTES : HEADER_BYTES + length] for row in self.rows]

    def messages(self) -> list[tuple[int, bytes]]:
        """The length that each of the others has told, in rank order, and what it has sent if there was room for it."""
        lengths = [length_in(frame) for frame in self.frames()]
        return [(length, row[HEADER_BYTES:][:length].tobytes()) for row, length in zip(self.rows, lengths, strict=True)]


class Exchanges:
    """The small messages of one member.

    Args:
        world_size: Number of members.
        rank: Rank of this one.

    Attributes:
        most_bytes: The largest content of a message.
    """

    def __init__(self, world_size: int, rank: int) -> None:
        self.most_bytes = _DIRECT_BYTES // world_size // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        self.rank = rank
        self._num_others = world_size - 1
        self._rooms: list[ExchangeMemory] = []

    def begin(
        self,
        carrier: Carrier,
        call: str,
        content: Bytes | None = None,
        *,
        length: int | None = None,
        take: Callable[[ExchangeMemory], None] = lambda room: None,
    ) -> Exchange:
        """Start to send some bytes to all others: n-1 messages leave, and as many arrive.

        Args:
            carrier: Carries them.
            call: Call of this member.
            content: Flat bytes, if any.
            length: The length in the header; by default, the size of the content.
            take: Called once, when all are known to have sent in this call, with what the others have sent. Its memory
                is that of a later exchange afterwards.
        """
        size = 0 if content is None else content.size
        frame = header(call, size if length is None else length)
        room = self._rooms.pop() if self._rooms else ExchangeMemory(self._num_others, HEADER_BYTES + self.most_bytes)
        sent = room.to_send(HEADER_BYTES + size)
        sent[:, :HEADER_BYTES] = np.frombuffer(frame, np.uint8)
        if content is not None:
            sent[:, HEADER_BYTES:] = content
        sizes, rooms = [sent.shape[1]] * self._num_others, [room.rows.shape[1]] * self._num_others
        sizes.insert(self.rank, 0)
        rooms.insert(self.rank, 0)
        flat = torch.from_numpy(sent.reshape(-1))
        flight = carrier.start(
            lambda group, received, sent: group.alltoall_base(received, sent, rooms, sizes), room.flat, flat
        )
        return Exchange(flight, partial(self._end, carrier, frame, room, take))

    def _end(
        self, carrier: Carrier, frame: bytes, room: ExchangeMemory, take: Callable[[ExchangeMemory], None]
    ) -> CallMismatch | None:
        if room.calls.tobytes() != frame[LENGTH_BYTES:] * self._num_others:
            frames = room.frames()
            frames.insert(self.rank, frame)
            return carrier.mismatch([call_in(one) for one in frames])
        take(room)
        self._rooms.append(room)
        return None


class Exchange:
    """Messages in flight.

    ::

        flying → complete      `wait`, `is_open`: all messages are there, and of one call, and have been taken
        flying → mismatched    likewise, and they are not: `wait` raises
        flying → GroupBroken   likewise, and a member is gone, or the group was aborted

    Args:
        flight: Completes them.
        end: Called once, when they are there. It returns the error if they are not of one call.
    """

    def __init__(self, flight: Flight, end: Callable[[], CallMismatch | None]) -> None:
        self._flying: tuple[Flight, Callable[[], CallMismatch | None]] | None = flight, end
        self._error: CallMismatch | None = None

    def wait(self) -> None:
        """Block until the messages of all members are there, and have been taken.

        Raises:
            CallMismatch: Members have sent in different calls.
            GroupBroken: A member is gone, or the group was aborted.
        """
        if self._flying is not None:
            flight, end = self._flying
            flight.wait()
            self._flying = None  # it does not hold the group any more
            self._error = end()
        if self._error is not None:
            raise self._error

    def is_open(self) -> bool:
        """Whether the messages of all members are there and have the same call. Never waits.

        Raises:
            GroupBroken: A member is gone, or the group was aborted.
        """
        if self._flying is not None and not self._flying[0].is_over():
            return False
        with contextlib.suppress(CallMismatch):  # which `wait` raises again
            self.wait()
        return self._error is None


def add_up(tensor: Tensor, rank: int, room: ExchangeMemory) -> None:
    """Add what all others have sent to a small tensor, in rank order, so that all get the same result.

    Args:
        tensor: That of this member.
        rank: Its rank.
        room: What the others have sent.
    """
    own = tensor.view(-1)
    parts = [torch.from_numpy(part).view(own.dtype) for part in room.contents(own.nbytes)]
    # The first two are read before anything is written, so one of them may be the tensor itself.
    parts.insert(rank, own if rank < 2 else own.clone())
    first, second, *others = parts
    total = torch.add(first, second, out=own)
    for other in others:
        total.add_(other)


def sum_of(call: str, tensors: Sequence[Tensor]) -> str:
    """The call of members who sum tensors of these types and sizes."""
    sizes = " + ".join(f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)
    return f"{call}, a sum of {sizes}" if call else f"a sum of {sizes}"
