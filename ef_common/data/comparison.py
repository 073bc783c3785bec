"""Checks that all workers read the same data.

Two batches are compared part by part, by checksums. A part that comes out another one each time that this worker reads
the batch (augmented with random numbers that nobody can share, say) tells nothing, and is left out. Where a batch can
only be read once, such a part is known by the others, which are alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from ef_common.collectives import operations
from ef_common.core.checksums import Checksums, are_alike
from ef_common.session import Session

_MAX_CHECKED_BYTES = 1 << 20
_MAX_CHECKED_OBJECTS = 1000
_NUM_READS = 16


def checksum(array: Any) -> int:
    """Checksum of the shape and the first MiB of an array of any type."""
    array = np.ascontiguousarray(array)
    if array.dtype.hasobject:
        content = repr(array.reshape(-1)[:_MAX_CHECKED_OBJECTS].tolist()).encode()
    else:
        content = array.reshape(-1).view(np.uint8)[:_MAX_CHECKED_BYTES].tobytes()
    return zlib.crc32(content, zlib.crc32(repr(array.shape).encode()))


def fingerprint(before: int, found: Checksums) -> int:
    """The fingerprint of a sequence of batches, from that of all but the last one."""
    return zlib.crc32(repr(list(found)).encode(), before)


class Fingerprints:
    """A fingerprint of each part of a sequence of batches.

    Attributes:
        parts: The fingerprints.
    """

    def __init__(self) -> None:
        self.parts: list[int] = []
        self._num_batches = 0
        self._newest: Checksums = []
        self._varying: set[int] = set()

    def add(self, found: Checksums) -> None:
        """The next batch has these checksums."""
        pairs = zip_longest(self._newest, found) if self._num_batches else ()
        self._varying.update(part for part, (one, other) in enumerate(pairs) if one != other)
        self._newest = found
        self._num_batches += 1
        self.parts = [fingerprint(before or 0, [value]) for before, value in zip_longest(self.parts, found)]

    def without_noise(self, others: Iterable[Sequence[int | None]]) -> list[int | None]:
        """Leave out the parts in which others differ, if they have read the same batches.

        That is so if a part is alike that tells batches apart: labels do, and a mask of ones that is the same in each
        batch does not. If none is, all parts are returned.
        """
        others = list(others)
        same = {
            part
            for part, value in enumerate(self.parts)
            if all(len(other) == len(self.parts) and other[part] == value for other in others)
        }
        tells = same if self._num_batches == 1 else same & self._varying
        return [value if part in same or not tells else None for part, value in enumerate(self.parts)]


def without_noise(found: Checksums, read: Callable[[], Checksums]) -> list[int | None]:
    """Leave out the parts that differ when the batch is read again a few times."""
    again = [read() for _ in range(_NUM_READS)]
    return [value if all(other[part] == value for other in again) else None for part, value in enumerate(found)]


def compare(
    session: Session,
    found: Checksums,
    denoise: Callable[[dict[str, Checksums]], Checksums],
    note: Callable[[Checksums], object] = lambda found: None,
) -> dict[str, Checksums]:
    """Compare what all members have read. They call this together.

    Args:
        session: The worker's session.
        found: Checksums of a batch that this worker has read.
        denoise: Leaves out what tells nothing, if the batches differ; called with what each worker has read.
        note: Takes down what this worker has read, before another one can learn from this worker that they differ: that
            one raises, and this worker may hear of its end in place of its answer.

    Returns:
        What each worker has read, by its id; the same in all of them. See `differ`.
    """
    everybody = _gather(session, found)
    if differ(everybody):
        found = denoise(everybody)
        note(found)
        return _gather(session, found)
    note(found)
    return everybody


def differ(everybody: dict[str, Checksums]) -> bool:
    """Whether two workers have read different data."""
    found = list(everybody.values())
    return not all(are_alike(found[0], other) for other in found[1:])


def _gather(session: Session, found: Checksums) -> dict[str, Checksums]:
    parts, view = operations.gather(session, list(found), what="checksum")
    return dict(zip(view.ids, parts, strict=False))
