"""What a coordinator writes to the log."""

from __future__ import annotations

import logging

import pytest

from ef_common.core.membership import Serving, Shortage
from ef_common.core.view import Member, View
from ef_common.protocol.journal import Journal

VIEW = View(3, (Member("a", "na", ""),))
SERVING = Serving(generation=3, view=VIEW)
HELD = Serving(generation=3, view=VIEW, shortage=Shortage("1 of 2"))


def levels(caplog: pytest.LogCaptureFixture) -> list[int]:
    found = [record.levelno for record in caplog.records]
    caplog.clear()
    return found


def test_each_kind_of_trouble_is_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    journal = Journal()
    for kind in ("crowd", "crowd", "slow reader"):
        journal.notice(kind, "%s", "x")
    assert levels(caplog) == [logging.WARNING, logging.DEBUG, logging.WARNING]


def test_decision_is_news_if_it_brings_a_view_and_a_warning_if_it_holds_one_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    journal = Journal()
    journal.decided(None, SERVING, "a has arrived")
    assert caplog.messages == ["view 3, 1 members: a has arrived"]
    assert levels(caplog) == [logging.INFO]
    for state, reason in (
        (SERVING, "ready"),
        (HELD, ""),
        (HELD, "lost"),
        (HELD, "lost"),
        (SERVING, ""),
        (HELD, "lost"),
    ):
        journal.decided(VIEW, state, reason)
    assert levels(caplog) == [logging.DEBUG, logging.WARNING, logging.DEBUG, logging.DEBUG]
    journal.decided(VIEW, SERVING, "back")
    journal.decided(VIEW, HELD, "lost")
    assert levels(caplog) == [logging.DEBUG, logging.WARNING]
