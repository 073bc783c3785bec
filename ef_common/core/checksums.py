"""Checksums of the parts of a batch that workers have read."""

from __future__ import annotations

from collections.abc import Sequence

Checksums = Sequence[int | None]
"""Checksums of the parts of a batch; None where there is nothing to compare."""


def are_alike(one: Checksums, other: Checksums) -> bool:
    """Whether two batches may be the same; True for a batch without parts, of which nothing is known."""
    if not one or not other:
        return True
    return len(one) == len(other) and all(a == b for a, b in zip(one, other, strict=True) if None not in (a, b))
