"""A standby takes over (rule 11), and a coordinator without a quorum waits (rule 10)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ef_common.core.membership import (
    Agree,
    Announce,
    Arrived,
    AtBoundary,
    Begun,
    Claim,
    Claimed,
    Dismiss,
    Failed,
    Finish,
    Forming,
    Gone,
    Idle,
    Install,
    Leaving,
    Membership,
    Outranked,
    Phase,
    Ready,
    Refused,
    Republish,
    Returned,
    SendAway,
    Serving,
    Settings,
    Settled,
    Silent,
    Skip,
    StepDown,
    Stored,
    Suspected,
    Tick,
    decide,
    missing,
    next_deadline,
    roster,
)
from ef_common.core.membership.phase import WorkerPhase
from ef_common.core.quorum import ChainLink, digest_of_ids
from ef_common.core.resume_state import ResumeState
from ef_common.core.view import Member, View
from ef_common.errors import ProtocolError

SETTINGS = Settings(loss_notice_s=2.0, gathering_s=0.0)  # each loss is decided for itself


def member(name: str) -> Member:
    return Member(name, name, "", standby=ord(name), liveness_port=2)


def view(generation: int, names: str, **fields: object) -> View:
    return View(generation, tuple(map(member, names)), **fields)


def agree(view: View) -> Agree:
    return Agree(view.ids, view.generation, digest_of_ids(view.ids))


class Coordinator:
    """A coordinator, by default a standby; keeps all actions."""

    def __init__(self, *, idle: bool = True, **settings: object) -> None:
        self.state: Membership = Idle() if idle else Forming()
        self.settings = replace(SETTINGS, **settings)
        self.actions: list[object] = []
        self.reason = ""

    def __call__(self, *events: object, at: float = 0.0) -> Coordinator:
        for event in events:
            self.state, actions, self.reason = decide(self.state, event, at, self.settings)
            self.actions += actions
        return self

    def returns(self, names: str, *views: View, at: float = 0.0, settled: int | None = None, **fields) -> Coordinator:
        over = bool(fields.pop("over", True))
        generation = views[0].generation if settled is None else settled
        links = tuple(ChainLink(v, over=over, agreed=bool(fields.get("agreed"))) for v in views)
        fields.pop("agreed", None)
        for name in names:
            report = Returned(
                member(name), Phase.MEMBER, promised=views[-1].generation, settled=generation, received=links
            )
            self(replace(report, **{"store": "", **fields}), at=at)
        return self

    def of(self, kind: type) -> list[object]:
        return [action for action in self.actions if isinstance(action, kind)]

    @property
    def views(self) -> list[tuple[int, str]]:
        return [(action.view.generation, "".join(action.view.ids)) for action in self.of(Install)]


def founded(names: str, store: str = "") -> Coordinator:
    job = Coordinator(idle=False, max_nodes=len(names))
    job(*(Arrived(member(name)) for name in names), Tick())
    return job(*(Settled(name, 1) for name in names), *(Stored(name, store) for name in names))


# ---------------------------------------------------------------- taking over


def test_takeover_with_all_members_lets_the_view_go_on():
    job = Coordinator().returns("abc", view(5, "abc"))
    assert job.views == []
    assert job.state.view == view(5, "abc")
    assert next_deadline(job.state, SETTINGS) is None


def test_takeover_without_a_dead_member_makes_a_view_at_once():
    job = Coordinator().returns("bc", view(5, "abc"))
    assert job.views == []
    assert [m.id for m in missing(job.state)] == ["a"]
    assert job(Refused("a")).views == [(6, "bc")]


def test_takeover_without_a_silent_member_waits_for_the_loss_notice():
    job = Coordinator().returns("bc", view(5, "abc"))
    assert next_deadline(job.state, SETTINGS) == 2.0
    assert job(Tick(), at=1.9).views == []
    assert job(Tick(), at=2.0).views == [(6, "bc")]


def test_takeover_of_half_by_the_one_that_decides_needs_the_others_to_seem_dead():
    ab = view(5, "ab", issuer=ord("a"))
    assert Coordinator().returns("b", ab)(Refused("a")).views == [(6, "b")]
    assert Coordinator().returns("b", ab, over=False)(Refused("a"), Tick(), at=2.0).views == []
    silent = Coordinator().returns("b", ab)(Tick(), at=2.0)
    assert silent.views == []
    assert "on_minority" in silent.state.held
    assert silent(Refused("a"), at=2.5).views == [(6, "b")]


def test_takeover_of_the_other_half_waits_though_connections_to_all_others_are_refused():
    """A firewall may do that, or another machine that has their address now."""
    job = Coordinator().returns("a", view(5, "ab", issuer=ord("a")))(Refused("b"))
    assert job.views == []
    assert "on_minority" in job.state.held
    assert job(Tick(), at=2.5).views == []


def test_takeover_with_a_view_that_not_all_have_settled_in_makes_a_new_one():
    job = Coordinator().returns("ab", view(5, "abc"), view(6, "abc", base=5))
    job.returns("c", view(5, "abc"))
    assert job.views == [(7, "abc")]


def test_takeover_with_a_suspicion_makes_a_new_view_of_the_same_members():
    assert Coordinator().returns("ab", view(5, "abc")).returns("c", view(5, "abc"), suspects=True).views == [(6, "abc")]
    meanwhile = Coordinator().returns("a", view(5, "ab"))(Suspected("a", 5)).returns("b", view(5, "ab"))
    assert meanwhile.views == [(6, "ab")]


def test_takeover_generation_is_above_all_that_was_promised():
    job = Coordinator().returns("a", view(5, "ab"), promised=9).returns("b", view(5, "ab"), suspects=True)
    assert job.views == [(10, "ab")]


def test_takeover_goes_on_with_a_planned_change():
    job = Coordinator().returns("ab", view(5, "ab"), at_boundary=True)
    assert job.views == [(6, "ab")]
    late = Coordinator().returns("a", view(5, "ab"))(AtBoundary("a", 5)).returns("b", view(5, "ab"), at_boundary=True)
    assert late.views == [(6, "ab")]


def test_takeover_announces_newcomers_and_leavers():
    job = Coordinator().returns("a", view(5, "ab"))
    job(Returned(member("n"), Phase.READY))
    assert job.returns("b", view(5, "ab")).of(Announce)
    leaver = Coordinator().returns("a", view(5, "ab"), phase=Phase.LEAVING).returns("b", view(5, "ab"))
    assert leaver.of(Announce)
    leaver(AtBoundary("a", 5), AtBoundary("b", 5))
    assert leaver.views == [(6, "b")]


def test_takeover_dismisses_whoever_is_not_in_the_newest_view():
    job = Coordinator().returns("c", view(5, "abc")).returns("ab", view(5, "abc"), view(6, "ab"), settled=6)
    assert job.of(Dismiss) == [Dismiss("c", "the newest view is without it")]
    assert job.state.view == view(6, "ab")


def test_takeover_refuses_who_does_not_name_the_view_in_which_it_has_settled():
    with pytest.raises(ProtocolError, match="does not name its members"):
        Coordinator().returns("a", view(5, "ab"), settled=6)


def test_takeover_goes_on_from_the_newest_view_that_came_about():
    # {c, d, e} was issued elsewhere, and never came about; d and e lag behind.
    job = Coordinator().returns("de", view(5, "abcde"), view(7, "cde", base=5))
    job.returns("abc", view(6, "abc", base=5))
    assert job.state.view == view(6, "abc", base=5)
    assert {action.worker for action in job.of(Dismiss)} == {"d", "e"}


def test_takeover_heeds_who_was_gone_when_the_old_coordinator_issued_its_last_view():
    # c is gone for good; b, the other half of the last view, has died with the coordinator.
    job = Coordinator().returns("a", view(5, "abc"), view(6, "ab", gone=("c",), base=5), settled=5)
    assert job(Refused("b")).views == [(7, "a")]


def test_takeover_after_the_end_tells_newcomers():
    job = Coordinator().returns("a", view(5, "ab"), closed=True)
    job(Returned(member("n"), Phase.READY))
    assert job.of(Finish) == [Finish("n")]


def test_takeover_learns_the_training_and_tells_newcomers():
    job = Coordinator().returns("a", view(5, "ab"), training=2)
    job(Returned(member("x"), Phase.READY, training=1), Returned(member("y"), Phase.READY, training=2))
    assert Skip("x", 2) in job.actions
    job.returns("b", view(5, "ab"), training=2)
    assert job.state.training == 2
    assert job.of(Announce) == [Announce(("a", "b"), 5)]
    job(AtBoundary("a", 5), AtBoundary("b", 5))
    assert job.views == [(6, "aby")]


def test_takeover_demotes_newcomers_that_came_before_the_members_told_their_training():
    job = Coordinator().returns("a", view(5, "ab"))
    job(Returned(member("x"), Phase.READY))
    job.returns("b", view(5, "ab"), training=2)
    assert job.of(Skip) == [Skip("x", 2)]
    assert job.state.workers["x"].phase is Phase.WARMING


def test_member_that_comes_back_tells_that_it_has_begun_a_training_meanwhile():
    job = founded("abc")(Arrived(member("x")), Ready("x"), Silent(("b", "c"), "their connections broke"))
    job.returns("b", view(1, "abc"), training=2)
    assert job.state.training == 2
    assert job.of(Skip) == [Skip("x", 2)]


def test_takeover_hears_of_a_training_that_begins_while_it_gathers():
    job = Coordinator().returns("a", view(5, "ab"))(Begun("a", 2))
    assert job.returns("b", view(5, "ab")).state.training == 2


def test_what_members_knew_before_is_forgotten_when_the_last_of_them_reports_anew():
    first, second = view(4, "abcd"), view(5, "abcd")
    job = Coordinator().returns("ab", first, second)
    job(Settled("a", 5))
    assert {generation for generation, _ in job.state.known.values()} == {4, 5}  # b may still fall back to view 4
    job(AtBoundary("a", 5), Settled("b", 5))
    assert list(job.state.known.values()) == [(5, (ChainLink(second, over=True),))]
    assert list(job.state.knowing.values()) == [2]
    job.returns("a", first, second)
    assert sorted(generation for generation, _ in job.state.known.values()) == [4, 5]
    assert list(job.state.knowing.values()) == [1, 1]


def test_takeover_counts_a_member_that_came_and_died_as_gone():
    job = Coordinator().returns("ab", view(5, "abc"))(Gone("b", "its connection ended"), Refused("c"))
    assert job.views == [(6, "a")]


def test_standby_redirects_newcomers():
    job = Coordinator()(Arrived(member("n")), Returned(member("m"), Phase.WARMING))
    assert job.actions == [SendAway("n"), SendAway("m")]
    assert job.state == Idle()


# ---------------------------------------------------------------- with and without a quorum


def test_silent_loss_of_half_goes_on_where_the_view_was_issued():
    assert founded("ab")(Gone("b", "silent", silent=True)).views[1:] == [(2, "a")]


def test_silent_losses_one_after_the_other_do_not_pass_below_half():
    job = founded("abcd")(*(Gone(name, "silent", silent=True) for name in "bcd"))
    assert job.views[1:] == [(2, "acd"), (3, "ad")]
    assert "only 1 of 4 members of view 1" in job.state.held


def test_known_losses_one_after_the_other_go_on_to_the_last():
    assert founded("abcd")(*(Gone(name, "killed") for name in "bcd")).views[-1] == (4, "a")


def test_view_that_is_held_back_is_issued_when_a_silent_one_is_known_to_be_gone():
    job = founded("abc")(Gone("b", "silent", silent=True), Gone("c", "silent", silent=True))
    assert job.views[1:] == [(2, "ac")]
    assert job(Gone("c", "its connection ended")).views[2:] == [(3, "a")]


def test_view_that_is_held_back_is_issued_when_a_silent_one_comes_back():
    job = founded("abc")(Gone("b", "silent", silent=True), Gone("c", "silent", silent=True))
    job.returns("c", view(1, "abc"), view(2, "ac"), suspects=True)
    assert job.views[2:] == [(3, "ac")]


def test_view_that_is_held_back_too_long_makes_the_coordinator_step_down():
    job = founded("abc")(Gone("b", "silent", silent=True), Gone("c", "silent", silent=True))
    assert next_deadline(job.state, SETTINGS) == SETTINGS.patience_s
    job(Tick(), at=SETTINGS.patience_s)
    assert job.of(StepDown) == [StepDown()]
    assert job.state == Idle(generation=2)


def test_view_that_is_held_back_waits_for_its_members_while_nobody_is_here():
    """Whoever has not received it may have begun anew, and nobody else waits for it."""
    job = founded("ab")(Silent(("a", "b"), "the network is cut"))
    assert next_deadline(job.state, SETTINGS) is None
    job(Tick(), at=1000.0)
    assert job.of(StepDown) == []
    job(Arrived(member("a")), at=1000.0)
    assert next_deadline(job.state, SETTINGS) == 1000.0 + SETTINGS.patience_s
    job(Arrived(member("b")), at=1001.0)
    assert job.state.held == ""


def test_view_that_is_held_back_makes_room_for_a_coordinator_that_comes_first():
    job = founded("abc")(Gone("b", "silent", silent=True))
    assert job(Outranked()).of(StepDown) == []
    assert job(Gone("c", "silent", silent=True), Outranked()).of(StepDown) == [StepDown()]


def test_takeover_by_newcomers_that_do_not_know_what_was_before_needs_all_members():
    job = Coordinator().returns("mn", view(5, "amn"), settled=0)(Refused("a"))
    assert job.views == []
    first = Coordinator().returns("bc", view(1, "abc"), settled=0)(Refused("a"))
    assert first.views == [(2, "bc")]


def test_minority_continues_if_it_is_told_to():
    job = Coordinator(idle=False, max_nodes=3, on_minority="continue")
    job(*(Arrived(member(name)) for name in "abc"), Tick())(*(Settled(name, 1) for name in "abc"))
    assert job(*(Gone(name, "silent", silent=True) for name in "bc")).views[-1] == (3, "a")


def test_job_does_not_begin_anew_while_a_silent_member_may_go_on():
    job = founded("a")(Arrived(member("n")), Ready("n"), Gone("a", "silent", silent=True), Tick(), at=9.0)
    assert job.views[1:] == []
    assert "only 0 of 1" in job.state.held
    assert job(Gone("a", "its connection ended"), Tick(), at=99.0).views[1:] == [(2, "n")]


def test_job_does_not_begin_anew_while_the_last_that_left_is_silent_and_no_time_changes_that():
    job = founded("a")(Leaving("a"), AtBoundary("a", 1))(Arrived(member("n")), Ready("n"))
    job(Gone("a", "silent", silent=True), Tick(), at=9.0)
    assert job.views[1:] == [(2, "")]
    assert "only 0 of 1" in job.state.held
    assert next_deadline(job.state, job.settings) is None
    assert job(Gone("a", "its connection ended"), Tick(), at=99.0).views[2:] == [(3, "n")]


@pytest.mark.parametrize("store", ["", "d1"])
def test_leavers_go_at_once_however_many_they_are(store):
    job = founded("abc", store)(Leaving("b"), Leaving("c"), *(AtBoundary(name, 1) for name in "abc"))
    assert job.views[1:] == [(2, "a")]


def test_leavers_are_nobodys_quorum():
    """The others may have let them go."""
    job = Coordinator().returns("bc", view(5, "abc"), phase=Phase.LEAVING)(Refused("a"))
    assert job.views == []
    assert job.returns("a", view(5, "abc")).views == [(6, "abc")]


@pytest.mark.parametrize("newest", [1, 2])
def test_member_that_lost_its_connection_comes_back_and_gets_a_view_if_it_has_missed_one(newest):
    """Not the one that it has missed: what that rested on may not hold any more."""
    job = founded("abc")
    if newest == 2:
        job(Suspected("a", 1), Suspected("b", 1), Suspected("c", 1))
    job.returns("b", view(1, "abc"))
    assert job.views[newest:] == ([(3, "abc")] if newest == 2 else [])
    assert job.state.workers["b"].phase is Phase.MEMBER


def test_others_publish_again_for_a_member_that_comes_back_and_has_not_settled():
    job = Coordinator(idle=False, max_nodes=3)(*(Arrived(member(name)) for name in "abc"), Tick())
    assert job.returns("b", view(1, "abc"), settled=0).of(Republish) == [Republish(("a", "c"), 1)]
    assert founded("abc").returns("b", view(1, "abc")).of(Republish) == []


def test_member_that_comes_back_too_late_is_dismissed():
    job = founded("abc")(Gone("b", "silent", silent=True)).returns("b", view(1, "abc"))
    assert job.of(Dismiss) == [Dismiss("b", "it was away for too long")]


def test_member_with_a_view_of_another_coordinator_makes_this_one_step_down():
    assert founded("abc").returns("b", view(1, "abc"), view(2, "bc", base=1)).of(StepDown)


def test_views_name_who_is_gone_until_they_have_come_about() -> None:
    coordinator = Coordinator(idle=False, last_call_s=0.5)
    coordinator(*(Arrived(member(name)) for name in "abc"))
    coordinator(Tick(), at=1.0)
    assert coordinator.state.view is not None
    assert coordinator.state.view.world_size == 3
    coordinator(Gone("c", "it died"))
    assert coordinator.state.view.gone == ("c",)
    coordinator(Settled("a", 2), Gone("b", "it died"))
    assert coordinator.state.view.gone == ("b",)


# ---------------------------------------------------------------- halves, and their claims


@pytest.mark.parametrize("won", [True, False])
@pytest.mark.parametrize("lost", ["b", "bc"])
def test_members_with_a_store_go_on_once_they_have_the_claim(won, lost):
    names = "abcd"[: len(lost) + 2]
    job = founded(names, "d1")(*(Gone(name, "silent", silent=True) for name in lost))
    assert job.views[1:] == []
    here = "".join(name for name in names if name not in lost)
    claims = [claim for claim in job.of(Claim) if "".join(claim.bid.members) == here]
    assert {claim.worker for claim in claims} == set(here[:3])
    job(Claimed(here[0], claims[0].bid.claim, tuple(here if won else lost)), Tick())
    assert job.views[1:] == ([(2, here)] if won else [])
    assert won or "others go on" in job.state.held


def test_few_members_go_on_if_the_others_do_not_take_the_claim_first():
    job = founded("abc", "d1")(Gone("b", "silent", silent=True), Gone("c", "silent", silent=True))
    first = job.of(Claim)[-1]
    assert first.bid.members == ("a", "c")  # c might have gone on with a
    patience = SETTINGS.patience_s
    job(Tick(), at=patience / 2)
    assert job.of(Claim)[-1] is first
    assert next_deadline(job.state, SETTINGS) == patience
    job(Tick(), at=patience)
    (claim,) = (claim for claim in job.of(Claim) if claim.bid.members == ("a",))
    assert next_deadline(job.state, SETTINGS) == 2 * patience
    assert job(Claimed("a", claim.bid.claim, ("a",)), at=patience + 1).views[1:] == [(2, "a")]


def test_few_members_ask_at_once_if_the_others_are_dead():
    job = Coordinator().returns("a", view(5, "abc"), store="d1", agreed=True)(Refused("b"), Refused("c"))
    assert [claim.bid.members for claim in job.of(Claim)] == [("a",)]


def test_few_members_step_down_if_the_store_does_not_answer():
    job = founded("abc", "d1")(Gone("b", "silent", silent=True), Gone("c", "silent", silent=True))
    job(Tick(), at=SETTINGS.patience_s)
    assert job.of(StepDown) == []
    assert job(Tick(), at=2 * SETTINGS.patience_s).of(StepDown) == [StepDown()]


def test_few_members_that_do_not_know_that_all_have_one_store_wait():
    job = Coordinator().returns("a", view(5, "abc"), store="d1")(Refused("b"), Refused("c"))
    assert job.of(Claim) == []
    assert "not all members were known" in job.state.held


def test_members_are_told_when_all_of_them_have_one_store():
    job = founded("abc")
    assert job.of(Agree) == []
    job = founded("abc", "d1")
    assert job.of(Agree) == [agree(job.state.view)]
    assert job(Suspected("a", 1), Suspected("b", 1), Suspected("c", 1)).of(Agree)[1:] == [agree(job.state.view)]
    job.settings = replace(job.settings, max_nodes=4)
    job(Arrived(member("n")), Ready("n"), *(AtBoundary(name, 2) for name in "abc"))
    assert len(job.of(Agree)) == 2
    assert job(Stored("n", "d1")).of(Agree)[2:] == [agree(job.state.view)]


def test_newcomer_whose_first_view_went_on_without_it_is_no_member_wherever_the_others_come():
    """It is alone at a standby, with a view in which it has not settled; the others have dropped it since, and trained.

    In a view of all three it would wait for them to begin, and they for it to come to a boundary.
    """
    job = Coordinator().returns("n", view(2, "abn", base=1, admitted_at=2), settled=0)(Tick(), at=2.0)
    assert "all are needed" in job.state.held
    dropped = view(3, "ab", base=1, admitted_at=2)
    job.returns("a", dropped, at=3.0)
    assert job.of(StepDown) == [StepDown()]
    job.returns("a", dropped, at=4.0).returns("n", view(2, "abn", base=1, admitted_at=2), settled=0, at=4.0)
    job.returns("b", dropped, at=4.0)
    assert [action.worker for action in job.of(Dismiss)] == ["n"]
    assert job.views == []
    assert job.state.view == dropped


def test_members_are_told_so_again_when_one_comes_back_or_all_come_to_a_successor():
    """The one may not have heard it; of the others, some may not, and their coordinator is no more."""
    job = founded("abc", "d1")
    job.returns("b", view(1, "abc"), store="d1", over=False)
    assert job.of(Agree) == [agree(job.state.view)] * 2
    successor = Coordinator().returns("ab", view(5, "abc"), store="d1")
    assert successor.of(Agree) == []
    successor.returns("c", view(5, "abc"), store="d1", agreed=True)
    assert successor.of(Agree) == [agree(view(5, "abc"))]


@pytest.mark.parametrize("proof", [(Refused("b"),), ()])
def test_half_of_a_successor_goes_on_once_it_has_the_claim_whether_the_others_are_dead_or_silent(proof):
    job = Coordinator().returns("a", view(5, "ab"), store="d1")(*proof)(Tick(), at=2.0)
    (claim,) = job.of(Claim)
    assert job.views == []
    assert job(Claimed("a", claim.bid.claim, ("a",)), at=2.0).views == [(6, "a")]


def test_claim_that_others_have_is_no_way_out_even_if_they_are_dead():
    job = Coordinator().returns("a", view(5, "ab"), store="d1")(Refused("b"))
    job(Claimed("a", job.of(Claim)[0].bid.claim, ("b",)))
    assert job.views == []


def test_claim_is_asked_for_again_if_the_one_that_was_asked_has_been_away():
    job = founded("ab", "d1")(Gone("b", "silent", silent=True))
    (first,) = job.of(Claim)
    job(Gone("a", "silent", silent=True)).returns("a", view(1, "ab"), store="d1", over=False)
    assert job.of(Claim) == [first, first]
    assert job(Tick()).of(Claim) == [first, first]


def test_claim_is_asked_for_as_soon_as_somebody_has_told_the_store():
    job = founded("ab", "d1")
    job.state = replace(job.state, stores=replace(job.state.stores, told={}))
    job(Gone("b", "silent", silent=True))
    assert job.of(Claim) == []
    job(Stored("a", "d1"))
    assert len(job.of(Claim)) == 1


def test_claim_cannot_name_others_later():
    job = founded("ab", "d1")(Gone("b", "silent", silent=True))
    claim = job.of(Claim)[0].bid.claim
    job(Claimed("a", claim, ("b",)), Claimed("a", claim, ("a",)))
    assert job.views[1:] == []


def test_claim_is_not_believed_of_one_that_was_not_asked():
    job = founded("abcd", "d1")(Gone("d", "silent", silent=True))
    claims = job.of(Claim)
    assert {claim.worker for claim in claims} == set("abc")
    bid = claims[0].bid
    assert job(Claimed("x", bid.claim, bid.members), Claimed("a", bid.claim[::-1], bid.members)).views[1:] == []
    assert job(Claimed("b", bid.claim, bid.members)).views[1:] == [(2, "abc")]


def test_member_that_tells_another_store_is_refused():
    with pytest.raises(ProtocolError, match="another store"):
        founded("ab", "d1")(Stored("a", "d2"))


def test_view_that_was_missed_is_not_issued_again_without_a_claim_that_it_needs_by_now():
    """Those who have missed it have been with the others, and all have told their store."""
    job = founded("abcde")
    job.state = replace(job.state, stores=replace(job.state.stores, told={}))
    job(Silent(("a", "b"), "silent"))
    assert job.views[1:] == [(2, "cde")]
    job.returns("c", view(1, "abcde"), store="d1", agreed=True)
    assert job.views[2:] == []
    assert [claim.bid.members for claim in job.of(Claim)][-1] == ("c", "d", "e")


def test_leavers_that_are_silent_together_hold_up_nobody_that_comes_after_them():
    job = founded("ab")(Leaving("a"), Leaving("b"), AtBoundary("a", 1), AtBoundary("b", 1))
    assert job.state.last == {"a", "b"}
    assert job(Silent(("a", "b"), "silent")).state.last == frozenset()


def test_silences_that_are_noticed_together_are_decided_on_together():
    job = founded("abc")(Silent(("b", "c"), "silent"))
    assert job.views[1:] == []
    assert "only 1 of 3" in job.state.held
    assert founded("abcde")(Silent(("x", "b", "c"), "silent")).views[1:] == [(2, "ade")]


def test_view_of_which_a_claim_may_exist_does_not_go_on_as_it_is():
    """Whom the claim leaves out could save nothing in it, and would be left out for good if the others were lost."""
    asked = ResumeState().received(view(5, "ab")).told(Settled("a", 5)).claiming()
    assert asked.report(member("b")).suspects
    assert Coordinator().returns("a", view(5, "ab")).returns("b", view(5, "ab"), suspects=True).views == [(6, "ab")]


def test_agreement_is_of_one_view_of_its_generation():
    resume_state = ResumeState().received(view(5, "ab"))
    assert not resume_state.agreed(5, digest_of_ids(("a", "b", "c"))).links[0].agreed
    assert resume_state.agreed(5, digest_of_ids(("a", "b"))).links[0].agreed


def test_worker_that_knows_only_of_views_that_never_came_about_hears_that_it_is_out():
    job = Coordinator().returns("ab", view(5, "ab")).returns("x", view(4, "abx"), view(7, "x", base=4), settled=4)
    assert job.of(Dismiss) == [Dismiss("x", "it was away for too long")]
    assert job.state.generation == 5


def test_wish_to_leave_before_the_view_is_received_is_told_to_a_successor():
    """The coordinator that heard of it may have let the worker go."""
    resume_state = ResumeState().told(Leaving("a")).received(view(1, "ab"))
    assert resume_state.report(member("a")).phase is Phase.LEAVING


def test_coordinator_that_others_may_contest_is_known():
    job = founded("abc")
    assert job(Gone("c", "killed")).state.contested_at is None
    assert job(Silent(("b",), "silent")).state.contested_at is not None
    assert Coordinator().returns("ab", view(5, "ab")).state.contested_at is not None


# ---------------------------------------------------------------- members that know of no view


def formed(names: str) -> Coordinator:
    """A coordinator of a first view in which nobody has settled."""
    job = Coordinator(idle=False, max_nodes=len(names))
    return job(*(Arrived(member(name)) for name in names), Tick())


@pytest.mark.parametrize("comes_first", [True, False])
def test_takeover_takes_a_member_that_has_begun_anew_for_a_newcomer(comes_first):
    """It trains alone to warm up, while the others still wait for the first view: they are not at one place."""
    first = view(1, "abcde")
    job = Coordinator().returns("a", first, settled=0)
    job.returns("" if comes_first else "bc", first, settled=0)(Arrived(member("e")), Ready("e"))
    job.returns("bc" if comes_first else "", first, settled=0)(Tick(), at=2.0)
    assert (job.views, job.state.gone) == ([(2, "abc")], {"e"})
    assert job.state.view.pending
    job(*(Settled(name, 2) for name in "abc"), *(AtBoundary(name, 2) for name in "abc"))
    assert job.views[1:] == [(3, "abce")]


def test_takeover_by_too_few_is_held_back_though_one_of_the_others_has_begun_anew():
    job = Coordinator().returns("ab", view(1, "abcde"), settled=0)(Arrived(member("e")), Ready("e"), Tick(), at=2.0)
    assert job.views == []
    assert "only 2 of 4 members of view 1" in job.state.held
    assert job(Gone("d", "its process ended")).views == [(2, "ab")]


def test_member_that_has_begun_anew_and_joined_again_counts_where_it_is_a_member():
    without, again = view(2, "abc", gone=("e",)), view(3, "abce")
    job = Coordinator().returns("ab", without, again)(Tick(), at=2.0)
    assert "only 2 of 4 members of view 3" in job.state.held
    assert job.returns("e", again, settled=0, at=3.0).views == [(4, "abe")]


def test_newcomer_that_does_not_know_yet_that_it_was_admitted_has_not_begun_anew():
    job = Coordinator().returns("ab", view(4, "ab"), view(5, "abn"))
    job(Returned(member("n"), Phase.READY, promised=0, settled=0, received=()))
    assert (job.views, job.state.gone) == ([(6, "abn")], frozenset())


@pytest.mark.parametrize("event", ["arrived", Phase.WARMING, Phase.READY])
def test_member_that_has_begun_anew_is_not_in_the_view_that_was_held_back(event):
    job = formed("abc")(Gone("b", "silent", silent=True))(Stored("a", ""))
    job(Gone("c", "silent", silent=True))
    assert (job.views[1:], bool(job.state.held)) == ([(2, "ac")], True)
    job(Arrived(member("c")) if event == "arrived" else Returned(member("c"), event, 0, 0, ()))
    assert job.views[2:] == [(3, "a")]
    assert job.state.workers["c"].phase is (Phase.READY if event is Phase.READY else Phase.WARMING)


@pytest.mark.parametrize("phase", [Phase.WARMING, Phase.READY])
def test_member_that_has_begun_anew_elsewhere_gives_up_its_place(phase):
    job = formed("abc")(Returned(member("c"), phase, promised=0, settled=0, received=()))
    assert job.views[1:] == [(2, "ab")]
    assert job.state.workers["c"].phase is phase


def begun_anew(names: str) -> Coordinator:
    """These have formed the first view, have all begun anew, and are the members of the next one."""
    job = formed(names)
    for name in names:
        job(Gone(name, "it has begun anew"), Arrived(member(name)))
    job(*(Ready(name) for name in names))
    generation = job.state.generation
    return job(*(Settled(name, generation) for name in names), *(Stored(name, "") for name in names))


def test_members_that_have_all_begun_anew_are_members_again():
    assert begun_anew("ab").state.gone == frozenset()
    assert all(not link.view.gone for link in begun_anew("abcd").state.chain)
    assert begun_anew("ab")(Gone("b", "its process ended")).views[-1] == (4, "a")
    spare = begun_anew("a")(Arrived(member("n")), Ready("n"), AtBoundary("a", 2))(Tick(), at=9.0)
    assert spare.views[-1] == (3, "a")


def test_founders_that_come_as_newcomers_are_gone_for_each_view_that_others_know():
    first, second = view(1, "abcde"), view(2, "abc")
    newcomers = Arrived(member("d")), Arrived(member("e"))
    before = Coordinator().returns("a", first, second, settled=0)(*newcomers)
    before.returns("b", first, second, settled=0)(Tick(), at=2.0)
    after = Coordinator().returns("ab", first, second, settled=0)(Tick(), at=2.0)(*newcomers, at=2.1)
    assert before.views == after.views == [(3, "ab")]


def test_view_is_held_back_though_all_suspect_it_if_some_of_them_are_lost():
    job = founded("abc")(Suspected("b", 1), Suspected("c", 1), Silent(("b", "c"), "silent"))
    assert job(Suspected("a", 1)).views[1:] == []
    assert "only 1 of 3" in job.state.held


def test_member_that_is_back_with_another_view_of_the_same_generation_gets_a_new_one():
    """What is published for a view of that generation would be taken for that of the other one."""
    job = formed("abc")
    other = (ChainLink(view(1, "acb"), over=True),)
    job(Returned(member("b"), Phase.MEMBER, promised=1, settled=0, received=other, store=""))
    assert job.views[1:] == [(2, "abc")]


def test_member_that_is_back_while_the_view_is_held_back_is_asked_for_nothing():
    job = formed("abc")(Silent(("b", "c"), "silent"))
    assert job.state.held
    job.actions.clear()
    own = (ChainLink(job.state.chain[0].view, over=True),)
    job(Returned(member("b"), Phase.MEMBER, promised=1, settled=0, received=own, store=""))
    assert job.of(Republish) == []
    assert job.views == [(2, "ab")]


def test_last_member_that_leaves_and_fails_to_save_keeps_nobody_waiting():
    """Its connection may be reset, and then nobody hears that it has ended."""
    job = founded("a")(Arrived(member("n")), Leaving("a"), AtBoundary("a", 1), Ready("n"))
    assert job.views[1:] == [(2, "")]
    job(Failed("a", "OSError: the disk is full"), Tick(), at=9.0)
    assert job.of(Dismiss)[-1].worker == "a"
    assert job.views[2:] == [(3, "n")]


def test_member_that_seemed_to_be_gone_and_comes_after_all_is_in_the_view():
    job = Coordinator().returns("a", view(5, "abc"))(Gone("b", "its process ended")).returns("b", view(5, "abc"))
    assert job(Refused("c")).views == [(6, "ab")]


def test_member_that_has_begun_anew_is_nobody_who_is_present():
    first = view(1, "ab")
    workers = {"b": WorkerPhase(member("b"), Phase.WARMING)}
    state = Serving(generation=1, view=first, workers=workers, gone=frozenset("b"))
    assert roster.present(state) == ()
    assert not roster.is_anybody_present(state)
