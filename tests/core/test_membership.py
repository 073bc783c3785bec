"""The rules of the membership, event by event; names of tests carry the number of the rule."""

from __future__ import annotations

import pytest

from ef_common.core.membership import (
    Accept,
    Action,
    Announce,
    Arrived,
    AtBoundary,
    Begun,
    Closed,
    Event,
    Finish,
    Forming,
    Gone,
    Install,
    Leaving,
    Membership,
    Phase,
    Ready,
    Replacement,
    Resign,
    Returned,
    Settings,
    Settled,
    Skip,
    Straggler,
    Suspected,
    Tick,
    decide,
    next_deadline,
    phase_of,
)
from ef_common.core.view import Member, View
from ef_common.errors import ProtocolError

SETTINGS = Settings(min_nodes=1, max_nodes=4, last_call_s=1.0, loss_notice_s=2.5, gathering_s=0.0)


def member(name: str, *, of: int = 1) -> Member:
    """`a` is a worker on a node of its own; `a0`, `a1` … (with `of` workers) share the node `a`."""
    return Member(name, node=name[0], address="", local_rank=int(name[1:] or 0), local_world_size=of)


class Coordinator:
    """Feeds events to `decide` and keeps what came of the last one."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        self.settings = settings
        self.state: Membership = Forming()
        self.actions: tuple[Action, ...] = ()
        self.reason = ""

    def __call__(self, *events: Event, at: float = 0.0) -> Coordinator:
        for event in events:
            self.state, self.actions, self.reason = decide(self.state, event, at, self.settings)
        return self

    def arrive(self, *names: str, at: float = 0.0, of: int = 1) -> Coordinator:
        return self(*(Arrived(member(name, of=of)) for name in names), at=at)

    def join(self, *names: str, at: float = 0.0) -> Coordinator:
        for name in names:
            self(Arrived(member(name)), Ready(name), at=at)
        return self

    def at_boundary(self, *names: str) -> Coordinator:
        return self(*(AtBoundary(name, self.view.generation) for name in names))

    @property
    def view(self) -> View:
        assert self.state.view is not None
        return self.state.view

    @property
    def installed(self) -> Install:
        (install,) = (action for action in self.actions if isinstance(action, Install))
        return install


def started(*names: str, settings: Settings = SETTINGS) -> Coordinator:
    """A job in its first view."""
    return Coordinator(settings).arrive(*names)(Tick(), at=settings.last_call_s)


# ---------------------------------------------------------------- rule 1


def test_rule_1_arrival_before_the_first_view_waits() -> None:
    job = Coordinator().arrive("a")

    assert job.actions == (Accept("a", warm_up=False),)
    assert phase_of(job.state, "a") is Phase.EARLY
    assert job.state.view is None


@pytest.mark.parametrize(("at", "formed"), [(0.9, False), (1.8, False), (1.9, True)])
def test_rule_1_first_view_comes_a_last_call_after_the_last_arrival(at: float, formed: bool) -> None:
    job = Coordinator().arrive("a", at=0.0).arrive("b", at=0.9)(Tick(), at=at)

    assert (job.state.view is not None) == formed
    assert next_deadline(job.state, SETTINGS) == (None if formed else 1.9)
    if formed:
        assert job.view.ids == ("a", "b")
        assert (job.view.generation, job.view.admitted_at) == (1, 1)


@pytest.mark.parametrize(("names", "formed"), [("a", False), ("ab", True), ("abc", True)])
def test_rule_1_first_view_comes_at_once_when_as_many_are_there_as_start(names: str, formed: bool) -> None:
    settings = Settings(max_nodes=8, start_nodes=2)
    job = Coordinator(settings).arrive(*names, at=5.0)

    assert next_deadline(job.state, settings) == (5.0 if formed else 6.0)
    assert (job(Tick(), at=5.0).state.view is not None) == formed


def test_rule_1_first_view_comes_at_once_when_max_nodes_are_there() -> None:
    job = Coordinator(Settings(max_nodes=2)).arrive("a", "b")

    assert job.actions[0] == Accept("b", warm_up=False)
    assert job(Tick()).installed.view.ids == ("a", "b")


def test_rule_1_first_view_waits_for_min_nodes_without_a_deadline() -> None:
    settings = Settings(min_nodes=2, gathering_s=0.0)
    job = Coordinator(settings).arrive("a")(Tick(), at=100.0)

    assert job.state.view is None
    assert next_deadline(job.state, settings) is None  # a tick would change nothing: no busy waiting
    assert job.arrive("b", at=100.0).state.view is None
    assert job(Tick(), at=101.0).view.ids == ("a", "b")


def test_rule_1_first_view_waits_for_all_workers_of_a_node() -> None:
    job = Coordinator().arrive("a0", "b0", "b1", of=2)(Tick(), at=5.0)

    assert job.state.view is None
    job.arrive("a1", at=5.0, of=2)(Tick(), at=6.0)
    assert job.view.ids == ("a0", "b0", "b1", "a1")


def test_rule_1_worker_gone_before_the_first_view_is_forgotten() -> None:
    job = Coordinator().arrive("a", "b")(Gone("a", "crash"))(Tick(), at=1.0)

    assert job.view.ids == ("b",)


def test_rule_1_node_above_max_nodes_becomes_a_spare_and_warms_up() -> None:
    job = Coordinator(Settings(max_nodes=1)).arrive("a0", of=2).arrive("b").arrive("a1", of=2)(Tick())

    assert job.view.ids == ("a0", "a1")
    assert job.actions[-1] == Accept("b", warm_up=True)
    assert phase_of(job.state, "b") is Phase.WARMING


# ---------------------------------------------------------------- rule 2


def test_rule_2_arrival_after_the_first_view_warms_up() -> None:
    job = started("a").arrive("b")

    assert job.actions == (Accept("b", warm_up=True),)
    assert phase_of(job.state, "b") is Phase.WARMING
    assert job.view.ids == ("a",)


def test_rule_2_ready_worker_is_announced_once() -> None:
    job = started("a", "b").join("c")
    assert job.actions == (Announce(job.view.ids, job.view.generation),)

    job.join("d")
    assert job.actions == ()


def test_rule_2_view_changes_when_all_members_are_at_the_boundary() -> None:
    job = started("a", "b").join("c").at_boundary("a")
    assert job.actions == ()

    job.at_boundary("b")
    assert job.installed == Install(job.view, ())
    assert job.view.ids == ("a", "b", "c")
    assert (job.view.generation, job.view.admitted_at, job.view.pending) == (2, 2, False)
    assert phase_of(job.state, "c") is Phase.MEMBER


def test_rule_2_worker_that_is_not_ready_is_not_admitted() -> None:
    job = started("a").arrive("b").join("c").at_boundary("a")

    assert job.view.ids == ("a", "c")


def test_rule_2_report_of_an_older_view_does_not_count() -> None:
    job = started("a", "b", "c").join("d").at_boundary("a", "b")(Gone("c", "crash"))
    assert (job.view.generation, job.state.at_boundary) == (2, frozenset())

    job(AtBoundary("a", 1), AtBoundary("b", 1))
    assert job.view.generation == 2
    assert job.at_boundary("a", "b").view.ids == ("a", "b", "d")


def test_rule_2_change_agreed_for_a_joiner_that_died_gives_a_view_all_the_same() -> None:
    job = started("a", "b").join("c")(Gone("c", "crash")).at_boundary("a", "b")

    assert job.view.ids == ("a", "b")
    assert job.view.admitted_at == 2  # who waits for a planned change sees that it has come


def test_rule_2_leaver_is_dropped_at_the_boundary() -> None:
    job = started("a", "b", "c")(Leaving("b"))
    assert job.actions == (Announce(job.view.ids, job.view.generation),)

    job.at_boundary("a", "b", "c")
    assert job.installed == Install(job.view, ("b",))
    assert job.view.ids == ("a", "c")
    assert "b" not in job.state.workers


def test_rule_2_everybody_leaves_the_last_view_is_empty_and_new() -> None:
    job = started("a", "b")(Leaving("a"), Leaving("b")).at_boundary("a", "b")

    assert job.installed.view.members == ()
    assert job.installed.view.generation == 2
    assert job.installed.dropped == ("a", "b")
    assert job.state.view is None


def test_rule_2_second_wish_to_leave_that_comes_late_changes_nothing() -> None:
    job = started("a", "b")(Leaving("b")).at_boundary("a", "b")
    before = job.state

    assert job(Leaving("b")).state is before


def test_rule_2_newcomer_that_leaves_is_forgotten() -> None:
    job = started("a").join("b")(Leaving("b")).at_boundary("a")

    assert job.view.ids == ("a",)


@pytest.mark.parametrize(("names", "admitted"), [("ab", "wx"), ("abc", "w"), ("abcd", "")])
def test_rule_2_no_more_than_max_nodes_are_admitted(names: str, admitted: str) -> None:
    job = started(*names).join("w", "x", "y").at_boundary(*names)

    assert job.view.ids == (*names, *admitted)
    assert job.view.pending is False


def test_rule_2_spare_that_is_ready_disturbs_nobody_until_a_place_is_free() -> None:
    job = started("a", "b", settings=Settings(max_nodes=2)).join("c")
    assert job.actions == ()

    job(Gone("a", "crash"))
    assert job.view.pending is True
    assert job.at_boundary("b").view.ids == ("b", "c")


# ---------------------------------------------------------------- rule 2: trainings


def in_training(training: int, *names: str, settings: Settings = SETTINGS) -> Coordinator:
    """A job whose members' programs have come to a later training."""
    return started(*names, settings=settings)(*(Begun(name, training) for name in names))


