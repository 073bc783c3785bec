"""The other workers, as `torch.distributed`'s default process group sees them.

Each collective is one of the step in which it is called, so the step is made again if a worker is lost in it; see
:mod:`ef_lightning.repetition`. With a collective in the backward pass, gradients are reduced after that pass.

Where no step is made again, as in a hook, the ranks stay those with which the code of the hook has begun. They follow
the members when a step of training or evaluation begins, and when the session has completed any other collective. All
members make the same steps and run the same collectives, so they follow at the same place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ef_common.core.view import View
from ef_lightning.collectives import CollectivesMixin


class Workers:
    """The peers of a default group.

    Args:
        strategy: How to reach them.
    """

    def __init__(self, strategy: CollectivesMixin) -> None:
        self._strategy = strategy
        self._ranked: View | None = None
        self._completed = 0  # collectives of the session, when the group last had one

    @property
    def rank(self) -> int:
        """Rank of this worker. A newcomer that is not admitted yet comes last."""
        session = self._strategy.session
        return session.rank if session.newcomer else self._view().rank_of(session.worker.id) or 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        session = self._strategy.session
        return session.rank + 1 if session.newcomer else self._view().world_size

    def follow(self) -> None:
        """The ranks are those of the members from here on."""
        self._ranked = None

    def gather(self, value: Any, call: str) -> dict[int, Any]:
        """The value of each rank that is not lost; this worker's for all of them, if nobody else answers."""
        ranks = self._view().rank_of
        values, view = self._strategy.exchange(value, call)
        self._completed = self._strategy.session.completed
        if view is None or not view.generation:
            return dict.fromkeys(range(self.size), values[0])
        return {rank: v for worker, v in zip(view.ids, values, strict=True) if (rank := ranks(worker)) is not None}

    def add(self, tensor: Tensor, call: str) -> Tensor:
        """The sum."""
        self._view()
        total = self._strategy.add(tensor, call)
        self._completed = self._strategy.session.completed
        return total

    def _view(self) -> View:
        """The view whose ranks count."""
        session = self._strategy.session
        if self._ranked is None or session.completed != self._completed:
            self._ranked, self._completed = session.completed_in, session.completed
        return self._ranked
