"""Pauses that double with each failure in a row."""

from __future__ import annotations

_MOST_DOUBLINGS = 64
"""Each pause is as long as it may be by then. Something may fail for months, and 2.0**1024 overflows."""


def doubled_s(first_s: float, number: int, *, most_s: float) -> float:
    """A pause, in seconds.

    Args:
        first_s: The first one.
        number: How often it is doubled.
        most_s: The longest one.

    >>> [doubled_s(1.0, number, most_s=30.0) for number in (0, 1, 4, 5, 5000)]
    [1.0, 2.0, 16.0, 30.0, 30.0]
    """
    return min(most_s, first_s * 2.0 ** min(number, _MOST_DOUBLINGS))