def test_rule_2_newcomer_hears_which_training_the_members_are_in() -> None:
    assert started("a").arrive("b").actions == (Accept("b", warm_up=True, training=1),)
    assert in_training(3, "a").arrive("b").actions == (Accept("b", warm_up=True, training=3),)


def test_rule_2_training_begins_with_the_first_member_that_comes_to_it() -> None:
    job = started("a", "b").arrive("c")(Begun("a", 2))
    assert job.actions == (Skip("c", 2),)

    assert job(Begun("b", 2)).actions == ()
    assert job.state.training == 2


def test_rule_2_newcomer_that_waits_for_a_training_that_is_over_has_to_warm_up_again() -> None:
    job = started("a", "b").join("c")(Begun("a", 2))
    assert job.actions == (Skip("c", 2),)
    assert phase_of(job.state, "c") is Phase.WARMING

    job(Begun("b", 2)).at_boundary("a", "b")  # as was announced
    assert job.view.ids == ("a", "b")
    assert job(Ready("c", 2)).actions == (Announce(job.view.ids, job.view.generation),)
    assert job.at_boundary("a", "b").view.ids == ("a", "b", "c")


def test_rule_2_newcomer_that_is_ready_for_a_training_that_is_over_hears_so() -> None:
    job = in_training(2, "a").arrive("b")(Ready("b", 1))

    assert job.actions == (Skip("b", 2),)
    assert job.at_boundary("a").view.ids == ("a",)
    assert job(Ready("b", 2)).actions == (Announce(job.view.ids, job.view.generation),)


