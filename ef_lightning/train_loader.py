"""The training loader: the step boundary, and the dealing of samples.

Its `__next__` runs before Lightning moves any counter, so it is the place where a worker lets a change of
membership happen, and where newcomers are admitted. A newcomer joins before its own loops begin
(:mod:`ef_lightning.joining`), and stands there from then on.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ef_common.collectives.gradients.pieces import Pieces
from ef_common.core import sharding
from ef_common.core.epochs import ENDLESS
from ef_common.core.sharding import EpochProgress, GlobalBatch, Range, Window
from ef_common.core.view import View
from ef_common.data.dealer import Dealer, Rest
from ef_common.data.identity import DataComparison, identity_of
from ef_common.data.sample import Sample
from ef_common.data.torch_order import order_from, sent
from ef_common.data.walking import Walk
from ef_common.errors import TrainingOver, UsageError
from ef_common.events import EventLog
from ef_common.launch.leaving import leaving_cleanly
from ef_common.session import Session
from ef_lightning import hooks
from ef_lightning.data_workers import WrappedLoader
from ef_lightning.joint_reading import JointLoader
from ef_lightning.order import before_limit
from ef_lightning.reading import Reading
from ef_lightning.rest import rest_of
from ef_lightning.walk_reading import REMEDY, WalkReading

logger = logging.getLogger(__name__)


class ElasticLoader(WrappedLoader):
    """Deals the samples of the user's training DataLoader, or of several.

    Args:
        loader: The user's loader, or what stands for several.
        reading: How it is read.
        session: The worker's session.
        trainer: The Trainer that iterates over it.
        log: Event log.
        min_share: The smallest share of a step; see :func:`ef_common.core.sharding.deal`.
        global_batch: What all workers share in a step, if that is fixed: each reads its part in as many batches as
            it takes for none to be larger than the loader's.
        seeded: Random numbers in a sample are a function of seed, epoch and position.
    """

    def __init__(
        self,
        loader: DataLoader[Any] | JointLoader,
        reading: Reading,
        session: Session,
        trainer: Any,
        *,
        log: EventLog,
        min_share: int = sharding.MIN_SHARE,
        global_batch: GlobalBatch | None = None,
        seeded: bool = False,
    ) -> None:
        super().__init__(loader, reading.planned, shown=reading.given)
        self._reading = reading
        self._session = session
        self._trainer = trainer
        self._log = log
        self.dealer = Dealer(
            session, log=log, batch_size=reading.batch_size, min_share=min_share, global_batch=global_batch
        )
        self.dealer.samples_per_position = reading.num_samples / reading.batch_size
        self._seeded = seeded
        self._walk = self._walks(reading) if isinstance(reading, WalkReading) else None
        self._comparison = DataComparison(session, partial(identity_of, reading.data) if reading.data else None)
        self.dealer.on_returned = self._batches_returned
        self.dealer.num_epochs, self.dealer.rest = self._num_epochs, self._rest
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        self._order = np.arange(0)
        self._wants_epoch = True
        self._resumed = self._begins_late = False
        self._plan_of: tuple[tuple[str, ...], int, int] | None = None
        self.padding = False
        self._left_out: list[Window] = []  # of the update at hand; this worker has no batch of its share in them
        self._has_told_of_none = False
        self.is_even = self._is_filled = False
        # Until the training begins: batches of an epoch of so many positions in the world that schedules are made for.
        self.planned_steps: Callable[[int], int] | None = None
        # Whether `limit_train_batches`, if it is a number, limits an epoch of so many positions.
        self.is_limited: Callable[[int], bool] = lambda length: True
        # The Trainer's `max_steps` is reached after the same samples in each world.
        self.follows_samples = False
        self.on_boundary: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] = lambda: None
        self.on_begin: Callable[[], None] = lambda: None
        self.on_plan: Callable[[], None] = lambda: None
        self.on_members: Callable[[], None] = lambda: None
        self.on_dealt: Callable[[], None] | None = None
        self.on_over: Callable[[], None] = lambda: None

    def _walks(self, reading: WalkReading) -> Walk:
        dealer, stream = self.dealer, reading.stream
        dealer.is_open, dealer.is_alone, dealer.samples_at = True, False, stream.num_samples_at
        return Walk(stream, dealer, self._session, log=self._log, remedy=REMEDY)

    def _num_epochs(self) -> int | None:
        trainer = self._trainer
        limit = trainer.max_epochs
        if trainer.max_steps != -1 or isinstance(trainer.limit_train_batches, int):
            return None  # an epoch or the training may end earlier
        return None if limit is None or limit < 0 else int(limit)

    def _rest(self) -> Rest | None:
        return rest_of(
            self._trainer,
            self.dealer,
            world_size=self._session.completed_in.world_size,
            limit=self._max_steps(),
            follows_samples=self.follows_samples,
        )

    @property
    def in_epoch(self) -> bool:
        """Whether this is between two batches of an epoch."""
        return not self._wants_epoch and not self._resumed and self.progress.remaining > 0

    @property
    def progress(self) -> EpochProgress:
        """How far the epoch is."""
        return self.dealer.progress

    @property
    def is_endless(self) -> bool:
        """Whether nobody knows how many batches an epoch has: neither the data, nor a limit."""
        return self._length() >= ENDLESS and math.isinf(self._max_steps())

    # ------------------------------------------------------------ what Lightning asks

    def __len__(self) -> int:
        """Batches of the epoch, if the world stays as it is, before Lightning applies its limit."""
        progress = self.progress
        if self._wants_epoch:
            progress = EpochProgress(epoch=0, length=self._length())
        return before_limit(int(min(self._num_steps(progress), ENDLESS)), self._trainer.limit_train_batches)

    def __iter__(self) -> Iterator[Any]:
        self._wants_epoch = not (self._resumed or self._session.entering)
        return self

    def __next__(self) -> Any:
        if self._session.entering:  # it stands at the boundary at which it has joined
            batch = self._deal()
            self._session.entering = False
        else:
            if self.on_boundary is not None:
                self.on_boundary()
            if self._wants_epoch or (self._resumed and not self._goes_on()):
                self._begin_epoch()
                self.on_begin()
            if self._walk is not None:
                self._walk.tell_watermark()
            if self._session.may_change and not self.progress.uncommitted and self.progress.remaining > 0:
                with leaving_cleanly():
                    self._session.boundary()
            self._resumed = False
            batch = self._deal()
        if self.on_dealt is not None:
            self.on_dealt()
        return batch

    def join(self, *, starts_workers: bool) -> None:
        """In a newcomer: get admitted at a boundary, and continue where the others are.

        Args:
            starts_workers: Start the data workers before. They keep the data set as it is then.
        """
        if self.on_boundary is not None:
            self.on_boundary()
        # Should nobody hold a state any more, then rank 0's start is everybody's.
        self._begin_epoch()
        if starts_workers:
            self._planned.warm_up()
        with leaving_cleanly():
            self._join()
        # Else the state brought the progress, the loops' counters, and the order of the epoch.
        self._resumed = False
        logger.info("joined at step %d of epoch %d", self.progress.steps, self.progress.epoch)

    def show_plan(self) -> None:
        """In a newcomer: tell Lightning and the schedules what is left of the epoch."""
        self._wants_epoch = False
        self.on_members()
        hooks.set_epoch_length(self._trainer, self._num_steps(self.progress), in_batch=False)

    def _join(self) -> None:
        try:
            if self._walk is not None:
                self._walk.catch_up()
            self._session.join()
        except TrainingOver:
            self.on_over()

    def begin_training(self) -> None:
        """From here on, an epoch has the batches of the current world."""
        planned, self.planned_steps = self.planned_steps, None
        if planned is None:
            return
        length = self._length()
        num_steps = self._num_steps(EpochProgress(epoch=0, length=length) if self._wants_epoch else self.progress)
        if num_steps != planned(length):
            hooks.set_num_batches(self._trainer, num_steps)
            if self._resumed:
                hooks.set_train_limit(self._trainer, num_steps)

    def steps_in_world(self, world_size: int) -> float:
        """Batches of an epoch that this many workers begin with; infinite if nobody knows."""
        progress = EpochProgress(epoch=0, length=self._length())
        return math.inf if self.is_endless else min(self.dealer.num_steps(progress, world_size), self._max_steps())

    def even_shares(self) -> bool:
        """From the next step on, give batches of one step the same size in all workers.

        A share that is smaller than another (they differ by one sample, in the last steps of an epoch) is filled up
        with samples of its own, and the batch of a worker without a share is as large as the others'.

        Returns:
            Whether the current batch has that size; otherwise `filled` reads it so.
        """
        if not self.is_even:
            self.is_even, self._plan_of = True, None
        return self._is_filled

    def filled(self) -> Any:
        """The current batch, read again in the size of the largest one in its step."""
        self._is_filled = True
        progress = self.progress
        return hooks.prepare_batch(self._trainer, self._planned.fetch(self._of(progress, progress.uncommitted[-1])))

    # ------------------------------------------------------------ dealing

    def _length(self) -> int:
        """Positions of an epoch: what the samplers draw, limited by the Trainer's fraction."""
        return self._reading.length(self._trainer.limit_train_batches, self._batch_size)

    @property
    def _batch_size(self) -> int:
        """Samples of a batch in the sense of one process."""
        return self.dealer.batch_size if self.dealer.global_batch is None else self.dealer.global_batch.size

    def _max_steps(self) -> float:
        limit = self._trainer.limit_train_batches
        return limit if isinstance(limit, int) and self.is_limited(self._length()) else math.inf

    def _num_steps(self, progress: EpochProgress) -> float:
        if progress.length >= ENDLESS and self.is_endless:
            return math.inf
        if self.planned_steps is not None and self._wants_epoch:
            return self.planned_steps(self._length())
        return min(self.dealer.num_steps(progress), self._max_steps())

    def _batches_returned(self) -> None:
        hooks.set_epoch_length(self._trainer, self._num_steps(self.progress), in_batch=True)

    def _begin_epoch(self) -> None:
        self._wants_epoch = False
        self._planned.begin()
        epoch = self._trainer.current_epoch
        length = self._length()
        if self._walk is not None:
            self._follow_seed()
            self._walk.begin(epoch)
        self.dealer.begin(epoch, length)
        self._order = self._reading.order(
            self._session, seed=self.seed, epoch=epoch, length=length, begins_late=self._begins_late
        )
        self._plan_of = None

    def _follow_seed(self) -> None:
        if isinstance(self._reading, WalkReading):
            self._reading.follow_seed(self.seed)

    def _deal(self) -> Any:
        dealer = self.dealer
        if self._walk is not None and self._walk.finds_end():
            self._plan_of = None
        if dealer.is_alone and self._plan_of is not None and dealer.deal_alone():
            self.padding = self._is_filled = False
            return self._planned.next()
        members, before = self._session.completed_in.ids, dealer.progress
        if before.remaining == 0:
            raise StopIteration
        local_batch = dealer.local_batch(len(members))
        plan_of = (members, len(before.returned), local_batch)
        is_new = plan_of != self._plan_of
        if is_new:
            self.on_members()
        window = dealer.deal()
        self._is_filled = self.is_even
        if is_new:
            self._plan_of = plan_of
            if not before.steps and not self._reading.keeps_workers:  # to begin to read draws a number, too
                self.on_plan()
            self._planned.read(lambda start: self._batches(before, members, start))
            self.on_plan()
            hooks.set_epoch_length(self._trainer, self._num_steps(before), in_batch=False)
        if self._walk is not None:
            with leaving_cleanly():
                self._walk.follow(window)
            dealer.samples_per_position = self._reading.num_samples
        if self._comparison.is_due:
            with leaving_cleanly():
                self._comparison.follow()
        if not before.uncommitted:
            self._left_out.clear()
        if dealer.global_batch is not None:
            self.padding = not dealer.pieces.mine
            return self._in_step(self._planned.next())
        # All have a share of a whole window; only the last ones of an epoch are smaller.
        is_whole = window.stop - window.start == local_batch * len(members)
        self.padding = not is_whole and self._is_padding_in(window)
        batch = self._planned.next()
        return self._others_batch(window) if batch is None and len(members) > 1 else batch

    def _others_batch(self, window: Window) -> Any:
        """Another worker's batch, which keeps this one in step, because `collate_fn` has made none of its samples.

        Lightning would leave the step out, and this worker's next reduction would be one of the others' that is over.
        """
        self._tell_of_none()
        mine = self._session.worker.id
        found = (self._planned.fetch(self._of(self.progress, window, id)) for id in window.shares() if id != mine)
        batch = self._in_step(next((batch for batch in found if batch is not None), None))
        self._left_out.append(window)
        self.padding = True
        return batch

    def _tell_of_none(self) -> None:
        if not self._has_told_of_none:
            self._has_told_of_none = True
            logger.warning(
                "collate_fn has returned None in step %d of epoch %d: the samples of this batch count as trained, and "
                "add nothing to the update. Further ones are not reported",
                self.progress.steps,
                self.progress.epoch,
            )

    def _in_step(self, batch: Any) -> Any:
        """A batch, without which this worker would not be in step with the others.

        Raises:
            UsageError: It is None.
        """
        if batch is None and self._session.completed_in.world_size > 1:
            raise UsageError(
                "collate_fn has returned None, and there is no other batch for this worker to keep in step with the "
                "others. Leave samples out that cannot be read, and let collate_fn make a batch of the rest or of "
                f"other samples. Received: None in step {self.progress.steps} of epoch {self.progress.epoch}"
            )
        return batch

    def select(self, index: int) -> None:
        """A batch of the update that is repeated is the current one, counted from the newest one, -1."""
        self.padding = self._is_padding_in(self.dealer.select(index))

    def _is_padding_in(self, window: Window) -> bool:
        """Whether this worker's batch in a window is not of a share of its own."""
        return _is_empty(window.slice_of(self._session.worker.id)) or window in self._left_out

    def next_pass(self) -> Any:
        """The next batch of this worker's part of a global batch."""
        return hooks.prepare_batch(self._trainer, self._in_step(self._planned.next()))

    def fetch(self, pieces: Sequence[int]) -> Any:
        """Read pieces of the global batch that were another worker's."""
        positions = self.progress.positions_at(self.dealer.pieces.slots(pieces))
        return hooks.prepare_batch(self._trainer, self._in_step(self._planned.fetch(self._samples(positions))))

    def _samples(self, positions: Sequence[int]) -> list[Any]:
        """What to read for these positions."""
        indices: list[Any] = self._order[positions].tolist()
        if not self._seeded:
            return indices
        epoch = self.progress.epoch
        return [Sample(index, (self.seed, epoch, at)) for index, at in zip(indices, positions, strict=True)]

    def _shared_batches(self, progress: EpochProgress, members: Sequence[str], skip: int) -> Iterator[list[Any]]:
        """The same for shared global batches."""
        worker = self._session.worker.id
        while progress.remaining > 0:
            progress, window = self.dealer.next_window(progress._replace(uncommitted=()), members)
            pieces = Pieces(window, worker, batch_size=self.dealer.batch_size)
            for some in pieces.passes() or [list(range(min(sharding.MIN_SHARE, window.num_pieces)))]:
                if skip > 0:
                    skip -= 1
                    continue
                yield self._samples(progress.positions_at(pieces.slots(some))[: self.dealer.batch_size])

    def _batches(self, progress: EpochProgress, members: Sequence[str], skip: int) -> Iterator[list[Any]]:
        """What to read for this worker's next batches, as long as nothing changes."""
        if self.dealer.global_batch is not None:
            yield from self._shared_batches(progress, members, skip)
            return
        rank, size = members.index(self._session.worker.id), self.dealer.local_batch(len(members))
        progress, starts = sharding.whole_windows(progress, len(members), batch_size=size)
        at, order, length = self._reading.at, self._order, self.progress.length
        for start in starts[skip:]:
            places = slice(start + rank * size, start + (rank + 1) * size)
            beside = range(start, start + len(members) * size) if self.is_even else ()
            yield at(order, places, length=length, beside=beside)
        skip -= min(skip, len(starts))
        while progress.remaining > 0:
            progress, window = self.dealer.next_window(progress, members)
            if skip > 0:
                skip -= 1
                continue
            yield self._of(progress, window)

    def _of(self, progress: EpochProgress, window: Window, member: str | None = None) -> list[Any]:
        """What to read for a member's batch of a step; by default, this worker's."""
        positions = progress.positions(window.slice_of(member or self._session.worker.id))
        # A share may be empty at the end; a batch may not. Its gradient will weigh nothing.
        size = max(window.shares().values()) if self.is_even else sharding.MIN_SHARE
        positions = positions or progress.positions((window.start, min(window.stop, window.start + size)))
        if self.is_even:
            positions += positions[: size - len(positions)]
        beside = progress.positions((window.start, window.stop)) if self.is_even else ()
        return self._reading.at(self._order, positions, length=self.progress.length, beside=beside)

    # ------------------------------------------------------------ what was dealt

    def finds(self) -> bool:
        """Before a reduction: whether the others must hear what this worker has found in its next batch."""
        return False

    def heard(self, num_finds: float) -> None:
        """A reduction has completed in which this many members had found something."""

    def skip(self) -> None:
        """Leave out the rest of the epoch, beginning with the batch that was dealt last."""
        self.dealer.take_back()

    def weights(self, view: View, *, of_batch: bool = False) -> Sequence[float]:
        """Weight of each member's gradient, or of the current batch's part of it."""
        return self.dealer.weights(view, of_batch=of_batch)

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """The state that a newcomer needs to continue with the others."""
        walk = None if self._walk is None else self._walk.state()
        found = {"seed": self.seed, "order": sent(self._order), "even": self.is_even, "walk": walk}
        return {**self.dealer.state(), **found, "data": self._comparison.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the others' state."""
        self.take_state(state)
        self.dealer.log_admission()

    def take_state(self, state: dict[str, Any], *, saved: bool = False) -> None:
        """Take over a place in an epoch: the others' (`state`), or that of a checkpoint (`saved`)."""
        self.seed = state["seed"]
        self.is_even = bool(state.get("even", False))
        self.dealer.load_state(state)
        compares = not self._trainer.reload_dataloaders_every_n_epochs  # else a newcomer has the data of its start
        self._comparison.load_state(state.get("data"), saved=saved, compares=compares)
        if self._walk is not None and state["epoch"] >= 0 and self.progress.remaining > 0:
            self._follow_seed()
            self._walk.load_state(state.get("walk"), saved=saved)
        self._begins_late = self._begins_late or state["epoch"] >= 0
        if state["epoch"] < 0:
            self._order = np.arange(0)
        elif state["order"] is None:
            self._order = self._reading.order(
                self._session, seed=self.seed, epoch=state["epoch"], length=state["length"]
            )
        else:
            self._order = order_from(state["order"])
        self._wants_epoch = False
        self._plan_of = None

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint (the protocol of a stateful loader): how far the epoch is.

        What is dealt and not committed yet (in the middle of an accumulation) is dealt again.
        """
        state = self.state()
        uncommitted = self.progress.uncommitted
        if uncommitted:
            state["cursor"] = uncommitted[0].start
        state["steps"] -= len(uncommitted)
        state["open_batches"] = max(0, len(uncommitted) - hooks.num_batches_running(self._trainer))
        state["returned"] = torch.from_numpy(state["returned"])
        if self._reading.is_computed:
            state["order"] = None
        elif isinstance(state["order"], np.ndarray):
            state["order"] = torch.from_numpy(state["order"])
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue in the middle of the epoch of a checkpoint, with any number of workers."""
        in_epoch = state["epoch"] >= 0 and state["cursor"] < state["length"] + len(state["returned"])
        if in_epoch and self._walk is None and state["length"] != self._length():
            raise UsageError(
                "the checkpoint was made in the middle of an epoch of another length: the data set or "
                "limit_train_batches has changed. Use a checkpoint of the end of an epoch. "
                f"Expected: {state['length']} samples. Received: {self._length()}"
            )
        self.take_state(state, saved=True)
        hooks.step_back(self._trainer, state.get("open_batches", 0))
        self._resumed = True
        hooks.set_train_limit(self._trainer, self._num_steps(self.progress))

    def go_back(self, state: dict[str, Any]) -> None:
        """Continue in the middle of the epoch of a checkpoint, while the loops are running."""
        self.take_state(state, saved=True)
        self.dealer.log_rollback(epoch=None if self.progress.epoch >= 0 else self._trainer.current_epoch)

    def _goes_on(self) -> bool:
        """Whether the loops continue in the middle of the epoch of a checkpoint."""
        progress = self.progress
        if progress.epoch == self._trainer.current_epoch and progress.remaining > 0:
            self.on_resume()
            self.dealer.progress = progress._replace(steps=hooks.num_batches_started(self._trainer))
            self.dealer.log_rollback()
            return True
        self.dealer.progress = progress._replace(epoch=-1)
        self.dealer.log_rollback(epoch=self._trainer.current_epoch)
        return False

    def succeed(self, previous: ElasticLoader) -> None:
        """Continue the count of a loader that Lightning has reloaded, or the others' place in the epoch."""
        if self._session.entering:
            self.take_state(previous.state())
        else:
            previous.finish()
            self.seed, self.dealer.num_updates = previous.seed, previous.dealer.num_updates
            self.dealer.chosen_batch = previous.dealer.chosen_batch
            self.is_even = previous.is_even
        previous.close()

    def finish(self) -> None:
        """The training ends or continues with another loader."""
        self.dealer.begin(-1, self._length())


def _is_empty(places: Range) -> bool:
    start, stop = places
    return start == stop
