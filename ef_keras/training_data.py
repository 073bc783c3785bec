"""The training data of a `fit`: the step boundary, and the dealing of batches.

Keras asks for the next batch between two steps, before any callback of the step: it is the place where a worker lets
a change of membership happen, and where a newcomer is admitted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from ef_common.collectives import operations
from ef_common.core.place import Place
from ef_common.core.sharding import MIN_SHARE, GlobalBatch, Window
from ef_common.data.dealer import Dealer
from ef_common.errors import UnsupportedError, UsageError
from ef_common.events import EventLog
from ef_common.launch.leaving import leaving_cleanly
from ef_common.session import Session
from ef_keras import hooks
from ef_keras.rows import Rows, num_samples
from ef_keras.sources import Source, StreamSource

_STEPS_BETWEEN_CHECKS = 100


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

    Attributes:
        seed: Of the order of the samples; the same in all workers.
        full_batch: The same in all workers.
        fraction: Samples of this worker's newest batch, as a part of a full one; 1 where samples are what is dealt.
        epoch: Of the `fit` that is running.
        padding: The current batch only keeps step with the others: its gradient weighs nothing.
        on_boundary: Called between two steps.
        on_no_update: Called after a step that has not committed its samples; it is refused if they are not then.
        on_dealt: Called when the samples of a step have been dealt, before it begins.
        on_resume: Called before the first batch, if that is one in the middle of an epoch.
        on_length: Called with the number of steps of the epoch when it may have changed.
        on_padding: Called before a batch that only keeps step, and when it is over.
        on_epoch_end: Called when the last step of an epoch is over.
    """

    def __init__(
        self,
        source: Source,
        session: Session,
        *,
        log: EventLog,
        steps_per_execution: int = 1,
        full_batch: int = 1,
        global_batch: GlobalBatch | None = None,
    ) -> None:
        self.source = source
        self._rows: Rows | None = None
        self._piece = 1
        if global_batch is not None and source.whole_batches:
            self._piece, global_batch = global_batch.piece, GlobalBatch(global_batch.size // full_batch)
        self.dealer = Dealer(session, log=log, batch_size=source.batch_size, global_batch=global_batch)
        self.dealer.on_returned = self._announce_length
        self.seed = 0
        self.full_batch = full_batch
        self.fraction = 1.0
        self.epoch = 0
        self.padding = False
        self.on_boundary: Callable[[], None] = lambda: None
        self.on_no_update: Callable[[], None] = lambda: None
        self.on_dealt: Callable[[], None] = lambda: None
        self.on_resume: Callable[[], None] = lambda: None
        self.on_length: Callable[[int], None] = lambda num_steps: None
        self.on_padding: Callable[[bool], None] = lambda begins: None
        self.on_epoch_end: Callable[[], None] = lambda: None
        self._session = session
        self._log = log
        self._steps_per_execution = steps_per_execution
        self._resumed = False
        self._ahead: tuple[Window, Any] | None = None

    def batches(self) -> hooks.Batches:
        """An epoch, as Keras wants it."""
        if not self._resumed:
            self.source.begin(self.epoch, seed=self.seed)
            self.dealer.begin(self.epoch, self.source.length)
            self._ahead = None
        else:
            self.on_resume()
        self._resumed = False
        self._announce_length()
        while (batch := self._next()) is not None:
            step = self.dealer.progress.steps - 1
            some = itertools.chain([batch], iter(self._next, None))
            yield step, step + self._steps_per_execution - 1, itertools.islice(some, self._steps_per_execution)
        self.on_epoch_end()

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
        self._tell_place()
        if dealer.progress.remaining == 0:
            return None
        with leaving_cleanly():
            if session.boundary():
                self._announce_length()
        window = dealer.deal()
        self.source.follow(dealer.progress, window)
        self._check(window)
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

    def _share(self, window: Window) -> Any:
        """The batch of this worker's first pass of a global batch; a few samples of it, if there is none."""
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
        return self._read(self.dealer.pieces.places(pieces))

    def _read(self, places: Sequence[int]) -> Any:
        dealer = self.dealer
        if self._rows is None:
            return self.source.batch(dealer.progress.positions_at(places))
        return self._rows.take([place - dealer.pieces.window.start for place in places])

    @property
    def pass_size(self) -> int:
        """Samples of a forward pass, at most."""
        return self.full_batch if self.source.whole_batches else self.dealer.batch_size

    def prefetch(self) -> None:
        """While the others' gradients are waited for: have the next batch ready, should nothing change."""
        progress = self.dealer.progress
        if progress.remaining > 0 and not isinstance(self.source, StreamSource):
            _, window = self.dealer.next_window(progress, self._session.completed_in.ids)
            mine = self.dealer.mine(window)
            self._ahead = (window, self.source.batch(mine)) if mine else None

    def _tell_place(self) -> None:
        """Newcomers walk a stream to where the members are. All other data they can have at any place."""
        if isinstance(self.source, StreamSource):
            progress = self.dealer.progress
            self._session.tell_place(Place(progress.epoch, progress.cursor, progress.returned, self._session.training))

    def catch_up(self) -> None:
        """In a newcomer, before the others wait for it: walk a stream to where they are.

        Each time that it comes to where they were, they have gone on. If they are not nearer than the last time, they
        are as fast as this worker is, and the rest has to be walked while they wait.

        Raises:
            JobFinished: The job has ended meanwhile.
        """
        source = self.source
        if not isinstance(source, StreamSource):
            return
        target, lag = None, math.inf
        while (newest := self._session.job_place()) is not None and newest.training == self._session.training:
            if target is None or not source.lag(target) or newest.epoch > target.epoch:
                target, before, lag = newest, lag, source.lag(newest)
                if not 0 < lag < before:
                    break
            source.approach(target)
        self._log.write("walked", epoch=source.epoch, cursor=source.cursor)

    def _announce_length(self) -> None:
        self.on_length(self.dealer.num_steps())

    def _check(self, window: Window) -> None:
        """Now and then, compare what the workers read."""
        if not isinstance(self.source, StreamSource) or self._session.completed_in.world_size == 1:
            return
        steps = self.dealer.progress.steps
        if steps > 1 and steps % _STEPS_BETWEEN_CHECKS:
            return
        with leaving_cleanly():
            found, view = operations.gather(self._session, self.source.fingerprint(window.start), what="checksum")
        if len(set(found)) > 1:
            raise UsageError(
                f"the workers read different data at step {steps} of epoch {self.epoch}, so that samples would be "
                "used twice or never. Call keras.utils.set_random_seed(…) with the same number in all workers before "
                "the data set is made, or shuffle with dataset.shuffle(…, seed=…). "
                f"Received: checksums {dict(zip(view.ids, found, strict=False))}"
            )

    def state(self) -> dict[str, Any]:
        """What a newcomer needs to go on with the others."""
        return {**self.dealer.state(), "seed": self.seed, "full_batch": self.full_batch}

    def load_state(self, state: dict[str, Any], *, saved: bool = False) -> None:
        """Go on from the next call of `batches` on: where the others are, or where a checkpoint was saved."""
        self.seed, self.full_batch = state["seed"], state["full_batch"]
        if state["epoch"] < 0:
            return  # all who had begun are lost, and this worker begins with those who joined with it
        if saved and state["length"] != self.source.length:
            raise UsageError(
                "the checkpoint was made of an epoch of another length: the data have changed. "
                f"Expected: {state['length']} (samples, or batches of a stream). Received: {self.source.length}"
            )
        self.dealer.load_state(state)
        self.epoch = self.dealer.progress.epoch
        if saved and not self.dealer.progress.remaining:
            self.epoch += 1
            self.dealer.log_rollback(epoch=self.epoch)
            return
        self.source.begin(self.epoch, seed=self.seed, cursor=self.dealer.progress.cursor)
        self._resumed = True
        if saved:
            self.dealer.log_rollback()
        else:
            self.dealer.log_admission()


def first_batch(source: Source) -> Any:
    """Any batch, to build and warm up a model with."""
    source.begin(0, seed=0)
    return source.batch(range(min(source.batch_size, source.length)))
