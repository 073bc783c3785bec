"""Rules 1, 2 and 4: workers that are not members arrive, become ready, and form a view if there are no members."""

from __future__ import annotations

from dataclasses import replace

from ef_common.core.membership import replacement, roster, rules
from ef_common.core.membership.actions import Accept, Action, Finish
from ef_common.core.membership.events import Ready, Returned
from ef_common.core.membership.model import Active, Decision, Forming, Serving, Settings
from ef_common.core.membership.phase import Phase
from ef_common.core.membership.roster import phase_of
from ef_common.core.view import Member
from ef_common.errors import ProtocolError


def arrived(state: Active, member: Member, now: float) -> Decision:
    """A new worker has arrived."""
    if member.id in state.workers:
        raise ProtocolError(f"worker {member.id} has arrived twice")
    if state.closed:
        return state, (Finish(member.id),), f"{member.id} came after the end"
    warm_up = state.generation > 0
    phase = Phase.WARMING if warm_up else Phase.EARLY
    # A warming worker does not delay the next view: only `Ready` counts as its arrival.
    arrival = state.last_arrival if warm_up else now
    after = replace(state, workers=roster.placed(state, member, phase), last_arrival=arrival)
    return after, (Accept(member.id, warm_up, _training_of(state)),), f"{member.id} arrived, {phase.value}"


def _training_of(state: Active) -> int:
    """The training that the members are in; without members, workers begin with the first one."""
    return state.training if isinstance(state, Serving) else 1


def returned(state: Active, event: Returned, now: float, settings: Settings) -> Decision:
    """A worker that is not a member has come from another coordinator, or has come back."""
    worker = event.member.id
    if state.closed:
        return replace(state, dismissed=state.dismissed | {worker}), (Finish(worker),), f"{worker} came after the end"
    # It may not have heard of a training that it was told to go to.
    state = replace(state, workers=roster.placed(state, event.member, Phase.WARMING))
    accept = Accept(worker, warm_up=True, training=_training_of(state))
    if event.phase is Phase.WARMING:
        return state, (accept,), f"{worker} is back, warming"
    after, actions, reason = ready(state, Ready(worker, event.training), now, settings)
    return after, (accept, *actions), reason


def ready(state: Active, event: Ready, now: float, settings: Settings) -> Decision:
    """A worker has warmed up."""
    decision = _take_ready(state, event, now, settings)
    return form_or(decision, now, settings) if isinstance(state, Forming) else rules.plan_or(decision, settings)


def _take_ready(state: Active, event: Ready, now: float, settings: Settings) -> Decision:
    worker, training = event.worker, event.training
    if worker in state.dismissed:
        return state, (), ""  # on its way when it was told
    phase = phase_of(state, worker)
    member, _, goal = state.workers[worker]
    if phase is Phase.WARMING and training < goal:
        return state, (), ""  # likewise; it will be ready for the training that it was told to go to
    if phase is not Phase.WARMING:
        raise ProtocolError(f"worker {worker} says that it is ready, but it is {phase.value}")
    if state.closed:
        return state, (Finish(worker),), f"{worker} was ready after the end"
    if training < state.training and not isinstance(state, Forming):
        state, skips = rules.skip(state, [worker])
        return state, skips, f"{worker} is ready for training {training}, which is over"
    state = replace(state, workers=roster.placed(state, member, Phase.READY, training), last_arrival=now)
    if isinstance(state, Forming):
        state, skips = _gather_ready(state, settings)
        if skips:
            return state, skips, f"{worker} is ready for training {training}, others are for another one"
    if isinstance(state, Serving):
        if training > state.training:
            return state, (), f"{worker} waits for training {training}"
        room = roster.admissible(state, roster.remaining(state), settings)
        if not room and not replacement.spares(state, settings):
            return state, (), f"{worker} is ready, and a spare"
    return rules.announce(state, f"{worker} is ready to join")


def founders(state: Forming, settings: Settings) -> list[Member]:
    """Workers that wait for a first view; empty unless only the last call holds it back."""
    if state.closed or state.last:
        return []
    members = _beginners(state, settings)
    nodes: dict[str, int] = {}
    for member in members:
        nodes[member.node] = nodes.get(member.node, 0) + 1
    complete = state.generation > 0 or all(nodes[m.node] >= m.local_world_size for m in members)
    return members if complete and len(nodes) >= settings.min_nodes else []


def _beginners(state: Forming, settings: Settings) -> list[Member]:
    """Workers that may begin together: enough programs at one training, the earliest such one.

    Who has skipped more waits for them: where there are checkpoints, they come to its training at once.
    """
    if not state.generation:
        return [m for m, phase, _ in state.workers.values() if phase is Phase.EARLY]
    groups = [roster.ready(state, training) for training in _trainings(state)]
    return next((group for group in groups if len(rules.nodes_of(group)) >= settings.min_nodes), [])


def _trainings(state: Forming) -> list[int]:
    return sorted({training for _, phase, training in state.workers.values() if phase is Phase.READY})


def _gather_ready(state: Forming, settings: Settings) -> tuple[Forming, tuple[Action, ...]]:
    """If there are enough newcomers only across trainings, send all of them to the latest training."""
    trainings = _trainings(state)
    ready = [member for training in trainings for member in roster.ready(state, training)]
    if len(rules.nodes_of(ready)) < settings.min_nodes or _beginners(state, settings):
        return state, ()
    return rules.pass_over(replace(state, training=trainings[-1]))


def form_or(decision: Decision, now: float, settings: Settings) -> Decision:
    """Issue a view if there is none and it is time; otherwise keep the decision so far."""
    state, actions, _ = decision
    if isinstance(state, Forming) and (formed := _form(state, now, settings)):
        after, install, reason = formed
        return after, (*actions, *install), reason
    return decision


def called_at(state: Forming, settings: Settings) -> float | None:
    """When a first view is due; None if others must come before. It takes time in the number of workers."""
    return _called_at(state, founders(state, settings), settings)


def _called_at(state: Forming, members: list[Member], settings: Settings) -> float | None:
    if not members:
        return None
    most = roster.limit(state, settings)
    enough = len(rules.nodes_of(members)) >= min(most, settings.start_nodes or most)
    return state.last_arrival + (0.0 if enough else settings.last_call_s)


def _form(state: Forming, now: float, settings: Settings) -> Decision | None:
    """Rules 1 and 4: issue a view without members."""
    members = founders(state, settings)
    called_at = _called_at(state, members, settings)
    if called_at is None or now < called_at:
        return None
    nodes = list(dict.fromkeys(m.node for m in members))
    most = roster.limit(state, settings)
    if short := rules.shortfall_of(state, (), settings):
        return replace(state, held=short), (), f"the job cannot begin anew: {short}"
    taken = nodes[:most]
    chosen = tuple(m for m in members if m.node in taken)
    _, waiting, training = state.workers[members[0].id]
    told: tuple[Action, ...]
    if waiting is Phase.READY:
        state, told = rules.pass_over(replace(state, training=training))
    else:  # Whoever finds no room waits as a spare; it must do its slow work meanwhile.
        spare = [m.id for m in members if m.node not in taken]
        state = replace(state, workers=roster.moved(state, spare, Phase.WARMING))
        told = tuple(Accept(worker, warm_up=True) for worker in spare)
    after, actions, reason = rules.install(state, chosen, settings, planned=True, reason=f"{len(chosen)} workers start")
    return after, (*actions, *told), reason
