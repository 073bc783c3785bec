"""What workers are told of a decision of the membership machine."""

from __future__ import annotations

from collections.abc import Iterator

from ef_common.core import membership
from ef_common.core.membership import Membership
from ef_common.core.view import View
from ef_common.protocol import wire
from ef_common.protocol.known_standbys import some_standbys
from ef_common.protocol.liveness import is_warming
from ef_common.protocol.server_outputs import Output, Write, WriteOrReset
from ef_common.protocol.sessions import Sessions
from ef_common.protocol.view_patch import NO_VIEW, ViewPatch


def outputs_of(
    action: membership.Action, state: Membership, sessions: Sessions, *, timeout_s: float
) -> Iterator[Output]:
    """The lines of an action that ends no connection; `state` is that after it, `timeout_s` the heartbeat timeout."""
    match action:
        case membership.Accept(worker, warm_up):
            standbys = some_standbys(() if state.view is None else state.view.members)
            yield from sessions.tell(wire.Welcome(action, timeout_s, sessions.proof_to(worker), standbys), worker)
            if warm_up:
                yield from _tell_watermark(worker, state, sessions)
        case membership.Install(view, dropped):
            yield from sessions.tell_out(view)
            yield from _tell_view(view, dropped, sessions)
        case membership.Finish(worker):
            yield from sessions.tell(wire.Finished(action, sessions.proof_to(worker)), worker)
        case membership.Abort(worker) if worker in sessions.workers:
            peer = sessions.workers[worker]
            yield WriteOrReset(peer, wire.encode(wire.Aborted(action, peer.proof)))
        case (
            membership.Announce(workers)
            | membership.Resume(workers)
            | membership.Republish(workers)
            | membership.Agree(workers)
        ):
            yield from sessions.tell(action, *workers)
        case membership.Skip(worker) | membership.Claim(worker) | membership.Resign(worker) | membership.Stay(worker):
            yield from sessions.tell(action, worker)


def answer_heartbeat(worker: str, state: Membership, sessions: Sessions) -> Iterator[Output]:
    """Tell a newcomer that warms up where the members are, if it has read what it was told before."""
    if is_warming(worker, state):
        yield from _tell_watermark(worker, state, sessions, can_wait=True)


def _tell_watermark(worker: str, state: Membership, sessions: Sessions, *, can_wait: bool = False) -> Iterator[Output]:
    # Of the members only: if all are lost, newcomers start anew, and what the lost ones told is void.
    members = () if state.view is None else state.view.ids
    peers = [sessions.workers[member] for member in members if member in sessions.workers]
    told = [peer.watermark for peer in peers if peer.watermark is not None]
    if told:
        newest = max(told, key=lambda watermark: (watermark.training, watermark))
        yield from sessions.tell(wire.JobWatermark(newest), worker, can_wait=can_wait)


def _tell_view(view: View, dropped: tuple[str, ...], sessions: Sessions) -> Iterator[Output]:
    """Tell a view to its members, and before them to those that it drops, by what it changes of what each knows."""
    lines: dict[int, bytes] = {}
    for worker in (*dropped, *view.ids):
        peer = sessions.workers.get(worker)
        if peer is None:  # it is gone, and the event that says so waits its turn
            continue
        before, peer.view = peer.view or NO_VIEW, view
        if id(before) not in lines:
            patch = ViewPatch.between(before, view)
            lines[id(before)] = wire.encode(wire.NewView(before.generation, patch))
        # Were we to die in between, a worker that is dropped must not go on.
        yield (WriteOrReset if worker in dropped else Write)(peer, lines[id(before)])
