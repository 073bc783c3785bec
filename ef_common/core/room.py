"""How many nodes the members want, and how many there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Demand(NamedTuple):
    """How many nodes the members want. Of two, the greater one counts: the newer.

    Rank 0 counts its demands in each view. A later view may have another rank 0, whose demands are all newer; a message
    of the former one that comes late is older than they are.

    Attributes:
        generation: Generation of the newest view that rank 0 knew.
        number: How many demands it has made in it, with this one; 0 if none was ever made.
        nodes: Number of nodes that is wanted; 0 for as many as come.
    """

    generation: int = 0
    number: int = 0
    nodes: int = 0

    def next(self, generation: int, nodes: int) -> Demand:
        """The one that follows, which rank 0 makes in the view of `generation`."""
        number = self.number + 1 if self.generation >= generation else 1
        return Demand(max(self.generation, generation), number, nodes)


NO_DEMAND = Demand()


@dataclass(frozen=True, slots=True)
class Room:
    """What the coordinator knows of the number of nodes, and tells the members.

    Rank 0 gets it when it has changed, at most once per second. The other members get it if the demand or the view has
    changed since there was a demand, because they report the demand to a standby, and if the stragglers have changed,
    because they tell the controller of a cluster.

    Args:
        demand: How many nodes the members want, as far as the coordinator knows.
        nodes: Number of nodes in the view.
        spares: Number of further nodes with workers that are ready, and for which there is no place.
        newcomers: Number of further nodes with workers that warm up.
        min_nodes: As in the settings of the job. Nobody is asked to leave below it.
        max_nodes: As in the settings of the job. No more are admitted, whatever is wanted.
        stragglers: Ids of the members that are slower than the others, the slowest first.
    """

    demand: Demand
    nodes: int
    spares: int
    newcomers: int
    min_nodes: int
    max_nodes: int
    stragglers: tuple[str, ...] = ()

    @property
    def wanted(self) -> int:
        """Number of nodes that the members want; 0 for as many as come."""
        return self.demand.nodes
