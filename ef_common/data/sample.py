"""A sample that is to be read with random numbers that do not depend on who reads it."""

from __future__ import annotations

from typing import NamedTuple


class Sample(NamedTuple):
    """A sample to read.

    Args:
        at: Its index in the data set, or its number in a stream.
        key: What the random numbers in it are a function of.
    """

    at: int
    key: tuple[int, ...]
