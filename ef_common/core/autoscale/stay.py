"""The present stay at a size: whether it is a trial, and what is to be done before any policy is asked.

A *stay* is the time between two changes of size. It is a *trial* if the size was never measured before, or if the job
had been at the same size for long before. A trial is judged, and may end by the choice of any size. Any other stay is a
*return*: what is known was known when the job went there, so it ends only for a size that was never measured, or after
patience. Without this distinction the noise of two measures of the same sizes would send the job back and forth.

A return is a second measure of what the trial has measured, with the drift in the opposite direction. If the mean of
both says that a size was left by mistake, the job goes there once more; each size has this chance once, and soon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ef_common.core.autoscale.policy import Situation, Target
from ef_common.core.throughput import MOST_WINDOWS, Trial

_MOST_DOUBLINGS = 3
_SLACK = 0.9  # a measure ends a little before the policy is asked


@dataclass(frozen=True, slots=True)
class SizeStay:
    """The present stay.

    Args:
        trial: The trial with which it has begun; None at the beginning of a run, and after a long gap.
        is_trial: Whether the size is on trial.
        since: When the last change of size was measured (epoch seconds).
    """

    trial: Trial | None
    is_trial: bool
    since: float

    @property
    def may_go_on(self) -> bool:
        """Whether the trial can still become more precise."""
        return self.is_trial and self.trial is not None and self.trial.windows < MOST_WINDOWS


def stay_of(situation: Situation, retry_s: float) -> SizeStay:
    """The present stay.

    Args:
        situation: The situation, with a measure of the present size.
        retry_s: For how long the job is at the same size before it tries a measured one again.
    """
    trials, size = situation.history.trials, situation.size
    if not trials:
        return SizeStay(None, True, 0.0)
    if trials[-1].after.size != size:
        return SizeStay(None, False, trials[-1].at)
    trial, earlier = trials[-1], trials[:-1]
    is_first = not any(size in one.sizes for one in earlier)
    had_rest = bool(earlier) and trial.before.at - earlier[-1].at >= _SLACK * retry_s
    return SizeStay(trial, is_first or had_rest, trial.at)


def curve_of(situation: Situation, stay: SizeStay) -> dict[int, float]:
    """The throughputs of the sizes within the limits, as they would be now; after a return the mean of both ways."""
    history = situation.history
    known = history.curve(situation.size)
    if stay.trial is not None and not stay.is_trial:
        before = replace(history, trials=history.trials[:-1]).curve(situation.size)
        known = {size: math.sqrt(one * before.get(size, one)) for size, one in known.items()}
    return {size: one for size, one in known.items() if situation.least <= size <= situation.most}


def was_left_once(situation: Situation, size: int, retry_s: float) -> bool:
    """Whether the job has been at this size only once, a short while ago."""
    trials = situation.history.trials
    visits = [trial.at for trial in trials if trial.after.size == size]
    began_there = trials[0].before.size == size if trials else True
    return len(visits) == 1 and not began_there and situation.now - visits[0] < retry_s


def first(situation: Situation) -> Target | str | None:
    """What comes before any policy.

    Returns:
        A target, if the job is outside its limits or not where it was wanted; a word, if the policy must wait for a
        measure of the present size; None, if it may decide.
    """
    size, least, most, history = situation.size, situation.least, situation.most, situation.history
    if not least <= size <= most:
        return Target(situation.bounded(size), f"{nodes(size)} are outside of the limits, {least} to {most}")
    if history.wanted not in (0, size) and least <= history.wanted <= most:
        return Target(history.wanted, f"{size} of the {nodes(history.wanted)} wanted are there")
    if history.newest is None or history.newest.size != size:
        return "not measured"
    return None


def to_retry(situation: Situation, stay: SizeStay, retry_s: float) -> int | None:
    """The neighbour among the measured sizes that is to be tried again: the one that was there the longest ago.

    The patience doubles with each trial of it, up to eight times `retry_s`.
    """
    history, size, now = situation.history, situation.size, situation.now
    known = curve_of(situation, stay)
    neighbours = [max((one for one in known if one < size), default=None)]
    neighbours.append(min((one for one in known if one > size), default=None))
    due: list[tuple[float, int]] = []
    for neighbour in filter(None, neighbours):
        trials = [trial for trial in history.trials if trial.after.size == neighbour]
        patience_s = retry_s * 2 ** min(_MOST_DOUBLINGS, max(0, len(trials) - 1))
        if now - stay.since >= patience_s:
            due.append((max((trial.at for trial in trials), default=0.0), neighbour))
    return min(due)[1] if due else None


def nodes(number: int) -> str:
    """A number of nodes, for people."""
    return "1 node" if number == 1 else f"{number} nodes"
