"""The replay rule: what to do about the collective in flight when the view changes.

Collectives have sequence numbers, and each needs every member before any can complete it. When the members of a new
view exchange how many they have completed, the numbers therefore differ by at most one:

* If all have the same number, a member that is in a collective runs it again, without the lost members.
* If some are one ahead, those behind receive the result from one of them.

A newcomer has nothing yet (it is *fresh*). It only meets members that are all at the same boundary, and receives the
whole state. If all are fresh, the state is lost or does not exist yet, and rank 0's initial state becomes that of all.
Newcomers are lined up in chains, one behind each member that holds the state: each passes the state on while it
receives it, so that many newcomers take little longer than one, and no member sends it twice.
"""

from __future__ import annotations

import itertools
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
        states: Chains of ranks: the first holds the state, and each of the others, which are fresh, receives it from
            the one before.
        restart: Nobody held a state; rank 0's initial one is sent to all others.
    """

    newest: int
    results: tuple[tuple[int, int], ...]
    states: tuple[tuple[int, ...], ...]
    restart: bool


def plan_replay(completed: Sequence[int]) -> Replay:
    """Plan the exchange from each member's number of completed collectives (in rank order).

    Raises:
        ProtocolError: The numbers differ by more than one, or a fresh member met one that is in a step.
    """
    if all(number == FRESH for number in completed):
        return Replay(0, (), _chains([0], range(1, len(completed))), restart=True)
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
    return Replay(newest, results, _chains(holders, fresh), restart=False)


def _chains(holders: Sequence[int], fresh: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Line up the newcomers behind the holders: neighbours in rank order, as those of one node are, in one chain."""
    num = min(len(holders), len(fresh))
    ends = [len(fresh) * chain // num for chain in range(num + 1)] if num else []
    return tuple((holders[i], *fresh[start:end]) for i, (start, end) in enumerate(itertools.pairwise(ends)))
