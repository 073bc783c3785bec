"""Rule 14 of the membership: as many nodes train as the members want."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ef_common.core.membership import (
    Action,
    Announce,
    Arrived,
    AtBoundary,
    Closed,
    Event,
    Forming,
    Gone,
    Idle,
    Install,
    Leaving,
    Membership,
    Outranked,
    Phase,
    Ready,
    Resign,
    Returned,
    Serving,
    Settings,
    Settled,
    Silent,
    Slow,
    Stay,
    Straggler,
    Suspected,
    Tick,
    Wanted,
    decide,
    phase_of,
    size,
)
from ef_common.core.quorum import ChainLink
from ef_common.core.room import NO_DEMAND, Demand
from ef_common.core.view import Member, View
from ef_common.errors import ProtocolError

SETTINGS = Settings(min_nodes=1, max_nodes=6, last_call_s=1.0, loss_notice_s=2.0, gathering_s=0.0)


def member(name: str) -> Member:
    """`a` is a worker on a node of its own; `a0` and `a1` share the node `a`."""
    return Member(name, name[0], "", int(name[1:] or 0), 2 if name[1:] else 1, standby=1, liveness_port=1)


class Job:
    """Feeds events to `decide` and keeps all actions."""

    def __init__(self, state: Membership | None = None, settings: Settings = SETTINGS) -> None:
        self.settings = settings
        self.state: Membership = Forming() if state is None else state
        self.actions: list[Action] = []

    def __call__(self, *events: Event, at: float = 0.0) -> Job:
        for event in events:
            self.state, actions, self.reason = decide(self.state, event, at, self.settings)
            self.actions += actions
        return self

    def wants(self, nodes: int, *, number: int = 1, generation: int = 1, worker: str = "a") -> Job:
        return self(Wanted(worker, Demand(generation, number, nodes)))

    def join(self, *names: str) -> Job:
        return self(*(event for name in names for event in (Arrived(member(name)), Ready(name))))

    def settle(self) -> Job:
        return self(*(Settled(name, self.view.generation) for name in self.view.ids))

    def meet(self) -> Job:
        """All members come to the boundary."""
        return self(*(AtBoundary(name, self.view.generation) for name in self.view.ids))

    def take(self, kind: type[Action]) -> list[Action]:
        """All actions of a kind since the last look at them."""
        found = [action for action in self.actions if isinstance(action, kind)]
        self.actions = [action for action in self.actions if not isinstance(action, kind)]
        return found

    @property
    def asked(self) -> str:
        """Who has been asked to leave since the last look."""
        return " ".join(sorted(action.worker for action in self.take(Resign)))  # type: ignore[attr-defined]

    @property
    def view(self) -> View:
        assert self.state.view is not None
        return self.state.view


def started(*names: str, **settings: int) -> Job:
    job = Job(settings=replace(SETTINGS, start_nodes=len({name[0] for name in names}), **settings))
    return job(*(Arrived(member(name)) for name in names), Tick()).settle()


def test_rule_14_the_newest_nodes_are_asked_to_leave_and_go_at_one_boundary() -> None:
    job = started("a", "b", "c", "d").wants(2)
    assert job.asked == "c d"
    assert job.take(Announce) == []
    job(Leaving("d"))
    assert job.take(Announce) == []  # the other one is still to say so
    job(Leaving("c"))
    assert job.take(Announce) == [Announce(job.view.ids, job.view.generation)]
    job.take(Install)
    job.meet()
    assert job.view.ids == ("a", "b")
    assert [action.dropped for action in job.take(Install)] == [("c", "d")]  # type: ignore[attr-defined]
    job.settle().join("e")
    assert job.asked == ""
    assert phase_of(job.state, "e") is Phase.READY
    assert job.take(Announce) == []


def test_rule_14_stragglers_go_first() -> None:
    job = started("a", "b", "c", "d")(Slow(("b", "nobody", "a")))
    assert job.asked == ""
    assert job.wants(3).asked == "b"
    assert job.wants(2, number=2).asked == "a"
    assert job.wants(1, number=3).asked == "d"


@pytest.mark.parametrize(("wanted", "asked"), [(1, "c d"), (2, "c d"), (3, "d"), (4, ""), (9, ""), (0, "")])
def test_rule_14_nobody_is_asked_below_min_nodes(wanted: int, asked: str) -> None:
    assert started("a", "b", "c", "d", min_nodes=2).wants(wanted).asked == asked


def test_rule_14_one_node_is_left() -> None:
    assert started("a", "b", "c").wants(1).asked == "b c"


def test_rule_14_nodes_leave_as_a_whole() -> None:
    job = started("a0", "b0", "a1", "c0", "b1", "c1").wants(2, worker="a0")
    assert job.asked == "c0 c1"
    assert job(Slow(("a1",))).wants(1, number=2, worker="a0").asked == "a0 a1"


def test_rule_14_nobody_is_asked_twice() -> None:
    job = started("a", "b", "c", "d").wants(3).wants(2, number=2)
    assert job.asked == "c d"
    job.wants(1, number=3)(Leaving("c"), Leaving("d"))
    assert job.asked == "b"
    job.wants(2, number=4)(Leaving("b"))
    assert job.take(Stay) == [Stay("b")]
    assert job.meet().view.ids == ("a", "b")


def test_rule_14_as_many_of_those_who_are_about_to_leave_stay_as_are_wanted_again() -> None:
    job = started("a", "b", "c", "d", "e").join("f").wants(2)(Leaving("d"), Leaving("e")).wants(3, number=2)
    assert job.take(Stay) == []  # the word of the third one is on its way
    assert job(Leaving("c")).take(Stay) == [Stay("c")]
    assert job.wants(4, number=3).take(Stay) == [Stay("d")]
    assert job.meet().view.ids == ("a", "b", "c", "d")
    job.settle().wants(3, number=4)
    assert job.asked == "c d d e"


def test_rule_14_one_who_told_another_coordinator_that_it_leaves_does_not_stay() -> None:
    job = started("a", "b", "c").wants(2)(Leaving("c"))
    job(report("c", job.view, phase=Phase.LEAVING)).wants(3, number=2)
    assert job.take(Stay) == []
    assert job.meet().view.ids == ("a", "b")


def test_rule_14_one_who_was_asked_takes_the_place_of_the_last_that_stays() -> None:
    job = started("a", "b", "c", "d").wants(1)(Slow(("c",)), Leaving("b"), Leaving("c"), Leaving("d"))
    job(Silent(("a",), "silent"))  # it may live, and then it is not most of them
    assert job.take(Stay) == [Stay("b")]
    assert isinstance(job.state, Serving)
    assert job.state.held  # b is half of those who count
    job = started("a", "b", "c", "d").wants(2)(Leaving("c"), Leaving("d"))
    job(Gone("a", "its process ended"))
    assert job.take(Stay) == [Stay("c")]
    assert job.settle().meet().view.ids == ("b", "c")


def test_rule_14_node_stays_as_a_whole() -> None:
    job = started("a0", "b0", "a1", "b1").wants(1, worker="a0")(Leaving("b0")).wants(2, number=2, worker="a0")
    assert job.take(Stay) == []
    assert job(Leaving("b1")).take(Stay) == [Stay("b0"), Stay("b1")]


def test_rule_14_more_that_are_wanted_let_spares_in() -> None:
    job = started("a").wants(1).join("b", "c")
    assert job.take(Announce) == []
    job.wants(2, number=2)
    assert job.take(Announce) == [Announce(job.view.ids, job.view.generation)]
    assert job.meet().view.ids == ("a", "b")
    assert not job.view.pending
    job.settle().wants(0, number=3)
    assert job.meet().view.ids == ("a", "b", "c")


def test_rule_14_no_more_than_max_nodes_are_admitted() -> None:
    job = started("a", max_nodes=2).wants(5).join("b", "c").meet()
    assert job.view.ids == ("a", "b")


def test_rule_14_newest_demand_of_rank_0_counts() -> None:
    job = started("a", "b", "c").wants(3, number=2)
    assert job.wants(1).asked == ""  # it comes late
    assert job.wants(1, number=7, worker="b").asked == ""  # it is not rank 0
    assert job.state.demand == Demand(1, 2, 3)  # type: ignore[attr-defined]
    job(Gone("a", "killed")).settle()
    assert job.wants(1, number=3).asked == ""  # a former one
    assert job.wants(1, generation=2, worker="b").asked == "c"


def test_rule_14_demand_of_a_view_that_does_not_exist_is_illegal() -> None:
    with pytest.raises(ProtocolError, match="wants 2 nodes in view 7, which does not exist"):
        started("a", "b").wants(2, generation=7)


def test_rule_14_nobody_is_asked_before_all_hold_the_state() -> None:
    job = started("a", "b").join("c").meet().wants(1)
    assert job(Settled("a", 2), Settled("b", 2)).asked == ""
    assert job(Settled("c", 2)).asked == "b c"


def test_rule_14_nobody_is_asked_while_the_group_may_be_broken() -> None:
    job = started("a", "b", "c")(Suspected("b", 1)).wants(2)
    assert job.asked == ""
    job(Suspected("a", 1), Suspected("c", 1))
    assert job.view.generation == 2
    assert job.settle().asked == "c"


def test_rule_14_a_loss_among_those_who_were_asked_lets_the_others_go() -> None:
    job = started("a", "b", "c", "d").wants(2)(Leaving("c"))
    job(Gone("d", "killed"))
    assert job.view.ids == ("a", "b", "c")
    assert job.view.pending
    assert job.settle().meet().view.ids == ("a", "b")
    assert job.asked == "c d"


def test_rule_14_a_goodbye_of_one_who_was_asked_lets_the_others_go() -> None:
    job = started("a", "b", "c", "d").wants(2)(Leaving("c"))
    job.take(Announce)
    job(Gone("d", "it said goodbye", goodbye=True))
    assert job.take(Announce) == [Announce(job.view.ids, job.view.generation)]


def test_rule_14_a_loss_after_others_were_asked_is_made_up_by_one_of_them() -> None:
    job = started("a", "b", "c", "d").wants(3).join("e")(Leaving("d"), Gone("b", "killed"))
    assert job.view.ids == ("a", "c", "d")
    assert job.settle().meet().view.ids == ("a", "c", "d")
    assert job.asked == "d"
    assert job.take(Stay) == [Stay("d")]


def test_rule_14_a_straggler_is_replaced_by_a_spare_of_the_wanted_size() -> None:
    job = started("a", "b", "c").wants(3).join("d")(Straggler("b")).meet()
    assert job.view.ids == ("a", "b", "c", "d")
    assert job.settle().asked == "b"
    assert job(Leaving("b")).meet().view.ids == ("a", "c", "d")
    assert job.settle().asked == ""


def test_rule_14_a_straggler_that_is_to_be_replaced_goes_first_if_fewer_are_wanted() -> None:
    job = started("a", "b", "c").wants(3)(Straggler("b")).wants(2, number=2)
    assert job.asked == "b"
    assert job.join("d")(Leaving("b")).meet().view.ids == ("a", "c")


def test_rule_14_nobody_is_asked_after_the_end() -> None:
    assert started("a", "b")(Closed("a")).wants(1).asked == ""


def test_rule_14_demand_outlives_the_members() -> None:
    job = started("a", "b").wants(1).join("c", "d")
    job(Gone("a", "killed"), Gone("b", "killed"), at=9.0)
    assert job.view.ids == ("c",)
    assert phase_of(job.state, "d") is Phase.READY


# ---------------------------------------------------------------- coming back, and standbys


def report(name: str, view: View, **fields: object) -> Returned:
    known = Returned(
        member(name), Phase.MEMBER, view.generation, view.generation, (ChainLink(view, over=True),), store=""
    )
    return replace(known, **fields)  # type: ignore[arg-type]


VIEW = View(5, tuple(map(member, "abc")))


def test_rule_14_standby_takes_the_newest_demand_of_the_members() -> None:
    job = Job(Idle())(
        report("b", VIEW, demand=Demand(5, 1, 3)),
        report("a", VIEW, demand=Demand(5, 2, 2)),
        report("c", VIEW),
    )
    assert job.state.demand == Demand(5, 2, 2)  # type: ignore[attr-defined]
    assert job.asked == "c"


def test_rule_14_standby_hears_what_is_wanted_while_it_gathers() -> None:
    job = Job(Idle())(report("a", VIEW, demand=Demand(5, 1, 3))).wants(1, number=2, generation=5)
    job(Wanted("b", Demand(5, 3, 7)))  # it has not come
    job(report("b", VIEW), report("c", VIEW))
    assert job.asked == "b c"


def test_rule_14_standby_asks_nobody_again_who_is_about_to_leave() -> None:
    demand = Demand(5, 1, 2)
    job = Job(Idle())(*(report(name, VIEW, demand=demand) for name in "ab"))
    job(report("c", VIEW, demand=demand, phase=Phase.LEAVING))
    assert job.asked == ""
    assert job.meet().view.ids == ("a", "b")


def test_rule_14_what_strangers_want_does_not_count() -> None:
    job = Job(Idle())(*(report(name, VIEW) for name in "ab"))
    job(report("d", View(4, tuple(map(member, "abcd"))), demand=Demand(9, 1, 1)), report("c", VIEW))
    assert job.asked == ""
    assert job.state.demand == NO_DEMAND  # type: ignore[attr-defined]


def test_rule_14_member_that_is_back_is_asked_again_unless_it_leaves() -> None:
    job = started("a", "b", "c").wants(2)
    assert job.asked == "c"
    view = job.view
    job(report("c", view))  # the connection to it may have broken before it was asked
    assert job.asked == "c"
    job(report("c", view, phase=Phase.LEAVING))
    assert job.asked == ""
    assert job.take(Announce) == [Announce(job.view.ids, job.view.generation)]


def test_rule_14_rank_0_that_is_back_tells_what_was_lost_with_its_connection() -> None:
    job = started("a", "b", "c").wants(3)
    job(report("a", job.view, demand=Demand(1, 2, 1)))
    assert job.asked == "b c"


def test_rule_14_stepping_down_forgets_the_demand() -> None:
    job = started("a", "b", "c").wants(2)(Silent(("b", "c"), "silent"), Outranked())
    assert isinstance(job.state, Idle)


def test_rule_14_held_view_asks_nobody() -> None:
    job = started("a", "b", "c")(Silent(("b", "c"), "silent")).wants(1)
    assert isinstance(job.state, Serving)
    assert job.state.held
    assert job.asked == ""


def test_rule_14_one_node_too_many_is_asked_to_leave_after_a_takeover() -> None:
    """The coordinator before was lost after it had admitted a spare, and before it had asked the straggler."""
    job = Job(Idle(), replace(SETTINGS, max_nodes=2))(*(report(name, VIEW) for name in VIEW.ids))
    assert job.asked == VIEW.ids[-1]


def test_rule_14_nodes_are_not_counted_in_each_event_of_a_job_of_several_workers_per_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes time in the number of workers, and there are as many events when all come to a boundary."""
    counted: list[object] = []
    monkeypatch.setattr(size, "_by_dispensability", lambda state, members: counted.append(state) or [])
    job = started("a0", "a1", "b0", "b1", "c0", "c1", max_nodes=3)
    job(Leaving("c1")).meet().settle()
    assert job.view.ids == ("a0", "a1", "b0", "b1", "c0")
    assert counted == []
