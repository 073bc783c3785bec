"""Tells the user's code of workers that join or leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ef_common.session import Session


def hook_of(owner: object) -> Callable[..., Any]:
    """The `on_workers_changed` of the user's callback or module; without one, a function that does nothing."""
    found: Callable[..., Any] = getattr(owner, "on_workers_changed", _ignore)
    return found


def _ignore(*args: Any) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class WorkersChange:
    """Workers have joined or left since the last step. All workers hear of the same changes, at the same steps.

    Args:
        rank: Rank of this worker from now on.
        world_size: Number of workers that train, from now on.
        previous_world_size: Number of them before.
        num_joined: Workers that have come. This one may be among them.
        num_left: Workers that are gone: lost, or told to leave.
    """

    rank: int
    world_size: int
    previous_world_size: int
    num_joined: int
    num_left: int


class WorkersWatch:
    """Notices changes of the workers in one training.

    It compares the members of `completed_in` from step to step, so it sees the same in all of them. A newcomer is told
    of the change with which it comes, as the others are: the members before it travel with the state.

    Args:
        session: The worker's session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ids: tuple[str, ...] | None = None

    def look(self) -> WorkersChange | None:
        """Compare the members at each step, once its view is known. The first look in a training sees no change."""
        before, ids = self._ids, self._session.completed_in.ids
        if before is ids:
            return None
        self._ids = ids
        if before is None or before == ids:
            return None
        return WorkersChange(
            rank=self._session.completed_in.rank_of(self._session.worker.id) or 0,
            world_size=len(ids),
            previous_world_size=len(before),
            num_joined=len(set(ids) - set(before)),
            num_left=len(set(before) - set(ids)),
        )

    def state(self) -> list[str] | None:
        """For newcomers: the members so far."""
        return None if self._ids is None else list(self._ids)

    def load_state(self, state: Sequence[str] | None) -> None:
        """Continue from the others' state; None at a start, which is no change."""
        self._ids = None if state is None else tuple(state)
