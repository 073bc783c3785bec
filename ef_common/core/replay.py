"""The replay rule: what to do about the collective in flight when the view changes.

Collectives have sequence numbers, and each needs every member before any can complete it. When the members of a new
view exchange how many they have completed, the numbers therefore differ by at most one:

* If all have the same number, a member that is in a collective runs it again, without the lost members.
* If some are one ahead, those behind receive the result from one of them.

A newcomer has nothing yet (it is *fresh*). It only meets members that are all at the same boundary, and receives the
whole state from one of them. If all are fresh, the state is lost or does not exist yet, and rank 0's initial state
becomes that of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ef_common.errors import ProtocolError

FRESH = -1
"""Sequence number of a member that holds no state."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What the members of a new view owe each other.

    Args:
        newest: Number of collectives completed by the foremost member.
        results: (source, target) ranks: target is one behind and receives the newest result.
        states: (source, target) ranks: target is fresh and receives the state.
        restart: Nobody held a state; rank 0's initial one is sent to all others.
        reason: One line, for the log.
    """

    newest: int
    results: tuple[tuple[int, int], ...]
    states: tuple[tuple[int, int], ...]
    restart: bool
    reason: str


def plan_replay(completed: Sequence[int]) -> Replay:
    """Plan the exchange from each member's number of completed collectives (in rank order).

    Raises:
        ProtocolError: The numbers differ by more than one, or a fresh member met one that is in a step.
    """
    if all(number == FRESH for number in completed):
        states = tuple((0, rank) for rank in range(1, len(completed)))
        return Replay(0, (), states, restart=True, reason="nobody holds a state: start from rank 0's")
    holders = [rank for rank, number in enumerate(completed) if number != FRESH]
    fresh = [rank for rank, number in enumerate(completed) if number == FRESH]
    newest = max(completed)
    ahead = [rank for rank in holders if completed[rank] == newest]
    behind = [rank for rank in holders if completed[rank] != newest]
    if any(completed[rank] != newest - 1 for rank in behind):
        raise ProtocolError(f"members lag by more than one collective. Received: completed={list(completed)}")
    if fresh and behind:
        raise ProtocolError(f"a newcomer met members in a step. Received: completed={list(completed)}")
    results = tuple((ahead[i % len(ahead)], rank) for i, rank in enumerate(behind))
    states = tuple((holders[i % len(holders)], rank) for i, rank in enumerate(fresh))
    if results:
        reason = f"{len(results)} of {len(completed)} receive the result of collective {newest}"
    elif states:
        reason = f"{len(states)} of {len(completed)} receive the state"
    else:
        reason = f"all have completed {newest} collectives"
    return Replay(newest, results, states, restart=False, reason=reason)
