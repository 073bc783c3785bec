"""What the members of a new view settle before they go on: what each of them lacks, and whether it fits in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ef_common.core.replay import Replay, plan_replay
from ef_common.errors import CannotJoin, MembershipError, ProtocolError
from ef_common.session.context import Context
from ef_common.session.delivery import Delivery
from ef_common.session.ports import Operation, State
from ef_common.session.settling_report import SettlingReport, reference_of, warn_of_clock
from ef_common.session.trainings import Trainings

_SETTLING = "exchange of positions in a new view"
_COMPARING = "comparison of installed software"
T = TypeVar("T")


class Settling:
    """Settles with the members of the current view. Nobody leaves before every member has what it lacks.

    ::

        report   how far each member has come, in which training, and with which software
        compare  in a newcomer: training, clock and software with those of the others
        replay   results go to members that are one collective behind
        restore  rank 0, if nobody holds a state: the newest one that was saved
        hand on  the state goes to newcomers, and all wait until they have it, as the pause ends then

    Args:
        context: What it shares with the other parts of the session.
        trainings: Those of this worker's program.
    """

    def __init__(self, context: Context, trainings: Trainings) -> None:
        self._context = context
        self._current, self._collectives = context.current, context.collectives
        self._trainings = trainings

    def settle(self, operation: Operation | None, state: State | None) -> None:
        """Settle what is owed.

        Args:
            operation: The collective in flight.
            state: What newcomers receive.

        Raises:
            CannotJoin: This newcomer does not fit in.
            GroupBroken: A member is gone.
        """
        collectives = self._collectives
        own = self._context.surroundings.report(collectives.completed, self._trainings.number)
        reports = [SettlingReport.load(payload) for payload in self._current.group.all_gather(own.dump(), _SETTLING)]
        self._compare(own, reports)
        replay = plan_replay([report.completed for report in reports])
        if not replay.results:
            collectives.confirm()  # nobody is behind: so it is with what a newcomer is about to receive
        self._replay(replay, operation)
        if replay.restart and self._current.view.generation > 1 and self._current.rank == 0:
            self._restore(state)
        self._hand_on(replay, state)

    def _compare(self, own: SettlingReport, reports: Sequence[SettlingReport]) -> None:
        is_fresh, reference = self._collectives.is_fresh, reference_of(reports)
        if is_fresh:
            if others := {report.training for report in reports} - {own.training}:
                raise ProtocolError(f"admitted to training {own.training} while others are in {sorted(others)}")
            here, there = self._current.worker.node, self._current.view.members[reference].node
            warn_of_clock(own.time_s - reports[reference].time_s, here=here, there=there)
        if len({report.software for report in reports}) > 1:
            mine = self._context.surroundings
            theirs = self._current.group.all_gather(mine.dump(), _COMPARING)[reference]
            if is_fresh and (differences := mine.differences(theirs)):
                raise self._misfit(f"other software is installed here: {differences}. Install the same on all nodes")

    def _replay(self, replay: Replay, operation: Operation | None) -> None:
        delivery, rank = Delivery(self._current.group), self._current.rank
        for source, target in replay.results:
            if rank == source:
                delivery.send_result(self._collectives.newest, self._collectives.completed_in, target)
            elif rank == target:
                self._collectives.complete(*delivery.receive_result(operation, source))

    def _restore(self, state: State | None) -> None:
        """No member has a state, so this worker restores one for all."""
        if state is None or not state.restore():
            if self._trainings.lacks_results:
                raise MembershipError(
                    "all workers are lost that have made the trainings of this program before this one, and there is "
                    "no checkpoint of them. Start this worker again: it begins with the first training"
                )
            self._context.on_event("rollback", generation=self._current.view.generation, step=0, epoch=0)

    def _hand_on(self, replay: Replay, state: State | None) -> None:
        delivery, rank = Delivery(self._current.group), self._current.rank
        for chain in replay.states:
            if rank in chain:
                delivery.hand_on_state(state, chain, rank, self._take_in)
        # A newcomer holds the state from here on.
        self._collectives.completed = max(self._collectives.completed, replay.newest)
        if replay.states:
            self._current.group.all_gather(b"", "handing on of the state to newcomers")

    def _take_in(self, take: Callable[[], T]) -> T:
        """Load the others' state. If that fails, they must neither wait for this worker nor fail with it."""
        try:
            return take()
        except Exception as error:
            raise self._misfit(
                "it cannot go on from the state of the others. Start it with the program, the settings and the data "
                f"that they have. The reason: {type(error).__name__}: {error}"
            ) from error

    def _misfit(self, why: str) -> CannotJoin:
        worker = self._current.worker
        return CannotJoin(f"worker {worker.id} (node {worker.node}) ends, and the others go on without it: {why}")
