"""Rule 14: as many nodes train as the members want; whole nodes are asked to leave."""

from __future__ import annotations

from dataclasses import replace

from ef_common.core.membership import replacement, roster, rules
from ef_common.core.membership.actions import Action, Announce, Resign, Stay
from ef_common.core.membership.events import Slow, Wanted
from ef_common.core.membership.model import Decision, Membership, Serving, Settings
from ef_common.core.membership.phase import Phase
from ef_common.core.room import Demand
from ef_common.core.view import Member
from ef_common.errors import ProtocolError


def wanted(state: Serving, event: Wanted, settings: Settings) -> Decision:
    """Rank 0 tells how many nodes the members want."""
    if state.view.rank_of(event.worker) != 0 or event.worker not in state.workers:
        return state, (), ""  # it was rank 0 when it said so
    expect_known(state, event)
    return heed(state, event.demand, settings)


def expect_known(state: Membership, event: Wanted) -> None:
    """Raise ProtocolError if a demand is made in a view that nobody knows: none that follows could be newer."""
    if event.demand.generation > state.generation:
        raise ProtocolError(
            f"worker {event.worker} wants {event.demand.nodes} nodes in view {event.demand.generation}, which does not "
            f"exist: the newest is {state.generation}"
        )


def heed(state: Serving, demand: Demand, settings: Settings) -> Decision:
    """If a demand is newer than the one that is known, it counts: workers that are ready may join."""
    if demand <= state.demand:
        return state, (), ""
    state = replace(state, demand=demand)
    reason = f"{demand.nodes} nodes are wanted" if demand.nodes else "as many nodes are wanted as come"
    if roster.admissible(state, roster.remaining(state), settings) or replacement.spares(state, settings):
        return rules.announce(state, reason)
    return state, (), reason


def slow(state: Serving, event: Slow) -> Serving:
    """Note the members that are slower than the others, the slowest first."""
    return replace(state, slow=tuple(worker for worker in event.workers if state.view.rank_of(worker) is not None))


def take_back(before: Membership, state: Membership, settings: Settings) -> tuple[Membership, tuple[Action, ...]]:
    """Let members stay that are about to leave because they were asked to, if too few would be left.

    Only those can stay that have told this coordinator alone that they leave. It counts them again before they hear of
    it, so nobody ever counts without a member that counts elsewhere.
    """
    if state is before or not isinstance(state, Serving) or not state.asked or state.closed:
        return state, ()
    if roster.is_awaited(state):
        return state, ()  # its word that it leaves must not come after ours that it stays
    num_missing = roster.limit(state, settings) - len(rules.nodes_of(roster.remaining(state)))
    able = [member for member in roster.present(state) if member.id in state.asked]
    nodes = _by_dispensability(state, able)[::-1][: max(0, num_missing)]
    stays = [member.id for member in able if member.node in nodes]
    if not stays:
        return state, ()
    workers = roster.moved(state, stays, Phase.MEMBER)
    return replace(state, workers=workers, asked=state.asked.difference(stays)), tuple(map(Stay, stays))


def follow(before: Membership, state: Membership, settings: Settings) -> tuple[Membership, tuple[Action, ...]]:
    """Ask members to leave that are replaced or not wanted any more, and announce it once all of them are about to.

    They are asked when all members hold the state and nothing is wrong with the view. It takes time in the number of
    workers at the few events that complete a view or change the demand.
    """
    if state is before or not isinstance(state, Serving) or state.closed:
        return state, ()
    leavers = _leavers(state, settings)
    actions: tuple[Action, ...] = tuple(Resign(worker) for worker in leavers)
    if leavers:
        state = replace(state, asked=state.asked.union(leavers))
    if state.asked and not state.announced and not roster.is_awaited(state) and roster.leaving(state.workers):
        return replace(state, announced=True), (*actions, Announce(state.view.ids, state.view.generation))
    return state, actions


def _leavers(state: Serving, settings: Settings) -> list[str]:
    """Who is to be asked to leave: a straggler whose replacement has come, and the nodes beyond those that are wanted.

    Never so many that fewer than `min_nodes` are left.
    """
    if state.suspects or state.shortage or len(state.settled) < state.view.world_size:
        return []
    replaced = replacement.replaced(state)
    if not (replaced or state.demand.nodes or _may_exceed_limit(state, settings)):
        return []
    staying = [member for member in roster.remaining(state) if member.id not in state.asked]
    leavers = [member.id for member in staying if member.id == replaced]
    staying = [member for member in staying if member.id != replaced]
    nodes = _by_dispensability(state, staying)
    num_beyond = len(nodes) - roster.limit(state, settings)
    beyond = set(nodes[: max(0, num_beyond)])
    return leavers + [member.id for member in staying if member.node in beyond]


def _may_exceed_limit(state: Serving, settings: Settings) -> bool:
    """Whether another coordinator may have been lost before it could ask a straggler whose replacement had come.

    The nodes themselves are counted only then, as that takes time in the number of workers.
    """
    return state.contested_at is not None and not state.announced and state.view.world_size > settings.max_nodes


def _by_dispensability(state: Serving, members: list[Member]) -> list[str]:
    """The nodes of these members: those of stragglers first, then the newest, as views name members by age."""
    node_of = {member.id: member.node for member in members}
    first = (state.replacement.straggler, *state.slow)
    slow = [node_of[worker] for worker in first if worker in node_of]
    newest = reversed(dict.fromkeys(member.node for member in members))
    return list(dict.fromkeys((*slow, *newest)))
