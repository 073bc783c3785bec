"""The other workers, as `torch.distributed`'s default process group sees them.

Each collective is one of the step in which it is called, so the step is made again if a worker is lost in it; see
:mod:`ef_lightning.repetition`. With a collective in the backward pass, gradients are reduced after that pass.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ef_lightning.collectives import CollectivesMixin


class Workers:
    """The peers of a default group.

    Args:
        strategy: How to reach them.
    """

    def __init__(self, strategy: CollectivesMixin) -> None:
        self._strategy = strategy

    @property
    def rank(self) -> int:
        """Rank in the view that counts for the next step. A newcomer that is not admitted yet comes last."""
        session = self._strategy.session
        if session.newcomer:
            return session.rank
        return session.completed_in.rank_of(session.worker.id) or 0

    @property
    def size(self) -> int:
        """Number of members of that view."""
        session = self._strategy.session
        return session.rank + 1 if session.newcomer else session.completed_in.world_size

    def gather(self, value: Any, call: str) -> list[Any]:
        """Every member's value."""
        return self._strategy.exchange(value, call)

    def add(self, tensor: Tensor, call: str) -> Tensor:
        """The sum."""
        return self._strategy.add(tensor, call)
