"""Connections in the simulated network: bytes keep their order in each direction, and come in pieces or together.

What is sent on different connections does not keep its order. Where the network is cut, bytes and ends wait until it is
whole again, or a firewall rejects them: then the connection is reset for their sender. An end that was not forced comes
after all bytes.

If the process of an end dies and has left something unread, which may also come in its last moments, the connection is
reset, and what it had sent may be lost.

If the near end does not read, what is sent to it fills a buffer of its system, and the far end keeps the rest, which it
may give up. If the host of an end vanishes, the other end hears nothing more, at times until its system gives up. If
the connection alone breaks, the near end finds out, as nobody confirms its heartbeats, and the far end may.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Protocol

from ef_common.protocol.peer import End
from ef_common.testing.simulation.cuts import Cuts
from ef_common.testing.simulation.scheduler import Scheduler

MESSAGE_S = 0.005
_IN_PIECES = 0.05
_TOGETHER = 0.5  # of what is due at the same time
_GIVE_UP_S, _GIVES_UP = 5.0, 0.5
_UNANSWERED_S = 10.0  # a worker, whose heartbeats nobody confirms, has given up by then: after five timeouts
_IS_TOLD = 0.7  # the far end of a connection that breaks
_IN_LAST_MOMENTS = 0.3  # of what is on its way when a process dies


class Near(Protocol):
    """Who has connected."""

    def hear(self, stream: Stream, data: bytes) -> None:
        """Bytes have come; :meth:`Stream.take` reads them."""

    def lose(self, stream: Stream, *, in_order: bool) -> None:
        """The connection has ended."""


class Far(Protocol):
    """Who was connected to."""

    def accept(self, stream: Stream, address: str) -> None:
        """Somebody has connected, from this address."""

    def receive(self, stream: Stream, data: bytes) -> None:
        """Bytes have come."""

    def end(self, stream: Stream, how: End) -> None:
        """The connection has ended."""


class Parcel:
    """Bytes on their way, to which more may be added that are due at the same time."""

    def __init__(self, data: bytes, due: float) -> None:
        self.data = data
        self.due = due


class Stream:
    """A connection between two places.

    Args:
        scheduler: The clock.
        cuts: The state of the network.
        near: Who has connected.
        far: Who was connected to.
        names: The places of both, as the cuts name them.
        slowness: How many times a message takes longer than others do.
        buffer_bytes: How much of what the near end does not read its system takes.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cuts: Cuts,
        near: Near,
        far: Far,
        names: tuple[str, str],
        slowness: Callable[[], float] = lambda: 1.0,
        *,
        buffer_bytes: float = inf,
    ) -> None:
        self.near = near
        self.far = far
        self.names = names
        self.closed_near = False  # nothing that comes there counts any more
        self.closed_far = False
        self._scheduler = scheduler
        self._cuts = cuts
        self._slowness = slowness
        self._ended_up = self._ended_down = False
        self._rejected_end = False  # the near end has not been told of the end of the far one
        self._due_up = self._due_down = 0.0
        self._last_up: Parcel | None = None  # that has set out
        self._last_down: Parcel | None = None
        self._buffer_bytes = buffer_bytes
        self._sent = self._came = self._read = 0  # bytes to the near end
        self._sent_up = self._came_up = self._read_up = 0  # likewise to the far end
        self._kept = inf  # so many of them will ever come
        self._vanished = False

    def up(self, data: bytes) -> None:
        """Bytes set out to the far end."""
        self._sent_up += len(data)
        for piece in self._pieces(data):
            self._send_up(self._receive, piece)

    def end_up(self, how: End = End.CLOSED) -> None:
        """The near end has ended the connection."""
        if not self._ended_up:
            self._ended_up = True
            self._send_up(self._end, how)

    def down(self, data: bytes) -> None:
        """Bytes set out to the near end."""
        self._sent += len(data)
        for piece in self._pieces(data):
            self._send_down(self._hear, piece)

    def end_down(self, *, in_order: bool = True) -> None:
        """The far end has ended the connection."""
        if not self._ended_down:
            self._ended_down = True
            self._send_down(self._lose, in_order)

    # ------------------------------------------------------------ what is not read

    @property
    def num_unsent(self) -> float:
        """How many bytes the far end keeps, because the near end does not read, or the network is cut."""
        is_cut = self._cuts.until(*self.names[::-1]) > 0
        return max(0, (self._sent if is_cut else self._came) - self._read - self._buffer_bytes)

    def take(self, data: bytes) -> bytes:
        """The near end reads what has come; returns what is left of it if the far end has given up the rest."""
        left = self._kept - self._read
        self._read += len(data)
        return data if left >= len(data) else data[: max(0, int(left))]

    def take_up(self, data: bytes) -> None:
        """The far end reads what has come."""
        self._read_up += len(data)

    def kill_near(self) -> None:
        """The process of the near end has died."""
        self.closed_near = True
        self.end_up(End.RESET if self._is_unread(self._sent, self._came, self._read) else End.CLOSED)

    def kill_far(self) -> bool:
        """The process of the far end has died; returns whether something is lost that it had sent."""
        self.closed_far = True
        self.give_up_unsent()
        is_unread = self._is_unread(self._sent_up, self._came_up, self._read_up)
        if is_unread:
            self._kept = min(self._kept, self._scheduler.random.randint(self._came, self._sent))
        self.end_down(in_order=not is_unread)
        return is_unread and self._kept < self._sent

    def _is_unread(self, sent: int, came: int, read: int) -> bool:
        return came > read or (sent > came and self._scheduler.chance(_IN_LAST_MOMENTS))

    def finish_down(self, *, in_order: bool = True) -> None:
        """The far end ends the connection, and what it keeps is lost."""
        in_order = in_order and not self.num_unsent
        self.give_up_unsent()
        self.end_down(in_order=in_order)

    def give_up_unsent(self) -> None:
        """What the far end keeps is lost."""
        if self.num_unsent:
            self._kept = min(self._kept, self._read + self._buffer_bytes)

    def vanish(self, *, near: bool) -> None:
        """The host of an end is no more. The system of the other end gives up if it misses answers, or maybe."""
        if not self._vanished and (not near or self._scheduler.chance(_GIVES_UP)):
            self._give_up_later(near, _GIVE_UP_S)
        self._vanished = True

    def break_(self) -> None:
        """What lies between has forgotten the connection: nothing comes any more, and the ends find out sometime."""
        for near in () if self._vanished else (False, True):  # whose host has vanished
            if not near or self._scheduler.chance(_IS_TOLD):
                typical_s = _GIVE_UP_S if self._scheduler.chance(0.3) else MESSAGE_S
                self._give_up_later(near, typical_s)
        self._vanished = True

    def _give_up_later(self, near: bool, typical_s: float) -> None:
        delay_s = self._scheduler.delay(typical_s)
        self._scheduler.idle_after(delay_s if near else min(delay_s, _UNANSWERED_S), self._give_up, near)

    def _give_up(self, near: bool) -> None:
        if near and not self.closed_far:
            self.far.end(self, End.BROKEN)
        elif not near and not self.closed_near:
            self.near.lose(self, in_order=False)

    # ------------------------------------------------------------ on the way

    def _pieces(self, data: bytes) -> tuple[bytes, ...]:
        if len(data) < 2 or not self._scheduler.chance(_IN_PIECES):
            return (data,)
        at = self._scheduler.random.randrange(1, len(data))
        return data[:at], data[at:]

    def _send_up(self, act: Callable[..., None], what: Any) -> None:
        if self._cuts.rejects(*self.names):
            self._scheduler.idle_after(self._scheduler.delay(MESSAGE_S), self._lose, False)
            return
        self._due_up = self._due(self._due_up, *self.names)
        self._last_up = self._pack(self._last_up, what, self._due_up, act)

    def _send_down(self, act: Callable[..., None], what: Any) -> None:
        if self._cuts.rejects(*self.names[::-1]):
            self._rejected_end = self._rejected_end or not isinstance(what, bytes)
            self._scheduler.idle_after(self._scheduler.delay(MESSAGE_S), self._end, End.RESET)
            return
        self._due_down = self._due(self._due_down, *self.names[::-1])
        self._last_down = self._pack(self._last_down, what, self._due_down, act)

    def _pack(self, last: Parcel | None, what: Any, due: float, act: Callable[..., None]) -> Parcel | None:
        """Let something be delivered, maybe with the bytes before it, as one who reads late takes in all at once."""
        if not isinstance(what, bytes):  # an end
            self._scheduler.idle_at(due, act, what)
            return None
        if last is not None and last.due == due > self._scheduler.now and self._scheduler.chance(_TOGETHER):
            last.data += what
            return last
        parcel = Parcel(what, due)
        self._scheduler.idle_at(due, lambda: act(parcel.data))
        return parcel

    def _due(self, before: float, source: str, target: str) -> float:
        now = max(self._scheduler.now, self._cuts.until(source, target))
        return max(before, now + self._scheduler.delay(MESSAGE_S * self._slowness()))

    def _receive(self, data: bytes) -> None:
        if self._vanished:
            return
        if not self.closed_far:
            self._came_up += len(data)
            self.far.receive(self, data)
        elif self._rejected_end:
            self._send_down(self._lose, False)  # the system answers what comes to a socket that is closed

    def _end(self, how: End) -> None:
        if not self.closed_far and not self._vanished:
            self.far.end(self, how)

    def _hear(self, data: bytes) -> None:
        if not self.closed_near and not self._vanished:
            self._came += len(data)
            self.near.hear(self, data)

    def _lose(self, in_order: bool) -> None:
        if not self.closed_near and not self._vanished:
            self.near.lose(self, in_order=in_order)


class Alarm:
    """Calls somebody at the newest time that it was set to, or earlier.

    Args:
        scheduler: The clock.
        ring: Who is called.
    """

    def __init__(self, scheduler: Scheduler, ring: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._ring = ring
        self._at: float | None = None

    def set(self, time_s: float | None) -> None:
        """Call at this time."""
        if time_s is not None and (self._at is None or time_s < self._at):
            self._at = time_s
            self._scheduler.idle_at(time_s, self._call, time_s)

    def _call(self, time_s: float) -> None:
        if time_s == self._at:
            self._at = None
            self._ring()