def test_rule_2_newcomer_that_is_ahead_waits_until_the_members_come_to_its_training() -> None:
    job = started("a").arrive("b")(Ready("b", 2))
    assert job.actions == ()
    assert job.at_boundary("a").view.ids == ("a",)

    assert job(Begun("a", 2)).actions == (Announce(job.view.ids, job.view.generation),)
    assert job.at_boundary("a").view.ids == ("a", "b")


def test_rule_2_only_members_begin_trainings() -> None:
    job = started("a").arrive("b")

    with pytest.raises(ProtocolError, match="it is warming"):
        job(Begun("b", 2))
    assert job(Begun("c", 2)).reason == ""  # it has left, and does not know it yet


def test_rule_4_those_of_the_earliest_training_begin_anew_and_others_wait_for_them() -> None:
    job = in_training(2, "a").arrive("b")(Ready("b", 2), Gone("a", "crash"))
    assert job.arrive("c").actions == (Accept("c", warm_up=True, training=1),)  # there are no members

    job(Ready("c", 1))(Tick(), at=5.0)
    assert (job.view.ids, job.state.training) == (("c",), 1)
    assert job(Begun("c", 2)).actions == (Announce(job.view.ids, job.view.generation),)
    assert job.at_boundary("c").view.ids == ("c", "b")


