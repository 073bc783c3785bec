"""The coordinator's server, without sockets, threads or clocks."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from ef_common.core import membership
from ef_common.core.membership import Ended, Forming, Idle, Serving, Settings
from ef_common.core.progress import Limits, Progress
from ef_common.core.quorum import ChainLink
from ef_common.core.room import NO_DEMAND, Demand, Room
from ef_common.core.view import Member, View
from ef_common.core.watermark import Watermark
from ef_common.protocol import wire
from ef_common.protocol.auth import worker_proof
from ef_common.protocol.client_outputs import Connect
from ef_common.protocol.fields import digest_of_view
from ef_common.protocol.peer import End, Peer
from ef_common.protocol.server import CoordinatorServer
from ef_common.protocol.server_outputs import Close, Write, WriteOrReset
from ef_common.protocol.view_patch import Span
from tests.protocol.returning import returning
from tests.protocol.test_client import drain, introduce, make, serve


def test_worker_whose_first_attempt_took_too_long_is_taken_when_it_comes_again() -> None:
    client, server = make(standby=1000), serve()
    attempt = drain(client, Connect)[0]
    first = server.connect("10.0.0.9", 0.0)
    client.connected(attempt.link, 0.0)
    client.receive(attempt.link, server.outputs.popleft().data, 0.0)
    hello = client.outputs.popleft()
    client.tick(attempt.timeout_s)  # no answer has come
    server.receive(first, hello.data, 1.0)  # it stood still meanwhile
    while (again := drain(client, Connect)) == []:
        client.tick(client.deadline)
    client.outputs.append(again[0])
    _, second = introduce(client, server, 1.5)
    assert first.dropped
    assert server.workers == {"w": second}
    assert list(server.state.workers) == ["w"]
    assert client.end is None


def test_heartbeat_to_a_coordinator_that_knows_of_the_failure_alone_is_no_reason_to_drop_a_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client, server = make(standby=1000), serve()
    _, peer = introduce(client, server, 0.0)
    server.state = Ended(generation=server.state.generation, failed="ValueError")
    heartbeat = wire.Heartbeat(None, Progress(7, 3, True, "step", 1.0))
    server.receive(peer, wire.encode(heartbeat), 1.0)
    assert not is_closed(server.outputs, peer)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_stranger_that_says_nothing_is_dropped_without_a_word_and_comes_again() -> None:
    """Its process may have stood still; a word would tell it that it was refused."""
    client, server = make(standby=1000), serve()
    attempt = drain(client, Connect)[0]
    peer = server.connect("10.0.0.9", 0.0)
    client.connected(attempt.link, 0.0)
    challenge = server.outputs.popleft().data
    while not server.outputs:
        server.tick(server.deadline)
    assert server.outputs.popleft() == Close(peer)
    assert peer.dropped
    client.receive(attempt.link, challenge, 9.0)
    client.ended(attempt.link, in_order=True, now=9.0)
    while client.end is None and (again := drain(client, Connect)) == []:
        client.tick(client.deadline)
    assert client.end is None
    assert again


MEMBERS = tuple(Member(f"w{index}", f"n{index}", "10.0.0.1", standby=1000 + index) for index in range(6))
LINKS = (ChainLink(View(4, MEMBERS, 4)), ChainLink(View(5, MEMBERS[:5], 4, gone=("w5",), base=4)))


class Standby:
    """A coordinator that has led nobody, and those who come to it from another one."""

    def __init__(self) -> None:
        self.server = CoordinatorServer(
            0.0, token=None, settings=Settings(), heartbeat_timeout_s=4.0, limits=Limits(), standby=True
        )
        self.heard: dict[Peer, list[wire.FromCoordinator]] = {}

    def introduce(self, member: Member, *, returning: bool = True) -> Peer:
        peer = self.server.connect("10.0.0.1", 0.0)
        self._listen()
        (challenge,) = self.heard[peer]
        assert isinstance(challenge, wire.Challenge)
        nonce, key = "0f" * 16, "1e" * 16
        proof = worker_proof(None, server_nonce=challenge.nonce, client_nonce=nonce, key=key, member=member)
        self.say(peer, wire.Hello(member, nonce, key, proof, returning=returning))
        self.heard[peer].clear()
        return peer

    def say(self, peer: Peer, *messages: wire.FromWorker) -> None:
        self.server.receive(peer, b"".join(map(wire.encode, messages)), 0.0)
        self._listen()

    def end(self, peer: Peer) -> None:
        self.server.end(peer, End.CLOSED, 0.0)
        self._listen()

    def tick(self, now: float) -> None:
        self.server.tick(now)
        self._listen()

    def _listen(self) -> None:
        while self.server.outputs:
            output = self.server.outputs.popleft()
            data = b""
            if isinstance(output, (Write, WriteOrReset)):
                data = output.data
            elif isinstance(output, Close):
                data = output.last_words
            for line in data.splitlines():
                self.heard.setdefault(output.peer, []).append(wire.decode_from_coordinator(line))


def named(*indices: int) -> tuple[str, ...]:
    return tuple(digest_of_view(LINKS[index].view) for index in indices)


def test_a_few_of_those_who_name_an_unknown_view_are_asked_for_it_and_all_are_heard_once_it_is_told() -> None:
    standby = Standby()
    peers = [standby.introduce(member) for member in MEMBERS[:5]]
    report, told = returning(LINKS[1:])
    for peer in peers:
        standby.say(peer, report)
    assert [standby.heard[peer] for peer in peers] == [[wire.Recall(named(1))]] * 3 + [[], []]
    assert isinstance(standby.server.state, Idle)
    standby.say(peers[1], told)
    assert standby.server.state.view == LINKS[1].view
    assert len(standby.server.state.workers) == 5
    standby.say(peers[0], told)  # that others have been faster is no fault
    assert [peer.dropped for peer in peers] == [False] * 5


def test_another_one_is_asked_for_a_view_if_all_who_were_asked_are_gone() -> None:
    standby = Standby()
    peers = [standby.introduce(member) for member in MEMBERS[:5]]
    report, told = returning(LINKS)
    for peer in peers:
        standby.say(peer, report)
    for peer in peers[:3]:
        standby.end(peer)
    assert standby.heard[peers[3]] == [wire.Recall(named(0, 1))]
    standby.say(peers[3], told)
    assert set(standby.server.state.workers) == {"w3", "w4"}


def test_who_does_not_tell_the_view_that_it_names_is_refused_and_others_are_heard() -> None:
    standby = Standby()
    liar, honest = standby.introduce(MEMBERS[0]), standby.introduce(MEMBERS[1])
    standby.say(liar, returning(LINKS)[0])
    standby.say(honest, returning(LINKS)[0])
    standby.say(liar, returning(LINKS[:1])[1])
    assert liar.dropped
    standby.say(honest, returning(LINKS)[1])
    assert set(standby.server.state.workers) == {"w1"}


def test_first_ranks_are_told_first_of_an_exception_that_a_coordinator_without_members_has_heard() -> None:
    """The announcer begins with the newest standby that is noted, and workers look at that of the first rank first."""
    standby = Standby()
    members = tuple(replace(member, standby=rank) for rank, member in enumerate(MEMBERS, 1))
    peer = standby.introduce(members[2])
    standby.say(peer, *returning([ChainLink(View(3, members, 3))], failed="ValueError"))
    assert standby.server.state.failed == "ValueError"
    assert [port for _, port in standby.server.standbys.addresses][::-1] == list(range(1, 1 + len(members)))


def test_view_that_is_named_by_another_generation_is_refused() -> None:
    standby = Standby()
    peer = standby.introduce(MEMBERS[0])
    report, told = returning(LINKS)
    names = (report.received[0], report.received[1]._replace(generation=9))
    standby.say(peer, replace(report, received=names), told)
    assert peer.dropped
    assert isinstance(standby.server.state, Idle)


@pytest.mark.parametrize(("how", "gone"), [(End.CLOSED, {"w0"}), (End.RESET, set()), (End.BROKEN, set())])
def test_connection_that_ends_in_order_alone_proves_that_a_member_is_dead(how: End, gone: set[str]) -> None:
    """One that cannot say that it goes to another coordinator resets its connection."""
    standby = Standby()
    peers = [standby.introduce(member) for member in MEMBERS[:5]]
    for peer in peers:
        standby.say(peer, *returning([ChainLink(View(5, MEMBERS[:5], 4))]))
    standby.server.end(peers[0], how, 0.0)
    assert standby.server.state.view is not None
    assert standby.server.state.view.ids == ("w1", "w2", "w3", "w4")
    assert standby.server.state.gone == gone


def test_what_a_worker_says_after_its_report_is_heard_after_it() -> None:
    standby = Standby()
    peers = [standby.introduce(member) for member in MEMBERS[:5]]
    report, told = returning(LINKS, settled=5)
    for peer in peers:
        standby.say(peer, report, membership.Leaving(""), wire.Relay(5, "k", b"v"))
    standby.say(peers[0], wire.Heartbeat(Watermark(1, 2), Progress(5, 3, True, "step", 1.0)))
    assert standby.heard[peers[0]][-1] == wire.Alive()  # it need not wait for the views to hear that
    standby.say(peers[0], told)
    phases = {worker: phase.value for worker, (_, phase, _) in standby.server.state.workers.items()}
    assert phases == dict.fromkeys(LINKS[1].view.ids, "leaving")
    assert not any(peer.dropped for peer in peers)


def test_exception_that_a_member_tells_while_its_report_waits_ends_the_job() -> None:
    standby = Standby()
    peers = [standby.introduce(member) for member in MEMBERS[:5]]
    report, told = returning(LINKS, settled=5)
    for peer in peers:
        standby.say(peer, report)
    standby.say(peers[0], membership.Failed("", "ValueError"))
    assert standby.server.state.failed == ""  # it is not known yet that it is a member
    standby.say(peers[1], told)
    assert standby.server.state.failed == "ValueError"
    assert isinstance(standby.heard[peers[0]][-1], wire.Aborted)


def test_coordinator_that_stood_still_calls_again_before_the_first_view() -> None:
    """The connections of those who have come may have ended meanwhile, which it reads only now."""
    server = CoordinatorServer(
        0.0, token=None, settings=Settings(last_call_s=1.0), heartbeat_timeout_s=4.0, limits=Limits()
    )
    introduce(make(), server, 0.0)
    server.tick(0.5)
    server.tick(30.0)
    assert isinstance(server.state, Forming)
    while server.deadline < 31.0:
        server.tick(server.deadline)
    assert isinstance(server.state, Forming)
    server.tick(31.0)
    assert isinstance(server.state, Serving)


def test_who_says_very_much_while_its_report_waits_is_refused() -> None:
    standby = Standby()
    peer = standby.introduce(MEMBERS[0])
    standby.say(peer, returning(LINKS)[0])
    for _ in range(6):
        standby.say(peer, wire.Relay(5, "k", b"v" * 700_000))
    assert peer.dropped
    assert not standby.server._returns._waiting


def test_report_of_views_that_are_known_needs_no_answer() -> None:
    standby = Standby()
    first, second = standby.introduce(MEMBERS[0]), standby.introduce(MEMBERS[1])
    standby.say(first, *returning(LINKS))
    standby.say(second, returning(LINKS)[0])
    assert set(standby.server.state.workers) == {"w0", "w1"}
    assert not any(isinstance(message, wire.Recall) for message in standby.heard[second])


def test_view_is_told_by_what_it_changes_of_what_each_one_knows() -> None:
    standby = Standby()
    peers = [standby.introduce(member) for member in MEMBERS[:5]]
    for peer in peers[:4]:
        standby.say(peer, *returning(LINKS))
    standby.say(peers[4], *returning(LINKS[:1]))  # it has not received the newest one
    after = standby.server.state.view
    assert after is not None
    assert (after.generation, after.ids) == (6, LINKS[1].view.ids)
    for peer in peers:
        (new,) = (message for message in standby.heard[peer] if isinstance(message, wire.NewView))
        before = LINKS[peer is not peers[4]].view
        assert new.before == before.generation
        assert new.patch.onto(before) == after
        assert len(new.patch.members) == 1
    standby.end(peers[2])
    standby.tick(1.0)  # nobody has settled in that view, so further losses were waited for
    (newest,) = (one for one in standby.heard[peers[0]] if isinstance(one, wire.NewView) and one.before == 6)
    assert newest.patch.members == (Span(0, 2), Span(3, 5))


def test_what_many_members_publish_is_gathered_and_sent_in_one_line() -> None:
    standby = Standby()
    members = tuple(replace(MEMBERS[0], id=f"w{index:02}", node=f"n{index}") for index in range(20))
    peers = [standby.introduce(member) for member in members]
    for peer in peers:
        standby.say(peer, *returning([ChainLink(View(4, members, 4))]))
    standby.tick(0.0)
    for peer in peers:
        standby.heard[peer].clear()
    for rank, peer in enumerate(peers):
        standby.say(peer, wire.Relay(4, f"port/{rank}", b"%d" % rank))
    assert not any(standby.heard[peer] for peer in peers)
    standby.tick(0.0001)
    assert not any(standby.heard[peer] for peer in peers)
    standby.tick(0.001)
    values = tuple((f"port/{rank}", b"%d" % rank) for rank in range(20))
    assert [standby.heard[peer] for peer in peers] == [[wire.Relayed(4, values)]] * 20
    standby.say(peers[0], wire.Relay(4, "large", b"x" * 300_000))
    standby.say(peers[1], wire.Relay(4, "larger", b"y" * 300_000))  # together they would be too long a line
    standby.tick(0.002)
    keys = [[key for key, _ in one.values] for one in standby.heard[peers[2]][1:] if isinstance(one, wire.Relayed)]
    assert keys == [["large"], ["larger"]]


def is_closed(outputs: object, peer: Peer) -> bool:
    return any(isinstance(output, Close) and output.peer is peer for output in outputs)


# ---------------------------------------------------------------- the number of nodes


class Members(Standby):
    """Members of view 5, and whoever comes to them."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.view = View(5, tuple(Member(name, f"n-{name}", "10.0.0.1", standby=1000) for name in names))
        self.peers = {member.id: self.introduce(member) for member in self.view.members}
        for peer in self.peers.values():
            self.say(peer, *returning([ChainLink(self.view)], store=""))

    def want(self, nodes: int, *, number: int = 1) -> None:
        self.say(self.peers["a"], membership.Wanted("", Demand(5, number, nodes)))

    def take(self, now: float) -> dict[str, list[wire.FromCoordinator]]:
        """What each of them has been told since, by name."""
        self.tick(now)
        told = {name: list(self.heard[peer]) for name, peer in self.peers.items()}
        for peer in self.peers.values():
            self.heard[peer].clear()
        return told


