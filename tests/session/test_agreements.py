"""What all members have agreed to do at a step boundary."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ef_common.core.view import Member, View
from ef_common.session.agreements import Agreements
from tests.diagrams import rows

MEMBERS = tuple(Member(name, "n", "") for name in "vw")
VIEW = View(3, MEMBERS)


def agreed() -> Agreements:
    agreements = Agreements()
    agreements.hear(2.0, 0.0, VIEW)
    return agreements


def heard() -> Agreements:
    agreements = Agreements()
    agreements.wish = True
    agreements.hear(0.0, 1.0, VIEW)
    agreements.hear(0.0, 0.0, VIEW)  # the next reduction of the same step
    return agreements


NEW = View(4, MEMBERS, admitted_at=4)
WITNESSES: dict[str, tuple[Callable[[], Agreements], Callable[[Agreements], object]]] = {
    "none → agreed": (Agreements, lambda agreements: agreements.hear(2.0, 0.0, VIEW)),
    "agreed → none": (agreed, lambda agreements: agreements.enter(NEW)),
    "none → heard": (Agreements, lambda agreements: agreements.hear(0.0, 1.0, VIEW)),
    "heard → none": (heard, lambda agreements: agreements.take_wish(VIEW)),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(Agreements) == list(WITNESSES)


@pytest.mark.parametrize("row", WITNESSES)
def test_each_row_of_the_diagram_is_true(row: str) -> None:
    make, act = WITNESSES[row]
    agreements = make()
    shown = [state(agreements)]
    act(agreements)
    assert row == " → ".join([*shown, state(agreements)])


def state(agreements: Agreements) -> str:
    if agreements.change_agreed:
        return "agreed"
    return "none" if agreements._wish_in is None else "heard"


@pytest.mark.parametrize("num_flags", [0.0, 1.0])
def test_change_of_which_not_all_know_is_not_agreed(num_flags: float) -> None:
    agreements = Agreements()
    agreements.hear(num_flags, 0.0, VIEW)
    assert not agreements.change_agreed


def test_change_of_which_all_know_is_agreed() -> None:
    assert agreed().change_agreed


def test_only_member_of_a_view_agrees_with_itself() -> None:
    agreements = Agreements()
    agreements.change_alone(View(3, MEMBERS[:1]))
    assert agreements.change_agreed


@pytest.mark.parametrize(("admitted_at", "remains"), [(3, True), (4, False)])
def test_change_is_made_by_a_planned_view_and_not_by_one_after_a_loss(admitted_at: int, remains: bool) -> None:
    agreements = agreed()
    agreements.enter(View(4, MEMBERS, admitted_at=admitted_at))
    assert agreements.change_agreed is remains


def test_change_counts_from_the_view_in_which_it_was_agreed_first() -> None:
    agreements = agreed()
    agreements.hear(2.0, 0.0, View(4, MEMBERS))
    agreements.enter(View(5, MEMBERS, admitted_at=4))
    assert not agreements.change_agreed


def test_wish_that_was_heard_is_taken_once() -> None:
    agreements = heard()
    assert not agreements.wish
    assert [agreements.take_wish(VIEW), agreements.take_wish(VIEW)] == [True, False]


def test_wish_that_was_not_heard_remains_and_is_not_taken() -> None:
    agreements = Agreements()
    agreements.wish = True
    agreements.hear(0.0, 0.0, VIEW)
    assert agreements.wish
    assert not agreements.take_wish(VIEW)


def test_wish_is_forgotten_when_the_members_change() -> None:
    assert not heard().take_wish(View(4, MEMBERS[:1]))