def test_rule_4_those_of_a_later_training_begin_anew_if_there_are_no_others() -> None:
    job = in_training(2, "a").arrive("b", "c")(Ready("b", 2), Gone("a", "crash"))(Tick(), at=5.0)

    assert (job.view.ids, job.state.training) == (("b",), 2)
    assert job.actions[-1] == Skip("c", 2)


def test_rule_4_newcomer_that_was_told_to_pass_over_a_training_does_not_begin_it_when_all_others_are_lost() -> None:
    job = started("a").arrive("b", "c")(Begun("a", 2))
    assert job.actions == (Skip("b", 2), Skip("c", 2))
    job(Gone("a", "killed"), Ready("b", 1), at=10.0)(Tick(), at=20.0)  # on its way when it was told
    assert job.state.view is None
    assert phase_of(job.state, "b") is Phase.WARMING
    job(Ready("b", 2), at=30.0)(Tick(), at=40.0)
    assert (job.view.ids, job.state.training) == (("b",), 2)


def test_rule_4_newcomer_that_may_not_have_heard_that_a_training_is_over_is_believed() -> None:
    job = started("a").arrive("b")(Begun("a", 2))
    assert job.state.workers["b"].training == 2
    job(Gone("a", "killed"), Gone("b", "its connection broke", silent=True))
    job(Returned(member("b"), Phase.READY, training=1), at=10.0)(Tick(), at=20.0)
    assert (job.view.ids, job.state.workers["b"].training) == (("b",), 1)


def test_rule_4_newcomers_that_are_enough_only_together_go_to_one_training() -> None:
    settings = Settings(min_nodes=2, gathering_s=0.0)
    job = in_training(2, "a", "b", settings=settings).arrive("c")(Ready("c", 2), Gone("a", "x"), Gone("b", "x"))
    job.arrive("d")(Ready("d", 1))
    assert job.actions == (Skip("d", 2),)
    assert job(Ready("d", 2))(Tick(), at=5.0).view.ids == ("c", "d")


# ---------------------------------------------------------------- rule 3


def test_rule_3_loss_makes_a_view_of_the_rest_at_once_without_newcomers() -> None:
    job = started("a", "b", "c").join("d")(Gone("a", "crash"))

    assert job.installed == Install(job.view, ())
    assert job.view.ids == ("b", "c")
    assert (job.view.generation, job.view.admitted_at) == (2, 1)
    assert job.view.pending is True  # d still waits
    assert job.state.announced is True


def test_rule_3_two_losses_make_two_views() -> None:
    job = started("a", "b", "c")(Gone("a", "crash"), Gone("c", "silent"))

    assert (job.view.ids, job.view.generation) == (("b",), 3)


def test_rule_3_loss_of_a_newcomer_that_was_just_admitted_keeps_the_planned_change() -> None:
    job = started("a", "b").join("c").at_boundary("a", "b")(Gone("c", "crash"))

    assert (job.view.ids, job.view.generation, job.view.admitted_at) == (("a", "b"), 3, 2)


def test_rule_3_loss_of_a_worker_outside_the_view_changes_nothing() -> None:
    job = started("a", "b").join("c")
    view = job.view

    assert job(Gone("c", "crash")).actions == ()
    assert job.view is view
    assert job(Gone("c", "again")).reason == ""


def test_rule_3_leaver_is_still_leaving_after_a_loss() -> None:
    job = started("a", "b", "c")(Leaving("b"), Gone("a", "crash"))

    assert job.view.ids == ("b", "c")
    assert job.view.pending is True
    assert phase_of(job.state, "b") is Phase.LEAVING


# ---------------------------------------------------------------- rule 4


