"""Decides who keeps the others waiting, from the progress that the members report.

A member *waits* in a collective, at a boundary, or while a view settles; otherwise it computes. Its *position* is the
view and the collective that it waits for, or will wait for next. A member *lags* if it computes, or if it waits at an
earlier position than another one. It hangs if all others have waited for longer than its limit, and it has not moved in
that time.

The limit is learned from the run, because nobody knows in advance how long a step takes. There are three kinds of
computing spans:

* STEP: from the dealing of a batch to the end of its reduction, ``max(90 s, 10 × longest STEP, 2 × longest FIRST)``;
* FIRST: the same, in the first steps of a worker, where kernels are compiled and caches are filled;
* OTHER: everything else (evaluations, checkpoints, callbacks).

Spans of the last two kinds may take long: ``max(600 s, 2 × longest of the kind)``. The same limit applies to steps in
which more than half of the members lag, because a stalled storage may be the cause. If all wait for the same collective
and nobody moves, nobody is to blame: all try again, in a new view, and a member that does not enter it lags.

Times count from when the view reached its members at the earliest, so that nothing from before is held against anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

STEP, FIRST, OTHER, BOUNDARY = "step", "first", "other", "boundary"
KINDS = (STEP, FIRST, OTHER, BOUNDARY)
DEFAULT_HEARTBEAT_TIMEOUT_S = 5.0
"""Compilers and loaders hold Python's lock for two seconds now and then; a worker that dies is noticed without this."""
SETTLING = -1
"""Number of the collective, while a view settles."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress that a member reports; durations in seconds.

    Args:
        generation: Generation of the view that it is in, or that it settles.
        number: Collectives that it has completed; `SETTLING`.
        waits: Whether it waits for the others; otherwise it computes.
        kind: The kind of computation that it does, or that it interrupts to wait.
        for_s: For how long it has done so.
        longest_step_s: Its longest span of the kind STEP that has ended, without waiting.
        longest_first_s: The same for the kind FIRST.
        longest_other_s: The same for the kind OTHER.
        num_samples: Samples trained in steps of the kind STEP so far, as far as these steps show how fast it is.
        computing_s: Time that these steps took, without waiting. A single step that stood still counts less.
        waiting_s: Time spent waiting in them.
        evicts_stragglers: Its user wants stragglers to be replaced.
    """

    generation: int
    number: int
    waits: bool
    kind: str
    for_s: float
    longest_step_s: float = 0.0
    longest_first_s: float = 0.0
    longest_other_s: float = 0.0
    num_samples: int = 0
    computing_s: float = 0.0
    waiting_s: float = 0.0
    evicts_stragglers: bool = False

    @property
    def position(self) -> tuple[int, int]:
        """Positions only grow, and are ordered."""
        return self.generation, self.number


@dataclass(frozen=True, slots=True)
class Heard:
    """A member's report, and when it arrived."""

    progress: Progress
    at: float

    def since(self, earliest: float) -> float:
        """Since when the member has been doing what it reports."""
        return max(earliest, self.at - self.progress.for_s)


@dataclass(frozen=True, slots=True)
class Limits:
    """When a member is hung; durations in seconds.

    Args:
        hang_timeout_s: The limit of a STEP, in place of the learned one; 0: nobody ever counts as hung.
        floor_s: Lower bound of the learned limit of a STEP. TensorFlow may stand still for 60 s when an iterator of
            tf.data is freed: the thread that tunes the iterator can miss its cancellation until its period is over.
        unknown_s: Lower bound of the limit for the other kinds.
        factor: The learned limit of a STEP is this many times the longest one.
        slack: The limit of another kind is this many times the longest span of that kind.
    """

    hang_timeout_s: float | None = None
    floor_s: float = 90.0
    unknown_s: float = 600.0
    factor: float = 10.0
    slack: float = 2.0


@dataclass(frozen=True, slots=True)
class Longest:
    """The longest spans of a run that ended well, in seconds."""

    step_s: float = 0.0
    first_s: float = 0.0
    other_s: float = 0.0

    def and_of(self, progress: Progress) -> Longest:
        """The longest spans including those of one more member."""
        return Longest(
            max(self.step_s, progress.longest_step_s),
            max(self.first_s, progress.longest_first_s),
            max(self.other_s, progress.longest_other_s),
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with the members of a view.

    Args:
        hung: Members that keep the others waiting.
        stuck: All wait for the same, and nothing moves.
        why: In one line.
    """

    hung: tuple[str, ...] = ()
    stuck: bool = False
    why: str = ""


def limit_of(kind: str, longest: Longest, limits: Limits, *, few: bool = True) -> float:
    """How long a member may keep the others waiting, in seconds.

    Args:
        kind: The kind of its computation.
        longest: The longest spans of the run so far.
        limits: Settings.
        few: No more than half of the members lag.
    """
    unknown_s = max(limits.unknown_s, limits.hang_timeout_s or 0.0)
    if kind == FIRST:
        return max(unknown_s, limits.slack * longest.first_s)
    if kind != STEP:
        return max(unknown_s, limits.slack * longest.other_s)
    limit_s = max(limits.floor_s, limits.factor * longest.step_s, limits.slack * longest.first_s)
    if limits.hang_timeout_s is not None:
        limit_s = limits.hang_timeout_s
    return limit_s if few else max(limit_s, unknown_s)


def judge(
    members: Sequence[str],
    heard: Mapping[str, Heard],
    *,
    now: float,
    earliest: float,
    fresh: float,
    longest: Longest,
    limits: Limits,
) -> Verdict:
    """Judge the members of a view.

    Args:
        members: The members that are there.
        heard: Their reports.
        now: Time of a monotonic clock, in seconds.
        earliest: When their view came to them.
        fresh: Reports from before this time are ignored.
        longest: The longest spans of the run so far.
        limits: Settings.
    """
    told = {member: heard[member] for member in members if member in heard and heard[member].at >= fresh}
    if limits.hang_timeout_s == 0 or len(told) < len(members) or len(members) < 2:
        return Verdict()
    waiting = [one.progress.position for one in told.values() if one.progress.waits]
    if not waiting:
        return Verdict()
    foremost = max(waiting)
    lagging = {
        member: one for member, one in told.items() if not one.progress.waits or one.progress.position < foremost
    }
    waited_s = now - max(one.since(earliest) for member, one in told.items() if member not in lagging)
    if not lagging:
        return _stuck(told.values(), waited_s, longest, limits)
    few = 2 * len(lagging) <= len(members)
    hung = []
    for member, one in lagging.items():
        limit_s = limit_of(one.progress.kind, longest, limits, few=few)
        if min(waited_s, now - one.since(earliest)) > limit_s:
            hung.append((member, limit_s))
    if not hung:
        return Verdict()
    names, limit_s = ", ".join(member for member, _ in hung), min(limit_s for _, limit_s in hung)
    why = f"{names} hung: the others have waited for {waited_s:.1f} s, and the limit is {limit_s:.1f} s"
    return Verdict(tuple(member for member, _ in hung), why=why)


def _stuck(told: Iterable[Heard], waited_s: float, longest: Longest, limits: Limits) -> Verdict:
    if all(one.progress.kind == BOUNDARY for one in told):
        return Verdict()  # for more workers, mostly
    limit_s = limit_of(OTHER, longest, limits)
    if waited_s <= limit_s:
        return Verdict()
    return Verdict(stuck=True, why=f"all members wait, and nothing has moved for {waited_s:.1f} s")
