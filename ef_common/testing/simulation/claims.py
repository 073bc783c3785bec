"""The simulated store: who has which claim."""

from __future__ import annotations

from ef_common.core.quorum import Half

PLACE = "store"
"""Its name in the network."""
ONE = "1" * 32
"""What a worker reads in the one store."""


class ClaimStore:
    """Each claim is created but once; whoever asks for it later is told who has it."""

    def __init__(self) -> None:
        self.winners: dict[str, tuple[str, ...]] = {}

    def get(self, half: Half) -> bool:
        """Whether these members have the claim; they get it if nobody has it."""
        return self.winners.setdefault(half.claim, half.winner) == half.winner
