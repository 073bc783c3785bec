"""Workers that come back name their views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ef_common.core import membership
from ef_common.core.membership import Idle, Phase, Returned, Serving, Settings, Shortage
from ef_common.core.quorum import ChainLink
from ef_common.core.view import Member, View
from ef_common.core.watermark import Watermark
from ef_common.protocol import wire
from ef_common.protocol.peer import Coming, Peer
from ef_common.protocol.returns import Returns, is_elsewhere, is_in_order
from ef_common.protocol.sessions import Sessions
from ef_common.testing.simulation.schedule import FAMILIES
from ef_common.testing.simulation.simulation import simulate
from tests.diagrams import cases, rows, states, watch
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
    peer.coming = Coming.RETURNING
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
    assert not returns._waiting


def test_views_of_the_chain_need_not_be_told() -> None:
    returns, peer, (report, _) = Returns(), Peer("", 0.0), returning([LINK])
    assert returns.hear(peer, report, STATE) == []
    assert not returns._waiting
    assert returns.event(report) == replace(report.event, received=(LINK,))


def test_views_that_nobody_needs_are_not_kept() -> None:
    returns, peer, (report, told) = Returns(), Peer("", 0.0), returning([LINK])
    assert not returns.learn(peer, told.views)
    assert len(returns.hear(peer, report, Idle())) == 1


def test_report_whose_worker_goes_while_others_are_taken_is_not_taken() -> None:
    returns, first, second = Returns(), Peer("", 0.0), Peer("", 0.0)
    for peer in (first, second):
        returns.hear(peer, REPORT, Idle())
    returns.learn(first, TOLD.views)
    taken = []
    for peer, _ in returns.ready():
        taken.append(peer)
        returns.forget(second)
    assert taken == [first]


def state(returns: Returns, peer: Peer) -> str:
    return "gone" if peer.coming is Coming.WAITING and peer not in returns._waiting else peer.coming.name


REPORT, TOLD = returning([LINK])


def reports(returns: Returns, peer: Peer) -> None:
    returns.hear(peer, REPORT, Idle())


def is_known(returns: Returns, peer: Peer) -> None:
    assert returns.hear(peer, REPORT, STATE) == []


def tells(returns: Returns, peer: Peer) -> None:
    assert returns.learn(peer, TOLD.views)
    assert list(returns.ready()) == [(peer, REPORT)]


def another_tells(returns: Returns, peer: Peer) -> None:
    other = Peer("", 0.0)
    reports(returns, other)
    assert returns.learn(other, TOLD.views)
    assert [one for one, _ in returns.ready()] == [peer, other]


def goes(returns: Returns, peer: Peer) -> None:
    """Three have been asked; when one of them goes, the fourth is."""
    others = [Peer("", 0.0) for _ in range(3)]
    for other in others:
        reports(returns, other)
    assert [other.recalled != () for other in others] == [True, True, False]
    assert [write.peer for write in returns.forget(peer)] == [others[2]]


def comes(returns: Returns, peer: Peer) -> None:
    Sessions().adopt(peer, MEMBERS[0], proof="", returning=True)


WITNESSES: dict[str, tuple[tuple[Callable[[Returns, Peer], None], ...], ...]] = {
    "NEW → RETURNING": ((comes,),),
    "RETURNING → HEARD": ((comes, is_known),),
    "RETURNING → WAITING": ((comes, reports),),
    "WAITING → HEARD": ((comes, reports, tells), (comes, reports, another_tells)),
    "WAITING → gone": ((comes, reports, goes),),
    "HEARD → BACK": ((comes, is_known, Returns.accept),),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(Returns) == list(WITNESSES)
    assert states(Returns) == set(Coming.__members__)


@pytest.mark.parametrize(("row", "case"), cases(WITNESSES))
def test_each_row_of_the_diagram_is_true(row: str, case: int) -> None:
    returns, peer = Returns(), Peer("", 0.0)
    *first, last = WITNESSES[row][case]
    for act in first:
        act(returns, peer)
    before = state(returns, peer)
    last(returns, peer)
    assert row == f"{before} → {state(returns, peer)}"


def test_nothing_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = watch(monkeypatch, Peer, "coming")
    for seed in range(15):
        assert simulate(FAMILIES["failover"](seed)).violation is None
    assert set(changes) == {row for row in WITNESSES if "gone" not in row}
