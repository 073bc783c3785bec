"""Logs that end while their workers train on, as on a full disk: what they lack may be the cause of a violation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ef_common.audit.history import History

__all__ = ["ended_early"]

_Place = tuple[int, int]
"""Number of the training, and the step."""
_NUM_LACKED = 2
"""A worker that was killed lacks at most one step: between its commit and its log line."""


def ended_early(histories: Sequence[History]) -> dict[str, int]:
    """Find the workers that have trained on after their logs end, and the last step in each log.

    All members of a view take part in each of its steps, so others' records tell of them.

    Args:
        histories: One for each training of the program.
    """
    members = {view.generation: view.members for view in histories[0].views}
    places: defaultdict[int, set[_Place]] = defaultdict(set)
    last: dict[str, tuple[int, _Place]] = {}  # with the generation, in which the order of places is that of time
    for training, history in enumerate(histories, start=1):
        for step in history.steps:
            place = training, step.step
            places[step.generation].add(place)
            last[step.worker] = max(last.get(step.worker, (-1, place)), (step.generation, place))
    lacked: dict[str, int] = dict.fromkeys(last, 0)
    for generation, found in places.items():
        for worker in members.get(generation, ()):
            if worker not in last:
                continue  # it may not have been admitted yet
            until, newest = last[worker]
            if generation == until:
                lacked[worker] += sum(place > newest for place in found)
            elif generation > until:
                lacked[worker] += len(found)
    return {worker: last[worker][1][1] for worker, number in sorted(lacked.items()) if number >= _NUM_LACKED}
