"""Decides, from events alone, when a worker talks to Horovod's elastic driver.

The driver counts. It starts processes for new hosts, and gives up hosts on which a process has failed, when *all*
processes that it counts on have either ended or said READY. Then a *round* is complete, and the answer to each READY is
the slot that the process has from then on. Horovod's own workers stop for that; ours say READY in a thread and continue
to train::

    TRAINING → WAITING      it calls a round, or answers a call: READY
    TRAINING → LEAVING      likewise, but the driver gives up its host: it leaves the view first
    WAITING → TRAINING      the round is complete, or there is no answer
    WAITING → HOMELESS      the round is complete, and this worker has no slot any more: it leaves
    LEAVING → PARTING       it is out of the view, and the process ends: READY
    PARTING → LEAVING       the round is complete, or there is no answer
    PARTING → HOMELESS      the round is complete, and this worker has no slot any more

Rules:

1. A worker that learns of a reason *calls* a round: a host has come or gone (the driver tells its rank 0), or a member
   is lost. A call is a key in the driver's store, which every worker polls; the driver clears the store when the round
   is complete. A worker that sees a call answers it with READY, once, because the driver would count a second one.
2. After a loss the driver gives up the whole host and kills what is left on it, perhaps by stopping it first, which
   would make the others wait. Members on that host therefore leave at a boundary. Losses often come together, so
   nothing follows from one before a moment has passed.
3. If the hosts of all members have lost somebody, a round would end the job. The members then train on to the end, and
   the driver reports the failure.
4. The end of a worker that is given up with its host is no news. A host is as good as new once a newcomer on it is
   admitted.
5. A newcomer without a slot leaves after its admission.
6. If some processes are missing for long, and nobody is known to be lost, they may have died before they came, so there
   is a round; and, if it changes nothing, another one after twice that time, since they may also need long to come.
   Where all processes are on one host, a round would end the job, as in rule 3.
7. When the program ends, known losses are reported at once; after that nobody calls a round. A worker that ends looks
   for a call once more, and waits for the answer: READY and an end with status 0 would count twice.
8. For the driver, a process that ends with status 0 has completed the job, and the next round ends all others. A worker
   that leaves before the end of the training therefore ends with another status, for which the driver gives up its
   host. It calls a round and names the host, so that its neighbours leave, too. Once the training of any worker is
   over, nobody says READY before its own end: its round would end the others in what they do after the training. As
   with losses, nothing follows from a host that is named before a moment has passed.
9. A worker that is out of the job for any other reason says nothing more; its process ends with an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class RoundStage(Enum):
    """Where a worker stands with the driver."""

    TRAINING = "training"  # it has a slot, as far as it knows, and has said nothing
    WAITING = "waiting"  # READY is said and not answered, while it trains
    LEAVING = "leaving"  # it is to leave, or has
    PARTING = "parting"  # it has left, and READY is said and not answered
    HOMELESS = "homeless"  # it no longer has a slot, and is to leave, or has


@dataclass(frozen=True, slots=True)
class Rounds:
    """The state of one worker's rules.

    Args:
        host: Name that the driver has for its host.
        num_assigned: Number of processes that the driver counts on.
        num_here: How many of them are on this host.
        members: Worker and host of each member of the newest view.
        member: This worker is one.
        failed: Hosts that have lost a member.
        due: When something follows from a loss.
        stage: Where it stands with the driver.
        closed: The program ends, with its trainings complete.
        ending: The process is about to end.
        left: It was asked to leave, and is out of the job.
        out: It is out of the job.
        short_since: Since when there are fewer members than processes.
        num_vain: Number of rounds in a row that did not change that.
    """

    host: str
    num_assigned: int
    num_here: int = 0
    members: tuple[tuple[str, str], ...] = ()
    member: bool = False
    failed: frozenset[str] = frozenset()
    due: float | None = None
    stage: RoundStage = RoundStage.TRAINING
    closed: bool = False
    ending: bool = False
    left: bool = False
    out: bool = False
    short_since: float | None = None
    num_vain: int = 0

    @property
    def waiting(self) -> bool:
        """Whether READY is said and not answered."""
        return self.stage in (RoundStage.WAITING, RoundStage.PARTING)

    @property
    def leaving(self) -> bool:
        """Whether this worker is to leave, or has."""
        return self.stage in (RoundStage.LEAVING, RoundStage.PARTING, RoundStage.HOMELESS)


class RoundAction(Enum):
    """The actions to carry out, in this order."""

    CALL = "call"  # a round
    RESIGN = "resign"  # call a round, and name this host, which the driver gives up
    READY = "ready"  # say it, in a thread
    LEAVE = "leave"  # the view, at the next boundary
    PUBLISH = "publish"  # what newcomers must find in the driver's store


@dataclass(frozen=True, slots=True)
class Viewed:
    """There is a new view; if it is planned, former members that it lacks have left."""

    members: tuple[tuple[str, str], ...]
    planned: bool
    member: bool


@dataclass(frozen=True, slots=True)
class HostsChanged:
    """The driver reports that hosts have been added or removed."""


@dataclass(frozen=True, slots=True)
class Called:
    """Somebody has called a round; workers that have left have named their hosts."""

    hosts: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Answered:
    """The round is complete. No size: there was no answer; size 0: this worker has no slot."""

    size: int | None
    num_here: int = 0


@dataclass(frozen=True, slots=True)
class Dismissed:
    """This worker is out of the job before its end."""

    left: bool


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """The program ends, with its trainings complete."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The process ends with status 0, as far as is known."""