def room(demand: Demand = NO_DEMAND, nodes: int = 3, **fields: object) -> Room:
    known: dict[str, object] = {"spares": 0, "newcomers": 0, "min_nodes": 1, "max_nodes": 1_000_000, "stragglers": ()}
    return Room(demand, nodes, **known | fields)  # type: ignore[arg-type]


def test_room_is_told_to_rank_0_when_it_changes_and_once_per_second_at_most() -> None:
    job = Members("a", "b", "c")
    told = job.take(0.0)
    # Those who are back may know of stragglers that are none any more.
    assert [[one for one in told[name] if isinstance(one, Room)] for name in "abc"] == [[room()]] * 3
    assert job.take(1.0)["a"] == []  # nothing has changed
    for name in "xyz":
        job.introduce(Member(name, name, "10.0.0.9"), returning=False)
    assert job.server.deadline <= 1.0
    assert job.take(1.0)["a"] == [room(newcomers=3)]
    job.server._submit(membership.Slow(("b", "c")), None)
    assert job.take(1.9) == {"a": [], "b": [], "c": []}
    assert job.server.deadline == 2.0
    assert job.take(2.0)["a"] == [room(newcomers=3, stragglers=("b", "c"))]


def test_stragglers_are_told_to_all_members_when_they_change() -> None:
    job = Members("a", "b", "c")
    job.take(0.0)
    for second, slow in enumerate([("b", "c"), ("c",), ()], 1):
        job.server._submit(membership.Slow(slow), None)
        assert job.take(float(second)) == {name: [room(stragglers=slow)] for name in "abc"}
    assert job.take(4.0) == {"a": [], "b": [], "c": []}


