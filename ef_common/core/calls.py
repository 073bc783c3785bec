"""The call that a member is in travels with each first message, so that different calls never meet unnoticed.

A call is a line of text that says what a worker does ("barrier 'fit'", "reduction of the gradients"), equal in all
members that are in it. It travels in a header of a fixed size, so that whatever two members send each other can be read
as far as that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ef_common.core.view import Member

HEADER_BYTES = 128
"""Also keeps what follows it aligned for every type of numbers."""
LENGTH_BYTES = 8
_TEXT_BYTES = HEADER_BYTES - LENGTH_BYTES
_DIGEST_BYTES = 8
_MOST_NAMED = 8


def header(call: str, num_bytes: int) -> bytes:
    """A header: the length of the content that follows, and the call.

    >>> len(header("barrier", 0)) == len(header("x" * 1000, 1 << 40)) == HEADER_BYTES
    True
    """
    return num_bytes.to_bytes(LENGTH_BYTES, "big") + _text(call).ljust(_TEXT_BYTES, b"\0")


def _text(call: str) -> bytes:
    text = call.encode()
    if len(text) <= _TEXT_BYTES:
        return text
    digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).hexdigest().encode()
    return text[: _TEXT_BYTES - len(digest) - 1] + b"#" + digest


def length_in(frame: bytes) -> int:
    """The length in a header.

    >>> length_in(header("barrier", 5) + b"12345")
    5
    """
    return int.from_bytes(frame[:LENGTH_BYTES], "big")


def call_in(frame: bytes) -> str:
    """The call in a header; of a very long one, its beginning.

    >>> call_in(header("barrier", 5) + b"12345")
    'barrier'
    """
    return frame[LENGTH_BYTES:HEADER_BYTES].rstrip(b"\0").decode(errors="replace")


def mismatch(calls: Sequence[str], members: Sequence[Member]) -> str:
    """What is wrong if the members, in rank order, are in these calls; empty if all are in one.

    >>> members = [Member("a", "node-0", ""), Member("b", "node-1", "")]
    >>> mismatch(["barrier", "barrier"], members)
    ''
    >>> mismatch(["barrier", "reduction of the gradients"], members).partition("Received: ")[2]
    'rank 0 (node node-0) in barrier; rank 1 (node node-1) in reduction of the gradients'
    """
    if len(set(calls)) < 2:
        return ""
    ranks: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks.setdefault(call, []).append(rank)
    parts = [f"{_named(some, members)} in {call}" for call, some in ranks.items()]
    return (
        "workers have made different calls that exchange values, so none of them can be completed. Save a checkpoint, "
        "log a value with sync_dist=True, gather, reduce, broadcast or wait in all workers or in none, and not, for "
        f"example, under `if trainer.is_global_zero:`. Received: {'; '.join(parts)}"
    )


def _named(ranks: Sequence[int], members: Sequence[Member]) -> str:
    names = [f"{rank} (node {members[rank].node})" for rank in ranks[:_MOST_NAMED]]
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}{more}"
