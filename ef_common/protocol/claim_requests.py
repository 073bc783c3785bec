"""The claims for which a worker asks its store, because a coordinator wants to know who has them."""

from __future__ import annotations

from ef_common.core.quorum import Bid

AGAIN_S = 1.0
"""How long after a request to which the store has not answered there is another one."""


class ClaimRequests:
    """Keeps at most one request for each claim under way, until the store has answered.

    ::

        none → asked      `want`: a coordinator wants to know who has the claim
        asked → put_off   `put_off`: the store has not answered
        put_off → asked   `again`: a second has passed
        asked → none      `settle`: the store has answered
    """

    def __init__(self) -> None:
        self._due: dict[Bid, float | None] = {}  # when to ask again; None while a request is under way

    @property
    def due(self) -> float | None:
        """When :meth:`again` is to be called, or None."""
        return min((time for time in self._due.values() if time is not None), default=None)

    def want(self, bid: Bid) -> tuple[Bid, ...]:
        """A coordinator wants to know who has a claim; returns what to ask for now. It may want that repeatedly."""
        if bid in self._due:  # whoever leads then gets the answer
            return ()
        self._due[bid] = None
        return (bid,)

    def put_off(self, bid: Bid, now: float) -> None:
        """The store has not answered."""
        if bid in self._due:
            self._due[bid] = now + AGAIN_S

    def again(self, now: float) -> tuple[Bid, ...]:
        """What to ask for once more."""
        bids = tuple(bid for bid, due in self._due.items() if due is not None and now >= due)
        self._due |= dict.fromkeys(bids)
        return bids

    def settle(self, bid: Bid) -> bool:
        """The store has answered; returns whether a coordinator wanted to know that."""
        was_wanted = bid in self._due
        self._due.pop(bid, None)
        return was_wanted