def test_rule_4_loss_of_all_forms_a_view_of_the_ready_ones() -> None:
    job = started("a").join("b", at=5.0).arrive("c", at=5.0)(Gone("a", "crash"), at=5.5)
    assert job.state.view is None
    assert next_deadline(job.state, SETTINGS) == 6.0

    job(Tick(), at=6.0)
    assert job.view.ids == ("b",)
    assert (job.view.generation, job.view.admitted_at) == (2, 2)


def test_rule_4_loss_of_all_after_the_last_call_forms_a_view_at_once() -> None:
    job = started("a").join("b", at=5.0)(Gone("a", "crash"), at=7.0)

    assert job.installed.view.ids == ("b",)


def test_rule_4_loss_of_all_forgets_what_the_members_reported() -> None:
    job = started("a", "b")(Suspected("a", 1), Gone("b", "crash"))
    job(Suspected("a", 2), Gone("a", "crash"), at=3.0)

    assert isinstance(job.state, Forming)
    assert next_deadline(job.state, SETTINGS) is None


# ---------------------------------------------------------------- rule 5


def test_rule_5_view_below_min_nodes_holds_until_enough_are_ready() -> None:
    settings = Settings(min_nodes=2, gathering_s=0.0)
    job = started("a", "b", settings=settings)(Gone("b", "crash"))
    assert job.view.hold is True

    assert job.at_boundary("a").actions == ()
    job.join("c")
    assert job.installed.view.ids == ("a", "c")
    assert job.view.hold is False


def test_rule_5_number_of_nodes_counts_not_of_workers() -> None:
    settings = Settings(min_nodes=2, gathering_s=0.0)
    job = Coordinator(settings).arrive("a0", "a1", "b0", "b1", of=2)(Tick(), at=1.0)

    assert job(Gone("a0", "crash")).view.hold is False
    assert job(Gone("a1", "crash")).view.hold is True


def test_rule_5_leaver_need_not_wait_for_enough_nodes() -> None:
    job = started("a", "b", settings=Settings(min_nodes=2))(Leaving("a")).at_boundary("a", "b")

    assert job.installed == Install(job.view, ("a",))
    assert (job.view.ids, job.view.hold) == (("b",), True)


def test_rule_5_member_of_a_held_view_may_leave() -> None:
    job = started("a", "b", settings=Settings(min_nodes=2))(Gone("b", "crash")).at_boundary("a")
    job(Leaving("a"))

    assert job.installed.dropped == ("a",)
    assert job.state.view is None


# ---------------------------------------------------------------- rule 6


def test_rule_6_group_that_broke_for_all_is_made_anew_at_once() -> None:
    job = started("a", "b")(Suspected("a", 1), at=5.0)
    assert job.actions == ()
    assert next_deadline(job.state, SETTINGS) == 7.5

    job(Suspected("b", 1), at=5.1)
    assert job.installed.view.ids == ("a", "b")
    assert (job.view.generation, job.view.admitted_at) == (2, 1)
    assert next_deadline(job.state, SETTINGS) is None


@pytest.mark.parametrize(("at", "generation"), [(7.4, 1), (7.5, 2)])
def test_rule_6_group_that_broke_for_some_is_made_anew_when_nobody_is_lost(at: float, generation: int) -> None:
    job = started("a", "b")(Suspected("a", 1), at=5.0)(Tick(), at=at)

    assert job.view.generation == generation


def test_rule_6_group_that_breaks_again_and_again_is_not_made_anew_at_once_for_ever() -> None:
    job = started("a", "b")
    for generation in range(1, 11):
        job(Suspected("a", generation), Suspected("b", generation), at=5.0)
    assert job.view.generation == 11
    job(Suspected("a", 11), Suspected("b", 11), at=6.0)
    assert job.view.generation == 11
    deadline = next_deadline(job.state, SETTINGS)
    assert deadline == 8.5
    assert job(Tick(), at=deadline).view.generation == 12
    job(Settled("a", 12), Suspected("a", 12), Suspected("b", 12), at=9.0)
    assert job.view.generation == 13  # one of them has come about


