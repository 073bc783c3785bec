"""The resume state of a worker: what it must report to a coordinator that knows nothing about it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ef_common.core.membership import (
    AtBoundary,
    Begun,
    Closed,
    Event,
    Failed,
    Leaving,
    Phase,
    Ready,
    Returned,
    Settled,
    Stored,
    Suspected,
    Wanted,
)
from ef_common.core.quorum import ChainLink, digest_of_ids
from ef_common.core.room import NO_DEMAND, Demand
from ef_common.core.view import Member, View

_MAX_SEEN = 100


@dataclass(frozen=True, slots=True)
class ResumeState:
    """What a worker has heard from coordinators and told them. Each method returns the resume state after.

    Args:
        phase: The phase, as in the membership.
        leaving: Whether it has asked to leave, perhaps before it received the view in which it is a member.
        links: The view in which the worker has settled, and those that it has received since.
        settled: Generation of the first of them, if it has settled in it; else 0.
        promised: The highest generation that it knows of. It takes no view that is not above it.
        heard_here: Generations of the links that came over the control connection that it has now.
        boundary: Generation of the view at whose boundary it waits.
        suspected: Generation of the view whose group broke.
        closed: Whether its program ends.
        training: The newest training that it has told: the one that a newcomer is ready for.
        failed: The exception that its own code has raised.
        store: Its store, as reported; None before that.
        demand: The newest demand that it has made or heard of.
        seen: Addresses (host, port) of the standbys of the views before, as far as the newest one does not name them.
    """

    phase: Phase = Phase.EARLY
    leaving: bool = False
    links: tuple[ChainLink, ...] = ()
    settled: int = 0
    promised: int = 0
    heard_here: frozenset[int] = frozenset()
    boundary: int = 0
    suspected: int = 0
    closed: bool = False
    training: int = 1
    failed: str = ""
    store: str | None = None
    demand: Demand = NO_DEMAND
    seen: tuple[tuple[str, int], ...] = ()

    @property
    def view(self) -> View | None:
        """The newest view."""
        return self.links[-1].view if self.links else None

    @property
    def successors(self) -> tuple[tuple[str, int], ...]:
        """Addresses of the newest view's standbys, in the same order for all members; then those of earlier ones."""
        return tuple(dict.fromkeys((*_standbys(self.view), *self.seen)))

    def warming(self, standbys: tuple[tuple[str, int], ...] = ()) -> ResumeState:
        """The coordinator says that the job already runs, and names some standbys."""
        if self.links:
            return self
        phase = Phase.WARMING if self.phase is Phase.EARLY else self.phase
        return replace(self, phase=phase, seen=tuple(dict.fromkeys((*standbys, *self.seen))))

    def behind(self) -> ResumeState:
        """The training that it may be ready for is over."""
        return replace(self, phase=Phase.WARMING) if self.phase is Phase.READY else self

    def received(self, view: View) -> ResumeState:
        """A view has arrived that contains this worker."""
        return replace(
            self,
            seen=self.successors[:_MAX_SEEN],
            phase=Phase.LEAVING if self.leaving else Phase.MEMBER,
            links=(*self.links, ChainLink(view)),
            promised=max(self.promised, view.generation),
            heard_here=self.heard_here | {view.generation},
        )

    def told(self, event: Event) -> ResumeState:
        """This worker reports something to the coordinator."""
        match event:
            case Ready(training=training) if not self.links:
                return replace(self, phase=Phase.READY, training=training)
            case Begun(training=training):
                return replace(self, training=training)
            case Leaving():
                return replace(self, leaving=True, phase=Phase.LEAVING if self.links else self.phase)
            case AtBoundary(generation=generation):
                return replace(self, boundary=generation)
            case Suspected(generation=generation):
                return replace(self, suspected=generation)
            case Closed():
                return replace(self, closed=True)
            case Failed(why=why):
                return replace(self, failed=why)
            case Stored(store=store):
                return replace(self, store=store)
            case Wanted(demand=demand):
                return self.wanting(demand)
            case Settled(generation=generation):
                links = tuple(link for link in self.links if link.view.generation >= generation)
                heard_here = self.heard_here.intersection(link.view.generation for link in links)
                return replace(self, links=links, settled=generation, heard_here=heard_here)
        return self

    def agreed(self, generation: int, members: str) -> ResumeState:
        """All members of a view have reported one store.

        Args:
            generation: Its generation.
            members: Digest of its members, as another view may have the same generation.
        """
        links = (
            replace(link, agreed=True)
            if link.view.generation == generation and digest_of_ids(link.view.ids) == members
            else link
            for link in self.links
        )
        return replace(self, links=tuple(links))

    def claiming(self) -> ResumeState:
        """The worker is asked for a claim of its view, which must not continue as it is, whoever leads."""
        return self if self.view is None else replace(self, suspected=self.view.generation)

    def staying(self) -> ResumeState:
        """The coordinator that had asked it to leave lets it stay."""
        return replace(self, leaving=False, phase=Phase.MEMBER if self.links else self.phase)

    def wanting(self, demand: Demand) -> ResumeState:
        """A demand is made, or heard of."""
        return replace(self, demand=demand) if demand > self.demand else self

    def parted(self, *, over: bool) -> ResumeState:
        """The connection has ended. `over`: the coordinator ended it without saying that this worker is out."""
        links = tuple(
            replace(link, over=True) if over and link.view.generation in self.heard_here else link
            for link in self.links
        )
        return replace(self, links=links, heard_here=frozenset())

    def report(self, member: Member) -> Returned:
        """What the next coordinator must know."""
        newest = 0 if self.view is None else self.view.generation
        return Returned(
            member,
            self.phase,
            promised=self.promised,
            settled=self.settled,
            received=self.links,
            at_boundary=bool(newest) and self.boundary == newest,
            suspects=bool(newest) and self.suspected == newest,
            closed=self.closed,
            failed=self.failed,
            store=self.store,
            training=self.training,
            demand=self.demand,
        )


def _standbys(view: View | None) -> tuple[tuple[str, int], ...]:
    members = () if view is None else view.members
    return tuple((member.address, member.standby) for member in members if member.standby)
