"""Which standbys a coordinator tells that it leads or gathers members, or that the job has failed, and when."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from heapq import heapify, heappop, heappush
from math import ceil, inf

from ef_common.core.membership import Membership, Serving
from ef_common.protocol import wire
from ef_common.protocol.addresses import Address

LOOK_S = 0.25
"""How often somebody should be looked for whose turn it is."""
_AGAIN_S, _RARELY_S = 5.0, 15.0  # a worker looks for a coordinator for longer than either
_AGAIN_AT_ONCE = 64  # so many of those that have been told are told again in that time
_IN_DOUBT_S = 300.0


class Hearer(Enum):
    """Whether an address has heard the news."""

    FRESH = auto()  # it has not been tried with this news
    TRIED = auto()  # it has, in vain so far
    TOLD = auto()  # it has heard it


def has_news(state: Membership) -> bool:
    """Whether any other coordinator is to be told anything."""
    return bool(state.failed) or _contested_at(state) is not None


def news_of(state: Membership, *, port: int, job: str) -> wire.Follow:
    """What others are told by a coordinator on this port."""
    return wire.Follow(port, leads=not state.failed and not state.held, failed=state.failed, job=job)


def _contested_at(state: Membership) -> float | None:
    return state.contested_at if isinstance(state, Serving) else None


class Announcer:
    """Chooses among the standbys of all nodes.

    Those at the endpoints are left to the :class:`~ef_common.protocol.endpoint_announcer.EndpointAnnouncer`.

    ::

        FRESH → TRIED    `next`: it is the turn of this address
        TRIED → TOLD     `told`
        TRIED → FRESH    `next`: there is other news, or the address was not among those that are known
        TOLD → FRESH     likewise

    An address that is fresh is due at once. For some minutes after the newest sign that others lead or look for a
    quorum, the others are due every 5 s, because workers may turn to a standby at any time. Of more than 64 that have
    been told since that sign, 64 are due in 5 s. Later, those that were tried in vain are due every 15 s: a node may
    be cut off for hours. A standby that gathers members announces that, which is such a sign again. A standby whose
    port is closed is gone for good. A coordinator that has never taken over from another one, and never lost a worker
    without a word, has no news unless the job has failed.

    Of N addresses, to choose one costs log N steps, and N when the standbys that are known have changed.

    Args:
        port: On which the coordinator listens.
        endpoints: Where newcomers look for the job: no standby there has its turn here.
        job: Name of the job; "" if it has none.

    Attributes:
        news: What is to be told.
    """

    def __init__(self, *, port: int, endpoints: Iterable[Address] = (), job: str = "") -> None:
        self._port, self._job = port, job
        self._endpoints = frozenset(endpoints)
        self._standbys: tuple[Address, ...] | None = None  # as they were seen last
        self._known: dict[Address, int] = {}  # each with its place in the order
        self._tried: dict[Address, float] = {}  # time of the newest attempt
        self._heard: set[Address] = set()  # where an attempt has succeeded
        self.news = wire.Follow(port, leads=False, job=job)
        self._due: dict[Address, float] = {}  # when to look at an address again; it may turn out not to be due then
        self._queue: list[tuple[float, int, Address]] = []  # likewise, the earliest first, and some that hold no more
        self._news_at = 0.0
        self._sign = 0.0  # when there was the newest sign that all others were looked at for
        self._looked_at = 0.0
        self._in_doubt = False

    def next(self, state: Membership, standbys: tuple[Address, ...], now: float) -> Address | None:
        """Who is to be told next, the newest standbys first, as former ones may not answer any more; None for nobody.

        Args:
            state: What the coordinator has decided.
            standbys: The standbys that it has heard of, the newest last; the same object as long as nothing changes.
            now: Time of a monotonic clock, in seconds.
        """
        if not has_news(state):
            return None
        news = news_of(state, port=self._port, job=self._job)
        is_new = news != self.news and bool(news.leads or news.failed)
        if is_new:
            self._tried, self._heard = {}, set()
            self._news_at = now
        are_others = standbys is not self._standbys
        self.news = news
        if are_others:
            self._know(standbys)
        sign = max(self._news_at, _contested_at(state) or 0.0)
        self._in_doubt = now < sign + _IN_DOUBT_S
        if is_new or are_others or (sign > self._sign and now >= self._looked_at + LOOK_S):
            self._sign, self._looked_at = sign, now
            self._look_at_all()
        return self._choose(now)

    def _know(self, standbys: tuple[Address, ...]) -> None:
        """These are all addresses there are; the new ones are due at once."""
        self._standbys = standbys
        known = dict.fromkeys(address for address in reversed(standbys) if address not in self._endpoints)
        self._known = {address: order for order, address in enumerate(known)}
        self._tried = {address: when for address, when in self._tried.items() if address in known}
        self._heard.intersection_update(known)

    def _look_at_all(self) -> None:
        self._due = {address: self._due_at(address) for address in self._known}
        self._queue = [(due, self._known[address], address) for address, due in self._due.items() if due < inf]
        heapify(self._queue)

    def _choose(self, now: float) -> Address | None:
        while self._queue and self._queue[0][0] <= now:
            due, _, address = heappop(self._queue)
            if self._due.get(address) != due:
                continue
            due = self._due_at(address)
            if due <= now:
                self._tried[address] = now
                self._look_at(address, now + _AGAIN_S)
                return address
            self._look_at(address, due)
        return None

    def _look_at(self, address: Address, due: float) -> None:
        self._due[address] = due
        if due < inf:
            heappush(self._queue, (due, self._known[address], address))

    def hearer(self, address: Address) -> Hearer:
        """Whether an address has heard the news."""
        if address not in self._tried:
            return Hearer.FRESH
        return Hearer.TOLD if address in self._heard else Hearer.TRIED

    def _due_at(self, address: Address) -> float:
        hearer = self.hearer(address)
        if hearer is Hearer.FRESH:
            return -inf
        tried_at, is_told = self._tried[address], hearer is Hearer.TOLD
        if self._in_doubt and not (is_told and tried_at >= self._sign):
            return tried_at + _AGAIN_S
        if self._in_doubt:
            return self._told_again_at(address, tried_at)
        return inf if is_told else tried_at + _RARELY_S

    def _told_again_at(self, address: Address, tried_at: float) -> float:
        """When one that has been told has its turn again; where there are many, they have it one after the other."""
        period_s = _AGAIN_S * len(self._known) / _AGAIN_AT_ONCE
        if period_s <= _AGAIN_S:
            return tried_at + _AGAIN_S
        turn = self._sign + period_s * self._known[address] / len(self._known)
        return turn + period_s * ceil((tried_at + _AGAIN_S - turn) / period_s)

    def told(self, address: Address) -> None:
        """It has been told."""
        self._heard.add(address)

    def refused(self, address: Address) -> None:
        """Nobody listens there, and nobody ever will again."""
        for known in (self._due, self._known, self._tried):
            known.pop(address, None)
