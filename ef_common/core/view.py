"""The view: who takes part, and in which order.

Everything that a worker computes from its peers (rank, world size, shard, gradient weight) is a function
of the view. Generations only grow; two views never share one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Member:
    """A worker, as the others know it.

    Args:
        id: Unique name of the process; a restarted worker has a new one.
        node: Name of the node (one torchrun agent, one host).
        address: IP address or host name at which the others reach its data plane.
        local_rank: Index on its node.
        local_world_size: Number of workers that its node starts.
        standby: Port, at its address, of the coordinator that its node keeps ready; 0 for none.
        liveness_port: Port, at its address, on which this very process listens as long as it lives; 0 for none.
    """

    id: str
    node: str
    address: str
    local_rank: int = 0
    local_world_size: int = 1
    standby: int = 0
    liveness_port: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """A generation and its ordered members, as the coordinator issued them.

    Args:
        generation: Grows by one with each view of the job; the first is 1.
        members: In rank order. Members keep their order from view to view, joiners come last.
        admitted_at: Generation of the newest view that was issued at a step boundary (a planned change).
            A worker that waits for a planned change has seen it when this number has grown.
        pending: More changes wait (joiners, leavers): workers agree on a boundary for the next view.
        hold: Too few nodes: train no further, wait at the next boundary for joiners.
        reason: One line, for people.
        gone: Members of earlier views whose connection to the coordinator has ended for good, as far as a successor
            has to know of them (see :mod:`ef_common.core.quorum`).
        base: Generation of the newest view known to have come about when this one was issued; 0 for none.
        issuer: Port of the coordinator that has issued it; it is the standby of the members of its node.
    """

    generation: int
    members: tuple[Member, ...]
    admitted_at: int = 0
    pending: bool = False
    hold: bool = False
    reason: str = ""
    gone: tuple[str, ...] = ()
    base: int = 0
    issuer: int = 0
    ids: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Ids of the members in rank order; asked for in each step, hence kept."""
    _ranks: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(member.id for member in self.members))
        object.__setattr__(self, "_ranks", {worker: rank for rank, worker in enumerate(self.ids)})

    @property
    def world_size(self) -> int:
        """Number of members."""
        return len(self.members)

    def rank_of(self, worker: str) -> int | None:
        """Rank of a worker; None if the view does not contain it."""
        return self._ranks.get(worker)


SOLO = View(generation=0, members=(Member(id="solo", node="solo", address="127.0.0.1"),), reason="no coordinator")
"""The view of a job of one process, which has no coordinator."""
