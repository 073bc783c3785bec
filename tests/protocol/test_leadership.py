"""Where the job is led, as far as a coordinator knows."""

from __future__ import annotations

import pytest

from ef_common.core.doors import LOOK, PROMISE
from ef_common.core.membership import (
    Challenged,
    Ended,
    FailedElsewhere,
    Forming,
    Gathering,
    Idle,
    Membership,
    Outranked,
    Phase,
    Serving,
    Shortage,
)
from ef_common.core.membership.phase import WorkerPhase
from ef_common.core.view import Member, View
from ef_common.protocol import wire
from ef_common.protocol.leadership import Leadership, why_out
from ef_common.protocol.peer import Peer

VIEW = View(3, (Member("a", "na", "10.0.0.1", standby=7), Member("b", "nb", "10.0.0.2", standby=8)))
WORKERS = {member.id: WorkerPhase(member, Phase.MEMBER) for member in VIEW.members}
SERVING = Serving(generation=3, view=VIEW, workers=WORKERS)
HELD = Serving(generation=3, view=VIEW, shortage=Shortage("1 of 2"))


@pytest.mark.parametrize(
    ("name", "leads", "state", "heard", "leader"),
    [
        ("a", False, SERVING, Outranked(False), ""),
        ("a", False, HELD, Outranked(False), "h:1"),  # workers may find others there
        ("z", False, Idle(), Challenged(), "h:1"),  # likewise newcomers, which nobody needs here
        ("z", False, SERVING, Challenged(), ""),
        ("z", True, SERVING, Outranked(True), "h:1"),
        ("m", True, SERVING, None, ""),  # its own news
    ],
)
def test_news_of_another_coordinator(name: str, leads: bool, state: Membership, heard: object, leader: str) -> None:
    known = Leadership("m", "")
    assert known.heed(name, "h", wire.Follow(1, leads), state, 0.0) == heard
    assert known.leader == leader
    seek = wire.Seek("", LOOK)
    answer = known.answer(Peer("", 0.0), seek, Idle(), 0.0)
    assert isinstance(answer, wire.DoorAnswer)
    assert answer.leader == ("h:1" if leads and leader else "")


def test_one_that_leads_counts_more_than_one_that_gathers_members_until_it_is_silent() -> None:
    known = Leadership("m", "")
    known.heed("z", "h", wire.Follow(1, True), Idle(), 0.0)
    known.heed("a", "h", wire.Follow(2, False), Idle(), 9.0)
    assert known.leader == "h:1"
    known.heed("a", "h", wire.Follow(2, False), Idle(), 11.0)
    assert known.leader == "h:2"


def test_failure_elsewhere_is_heeded_from_anybody() -> None:
    known = Leadership("m", "")
    assert known.heed("m", "h", wire.Follow(1, True, "why"), SERVING, 0.0) == FailedElsewhere("why")
    assert known.leader == ""


@pytest.mark.parametrize("news", [wire.Follow(1, True, job="other"), wire.Follow(1, False, "why", job="other")])
def test_news_of_another_job_is_none(news: wire.Follow) -> None:
    known = Leadership("m", "job")
    assert known.heed("z", "h", news, HELD, 0.0) is None
    assert known.leader == ""
    assert Leadership("m", "").heed("z", "h", news, HELD, 0.0) is not None  # it may be of any


def test_job_is_handed_over_to_the_first_standby_on_another_node() -> None:
    known = Leadership("m", "")
    assert known.hand_over("na", SERVING)
    assert known.leader == "10.0.0.2:8"
    answer = known.answer(Peer("", 0.0), wire.Seek("", LOOK), Idle(), 0.0)
    assert isinstance(answer, wire.DoorAnswer)
    assert answer.leader == known.leader
    assert not known.hand_over("na", Forming())
    assert not known.hand_over("na", Serving(generation=3, view=VIEW, workers=WORKERS, closed=True))
    assert not known.hand_over("na", Serving(generation=3, view=VIEW, workers={"a": WORKERS["a"]}))  # the other is lost
    assert not known.hand_over("na", Serving(view=View(3, VIEW.members[:1])))


def test_agents_are_answered_by_who_may_lead() -> None:
    known, agent = Leadership("m", "job"), Peer("", 0.0)
    agent.member = Member("agent", "n", "")
    assert isinstance(known.answer(agent, wire.Seek("h:1", PROMISE, "other"), Idle(), 0.0), wire.Error)
    leads = known.answer(agent, wire.Seek("h:1", PROMISE, "job"), SERVING, 0.0)
    assert isinstance(leads, wire.DoorAnswer)
    assert (leads.leads, leads.granted, leads.over) == (True, False, False)
    agent.may_lead = False
    refused = known.answer(agent, wire.Seek("h:1", PROMISE), Idle(), 0.0)
    assert isinstance(refused, wire.DoorAnswer)
    assert (refused.granted, refused.doors) == (False, ("h:1",))  # that of the first question
    agent.may_lead = True
    granted = known.answer(agent, wire.Seek("h:1", PROMISE), Idle(), 0.0)
    assert isinstance(granted, wire.DoorAnswer)
    assert granted.granted


def test_worker_is_out_if_the_newest_view_is_without_it_and_is_not_held_back() -> None:
    assert why_out("a", SERVING) == ""
    assert why_out("x", SERVING) == "view 3 is without it"
    assert why_out("x", HELD) == ""
    assert why_out("x", Forming()) == ""
    assert why_out("x", Gathering(generation=3, since=0.0)) == ""
    assert why_out("a", Ended(generation=3, failed="ValueError")) == "ValueError"
