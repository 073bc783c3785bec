"""Which training of a program is under way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ef_common.core.replay import FRESH
from ef_common.core.view import Member, View
from ef_common.session.collective_log import CollectiveLog
from ef_common.session.crash_record import CrashRecord, in_training, path_of
from ef_common.session.current_view import CurrentView
from ef_common.session.progress_tracker import ProgressTracker
from ef_common.session.trainings import Trainings
from tests.diagrams import rows

ME = Member("w", "n", "")


class Program:
    """A program, in a member or (fresh) in a newcomer, and what it tells the coordinator."""

    def __init__(self, completed: int = 7, *, others_are_in: int = 1, directory: Path | None = None) -> None:
        self.told: list[tuple[str, int]] = []
        channel = SimpleNamespace(
            send=lambda kind, number: self.told.append((kind, number)), job_training=lambda: others_are_in
        )
        log = CollectiveLog(completed, CurrentView(ME, View(1, (ME,))))
        record = CrashRecord(directory)
        context = SimpleNamespace(
            channel=channel, tracker=ProgressTracker(lambda: 0.0), collectives=log, crash_record=record
        )
        self.trainings = Trainings(cast(Any, context))

    @property
    def state(self) -> str:
        return "over" if self.trainings.are_over else "under_way"


def ends(program: Program) -> None:
    program.trainings.end()


def begins_again(program: Program) -> None:
    program.trainings.begin(2)


WITNESSES: dict[str, tuple[Callable[[Program], None], ...]] = {
    "over → under_way": (ends, begins_again),
    "under_way → over": (ends,),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(Trainings) == list(WITNESSES)


@pytest.mark.parametrize("row", WITNESSES)
def test_each_row_of_the_diagram_is_true(row: str) -> None:
    program = Program()
    shown = [program.state]
    for act in WITNESSES[row]:
        act(program)
        shown.append(program.state)
    assert row == " → ".join(shown[-2:])


def test_launcher_can_read_whether_a_training_is_under_way(tmp_path: Path) -> None:
    trainings, path = Program(directory=tmp_path).trainings, path_of(tmp_path, 0)
    seen = [in_training(path)]
    for number in (1, 2):
        trainings.begin(number)
        seen.append(in_training(path))
        trainings.end()
        seen.append(in_training(path))
    assert seen == [False, True, False, True, False]


@pytest.mark.parametrize(("completed", "told"), [(7, [("begin", 2)]), (FRESH, [])])
def test_only_a_member_tells_that_it_begins_and_not_the_first_time(completed: int, told: list[tuple[str, int]]) -> None:
    program = Program(completed)
    program.trainings.begin(1)
    program.trainings.begin(2)
    assert program.told == told


@pytest.mark.parametrize(
    ("completed", "others_are_in", "expected"), [(FRESH, 2, True), (FRESH, 1, False), (7, 2, False)]
)
def test_newcomer_is_behind_if_the_others_are_in_a_later_training(
    completed: int, others_are_in: int, expected: bool
) -> None:
    assert Program(completed, others_are_in=others_are_in).trainings.is_behind is expected


def test_training_that_was_skipped_without_a_result_is_remembered() -> None:
    trainings = Program(FRESH).trainings
    trainings.skip(has_result=True)
    assert (trainings.has_skipped, trainings.lacks_results) == (True, False)
    trainings.skip(has_result=False)
    trainings.skip(has_result=True)
    assert trainings.lacks_results
