"""Mutations of the core and the session: each breaks one rule, and the simulator must notice.

A mutation is a function that takes pytest's monkeypatch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from ef_common.collectives.gradients import pieces
from ef_common.collectives.gradients.bucket_run import BucketRun, Confirmation, RunState
from ef_common.core import progress, quorum, replay, sharding
from ef_common.core.membership import (
    Announce,
    Forming,
    Phase,
    Serving,
    claim_rules,
    failure,
    roster,
    rules,
    size,
    takeover,
)
from ef_common.core.replay import FRESH
from ef_common.core.resume_state import ResumeState
from ef_common.core.room import NO_DEMAND
from ef_common.core.streams import stream as streams
from ef_common.core.streams.stream import Held
from ef_common.data.stream_dealer import StreamDealer
from ef_common.data.stream_turns import LaneLayout, StreamTurns
from ef_common.errors import GroupBroken, Left
from ef_common.protocol import admission, introduction, liveness
from ef_common.protocol.admission import Admission
from ef_common.protocol.auth import Token, coordinator_proof, worker_proof
from ef_common.protocol.client import Client
from ef_common.protocol.endpoint_announcer import EndpointAnnouncer
from ef_common.protocol.heartbeats import Heartbeats
from ef_common.protocol.peer import PeerRefusal
from ef_common.protocol.server import CoordinatorServer
from ef_common.protocol.server_outputs import Close
from ef_common.protocol.sessions import Sessions
from ef_common.session import Barrier, LoneGroup, Session, settling
from ef_common.session.agreements import Agreements
from ef_common.session.current_view import CurrentView
from ef_common.testing.simulation import toy_operations, trainer
from ef_common.testing.simulation.channel import Channel

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]


def _by_name(*mutations: Mutation) -> dict[str, Mutation]:
    return {mutation.__name__: mutation for mutation in mutations}


def forget_the_replay(patch: Patch) -> None:
    """Those behind run the collective again, instead of receiving its result."""

    def plan(completed: list[int]) -> replay.Replay:
        planned = replay.plan_replay(completed)
        held = [number for number in completed if number != FRESH]
        return replace(planned, results=(), newest=min(held)) if planned.results else planned

    patch.setattr(settling, "plan_replay", plan)


def drop_what_is_returned(patch: Patch) -> None:
    """The slices of the lost are not dealt again."""
    commit = sharding.commit

    def forgetful(progress: sharding.EpochProgress, contributors: Any) -> Any:
        after, done = commit(progress, contributors)
        return after._replace(returned=progress.returned), done

    patch.setattr(sharding, "commit", forgetful)


def admit_newcomers_in_a_loss(patch: Patch) -> None:
    """The view after a loss takes in whoever is ready."""
    install = rules.install

    def generous(state: Any, members: Any, settings: Any, *, planned: bool = False, **rest: Any) -> Any:
        if not planned:
            ready = (stands.member for stands in state.workers.values() if stands.phase is Phase.READY)
            members = (*members, *ready)
        return install(state, members, settings, planned=planned, **rest)

    patch.setattr(rules, "install", generous)


def admit_newcomers_in_a_loss_unseen(patch: Patch) -> None:
    """The same, and the check of the coordinator's decision is blind: the harm itself must show."""
    admit_newcomers_in_a_loss(patch)
    patch.setattr("ef_common.testing.simulation.invariants.Invariants.decided", _only_note_the_view)


def _only_note_the_view(invariants: Any, before: Any, event: Any, after: Any) -> None:
    if after.view is not None:
        invariants.views[after.view.generation, after.view.ids] = after.view


def skip_the_barrier_after_a_change(patch: Patch) -> None:
    """Whoever has left the exchange of a planned view trains on, whatever becomes of the others."""
    run = Session.run

    def hasty(self: Session, operation: Any) -> Any:
        if isinstance(operation, Barrier) and self.view.generation > 1:
            self.collectives.complete(operation, self.view)
            return self.view
        return run(self, operation)

    patch.setattr(Session, "run", hasty)


def agree_alone(patch: Patch) -> None:
    """A worker goes for a change as soon as it knows of one itself."""

    def agree(self: Session, num_flags: float) -> None:
        if self.change_pending and not self.agreements.change_agreed:
            self.agreements.change_alone(self.completed_in)

    patch.setattr(Session, "agree", agree)


def keep_the_weights_of_the_first_attempt(patch: Patch) -> None:
    """The gradients of those that are left are weighted as if nobody were lost."""
    enter = BucketRun._enter

    def enter_again(self: Any, view: Any) -> None:
        kept = self.weight if self.weights else None
        enter(self, view)
        self.weight = self.weight if kept is None else kept

    patch.setattr(BucketRun, "_enter", enter_again)


