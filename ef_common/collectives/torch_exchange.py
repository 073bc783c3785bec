"""Small messages between all members over Gloo, each with a header that names the call it belongs to.

Gloo ends the process if a message is longer than what was expected, and takes a shorter one for it. So a message is
received into memory that has room for any of them, and believed only if its header tells the call of this member.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        self, carrier: Carrier, call: str, content: Bytes | None = None, *, length: int | None = None
    ) -> Exchange:
        """Start to send some bytes to all others: n-1 messages leave, and as many arrive.

        Args:
            carrier: Carries them.
            call: Call of this member.
            content: Flat bytes, if any.
            length: The length in the header; by default, the size of the content.
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
        return Exchange(self, carrier, frame, sent[0], room, flight)

    def take_back(self, room: ExchangeMemory) -> None:
        """Take back memory whose content is no longer needed."""
        self._rooms.append(room)


class Exchange:
    """Messages in flight.

    ::

        flying → complete      `wait`, `is_open`: all messages are there, and of one call
        flying → mismatched    likewise, and they are not: `wait` raises
        flying → GroupBroken   likewise, and a member is gone, or the group was aborted
        complete → released    `let_go`: the memory is that of a later exchange

    Args:
        exchanges: Exchanges of this member.
        carrier: Carries them.
        frame: This member's header.
        sent: Its message.
        room: For what the others send.
        flight: Completes them.
    """

    def __init__(
        self, exchanges: Exchanges, carrier: Carrier, frame: bytes, sent: Bytes, room: ExchangeMemory, flight: Flight
    ) -> None:
        self._exchanges = exchanges
        self._carrier = carrier
        self._frame = frame
        self._sent = sent
        self._room = room
        self._flight = flight
        self._is_over = False
        self._error: CallMismatch | None = None
        self.rank = exchanges.rank

    def wait(self) -> None:
        """Block until the messages of all members are there.

        Raises:
            CallMismatch: Members have sent in different calls.
            GroupBroken: A member is gone, or the group was aborted.
        """
        self._finish()
        if self._error is not None:
            raise self._error

    def is_open(self) -> bool:
        """Whether the messages of all members are there and have the same call. Never waits.

        Raises:
            GroupBroken: A member is gone, or the group was aborted.
        """
        if self._is_over or self._flight.is_over():
            self._finish()
        return self._is_over and self._error is None

    def _finish(self) -> None:
        if self._is_over:
            return
        self._flight.wait()
        self._is_over = True
        if self._room.calls.tobytes() != self._frame[LENGTH_BYTES:] * len(self._room.calls):
            self._error = self._carrier.mismatch([call_in(frame) for frame in self._frames()])

    def _frames(self) -> list[bytes]:
        """The headers of all members, in rank order."""
        frames = [row.tobytes() for row in self._room.rows[:, :HEADER_BYTES]]
        frames.insert(self.rank, self._frame)
        return frames

    def lengths(self) -> list[int]:
        """The lengths in the headers of all members, in rank order."""
        return [length_in(frame) for frame in self._frames()]

    def contents(self, lengths: Sequence[int]) -> list[Bytes]:
        """The contents of this length from all members, in rank order, as parts of the memory."""
        rows = [*self._room.rows]
        rows.insert(self.rank, self._sent)
        return [row[HEADER_BYTES : HEADER_BYTES + length] for row, length in zip(rows, lengths, strict=True)]

    def received(self, length: int) -> list[Bytes]:
        """The contents of this length from all other members, in rank order, as parts of the memory."""
        return [row[HEADER_BYTES : HEADER_BYTES + length] for row in self._room.rows]

    def let_go(self) -> None:
        """Release the memory. Call this once, when the exchange is complete."""
        self._exchanges.take_back(self._room)


class RollCall:
    """A meeting: members tell each other their calls and nothing else."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange: Exchange | None = exchange

    def wait(self) -> None:
        """See :class:`~ef_common.session.ports.Meeting`."""
        if self._exchange is not None:
            self._exchange.wait()
            self._end()

    def is_open(self) -> bool:
        """Whether all members are known to be in one call. Never waits."""
        if self._exchange is not None and self._exchange.is_open():
            self._end()
        return self._exchange is None

    def _end(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.let_go()


class DirectSum:
    """A sum in flight of a tensor that is small enough to be sent from every member to every other one."""

    def __init__(self, tensor: Tensor, exchange: Exchange) -> None:
        self._tensor = tensor
        self._exchange: Exchange | None = exchange

    def wait(self) -> None:
        """Block until everything is there, and add it up in rank order, so that all get the same result."""
        exchange = self._exchange
        if exchange is None:
            return
        exchange.wait()
        self._exchange = None
        own, rank = self._tensor.view(-1), exchange.rank
        received = [torch.from_numpy(part).view(own.dtype) for part in exchange.received(own.nbytes)]
        # The first two are read before anything is written, so one of them may be the tensor itself.
        received.insert(rank, own if rank < 2 else own.clone())
        first, second, *others = received
        total = torch.add(first, second, out=own)
        for other in others:
            total.add_(other)
        exchange.let_go()


def sum_of(call: str, tensors: Sequence[Tensor]) -> str:
    """The call of members who sum tensors of these types and sizes."""
    sizes = " + ".join(f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)
    return f"{call}, a sum of {sizes}" if call else f"a sum of {sizes}"
