"""Workers that come back name their views."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ef_common.core import membership
from ef_common.core.membership import Idle, Phase, Returned, Serving, Settings, Shortage
from ef_common.core.quorum import ChainLink
from ef_common.core.view import Member, View
from ef_common.core.watermark import Watermark
from ef_common.protocol import wire
from ef_common.protocol.peer import Peer
from ef_common.protocol.returns import Returns, is_elsewhere, is_in_order
from tests.protocol.returning import returning

MEMBERS = tuple(Member(name, f"n{name}", "") for name in "ab")
LINK = ChainLink(View(3, MEMBERS), over=True)
STATE = Serving(generation=3, view=LINK.view, chain=(LINK,))
HELD = replace(STATE, shortage=Shortage("1 of 2"))
NEWER = ChainLink(View(4, MEMBERS[:1], base=3))


@pytest.mark.parametrize(
    ("worker", "received", "promised", "state", "expected"),
    [
        (0, (LINK,), 3, STATE, False),
        (0, (LINK, NEWER), 4, STATE, True),
        (0, (LINK,), 4, STATE, True),  # it has promised to be in another one
        (2, (LINK,), 4, STATE, False),  # no member: it hears that it is out
        (0, (LINK, NEWER), 4, HELD, False),
        (0, (LINK, NEWER), 4, Idle(), False),
    ],
)
def test_news_of_a_view_that_is_not_ours(
    worker: int, received: tuple[ChainLink, ...], promised: int, state: membership.Membership, expected: bool
) -> None:
    member = (*MEMBERS, Member("x", "nx", ""))[worker]
    event = Returned(member, Phase.MEMBER, promised=promised, settled=3, received=received)
    assert is_elsewhere(event, state, Settings()) is expected
    assert not is_elsewhere(event, state, Settings(on_minority="continue"))


def test_order_of_what_a_worker_that_comes_back_may_say() -> None:
    peer, (report, told) = Peer("", 0.0), returning([LINK])
    heartbeat = wire.Heartbeat(Watermark(1, 2))
    assert [is_in_order(peer, one) for one in (report, told, heartbeat, wire.Relay(3, "k", b"v"))] == [
        False,
        False,
        True,
        True,
    ]
    peer.returning = True
    assert [is_in_order(peer, one) for one in (report, told, heartbeat, wire.Relay(3, "k", b"v"))] == [
        True,
        False,
        True,
        False,
    ]
    returns = Returns()
    (recall,) = returns.hear(peer, report, Idle())
    assert recall.peer is peer
    assert is_in_order(peer, told)
    assert returns.learn(peer, told.views)
    assert not is_in_order(peer, told)  # once
    assert list(returns.ready()) == [(peer, report)]
    assert list(returns.ready()) == []
    assert returns.num_waiting == 0


def test_views_of_the_chain_need_not_be_told() -> None:
    returns, peer, (report, _) = Returns(), Peer("", 0.0), returning([LINK])
    assert returns.hear(peer, report, STATE) == []
    assert peer.report is None
    assert returns.event(report) == replace(report.event, received=(LINK,))


def test_views_that_nobody_needs_are_not_kept() -> None:
    returns, peer, (report, told) = Returns(), Peer("", 0.0), returning([LINK])
    assert not returns.learn(peer, told.views)
    assert len(returns.hear(peer, report, Idle())) == 1