def deal_by_the_view(patch: Patch) -> None:
    """Windows are dealt by what a worker knows, which others may not know yet."""
    patch.setattr("ef_common.testing.simulation.trainer.Trainer.members", property(lambda self: self.session.view.ids))


def count_the_view_as_contributors(patch: Patch) -> None:
    """A result that was handed on is taken for one of the receiver's own view."""
    run = Session.run

    def careless(self: Session, operation: Any) -> Any:
        run(self, operation)
        return self.view

    patch.setattr(Session, "run", careless)


def hold_by_the_view(patch: Patch) -> None:
    """A worker holds as soon as it knows that it should."""

    init, agreed = Session.__init__, vars(Agreements)["change_agreed"].fget

    def knowing(self: Session, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.agreements.session = self  # type: ignore[attr-defined]

    patch.setattr(Session, "__init__", knowing)
    patch.setattr(Agreements, "change_agreed", property(lambda self: agreed(self) or self.session.view.hold))


def confirm_at_once(patch: Patch) -> None:
    """An update is logged before it is sure to survive."""
    patch.setattr(Session, "when_confirmed", lambda self, act: act())


def overwrite_the_last_result(patch: Patch) -> None:
    """There is one set of buckets, though nobody waits until all have the result."""
    init = trainer.Trainer.__init__

    def with_one(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._buffers = self._buffers[:1]

    patch.setattr(trainer.Trainer, "__init__", with_one)


def lend_before_all_have_the_result(patch: Patch) -> None:
    """Gradients become views of the buckets, and are changed, while somebody may lack the result."""
    patch.setattr(trainer.Trainer, "_wait_for_all", lambda self, confirmation: None)


def trust_in_being_alone(patch: Patch) -> None:
    """A world of one does not look whether it is still in."""
    patch.setattr(CurrentView, "is_ousted", False)


def lose_the_joiners_state(patch: Patch) -> None:
    """A newcomer is sent a state that lacks the windows of the gradients in progress."""
    describe = trainer.Trainer.describe

    def incomplete(self: Any) -> bytes:
        state = json.loads(describe(self))
        state["progress"]["uncommitted"] = []
        return json.dumps(state).encode()

    patch.setattr(trainer.Trainer, "describe", incomplete)


def reuse_a_generation(patch: Patch) -> None:
    """The view after a suspicion has the number of the one before."""
    overdue = rules.overdue

    def again(state: Any, now: float, settings: Any) -> Any:
        return overdue(replace(state, generation=state.generation - 1), now, settings)

    patch.setattr(rules, "overdue", again)


def forget_the_pieces_of_the_lost(patch: Patch) -> None:
    """Nobody makes up for what a lost member held of a global batch."""
    patch.setattr(sharding, "made_up", lambda window, held: {member: [] for member in held})


def make_up_for_what_was_dealt(patch: Patch) -> None:
    """Who holds which piece is taken from the dealing, as if nobody had made up for any."""
    gather = pieces.Pieces.settle

    def settle(self: Any, group: Any, view: Any) -> Any:
        mine, self.mine = self.mine, list(self.window.pieces_of(self._worker))
        try:
            return gather(self, group, view)
        finally:
            self.mine = [*dict.fromkeys([*mine, *self.mine])]

    patch.setattr(pieces.Pieces, "settle", settle)


def begin_before_it_is_made_up_for(patch: Patch) -> None:
    """A reduction that begins early does not look whether somebody is lost."""
    start = BucketRun.start

    def early(self: Any) -> None:
        kept, self._pieces = self._pieces, None
        start(self)
        self._pieces = kept

    patch.setattr(BucketRun, "start", early)


def everybody_saves(patch: Patch) -> None:
    """All who leave last save the state."""
    boundary = Session.boundary

    def each(self: Session) -> bool:
        try:
            return boundary(self)
        except Left as left:
            if left.last and self.view.rank_of(self.worker.id) != 0:
                self._save()
            raise

    patch.setattr(Session, "boundary", each)


def save_though_others_stay(patch: Patch) -> None:
    """Whoever is rank 0 saves when it leaves."""
    patch.setattr("ef_common.protocol.client.Left", lambda reason, *, last: Left(reason, last=True))


def nobody_saves(patch: Patch) -> None:
    """All leave, and take the state along."""
    patch.setattr(Session, "_save", lambda self: None)


def begin_anew_while_the_last_one_saves(patch: Patch) -> None:
    """Newcomers begin as soon as the last members have left the view."""
    plan = rules.plan

    def hasty(state: Any, settings: Any) -> Any:
        after, actions, reason = plan(state, settings)
        return replace(after, last=frozenset()) if isinstance(after, Forming) else after, actions, reason

    patch.setattr(rules, "plan", hasty)


def dismiss_silently(patch: Patch) -> None:
    """A newcomer that wants to leave is forgotten, and not told."""
    leaving = rules.leaving

    def silent(state: Any, worker: str) -> Any:
        after, actions, reason = leaving(state, worker)
        return after, () if worker in after.dismissed else actions, reason

    patch.setattr(rules, "leaving", silent)


def leave_without_an_agreement(patch: Patch) -> None:
    """Whoever is told to go goes at its next boundary, whatever the others do."""
    boundary = Session.boundary

    def alone(self: Session) -> bool:
        if self.leaving and not self.newcomer:
            raise Left("told to go")
        return boundary(self)

    patch.setattr(Session, "boundary", alone)


def tell_members_alone_of_the_failure(patch: Patch) -> None:
    """Whoever warms up, or is ready, is not told that the job has failed."""
    fail = failure._fail

    def some(state: Any, worker: str, why: str) -> Any:
        after, actions, reason = fail(state, worker, why)
        members = () if state.view is None else state.view.ids
        return after, tuple(action for action in actions if action.worker in (*members, worker)), reason

    patch.setattr(failure, "_fail", some)


def forget_the_failure(patch: Patch) -> None:
    """Whoever comes later finds a job that has not begun."""
    fail = failure._fail

    def once(state: Any, worker: str, why: str) -> Any:
        after, actions, reason = fail(state, worker, why)
        return Forming(generation=after.generation), actions, reason

    patch.setattr(failure, "_fail", once)


def take_an_exception_for_a_loss(patch: Patch) -> None:
    """The others go on without the one that raised."""
    patch.setattr(Channel, "fail", lambda self, why: True)


# ---------------------------------------------------------------- of the buckets of a reduction


def _at_a_new_group(patch: Patch, attribute: str, keep: Any) -> None:
    bind = BucketRun._bind

    def careless(self: Any, group: Any, view: Any) -> None:
        kept = getattr(self, attribute)
        bind(self, group, view)
        setattr(self, attribute, keep(kept))

    patch.setattr(BucketRun, "_bind", careless)


def do_not_issue_again_what_was_issued(patch: Patch) -> None:
    """After a loss, buckets whose sums were begun before it are not summed by those that are left."""
    _at_a_new_group(patch, "_pending", lambda pending: [LoneGroup() for _ in pending])


def keep_copies_of_the_last_group(patch: Patch) -> None:
    """What was copied into a bucket before a loss is not copied again, though the broken sum has left rubbish."""
    _at_a_new_group(patch, "copied", lambda copied: copied)


def use_stale_copies(patch: Patch) -> None:
    """A copy may lack a part of a gradient, and that does not matter."""
    patch.setattr(toy_operations.Reduction, "_is_stale", lambda self: False)


def start_over_alone(patch: Patch) -> None:
    """Whoever has a stale copy starts over, and the others do not."""
    patch.setattr(toy_operations.Reduction, "_is_stale", lambda self: self.stale)


def issue_what_is_not_ready(patch: Patch) -> None:
    """If so many buckets are ready, so many are issued from the first one on."""

    def ready(self: Any, *buckets: int) -> None:
        for bucket in buckets:
            self._ready[bucket] = bucket < len(self._buffers) - 1
        num = sum(self._ready)
        if self._group is not None:
            try:
                self._issue(self._group, [place < num for place in range(len(self._ready))])
            except GroupBroken:
                self._leave(RunState.UNBOUND)

    patch.setattr(BucketRun, "ready", ready)


def issue_in_an_order_of_ones_own(patch: Patch) -> None:
    """In every second member, the first two buckets change places."""

    def issue(self: Any, group: Any, ready: Any) -> None:
        order = [1, 0] if self.rank % 2 and len(self._buffers) > 2 else [0, 1]
        while ready[place := len(self._pending)]:
            bucket = order[place] if place < 2 else place
            self._fill(bucket)
            self._pending.append(group.all_reduce(self._buffers[bucket], self._call, self._meeting))

    patch.setattr(BucketRun, "_issue", issue)


def issue_flags_that_may_change(patch: Patch) -> None:
    """The last bucket is issued as soon as its gradients are ready."""

    issue = BucketRun._issue

    def early(self: Any, group: Any, ready: Any) -> None:
        issue(self, group, [*ready[:-2], ready[-3] if len(ready) > 2 else ready[-2], False])

    patch.setattr(BucketRun, "_issue", early)


def wait_for_the_last_sum_alone(patch: Patch) -> None:
    """When the last sum is complete, so are those before it."""

    def finish(self: Any, group: Any) -> None:
        self._issue(group, [True] * len(self._buffers) + [False])
        self._pending[-1].wait()

    patch.setattr(BucketRun, "_finish", finish)


def begin_the_confirmation_again(patch: Patch) -> None:
    """The confirmation begins when the session runs it, although it has begun before."""
    run = BucketRun.run

    def again(self: Any, group: Any, view: Any) -> None:
        self._group = None
        run(self, group, view)

    patch.setattr(Confirmation, "run", again)


def confirm_without_waiting(patch: Patch) -> None:
    """The confirmation has begun, so the result may be changed."""
    patch.setattr(Confirmation, "run", lambda self, group, view: None)


_OF_REDUCTIONS = _by_name(
    do_not_issue_again_what_was_issued,
    keep_copies_of_the_last_group,
    use_stale_copies,
    start_over_alone,
    issue_what_is_not_ready,
    issue_in_an_order_of_ones_own,
    issue_flags_that_may_change,
    wait_for_the_last_sum_alone,
    begin_the_confirmation_again,
    confirm_without_waiting,
)


# ---------------------------------------------------------------- of the quorum, and of how a standby takes over


def _with_shortfall(patch: Patch, change: Any) -> None:
    shortfall = quorum.shortfall

    def wrong(members: Any, chain: Any, **rest: Any) -> str:
        return shortfall(members, *change(tuple(chain), rest)[:1], **rest)

    patch.setattr(rules, "shortfall", wrong)


def need_no_quorum(patch: Patch) -> None:
    """Whoever is there goes on."""
    patch.setattr(rules, "shortfall", lambda members, chain, **rest: "")


def let_half_be_enough_for_everybody(patch: Patch) -> None:
    """Each coordinator takes each view for its own."""
    _with_shortfall(patch, lambda chain, rest: (tuple(replace(link, own=True) for link in chain),))


def need_the_newest_view_alone(patch: Patch) -> None:
    """Silent members are dropped one after the other."""
    _with_shortfall(patch, lambda chain, rest: (chain[-1:],))


def take_silence_for_death(patch: Patch) -> None:
    """Whoever is silent counts as gone."""
    gone = rules.gone

    def dead(state: Any, event: Any, *rest: Any, **more: Any) -> Any:
        return gone(state, replace(event, silent=False), *rest, **more)

    patch.setattr(rules, "gone", dead)


def count_without_the_dead(patch: Patch) -> None:
    """A successor leaves out whoever is dead, whatever it had been part of before."""
    shortfall = rules.shortfall_of

    def wrong(state: Any, ids: Any, settings: Any) -> str:
        return shortfall(replace(state, gone=state.gone | state.dead), ids, settings)

    patch.setattr(rules, "shortfall_of", wrong)


def take_a_refusal_for_a_death(patch: Patch) -> None:
    """Once the issuer has ended, half goes on if connections to all others are refused."""
    shortfall = rules.shortfall_of

    def wrong(state: Any, ids: Any, settings: Any) -> str:
        here = roster.gone(state) | state.dead | set(ids)
        chain = tuple(replace(link, own=link.own or (link.over and here >= set(link.view.ids))) for link in state.chain)
        return shortfall(replace(state, chain=chain), ids, settings)

    patch.setattr(rules, "shortfall_of", wrong)
    patch.setattr(quorum, "_deciding", lambda view, counted: "nobody")


def let_each_half_decide(patch: Patch) -> None:
    """Once the issuer has ended, half goes on, whichever it is."""
    _with_shortfall(patch, lambda chain, rest: (tuple(replace(link, own=link.own or link.over) for link in chain),))


def go_on_though_not_all_have_settled(patch: Patch) -> None:
    """A view goes on under a new coordinator though somebody has not received it."""
    end = takeover.end_gathering

    def hasty(state: Any, now: float, settings: Any) -> Any:
        view = rules.known(state)[-1].view
        returned = {w: replace(r, settled=view.generation, received=r.received[-1:]) for w, r in state.returned.items()}
        return end(replace(state, returned=returned), now, settings)

    patch.setattr(takeover, "end_gathering", hasty)


def keep_what_was_promised_to_oneself(patch: Patch) -> None:
    """A standby numbers its views from one."""
    install = rules.install

    def low(state: Any, members: Any, settings: Any, **rest: Any) -> Any:
        unknown = state.chain and not any(link.own for link in state.chain)
        return install(replace(state, generation=0) if unknown else state, members, settings, **rest)

    patch.setattr(rules, "install", low)


def keep_the_exception_from_a_successor(patch: Patch) -> None:
    """A worker that returns does not tell that its own code has raised."""
    report = ResumeState.report

    def silent(self: ResumeState, member: Any) -> Any:
        return replace(report(self, member), failed="")

    patch.setattr(ResumeState, "report", silent)


def tell_the_one_that_raised_first(patch: Patch) -> None:
    """It ends, and the coordinator may die before it has told the others."""
    fail = failure._fail

    def first(state: Any, worker: str, why: str) -> Any:
        after, actions, reason = fail(state, worker, why)
        return after, actions[::-1], reason

    patch.setattr(failure, "_fail", first)


# ---------------------------------------------------------------- of who is hung


def be_impatient(patch: Patch) -> None:
    """Half of the limit is enough."""
    limit_of = progress.limit_of
    patch.setattr(progress, "limit_of", lambda *args, **rest: limit_of(*args, **rest) / 2)


def blame_who_waits(patch: Patch) -> None:
    """The members are evicted that wait."""

    def wrong(members: Any, heard: Any, **rest: Any) -> Any:
        verdict = progress.judge(members, heard, **rest)
        others = tuple(member for member in members if member not in verdict.hung)
        return replace(verdict, hung=others) if verdict.hung else verdict

    patch.setattr(liveness, "judge", wrong)


def look_at_who_computes_alone(patch: Patch) -> None:
    """Whoever waits is healthy, wherever it does."""

    def wrong(members: Any, heard: Any, **rest: Any) -> Any:
        verdict = progress.judge(members, heard, **rest)
        hung = tuple(member for member in verdict.hung if not heard[member].progress.waits)
        return replace(verdict, hung=hung)

    patch.setattr(liveness, "judge", wrong)


def let_all_wait_for_ever(patch: Patch) -> None:
    """If all wait, it will be for something."""
    patch.setattr(progress, "_stuck", lambda *args: progress.Verdict())


_OF_HANGS = _by_name(
    be_impatient,
    blame_who_waits,
    look_at_who_computes_alone,
    let_all_wait_for_ever,
)


# ---------------------------------------------------------------- of claims


def claim_without_exclusivity(patch: Patch) -> None:
    """Whoever asks has the claim."""
    patch.setattr("ef_common.testing.simulation.claim_store.ClaimStore.get", lambda self, bid: bid.members)


def take_an_error_for_a_win(patch: Patch) -> None:
    """A store that fails counts as one that has said yes."""
    patch.setattr(Channel, "_fail", lambda self, bid: self._answer(bid, bid.members))


def half_of_the_issuer_needs_no_claim(patch: Patch) -> None:
    """Who has issued the view goes on with half of it, while the other half gets the claim."""

    def lack(link, here, counted, **rest):
        return None if link.own and 2 * len(counted & here) == len(counted) else before(link, here, counted, **rest)

    before = quorum._lack
    patch.setattr(quorum, "_lack", lack)


def most_need_no_claim(patch: Patch) -> None:
    """More than half of the members go on, while a few get the claim."""

    def lack(link, here, counted, **rest):
        return None if 2 * len(counted & here) > len(counted) else before(link, here, counted, **rest)

    before = quorum._lack
    patch.setattr(quorum, "_lack", lack)


def count_who_leaves(patch: Patch) -> None:
    """A quorum may rest on somebody whom another coordinator's group has let go."""

    def shortfall(state, ids, settings):
        leaving = {worker for worker, stands in state.workers.items() if stands.phase is Phase.LEAVING}
        known = {"dead": state.dead, "based": state.based, "stores": state.stores}
        return quorum.shortfall(ids, state.chain, gone=state.gone | leaving.difference(ids), **known)

    patch.setattr(rules, "shortfall_of", shortfall)
    patch.setattr(roster, "gone", lambda state: state.gone)


def keep_the_place_of_who_begins_anew(patch: Patch) -> None:
    """A member that comes as a newcomer is taken into the view of those who still wait for the first one."""
    patch.setattr(takeover, "is_founder", lambda worker, chain: False)


def few_do_not_claim(patch: Patch) -> None:
    """Few wait for ever, though they could have the claim."""

    def wanted(state):
        found, few = before(state)
        return ((), False) if few else (found, False)

    before = claim_rules.wanted
    patch.setattr(claim_rules, "wanted", wanted)


def keep_what_was_published(patch: Patch) -> None:
    """A member that comes back while groups are built lacks what the others have published meanwhile."""
    patch.setattr(takeover, "Republish", Announce)


def publish_once(patch: Patch) -> None:
    """A member that comes back does not publish again what may be lost with its old connection."""
    patch.setattr(Client, "_publish_again", lambda self: None)


def take_each_end_for_a_death(patch: Patch) -> None:
    """Whoever ends its connection is dead, though it says that it goes to another coordinator."""
    depart = CoordinatorServer._depart

    def grim(self: CoordinatorServer, peer: Any, why: str, **rest: Any) -> None:
        depart(self, peer, why, **rest | {"silent": False})

    patch.setattr(CoordinatorServer, "_depart", grim)


def nobody_claims(patch: Patch) -> None:
    """Half of the members waits, though it could have the claim."""
    patch.setattr(claim_rules, "ask", lambda state: (state, ()))


_OF_FAILOVER = _by_name(
    need_no_quorum,
    let_half_be_enough_for_everybody,
    need_the_newest_view_alone,
    take_silence_for_death,
    count_without_the_dead,
    take_a_refusal_for_a_death,
    let_each_half_decide,
    go_on_though_not_all_have_settled,
    keep_what_was_promised_to_oneself,
    keep_the_exception_from_a_successor,
    tell_the_one_that_raised_first,
    claim_without_exclusivity,
    take_an_error_for_a_win,
    half_of_the_issuer_needs_no_claim,
    most_need_no_claim,
    count_who_leaves,
    few_do_not_claim,
    keep_what_was_published,
    publish_once,
    take_each_end_for_a_death,
    nobody_claims,
    keep_the_place_of_who_begins_anew,
)

_OF_THE_SESSION = _by_name(
    forget_the_replay,
    drop_what_is_returned,
    admit_newcomers_in_a_loss,
    admit_newcomers_in_a_loss_unseen,
    skip_the_barrier_after_a_change,
    agree_alone,
    keep_the_weights_of_the_first_attempt,
    deal_by_the_view,
    count_the_view_as_contributors,
    hold_by_the_view,
    confirm_at_once,
    overwrite_the_last_result,
    lend_before_all_have_the_result,
    trust_in_being_alone,
    lose_the_joiners_state,
    reuse_a_generation,
    forget_the_pieces_of_the_lost,
    make_up_for_what_was_dealt,
    begin_before_it_is_made_up_for,
    everybody_saves,
    save_though_others_stay,
    nobody_saves,
    begin_anew_while_the_last_one_saves,
    dismiss_silently,
    leave_without_an_agreement,
    tell_members_alone_of_the_failure,
    forget_the_failure,
    take_an_exception_for_a_loss,
)


def let_in_whoever_is_ready(patch: Patch) -> None:
    """A newcomer is admitted whatever training of the program it is ready for."""

    def ready(state: Any, training: int) -> Any:
        return [stands.member for stands in state.workers.values() if stands.phase is Phase.READY]

    patch.setattr(roster, "ready", ready)
    patch.setattr(rules, "pass_over", lambda state: (state, ()))


_OF_TRAININGS = _by_name(let_in_whoever_is_ready)


# ---------------------------------------------------------------- of the number of nodes


def ask_all_to_leave(patch: Patch) -> None:
    """If there are too many nodes, all of them are asked to leave."""
    leavers = size._leavers

    def everybody(state: Any, settings: Any) -> Any:
        return [member.id for member in roster.remaining(state)] if leavers(state, settings) else []

    patch.setattr(size, "_leavers", everybody)


def ask_nobody_to_leave(patch: Patch) -> None:
    """Fewer nodes are wanted, and all stay."""
    patch.setattr(size, "_leavers", lambda state, settings: [])


def forget_who_was_asked(patch: Patch) -> None:
    """Members are asked to leave again and again, and more of them than are too many."""
    follow = size.follow

    def forgetful(before: Any, state: Any, settings: Any) -> Any:
        after, actions = follow(before, state, settings)
        return replace(after, asked=frozenset()) if isinstance(after, Serving) else after, actions

    patch.setattr(size, "follow", forgetful)


def forget_the_demand_at_a_takeover(patch: Patch) -> None:
    """Members do not tell the next coordinator how many nodes are wanted."""
    report = ResumeState.report
    patch.setattr(ResumeState, "report", lambda self, member: replace(report(self, member), demand=NO_DEMAND))


def let_an_old_demand_win(patch: Patch) -> None:
    """A standby takes the oldest demand that a member reports, as it may be the last that it hears."""
    end = takeover.end_gathering

    def aged(state: Any, now: float, settings: Any) -> Any:
        oldest = min(report.demand for report in state.returned.values())
        returned = {worker: replace(report, demand=oldest) for worker, report in state.returned.items()}
        return end(replace(state, returned=returned), now, settings)

    patch.setattr(takeover, "end_gathering", aged)


def admit_as_many_as_are_wanted(patch: Patch) -> None:
    """The settings of the job do not limit what its members want."""
    limit = roster.limit
    patch.setattr(roster, "limit", lambda state, settings: state.demand.nodes or limit(state, settings))


def keep_nobody_who_is_about_to_leave(patch: Patch) -> None:
    """If those are lost that were to stay, the others leave in spite of that, with the state."""
    patch.setattr(size, "take_back", lambda before, state, settings: (state, ()))


def let_those_stay_who_told_others_that_they_leave(patch: Patch) -> None:
    """A member counts again, though another coordinator may go on without it."""
    resized = takeover._resized

    def kind(state: Any, event: Any, settings: Any) -> Any:
        after, actions, reason = resized(state, event, settings)
        return replace(after, asked=state.asked | {event.member.id}), actions, reason

    patch.setattr(takeover, "_resized", kind)


_OF_SIZES = _by_name(
    ask_all_to_leave,
    ask_nobody_to_leave,
    forget_who_was_asked,
    forget_the_demand_at_a_takeover,
    let_an_old_demand_win,
    admit_as_many_as_are_wanted,
    keep_nobody_who_is_about_to_leave,
)


def keep_what_comes_back(patch: Patch) -> None:
    """The parts of lost members are not dealt again."""
    patch.setattr(streams, "commit", lambda stream, contributors: stream._replace(dealt=()))


def leave_what_was_dealt(patch: Patch) -> None:
    """The parts of a member come back although it has used them."""
    deal = streams.deal

    def repeated(stream: Any, plan: Any) -> Any:
        after = deal(stream, plan)
        return after._replace(left=(*after.left, *next(iter(after.dealt[-1].values()))))

    patch.setattr(streams, "deal", repeated)


def lose_the_lanes_of_the_lost(patch: Patch) -> None:
    """What a lost member would have read is in no other lane."""
    replace_members = streams._with_members

    def careless(stream: Any, plan: Any, members: Any) -> Any:
        return replace_members(stream, plan, members)._replace(left=stream.left)

    patch.setattr(streams, "_with_members", careless)


def tell_nobody_of_ends(patch: Patch) -> None:
    """The others deal a batch as if no end had been found in it."""
    patch.setattr(StreamTurns, "finds", lambda self: False)


def learn_too_late_that_it_was_the_last(patch: Patch) -> None:
    """Whether a step was the last one of its epoch is not known when it is made."""
    patch.setattr(streams, "goes_on", lambda stream: True)


def trust_flags_of_other_members(patch: Patch) -> None:
    """Nobody has found an end, and so no ends are exchanged, though newcomers have read nothing."""
    admit = streams.admit

    def settle(self: Any) -> None:
        members = self._session.completed_in.ids
        if self.certain and members != tuple(self.stream.held):
            self.stream = admit(self.stream, self.plan, members)
        careful(self)

    careful = StreamTurns._settle
    patch.setattr(StreamTurns, "_settle", settle)


def send_a_state_without_what_is_left(patch: Patch) -> None:
    """A newcomer does not know what lost members have left."""
    state = StreamDealer.state
    patch.setattr(StreamDealer, "state", lambda self: {**state(self), "left": []})


def keep_lanes_of_ones_own(patch: Patch) -> None:
    """Members with other numbers of lanes compute different plans."""

    def agree(self: Any) -> None:
        self.begin(self.plan, self.stream, layout=LaneLayout(self.plan.num_lanes, self.plan.ahead))

    patch.setattr(StreamTurns, "_agree", agree)


def forget_lanes_that_are_too_many(patch: Patch) -> None:
    """After a new start with fewer lanes, nobody reads what was in the others."""

    def with_lanes(stream: Any, num_lanes: int) -> Any:
        held = {
            member: Held(tuple(held.lanes[:num_lanes]) + ((),) * (num_lanes - len(held.lanes)), held.turn % num_lanes)
            for member, held in stream.held.items()
        }
        return stream._replace(held=held)

    patch.setattr(streams, "with_lanes", with_lanes)


_OF_STREAMS = _by_name(
    keep_what_comes_back,
    leave_what_was_dealt,
    lose_the_lanes_of_the_lost,
    tell_nobody_of_ends,
    learn_too_late_that_it_was_the_last,
    trust_flags_of_other_members,
    send_a_state_without_what_is_left,
    keep_lanes_of_ones_own,
    forget_lanes_that_are_too_many,
)

# ---------------------------------------------------------------- of greetings, and of peers that do not read or vanish


def accept_only_the_first_token(patch: Patch) -> None:
    """The token cannot be replaced while the job runs."""
    patch.setattr(Token, "accepted", property(lambda self: (Token(self.secret),)))


def answer_with_the_first_token(patch: Patch) -> None:
    """A coordinator proves the token that it uses itself, whichever the worker has proved."""
    prove = Admission.prove

    def stubborn(self: Admission, nonce: str, hello: Any) -> str:
        prove(self, nonce, hello)
        return coordinator_proof(self._tokens[0], client_nonce=hello.nonce, server_nonce=nonce)

    patch.setattr(Admission, "prove", stubborn)


def take_a_greeting_again(patch: Patch) -> None:
    """A worker's proof does not depend on the nonce of the coordinator."""
    for module in (admission, introduction):
        patch.setattr(module, "worker_proof", lambda token, **rest: worker_proof(token, **rest | {"server_nonce": ""}))


def take_any_proof(patch: Patch) -> None:
    """A coordinator does not check what a worker proves."""
    patch.setattr(admission, "proves", lambda expected, received: True)


def forget_the_keys(patch: Patch) -> None:
    """Whoever has the token may come in the name of a worker that is connected."""
    patch.setattr(Admission, "remember", lambda self, worker, key: None)


def hide_that_the_token_is_wrong(patch: Patch) -> None:
    """A worker with another token is refused, and does not learn why."""
    prove = Admission.prove

    def curt(self: Admission, nonce: str, hello: Any) -> str:
        try:
            return prove(self, nonce, hello)
        except PeerRefusal as refusal:
            raise PeerRefusal(refusal.kind, refusal.why) from None

    patch.setattr(Admission, "prove", curt)


def wait_for_those_who_say_nothing(patch: Patch) -> None:
    """Strangers stay connected that do not introduce themselves."""
    patch.setattr(Sessions, "overdue", lambda self, now, timeout_s: [])


def keep_who_does_not_read(patch: Patch) -> None:
    """What a peer does not read is kept without a limit."""
    patch.setattr(CoordinatorServer, "overflow", lambda self, peer, num_bytes, now: None)


def drop_who_does_not_read_unseen(patch: Patch) -> None:
    """The connection of such a peer ends, and its worker stays a member."""

    def drop(self: CoordinatorServer, peer: Any, num_bytes: int, now: float) -> None:
        self._forget(peer)
        self._emit([Close(peer)])

    patch.setattr(CoordinatorServer, "overflow", drop)


def take_a_slow_reader_for_dead(patch: Patch) -> None:
    """Such a worker is taken for dead, and goes on with another coordinator."""

    def grim(self: CoordinatorServer, peer: Any, num_bytes: int, now: float) -> None:
        self._depart(peer, "it does not read", last_words=b"", silent=False)

    patch.setattr(CoordinatorServer, "overflow", grim)


def wait_for_the_end_of_a_connection(patch: Patch) -> None:
    """A worker whose coordinator is silent goes to no other one before its system gives up."""
    patch.setattr(Heartbeats, "is_silent", lambda self, heard, now: False)


def hear_the_downlink_too_early(patch: Patch) -> None:
    """What comes on the second connection is heard before all that was said on the first one."""
    take = Client._take

    def hasty(self: Client, link: Any) -> bool:
        if link is self._downlink and link.introduction.answer is not None:
            self._hears_downlink = True
        return take(self, link)

    patch.setattr(Client, "_take", hasty)


_OF_GREETINGS = _by_name(
    accept_only_the_first_token,
    answer_with_the_first_token,
    take_a_greeting_again,
    take_any_proof,
    forget_the_keys,
    hide_that_the_token_is_wrong,
    wait_for_those_who_say_nothing,
    keep_who_does_not_read,
    drop_who_does_not_read_unseen,
)

_OF_LOST_HOSTS = _by_name(take_a_slow_reader_for_dead, wait_for_the_end_of_a_connection, hear_the_downlink_too_early)


def tell_nobody_at_the_endpoints(patch: Patch) -> None:
    """Whoever comes up at an endpoint never hears who leads."""
    patch.setattr(EndpointAnnouncer, "next", lambda self, state, now: None)


def take_a_refusal_at_an_endpoint_for_good(patch: Patch) -> None:
    """An endpoint whose port was closed once is not tried again, as a standby is not."""

    def give_up(self: EndpointAnnouncer, endpoint: Any) -> None:
        self._due[endpoint] = inf

    patch.setattr(EndpointAnnouncer, "refused", give_up)


def tell_each_endpoint_once(patch: Patch) -> None:
    """An endpoint that has heard who leads is not told again, although another process may be there by then."""

    def content(self: EndpointAnnouncer, endpoint: Any) -> None:
        self._due[endpoint] = inf

    patch.setattr(EndpointAnnouncer, "told", content)


_OF_ENDPOINTS = _by_name(tell_nobody_at_the_endpoints, take_a_refusal_at_an_endpoint_for_good, tell_each_endpoint_once)

MUTATIONS = {
    "": _OF_THE_SESSION | _OF_REDUCTIONS | _OF_GREETINGS,
    "failover": _OF_FAILOVER | _OF_LOST_HOSTS,
    "endpoints": _OF_ENDPOINTS,
    "hangs": _OF_HANGS,
    "trainings": _OF_TRAININGS,
    "sizes": _OF_SIZES,
    "streams": _OF_STREAMS,
}
"""By the family of schedules that must show them, and by name."""