def test_rule_6_loss_settles_a_suspicion() -> None:
    job = started("a", "b", "c")(Suspected("a", 1), Gone("c", "crash"))

    assert job.view.generation == 2
    assert not job.state.suspects
    assert job(Tick(), at=100.0).view.generation == 2


def test_rule_6_suspicion_of_an_older_view_or_of_a_stranger_does_not_count() -> None:
    job = started("a", "b").join("c")(Suspected("a", 0), Suspected("c", 1), Suspected("x", 1))

    assert not job.state.suspects


# ---------------------------------------------------------------- rule 7


def test_rule_7_those_that_wait_are_told_of_the_end_and_those_that_come() -> None:
    job = started("a").join("b").arrive("c")(Closed("a"))
    assert job.actions == (Finish("b"), Finish("c"))

    assert job(Ready("c")).actions == (Finish("c"),)
    assert job.arrive("d").actions == (Finish("d"),)
    assert "d" not in job.state.workers


def test_rule_7_second_member_that_closes_changes_nothing() -> None:
    job = started("a", "b").join("c")(Closed("a"), Closed("b"))

    assert job.actions == ()


def test_rule_7_nobody_is_admitted_after_the_end() -> None:
    job = started("a", "b").join("c")(Closed("a")).at_boundary("a", "b")

    assert job.view.ids == ("a", "b")
    job(Gone("a", "goodbye"), Gone("b", "goodbye"))(Tick(), at=100.0)
    assert job.state.view is None
    assert next_deadline(job.state, SETTINGS) is None


def test_rule_8_nobody_holds_after_the_end() -> None:
    settings = Settings(min_nodes=2, gathering_s=0.0)
    job = started("a", "b", settings=settings)(Closed("a"), Gone("b", "crash"))
    assert job.view.hold is False

    holding = started("a", "b", settings=settings)(Gone("b", "crash")).at_boundary("a")
    assert (holding.view.hold, holding.view.generation) == (True, 2)
    assert (holding(Closed("a")).view.hold, holding.view.generation) == (False, 3)


# ---------------------------------------------------------------- rule 9: leaving


def left(*names: str) -> Coordinator:
    """All members have left together."""
    return started(*names)(*(Leaving(name) for name in names)).at_boundary(*names)


def test_rule_9_nothing_begins_anew_before_the_last_members_have_gone() -> None:
    job = left("a", "b").join("c", at=5.0)(Tick(), at=7.0)
    assert job.state.view is None

    assert job(Gone("a", "goodbye", goodbye=True), at=7.0).state.view is None
    assert next_deadline(job.state, SETTINGS) is None
    job(Gone("b", "crash"), at=7.0)
    assert (job.view.ids, job.view.generation) == (("c",), 3)


def test_rule_9_ready_newcomers_get_the_state_before_the_last_members_leave() -> None:
    job = started("a", "b").join("c")(Leaving("a"), Leaving("b")).at_boundary("a", "b")
    assert job.installed == Install(job.view, ())
    assert (job.view.ids, job.view.pending) == (("a", "b", "c"), True)

    job.at_boundary("a", "b", "c")
    assert job.installed == Install(job.view, ("a", "b"))
    assert job.view.ids == ("c",)


def test_rule_9_state_is_handed_over_also_to_too_few_nodes() -> None:
    settings = Settings(min_nodes=3, gathering_s=0.0)
    job = started("a", "b", "c", settings=settings)(Gone("b", "crash"), Gone("c", "crash")).join("d")(Leaving("a"))
    job.at_boundary("a")

    assert (job.view.ids, job.view.hold) == (("a", "d"), True)
    assert job.at_boundary("a", "d").view.ids == ("d",)


def test_rule_9_all_leave_while_newcomers_warm_up_leaves_nobody() -> None:
    job = started("a").arrive("c")(Leaving("a")).at_boundary("a")

    assert job.installed.view.members == ()


