"""The second connection of a worker, on which only the coordinator speaks: a real client and a real server."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from ef_common.core import membership
from ef_common.core.membership import Settings
from ef_common.core.progress import Limits
from ef_common.core.view import Member, View
from ef_common.errors import Evicted
from ef_common.protocol import wire
from ef_common.protocol.client import Client
from ef_common.protocol.client_outputs import Connect, CoordinatorLink, Disconnect, Leave, Send
from ef_common.protocol.introduction import Introduction
from ef_common.protocol.peer import End, Peer
from ef_common.protocol.server import CoordinatorServer
from ef_common.protocol.server_outputs import Close, Output, Write, WriteOrReset
from ef_common.protocol.view_patch import NO_VIEW, ViewPatch

ENDPOINT = ("10.0.0.1", 1000)
TIMEOUT_S = 4.0


@dataclass
class Pair:
    """A worker and its coordinator; what each says on a connection is kept until it is delivered."""

    client: Client
    server: CoordinatorServer
    now: float = 0.0
    links: list[CoordinatorLink] = field(default_factory=list)
    peers: list[Peer] = field(default_factory=list)
    down: dict[int, list[Output]] = field(default_factory=dict)
    up: dict[int, bytes] = field(default_factory=dict)
    asks: list[Connect] = field(default_factory=list)
    gone: list[object] = field(default_factory=list)  # what the client asks for besides

    def accept(self, number: int) -> None:
        """A connection of the client is made."""
        self.peers.append(self.server.connect("10.0.0.9", self.now))
        self.client.connected(self.links[number], self.now)
        self.collect()

    def collect(self) -> None:
        while self.client.outputs:
            output = self.client.outputs.popleft()
            if isinstance(output, Connect):
                self.links.append(output.link)
                self.asks.append(output)
            elif isinstance(output, Send):
                number = self.links.index(output.link)
                self.up[number] = self.up.get(number, b"") + output.data
            else:
                self.gone.append(output)
        while self.server.outputs:
            asked = self.server.outputs.popleft()
            if isinstance(asked, (Write, WriteOrReset, Close)):
                self.down.setdefault(self.peers.index(asked.peer), []).append(asked)

    def to_server(self, number: int) -> None:
        self.server.receive(self.peers[number], self.up.pop(number, b""), self.now)
        self.collect()

    def to_client(self, number: int) -> None:
        for output in self.down.pop(number, []):
            assert isinstance(output, (Write, WriteOrReset))
            self.client.receive(self.links[number], output.data, self.now)
        self.collect()

    def settle(self) -> None:
        """Deliver all, the older connection first."""
        self.collect()
        while self.up or self.down:
            for number in list(self.up):
                self.to_server(number)
            for number in list(self.down):
                self.to_client(number)

    def beat(self) -> None:
        """The next heartbeat."""
        assert self.client.deadline is not None
        self.now = self.client.deadline
        self.client.tick(self.now)
        self.collect()


def server_of(*, timeout_s: float = TIMEOUT_S, **settings: int) -> CoordinatorServer:
    settings_ = Settings(min_nodes=1, last_call_s=0.0, port=1000, **settings)
    return CoordinatorServer(0.0, token=None, settings=settings_, heartbeat_timeout_s=timeout_s, limits=Limits())


def member(*, timeout_s: float = TIMEOUT_S) -> Pair:
    """A member of view 1; its second connection is not made so far."""
    client = Client(ENDPOINT, Member("w", "n", "", standby=1000, liveness_port=9), None, chance=random.Random(0))
    client.start(0.0)
    pair = Pair(client, server_of(timeout_s=timeout_s))
    pair.collect()
    pair.accept(0)
    pair.settle()
    pair.server.tick(1.0)
    pair.now = 1.0
    pair.settle()
    assert client.generation == 1
    assert len(pair.links) == 1
    pair.beat()
    assert len(pair.links) == 2
    pair.settle()
    return pair


def asked() -> Pair:
    """Likewise; the second connection is made, and the coordinator has taken it."""
    pair = member()
    pair.accept(1)
    pair.to_client(1)  # its challenge
    pair.to_server(1)
    return pair


def served() -> Pair:
    """Likewise; the worker has heard of it."""
    pair = asked()
    pair.settle()
    return pair


def over(pair: Pair) -> list[bool]:
    return [link.over for link in pair.client.resume_state.links]


def test_worker_connects_once_more_with_its_first_heartbeat_and_hears_the_coordinator_there() -> None:
    pair = served()
    pair.server._tell([(membership.Agree("", 1, "0" * 32), ["w"])])
    pair.beat()
    pair.to_server(0)
    assert {number: [type(output) for output in outputs] for number, outputs in pair.down.items()} == {1: [Write] * 2}
    assert pair.up == {}
    assert len(pair.server.workers) == 1
    pair.settle()
    assert len(pair.links) == 2  # it asks once


@pytest.mark.parametrize("timeout_s", [1.0, 2.0, 60.0])
def test_second_connection_does_not_wait_for_heartbeats_that_are_rare(timeout_s: float) -> None:
    """Until it is there, the end of the coordinator may be a reset, after which half of the members have to wait."""
    pair = member(timeout_s=timeout_s)
    assert pair.now == min(0.5, timeout_s / 4)
    assert len(pair.links) == 2


def test_worker_whose_node_has_no_standby_needs_no_second_connection() -> None:
    client = Client(ENDPOINT, Member("w", "n", "10.0.0.9"), None)
    client.start(0.0)
    pair = Pair(client, server_of())
    pair.collect()
    pair.accept(0)
    pair.settle()
    for _ in range(5):
        pair.beat()
        pair.settle()
    assert len(pair.links) == 1


def test_end_of_the_downlink_in_order_is_the_end_of_the_coordinator_even_if_the_other_connection_was_reset() -> None:
    pair = served()
    pair.client.ended(pair.links[0], in_order=False, now=pair.now)
    pair.collect()
    assert len(pair.links) == 2  # it does not give up yet
    pair.client.ended(pair.links[1], in_order=True, now=pair.now + 0.5)
    pair.collect()
    assert over(pair) == [True]
    assert len(pair.links) == 3


@pytest.mark.parametrize("in_order", [False, True])
def test_end_of_the_first_connection_alone_proves_nothing(in_order: bool) -> None:
    pair = served()
    pair.client.ended(pair.links[0], in_order=in_order, now=pair.now)
    assert pair.client.deadline is not None
    assert pair.client.deadline <= pair.now + 1.0
    pair.client.tick(pair.now + 1.0)
    pair.collect()
    assert over(pair) == [False]
    assert len(pair.links) == 3
    assert Disconnect(pair.links[1]) in pair.gone


def test_what_comes_on_the_downlink_waits_for_what_was_said_before() -> None:
    pair = asked()
    pair.server._tell([(membership.Announce(("w",), 1), ["w"])])
    pair.collect()
    pair.to_client(1)
    assert not pair.client.change_pending
    pair.to_client(0)
    assert pair.client.change_pending


def test_downlink_that_has_ended_before_the_worker_hears_of_it_is_an_end_in_order_all_the_same() -> None:
    pair = asked()
    pair.server._tell([(membership.Announce(("w",), 1), ["w"])])
    pair.collect()
    pair.to_client(1)
    pair.client.ended(pair.links[1], in_order=True, now=pair.now)
    pair.collect()
    assert len(pair.links) == 2
    pair.to_client(0)
    assert pair.client.change_pending
    assert over(pair) == [True]


def test_first_connection_that_ends_before_the_worker_hears_of_the_downlink_ends_all() -> None:
    pair = asked()
    pair.to_client(1)
    pair.client.ended(pair.links[0], in_order=False, now=pair.now)
    pair.collect()
    assert over(pair) == [False]
    assert Disconnect(pair.links[1]) in pair.gone


def test_downlink_that_the_worker_has_given_up_too_early_ends_the_link() -> None:
    pair = asked()
    pair.client.ended(pair.links[1], in_order=True, now=pair.now)
    pair.collect()
    assert len(pair.links) == 2
    pair.to_client(0)
    assert over(pair) == [False]
    assert len(pair.links) == 3


def test_worker_that_tries_again_and_hears_that_the_first_attempt_came_about_ends_the_link() -> None:
    pair = asked()
    pair.client.ended(pair.links[1], in_order=False, now=pair.now)
    while len(pair.links) == 2:
        pair.beat()
        pair.up.clear()
    pair.client.receive(pair.links[0], wire.encode(wire.Downlink()), pair.now)
    assert pair.client._hears_downlink
    pair.client.unreached(pair.links[2], "refused", pair.now)
    pair.collect()
    pair.client.ended(pair.links[0], in_order=True, now=pair.now)
    assert over(pair) == [False]
    assert len(pair.links) == 4


def test_second_connection_that_fails_again_and_again_gets_more_time_and_is_tried_less_often() -> None:
    pair = member()
    asked_at, timeouts = [], []
    while len(asked_at) < 9:
        if len(pair.links) > 1:
            pair.client.unreached(pair.links.pop(), "refused", pair.now)
        pair.beat()
        timeouts += [output.timeout_s for output in pair.asks if output.beside]
        asked_at += [pair.now] * (len(pair.links) - 1)
        pair.asks.clear()
        pair.client.receive(pair.links[0], wire.encode(wire.Alive()), pair.now)
    pauses = [after - before for before, after in pairwise(asked_at)]
    assert pauses[0] < 9.0
    assert pauses[-1] > 50.0
    assert timeouts[0] == 1.0
    assert timeouts[-1] == 60.0


def test_pauses_count_for_the_coordinator_that_was_asked_in_vain() -> None:
    pair = member()
    for _ in range(6):
        if len(pair.links) > 1:
            pair.client.unreached(pair.links.pop(), "refused", pair.now)
        pair.beat()
        pair.client.receive(pair.links[0], wire.encode(wire.Alive()), pair.now)
    assert len(pair.links) == 1  # there is a pause
    pair.server.end(pair.peers[0], End.RESET, pair.now)
    pair.client.ended(pair.links[0], in_order=False, now=pair.now)
    pair.collect()
    pair.down.clear()
    pair.up.clear()
    pair.accept(1)
    pair.settle()
    pair.beat()
    assert len(pair.links) == 3


def unreached(pair: Pair) -> None:
    pair.client.unreached(pair.links[1], "timed out", pair.now)


def ended(pair: Pair) -> None:
    pair.client.connected(pair.links[1], pair.now)
    pair.client.ended(pair.links[1], in_order=True, now=pair.now)


def no_coordinator(pair: Pair) -> None:
    pair.client.connected(pair.links[1], pair.now)
    pair.client.receive(pair.links[1], b"hello\n", pair.now)


def a_standby(pair: Pair) -> None:
    """Whoever answers leads nobody: another coordinator has this address."""
    other = Pair(pair.client, server_of(), pair.now, pair.links, peers=[pair.peers[0]])
    other.server.state = membership.Idle()
    other.accept(1)
    other.to_client(1)
    other.to_server(1)
    assert [type(output) for output in other.down[1]] == [Close]
    pair.client.ended(pair.links[1], in_order=True, now=pair.now)


@pytest.mark.parametrize("fails", [unreached, ended, no_coordinator, a_standby])
def test_second_connection_that_fails_is_tried_again_and_harms_nothing(fails: Callable[[Pair], None]) -> None:
    pair = member()
    fails(pair)
    pair.settle()
    assert pair.client.end is None
    assert len(pair.links) == 2
    while len(pair.links) == 2:
        pair.beat()
        pair.settle()
    pair.client.receive(pair.links[0], wire.encode(membership.Announce(("w",), 1)), pair.now)
    assert pair.client.change_pending


def test_worker_that_leaves_its_coordinator_leaves_the_downlink_too() -> None:
    pair = served()
    pair.client._lose(pair.links[0], "silent", over=False)
    pair.client.unreached(pair.client._trying, "refused", pair.now)  # type: ignore[arg-type]
    pair.collect()
    assert Disconnect(pair.links[1]) in pair.gone
    assert any(isinstance(output, Leave) and output.link is pair.links[0] for output in pair.gone)


def test_worker_that_stops_hears_until_the_downlink_ends() -> None:
    pair = served()
    pair.client.stop()
    pair.collect()
    assert not pair.client.is_over
    pair.server.end(pair.peers[0], End.CLOSED, pair.now)
    pair.collect()
    assert [type(output) for output in pair.down[1]] == [Close]
    pair.client.ended(pair.links[1], in_order=True, now=pair.now)
    assert pair.client.is_over


# ---------------------------------------------------------------- the coordinator


def closes(pair: Pair, number: int) -> list[Close]:
    pair.collect()
    return [output for output in pair.down.get(number, []) if isinstance(output, Close)]


@pytest.mark.parametrize(("how", "resets"), [(End.RESET, True), (End.BROKEN, True), (End.CLOSED, False)])
def test_end_of_a_worker_that_may_live_resets_its_downlink(how: End, resets: bool) -> None:
    pair = served()
    pair.server.end(pair.peers[0], how, pair.now)
    assert [[output.resets for output in closes(pair, number)] for number in (0, 1)] == [[resets], [resets]]
    assert not pair.server.workers


def test_worker_whose_process_ends_is_gone_in_whatever_order_its_connections_end() -> None:
    pair = served()
    for _ in range(3 * 8):  # it is sure that it has listened
        pair.now += TIMEOUT_S / 8
        pair.server.receive(pair.peers[0], wire.encode(wire.Heartbeat(None)), pair.now)
        pair.server.tick(pair.now)
    pair.server.end(pair.peers[1], End.RESET, pair.now)
    assert pair.server.workers
    told: list[membership.Event] = []
    pair.server._submit = lambda event, cause: told.append(event)  # type: ignore[method-assign,assignment]
    pair.server.end(pair.peers[0], End.CLOSED, pair.now)
    assert told == [membership.Gone("w", "its connection ended", silent=False)]


def test_worker_that_speaks_and_cannot_be_spoken_to_is_given_up_after_a_moment() -> None:
    pair = served()
    pair.server.end(pair.peers[1], End.BROKEN, pair.now)
    pair.server.end(pair.peers[1], End.BROKEN, pair.now)
    pair.server._sweep()
    assert pair.server.workers
    pair.server.tick(pair.now + 1.5)
    assert not pair.server.workers
    assert [output.resets for output in closes(pair, 1)] == [False]  # it has ended before
    assert closes(pair, 0) == [Close(pair.peers[0], resets=True)]


def test_worker_that_is_out_is_told_on_its_downlink_and_reset_if_it_cannot_be() -> None:
    pair = served()
    pair.server._evict(pair.server.workers["w"], "slow")
    pair.collect()
    (output,) = pair.down[1]
    assert output == WriteOrReset(pair.peers[1], wire.encode(wire.Eviction("slow")))
    pair.server.end(pair.peers[1], End.UNSENT, pair.now)  # whoever runs the server has reset it
    assert not pair.server._sessions.is_out(pair.peers[0])
    assert closes(pair, 0) == [Close(pair.peers[0], resets=True)]


def test_worker_that_is_out_and_has_no_downlink_any_more_is_told_where_it_speaks() -> None:
    pair = served()
    pair.server.end(pair.peers[1], End.RESET, pair.now)
    pair.server._evict(pair.server.workers["w"], "slow")
    pair.collect()
    pair.to_client(0)
    assert isinstance(pair.client.end, Evicted)


@pytest.mark.parametrize(("how", "resets"), [(End.RESET, True), (End.BROKEN, True), (End.CLOSED, False)])
def test_silent_worker_that_was_not_told_does_not_take_us_for_dead_when_its_connection_is_reset(
    how: End, resets: bool
) -> None:
    pair = served()
    peer = pair.server.workers["w"]
    pair.server._forget(peer)
    assert pair.server._sessions.suspend(peer, "silent") == []
    pair.server.end(peer, how, pair.now)
    assert [output.resets for output in closes(pair, 1)] == [resets]


def test_last_word_on_the_first_connection_leaves_at_once_or_both_are_reset() -> None:
    pair = member()
    pair.accept(1)
    pair.to_client(1)
    pair.server.receive(pair.peers[1], pair.up.pop(1), pair.now)
    asked = [output for output in pair.server.outputs if output.peer is pair.peers[0]]  # type: ignore[union-attr]
    assert asked == [WriteOrReset(pair.peers[0], wire.encode(wire.Downlink()))]
    pair.server.end(pair.peers[0], End.UNSENT, pair.now)  # whoever runs the server has reset it
    assert [output.resets for output in closes(pair, 1)] == [True]


def test_worker_that_does_not_read_its_downlink_is_dropped() -> None:
    pair = served()
    pair.server.overflow(pair.peers[1], 1 << 23, pair.now)
    assert not pair.server.workers
    assert [output.last_words[:1] for output in closes(pair, 1)] == [b"{"]


def test_worker_that_speaks_on_its_downlink_breaks_the_rules() -> None:
    pair = served()
    pair.server.receive(pair.peers[1], wire.encode(wire.Bye()), pair.now)
    assert [output.last_words[:1] for output in closes(pair, 1)] == [b"{"]
    assert not pair.server.workers


def test_downlink_is_introduced_once() -> None:
    pair = served()
    again = Introduction(Member("w", "n", ""), None, key=pair.client._key, address=ENDPOINT, downlink=True)
    again.lines.feed(wire.encode(wire.Challenge(pair.peers[1].nonce)))
    hello = again.take()
    assert hello
    pair.server.receive(pair.peers[1], hello, pair.now)
    assert not pair.server.workers


def test_downlink_whose_bytes_were_changed_resets_all_without_a_word() -> None:
    pair = served()
    pair.server.distrust(pair.peers[1], "bad record mac", pair.now)
    assert closes(pair, 1) == [Close(pair.peers[1], resets=True)]
    assert not pair.server.workers


def introduces(pair: Pair, name: str, *, key: str) -> list[Output]:
    """Somebody connects, and says that this is the downlink of a worker; what is done about it."""

    peer = pair.server.connect("10.0.0.66", pair.now)
    pair.peers.append(peer)
    pair.collect()
    who = Introduction(Member(name, "n", ""), None, key=key, address=ENDPOINT, downlink=True)
    challenge = pair.down.pop(len(pair.peers) - 1)[0]
    assert isinstance(challenge, Write)
    who.lines.feed(challenge.data)
    hello = who.take()
    assert hello
    pair.server.receive(peer, hello, pair.now)
    pair.collect()
    return pair.down.get(len(pair.peers) - 1, [])


def test_nobody_else_hears_what_a_worker_is_told() -> None:
    pair = member()
    (refusal,) = introduces(pair, "w", key="0" * 32)
    assert isinstance(refusal, Close)
    assert b"somebody else" in refusal.last_words
    assert pair.server.workers["w"].downlink is None


def test_second_downlink_and_that_of_a_worker_that_is_not_here_are_closed() -> None:
    pair = served()
    before = pair.peers[0].downlink
    for name in ("w", "x"):
        (refusal,) = introduces(pair, name, key=pair.client._key)
        assert refusal == Close(pair.peers[-1])
    assert pair.peers[0].downlink is before
    assert not pair.server._sessions._strangers


def test_strangers_make_room_and_downlinks_stay() -> None:
    pair = served()
    pair.server.make_room(9, "crowd")
    assert closes(pair, 1) == []
    pair.server.tick(pair.now + 0.1)
    assert pair.server._sessions.overdue(pair.now + 99, TIMEOUT_S) == []


def test_view_comes_on_the_downlink() -> None:
    pair = served()
    view = View(2, pair.server.state.view.members)  # type: ignore[union-attr]
    patch = ViewPatch.between(NO_VIEW, view)
    pair.server._tell([(wire.NewView(0, patch), ["w"])])
    pair.settle()
    assert pair.client.generation == 2
