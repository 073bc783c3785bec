"""Which coordinator leads the job, as far as this one knows."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from ef_common.core.doors import LOOK, DoorAnswer, Supporter
from ef_common.core.membership import Challenged, Event, FailedElsewhere, Gathering, Idle, Membership, Outranked
from ef_common.protocol import wire
from ef_common.protocol.addresses import format_address
from ef_common.protocol.peer import Peer

_LEADS_S = 10.0
"""For so long, one that leads counts more than one that gathers members. In doubt, each tells of itself every 5 s."""


class Leadership:
    """Knows where the job is led.

    It hears of the leader from other coordinators (`heed`), its agent (`follow`), and its process when that is to end
    (`hand_over`). It gives the events of the membership machine that follow, and answers the agents that look for the
    job.

    Args:
        name: Of this coordinator. It ranks those that gather members at the same time: the first in order is preferred.
        job: Name of the job; "" if it has none.

    Attributes:
        leader: Address of the coordinator to which workers are sent; "" if it is not known.
    """

    def __init__(self, name: str, job: str) -> None:
        self.leader = ""
        self._name = name
        self._job = job
        self._supporter = Supporter()
        self._led_at = -inf  # when somebody has said last that it leads

    def follow(self, leader: str) -> None:
        """The agent of this coordinator has found that the job is led from this address."""
        self._supporter.follow(leader)

    def heed(self, name: str, host: str, message: wire.Follow, state: Membership, now: float) -> Event | None:
        """Another coordinator tells about itself; returns what that is for this one."""
        if self._is_other(message.job):
            return None
        if message.failed:
            return FailedElsewhere(message.failed)
        if name == self._name:
            return None
        leads, address = message.leads, format_address((host, message.port))
        nobody_leads = state.held or (isinstance(state, Idle) and now > self._led_at + _LEADS_S)
        if leads or nobody_leads:  # one that gathers members may wait for those who come here
            self.leader = address
        if leads:
            self._led_at = now
            self._supporter.follow(address)
        return Outranked(leads) if leads or name < self._name else Challenged()

    def _is_other(self, job: str) -> bool:
        return bool(job and self._job) and job != self._job

    def hand_over(self, node: str, state: Membership) -> bool:
        """Let the coordinator of the first member with one on another node lead; False if there is none."""
        members = () if state.view is None else state.view.members
        here = (member for member in members if member.id in state.workers)  # others may be lost
        successor = next((member for member in here if member.standby and member.node != node), None)
        if successor is None or state.closed:
            return False
        self.leader = format_address((successor.address, successor.standby))
        self._supporter.follow(self.leader)
        return True

    def answer(self, peer: Peer, message: wire.Seek, state: Membership, now: float) -> DoorAnswer | wire.Error:
        """What an agent is told that looks for its job; only one that may lead is supported."""
        if self._is_other(message.job):
            return wire.Error("job", f"it is of the job {self._job!r}, and not of {message.job!r}")
        is_idle = isinstance(state, Idle)
        wish = message.wish if is_idle and peer.may_lead else LOOK
        candidate = "" if peer.member is None or not peer.may_lead else peer.member.node
        known = self._supporter.hear(candidate, message.door if peer.may_lead else "", wish, now)
        over = state.closed and not state.failed
        return replace(known, leads=not is_idle, over=over, leader=known.leader if is_idle else "")


def why_out(worker: str, state: Membership) -> str:
    """Why a worker is out; "" if it may not be. A view that is held back decides nothing."""
    if state.failed or not state.generation or state.held or isinstance(state, Gathering):
        return state.failed
    if worker in state.workers or (state.view is not None and state.view.rank_of(worker) is not None):
        return ""
    return f"view {state.generation} is without it"
