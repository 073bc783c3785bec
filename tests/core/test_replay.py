from __future__ import annotations

import pytest

from ef_common.core.replay import FRESH, plan_replay
from ef_common.errors import ProtocolError

Pairs = tuple[tuple[int, ...], ...]


@pytest.mark.parametrize(
    ("completed", "newest", "results", "states", "restart"),
    [
        ([7], 7, (), (), False),
        ([7, 7, 7], 7, (), (), False),
        ([7, 8], 8, ((1, 0),), (), False),
        ([8, 7, 7, 7], 8, ((0, 1), (0, 2), (0, 3)), (), False),
        ([8, 7, 8, 7, 7], 8, ((0, 1), (2, 3), (0, 4)), (), False),  # those ahead share the work
        ([5, FRESH], 5, (), ((0, 1),), False),
        ([5, 5, FRESH, FRESH, FRESH], 5, (), ((0, 2), (1, 3, 4)), False),  # those who hold the state share the work
        ([5, 5, 5, FRESH], 5, (), ((0, 3),), False),
        ([FRESH, 0], 0, (), ((1, 0),), False),  # rank 0 may be the one that is fresh
        ([FRESH], 0, (), (), True),
        ([FRESH, FRESH, FRESH], 0, (), ((0, 1, 2),), True),
    ],
)
def test_plan_replay_gives_each_what_it_lacks(
    completed: list[int], newest: int, results: Pairs, states: Pairs, restart: bool
) -> None:
    replay = plan_replay(completed)

    assert (replay.newest, replay.results, replay.states, replay.restart) == (newest, results, states, restart)


@pytest.mark.parametrize(
    ("completed", "told"),
    [
        ([7, 9], "lag by more than one"),
        ([0, 5, 5], "lag by more than one"),
        ([7, 8, FRESH], "a newcomer met members in a step"),
    ],
)
def test_plan_replay_of_what_cannot_be_raises(completed: list[int], told: str) -> None:
    with pytest.raises(ProtocolError, match=told):
        plan_replay(completed)
