"""An epoch of training: what has been dealt, what updates have used, and the record of both.

A *position* is a place in the order of the epoch: of a sample, or of a batch where batches are what can be dealt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ef_common.collectives.gradients.pieces import Pieces
from ef_common.core import sharding
from ef_common.core.epochs import ENDLESS
from ef_common.core.sharding import EpochProgress, GlobalBatch, Range, Window
from ef_common.core.view import View
from ef_common.events import EventLog
from ef_common.session import Session


class StreamParts(Protocol):
    """What the positions are parts of, where data have no order of positions: each is given one when it is dealt."""

    @property
    def num_shards(self) -> int:
        """Shards of the epoch."""

    @property
    def began(self) -> int:
        """The epoch in which this pass through the shards began."""

    @property
    def is_over(self) -> bool:
        """Whether all parts of the pass have been dealt."""

    def commit(self, progress: EpochProgress, contributors: View) -> EpochProgress:
        """The newest steps are committed: parts that come back will be dealt with other positions."""

    def record(self, before: EpochProgress, contributors: View) -> Callable[[View], dict[str, Any]]:
        """Before `commit`: what the event log will tell of this step once it is confirmed, in a view."""

    @property
    def rest(self) -> dict[str, Any]:
        """What the event log tells of the place from which a training continues; empty if it continues from none."""


class Rest(NamedTuple):
    """What is left of a training.

    Args:
        samples: Samples, if the batch of all workers stays as it is.
        counts_steps: It ends after a number of steps, which are other samples if that batch changes.
    """

    samples: float
    counts_steps: bool = False


class Dealer:
    """Deals the positions of an epoch to the members of the session's view, as all members do.

    Args:
        session: The worker's session.
        log: Event log of the worker.
        batch_size: Positions of one member's own batch.
        min_share: The smallest share of a step; see :func:`ef_common.core.sharding.deal`.
        global_batch: The batch that all members share in a step, if it is fixed.

    Attributes:
        progress: How far the epoch is.
        num_updates: Updates of the model that have been made.
        samples_per_position: Samples at one position, unless members share them.
        max_batch: The most positions of a step of all members; None: each member has its own batch. A global batch of
            fixed size is not concerned.
        chosen_batch: Likewise, as the training has chosen it below that; the same in all members.
        samples_at: Samples at a position that no update has used yet, where positions may differ in it.
        is_alone: `deal_alone` may be called.
        is_open: Nobody knows how long an epoch is before its end has come; its length is what it has at most.
        parts: What positions are parts of, if they are dealt with `deal_counts`.
        num_epochs: Tells how many epochs the training has, or None if nobody knows.
        rest: Tells what is left of the training, or None if nobody knows; by default, of its epochs.
        on_returned: Called when a lost worker's positions have come back in the middle of a step.
        on_committed: Called with the contributors of each update, the number of their samples, and its number; not in a
            process that deals alone.
    """

    def __init__(
        self,
        session: Session,
        *,
        log: EventLog,
        batch_size: int,
        min_share: int = sharding.MIN_SHARE,
        global_batch: GlobalBatch | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.min_share = min_share
        self.global_batch = global_batch
        self._pieces: Pieces | None = None
        self._num_samples: int | None = None
        self.progress = EpochProgress(epoch=-1, length=0)
        self.num_updates = self._hashed = 0
        self.samples_per_position = 1.0
        self.max_batch: int | None = None
        self.chosen_batch: int | None = None
        self.samples_at: Callable[[int], int] | None = None
        self.is_open = False
        self.parts: StreamParts | None = None
        self.num_epochs: Callable[[], int | None] = lambda: None
        self.rest: Callable[[], Rest | None] = self._rest_of_epochs
        self.on_returned: Callable[[], None] = lambda: None
        self.on_committed: Callable[[View, float, int], None] | None = None
        self._session = session
        self._log = log
        self._newest: tuple[Window, ...] = ()
        self._current = -1  # which one of these a pass uses
        self._logged_epoch = -1
        self.is_alone = session.is_alone and not log.enabled and global_batch is None
        self._least = min(min_share, batch_size)

    # ------------------------------------------------------------ the epoch

    def begin(self, epoch: int, length: int) -> None:
        """Begin an epoch of this many positions, and settle what the one before has left."""
        self.end()
        self.progress = EpochProgress(epoch=epoch, length=length)

    def end(self) -> None:
        """Settle what an epoch has left that was cut short (by a limit, or without an update)."""
        if self.progress.uncommitted:
            self.commit(self._session.completed_in)
        if self.progress.epoch >= 0 and self.progress.remaining:
            self._log_end(self.progress, exact=False)

    def local_batch(self, num_members: int) -> int:
        """Positions of one member in a whole step of so many members."""
        limit = self.max_batch if self.parts is None else None
        if limit is not None and self.chosen_batch is not None:
            limit = min(limit, self.chosen_batch)
        return sharding.local_batch(self.batch_size, num_members, limit)

    def local_samples(self, num_members: int) -> int:
        """Samples of one member in a whole step of so many members."""
        return round(self.local_batch(num_members) * self.samples_per_position)

    def num_steps(self, progress: EpochProgress | None = None, world_size: int | None = None) -> int:
        """Steps of the whole epoch (by default, this one), if the world keeps its size or has this one."""
        world_size = world_size or self._session.completed_in.world_size
        return sharding.num_steps(
            progress or self.progress,
            world_size,
            batch_size=self.local_batch(world_size),
            min_share=self.min_share,
            global_batch=self.global_batch,
        )

    def deal(self) -> Window:
        """Deal the positions of the next step.

        Raises:
            ValueError: The epoch is over.
        """
        if self.is_alone and self.deal_alone():
            return self.progress.uncommitted[-1]
        progress, window = self.next_window(self.progress, self._session.completed_in.ids)
        return self._dealt(progress, window)

    def deal_counts(self, members: Sequence[str], counts: Sequence[int]) -> Window:
        """Deal this number of positions to each of these members."""
        return self._dealt(*sharding.deal_counts(self.progress, members, counts))

    def _dealt(self, progress: EpochProgress, window: Window) -> Window:
        before, self.progress = self.progress, progress
        if self.is_alone:
            return window
        if before.epoch != self._logged_epoch:
            self._logged_epoch = before.epoch
            known: dict[str, int] = {"open": True} if self.is_open else {}
            if self.parts is not None:
                known["shards"] = self.parts.num_shards
                if self.parts.began != before.epoch:
                    known["began"] = self.parts.began
            if (num_epochs := self.num_epochs()) is not None:
                known["epochs"] = num_epochs
            self._log.write("epoch", epoch=before.epoch, length=before.length, **known)
        if self.global_batch is not None:
            self._pieces = Pieces(window, self._session.worker.id, batch_size=self.batch_size)
        self._note()
        start, stop = window.slice_of(self._session.worker.id)
        # The last ones of an epoch may be smaller, and take as long.
        whole = self.global_batch is not None or stop - start == self.local_batch(len(window.members))
        self._session.begin_step(stop - start if whole else 0)
        return window

    def deal_alone(self) -> bool:
        """Like `deal` in a lone process, without notes, because a step of a small model takes less than 1 ms.

        Returns:
            False near the end of an epoch, where a window may be cut: then nothing has been dealt.
        """
        epoch, length, cursor, returned, uncommitted, steps = self.progress
        stop = cursor + self.local_batch(1)
        if stop + self.min_share > length:
            return False
        window = Window(cursor, stop, self._session.completed_in.ids, self._least)
        self.progress = EpochProgress(epoch, length, stop, returned, (*uncommitted, window), steps + 1)
        return True

    def _note(self) -> None:
        """Note the positions that this worker is about to use; for a global batch, all of them."""
        progress, worker, record = self.progress, self._session.worker.id, self._session.crash_record
        if not record.is_read:
            record.at(progress.epoch, self.num_updates + 1)
            return
        ranges: list[Range] = []
        for window in progress.uncommitted:
            slots = (window.start, window.stop) if window.piece else window.slice_of(worker)
            ranges += progress.ranges(slots)
        record.begin(progress.epoch, self.num_updates + 1, ranges)

    def take_back(self) -> None:
        """Undo the newest dealing: its samples are not trained."""
        progress = self.progress
        *before, window = progress.uncommitted
        self.progress = progress._replace(cursor=window.start, uncommitted=tuple(before), steps=progress.steps - 1)
        self._session.crash_record.end()

    def end_at(self, length: int, told: Mapping[str, Any] | None = None) -> None:
        """The epoch's data have ended after this many positions; no more of them have been dealt.

        Args:
            length: Number of positions.
            told: What the event log tells of the end.
        """
        self.progress = progress = self.progress._replace(length=length)
        if not progress.remaining and not progress.uncommitted:
            self._session.when_confirmed(lambda: self._log_end(progress, exact=True, told=told))

    def next_window(self, progress: EpochProgress, members: Sequence[str]) -> tuple[EpochProgress, Window]:
        """The window that would be dealt next to these members."""
        return sharding.deal(
            progress,
            members,
            batch_size=self.batch_size if self.global_batch is not None else self.local_batch(len(members)),
            min_share=self.min_share,
            global_batch=self.global_batch,
        )

    def share_samples(self, num_samples: int, *, batch_size: int, piece: int) -> None:
        """Let the members share the samples in the batches that were dealt last.

        Args:
            num_samples: Number of samples in each of these batches.
            batch_size: Samples of a forward pass, at most.
            piece: Samples of a piece.
        """
        window = self.progress.uncommitted[-1]
        samples = EpochProgress(self.progress.epoch, window.start + num_samples, cursor=window.start)
        whole = GlobalBatch(num_samples, piece)
        _, window = sharding.deal(samples, window.members, batch_size=batch_size, global_batch=whole)
        self._pieces = Pieces(window, self._session.worker.id, batch_size=batch_size)
        self._num_samples = num_samples

    @property
    def pieces(self) -> Pieces:
        """This worker's part of the global batch that was dealt last.

        Raises:
            ValueError: There was none.
        """
        if self._pieces is None:
            raise ValueError("no global batch has been dealt")
        return self._pieces

    def mine(self, window: Window) -> list[int]:
        """Positions of this worker in a window; none if it has no share of a short one."""
        return self.progress.positions(window.slice_of(self._session.worker.id))

    # ------------------------------------------------------------ updates

    def weights(self, view: View, *, of_batch: bool = False) -> Sequence[float]:
        """Weight of each member's gradient: its positions since the last reduction.

        A second reduction on the same batch (another optimizer's, say) weighs them as the first one did.

        Args:
            view: The members.
            of_batch: Of the accumulated batches, only the current one counts.
        """
        windows = self._accumulated()
        windows = (windows[self._current],) if of_batch and windows else windows
        return sharding.weights(windows, view.ids, samples=None if self.samples_at is None else self._samples)

    def select(self, index: int) -> Window:
        """Go back to another one of the accumulated batches, counted from the newest one, -1. Returns its window."""
        self._current = index
        return self._accumulated()[index]

    def _accumulated(self) -> tuple[Window, ...]:
        """The windows since the last reduction, or those of that reduction until the next one is dealt."""
        self._newest = self.progress.uncommitted or self._newest
        return self._newest

    def _samples(self, slots: Range) -> int:
        return 0 if self.samples_at is None else sum(map(self.samples_at, self.progress.positions(slots)))

    def commit(self, contributors: View, loss: float | None = None) -> None:
        """A gradient reduction with these contributors has completed."""
        before = self.progress
        if self.is_alone:
            epoch, length, cursor, returned, _, steps = before
            self.progress = EpochProgress(epoch, length, cursor, returned, (), steps)
            if self.parts is not None:
                self.progress = self.parts.commit(self.progress, contributors)
            self.num_updates += 1
            return
        self.progress, done = sharding.commit(before, contributors.ids)
        told: Callable[[View], dict[str, Any]] | None = None
        if self.parts is not None:
            told = self.parts.record(before, contributors) if self._log.enabled else None
            self.progress = self.parts.commit(self.progress, contributors)
        self.num_updates += 1
        num_positions = sum(stop - start for start, stop in done.committed)
        num_samples = self._num_samples or num_positions * self.samples_per_position
        self._session.stats.num_samples_trained += num_samples
        self._session.stats.step = self.num_updates
        if self.on_committed is not None and num_samples:
            self.on_committed(contributors, num_samples, self.num_updates)
        if self._session.crash_record.is_read:
            self._session.crash_record.end()
        if done.returned:
            self.on_returned()
        if not self._log.enabled:
            return
        mine = [positions for window in before.uncommitted for positions in self._mine(before, window)]
        record: dict[str, Any] = {
            "step": self.num_updates,
            "epoch": before.epoch,
            "generation": contributors.generation,
            "world_size": contributors.world_size,
            "committed": done.committed,
            "mine": mine,
            "returned": done.returned,
            "loss": loss,
        }
        if self._num_samples is not None:
            record["samples"] = self._num_samples  # what `mine` are numbers of
        elif self.samples_per_position != 1:
            record["samples_per_position"] = self.samples_per_position
        after, complete = self.progress, self.progress.remaining == 0 and bool(before.uncommitted)
        exact = self.parts is None or self.parts.is_over

        def log() -> None:
            parts = {} if told is None else told(self._session.view)
            self._log_step({**record, **parts}, after, complete=complete, exact=exact)

        self._session.when_confirmed(log)

    def _mine(self, progress: EpochProgress, window: Window) -> list[Range]:
        """Positions whose gradients this worker has computed; samples where members share those of batches."""
        if window.piece:
            slots = sorted(self.pieces.slots(self.pieces.mine))
            if self._num_samples is not None:
                return ranges_of([slot - window.start for slot in slots])
            return ranges_of(sorted(progress.positions_at(slots)))
        return progress.ranges(window.slice_of(self._session.worker.id))

    def _log_step(self, record: dict[str, Any], after: EpochProgress, *, complete: bool, exact: bool) -> None:
        self._log.write("step", **record)
        if complete:
            self._log_end(after, exact=exact)

    def _log_end(self, progress: EpochProgress, *, exact: bool, told: Mapping[str, Any] | None = None) -> None:
        self._log.write("epoch_end", epoch=progress.epoch, exact=exact, length=progress.length, **(told or {}))

    def samples_of_epochs(self, num_epochs: int) -> float | None:
        """Samples that are left of so many epochs, if each of them ends with its data; None if nobody knows."""
        progress = self.progress
        if progress.length >= ENDLESS:
            return None
        epochs = max(0, num_epochs - 1 - progress.epoch)
        return (progress.remaining + epochs * progress.length) * self.samples_per_position

    def _rest_of_epochs(self) -> Rest | None:
        num_epochs = self.num_epochs()
        samples = None if num_epochs is None else self.samples_of_epochs(num_epochs)
        return None if samples is None else Rest(samples)

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """The state that a newcomer needs to continue with the others: a plain tree with arrays."""
        progress = self.progress
        return {
            "num_updates": self.num_updates,
            "epoch": progress.epoch,
            "length": progress.length,
            "cursor": progress.cursor,
            "returned": np.asarray(progress.returned, dtype=np.int64),
            "steps": progress.steps,
            "chosen_batch": self.chosen_batch or 0,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from this state."""
        self.num_updates = state["num_updates"]
        self.chosen_batch = state.get("chosen_batch") or None
        self.progress = EpochProgress(
            epoch=state["epoch"],
            length=state["length"],
            cursor=state["cursor"],
            returned=tuple(np.asarray(state["returned"]).tolist()),
            steps=state["steps"],
        )

    def log_rollback(self, *, epoch: int | None = None) -> None:
        """Log that the training continues from a checkpoint, in the middle of its epoch or with another one."""
        positions = {} if epoch is not None else {"cursor_positions": _done(self.progress)}
        rest = None if self.parts is None else self.parts.rest
        self._log.write(
            "rollback",
            generation=self._session.view.generation,
            step=self.num_updates,
            epoch=self.progress.epoch if epoch is None else epoch,
            **positions,
            **({"stream": rest} if rest else {}),
        )

    def log_weights(self, parts: Iterable[Any]) -> None:
        """Log a hash of the weights, given as bytes in parts, once the newest update is confirmed.

        There is none before the first update, and none while an accumulation goes on: buffers may differ then. There is
        one for each update, however often this is called: what hooks change afterwards is in the next one.
        """
        if self.num_updates in (0, self._hashed) or self.progress.uncommitted:
            return
        self._hashed = self.num_updates
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(part)
        record = {"step": self.num_updates, "hash": digest.hexdigest()}
        self._session.when_confirmed(lambda: self._log.write("weights", **record))

    def log_admission(self) -> None:
        """Log that this worker continues where the others are.

        At the beginning of an epoch, hooks may have changed weights since the others logged the hash of the newest
        update, as a schedule of the learning rate does in Keras; so this worker logs none of that update.
        """
        if not self.progress.steps:
            self._hashed = self.num_updates
        self._log.write(
            "admitted", generation=self._session.view.generation, step=self.num_updates, epoch=self.progress.epoch
        )


def ranges_of(positions: Iterable[int] | np.ndarray) -> list[Range]:
    """Sorted positions as half-open ranges.

    >>> ranges_of(np.array([0, 1, 2, 5, 7, 8]))
    [(0, 3), (5, 6), (7, 9)]
    """
    positions = np.asarray(positions)
    if len(positions) == 0:
        return []
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(positions, cuts)]


def _done(progress: EpochProgress) -> list[tuple[int, int]]:
    """Positions that have been committed, if none are uncommitted."""
    done = np.ones(min(progress.cursor, progress.length), dtype=bool)  # what is returned was dealt, so it lies in here
    done[list(progress.returned[max(0, progress.cursor - progress.length) :])] = False
    return ranges_of(np.flatnonzero(done))
