"""What each connection of a coordinator is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ef_common.core import membership
from ef_common.core.view import Member, View
from ef_common.protocol import fields, sessions, wire
from ef_common.protocol.peer import Coming, Peer, PeerRefusal
from ef_common.protocol.server_outputs import Close, Write, WriteOrReset
from ef_common.protocol.sessions import Sessions
from tests.diagrams import cases, rows

MEMBERS = tuple(Member(f"w{index}", f"n{index}", "10.0.0.1", standby=index % 2) for index in range(4))
VIEW = View(3, MEMBERS)


def connected(*members: Member) -> tuple[Sessions, list[Peer]]:
    known = Sessions()
    peers = [known.connect("10.0.0.1", float(index)) for index in range(len(members))]
    for peer, member in zip(peers, members, strict=True):
        known.adopt(peer, member, proof=f"proof of {member.id}", returning=False)
    return known, peers


def test_strangers_that_are_late_or_too_many_are_named_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_STRANGERS", 2)
    known = Sessions()
    peers = [known.connect("10.0.0.9", when) for when in (0.0, 1.0, 2.5)]
    assert known.is_crowded
    assert known.oldest(1) == peers[:1]
    assert known.overdue(2.5, 1.0) == peers[:1]  # a short timeout is too short for a stranger
    assert known.overdue(3.5, 1.0) == peers[:2]
    assert known.overdue(3.5, 3.0) == peers[:1]
    assert not known.forget(peers[0])  # no worker
    known.adopt(peers[1], MEMBERS[0], proof="", returning=False)
    assert not known.is_crowded
    assert known.overdue(9.0, 1.0) == peers[2:]


def test_places_are_those_of_all_who_are_connected_in_number_and_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    known, peers = connected(*MEMBERS[:2])
    known.forget(peers[1])
    known.evict(peers[1], "slow")
    monkeypatch.setattr(sessions, "MAX_WORKERS", 2)
    with pytest.raises(PeerRefusal, match="2 are connected"):
        known.check_room(MEMBERS[2])
    known.check_room(MEMBERS[0])  # it has a place
    known.discard(peers[1])
    monkeypatch.setattr(wire, "MAX_MEMBERS_BYTES", 2 * fields.size_of(MEMBERS[0]))
    known.check_room(MEMBERS[2])
    monkeypatch.setattr(wire, "MAX_MEMBERS_BYTES", 2 * fields.size_of(MEMBERS[0]) - 1)
    with pytest.raises(PeerRefusal, match="1 are connected, all that fit in a view"):
        known.check_room(MEMBERS[2])


def test_worker_that_is_suspended_is_told_once_and_only_if_others_go_on_without_it() -> None:
    known, peers = connected(*MEMBERS)
    for peer in peers:
        assert known.forget(peer)
    assert known.suspend(peers[0], "silent") == [Close(peers[0], wire.encode(wire.Eviction("silent")))]
    assert [known.suspend(peer, "silent") for peer in peers[1::2]] == [[], []]
    assert known.tell_out(View(4, MEMBERS[:2])) == [WriteOrReset(peers[3], wire.encode(wire.Eviction("silent")))]
    assert known.tell_out() == []
    assert [known.is_out(peer) for peer in peers] == [False, True, False, True]
    assert [known.discard(peer) for peer in (peers[3], peers[3])] == [True, False]
    assert known.discard_all() == [Close(peers[1])]
    assert not known._out


def test_worker_that_is_gone_before_it_is_told_is_told_nothing() -> None:
    known, peers = connected(MEMBERS[1])
    known.forget(peers[0])
    known.suspend(peers[0], "silent")
    known.discard(peers[0])
    assert known.tell_out() == []


def test_message_goes_to_those_who_are_connected() -> None:
    known, peers = connected(*MEMBERS[:2])
    line = wire.encode(membership.Resign(""))
    assert known.tell(membership.Resign(""), "w0", "w3", "w1", can_wait=True) == [
        Write(peer, line, True) for peer in peers
    ]
    assert [known.proof_to(worker) for worker in ("w1", "w3")] == ["proof of w1", "0" * 64]


def test_most_members_are_here_if_more_than_half_are_and_have_told_where_they_stand() -> None:
    known, peers = connected(*MEMBERS[:3])
    assert not known.has_most_of(None)
    assert known.has_most_of(VIEW)
    peers[0].coming = Coming.RETURNING
    assert not known.has_most_of(VIEW)


def test_connection_that_another_one_has_replaced_is_none_of_a_worker() -> None:
    known, peers = connected(MEMBERS[0])
    known.forget(peers[0])
    second = known.connect("10.0.0.1", 5.0)
    known.adopt(second, MEMBERS[0], proof="", returning=True)
    assert not known.forget(peers[0])
    assert known.workers == {"w0": second}


ALONE, BACKED = MEMBERS[0], MEMBERS[1]
"""The node of the second one has a standby."""


def state(known: Sessions, peer: Peer) -> str:
    if peer in known.oldest(9):
        return "stranger"
    if peer in known.workers.values():
        return "worker"
    if peer.uplink is not None:
        return "downlink"
    if not known.is_out(peer):
        return "gone"
    return "out" if known._out[peer] is None else "suspended"


def adopts(member: Member) -> Callable[[Sessions, Peer], object]:
    return lambda known, peer: known.adopt(peer, member, proof="", returning=False)


def evicts(known: Sessions, peer: Peer) -> None:
    known.forget(peer)
    known.evict(peer, "silent")


def suspends(known: Sessions, peer: Peer) -> None:
    known.forget(peer)
    known.suspend(peer, "silent")


def is_attached(known: Sessions, peer: Peer) -> None:
    worker = known.connect("10.0.0.1", 5.0)
    known.adopt(worker, BACKED, proof="", returning=False)
    known.attach(peer, worker)


def discards_all(known: Sessions, peer: Peer) -> None:
    known.discard_all()


def others_go_on(known: Sessions, peer: Peer) -> None:
    assert known.tell_out(View(4, MEMBERS[:1])) == [WriteOrReset(peer, wire.encode(wire.Eviction("silent")))]


WITNESSES: dict[str, tuple[tuple[Callable[[Sessions, Peer], object], ...], ...]] = {
    "stranger → worker": ((adopts(ALONE),), (adopts(BACKED),)),
    "stranger → gone": ((Sessions.forget,),),
    "stranger → downlink": ((is_attached,),),
    "worker → gone": (
        (adopts(ALONE), Sessions.forget),
        (adopts(BACKED), Sessions.forget),
        (adopts(ALONE), evicts),
        (adopts(ALONE), suspends),
    ),
    "worker → out": ((adopts(BACKED), evicts),),
    "worker → suspended": ((adopts(BACKED), suspends),),
    "suspended → out": ((adopts(BACKED), suspends, others_go_on),),
    "suspended → gone": (
        (adopts(BACKED), suspends, Sessions.discard),
        (adopts(BACKED), suspends, discards_all),
    ),
    "out → gone": ((adopts(BACKED), evicts, Sessions.discard), (adopts(BACKED), evicts, discards_all)),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(Sessions) == list(WITNESSES)


@pytest.mark.parametrize(("row", "case"), cases(WITNESSES))
def test_each_row_of_the_diagram_is_true(row: str, case: int) -> None:
    known = Sessions()
    peer = known.connect("10.0.0.9", 0.0)
    *first, last = WITNESSES[row][case]
    for act in first:
        act(known, peer)
    before = state(known, peer)
    last(known, peer)
    assert row == f"{before} → {state(known, peer)}"