@pytest.mark.parametrize("ready", [False, True])
def test_rule_9_newcomer_that_wants_to_leave_is_told_that_it_is_out(ready: bool) -> None:
    job = started("a").arrive("c")
    if ready:
        job(Ready("c"))
    job(Leaving("c"))

    assert job.installed == Install(View(1, (), reason="c left before it was admitted"), ("c",))
    assert job.view.ids == ("a",)
    assert job(Ready("c")).actions == ()  # sent before it was told
    assert job(Gone("c", "goodbye", goodbye=True)).state.dismissed == frozenset()


def test_rule_9_worker_that_wants_to_leave_before_the_first_view_is_not_in_it() -> None:
    job = Coordinator().arrive("a", "b")(Leaving("a"))(Tick(), at=1.0)

    assert job.view.ids == ("b",)


# ---------------------------------------------------------------- illegal events


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (Arrived(member("a")), "a has arrived twice"),
        (Ready("x"), "x is not connected"),
        (Ready("a"), "a says that it is ready, but it is member"),
        (Ready("r"), "r says that it is ready, but it is ready"),
        (AtBoundary("x", 1), "x is not connected"),
        (AtBoundary("r", 1), "r is at a boundary, but it is ready"),
        (AtBoundary("w", 1), "w is at a boundary, but it is warming"),
        (Closed("x"), "x is not connected"),
        (Closed("r"), "r closes the job, but it is ready"),
    ],
)
def test_illegal_event_raises_and_leaves_the_state_as_it_was(event: Event, told: str) -> None:
    job = started("a", "b").join("r").arrive("w")
    before = job.state

    with pytest.raises(ProtocolError, match=told):
        job(event)

    assert job.state is before


def test_illegal_boundary_before_the_first_view_raises() -> None:
    with pytest.raises(ProtocolError, match="a is at a boundary, but it is early"):
        Coordinator().arrive("a")(AtBoundary("a", 0))


# ---------------------------------------------------------------- rule 7: goodbyes


def settled(*names: str) -> Coordinator:
    """A job whose members have all built the group of view 1."""
    return started(*names)(*(Settled(name, 1) for name in names))


def test_rule_7_goodbye_in_a_settled_view_leaves_it_to_the_others() -> None:
    job = settled("a", "b", "c")(Gone("a", "done", goodbye=True))
    assert job.actions == ()
    assert job.view.ids == ("a", "b", "c")


def test_rule_7_goodbye_before_all_have_settled_makes_a_view_at_once() -> None:
    job = started("a", "b", "c")(Settled("a", 1), Settled("b", 1), Gone("a", "done", goodbye=True))
    assert job.view.ids == ("b", "c")


def test_rule_7_settled_in_an_older_view_does_not_count() -> None:
    job = settled("a", "b", "c", "d")(Gone("d", "crash"), Settled("a", 1), Settled("b", 1), Settled("c", 1))
    assert job(Gone("a", "done", goodbye=True)).view.ids == ("b", "c")


def test_rule_7_whoever_suspects_after_a_goodbye_gets_a_view_at_once() -> None:
    job = settled("a", "b", "c")(Gone("a", "done", goodbye=True), Suspected("c", 1))
    assert job.view.ids == ("b", "c")


def test_rule_7_whoever_stands_at_a_boundary_after_a_goodbye_gets_a_view_at_once() -> None:
    job = settled("a", "b", "c")(Gone("a", "done", goodbye=True), AtBoundary("b", 1))
    assert job.view.ids == ("b", "c")


def test_rule_7_goodbye_while_somebody_suspects_or_stands_at_a_boundary_makes_a_view() -> None:
    for waiting in (Suspected("b", 1), AtBoundary("b", 1)):
        job = settled("a", "b")(waiting, Gone("a", "done", goodbye=True))
        assert job.view.ids == ("b",)


def test_rule_7_crash_after_a_goodbye_makes_a_view_of_those_that_are_left() -> None:
    job = settled("a", "b", "c")(Gone("a", "done", goodbye=True), Gone("b", "crash"))
    assert job.view.ids == ("c",)


def test_rule_7_last_goodbye_leaves_nobody() -> None:
    job = settled("a", "b")(Gone("a", "done", goodbye=True), Gone("b", "done", goodbye=True))
    assert job.state.view is None
    assert job.actions == ()


