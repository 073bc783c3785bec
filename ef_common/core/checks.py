"""Checks of the values of settings."""

from __future__ import annotations


def is_count(value: object, *, least: int) -> bool:
    """Whether it is an integer (True and False are none), and at least so large."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