@dataclass(frozen=True, slots=True)
class RoundTick:
    """Time has passed."""


_AFTER = {RoundStage.WAITING: RoundStage.TRAINING, RoundStage.PARTING: RoundStage.LEAVING}
"""What follows from an answer that leaves a slot, or from none."""
Event = Viewed | HostsChanged | Called | Answered | Dismissed | RoundClosed | Ending | RoundTick
Decision = tuple[Rounds, tuple[RoundAction, ...], str]


def decide(state: Rounds, event: Event, now: float, *, patience_s: float, settle_s: float) -> Decision:
    """Decide what follows from an event.

    Args:
        state: The state before.
        event: The event.
        now: Time of a monotonic clock, in seconds.
        patience_s: How long processes may be missing.
        settle_s: How long to wait for further losses after one.

    Returns:
        The state after, the actions to carry out in order, and the reason in one line ("" if there is none).
    """
    match event:
        case Viewed():
            state, actions, reason = _viewed(state, event, now + settle_s)
        case HostsChanged():
            state, actions, reason = _call(state, "the hosts have changed")
        case Called(hosts):
            state, actions, reason = _answer(state, hosts, now + settle_s)
            if not actions:  # a call is seen again and again, in place of a tick
                state, actions, later = _overdue(state, now, patience_s)
                reason = reason or later
        case Answered():
            state, actions, reason = _answered(state, event)
        case Dismissed(left):
            state, actions, reason = replace(state, left=left, out=True), (), ""
        case RoundClosed():
            state, actions, reason = _closed(state)
        case Ending():
            state, actions, reason = _ending(state)
        case RoundTick():
            state, actions, reason = _overdue(state, now, patience_s)
    return _with_clock(state, now), actions, reason


def _viewed(state: Rounds, view: Viewed, due: float) -> Decision:
    before, after = dict(state.members), dict(view.members)
    lost = {} if view.planned else {worker: host for worker, host in before.items() if worker not in after}
    back = {host for worker, host in after.items() if worker not in before}
    new = set(lost.values()) - state.failed
    here = {state.host, *after.values()}  # of other hosts, nothing follows from a loss any more
    was_member, failed = state.member, ((state.failed | new) - back) & here
    num_vain = state.num_vain if after == before else 0
    state = replace(state, members=view.members, member=view.member, failed=failed, num_vain=num_vain)
    if state.leaving and view.member and not was_member:
        return state, (RoundAction.LEAVE,), "admitted, and without a slot"
    if not new or state.closed or not view.member:
        return state, (), ""
    return replace(state, due=due), (), f"{', '.join(sorted(lost))} lost"