def test_slowest_straggler_is_to_be_replaced_if_the_members_want_that() -> None:
    job, replaced = Members("a", "b", "c"), []
    for second in range(1, 131):
        for name, step_s in (("a", 0.1), ("b", 0.3), ("c", 0.2)):
            told = Progress(5, 3, False, "step", 0.0, 0.0, 0.0, 0.0, 8000 * second, step_s * second, 0.0, second > 120)
            job.server.receive(job.peers[name], wire.encode(wire.Heartbeat(None, told)), float(second))
        job.take(second + 0.5)
        if second in (120, 130):
            assert isinstance(job.server.state, Serving)
            assert job.server.state.slow == ("b", "c")
            replaced.append(job.server.state.replacement.straggler)
    assert replaced == ["", "b"]


def test_spares_and_newcomers_are_counted_by_nodes() -> None:
    job = Members("a", "b", "c")
    job.want(3)
    for name, node in (("x", "n-a"), ("y1", "y"), ("y2", "y"), ("z", "z")):
        peer = job.introduce(Member(name, node, "10.0.0.9", 0, 2), returning=False)
        if name in ("x", "y1"):
            job.say(peer, membership.Ready(""))
    assert job.take(0.0)["a"][-1] == room(Demand(5, 1, 3), spares=1, newcomers=1)


