"""The list of an epoch's shards, which must be the same in all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash

from ef_common.collectives import operations
from ef_common.errors import UsageError
from ef_common.session import Session

_CHUNKS = 64


def digest(shards: Sequence[Any]) -> str:
    """A checksum of a list of shards, made of their `repr`.

    Cost: 0.5 µs for each shard; that of one shard for a whole `range`.
    """
    found = xxhash.xxh3_128()
    for shard in [shards] if isinstance(shards, range) else shards:
        found.update(repr(shard).encode("utf-8", "surrogatepass"))
        found.update(b"\0")
    return f"{len(shards)} {found.hexdigest()}"


def agree_on_shards(session: Session, shards: Sequence[Any]) -> str:
    """Compare the lists of all workers, which call this together. Returns their checksum.

    Cost: a gather of 40 bytes.

    Raises:
        UsageError: In all of them, if the lists differ. It names the first difference.
    """
    mine = digest(shards)
    everybody, view = operations.gather(session, mine, what="checksum of the list of shards")
    if len(set(everybody)) > 1:
        other = next(rank for rank, found in enumerate(everybody) if found != everybody[0])
        where = _first_difference(session, shards)
        nodes = [view.members[rank].node for rank in (0, other)]
        raise UsageError(
            "the workers have different lists of shards, so they cannot share them. `shards()` must return the same "
            "list in the same order in all of them (sort what a folder lists). "
            f"Received: on rank 0 (node {nodes[0]}) and rank {other} (node {nodes[1]}), {where}"
        )
    return mine


def check_shards(shards: Sequence[Any], expected: str) -> None:
    """Compare a list with the checksum of the training that is continued.

    Raises:
        UsageError: They differ.
    """
    found = digest(shards)
    if found != expected:
        raise UsageError(
            "this worker has another list of shards than the training that it continues. `shards()` must return the "
            "same list in the same order within an epoch. "
            f"Expected: {expected.split()[0]} shards with checksum {expected.split()[1][:8]}. "
            f"Received: {found.split()[0]} with {found.split()[1][:8]}"
        )


def _first_difference(session: Session, shards: Sequence[Any]) -> str:
    """The first difference between the lists. All members call this together, and get the same answer."""
    low, high = 0, max(operations.gather(session, len(shards), what="number of shards")[0])
    while high - low > 1:
        step = -(-(high - low) // _CHUNKS)
        chunks = [digest(list(shards[start : start + step])) for start in range(low, high, step)]
        everybody, _ = operations.gather(session, chunks, what="checksums of parts of the list of shards")
        number = next(n for n, of_chunk in enumerate(zip(*everybody, strict=True)) if len(set(of_chunk)) > 1)
        low, high = low + number * step, min(high, low + (number + 1) * step)
    shown = repr(shards[low]) if low < len(shards) else "no such shard"
    everybody, _ = operations.gather(session, shown, what="a shard")
    other = next((found for found in everybody if found != everybody[0]), everybody[0])
    return f"shard {low} is {everybody[0]} and {other}"
