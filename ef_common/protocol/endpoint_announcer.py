"""Which endpoints a coordinator tells that it leads or gathers members, and when."""

from __future__ import annotations

from collections.abc import Iterable

from ef_common.core.membership import Membership
from ef_common.protocol import wire
from ef_common.protocol.addresses import Address
from ef_common.protocol.announcer import LOOK_S, has_news, news_of

_AGAIN_S, _AGAIN_EACH_S = 1.0, 0.1


class EndpointAnnouncer:
    """Chooses among the endpoints.

    An agent that knows nothing of the job may come up at one of them at any time, and found the job anew. So an
    endpoint whose port is closed is due again the next time that somebody looks, and one that has heard the news a
    second after the attempt; of more than ten of these, ten are due in a second. One of N whose hosts do not answer is
    due again after N seconds, so that nobody waits for long behind them.

    When the job has ended, the next one may be at the endpoints already. Therefore nobody there hears of the end. Only
    a coordinator that has heard that this one leads, and has not been seen to be gone since, hears of a failure:
    members may gather there.

    Args:
        port: On which the coordinator listens.
        endpoints: Where newcomers look for the job.
        job: Name of the job; "" if it has none.

    Attributes:
        endpoints: Likewise.
        news: What is to be told.
    """

    def __init__(self, *, port: int, endpoints: Iterable[Address], job: str = "") -> None:
        self.endpoints = tuple(endpoints)
        self.news = wire.Follow(port, leads=False, job=job)
        self._due: dict[Address, float] = {}
        self._followers: set[Address] = set()  # who has heard that this coordinator leads

    def next(self, state: Membership, now: float) -> Address | None:
        """Who is to be told next; None for nobody.

        Args:
            state: What the coordinator has decided.
            now: Time of a monotonic clock, in seconds.
        """
        if not has_news(state):
            return None
        had_failed = bool(self.news.failed)
        self.news = news_of(state, port=self.news.port, job=self.news.job)
        if state.failed and not had_failed:
            self._due = {}
        among = [one for one in self.endpoints if one in self._followers or not state.failed]
        endpoint = min(among, key=self._due_at, default=None)
        if endpoint is None or self._due_at(endpoint) > now or (state.closed and not state.failed):
            return None
        self._due[endpoint] = now + LOOK_S
        return endpoint

    def _due_at(self, endpoint: Address) -> float:
        return self._due.get(endpoint, 0.0)

    def told(self, endpoint: Address) -> None:
        """It has been told."""
        self._due[endpoint] = self._due_at(endpoint) - LOOK_S + max(_AGAIN_S, _AGAIN_EACH_S * len(self.endpoints))
        if self.news.leads:
            self._followers.add(endpoint)
        else:
            self._followers.discard(endpoint)

    def refused(self, endpoint: Address) -> None:
        """Nobody listens there now."""
        self._followers.discard(endpoint)

    def unanswered(self, endpoint: Address, now: float) -> None:
        """An attempt has come to nothing, and that took until now: others have their turn before it is made again."""
        self._due[endpoint] = now + _AGAIN_S * len(self.endpoints)  # as many such attempts take half of the time
