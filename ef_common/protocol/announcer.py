"""Whom a coordinator tells that it leads or gathers members, or that the job has failed, and when."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

from ef_common.core.membership import Membership, Serving
from ef_common.protocol import wire
from ef_common.protocol.addresses import Address

LOOK_S = 0.25
"""How often somebody should be looked for whose turn it is."""
_AGAIN_S, _RARELY_S = 5.0, 15.0  # a worker looks for a coordinator for longer than either
_IN_DOUBT_S = 300.0


class Hearer(Enum):
    """Whether an address has heard the news."""

    FRESH = auto()  # it has not been tried with this news
    TRIED = auto()  # it has, in vain so far
    TOLD = auto()  # it has heard it


def _contested_at(state: Membership) -> float | None:
    return state.contested_at if isinstance(state, Serving) else None


class Announcer:
    """Chooses among the standbys of all nodes, and the coordinators at the endpoints.

    ::

        FRESH → TRIED    `next`: it is the turn of this address
        TRIED → TOLD     `told`
        TRIED → FRESH    `next`: there is other news, or the address was not among those that are known
        TOLD → FRESH     likewise

    An address that is fresh is due at once. For some minutes after the newest sign that others lead or look for a
    quorum, the others are due every 5 s, because workers may turn to a standby at any time. Later, those that were
    tried in vain are due every 15 s: a node may be cut off for hours. A standby that gathers members announces that,
    which is such a sign again. An endpoint is always due every 5 s, and at once if its port is closed, because another
    agent may come up there; a standby whose port is closed is gone for good. A coordinator that has never taken over
    from another one, and never lost a worker without a word, has no news unless the job has failed.

    Args:
        port: On which the coordinator listens.
        endpoints: Where newcomers look for the job.

    Attributes:
        news: What is to be told.
    """

    def __init__(self, *, port: int, endpoints: Iterable[Address]) -> None:
        self.port = port
        self.endpoints = tuple(endpoints)
        self._tried: dict[Address, float] = {}  # time of the newest attempt
        self._heard: set[Address] = set()  # where an attempt has succeeded
        self.news = wire.Follow(port, leads=False)
        self._news_at = 0.0

    def has_news(self, state: Membership) -> bool:
        """Whether anybody is to be told anything."""
        return bool(state.failed) or _contested_at(state) is not None

    def next(self, state: Membership, standbys: Iterable[Address], now: float) -> Address | None:
        """Who is to be told next, the newest standbys first, as former ones may not answer any more; None for nobody.

        Args:
            state: What the coordinator has decided.
            standbys: The standbys that it has heard of, the newest last.
            now: Time of a monotonic clock, in seconds.
        """
        if not self.has_news(state):
            return None
        news = wire.Follow(self.port, leads=not state.failed and not state.held, failed=state.failed)
        if news != self.news and (news.leads or news.failed):
            self._tried, self._heard = {}, set()
            self._news_at = now
        self.news = news
        known = dict.fromkeys(reversed(list(standbys)))
        if not state.failed:  # else the next job may be there already
            known.update(dict.fromkeys(self.endpoints))
        self._tried = {address: when for address, when in self._tried.items() if address in known}
        self._heard.intersection_update(known)
        in_doubt = now < max(self._news_at, _contested_at(state) or 0.0) + _IN_DOUBT_S
        for address in known:
            if self._is_due(address, now, in_doubt=in_doubt):
                self._tried[address] = now
                return address
        return None

    def hearer(self, address: Address) -> Hearer:
        """Whether an address has heard the news."""
        if address not in self._tried:
            return Hearer.FRESH
        return Hearer.TOLD if address in self._heard else Hearer.TRIED

    def _is_due(self, address: Address, now: float, *, in_doubt: bool) -> bool:
        hearer = self.hearer(address)
        if hearer is Hearer.FRESH:
            return True
        since_s = now - self._tried[address]
        if in_doubt or address in self.endpoints:
            return since_s >= _AGAIN_S
        return hearer is Hearer.TRIED and since_s >= _RARELY_S

    def told(self, address: Address) -> None:
        """It has been told."""
        self._heard.add(address)

    def refused(self, address: Address) -> bool:
        """Nobody listens there; returns whether nobody ever will again."""
        if address in self.endpoints:  # a coordinator that comes up there must hear it at once
            self._tried[address] = self._tried.get(address, 0.0) - _AGAIN_S + LOOK_S
            return False
        return True