# ---------------------------------------------------------------- rule 9, of stragglers

FULL = Settings(max_nodes=3, gathering_s=0.0)


def test_rule_9_spare_comes_in_before_the_straggler_goes() -> None:
    job = started("a", "b", "c", settings=FULL).join("d")
    assert job.actions == ()
    assert job(Straggler("b")).actions == (Announce(job.view.ids, job.view.generation),)

    job.at_boundary("a", "b", "c")
    assert (job.view.ids, job.installed.dropped, job.view.pending) == (("a", "b", "c", "d"), (), False)
    job(Settled("a", 2), Settled("b", 2), Settled("c", 2))
    assert job(Settled("d", 2)).actions == (Resign("b"),)

    job(Leaving("b")).at_boundary("a", "b", "c", "d")
    assert (job.view.ids, job.installed.dropped, job.view.pending) == (("a", "c", "d"), ("b",), False)
    assert job.state.replacement == Replacement()


def test_rule_9_straggler_stays_until_a_spare_is_ready() -> None:
    job = started("a", "b", "c", settings=FULL)(Straggler("b"))
    assert job.actions == ()
    assert phase_of(job.state, "b") is Phase.MEMBER

    job.arrive("d")(Ready("d"))
    assert job.actions == (Announce(job.view.ids, job.view.generation),)
    assert job.at_boundary("a", "b", "c").view.ids == ("a", "b", "c", "d")


def test_rule_9_newcomer_for_which_there_is_room_replaces_nobody() -> None:
    job = started("a", "b", settings=FULL)(Straggler("b")).join("d").at_boundary("a", "b")
    assert job.view.ids == ("a", "b", "d")
    assert phase_of(job.state, "b") is Phase.MEMBER


def test_rule_9_member_that_is_fast_again_stays() -> None:
    job = started("a", "b", "c", settings=FULL)(Straggler("b"), Straggler("")).join("d")
    assert job.actions == ()


def test_rule_9_straggler_stays_if_its_replacement_is_lost() -> None:
    job = started("a", "b", "c", settings=FULL).join("d")(Straggler("b")).at_boundary("a", "b", "c")
    job(Gone("d", "crash"))
    assert job.view.ids == ("a", "b", "c")

    job.at_boundary("a", "b", "c")
    assert job.view.ids == ("a", "b", "c")
    assert phase_of(job.state, "b") is Phase.MEMBER
    # The next one has another try.
    job.join("e").at_boundary("a", "b", "c")
    assert job.view.ids == ("a", "b", "c", "e")
    assert job(*(Settled(name, 5) for name in "abce")).actions == (Resign("b"),)
    assert job(Leaving("b")).at_boundary("a", "b", "c", "e").view.ids == ("a", "c", "e")


def test_rule_9_straggler_that_is_lost_makes_room_as_any_other() -> None:
    job = started("a", "b", "c", settings=FULL).join("d")(Straggler("b"))
    job(Gone("b", "crash"))
    assert (job.view.ids, job.view.pending) == (("a", "c"), True)
    assert job.at_boundary("a", "c").view.ids == ("a", "c", "d")
    # Another one may be a straggler after it.
    assert job.join("e")(Straggler("c")).at_boundary("a", "c", "d").view.ids == ("a", "c", "d", "e")


def test_rule_9_straggler_that_wants_to_leave_does_not_wait_for_its_replacement() -> None:
    job = started("a", "b", "c", settings=FULL).join("d")(Straggler("b"), Leaving("b")).at_boundary("a", "b", "c")
    assert (job.view.ids, job.installed.dropped) == (("a", "c", "d"), ("b",))


def test_rule_9_nobody_is_replaced_who_is_alone_or_no_member() -> None:
    job = started("a", settings=Settings(max_nodes=1)).join("d")(Straggler("a"))
    assert job.actions == ()
    job = started("a", "b", settings=Settings(max_nodes=2)).join("d")(Straggler("d"), Straggler("nobody"))
    assert (job.actions, job.state.replacement) == ((), Replacement())