def _may_speak(state: Rounds) -> bool:
    return state.stage is RoundStage.TRAINING and not state.out and not _is_last(state)


def _is_last(state: Rounds) -> bool:
    """No member is on a host that has lost nobody."""
    return bool(state.members) and state.failed.issuperset(host for _, host in state.members)


def _speak(state: Rounds, actions: tuple[RoundAction, ...], reason: str) -> Decision:
    if not _may_speak(state):
        return state, (), ""
    if state.host in state.failed and not state.closed:
        leaves = replace(state, stage=RoundStage.LEAVING, due=None)
        return leaves, (RoundAction.LEAVE,), f"{reason}: the driver gives up this host"
    return replace(state, stage=RoundStage.WAITING, due=None, short_since=None), actions, reason


def _call(state: Rounds, reason: str) -> Decision:
    return (state, (), "") if state.closed else _speak(state, (RoundAction.CALL, RoundAction.READY), reason)


def _answer(state: Rounds, hosts: frozenset[str], due: float) -> Decision:
    new = hosts - state.failed
    state = replace(state, failed=state.failed | hosts)
    if hosts and (new or state.due is not None) and not (state.closed or state.ending):
        reason = f"workers of {', '.join(sorted(new))} have left" if new else ""
        return replace(state, due=due if state.due is None else state.due), (), reason
    return _speak(state, (RoundAction.READY,), "a round is called")


def _answered(state: Rounds, answer: Answered) -> Decision:
    was_leaving, size = state.leaving, answer.size
    state = replace(state, stage=_AFTER.get(state.stage, state.stage), short_since=None)
    if size is None:
        return state, (), "the driver gives no answer"
    if size:
        due = None if size == len(state.members) else state.due  # nobody is missing: it knows of each loss
        in_vain = size == state.num_assigned > len(state.members)
        num_vain = state.num_vain + 1 if in_vain else 0
        state = replace(state, num_assigned=size, num_here=answer.num_here, due=due, num_vain=num_vain)
        resigned = (RoundAction.RESIGN,) if state.left and state.ending else ()
        return state, (RoundAction.PUBLISH, *resigned), f"the driver counts on {size} processes"
    leave = (RoundAction.LEAVE,) if state.member and not was_leaving else ()
    return replace(state, stage=RoundStage.HOMELESS), leave, "the driver has no slot for this worker any more"


def _closed(state: Rounds) -> Decision:
    after = replace(state, closed=True, due=None)
    reason = "the training is complete"
    if state.due is None or not _may_speak(state):
        return after, (RoundAction.PUBLISH,), reason
    if state.host in state.failed:
        # There are no boundaries any more.
        return replace(after, stage=RoundStage.LEAVING), (RoundAction.PUBLISH,), reason
    return replace(after, stage=RoundStage.WAITING), (RoundAction.PUBLISH, RoundAction.CALL, RoundAction.READY), reason


def _ending(state: Rounds) -> Decision:
    state = replace(state, ending=True)
    if state.stage is RoundStage.LEAVING:
        return replace(state, stage=RoundStage.PARTING), (RoundAction.READY,), "out of the view"
    if state.left and state.stage is RoundStage.TRAINING and not state.closed:
        return state, (RoundAction.RESIGN,), "it leaves, so the driver gives up this host"
    return state, (), ""


def _overdue(state: Rounds, now: float, patience_s: float) -> Decision:
    if state.due is not None and now >= state.due and not state.waiting:
        if _is_last(state):
            return replace(state, due=None), (), "no other host is left: the driver learns of it at the end"
        return _call(replace(state, due=None), "workers are lost")
    if state.short_since is None or now < state.short_since + patience_s * 2**state.num_vain:
        return state, (), ""
    if state.num_here == state.num_assigned:
        return state, (), ""
    return _call(state, f"there are {len(state.members)} members of {state.num_assigned} processes")


def _with_clock(state: Rounds, now: float) -> Rounds:
    short = state.member and not state.waiting and len(state.members) < state.num_assigned
    if not short:
        return replace(state, short_since=None)
    return state if state.short_since is not None else replace(state, short_since=now)
