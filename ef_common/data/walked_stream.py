"""Data without positions, through which each worker walks to keep what may be asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ef_common.core.checksums import Checksums
from ef_common.core.epochs import Epochs
from ef_common.core.sharding import EpochProgress, Window
from ef_common.core.watermark import Watermark
from ef_common.data.comparison import Fingerprints, fingerprint
from ef_common.errors import UnsupportedError, UsageError


class WalkedStream:
    """Batches that can only be had one after the other. Each worker reads all of them and keeps what it may need.

    A shuffled data set has another order each time that an iterator over it is made. So iterators are counted: that of
    pass `n` is the one after `n` others, in every worker. What has been passed without being kept cannot be had again.

    A member keeps the newest window, what no update has used yet, and all that was returned. A
    newcomer goes ahead of its admission, but never beyond a :class:`~ef_common.core.watermark.Watermark`, and keeps
    what that says was returned. Nothing else before that position can ever be asked for: it is committed, and the
    commits are confirmed. What is returned later was dealt later; it lies behind the position, where the newcomer has
    not been yet.

    If the length of the data is unknown, each worker finds their end when it walks there, all in the same step. The
    epoch is over then, and the next one has a new iterator.

    Memory: one batch for each worker and each window that no update has used yet, and what was returned.

    Args:
        batches: Makes the batches of a pass, given its number.
        epochs: The epochs that the passes are divided into.
        checksums: Checksums of a batch; None if nothing is to be compared.
        num_samples: Samples of a batch, or None if it does not tell.
        is_open: The length of the data is not known.
        once: There is one iterator under all passes (a bare generator), so none can be skipped.
        independent: A pass does not depend on the passes before it, so that these need not be begun.
        ahead: Batches behind a window that are read with it, so that the last window is known to be the last.
        num_begun: Counts the iterators that were made over the data, also for other streams before this one; None if
            nobody counts.
        is_new: Nobody has iterated over the data before. (A `cache()` in them keeps what is first read to the end.)

    Attributes:
        ordinal: That count when the current pass was begun; 0 if nobody counts.
        epoch: The newest that has been begun; one less than the first before that.
        cursor: Batches of it that have been read.
        ended_at: Where the data have ended in this epoch, if they have.
        fingerprints: Of each part of all batches of the epoch that have been read.
        full_batch: Samples of the first batch that was read; 1 before that.
    """

    batch_size = 1
    whole_batches = True

    def __init__(
        self,
        batches: Callable[[int], Iterable[Any]],
        epochs: Epochs,
        *,
        checksums: Callable[[Any], Checksums] | None = None,
        num_samples: Callable[[Any], int | None] = lambda batch: None,
        is_open: bool = False,
        once: bool = False,
        independent: bool = False,
        ahead: int = 0,
        num_begun: Callable[[], int] = lambda: 0,
        is_new: bool = False,
    ) -> None:
        self._batches = batches
        self._num_begun, self.ordinal = num_begun, 0
        self.epochs = epochs
        self._checksums, self._num_samples = checksums, num_samples
        self.is_open, self.once, self.is_new = is_open, once, is_new
        self._independent, self._ahead = independent, ahead
        self.full_batch = 0
        self._kept: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._iterator: Iterator[Any] | None = None
        self._pass = self.epoch = epochs.first - 1
        self._start = self.cursor = 0
        self.fingerprints = Fingerprints()
        self.ended_at: int | None = None

    @property
    def fingerprint(self) -> int:
        """Of all batches of the epoch that have been read; 0 if nothing is compared."""
        return fingerprint(0, self.fingerprints.parts) if self.fingerprints.parts else 0

    def restart(self) -> None:
        """Begin with the first pass again."""
        self.close()
        self._pass = self.epoch = self.epochs.first - 1
        self._begin_reading(0)

    def close(self) -> None:
        """Drop the iterator and the batches that are kept."""
        self._iterator = None
        self._kept.clear()

    def first(self) -> Any:
        """The first batch of all."""
        self.begin(self.epochs.first, seed=0)
        self._walk(1, keep_from=0)
        if not self.cursor:
            raise UsageError("the data have no batch")
        return self.batch([0])

    def begin(self, epoch: int, *, seed: int = 0, cursor: int = 0) -> None:
        """Begin an epoch. To begin the newest epoch again changes nothing.

        If it has passed what is to come, it had gone ahead, and then all members were lost: it walks from the first
        batch again. If the data have another order each time, the workers' first comparison tells.

        Args:
            epoch: Its index.
            seed: Not used: the data have an order of their own.
            cursor: Positions before this one, other than those returned, are not asked for any more.
        """
        lacks = any(position not in self._kept for position in range(cursor, self.cursor))
        if epoch < self.epoch or (epoch == self.epoch and lacks):
            self.restart()
        if epoch == self.epoch:
            return
        number, part = self.epochs.part(epoch)
        if self._independent and self._pass < number - 1:
            self._pass = number - 1
        while self._pass < number:
            self._pass += 1
            self._new_iterator()
            self.ordinal = self._num_begun()
            if self._pass < number and self._iterator is not None:
                _skip(self._iterator, everything=self.once)
        while self._start < part.start:  # epochs in the same pass
            limit = self.epochs.limit or 0
            self._walk(limit, keep_from=limit)
            if self.ended_at is not None:
                self._new_iterator(self._start)
            self._begin_reading(self._start + limit)
        self.epoch, self.fingerprints = epoch, Fingerprints()
        self._kept.clear()
        self._sizes.clear()

    def align(self, ordinal: int) -> bool:
        """Begin the current pass again, with the iterator of this ordinal: that of a worker that has made more of them.

        Returns:
            False if that many have been made already. Nothing has changed then.
        """
        if self.once or ordinal <= self._num_begun():
            return False
        epoch, self.epoch = self.epoch, self.epochs.first - 1
        self._pass -= 1
        while self._num_begun() < ordinal - 1:
            self._new_iterator()
            if self._iterator is not None:
                _skip(self._iterator, everything=False)
        self.begin(epoch)
        return True

    def _new_iterator(self, start: int = 0) -> None:
        self._iterator = None  # ends what it has started, before another one begins
        self._iterator = iter(self._batches(self._pass))
        self._begin_reading(start)

    def _begin_reading(self, start: int) -> None:
        self._start = start  # of the epoch in its pass, and from there on:
        self.cursor, self.fingerprints, self.ended_at = 0, Fingerprints(), None

    def lag(self, watermark: Watermark) -> int:
        """Batches from here to a place; none if it is behind."""
        if watermark.epoch < self.epoch or (watermark.epoch == self.epoch and self.ended_at is not None):
            return 0
        number, part = self.epochs.part(watermark.epoch)
        target = part.start + min(watermark.cursor, len(part))
        if number == self._pass:
            return max(0, target - self._start - self.cursor)
        return 1 + target  # the pass has to be begun at least

    def approach(self, watermark: Watermark) -> None:
        """Go one batch (or to the beginning of a pass) towards a place ahead."""
        if self.epochs.part(watermark.epoch)[0] != self._pass:
            self.begin(self.epochs.begin_of_pass(watermark.epoch))
            return
        if self.epoch < watermark.epoch and (
            self.ended_at is not None or self.cursor >= self.epochs.length_of(self.epoch)
        ):
            self.begin(self.epoch + 1)
            if not self.lag(watermark):
                return
        wanted = self.epoch == watermark.epoch and self.cursor in watermark.returned
        self._walk(self.cursor + 1, keep_from=self.cursor if wanted else self.cursor + 1)

    def batch(self, positions: Sequence[int]) -> Any:
        """The batch at a position, which is one that may be asked for."""
        (position,) = positions
        self._walk(position + 1, keep_from=position)
        if position not in self._kept:
            raise UnsupportedError(
                "these data cannot be read again: they ended earlier than in the previous epoch, as a generator does "
                "once it is used up. Make a new iterator in each epoch, or use data that are accessible by index. "
                f"Received: batch {position}, of {self.ended_at}"
            )
        return self._kept[position]

    def num_samples_at(self, position: int) -> int:
        """Samples of a batch that is kept."""
        return self._sizes.get(position, self.full_batch or 1)

    def follow(self, progress: EpochProgress, window: Window) -> None:
        """Read up to the end of a window that is dealt in this progress; let go of what nobody can ask for."""
        windows = (*progress.uncommitted, window)
        wanted = {*progress.returned}
        for dealt in windows:
            wanted.update(progress.positions((dealt.start, dealt.stop)))
        self.go_to(min(window.stop + self._ahead, progress.length), wanted, keep_from=window.stop)
        kept = [position for position in self._kept if position in wanted or position >= window.stop]
        self._kept = {position: self._kept[position] for position in kept}
        self._sizes = {position: self._sizes[position] for position in kept if position in self._sizes}

    def go_to(self, cursor: int, wanted: Iterable[int], *, keep_from: int) -> None:
        """Read until this many batches have been read.

        Args:
            cursor: Their number, in this epoch.
            wanted: Positions to keep.
            keep_from: All from here on are kept as well.
        """
        wanted = frozenset(wanted)
        while self.cursor < cursor and self.ended_at is None:
            keeps = self.cursor >= keep_from or self.cursor in wanted
            self._walk(self.cursor + 1, keep_from=self.cursor if keeps else self.cursor + 1)

    def _walk(self, upto: int, *, keep_from: int) -> None:
        while self.cursor < upto and self.ended_at is None:
            batch = next(self._iterator, _END) if self._iterator is not None else _END
            if batch is _END and self.is_open:
                self.ended_at = self.cursor
                return
            if batch is _END:
                raise UnsupportedError(
                    "the data have ended before the length that they state. Correct assert_cardinality(…) or "
                    f"`__len__`. Expected: {self.epochs.length_of(self.epoch)} batches. Received: {self.cursor}"
                )
            self._note(batch)
            if self.cursor >= keep_from:
                self._kept[self.cursor] = batch
            self.cursor += 1

    def _note(self, batch: Any) -> None:
        if self._checksums is not None:
            self.fingerprints.add(self._checksums(batch))
        size = self._num_samples(batch)
        if size is None:
            return
        self.full_batch = self.full_batch or size
        if size != self.full_batch:
            self._sizes[self.cursor] = size

    def end(self) -> None:
        """An epoch is over."""


_END = object()


def _skip(iterator: Iterator[Any], *, everything: bool) -> None:
    for _ in iterator:
        if not everything:
            return
