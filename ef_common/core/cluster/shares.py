"""How many pods each job has, and which of those that it has: minimum first, then max-min fair.

1. *Those that have their minimum*, each pod of it on a node, keep it.
2. *The others*, by priority and age, get theirs, all of it or nothing. What the first group has beyond its minimum is
   taken for it. If one cannot have its minimum although it would fit into the cluster alone, those behind it wait,
   too: else small jobs could pass a large one for ever. Meanwhile nothing is idle, as the jobs that run grow.
3. *What is left* goes, one pod at a time, to the job that has the fewest, until nobody can have more. So no job can
   have more without one that has no more than it having less. Among equals, those that have the pods already keep them.
   With `Policy.PRIORITY`, it goes to the jobs of the highest priority until none of them can have more, and then to
   those of the next one.
4. *A job that trained, and cannot have its minimum any more*, keeps the pods for which there is still room: they hold
   its state.
5. *Spares* get what is left then, one at a time, too. Their room is the first that is taken for others.

Of its pods, a job first gives up those that are pending, then those that run and do not train yet, then those that slow
the others down, then the newest, and last of all the one of rank 0: newcomers are told of it first, and it takes the
checkpoints.

Cost: O((jobs + new pods) · nodes) comparisons, and O(pods · log jobs).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ef_common.core.cluster.placement import FreeCapacity, could_ever_fit
from ef_common.core.cluster.policy import SharePolicy
from ef_common.core.cluster.state import Job, JobPhase, Node, Pod


@dataclass(slots=True)
class Share:
    """What a job has.

    Args:
        job: It.
        kept: Its pods that stay.
        new: How many are to be created now.
        later: How many are to be created as soon as others have gone.
        spares: How many of all these are spares.
        waits: It cannot have its minimum.
    """

    job: Job
    kept: list[Pod] = field(default_factory=list)
    new: int = 0
    later: int = 0
    spares: int = 0
    waits: bool = False

    @property
    def size(self) -> int:
        """How many pods it shall have."""
        return len(self.kept) + self.new + self.later


_LAST = 2**40
"""Tier of the spares."""


def shares(
    jobs: Sequence[Job],
    nodes: Sequence[Node],
    *,
    taking: Iterable[Pod],
    limits: dict[str, int],
    spares: dict[str, int] | None = None,
    policy: SharePolicy = SharePolicy.FAIR,
) -> list[Share]:
    """The shares of all jobs.

    Args:
        jobs: Those that may have pods.
        nodes: The nodes.
        taking: All pods that take room now, also of other jobs.
        limits: How many pods each job may have, by its key.
        spares: How many more each one may have as spares; None for nobody.
        policy: In which order the jobs get what is left.
    """
    depths = {
        pod.uid: (policy.tier(job) if depth < limits[job.key] else _LAST, depth)
        for job in jobs
        for depth, pod in enumerate(_in_order(job))
    }
    room = FreeCapacity(nodes, taking, depths)
    ranked = sorted(jobs, key=lambda job: job.rank)
    dealt = [_Dealing(job, room, limits[job.key], tier=policy.tier(job)) for job in ranked]
    for one in dealt:
        if sum(bool(pod.node) for pod in one.share.job.alive) >= one.minimum:
            one.grow_to_minimum()
    barred = False
    for one in dealt:
        if one.share.size < one.minimum and (barred or not one.grow_to_minimum()):
            one.share.waits = True
            barred = barred or (one.limit >= one.minimum and could_ever_fit(one.share.job, nodes))
    _deal_the_rest([one for one in dealt if not one.share.waits])
    for one in dealt:
        if one.share.waits and one.share.job.record.phase is JobPhase.RUNNING:
            one.keep_what_fits()
    _deal_spares(dealt, spares or {})
    return [one.share for one in dealt]


class _Dealing:
    """A job, while shares are dealt.

    Args:
        job: It.
        room: What is left.
        limit: How many pods it may have.
        tier: The jobs of the lowest one get what is left first.
    """

    def __init__(self, job: Job, room: FreeCapacity, limit: int, *, tier: int) -> None:
        self.share = Share(job)
        self.minimum = job.minimum
        self.limit = limit
        self._room, self._tier = room, tier
        self._nodes = room.among(job.nodes)
        self._has = _in_order(job)

    @property
    def turn(self) -> tuple[int, int, bool]:
        """When it is its turn to take one more, which it may have already."""
        return self._tier, self.share.size, not self._has

    def forget_displaced(self) -> None:
        """Its next pod is one whose room nobody else has got."""
        while self._has and self._has[0].node and not self._room.can_keep(self._has[0]):
            self._has.pop(0)

    def grow(self) -> bool:
        """Take one pod more, if that is possible."""
        if self.share.size >= self.limit:
            return False
        while self._has:
            pod = self._has.pop(0)
            if self._room.keep(pod) if pod.node else self._room.place(pod.request, self._nodes) is not None:
                self.share.kept.append(pod)
                return True
        now = self._room.place(self.share.job.request, self._nodes)
        if now is None:
            return False
        self.share.new += now
        self.share.later += not now
        return True

    def grow_to_minimum(self) -> bool:
        """Take the minimum, or nothing."""
        mark = self._room.mark()
        before = list(self._has)
        while self.share.size < self.minimum:
            if not self.grow():
                self._room.undo(mark)
                self.share = Share(self.share.job, waits=True)
                self._has = before
                return False
        self.share.waits = False
        return True

    def keep_what_fits(self) -> None:
        """Keep pods that are somewhere, as long as nobody needs their room."""
        self.share.kept += [pod for pod in self._has if pod.node and self._room.keep(pod)]


def _in_order(job: Job) -> list[Pod]:
    """The pods of a job in the order in which they are kept."""
    first = "" if job.report is None else job.report.first

    def order(pod: Pod) -> tuple[bool, bool, bool, bool, bool, float, int]:
        is_first = bool(first) and pod.address == first
        return not pod.running, not pod.node, not is_first, pod.idle, pod.slow, pod.created, pod.index

    return sorted(job.alive, key=order)


def _deal_spares(dealt: list[_Dealing], spares: dict[str, int]) -> None:
    """Deal what is left. A job that lacks workers finds no room now, either."""
    trains = [one for one in dealt if not one.share.waits]
    before = [one.share.size for one in trains]
    for one in trains:
        one.limit += spares.get(one.share.job.key, 0)
    _deal_the_rest(trains)
    for one, size in zip(trains, before, strict=True):
        one.share.spares = one.share.size - size


def _deal_the_rest(dealt: list[_Dealing]) -> None:
    queue = [(*one.turn, place) for place, one in enumerate(dealt)]
    heapq.heapify(queue)
    while queue:
        *turn, place = heapq.heappop(queue)
        one = dealt[place]
        one.forget_displaced()
        if tuple(turn) != one.turn or one.grow():  # whoever has to move comes after those that can stay
            heapq.heappush(queue, (*one.turn, place))
