"""Which workers are in the view, stay in it, and could join it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ef_common.core.membership.model import Membership, Phase, Settings
from ef_common.core.view import Member, View


def with_phase(state: Membership, phases: Mapping[str, Phase]) -> Mapping[str, tuple[Member, Phase]]:
    """The workers, some of them in another phase."""
    workers = dict(state.workers)
    for worker, phase in phases.items():
        workers[worker] = (workers[worker][0], phase)
    return MappingProxyType(workers)


def present(state: Membership, view: View) -> tuple[Member, ...]:
    """Members of the view that have not said goodbye."""
    return tuple(m for m in view.members if m.id in state.workers)


def remaining(state: Membership, view: View) -> list[Member]:
    """Members of the view that neither leave nor have gone."""
    return [m for m in present(state, view) if state.workers[m.id][1] is Phase.MEMBER]


def gone(state: Membership) -> frozenset[str]:
    """Members that do not count in the quorum."""
    leaving = {worker for worker, (_, phase) in state.workers.items() if phase is Phase.LEAVING}
    return state.gone | leaving


def ready(state: Membership, training: int) -> list[Member]:
    """Workers that are ready for this training, in the order of arrival."""
    return [m for m, phase in state.workers.values() if phase is Phase.READY and readiness(state, m.id) == training]


def readiness(state: Membership, worker: str) -> int:
    """The training that a ready worker is ready for."""
    return state.ready_for.get(worker, 1)


def admissible(state: Membership, staying: list[Member], settings: Settings) -> list[Member]:
    """Workers that are ready for the members' training, as far as `max_nodes` allows, in order of arrival."""
    if state.closed:
        return []
    nodes = {m.node for m in staying}
    joining = []
    for member in ready(state, state.training):
        if member.node in nodes or len(nodes) < settings.max_nodes:
            nodes.add(member.node)
            joining.append(member)
    return joining
