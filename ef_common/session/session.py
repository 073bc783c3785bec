"""The session: one worker's side of the protocol.

A worker runs *logical collectives* through :meth:`Session.run`. Each has a sequence number and is carried to its end
over any number of view changes (see :mod:`ef_common.core.replay`). At a step boundary on which all members have agreed,
:meth:`Session.boundary` lets newcomers in. Nothing here knows a framework: gradients, metrics and states are tensors of
the caller.

The rules that keep the promises:

* Nobody completes collective n+1 before everybody has completed n. One cached result is therefore enough to bring those
  behind up to date, and a result is *confirmed* (it survives any loss) as soon as the next collective has completed.
* The view in which a collective completed names its contributors. It is part of the result, so all survivors agree on
  whose samples an update contains.
* `view` is what this worker knows, and it may be ahead of the others or behind them. Whatever must be equal in all
  members (whose samples come next, the divisor of a mean) is a function of `completed_in`, the view in which the newest
  collective completed. After a planned change a barrier advances it.
* A newcomer has no number until it has received the state; nobody leaves the exchange of a view before every newcomer
  in it has the state.
* A program may train several times. A newcomer joins only where its own program is in the members' training, and skips
  the trainings that are over.
* If all members leave together, the state leaves with them. The first of them is told to save it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from ef_common.core.progress import SETTLING
from ef_common.core.replay import FRESH, Replay, plan_replay
from ef_common.core.room import Room
from ef_common.core.view import SOLO, Member, View
from ef_common.core.watermark import Watermark
from ef_common.errors import (
    CallMismatch,
    CannotJoin,
    CoordinatorLost,
    GroupBroken,
    Left,
    MembershipError,
    ProtocolError,
    TrainingOver,
    UnsupportedError,
    UsageError,
)
from ef_common.session.crash_record import CrashRecord
from ef_common.session.current_group import CurrentGroup
from ef_common.session.delivery import Delivery
from ef_common.session.lone_group import LoneGroup
from ef_common.session.ports import Bootstrap, ControlChannel, GetClaim, Group, GroupFactory, Operation, State
from ef_common.session.progress_tracker import ProgressTracker
from ef_common.session.settling import CLOCKS_APART_S, Report, Surroundings, reference_of

logger = logging.getLogger(__name__)

_AT_BOUNDARY = "wait between two steps, for workers that come or go"
_ENTERED = "barrier after a change of the workers"
_SETTLING = "exchange of positions in a new view"
_COMPARING = "comparison of installed software"
T = TypeVar("T")


class Barrier:
    """An operation without a result. When it completes, all members have arrived, and the view that counts is known.

    Args:
        call: Purpose of the barrier.
    """

    def __init__(self, call: str = "barrier") -> None:
        self.call = call

    def run(self, group: Group, view: View) -> None:
        """Wait for all members."""
        group.all_gather(b"", self.call)

    def describe(self) -> bytes:
        """There is nothing to describe."""
        return b""

    def result(self, header: bytes | None) -> Sequence[Any]:
        """There are no tensors."""
        return ()


class Session:
    """One worker's membership in a job.

    Args:
        worker: This worker.
        channel: Line to the coordinator, or None for a world of one without a coordinator.
        groups: Builds the process group of each view.
        on_event: Called with (kind, fields) for the event log.
        clock: Monotonic time in seconds, for the durations in the events.
        tracker: Records this worker's progress, for others to read.
        surroundings: Its software and its clock, which newcomers compare with those of the others.

    Attributes:
        state: What newcomers receive.
        newcomer: Whether it has not been admitted yet.
        entering: Whether it has been admitted and prepares its first step alone: nobody else answers its collectives,
            and its exceptions cost the others nothing.
        leaving: Whether it wants to leave.
        may_change: Whether a boundary may change the view, or end this worker. In a lone process only a wish to leave
            does that.
        wish: Whether it wants all members to act together at the next boundary; see :meth:`take_wish`.
        crash_record: Where steps are recorded for the launcher.
        training: Number of the training that this worker's program has reached, counted from 1.
        num_samples_trained: Samples that all members together have trained on since this worker joined. Not counted in
            a lone process.
        step: The newest update of the training, as its dealer counts them.
        paused_s: How long training has paused in that time because workers came or went.
        replaces: Id of the member for which this worker has asked for another one; "" for none.
        checkpoint_step: Updates in the newest checkpoint; None if there is none, or this worker knows of none: only the
            one that takes it does.
        has_skipped: Whether it has skipped a training that the others had ended already.
        lacks_results: Whether it has skipped a training whose result is not even in a checkpoint.
        first_claiming: The `ef_common.data.claiming` of this process's first training, which counts for all.
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
    ) -> None:
        self.worker = worker
        self.view = SOLO if channel is None else View(0, (worker,))
        self.completed = FRESH if channel is not None else 0
        self.completed_in = self.view
        self.state: State | None = None
        self.newcomer = False
        self.entering = False
        self.leaving, self.may_change = False, channel is not None
        self.wish = False
        self.crash_record = CrashRecord()
        self.training = 1
        self.num_samples_trained = self.paused_s = 0.0
        self.checkpoint_step: int | None = None
        self.replaces = ""
        self.step = 0
        self.has_skipped = False
        self.lacks_results = False
        self.first_claiming: Any = None
        self._wished_in: int | None = None
        self._channel = channel
        self._groups = groups
        self._current = CurrentGroup()
        self._last: Operation | None = None
        self._change_agreed_in: int | None = None
        self._on_event = on_event
        self._clock = clock
        self._tracker = tracker or ProgressTracker(clock)
        self._surroundings = surroundings or Surroundings()
        self._troubled_since: float | None = None
        self._unconfirmed: list[Callable[[], None]] = []
        self._alone_for: str | None = None
        self._has_trained = False
        self.on_view: Callable[[View], None] = lambda view: None
        self.on_last_leave: Callable[[], None] | None = None

    # ------------------------------------------------------------ the view

    @property
    def rank(self) -> int:
        """Rank in the current view. A newcomer that is not admitted yet counts as its next member."""
        if self.newcomer:
            return max(1, self.view.world_size)
        return self.view.rank_of(self.worker.id) or 0

    @property
    def world_size(self) -> int:
        """World size of the current view."""
        return self.view.world_size

    @property
    def group(self) -> Group:
        """The current group, for operations that start before :meth:`run` is called."""
        return self._current.group

    @property
    def is_alone(self) -> bool:
        """Whether this process is not a worker of a job: nobody can join, and nobody reads its notes."""
        return self._channel is None and len(self.completed_in.members) == 1 and not self.crash_record.is_read

    @property
    def change_pending(self) -> bool:
        """Whether this worker knows of a change that waits for a boundary."""
        if self._channel is None:
            return False
        return self.view.pending or self.view.hold or self._channel.change_pending

    @property
    def change_agreed(self) -> bool:
        """Whether all members know of a change and make it at the next boundary.

        What one member knows alone (its view, say) must never decide this: another may be a view behind, pass
        the boundary, and wait in the next collective for ever.
        """
        return self._change_agreed_in is not None

    # ------------------------------------------------------------ joining and leaving

    def start(self) -> bool:
        """Connect to the coordinator; wait for the first view, or learn that the job already runs.

        Returns:
            True for a newcomer, which warms up and then calls :meth:`join`.

        Raises:
            Left: It wants to leave.
        """
        if self._channel is None:
            return False
        self._leave_if_nobody_waits()
        self.newcomer = self._channel.start(self._current.replace)
        if not self.newcomer:
            self._recover()
            self.run(Barrier(_ENTERED))
        return self.newcomer

    def join(self) -> None:
        """Ask to be admitted, wait for that, and receive the state. Call this when everything slow is done.

        Raises:
            CannotJoin: The state cannot be taken in here. The others go on without this worker.
            Left: It wants to leave.
            TrainingOver: The others have gone on to a later training, so that this one is to be skipped.
        """
        if self._channel is None or not self.newcomer:
            return
        self._leave_if_nobody_waits()
        if self.state is not None:
            self.state.prepare()
        self._channel.send("ready", self.training)
        try:
            self._recover()
        except TrainingOver:
            self._troubled_since = None
            raise
        self.newcomer = False
        self.run(Barrier(_ENTERED))

    def leave(self) -> None:
        """Ask to leave at the next boundary that all agree on; :meth:`boundary` then raises `Left`.

        Before it is admitted, :meth:`start` and :meth:`join` raise it. May be called from any thread, and again: the
        wish is not heard before there is a line to the coordinator.
        """
        self.leaving = self.may_change = True
        if self._channel is not None:
            self._channel.send("leave")

    def _leave_if_nobody_waits(self) -> None:
        if self.leaving:
            raise Left("it was no member yet")

    # ------------------------------------------------------------ the number of nodes

    @property
    def room(self) -> Room | None:
        """In rank 0: what the coordinator knows of the number of nodes; None if it has told nothing, or is none."""
        return None if self._channel is None else self._channel.room

    def want(self, num_nodes: int) -> None:
        """In rank 0: tell the coordinator how many nodes the members want; ignored in other members, and in a lone one.

        If there are more, the coordinator asks whole nodes to leave; those that come later wait as spares. How far a
        demand can be met, :attr:`room` shows: never with fewer than `min_nodes` or more than `max_nodes`.

        Args:
            num_nodes: Number of nodes; 0 for as many as come, as in a job that has never wanted anything.

        Raises:
            UsageError: The number is negative.
        """
        if num_nodes < 0:
            raise UsageError(f"expected a number of nodes, or 0 for as many as come. Received: num_nodes={num_nodes}")
        if self._channel is not None and self.view.generation > 0 and self.view.rank_of(self.worker.id) == 0:
            self._channel.want(num_nodes)

    # ------------------------------------------------------------ trainings

    def begin_training(self, number: int) -> None:
        """The program has come to its n-th training, counted from 1."""
        self.training, self._has_trained, self._tracker.rests = number, False, False
        if self._channel is not None and not self.newcomer and number > 1:
            self._channel.send("begin", number)

    def end_training(self) -> None:
        """The training has ended normally: until the next one, the program may take any time."""
        self._has_trained = self._tracker.rests = True

    @property
    def is_behind(self) -> bool:
        """Whether, in a newcomer, the others are in a later training than its own program.

        Raises:
            CoordinatorLost, JobFinished: It cannot join any more.
        """
        return self._channel is not None and self.newcomer and self._channel.job_training() > self.training

    def skip_training(self, *, has_result: bool) -> None:
        """Skip this training, which is over in the other workers.

        Args:
            has_result: The program goes on with what has come of it, out of a checkpoint.
        """
        logger.log(
            logging.INFO if has_result else logging.WARNING,
            "training %d of the program is over in the other workers: skipping it, %s",
            self.training,
            "with its result from a checkpoint"
            if has_result
            else "without its result, as there is no checkpoint of it",
        )
        self.has_skipped = True
        self.lacks_results |= not has_result

    # ------------------------------------------------------------ what is told

    def tell_watermark(self, watermark: Watermark) -> None:
        """Report this member's watermark to newcomers, once it is certain to survive any loss."""
        channel = self._channel
        if channel is not None:
            self.when_confirmed(lambda: channel.tell_watermark(watermark))

    def job_watermark(self) -> Watermark | None:
        """In a newcomer: the watermark of the members, as far as it is known.

        Raises:
            CoordinatorLost, JobFinished: It cannot join any more.
        """
        return None if self._channel is None else self._channel.job_watermark()

    def use_store(self, store: str, claim: GetClaim | None = None) -> None:
        """Report the store that all members have agreed on; see :class:`~ef_common.session.ports.ControlChannel`."""
        if self._channel is not None:
            self._channel.use_store(store, claim)

    def close(self) -> None:
        """The program ends normally. If its trainings have ended, too, say so: nobody can join any more."""
        if self._channel is not None and not self.newcomer and self._has_trained:
            self._channel.send("close")
            self.crash_record.finish()

    def fail(self, why: str) -> bool:
        """Report an exception of the user's code here, which ends the job. It takes two seconds at most.

        Args:
            why: Worker, node and exception, in one line.

        Returns:
            Whether all others have been told.
        """
        return self._channel is None or self._channel.fail(why)

    def stop(self) -> None:
        """Say goodbye and end the group. May be repeated."""
        if self._channel is not None:
            self._channel.send("bye")
            self._channel.stop()
        self.group.abort()
        # Let go of the group here: at the very end of the interpreter, its threads would find nothing to stand on.
        self._current.group, self._last = LoneGroup(), None

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
        self._tracker.wait(self.view.generation, self.completed)
        while True:
            number = self.completed
            try:
                operation.run(self.group, self.view)
                if self._ousted:
                    raise GroupBroken("this worker alone has lost its place in the view")
            except CallMismatch:
                self.group.abort()
                raise
            except GroupBroken:
                self._recover(operation)
                if self.completed == number:
                    self._tracker.wait(self.view.generation, number)
                    continue  # nobody had the result: run it again among those that are left
            else:
                self.completed += 1
                self.completed_in = self.view
            self._last = operation
            self._tracker.go_on(self.view.generation, self.completed)
            self._confirm()
            return self.completed_in

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Within this context, a collective raises: the others are not there. `what` would have run it."""
        self._alone_for = what
        try:
            yield
        finally:
            self._alone_for = None

    @property
    def _ousted(self) -> bool:
        """Whether this worker is out of its world of one, which has no group that could break."""
        return self.world_size == 1 and self._current.is_replaced

    def when_confirmed(self, act: Callable[[], None]) -> None:
        """Call `act` once the result of the newest collective is sure to survive any loss."""
        self._unconfirmed.append(act)
        if self.completed_in.world_size == 1 and not self._ousted:
            self._confirm()

    def _confirm(self) -> None:
        """A collective has completed, so everybody has completed those before it."""
        acts, self._unconfirmed = self._unconfirmed, []
        for act in acts:
            act()

    def begin_step(self, num_samples: int = 0) -> None:
        """A batch has been dealt. The others wait for its reduction next; :meth:`agree` ends it.

        Args:
            num_samples: Number of this worker's samples; 0 if they do not show how fast it is.
        """
        if self._channel is not None:
            self._tracker.begin_step(num_samples)

    def evict_stragglers(self) -> None:
        """Ask for the replacement of workers that are slower than the others, once newcomers wait."""
        self._tracker.evicts_stragglers = True

    def agree(self, num_flags: float, num_wishes: float = 0.0) -> None:
        """Settle agreements from the sums of the members' flags in the collective that has just completed.

        Args:
            num_flags: Sum of the members' `change_pending`.
            num_wishes: Sum of the members' `wish`.
        """
        self._tracker.end_step()
        if self.newcomer:  # what it computes by itself, to warm up, is nobody's agreement
            return
        if num_wishes:  # a step may have several reductions, and the wish is in one of them
            self._wished_in = self.completed_in.generation
            self.wish = False
        if num_flags >= self.completed_in.world_size and self._change_agreed_in is None:
            self._change_agreed_in = self.completed_in.generation

    def take_wish(self) -> bool:
        """At a step boundary: whether all members know of a wish, and the members have not changed since.

        It is a function of collectives that all have completed, so all get the same answer here. It is asked once.
        """
        heard, self._wished_in = self._wished_in, None
        return heard is not None and heard == self.completed_in.generation

    def boundary(self) -> bool:
        """At a step boundary: let a change happen if all have agreed on one.

        Returns:
            True if the view has changed.

        Raises:
            Left: This worker asked to leave, and the new view is without it.
        """
        if self._channel is None:
            if self.leaving:
                self._leave_last()
            return False
        if self.newcomer:
            return False
        if self.world_size == 1 and (self.leaving or self.change_pending):
            self._change_agreed_in = self.view.generation
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

    def _leave_last(self) -> None:
        self._save()
        raise Left("it was the last one")

    def _save(self) -> None:
        if self.on_last_leave is not None:
            self.on_last_leave()
            self._confirm()  # what is saved is not lost any more

    def _change_view(self) -> bool:
        """Change the view while a change is agreed; returns whether one was."""
        channel = self._channel
        if channel is None:
            return False
        changed = False
        while self.change_agreed:
            agreed_in = self._change_agreed_in or 0
            met = self._meet_at_boundary()
            self._begin_trouble()
            if met:
                if self.view.hold:
                    logger.warning("too few nodes are left: waiting at this step for more to join")
                channel.send("at_boundary", self.view.generation)
                self._tracker.wait(self.view.generation, self.completed, at_boundary=True)
            self._recover(suspect=not met)
            changed = True
            if self.view.admitted_at > agreed_in:
                self._change_agreed_in = None
        if changed:
            self.run(Barrier(_ENTERED))
        return changed

    def _meet_at_boundary(self) -> bool:
        """Meet all members, so that nobody waits here for a view while another waits in a collective.

        Returns:
            False if the group has broken, perhaps at this end alone: then others may wait in the meeting for ever.
        """
        self._tracker.wait(self.view.generation, self.completed)
        try:
            self.group.meet(_AT_BOUNDARY).wait()
        except CallMismatch:
            self.group.abort()
            raise
        except GroupBroken as broken:
            logger.debug("a worker was lost before all were at the boundary: %s", broken)
            return False
        return True

    # ------------------------------------------------------------ recovery

    def _begin_trouble(self) -> None:
        if self._troubled_since is None:
            self._troubled_since = self._clock()

    def _recover(self, operation: Operation | None = None, *, suspect: bool = True) -> None:
        """Enter the next view and settle with its members what is owed, until one view holds."""
        channel = self._channel
        if channel is None:
            raise ProtocolError("a group broke, but there is no coordinator")
        self._begin_trouble()
        if suspect:
            self.group.abort()  # at a boundary the others may still need it
        while True:
            if suspect and self.view.generation > 0:
                channel.send("suspect", self.view.generation)
            view = channel.next_view(self.view.generation)
            self._tracker.wait(view.generation, SETTLING)
            self.group.abort()
            suspect = True
            try:
                self._enter(view, channel.bootstrap(view.generation), operation)
            except GroupBroken as broken:
                logger.debug("view %d did not hold: %s", view.generation, broken)
                self.group.abort()
                continue
            return

    def _enter(self, view: View, bootstrap: Bootstrap, operation: Operation | None) -> None:
        rank = view.rank_of(self.worker.id)
        if rank is None:
            raise Left(view.reason)
        self.view = view
        alone = view.world_size == 1
        group: Group = LoneGroup() if alone else self._groups.build(view, rank=rank, bootstrap=bootstrap)
        self._current.set(group, view.generation)
        own = self._surroundings.report(self.completed, self.training)
        reports = [Report.load(payload) for payload in group.all_gather(own.dump(), _SETTLING)]
        if self.completed == FRESH and (others := {report.training for report in reports} - {self.training}):
            raise ProtocolError(f"admitted to training {self.training} while others are in {sorted(others)}")
        if self.completed == FRESH:
            self._compare_clocks(own, reports, view)
        self._compare_software(group, reports)
        replay = plan_replay([report.completed for report in reports])
        if not replay.results:
            self._confirm()  # nobody is behind: so it is with what a newcomer is about to receive
        self._settle(replay, group, rank, operation)
        if self._channel is not None:
            self._channel.send("settled", view.generation)
        pause = None if self._troubled_since is None else self._clock() - self._troubled_since
        self._troubled_since = None
        if not self.newcomer:  # its wait to be admitted is no pause of the training
            self.paused_s += pause or 0.0
        self._on_event(
            "view",
            generation=view.generation,
            members=list(view.ids),
            rank=rank,
            world_size=view.world_size,
            reason=view.reason,
            pause_s=pause,
        )
        self.on_view(view)
        logger.info("view %d: rank %d of %d (%s)", view.generation, rank, view.world_size, view.reason)

    def _compare_software(self, group: Group, reports: Sequence[Report]) -> None:
        if len({report.software for report in reports}) == 1:
            return
        theirs = group.all_gather(self._surroundings.dump(), _COMPARING)[reference_of(reports)]
        if self.completed == FRESH and (differences := self._surroundings.differences(theirs)):
            self._cannot_join(f"other software is installed here: {differences}. Install the same on all nodes")

    def _compare_clocks(self, own: Report, reports: Sequence[Report], view: View) -> None:
        first = reference_of(reports)
        ahead_s = own.time_s - reports[first].time_s
        if abs(ahead_s) > CLOCKS_APART_S:
            logger.warning(
                "the clock of node %s is %.0f s %s that of node %s; set both by NTP. Until then, the events of the run "
                "are in the wrong order, and an object store may refuse requests",
                self.worker.node,
                abs(ahead_s),
                "ahead of" if ahead_s > 0 else "behind",
                view.members[first].node,
            )

    def _settle(self, replay: Replay, group: Group, rank: int, operation: Operation | None) -> None:
        """Hand on results and states; nobody leaves before every member has what it lacks."""
        delivery = Delivery(group, self._groups)
        for source, target in replay.results:
            if rank == source:
                delivery.send_result(self._last, self.completed_in, target)
            elif rank == target:
                self.completed_in = delivery.receive_result(operation, source)
                self.completed += 1
                self._last = operation
        if replay.restart and self.view.generation > 1 and rank == 0:
            self._restore()
        for chain in replay.states:
            if rank in chain:
                delivery.hand_on_state(self.state, chain, rank, self._take_in)
        self.completed = max(self.completed, replay.newest)  # a newcomer holds the state from here on
        if replay.states:
            group.all_gather(b"", "handing on of the state to newcomers")

    def _restore(self) -> None:
        """No member has a state, so this worker restores one for all."""
        if self.state is None or not self.state.restore():
            if self.lacks_results:
                raise MembershipError(
                    "all workers are lost that have made the trainings of this program before this one, and there is "
                    "no checkpoint of them. Start this worker again: it begins with the first training"
                )
            self._on_event("rollback", generation=self.view.generation, step=0, epoch=0)

    def _take_in(self, take: Callable[[], T]) -> T:
        """Load the others' state. If that fails, they must neither wait for this worker nor fail with it."""
        try:
            return take()
        except Exception as error:
            self._cannot_join(
                "it cannot go on from the state of the others. Start it with the program, the settings and the data "
                f"that they have. The reason: {type(error).__name__}: {error}",
                error,
            )

    def _cannot_join(self, why: str, error: Exception | None = None) -> NoReturn:
        self.stop()
        raise CannotJoin(
            f"worker {self.worker.id} (node {self.worker.node}) ends, and the others go on without it: {why}"
        ) from error
