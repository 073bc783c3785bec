"""The training data of a `fit`: the step boundary, and the dealing of batches.

Keras asks for the next batch between two steps, before any callback of the step: it is the place where a worker lets
a change of membership happen, and where a newcomer is admitted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ef_common.collectives.gradients.pieces import Pieces
from ef_common.core.checksums import Checksums, are_alike
from ef_common.core.epochs import ENDLESS
from ef_common.core.sharding import MIN_SHARE, EpochProgress, GlobalBatch, Window
from ef_common.data.comparison import compare, differ, without_noise
from ef_common.data.dealer import Dealer
from ef_common.data.identity import DataComparison
from ef_common.data.walked_stream import WalkedStream
from ef_common.data.walking import Walk
from ef_common.errors import UnsupportedError, UsageError
from ef_common.events import EventLog
from ef_common.launch.leaving import leaving_cleanly
from ef_common.session import Session
from ef_keras import hooks
from ef_keras.ordered import FitSource, OrderedSource
from ef_keras.rows import Rows, num_samples
from ef_keras.shard_source import ShardSource

REMEDY = (
    "The order must be a function of keras.utils.set_random_seed(…), called with the same number in all workers before "
    "the data set is made; shuffle a tf.data.Dataset with shuffle(…, seed=…), and with reshuffle_each_iteration=False "
    "if other code than fit() and evaluate() iterates over data of the same shuffle. A PyDataset may draw random "
    "numbers in on_epoch_begin() and on_epoch_end(), from random, numpy.random, keras.random, the backend, or a "
    "generator in one of its attributes; nothing else random may decide the order of its samples. If the order is the "
    "same and map(…) changes the samples by random numbers, do that in the model, or draw from tf.random.stateless_… "
    "with seeds in the data set"
)
NOISE = (
    "Random numbers in map(…) are others in each worker, as those of an augmentation are. That does no harm, but which "
    "ones a sample gets depends on who reads it. To have the same in all workers, draw from tf.random.stateless_… with "
    "seeds that are part of the data set"
)


class TrainingData:
    """Deals the data of a `fit`.

    Args:
        source: The data.
        session: The worker's session.
        log: Event log.
        steps_per_execution: Batches that Keras takes at a time.
        full_batch: Samples of a full batch of these data.
        global_batch: Samples that all workers share in a step, if that is fixed; whole batches, where batches are what
            is dealt. What is handed to Keras is then the batch of this worker's first pass.
        deterministic: What is trained on must not depend on who reads it.

    Attributes:
        seed: Seed of the order of the samples; the same in all workers.
        full_batch: Size of a full batch; the same in all workers.
        fraction: Samples of this worker's newest batch, as a part of a full one; 1 where samples are what is dealt.
        epoch: Epoch of the running `fit`.
        is_over: The state that is loaded next is the end of this `fit`, which needs no data any more.
        padding: The current batch only keeps step with the others: its gradient weighs nothing.
        on_boundary: Called between two steps.
        on_no_update: Called after a step that has not committed its samples; it is refused if they are not then.
        on_dealt: Called when the samples of a step have been dealt, before it begins.
        on_begin: Called before the first batch of an epoch; tells whether the epoch goes on.
        on_length: Called with the number of steps of the epoch, None if unknown, when it may have changed.
        on_padding: Called before a batch that only keeps step, and when it is over.
        on_epoch_end: Called when the last step of an epoch is over.
    """

    def __init__(
        self,
        source: FitSource,
        session: Session,
        *,
        log: EventLog,
        steps_per_execution: int = 1,
        full_batch: int = 1,
        global_batch: GlobalBatch | None = None,
        deterministic: bool = False,
    ) -> None:
        self.source = source
        self._rows: Rows | None = None
        self._piece = 1
        if global_batch is not None and source.whole_batches:
            self._piece, global_batch = global_batch.piece, GlobalBatch(global_batch.size // full_batch)
        self.dealer = Dealer(session, log=log, batch_size=source.batch_size, global_batch=global_batch)
        self.dealer.samples_per_position = full_batch if source.whole_batches else 1.0
        self.dealer.is_open = isinstance(source, WalkedStream) and source.is_open
        self._walk: Walk | None = None
        if isinstance(source, WalkedStream):
            noise = None if deterministic else NOISE
            self._walk = Walk(source, self.dealer, session, log=log, remedy=REMEDY, noise=noise)
        if isinstance(source, ShardSource):
            source.attach(self.dealer, session, log)
        self.dealer.on_returned = self._announce_length
        self._comparison = DataComparison(session, getattr(source, "identity", None))
        self.seed = 0
        self.full_batch = full_batch
        self.fraction = 1.0
        self.epoch = 0
        self.is_over = False
        self.padding = False
        self.on_boundary: Callable[[], None] = lambda: None
        self.on_no_update: Callable[[], None] = lambda: None
        self.on_dealt: Callable[[], None] = lambda: None
        self.on_begin: Callable[[bool], None] = lambda goes_on: None
        self.on_length: Callable[[int | None], None] = lambda num_steps: None
        self.on_padding: Callable[[bool], None] = lambda begins: None
        self.on_epoch_end: Callable[[], None] = lambda: None
        self._session = session
        self._log = log
        self._steps_per_execution = steps_per_execution
        self._resumed = False
        self._ahead: tuple[Window, Any] | None = None
        self._checksums: Checksums = []
        self._local_batch = source.batch_size

    @property
    def resumes(self) -> bool:
        """Whether the next epoch has been begun before, by the others or in an earlier start."""
        return self._resumed

    def batches(self) -> hooks.Batches:
        """An epoch, in the form that Keras needs."""
        goes_on = self._resumed
        if not goes_on:
            self._begin_epoch()
        self.on_begin(goes_on)
        self._resumed = False
        self._announce_length()
        try:
            while (batch := self._next()) is not None:
                step = self.dealer.progress.steps - 1
                some = itertools.chain([batch], iter(self._next, None))
                yield step, step + self._steps_per_execution - 1, itertools.islice(some, self._steps_per_execution)
            self.source.end()
        except BaseException:  # `GeneratorExit` among them: `fit` is left
            self.close()
            raise
        self.on_epoch_end()

    def _begin_epoch(self) -> None:
        source = self.source
        if self._walk is not None:
            self._walk.begin(self.epoch)
        source.begin(self.epoch, seed=self.seed)
        self._checksums, self._ahead = [], None
        if isinstance(source, ShardSource):
            with leaving_cleanly():
                source.begin_epoch(self.epoch)
            return
        self.dealer.begin(self.epoch, source.epochs.length_of(self.epoch))
        if isinstance(source, OrderedSource):
            with leaving_cleanly():
                length = source.agree(self._session)
            if length != self.dealer.progress.length:
                self.dealer.end_at(length)

    def close(self) -> None:
        """Stop reading ahead. May be repeated."""
        if isinstance(self.source, OrderedSource | ShardSource):
            self.source.close()

    def _next(self) -> Any:
        """The next batch of this worker; None at the end of the epoch."""
        dealer, session = self.dealer, self._session
        if self.padding:
            self.on_padding(False)
            self.padding = False
        if dealer.progress.uncommitted:
            self.on_no_update()
        if dealer.progress.uncommitted:
            raise UnsupportedError(
                "the model's train_step has made no update. It must end in self.optimizer.apply_gradients(…) or "
                "self.optimizer.apply(…), in every step and in every worker: that is where gradients are reduced"
            )
        self.on_boundary()
        if self._walk is not None:
            self._walk.tell_watermark()
        if dealer.progress.remaining == 0:
            return None
        with leaving_cleanly():
            changed = session.boundary()
        local_batch = dealer.local_batch(session.completed_in.world_size)
        if changed or local_batch != self._local_batch:
            self._local_batch = local_batch
            self._announce_length()
        window = self._deal()
        if window is None:
            return None
        self._follow(window)
        self._look_ahead(window)
        self.on_dealt()
        if dealer.global_batch is not None:
            return self._share(window)
        mine = dealer.mine(window)
        self.padding = not mine
        if self.padding:
            self.on_padding(True)
            mine = dealer.progress.positions((window.start, window.start + 1))
        ahead, self._ahead = self._ahead, None
        batch = ahead[1] if ahead is not None and ahead[0] == window else self.source.batch(mine)
        if self.source.whole_batches:
            self.fraction = num_samples(batch) / self.full_batch
        return batch

    def _deal(self) -> Window | None:
        """Deal the next step; None if there is none."""
        source, dealer = self.source, self.dealer
        if isinstance(source, ShardSource):
            with leaving_cleanly():
                window = source.deal()
            if not dealer.progress.remaining:
                self._announce_length()
            return window
        if self._walk is not None and self._walk.finds_end():
            self._announce_length()
        return None if dealer.progress.remaining == 0 else dealer.deal()

    def finds(self) -> bool:
        """Before a reduction: whether the others must hear what this worker has found in its next batch."""
        return isinstance(self.source, ShardSource) and self.source.finds()

    def heard(self, num_finds: float) -> None:
        """A reduction has completed in which this many members had found something."""
        if isinstance(self.source, ShardSource):
            self.source.heard(num_finds)

    def _share(self, window: Window) -> Any:
        """The batch of this worker's first pass of a global batch; a few samples if it has none."""
        dealer, source = self.dealer, self.source
        if source.whole_batches:
            positions = dealer.progress.positions((window.start, window.stop))
            self._rows = Rows([source.batch([position]) for position in positions])
            dealer.share_samples(len(self._rows), batch_size=self.full_batch, piece=self._piece)
        samples = dealer.pieces.window
        passes = dealer.pieces.passes()
        return self.fetch(passes[0]) if passes else self._read(range(*samples[:2])[:MIN_SHARE])

    def fetch(self, pieces: Sequence[int]) -> Any:
        """Read pieces of the global batch that was dealt last."""
        return self._read(self.dealer.pieces.slots(pieces))

    def _read(self, slots: Sequence[int]) -> Any:
        dealer = self.dealer
        if self._rows is None:
            return self.source.batch(dealer.progress.positions_at(slots))
        return self._rows.take([slot - dealer.pieces.window.start for slot in slots])

    def local_samples(self, num_workers: int) -> int:
        """Samples of one worker in a whole step of so many workers."""
        return min(self.full_batch, self.dealer.local_samples(num_workers))

    @property
    def pass_size(self) -> int:
        """Maximal number of samples in a forward pass."""
        return self.full_batch if self.source.whole_batches else self.dealer.batch_size

    def _look_ahead(self, window: Window) -> None:
        """Read this window, and probable next ones, ahead where the data set has readers."""
        if isinstance(self.source, OrderedSource):
            members = self._session.completed_in.ids
            self.source.expect(partial(self._coming, self.dealer.progress, window, members))

    def _coming(self, progress: EpochProgress, window: Window, members: Sequence[str]) -> Iterator[list[int]]:
        """Positions of this worker's batches from a window on, if the members stay the same."""
        while True:
            yield from self._read_here(progress, window)
            if progress.remaining <= 0:
                return
            progress, window = self.dealer.next_window(progress, members)

    def _read_here(self, progress: EpochProgress, window: Window) -> list[list[int]]:
        """Positions of each batch of a window that this worker reads."""
        dealer, worker = self.dealer, self._session.worker.id
        everything = progress.positions((window.start, window.stop))
        if dealer.global_batch is None:
            return [progress.positions(window.slice_of(worker)) or everything[:1]]
        if self.source.whole_batches:
            return [[position] for position in everything]
        pieces = Pieces(window, worker, batch_size=dealer.batch_size)
        passes = [progress.positions_at(pieces.slots(some)) for some in pieces.passes()]
        return passes or [everything[:MIN_SHARE]]

    def prefetch(self) -> None:
        """Prepare the next batch while waiting for gradients, in case nothing changes."""
        progress = self.dealer.progress
        if isinstance(self.source, OrderedSource) and self.source.reads_ahead:
            return
        if progress.remaining > 0 and not isinstance(self.source, WalkedStream | ShardSource):
            _, window = self.dealer.next_window(progress, self._session.completed_in.ids)
            mine = self.dealer.mine(window)
            self._ahead = (window, self.source.batch(mine)) if mine else None

    def catch_up(self) -> None:
        """In a newcomer, before the others wait for it: walk a stream to their place.

        Raises:
            JobFinished: The job has ended meanwhile.
        """
        if self._walk is not None:
            self._walk.catch_up()

    def _announce_length(self) -> None:
        progress = self.dealer.progress
        if isinstance(self.source, ShardSource):
            num_workers = self._session.completed_in.world_size
            self.on_length(self.source.num_steps(progress, num_workers * self.dealer.local_batch(num_workers)))
            return
        self.on_length(self.dealer.num_steps() if progress.length < ENDLESS else None)

    def _follow(self, window: Window) -> None:
        """A window has been dealt. Compare what the workers read."""
        source = self.source
        if self._walk is not None:
            with leaving_cleanly():
                self._walk.follow(window)
            return
        if self._comparison.is_due:
            with leaving_cleanly():
                self._comparison.follow()
        is_due = self.dealer.progress.steps == 1 and self._session.completed_in.world_size > 1
        if isinstance(source, OrderedSource) and is_due:
            self._checksums = self._compare(source.checksums(0), partial(source.checksums, 0))

    def _compare(self, found: Checksums, read: Callable[[], Checksums]) -> Checksums:
        with leaving_cleanly():
            everybody = compare(self._session, found, lambda everybody: without_noise(found, read), self._log_read)
        if differ(everybody):
            raise UsageError(
                f"the workers read different data at step {self.dealer.progress.steps} of epoch {self.epoch}, so that "
                f"samples would be used twice or never. {REMEDY}. Received: checksums {everybody}"
            )
        return everybody[self._session.worker.id]

    def _log_read(self, found: Checksums) -> None:
        if found:
            self._log.write("read", epoch=self.dealer.progress.epoch, position=0, checksums=list(found))

    def state(self) -> dict[str, Any]:
        """The state that a newcomer needs to continue with the others."""
        found = {**self.dealer.state(), "seed": self.seed, "full_batch": self.full_batch, "order": None}
        found["data"] = self._comparison.state()
        if isinstance(self.source, ShardSource):
            found["stream"] = self.source.state()
        if self._walk is not None:
            found["walk"] = self._walk.state()
        if isinstance(self.source, OrderedSource):
            if not self._checksums and self.dealer.progress.remaining:
                self._checksums = self.source.checksums(0)
                self._log_read(self._checksums)
            found["order"] = {"orders": self.source.order(), "checksums": list(self._checksums)}
        return found

    def load_state(self, state: dict[str, Any], *, saved: bool = False) -> None:
        """Continue, at the next call of `batches`, where the others are or where a checkpoint was saved."""
        self.seed, self.full_batch = state["seed"], state["full_batch"]
        if state["epoch"] < 0:
            return  # all who had begun are lost, and this worker begins with those who joined with it
        self.dealer.load_state(state)
        self._comparison.load_state(state.get("data"), saved=saved)
        self.epoch = self.dealer.progress.epoch
        if self.is_over:
            self.dealer.log_rollback(epoch=None if self.dealer.progress.remaining else self.epoch + 1)
            return
        draws_length = isinstance(self.source, OrderedSource) and self.source.draws_length
        is_same = draws_length or state["length"] == self.source.epochs.length_of(self.epoch)
        if saved and not is_same:
            self._check_length()
        if isinstance(self.source, ShardSource):
            self.source.load_state(state.get("stream"), seed=self.seed, saved=saved)
        order = state.get("order")
        if saved and not self.dealer.progress.remaining:
            if isinstance(self.source, OrderedSource) and order is not None and is_same:
                self.source.recall(order["orders"])
            self.epoch += 1
            self.dealer.log_rollback(epoch=self.epoch)
            return
        self.source.begin(self.epoch, seed=self.seed, cursor=self.dealer.progress.cursor)
        if self._walk is not None:
            self._walk.load_state(state.get("walk"), saved=saved)
        self._resumed = True
        if isinstance(self.source, OrderedSource) and order is not None:
            self.source.put_in_order(order["orders"])
            self._compare_with(order["checksums"], self.source, saved=saved)
        if saved:
            self.dealer.log_rollback()
        else:
            self.dealer.log_admission()
        self._log_read(self._checksums)

    def _check_length(self) -> None:
        """Refuse data of another length than those of a checkpoint if its pass through them is not over."""
        epochs, progress = self.source.epochs, self.dealer.progress
        following = progress.epoch + 1
        is_last = epochs.limit is None or progress.length < epochs.limit
        ends_pass = is_last and not progress.remaining and epochs.begin_of_pass(following) == following
        if not ends_pass and not self.dealer.is_open:
            raise UsageError(
                "the checkpoint was made of an epoch of another length: the data have changed within a pass through "
                "them. Use a checkpoint of the end of a pass. "
                f"Expected: {progress.length} (samples, or batches of a stream). "
                f"Received: {epochs.length_of(progress.epoch)}"
            )

    def _compare_with(self, expected: Checksums, source: OrderedSource, *, saved: bool) -> None:
        """Compare a batch of the epoch with what others have read, or what was read before."""
        found = source.checksums(0)
        if not are_alike(expected, found):
            found = without_noise(found, partial(source.checksums, 0))
        if not are_alike(expected, found):
            others = "the worker that has saved the checkpoint" if saved else "the others"
            raise UsageError(
                f"this worker reads other data in epoch {self.epoch} than {others}, so that samples would be used "
                f"twice or never. {REMEDY}. Expected: checksums {expected}. Received: {found}"
            )
        self._checksums = found