def test_demand_is_told_to_all_members_as_they_report_it_to_a_standby() -> None:
    job = Members("a", "b", "c")
    job.take(0.0)
    job.want(2)
    told = job.take(1.0)
    known = room(Demand(5, 1, 2))
    assert [told[name] for name in "abc"] == [[known], [known], [membership.Resign(""), known]]
    job.say(job.peers["c"], membership.Leaving(""))
    for name in "abc":
        job.say(job.peers[name], membership.AtBoundary("", 5))
    told = job.take(2.0)
    assert [told[name][-1] for name in "ab"] == [room(Demand(5, 1, 2), nodes=2)] * 2
    assert isinstance(told["c"][-1], wire.NewView)
    assert job.take(9.0) == {"a": [], "b": [], "c": []}


def test_member_that_is_back_is_told_the_demand_that_it_may_have_missed() -> None:
    job = Members("a", "b", "c")
    job.want(3)
    job.take(0.0)
    job.peers["b"] = job.introduce(job.view.members[1])
    job.say(job.peers["b"], *returning([ChainLink(job.view)], store=""))
    assert job.take(1.0)["b"][-1] == room(Demand(5, 1, 3))


def test_demand_in_a_view_that_does_not_exist_ends_the_connection() -> None:
    job = Members("a", "b")
    job.say(job.peers["a"], membership.Wanted("", Demand(6, 1, 1)))
    assert job.peers["a"].dropped
    assert not job.peers["b"].dropped
