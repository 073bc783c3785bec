"""Finds members that are slower than the others, by their smoothed throughput.

The throughput of a member is samples per second of computing, without waiting, over about the last 20 s: sums that
fade as ``exp(-t / 20 s)``. Its ratio is that to the median of the others' (as in Or, Zhang and Freedman, *Resource
Elasticity in Distributed Deep Learning*, 2020)::

    WELL → SLOW        the ratio is below 0.8
    SLOW → WELL        it is not
    SLOW → STRAGGLER   it has been below 0.8 for 30 s
    STRAGGLER → WELL   it is 0.9 or more
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from ef_common.core.progress import Progress

_LEAST_S = 1e-6


class StragglerState(Enum):
    """How the pace of a member compares with that of the others."""

    WELL = auto()
    SLOW = auto()  # for a moment
    STRAGGLER = auto()  # for long


@dataclass(frozen=True, slots=True)
class Pacing:
    """The limits for stragglers; durations in seconds.

    Args:
        slow: Ratio below which a member is slow.
        well: Ratio above which it no longer is.
        smooth_s: Time constant of the fading sums: values from that long ago count for about a third.
        after_s: A member is a straggler when it has been slow for this long.
    """

    slow: float = 0.8
    well: float = 0.9
    smooth_s: float = 20.0
    after_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Track:
    """What is known about a member's pace.

    Args:
        told: Its newest report.
        at: When.
        num_samples: Fading sum of the samples that it has trained on.
        computing_s: Fading sum of the time that took.
        waiting_s: Fading sum of its waiting meanwhile.
        state: Whether it is slow, and for how long.
        slow_since: Since when it is below the ratio.
    """

    told: Progress
    at: float
    num_samples: float = 0.0
    computing_s: float = 0.0
    waiting_s: float = 0.0
    state: StragglerState = StragglerState.WELL
    slow_since: float | None = None

    @property
    def is_straggler(self) -> bool:
        """Whether it is a straggler."""
        return self.state is StragglerState.STRAGGLER

    @property
    def throughput(self) -> float:
        """The throughput in samples per second; 0 if nothing is known."""
        return self.num_samples / self.computing_s if self.computing_s > _LEAST_S else 0.0


@dataclass(frozen=True, slots=True)
class StragglerReport:
    """A member has become a straggler, or is no longer one.

    Args:
        worker: The member.
        slow: Whether it is a straggler.
        ratio: Ratio of its throughput to that of the others.
        waiting: Part of the others' training steps that they wait in.
    """

    worker: str
    slow: bool
    ratio: float
    waiting: float


def noted(track: Track | None, told: Progress, now: float, pacing: Pacing) -> Track:
    """Note a member's progress."""
    if track is None:
        return Track(told, now)
    fade, before = math.exp(-(now - track.at) / pacing.smooth_s), track.told
    return replace(
        track,
        told=told,
        at=now,
        num_samples=track.num_samples * fade + max(0, told.num_samples - before.num_samples),
        computing_s=track.computing_s * fade + max(0.0, told.computing_s - before.computing_s),
        waiting_s=track.waiting_s * fade + max(0.0, told.waiting_s - before.waiting_s),
    )


def judge_pace(
    tracks: Mapping[str, Track], members: Sequence[str], now: float, pacing: Pacing
) -> tuple[dict[str, Track], tuple[StragglerReport, ...]]:
    """Compare the members of a view.

    Args:
        tracks: Tracks of all members that have reported.
        members: Members of the view.
        now: Time of a monotonic clock, in seconds.
        pacing: Settings.

    Returns:
        The tracks that have changed, and what that means.
    """
    known = [(tracks[member], member) for member in members if member in tracks and tracks[member].throughput > 0]
    known.sort(key=lambda one: one[0].throughput)
    throughputs = [track.throughput for track, _ in known]
    after, reports = {}, []
    for index, (track, member) in enumerate(known):
        if len(known) < 2:
            break
        ratio = track.throughput / _median_without(throughputs, index)
        is_slow = ratio < (pacing.well if track.is_straggler else pacing.slow)
        state, since = _state_after(track, now, pacing, is_slow=is_slow)
        if state is track.state:
            continue
        after[member] = replace(track, state=state, slow_since=since)
        is_straggler = state is StragglerState.STRAGGLER
        if is_straggler != track.is_straggler:
            others = [other for other, name in known if name != member]  # never a difference of sums, which may be 0
            wait_s = sum(other.waiting_s for other in others)
            waiting = wait_s / (wait_s + sum(other.computing_s for other in others))
            reports.append(StragglerReport(member, is_straggler, ratio, waiting))
    return after, tuple(reports)


def _state_after(track: Track, now: float, pacing: Pacing, *, is_slow: bool) -> tuple[StragglerState, float | None]:
    """The state of a member, and since when it is slow."""
    if not is_slow:
        return StragglerState.WELL, None
    since = now if track.slow_since is None else track.slow_since
    is_straggler = track.is_straggler or now - since >= pacing.after_s
    return StragglerState.STRAGGLER if is_straggler else StragglerState.SLOW, since


def _median_without(ordered: Sequence[float], index: int) -> float:
    """The median of all members but one."""
    num = len(ordered) - 1

    def other(place: int) -> float:
        return ordered[place if place < index else place + 1]

    return (other((num - 1) // 2) + other(num // 2)) / 2


def slow(tracks: Mapping[str, Track], members: Collection[str]) -> tuple[str, ...]:
    """The stragglers among these members, the one with the lowest throughput first."""
    found = [member for member in members if member in tracks and tracks[member].is_straggler]
    return tuple(sorted(found, key=lambda member: tracks[member].throughput))
