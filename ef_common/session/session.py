"""The session: one worker's side of the protocol.

A worker runs *logical collectives* through :meth:`Session.run`. Each has a sequence number and is carried to its end
over any number of view changes (see :mod:`ef_common.core.replay`). At a step boundary on which all members have agreed,
:meth:`Session.boundary` lets newcomers in. Nothing here knows a framework: gradients, metrics and states are tensors of
the caller.

:mod:`stage` shows the stages of a session and what leads from one to the next. Its parts have one idea each, and name
the rules that keep it: :class:`CollectiveLog` counts the collectives and keeps the newest result, :class:`Agreements`
knows what all members do at the next boundary, :class:`Recovery` and :class:`Settling` lead to the next view, and
:class:`Trainings` tells which training of the program is under way.

If all members leave together, the state leaves with them. The first of them is told to save it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ef_common.core.replay import FRESH
from ef_common.core.view import SOLO, Member, View
from ef_common.errors import CallMismatch, CoordinatorLost, GroupBroken, Left, TrainingOver, UnsupportedError
from ef_common.session.agreements import Agreements
from ef_common.session.barrier import Barrier
from ef_common.session.collective_log import CollectiveLog
from ef_common.session.context import Context
from ef_common.session.crash_record import CrashRecord
from ef_common.session.current_view import CurrentView
from ef_common.session.job_contact import JobContact
from ef_common.session.lone import LoneChannel, LoneGroup
from ef_common.session.ports import ControlChannel, Group, GroupFactory, Operation, State
from ef_common.session.progress_tracker import ProgressTracker
from ef_common.session.recovery import Recovery
from ef_common.session.settling_report import Surroundings
from ef_common.session.stage import Stage
from ef_common.session.stats import Stats
from ef_common.session.trainings import Trainings

_ENTERED = "barrier after a change of the workers"


class Session:
    """One worker's membership in a job.

    Args:
        worker: This worker.
        channel: Control connection, or None for a world of one without a coordinator.
        groups, on_event, clock, tracker, surroundings, crash_record: See
            :class:`~ef_common.session.context.Context`.

    Attributes:
        stage: What this worker does.
        collectives: Those that it has completed.
        trainings: Those of its program.
        stats: Figures of its training.
        agreements: What all members do at the next boundary.
        job: Tells the coordinator more, and learns from it.
        state: What newcomers receive.
        entering: Whether it has been admitted and prepares its first step alone: nobody else answers its collectives,
            and its exceptions cost the others nothing.
        leaving: Whether it wants to leave.
        crash_record: Where steps are recorded for the launcher.
        on_view: Called with each view that is entered.
        on_last_leave: Called at a boundary when all members leave, in the first of them, before it does.
    """

    def __init__(
        self,
        worker: Member,
        *,
        channel: ControlChannel | None,
        groups: GroupFactory,
        on_event: Callable[..., None] = lambda kind, **fields: None,
        clock: Callable[[], float] = lambda: 0.0,
        tracker: ProgressTracker | None = None,
        surroundings: Surroundings | None = None,
        crash_record: CrashRecord | None = None,
    ) -> None:
        alone = channel is None
        self._current = current = CurrentView(worker, SOLO if alone else View(0, (worker,)))
        self._context = context = Context(
            LoneChannel() if channel is None else channel,
            groups,
            on_event=on_event,
            clock=clock,
            tracker=tracker or ProgressTracker(clock),
            surroundings=surroundings or Surroundings(),
            current=current,
            collectives=CollectiveLog(0 if alone else FRESH, current),
            crash_record=crash_record or CrashRecord(),
        )
        self.worker = worker
        self.stage = Stage.ALONE if alone else Stage.OUTSIDE
        self.state: State | None = None
        self.entering = self.leaving = False
        self.on_view: Callable[[View], None] = lambda view: None
        self.on_last_leave: Callable[[], None] | None = None
        self.crash_record = context.crash_record
        self.stats = Stats()
        self.collectives = context.collectives
        self.trainings = Trainings(context)
        self.job = JobContact(context)
        self.agreements = Agreements()
        self._alone_for: str | None = None
        self._recovery = Recovery(context, self.trainings)

    # ------------------------------------------------------------ the view

    @property
    def newcomer(self) -> bool:
        """Whether it has come to a job that runs already, and has not been admitted yet."""
        return self.stage is Stage.WARMING or self.stage is Stage.JOINING

    @property
    def view(self) -> View:
        """The newest view that this worker has entered."""
        return self._current.view

    @property
    def group(self) -> Group:
        """The current group, for operations that start before :meth:`run` is called."""
        return self._current.group

    @property
    def rank(self) -> int:
        """Rank in the current view. A newcomer that is not admitted yet counts as its next member."""
        return max(1, self.view.world_size) if self.newcomer else self._current.rank

    @property
    def world_size(self) -> int:
        """World size of the current view."""
        return self._current.view.world_size

    @property
    def completed(self) -> int:
        """Number of collectives that are complete."""
        return self.collectives.completed

    @property
    def completed_in(self) -> View:
        """The view in which the newest collective has completed."""
        return self.collectives.completed_in

    @property
    def is_alone(self) -> bool:
        """Whether this process is not a worker of a job: nobody can join, and nobody reads its crash record."""
        return self.stage is Stage.ALONE and self.completed_in.world_size == 1 and not self.crash_record.is_read

    @property
    def may_change(self) -> bool:
        """Whether a boundary may change the view, or end this worker. In a lone process only a wish to leave does."""
        return self.leaving or self.stage is not Stage.ALONE

    @property
    def change_pending(self) -> bool:
        """Whether this worker knows of a change that waits for a boundary."""
        return self.view.pending or self.view.hold or self._context.channel.change_pending

    # ------------------------------------------------------------ joining and leaving

    def start(self) -> bool:
        """Connect to the coordinator; wait for the first view, or learn that the job already runs.

        Returns:
            True for a newcomer, which warms up and then calls :meth:`join`.

        Raises:
            Left: It wants to leave.
        """
        if self.stage is Stage.ALONE:
            return False
        self._leave_if_nobody_waits()
        if self._context.channel.start(self._current.replace):
            self.stage = Stage.WARMING
            return True
        self._recover()
        self.run(Barrier(_ENTERED))
        return False

    def join(self) -> None:
        """Ask to be admitted, wait for that, and receive the state. Call this when everything slow is done.

        Raises:
            CannotJoin: The state cannot be taken in here. The others go on without this worker.
            Left: It wants to leave.
            TrainingOver: The others have gone on to a later training, so that this one is to be skipped.
        """
        if not self.newcomer:
            return
        self._leave_if_nobody_waits()
        if self.state is not None:
            self.state.prepare()
        self._context.channel.send("ready", self.trainings.number)
        try:
            self._recover()
        except TrainingOver:
            self.stage = Stage.WARMING
            raise
        self.run(Barrier(_ENTERED))

    def leave(self) -> None:
        """Ask to leave at the next boundary that all agree on; :meth:`boundary` then raises `Left`.

        Before it is admitted, :meth:`start` and :meth:`join` raise it. May be called from any thread, and again: the
        wish is not heard before there is a control connection.
        """
        self.leaving = True
        self._context.channel.send("leave")

    def _leave_if_nobody_waits(self) -> None:
        if self.leaving:
            raise Left("it was no member yet")

    def close(self) -> None:
        """The program ends normally. If its trainings have ended, too, say so: nobody can join any more."""
        if self.stage is not Stage.ALONE and not self.newcomer and self.trainings.are_over:
            self._context.channel.send("close")
            self.crash_record.finish()

    def stop(self) -> None:
        """Say goodbye and end the group. May be repeated."""
        self._recovery.stop()

    # ------------------------------------------------------------ collectives

    def run(self, operation: Operation) -> View:
        """Carry one logical collective to its end.

        Returns:
            The view whose members contributed to the result.

        Raises:
            CallMismatch: In all members, if they are in different calls. The collective does not count.
        """
        if self._alone_for is not None:
            raise UnsupportedError(
                f"{self._alone_for} exchanges values with the other workers, but is called in one of them alone, for a "
                "checkpoint. Exchange them in the training step, or at the end of an epoch"
            )
        if self.newcomer or self.entering:
            alone = View(0, (self.worker,))
            operation.run(LoneGroup(), alone)
            return alone
        self._context.tracker.wait(self.view.generation, self.completed)
        while True:
            number = self.completed
            try:
                operation.run(self.group, self.view)
                if self._current.is_ousted:
                    raise GroupBroken("this worker alone has lost its place in the view")
            except CallMismatch:
                self.group.abort()
                raise
            except GroupBroken:
                self._recover(operation)
                if self.completed == number:
                    self._context.tracker.wait(self.view.generation, number)
                    continue  # nobody had the result: run it again among those that are left
            else:
                self.collectives.complete(operation, self.view)
            self._context.tracker.go_on(self.view.generation, self.completed)
            self.collectives.confirm()  # everybody has completed the collectives before this one
            return self.completed_in

    def _recover(self, operation: Operation | None = None, *, met_at: float | None = None) -> None:
        """Come to the next view that holds; see :meth:`Recovery.run`."""
        self.stage = Stage.JOINING if self.newcomer else Stage.RECOVERING
        pause_s = self._recovery.run(operation, self.state, met_at=met_at)
        if not self.newcomer:  # its wait to be admitted is no pause of the training
            self.stats.paused_s += pause_s
        self.on_view(self.view)
        self.stage = Stage.STEPPING

    def when_confirmed(self, act: Callable[[], None]) -> None:
        """Call `act` once the result of the newest collective is sure to survive any loss."""
        self.collectives.when_confirmed(act)

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Within this context, a collective raises: the others are not there. `what` would have run it."""
        self._alone_for = what
        try:
            yield
        finally:
            self._alone_for = None

    # ------------------------------------------------------------ steps and boundaries

    def begin_step(self, num_samples: int = 0) -> None:
        """A batch has been dealt. The others wait for its reduction next; :meth:`agree` ends it.

        Args:
            num_samples: Number of this worker's samples; 0 if they do not show how fast it is.
        """
        if self.stage is not Stage.ALONE:
            self._context.tracker.begin_step(num_samples)

    def agree(self, num_flags: float, num_wishes: float = 0.0) -> None:
        """A step's collective has completed, with these sums of flags and wishes; see :meth:`Agreements.hear`."""
        self._context.tracker.end_step()
        if not self.newcomer:  # what it computes by itself, to warm up, is nobody's agreement
            self.agreements.hear(num_flags, num_wishes, self.completed_in)

    def boundary(self) -> bool:
        """At a step boundary: let a change happen if all have agreed on one.

        Returns:
            True if the view has changed.

        Raises:
            Left: This worker asked to leave, and the new view is without it.
        """
        if self.stage is Stage.ALONE:
            if self.leaving:
                self._leave_last()
            return False
        if self.newcomer:
            return False
        if self.world_size == 1 and (self.leaving or self.change_pending):
            self.agreements.change_alone(self.view)
        try:
            return self._change_view()
        except Left as left:
            if left.last and self.view.rank_of(self.worker.id) == 0:
                self._save()
            raise
        except CoordinatorLost:
            if self.leaving and self.world_size == 1:  # nobody can come, so nobody is needed to let it go
                self._leave_last()
            raise

    def _change_view(self) -> bool:
        """Change the view while a change is agreed; returns whether one was."""
        changed = False
        while self.agreements.change_agreed:
            self.stage = Stage.AT_BOUNDARY
            self._recover(met_at=self._recovery.meet_at_boundary(self.completed))
            self.agreements.enter(self.view)
            changed = True
        if changed:
            self.run(Barrier(_ENTERED))
        return changed

    def _leave_last(self) -> None:
        self._save()
        raise Left("it was the last one")

    def _save(self) -> None:
        if self.on_last_leave is not None:
            self.on_last_leave()
            self.collectives.confirm()  # what is saved is not lost any more
