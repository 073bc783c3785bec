"""What newcomers compare with the others before their first step: software, and the clock."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ef_common.core.replay import FRESH
from ef_common.core.view import Member
from ef_common.errors import CannotJoin
from ef_common.session import Session
from ef_common.session.settling_report import SettlingReport, Surroundings, reference_of
from tests.session.test_session import Admitting, Sending

OLD = Surroundings({"elasticflow": "0.2.0", "Python": "3.11", "torch": "2.12.0"}, now=lambda: 1000.0)
NEW = Surroundings({"elasticflow": "0.2.0", "Python": "3.12", "torch": "2.13.0", "jax": "1.0"}, now=lambda: 1000.0)


def test_report_comes_back_as_it_was() -> None:
    report = OLD.report(FRESH, 2)
    assert SettlingReport.load(report.dump()) == report
    assert (report.completed, report.training, report.time_s) == (FRESH, 2, 1000.0)


def test_software_is_compared_by_what_both_have() -> None:
    assert OLD.differences(NEW.dump()) == "Python 3.11 (the others: 3.12), torch 2.12.0 (the others: 2.13.0)"
    assert NEW.differences(OLD.dump()) == "Python 3.12 (the others: 3.11), torch 2.13.0 (the others: 2.12.0)"
    assert not OLD.differences(OLD.dump())
    assert not OLD.differences(Surroundings({"keras": "3.0"}).dump())
    assert OLD.report(1, 1).software != NEW.report(1, 1).software


@pytest.mark.parametrize(("completed", "first"), [((FRESH, FRESH), 0), ((FRESH, 3, 3), 1), ((3, FRESH), 0)])
def test_newcomer_compares_itself_with_a_member_that_holds_the_state(completed: tuple[int, ...], first: int) -> None:
    assert reference_of([Surroundings().report(number, 1) for number in completed]) == first


class Comparing(Sending):
    """A member with these surroundings, which holds a state without anything in it."""

    def __init__(self, theirs: Surroundings, mine: Surroundings) -> None:
        super().__init__(2)
        self.calls: list[str] = []
        self._sides = (theirs, mine)

    def all_gather(self, payload: bytes, call: str = "") -> list[bytes]:
        self.calls.append(call)
        if call == "comparison of installed software":
            return [side.dump() for side in self._sides]
        return [self._sides[0].report(7, 1).dump(), payload]

    def receive(self, tensors: list[Any], source: int, target: int | None = None) -> None:
        """There is nothing in the state."""


def join(theirs: Surroundings, mine: Surroundings) -> tuple[Comparing, list[str]]:
    order: list[str] = []
    group = Comparing(theirs, mine)
    groups: Any = SimpleNamespace(build=lambda view, rank, bootstrap: group)
    session = Session(Member("x", "n", ""), channel=cast(Any, Admitting(order)), groups=groups, surroundings=mine)
    session.start()
    try:
        session.join()
    finally:
        group.calls += order
    return group, order


def test_newcomer_with_other_software_ends_alone_and_names_it() -> None:
    with pytest.raises(CannotJoin, match=r"worker x .* torch 2.12.0 \(the others: 2.13.0\). Install the same"):
        join(NEW, OLD)


def test_newcomer_with_the_same_software_compares_no_more() -> None:
    group, _ = join(OLD, OLD)
    assert "comparison of installed software" not in group.calls


def test_newcomer_that_lacks_what_others_have_joins() -> None:
    group, order = join(Surroundings({"torch": "2", "jax": "1"}), Surroundings({"torch": "2"}))
    assert "comparison of installed software" in group.calls
    assert order[-1] == "settled"


@pytest.mark.parametrize(("now", "text"), [(5000.0, "4000 s ahead of"), (900.0, "100 s behind"), (1030.0, "")])
def test_newcomer_whose_clock_is_far_off_says_so(now: float, text: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    join(OLD, Surroundings(OLD.software, now=lambda: now))
    assert [text in message for message in caplog.messages] == [True] * bool(text)


def test_member_stays_whatever_software_a_newcomer_has() -> None:
    group = Comparing(NEW, OLD)
    groups: Any = SimpleNamespace(build=lambda view, rank, bootstrap: group)
    session = Session(Member("x", "n", ""), channel=cast(Any, Admitting([])), groups=groups, surroundings=OLD)
    session.collectives.completed = 7
    session.start()
    session.join()
    assert "comparison of installed software" in group.calls
