"""What members publish reaches the others of their view."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest

from ef_common.core.view import Member, View
from ef_common.protocol import wire
from ef_common.protocol.peer import Peer, PeerRefusal
from ef_common.protocol.relay import MAX_RELAYED_BYTES, MAX_VALUE_BYTES, Relaying
from tests.diagrams import cases, rows


def members_of(number: int, generation: int = 3) -> tuple[View, list[Peer]]:
    view = View(generation, tuple(Member(f"w{index:02}", f"n{index}", "") for index in range(number)))
    peers = [Peer("", 0.0) for _ in range(number)]
    for peer, worker in zip(peers, view.ids, strict=True):
        peer.worker = worker
    return view, peers


def test_value_in_a_small_view_goes_to_the_others_at_once() -> None:
    relay, (view, peers) = Relaying(), members_of(3)
    passed = relay.publish(peers[1], wire.Relay(3, "k", b"v"), view, 0.0)
    assert passed == [(wire.Relayed(3, (("k", b"v"),)), ("w00", "w02"))]
    assert relay.due == inf


def test_values_in_a_large_view_are_gathered_and_lost_with_it() -> None:
    relay, (view, peers) = Relaying(), members_of(20)
    for peer in peers[:2]:
        assert relay.publish(peer, wire.Relay(3, "k", b"v"), view, 1.0) == []
    assert relay.due == pytest.approx(1.0004)
    assert relay.publish(peers[0], wire.Relay(3, "k", b"v"), view, 2.0) == []
    assert relay.due == pytest.approx(1.0004)  # the first one waits no longer
    relay.clear()
    assert relay.due == inf
    assert relay.pass_on(view) == []
    relay.publish(peers[0], wire.Relay(3, "k", b"v"), view, 3.0)
    assert relay.pass_on(None) == []
    assert relay.pass_on(view) == []


def test_value_for_another_view_or_of_no_member_goes_to_nobody() -> None:
    relay, (view, peers) = Relaying(), members_of(3)
    assert relay.publish(peers[0], wire.Relay(2, "k", b"v"), view, 0.0) == []
    assert relay.publish(peers[0], wire.Relay(3, "k", b"v"), None, 0.0) == []
    peers[0].worker = "x"
    assert relay.publish(peers[0], wire.Relay(3, "k", b"v"), view, 0.0) == []


def test_member_may_publish_a_bounded_number_of_bytes_in_each_view() -> None:
    relay, (view, peers) = Relaying(), members_of(2)
    whole = wire.Relay(3, "k", bytes(MAX_VALUE_BYTES - 1))
    for _ in range(MAX_RELAYED_BYTES // MAX_VALUE_BYTES):
        relay.publish(peers[0], whole, view, 0.0)
    with pytest.raises(PeerRefusal, match="in one view"):
        relay.publish(peers[0], wire.Relay(3, "", b"v"), view, 0.0)
    with pytest.raises(PeerRefusal):
        relay.publish(peers[1], wire.Relay(3, "k", bytes(MAX_VALUE_BYTES)), view, 0.0)
    after, _ = members_of(2, generation=4)
    assert relay.publish(peers[0], wire.Relay(4, "k", b"v"), after, 0.0)


LARGE, PEERS = members_of(20)


def publishes(relay: Relaying) -> None:
    relay.publish(PEERS[0], wire.Relay(3, "k", b"v"), LARGE, 0.0)


def passes_on(relay: Relaying) -> None:
    assert len(relay.pass_on(LARGE)) == 1


WITNESSES: dict[str, tuple[tuple[Callable[[Relaying], None], ...], ...]] = {
    "empty → gathering": ((publishes,),),
    "gathering → empty": ((publishes, passes_on), (publishes, Relaying.clear)),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(Relaying) == list(WITNESSES)


@pytest.mark.parametrize(("row", "case"), cases(WITNESSES))
def test_each_row_of_the_diagram_is_true(row: str, case: int) -> None:
    relay = Relaying()
    shown = []
    for act in WITNESSES[row][case]:
        shown = ["empty" if relay.due == inf else "gathering"]
        act(relay)
    assert row == " → ".join([*shown, "empty" if relay.due == inf else "gathering"])
