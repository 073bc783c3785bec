"""Which workers are in the view, stay in it, and could join it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import MappingProxyType

from ef_common.core.membership.actions import Finish
from ef_common.core.membership.model import Active, AnyActive, Forming, Membership, Serving, Settings, copied, extended
from ef_common.core.membership.phase import MEMBERS, NEWCOMERS, Phase, WorkerPhase, Workers
from ef_common.core.view import Member
from ef_common.errors import ProtocolError


def phase_of(state: Membership, worker: str) -> Phase:
    """Phase of a worker; raises ProtocolError for a stranger."""
    try:
        return state.workers[worker].phase
    except KeyError:
        raise ProtocolError(f"worker {worker} is not connected") from None


def expect_member(state: Membership, worker: str, does: str) -> None:
    """Raise ProtocolError if somebody does what only a member can do."""
    if (phase := phase_of(state, worker)) not in MEMBERS:
        raise ProtocolError(f"worker {worker} {does}, but it is {phase.value}")


def finishes(state: Membership) -> tuple[Finish, ...]:
    """What tells newcomers that the job has ended."""
    return tuple(Finish(worker) for worker, stands in state.workers.items() if stands.phase in NEWCOMERS)


def placed(state: Active, member: Member, phase: Phase, training: int = 1) -> Workers:
    """The workers, and this one in this phase."""
    return extended(state.workers, {member.id: WorkerPhase(member, phase, training)})


def moved(state: Active, workers: Collection[str], phase: Phase, training: int = 1) -> Workers:
    """The workers, some of them in another phase."""
    changed = {worker: WorkerPhase(state.workers[worker].member, phase, training) for worker in workers}
    return extended(state.workers, changed)


def without(state: Active, workers: Collection[str]) -> Workers:
    """The workers without some of them."""
    left = copied(state.workers)
    for worker in workers:
        left.pop(worker, None)
    return MappingProxyType(left)


def ended(state: AnyActive, workers: Collection[str]) -> AnyActive:
    """The connections of these have ended; they may have been told to end."""
    state = replace(state, dismissed=state.dismissed.difference(workers))
    return replace(state, last=state.last.difference(workers)) if isinstance(state, Forming) else state


def present(state: Serving) -> tuple[Member, ...]:
    """Members of the view that are neither lost nor have said goodbye; who has begun anew is there as a newcomer."""
    return tuple(m for m in state.view.members if m.id in state.workers and m.id not in state.gone)


def is_anybody_present(state: Serving) -> bool:
    """Whether there are such members; found in haste, as this is asked for each that goes."""
    return any(worker in state.workers and worker not in state.gone for worker in state.view.ids)


def remaining(state: Serving) -> list[Member]:
    """Members of the view that neither leave nor have gone."""
    return [m for m in present(state) if state.workers[m.id].phase is Phase.MEMBER]


def is_awaited(state: Serving) -> bool:
    """Whether somebody has been asked to leave and has not said yet that it does."""
    return any(worker in state.workers and state.workers[worker].phase is Phase.MEMBER for worker in state.asked)


def leaving(workers: Workers) -> set[str]:
    """Ids of the members that leave."""
    return {worker for worker, (_, phase, _) in workers.items() if phase is Phase.LEAVING}


def gone(state: Active) -> frozenset[str]:
    """Members that do not count in the quorum."""
    return state.gone | leaving(state.workers)


def ready(state: Active, training: int) -> list[Member]:
    """Workers that are ready for this training, in the order of arrival."""
    return [m for m, phase, ready_for in state.workers.values() if phase is Phase.READY and ready_for == training]


def limit(state: Active, settings: Settings) -> int:
    """How many nodes may train: as many as the members want, from `min_nodes` to `max_nodes`."""
    wanted = state.demand.nodes or settings.max_nodes
    return min(settings.max_nodes, max(settings.min_nodes, wanted))


def admissible(state: Active, staying: list[Member], settings: Settings) -> list[Member]:
    """Workers that are ready for the members' training, as far as there is room for them, in order of arrival."""
    if state.closed:
        return []
    nodes, most = {m.node for m in staying}, limit(state, settings)
    joining = []
    for member in ready(state, state.training):
        if member.node in nodes or len(nodes) < most:
            nodes.add(member.node)
            joining.append(member)
    return joining
