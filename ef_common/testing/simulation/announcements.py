"""What a simulated coordinator tells the others: the real announcers, over simulated connections."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ef_common.core.view import Member
from ef_common.errors import ProtocolError
from ef_common.protocol import wire
from ef_common.protocol.addresses import LOOPBACK, Address
from ef_common.protocol.announcer import LOOK_S, Announcer, has_news
from ef_common.protocol.endpoint_announcer import EndpointAnnouncer
from ef_common.protocol.introduction import Introduction
from ef_common.testing.simulation.streams import MESSAGE_S, Stream

if TYPE_CHECKING:
    from ef_common.testing.simulation.coordinator import Coordinator

ATTEMPT_S = 0.5


class Announcing(ABC):
    """A thread that tells others, one after the other, what a coordinator knows, as long as there is news."""

    def __init__(self, coordinator: Coordinator, announcer: Announcer | EndpointAnnouncer) -> None:
        self._coordinator = coordinator
        self._announcer = announcer
        self._runs = False

    def begin(self) -> None:
        """There is news."""
        if not self._runs:
            self._runs = True
            scheduler = self._coordinator.scheduler
            scheduler.idle_after(LOOK_S * scheduler.random.random(), self._look)

    def _look(self) -> None:
        coordinator = self._coordinator
        if coordinator.later(self._look) or not coordinator.alive:
            return
        address = self._next(coordinator.scheduler.now)
        self._runs = has_news(coordinator.state)
        if address is not None:
            Announcement(coordinator, address, self._announcer.news, partial(self._end, address))
        elif self._runs:
            coordinator.scheduler.idle_after(LOOK_S, self._look)

    def _end(self, address: Address, outcome: str) -> None:
        if outcome == "told":
            self._announcer.told(address)
        elif outcome == "refused":
            self._announcer.refused(address)
        self._note(address, outcome)
        self._look()

    @abstractmethod
    def _next(self, now: float) -> Address | None:
        """Who is to be told next."""

    @abstractmethod
    def _note(self, address: Address, outcome: str) -> None:
        """An attempt has ended: somebody was "told", has "refused", or was "unreached"."""


class ToStandbys(Announcing):
    """Tells the standbys that the coordinator has heard of."""

    _announcer: Announcer

    def _next(self, now: float) -> Address | None:
        return self._announcer.next(self._coordinator.state, self._coordinator.server.standbys.addresses, now)

    def _note(self, address: Address, outcome: str) -> None:
        if outcome == "refused":
            self._coordinator.server.standbys.forget(address)


class ToEndpoints(Announcing):
    """Tells those who are at the endpoints."""

    _announcer: EndpointAnnouncer

    def _next(self, now: float) -> Address | None:
        return self._announcer.next(self._coordinator.state, now)

    def _note(self, address: Address, outcome: str) -> None:
        if outcome == "unreached":
            self._announcer.unanswered(address, self._coordinator.scheduler.now)


class Announcement:
    """A conversation of one coordinator with another one, in which it says what it knows.

    Args:
        coordinator: Who speaks.
        address: To whom.
        message: What it says.
        ended: Called with the outcome: it was "told", "refused" or "unreached".
    """

    def __init__(
        self, coordinator: Coordinator, address: Address, message: wire.Follow, ended: Callable[[str], None]
    ) -> None:
        self._coordinator = coordinator
        self._message = message
        self._ended = ended
        self._is_over = False
        member = Member(coordinator.id, "coordinator", LOOPBACK)
        self._introduction = Introduction(
            member, coordinator.token, key=coordinator.key, address=address, returning=True
        )
        other, scheduler = coordinator.others.get(address[1]), coordinator.scheduler
        names = coordinator.name, f"c{address[1]}"
        cut = coordinator.cuts.until(*names) or coordinator.cuts.until(*names[::-1])
        cut = cut or (other is not None and other.vanished)
        if other is None or coordinator.cuts.rejects(*names) or (not cut and not other.alive):
            scheduler.idle_after(scheduler.delay(MESSAGE_S), self._end, "refused")
            return
        scheduler.idle_after(ATTEMPT_S, self._end, "unreached")
        if not cut:
            self._stream = Stream(scheduler, coordinator.cuts, self, other, names)
            scheduler.idle_after(scheduler.delay(MESSAGE_S), other.accept, self._stream, f"node{coordinator.number}")

    def hear(self, stream: Stream, data: bytes) -> None:
        """Bytes have come."""
        if self._is_over or self._coordinator.later(lambda: self.hear(stream, data)):
            return
        self._introduction.lines.feed(stream.take(data))
        try:
            while (reply := self._introduction.take()) is not None:
                if self._introduction.answer is not None:
                    stream.up(wire.encode(self._message))
                    self._end("told")
                    return
                stream.up(reply)
        except ProtocolError:
            self._end("unreached")

    def lose(self, stream: Stream, *, in_order: bool) -> None:
        """The connection has ended."""
        self._end("unreached")

    def _end(self, outcome: str) -> None:
        if not self._is_over and not self._coordinator.later(lambda: self._end(outcome)):
            self._is_over = True
            if outcome == "told":
                self._stream.closed_near = True
                self._stream.end_up()
            self._ended(outcome)
