"""Checks that all workers read the same data.

Two batches are compared part by part, by checksums. A part that comes out another one each time that this worker reads
the batch (augmented with random numbers that nobody can share, say) tells nothing, and is left out.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
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


def without_noise(found: Checksums, read: Callable[[], Checksums]) -> list[int | None]:
    """Leave out the parts that differ when the batch is read again a few times."""
    again = [read() for _ in range(_NUM_READS)]
    return [value if all(other[part] == value for other in again) else None for part, value in enumerate(found)]


def compare(
    session: Session,
    found: Checksums,
    read: Callable[[], Checksums] | None,
    note: Callable[[Checksums], object] = lambda found: None,
) -> dict[str, Checksums]:
    """Compare what all members have read. They call this together.

    Args:
        session: The worker's session.
        found: Checksums of a batch that this worker has read.
        read: Reads it again; None if it cannot be had again.
        note: Takes down what this worker has read, before another one can learn from this worker that they differ: that
            one raises, and this worker may hear of its end in place of its answer.

    Returns:
        What each worker has read, by its id; the same in all of them. See `differ`.
    """
    if read is not None:
        everybody = _gather(session, found)
        if not differ(everybody):
            note(found)
            return everybody
        found = without_noise(found, read)
    note(found)
    return _gather(session, found)


def differ(everybody: dict[str, Checksums]) -> bool:
    """Whether two workers have read different data."""
    found = list(everybody.values())
    return not all(are_alike(found[0], other) for other in found[1:])


def _gather(session: Session, found: Checksums) -> dict[str, Checksums]:
    parts, view = operations.gather(session, list(found), what="checksum")
    return dict(zip(view.ids, parts, strict=False))
