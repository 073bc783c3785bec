"""The simulated store, which knows who has which claim."""

from __future__ import annotations

from ef_common.core.quorum import Bid

PLACE = "store"
"""Its name in the network."""
ONE = "1" * 32
"""What a worker reads in the one store."""


class ClaimStore:
    """Each claim is created but once; whoever asks for it later is told who has it."""

    def __init__(self) -> None:
        self.winners: dict[str, tuple[str, ...]] = {}

    def get(self, bid: Bid) -> tuple[str, ...]:
        """Whom the claim names: these members, if nobody had it."""
        return self.winners.setdefault(bid.claim, bid.members)
