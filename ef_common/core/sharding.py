"""Sharding: which worker trains on which sample, as a function of the view.

An epoch is a sequence of positions 0 … length-1 (a position is an index in the epoch's order, not in the dataset).
Positions are dealt in windows: a step of a world of W workers with local batch B takes the next W·B positions, and each
member its slice. A window stays *uncommitted* until a gradient reduction has completed. Then the slices of the members
that contributed are committed, and the slices of those that did not (because they died) are *returned*: they are
appended to the sequence and dealt again. In each epoch every position is therefore committed exactly once, whatever the
history of views.

A *global batch* of fixed size is dealt in the same way, but it is the same batch for every history of views: the
survivors compute the shares of lost members in the same step, so nothing is returned. It is cut into *pieces*, which
are not divided: single positions, or micro-batches if the sums must not depend on the shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

Range = tuple[int, int]
"""Half-open range of positions."""

MIN_SHARE = 2
"""No share of a training step is a single sample, if the user's batches are not: BatchNorm, for one, cannot be
trained on it, and a changing world leaves remainders of every size. (With batches of 2, one share of an epoch
may hold 3.)"""


class GlobalBatch(NamedTuple):
    """A batch that the workers share, however many there are.

    Args:
        size: Positions of a full one.
        piece: Positions of a piece.
    """

    size: int
    piece: int = 1


class Window(NamedTuple):
    """The slots `start` … `stop` of the sequence, dealt to `members` (ids in rank order).

    Shares below `min_share` are not dealt: the last ranks then have none. `piece` is 0 unless it is a global batch.
    With `counts`, each member has this number of slots, one after the other; otherwise their shares are balanced.
    """

    start: int
    stop: int
    members: tuple[str, ...]
    min_share: int = 1
    piece: int = 0
    counts: tuple[int, ...] = ()

    def slice_of(self, worker: str) -> Range:
        """Slots of one member; empty for a worker that is not a member."""
        if worker not in self.members:
            return (self.start, self.start)
        if self.counts:
            rank = self.members.index(worker)
            low = self.start + sum(self.counts[:rank])
            return (low, low + self.counts[rank])
        low, high = self._share_of(worker)
        if self.piece > 1:
            low, high = _end_of(low, self), _end_of(high, self)
        return (self.start + low, self.start + high)

    def _share_of(self, worker: str) -> Range:
        num = self.num_pieces if self.piece else self.stop - self.start
        return share(num, len(self.members), self.members.index(worker), min_share=self.min_share)

    @property
    def num_pieces(self) -> int:
        """Pieces of a global batch."""
        return -(-(self.stop - self.start) // self.piece)

    def pieces_of(self, worker: str) -> range:
        """Pieces of one member of a global batch."""
        return range(*self._share_of(worker)) if worker in self.members else range(0)

    def slots_of(self, piece: int) -> Range:
        """Slots of a piece."""
        return (self.start + _end_of(piece, self), self.start + _end_of(piece + 1, self))

    def shares(self) -> dict[str, int]:
        """Number of slots of each member that has any; see `share`."""
        if self.counts:
            return {member: count for member, count in zip(self.members, self.counts, strict=True) if count}
        num_shares, base, extra = _split(self.stop - self.start, len(self.members), self.min_share)
        return dict(zip(self.members, [base + 1] * extra + [base] * (num_shares - extra), strict=False))


class EpochProgress(NamedTuple):
    """How far an epoch is.

    Args:
        epoch: Index of the epoch.
        length: Number of positions in it.
        cursor: Slots dealt so far.
        returned: Positions after the first `length` slots, because they were dealt in vain.
        uncommitted: Windows dealt since the last gradient reduction.
        steps: Windows dealt so far (batches, as the host framework counts them).
    """

    epoch: int
    length: int
    cursor: int = 0
    returned: tuple[int, ...] = ()
    uncommitted: tuple[Window, ...] = ()
    steps: int = 0

    @property
    def slots(self) -> int:
        """Length of the sequence, including returned positions."""
        return self.length + len(self.returned)

    @property
    def remaining(self) -> int:
        """Slots not dealt yet."""
        return self.length + len(self.returned) - self.cursor

    def ranges(self, slots: Range) -> list[Range]:
        """Positions at these slots, as half-open ranges."""
        start, stop = slots
        if start < stop <= self.length:
            return [slots]
        ranges = [(start, min(stop, self.length))] if start < min(stop, self.length) else []
        tail = self.returned[max(0, start - self.length) : max(0, stop - self.length)]
        return ranges + [(position, position + 1) for position in tail]

    def positions(self, slots: Range) -> list[int]:
        """Positions at these slots."""
        return [position for start, stop in self.ranges(slots) for position in range(start, stop)]

    def positions_at(self, slots: Iterable[int]) -> list[int]:
        """The position at each slot."""
        return [slot if slot < self.length else self.returned[slot - self.length] for slot in slots]


class Commit(NamedTuple):
    """What one gradient reduction made final, as ranges of positions."""

    committed: tuple[Range, ...]
    returned: tuple[Range, ...]


def _end_of(num_pieces: int, window: Window) -> int:
    """Slots of this many first pieces.

    The last piece is not a single slot, for the same reason for which no share is (see MIN_SHARE), unless pieces are
    so small that it cannot be helped.
    """
    size, piece = window.stop - window.start, window.piece
    end = min(num_pieces * piece, size)
    return end - 1 if piece > MIN_SHARE and 0 < end == size - 1 else end


def made_up(window: Window, held: Mapping[str, Iterable[int]]) -> dict[str, list[int]]:
    """Which members compute the pieces of a global batch that nobody holds any more.

    Args:
        window: The global batch.
        held: Pieces that each member of the view holds the gradients of; ids in rank order.

    Returns:
        The missing pieces that each member must compute; members that hold few compute more.
    """
    members = sorted(held, key=lambda member: len(set(held[member])))
    present = set().union(*held.values())
    missing = [piece for piece in range(window.num_pieces) if piece not in present]
    shares = [share(len(missing), len(members), rank, min_share=window.min_share) for rank in range(len(members))]
    return {member: missing[low:high] for member, (low, high) in zip(members, shares, strict=True)}


@lru_cache(64)  # mostly the same, three times a step
def share(num_items: int, world_size: int, rank: int, *, min_share: int = 1) -> Range:
    """The balanced contiguous share of a rank: shares differ by at most one item, and the first ones are larger.

    >>> [share(10, 4, rank) for rank in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    >>> [share(5, 4, rank, min_share=2) for rank in range(4)]
    [(0, 3), (3, 5), (5, 5), (5, 5)]
    """
    num_shares, base, extra = _split(num_items, world_size, min_share)
    if rank >= num_shares:
        return (num_items, num_items)
    start = rank * base + min(rank, extra)
    return (start, start + base + (rank < extra))


def _split(num_items: int, world_size: int, min_share: int) -> tuple[int, int, int]:
    """Number of shares, items per share, and how many of the first shares hold one more."""
    num_shares = max(1, min(world_size, num_items // min_share))
    return num_shares, *divmod(num_items, num_shares)


def deal(
    progress: EpochProgress,
    members: Sequence[str],
    *,
    batch_size: int,
    min_share: int = MIN_SHARE,
    global_batch: GlobalBatch | None = None,
) -> tuple[EpochProgress, Window]:
    """Deal the next window: up to `batch_size` positions for each member.

    Args:
        progress: How far the epoch is.
        members: Ids in rank order.
        batch_size: Batch size of each member.
        min_share: The smallest share, unless `batch_size` is smaller. With 1 and one member, windows are the
            batches of an ordinary loader.
        global_batch: If given, the window is one: the batches of an ordinary loader with its size.

    Returns:
        The progress with the window dealt, and the window.

    Raises:
        ValueError: Nothing is left to deal.
    """
    remaining = progress.remaining
    if remaining <= 0:
        raise ValueError(f"the epoch is over. Received: cursor={progress.cursor}, slots={progress.slots}")
    if global_batch is not None:
        stop = progress.cursor + min(remaining, global_batch.size)
        min_share = MIN_SHARE if global_batch.piece == 1 < batch_size else 1
        window = Window(progress.cursor, stop, tuple(members), min_share, global_batch.piece)
    else:
        min_share = min(min_share, batch_size)
        stop = progress.cursor + _window_size(remaining, batch_size * len(members), min_share)
        window = Window(progress.cursor, stop, tuple(members), min_share)
    epoch, length, _, returned, uncommitted, steps = progress
    return EpochProgress(epoch, length, stop, returned, (*uncommitted, window), steps + 1), window


def deal_counts(progress: EpochProgress, members: Sequence[str], counts: Sequence[int]) -> tuple[EpochProgress, Window]:
    """Deal the next window, of which each member gets this number of positions.

    Raises:
        ValueError: There is nothing to deal, or more than is left.
    """
    total = sum(counts)
    if not 0 < total <= progress.remaining:
        raise ValueError(f"expected 1 to {progress.remaining} positions. Received: counts={tuple(counts)}")
    window = Window(progress.cursor, progress.cursor + total, tuple(members), counts=tuple(counts))
    uncommitted = (*progress.uncommitted, window)
    return progress._replace(cursor=window.stop, uncommitted=uncommitted, steps=progress.steps + 1), window


def local_batch(batch_size: int, num_members: int, limit: int | None) -> int:
    """Positions of each member in a step, if all members together have a limit.

    The rule of Or, Zhang and Freedman (2020), "Resource Elasticity in Distributed Deep Learning": each member has a
    batch of its own until all of them together would exceed the limit; from there on, they share the limit.

    Args:
        batch_size: Positions of a member's own batch.
        num_members: At least 1.
        limit: Positions of a step of all members; None: none. No member has fewer than `MIN_SHARE` for it.

    >>> [local_batch(32, members, 100) for members in (1, 2, 3, 4, 200)]
    [32, 32, 32, 25, 2]
    """
    if limit is None:
        return batch_size
    return min(batch_size, max(MIN_SHARE, limit // num_members))


def whole_windows(progress: EpochProgress, num_members: int, *, batch_size: int) -> tuple[EpochProgress, range]:
    """Deal the next windows at once that are whole and hold no returned position.

    The share of rank `r` in a window that starts at slot `s` is `s + r·batch_size … s + (r + 1)·batch_size`.

    Returns:
        The progress after them (as if each had been committed), and the slot at which each starts.
    """
    window = batch_size * num_members
    # The last windows may be cut to size: see `_window_size`.
    num = max(0, min(progress.remaining // window - 1, (progress.length - progress.cursor) // window))
    starts = range(progress.cursor, progress.cursor + num * window, window)
    return progress._replace(cursor=progress.cursor + num * window, steps=progress.steps + num), starts


def commit(progress: EpochProgress, contributors: Iterable[str]) -> tuple[EpochProgress, Commit]:
    """Commit the uncommitted windows: a gradient reduction of `contributors` has completed."""
    present = frozenset(contributors)
    committed: list[Range] = []
    returned: list[Range] = []
    for window in progress.uncommitted:
        if window.piece or present.issuperset(window.members):
            committed += progress.ranges((window.start, window.stop))
            continue
        for member in window.members:
            ranges = progress.ranges(window.slice_of(member))
            (committed if member in present else returned).extend(ranges)
    epoch, length, cursor, behind, _, steps = progress
    if returned:
        behind += tuple(position for start, stop in returned for position in range(start, stop))
    return EpochProgress(epoch, length, cursor, behind, (), steps), Commit(tuple(committed), tuple(returned))


def weights(
    uncommitted: Sequence[Window], members: Sequence[str], *, samples: Callable[[Range], int] | None = None
) -> list[float]:
    """Weight of each member's gradient, so that their sum is the mean over all samples.

    A gradient is the sum of a member's mean gradients in the windows, divided by the number of windows. A window in
    which a member has no share adds nothing to it, so what is left weighs the more.

    Args:
        uncommitted: Windows whose gradients are reduced together.
        members: Ids of the contributors in rank order.
        samples: Number of samples at these slots, if it is not that of the slots.

    Returns:
        One weight per member. They sum to one if each member has a share of each window, or of none. In a reduction
        that no window belongs to, all weigh the same; if none of these members has a sample in the windows, all weigh
        nothing. Of a global batch each weight is one: what its members reduce are parts of the mean already.
    """
    if any(window.piece for window in uncommitted):
        return [1.0] * len(members)  # each gradient is a sum of shares already
    counts, num_shares = [0] * len(members), [0] * len(members)
    for window in uncommitted:
        shares = window.shares()
        for rank, member in enumerate(members):
            if shares.get(member):
                counts[rank] += shares[member] if samples is None else samples(window.slice_of(member))
                num_shares[rank] += 1
    total = sum(counts)
    if total == 0:
        return [0.0 if uncommitted else 1.0 / len(members)] * len(members)
    return [
        count / total * (len(uncommitted) / num) if num else 0.0 for count, num in zip(counts, num_shares, strict=True)
    ]


def num_steps(
    progress: EpochProgress,
    world_size: int,
    *,
    batch_size: int,
    min_share: int = MIN_SHARE,
    global_batch: GlobalBatch | None = None,
) -> int:
    """Steps of the whole epoch, if the world does not change any more."""
    if global_batch is not None:
        return progress.steps - (-progress.remaining // global_batch.size)
    window, remaining = batch_size * world_size, progress.remaining
    whole = max(0, remaining // window - 1)  # the rule for the last ones can only concern what comes after
    remaining -= whole * window
    steps = progress.steps + whole
    while remaining > 0:
        remaining -= _window_size(remaining, window, min(min_share, batch_size))
        steps += 1
    return steps


def _window_size(remaining: int, window: int, min_share: int) -> int:
    """Slots of the next window; a single one never remains, nor does a share of one (see MIN_SHARE)."""
    size = min(window, remaining)
    if remaining - size == 1 and min_share > 1:
        return size - 1 if size > MIN_SHARE else size + 1
    return size


def shuffled(length: int, *, seed: int, epoch: int, stream: Sequence[int] = ()) -> np.ndarray:
    """Order of a shuffled epoch: a pure function of its arguments, the same on every platform.

    Args:
        length: Number of samples.
        seed: Seed of the run.
        epoch: Index of the epoch.
        stream: Which of several orders of an epoch it is.

    Returns:
        Indices of samples, shape (length,), int64. Sorted by the raw output of PCG64, whose stream NumPy keeps
        fixed (unlike that of its shuffle).
    """
    keys = np.random.PCG64([seed, epoch, length, *stream]).random_raw(length)
    return np.argsort(keys, kind="stable")
