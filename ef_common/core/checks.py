"""Checks of the values of settings."""

from __future__ import annotations


def is_count(value: object, *, least: int) -> bool:
    """Whether the value is an integer (not True or False) and at least this large."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
