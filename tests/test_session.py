"""What a session does by itself, before any other member is there."""

from __future__ import annotations

from typing import Any

import pytest

from ef_common.core.view import Member
from ef_common.errors import JobFinished
from ef_common.session import Session


class Channel:
    """A line to a coordinator that tells a newcomer, once it is ready, that the job is over."""

    change_pending = False

    def __init__(self, order: list[str]) -> None:
        self._order = order

    def start(self, on_view: Any) -> bool:
        return True

    def send(self, kind: str, generation: int = 0) -> None:
        self._order.append(kind)

    def next_view(self, after: int) -> Any:
        raise JobFinished("it is over")


class State:
    def __init__(self, order: list[str]) -> None:
        self._order = order

    def prepare(self) -> None:
        self._order.append("prepare")


def test_newcomer_prepares_before_the_others_are_told_to_wait_for_it() -> None:
    order: list[str] = []
    channel: Any = Channel(order)
    session = Session(Member("w", "n", ""), channel=channel, groups=None)  # type: ignore[arg-type]
    session.state = State(order)  # type: ignore[assignment]
    assert session.start()
    with pytest.raises(JobFinished):
        session.join()
    assert order == ["prepare", "ready"]
