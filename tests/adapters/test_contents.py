"""`elasticflow.streams` is a table of contents."""

from __future__ import annotations

import pytest

from elasticflow import streams


def test_contents_are_there_and_nothing_else() -> None:
    for name in streams.__all__:
        assert getattr(streams, name).__name__ == name
    assert dir(streams) == sorted(streams.__all__)
    with pytest.raises(AttributeError, match="no attribute 'lines'"):
        _ = streams.lines
