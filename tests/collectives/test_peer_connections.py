from __future__ import annotations

import contextlib
import errno
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ef_common import threads
from ef_common.collectives import peer_connections
from ef_common.collectives.bootstrap import SharedValues
from ef_common.collectives.peer_connections import MAX_STRANGERS, PeerConnections
from ef_common.core.view import Member, View
from ef_common.errors import GroupBroken, ProtocolError, ThreadFailed
from ef_common.launch.certificates import trust_of
from ef_common.protocol.auth import Token
from ef_common.tls import WORKER, Tls
from tests.diagrams import cases, rows
from tests.tap import Tap
from tests.waiting import poll_until

GUARD_S = 60.0
LARGE = 1 << 24  # more than what sockets hold
TRUST, OTHERS = trust_of(Token("hunter2"), "1"), trust_of(Token("another job's"), "1")


@pytest.fixture
def values() -> SharedValues:
    return SharedValues()


@pytest.fixture(params=["one node", "three nodes", "TLS"])
def peers(request: pytest.FixtureRequest, values: SharedValues) -> Iterator[list[PeerConnections]]:
    nodes = ["n0"] * 3 if request.param == "one node" else ["n0", "n1", "n2"]
    view = View(1, tuple(Member(f"w{rank}", node, "127.0.0.1") for rank, node in enumerate(nodes)))
    tls = Tls(TRUST.worker) if request.param == "TLS" else None
    members = [PeerConnections(view, rank, values, tls=tls) for rank in range(3)]
    yield members
    for member in members:
        member.close()


def outcome_of(act: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException | None]]:
    """Run in a thread; afterwards the list holds how it ended."""
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, ended


def test_parts_arrive_in_order_between_any_two(peers: list[PeerConnections]) -> None:
    sent = {(a, b): [bytes([a, b]) * 5, b"", bytes([b]) * LARGE] for a in range(3) for b in range(3) if a != b}
    received = {pair: [bytearray(len(part)) for part in parts] for pair, parts in sent.items()}
    threads = [
        outcome_of(lambda a=a, b=b, parts=parts: peers[a].send([memoryview(part) for part in parts], b))
        for (a, b), parts in sent.items()
    ]
    threads += [
        outcome_of(lambda a=a, b=b, parts=parts: peers[b].receive([memoryview(part) for part in parts], a))
        for (a, b), parts in received.items()
    ]
    for thread, ended in threads:
        thread.join(GUARD_S)
        assert ended == [None]
    assert received == sent


def test_member_passes_on_what_it_receives(peers: list[PeerConnections]) -> None:
    sent = [b"12345", b"", bytes(range(256)) * (LARGE // 256)]
    received = {rank: [bytearray(len(part)) for part in sent] for rank in (1, 2)}
    threads = [
        outcome_of(lambda: peers[0].send([memoryview(part) for part in sent], 1)),
        outcome_of(lambda: peers[1].receive([memoryview(part) for part in received[1]], 0, 2)),
        outcome_of(lambda: peers[2].receive([memoryview(part) for part in received[2]], 1)),
    ]

    for thread, ended in threads:
        thread.join(GUARD_S)
        assert ended == [None]
    assert received == {1: sent, 2: sent}


def test_member_passes_on_before_it_has_received_everything(peers: list[PeerConnections]) -> None:
    first, room = bytes(LARGE), {rank: bytearray(LARGE + 1) for rank in (1, 2)}
    passes_on, passed_on = outcome_of(lambda: peers[1].receive([memoryview(room[1])], 0, 2))
    outcome_of(lambda: peers[0].send([memoryview(first)], 1))

    peers[2].receive([memoryview(room[2])[: LARGE // 2]], 1)

    assert passed_on == []
    peers[2].close()
    passes_on.join(GUARD_S)
    assert [type(error) for error in passed_on] == [GroupBroken]
    assert "could not send to rank 2" in str(passed_on[0])


def test_close_wakes_a_sender_and_its_receiver(peers: list[PeerConnections]) -> None:
    sender, sent = outcome_of(lambda: peers[0].send([memoryview(bytearray(LARGE))] * 20, 1))
    target = bytearray(10)
    peers[1].receive([memoryview(target)], 0)
    receiver, received = outcome_of(lambda: peers[1].receive([memoryview(bytearray(30 * LARGE))], 0))
    peers[1].close()
    sender.join(GUARD_S)
    receiver.join(GUARD_S)
    assert [type(one) for one in sent + received] == [GroupBroken] * 2


def test_close_wakes_who_waits_for_a_connection(peers: list[PeerConnections]) -> None:
    thread, ended = outcome_of(lambda: peers[0].receive([memoryview(bytearray(1))], 2))
    peers[0].close()
    thread.join(GUARD_S)
    assert [type(one) for one in ended] == [GroupBroken]


def test_after_close_nothing_works(peers: list[PeerConnections]) -> None:
    peers[0].close()
    peers[0].close()
    with pytest.raises(GroupBroken):
        peers[0].send([memoryview(b"x")], 1)
    with pytest.raises(GroupBroken):
        peers[0].receive([memoryview(bytearray(1))], 1)


def test_stranger_without_the_secret_is_turned_away(peers: list[PeerConnections], values: SharedValues) -> None:
    received = bytearray(6)
    receiver, at_receiver = outcome_of(lambda: peers[0].receive([memoryview(received)], 1))
    known = json.loads(values.get("peer/0"))
    within = socket.socket(socket.AF_UNIX)
    within.connect("\0" + known["node"])
    outside = socket.create_connection((known["address"], known["port"]))
    for stranger in (within, outside):
        with stranger:
            stranger.settimeout(GUARD_S)
            stranger.sendall(bytes(16) + (1).to_bytes(4, "big") + b"poison")
            assert not _reads(stranger)
    sender, at_sender = outcome_of(lambda: peers[1].send([memoryview(b"honest")], 0))
    for thread in (receiver, sender):
        thread.join(GUARD_S)
    assert (bytes(received), at_receiver, at_sender) == (b"honest", [None], [None])


def _reads(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1)
    except ConnectionResetError:  # what was sent too much was not read
        return b""


def test_members_of_one_node_that_do_not_share_a_network_use_tcp(
    peers: list[PeerConnections], values: SharedValues
) -> None:
    received = bytearray(6)
    receiver, ended = outcome_of(lambda: peers[0].receive([memoryview(received)], 1))
    known = json.loads(values.get("peer/0"))
    values.put("peer/0", json.dumps({**known, "node": "elsewhere"}).encode())
    peers[1].send([memoryview(b"abcdef")], 0)
    receiver.join(GUARD_S)
    assert (bytes(received), ended) == (b"abcdef", [None])


@pytest.mark.parametrize("rank", [-1, 0, 3])
def test_rank_of_no_other_member_is_refused(peers: list[PeerConnections], rank: int) -> None:
    with pytest.raises(ValueError, match=f"Received: {rank} of 3"):
        peers[0].send([], rank)
    with pytest.raises(ValueError, match=f"Received: {rank} of 3"):
        peers[0].receive([], rank)


def dial(known: dict[str, Any], tls: Tls | None) -> socket.socket:
    connection = socket.create_connection((known["address"], known["port"]))
    if tls is not None:
        connection = tls.wrap(connection, connects_to=WORKER)
        connection.do_handshake()
    return connection


def hello_of(known: dict[str, Any], rank: int) -> bytes:
    return bytes.fromhex(known["secret"]) + rank.to_bytes(4, "big")


class Listener:
    """The first of two members, and a connection that comes to it."""

    def __init__(self) -> None:
        view = View(1, (Member("w0", "n0", "127.0.0.1"), Member("w1", "n1", "127.0.0.1")))
        self.values = SharedValues()
        self.peers = PeerConnections(view, 0, self.values)
        self.heeds = threading.Event()  # what strangers say; before, they are there for sure
        welcome = self.peers._welcome
        self.peers._welcome = lambda one: self.heeds.wait(GUARD_S) and welcome(one)  # type: ignore[method-assign]
        self.far: socket.socket | None = None  # their end
        self.near: socket.socket | None = None  # ours

    @property
    def state(self) -> str:
        """That of the connection, or, if none has come, of the first member's end."""
        if self.near is None:
            return "closed" if self.peers._closed else "listening" if self.peers._listeners else "silent"
        if self.near.fileno() < 0:
            return "gone"
        return "member" if self.near in self.peers._incoming.values() else "stranger"

    @property
    def known(self) -> dict[str, Any]:
        return json.loads(self.values.get("peer/0"))

    def leaves(self, state: str) -> None:
        self.heeds.set()
        poll_until(lambda: self.state != state)

    def close(self) -> None:
        self.heeds.set()
        self.peers.close()
        if self.far is not None:
            self.far.close()


def listens(listener: Listener) -> None:
    outcome_of(lambda: listener.peers.receive([memoryview(bytearray(1))], 1))
    assert listener.known["port"]


def closes(listener: Listener) -> None:
    before = listener.state
    listener.peers.close()
    listener.leaves(before)


def fails_to_accept(listener: Listener) -> None:
    listener.peers._break(ThreadFailed("out of order"))
    assert listener.state == "closed"
    with pytest.raises(ThreadFailed, match="out of order"):
        listener.peers.receive([memoryview(bytearray(1))], 1)


def is_reached(listener: Listener) -> None:
    listens(listener)
    listener.far = dial(listener.known, None)
    poll_until(lambda: len(listener.peers._strangers) == 1)
    (listener.near,) = listener.peers._strangers


def says(listener: Listener, hello: bytes) -> None:
    assert listener.far is not None
    listener.far.sendall(hello)
    listener.leaves("stranger")


def hears_the_secret(listener: Listener) -> None:
    says(listener, hello_of(listener.known, 1))


def hears_a_wrong_secret(listener: Listener) -> None:
    says(listener, bytes(16) + (1).to_bytes(4, "big"))


def hears_a_rank_twice(listener: Listener) -> None:
    listener.heeds.set()
    others = dial(listener.known, None)
    others.sendall(hello_of(listener.known, 1))
    poll_until(lambda: 1 in listener.peers._incoming)
    with others:
        hears_the_secret(listener)


def makes_room(listener: Listener) -> None:
    with dial(listener.known, None):
        poll_until(lambda: len(listener.peers._strangers) == 2)
        listener.peers._make_room(1)
        listener.leaves("stranger")


def hears_nothing(listener: Listener) -> None:
    listener.leaves("stranger")


WITNESSES: dict[str, tuple[tuple[Callable[[Listener], None], ...], ...]] = {
    "silent → listening": ((listens,),),
    "silent → closed": ((closes,),),
    "listening → closed": ((listens, closes), (listens, fails_to_accept)),
    "stranger → member": ((is_reached, hears_the_secret),),
    "stranger → gone": tuple(
        (is_reached, act) for act in (hears_a_wrong_secret, hears_a_rank_twice, makes_room, hears_nothing, closes)
    ),
    "member → gone": ((is_reached, hears_the_secret, closes),),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(PeerConnections) == list(WITNESSES)


@pytest.mark.parametrize(("row", "case"), cases(WITNESSES))
def test_each_row_of_the_diagram_is_true(row: str, case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    *first, last = WITNESSES[row][case]
    monkeypatch.setattr(peer_connections, "_HELLO_TIMEOUT_S", 0.2 if last is hears_nothing else 2 * GUARD_S)
    with contextlib.closing(Listener()) as listener:
        for act in first:
            act(listener)
        before = listener.state
        last(listener)
        assert row == f"{before} → {listener.state}"


@pytest.mark.parametrize("rank", [0, 1, 3, 2**32 - 1])
def test_member_that_comes_in_the_name_of_another_rank_is_turned_away(
    peers: list[PeerConnections], values: SharedValues, rank: int
) -> None:
    """Itself, a rank that has come, one that does not exist. Not that of one that has not come: see the docs."""
    receiver, ended = outcome_of(lambda: peers[0].receive([memoryview(bytearray(1))], 1))
    peers[1].send([memoryview(b"x")], 0)
    receiver.join(GUARD_S)
    assert ended == [None]
    known = json.loads(values.get("peer/0"))
    with dial(known, peers[1]._tls) as liar:
        liar.settimeout(GUARD_S)
        liar.sendall(hello_of(known, rank) + b"poison")
        assert not _reads(liar)
    received = bytearray(6)
    peers[1].send([memoryview(b"honest")], 0)
    peers[0].receive([memoryview(received)], 1)
    assert received == b"honest"


def test_crowd_of_strangers_keeps_no_member_out_and_takes_few_threads(
    peers: list[PeerConnections], values: SharedValues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that say nothing, and those that send a byte now and then."""
    monkeypatch.setattr("ef_common.collectives.peer_connections._HELLO_TIMEOUT_S", 3600.0)
    before = threading.active_count()
    received = bytearray(6)
    receiver, ended = outcome_of(lambda: peers[0].receive([memoryview(received)], 1))
    known = json.loads(values.get("peer/0"))
    crowd = []
    try:
        for number in range(6 * MAX_STRANGERS):
            crowd.append(socket.create_connection((known["address"], known["port"])))
            if number % 2:
                crowd[-1].sendall(b"x")
            assert threading.active_count() - before <= 2 * MAX_STRANGERS + 10
        peers[1].send([memoryview(b"honest")], 0)
        receiver.join(GUARD_S)
        assert (bytes(received), ended) == (b"honest", [None])
        assert len(peers[0]._strangers) <= MAX_STRANGERS
    finally:
        for connection in crowd:
            connection.close()


def test_stranger_that_sends_byte_after_byte_has_no_more_time_than_another(
    peers: list[PeerConnections], values: SharedValues, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ef_common.collectives.peer_connections._HELLO_TIMEOUT_S", 0.3)
    outcome_of(lambda: peers[0].receive([memoryview(bytearray(1))], 1))
    known = json.loads(values.get("peer/0"))
    with socket.create_connection((known["address"], known["port"])) as slow:
        said = 0
        with contextlib.suppress(OSError):
            while said < 19:  # one more would be a whole hello
                said += slow.send(b"x")
                time.sleep(0.1)
    assert said < 19


def test_listener_outlives_a_lack_of_files(
    peers: list[PeerConnections], values: SharedValues, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "too many open files")] * 4

    def fail_at_first(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_at_first)
    received = bytearray(6)
    receiver, ended = outcome_of(lambda: peers[0].receive([memoryview(received)], 1))
    values.get("peer/0")
    peers[1].send([memoryview(b"honest")], 0)
    receiver.join(GUARD_S)
    assert (bytes(received), ended) == (b"honest", [None])


@pytest.mark.parametrize(
    "published",
    [b"", b"[]", b"{}", b"\xff", {"port": 70000}, {"port": None}, {"address": "h" * 300}, {"secret": "xy"}],
    ids=str,
)
def test_address_that_cannot_be_read_is_a_protocol_error(
    peers: list[PeerConnections], values: SharedValues, published
) -> None:
    right = {"node": "nowhere", "address": "127.0.0.1", "port": 1, "secret": "0f" * 16}
    values.put("peer/1", published if isinstance(published, bytes) else json.dumps({**right, **published}).encode())
    with pytest.raises(ProtocolError, match="rank 1"):
        peers[0].send([memoryview(b"x")], 1)


def test_receiver_whom_nobody_can_reach_any_more_is_told(
    peers: list[PeerConnections], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threads.start

    def fail(run: Callable[[], object], *, name: str, **kwargs: Any) -> threading.Thread:
        if name == "ef-peer":
            raise RuntimeError("can't start new thread")
        return start(run, name=name, **kwargs)

    monkeypatch.setattr(threads, "start", fail)
    receiver, ended = outcome_of(lambda: peers[0].receive([memoryview(bytearray(3))], 1))
    outcome_of(lambda: peers[1].send([memoryview(b"abc")], 0))
    receiver.join(GUARD_S)
    (error,) = ended
    assert isinstance(error, ThreadFailed)
    assert str(error).endswith("accepts other members has failed: RuntimeError: can't start new thread")


def test_sender_whose_welcome_fails_is_told(peers: list[PeerConnections], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hmac, "compare_digest", lambda *args: 1 / 0)
    outcome_of(lambda: peers[0].receive([memoryview(bytearray(LARGE))], 1))
    sender, ended = outcome_of(lambda: peers[1].send([memoryview(bytes(LARGE))], 0))
    sender.join(GUARD_S)
    assert isinstance(ended[0], GroupBroken)


# ---------------------------------------------------------------- TLS

under_tls = pytest.mark.parametrize("peers", ["TLS"], indirect=True)


@under_tls
def test_worker_of_another_job_that_knows_the_secret_is_turned_away(
    peers: list[PeerConnections], values: SharedValues
) -> None:
    received = bytearray(6)
    receiver, ended = outcome_of(lambda: peers[0].receive([memoryview(received)], 1))
    for stranger in (
        PeerConnections(peers[1]._view, 1, values, tls=Tls(OTHERS.worker)),
        PeerConnections(peers[1]._view, 1, values),
    ):
        with contextlib.closing(stranger), pytest.raises(GroupBroken):
            stranger.send([memoryview(bytes(LARGE))] * 100, 0)
    peers[1].send([memoryview(b"honest")], 0)
    receiver.join(GUARD_S)
    assert (bytes(received), ended) == (b"honest", [None])


@under_tls
def test_key_of_a_coordinator_is_none_of_a_worker(peers: list[PeerConnections], values: SharedValues) -> None:
    peers[0]._tls = Tls(TRUST.coordinator)
    outcome_of(lambda: peers[0].receive([memoryview(bytearray(1))], 1))
    with pytest.raises(GroupBroken, match="Hostname mismatch"):
        peers[1].send([memoryview(b"x")], 0)


@under_tls
def test_what_is_sent_cannot_be_read_and_what_was_changed_breaks_the_group(
    peers: list[PeerConnections], values: SharedValues
) -> None:
    first, second = bytearray(LARGE), bytearray(LARGE)
    receiver, ended = outcome_of(lambda: peers[0].receive([memoryview(first), memoryview(second)], 1))
    known = json.loads(values.get("peer/0"))
    with Tap((known["address"], known["port"])) as tap:
        values.put("peer/0", json.dumps({**known, "port": tap.address[1]}).encode())
        peers[1].send([memoryview(b"a weight" * (LARGE // 8))], 0)
        poll_until(lambda: first.endswith(b"a weight"))  # all of it has passed
        tap.changes = True
        outcome_of(lambda: peers[1].send([memoryview(b"a weight" * (LARGE // 8))], 0))
        receiver.join(GUARD_S)
        assert b"a weight" not in tap.passed
    assert tap.changed.is_set()
    assert first == b"a weight" * (LARGE // 8)
    assert [type(error) for error in ended] == [GroupBroken]
    assert bytes(second).rstrip(b"\0").replace(b"a weight", b"") in {b"a weight"[:n] for n in range(8)}


@pytest.mark.parametrize("peers", ["three nodes", "TLS"], indirect=True)
def test_connection_that_is_taken_over_breaks_the_group(peers: list[PeerConnections], values: SharedValues) -> None:
    """Somebody else speaks after the greeting. In the clear, what he says is taken for the sender's."""
    first, second = bytearray(6), bytearray(6)
    receiver, ended = outcome_of(lambda: peers[0].receive([memoryview(first), memoryview(second)], 1))
    known = json.loads(values.get("peer/0"))
    with Tap((known["address"], known["port"])) as tap:
        values.put("peer/0", json.dumps({**known, "port": tap.address[1]}).encode())
        peers[1].send([memoryview(b"honest")], 0)
        poll_until(lambda: first == b"honest")
        tap.inject(b"poison")
        receiver.join(GUARD_S)
    if peers[0]._tls is None:
        assert (bytes(second), ended) == (b"poison", [None])
    else:
        assert (bytes(second), [type(error) for error in ended]) == (bytes(6), [GroupBroken])


@under_tls
def test_receiver_that_is_closed_takes_nothing_encrypted_for_data(
    peers: list[PeerConnections], values: SharedValues
) -> None:
    """`SSLSocket.close` ends the encryption before the socket."""
    room = bytearray(4 * LARGE)
    receiver, ended = outcome_of(lambda: peers[0].receive([memoryview(room)], 1))
    outcome_of(lambda: peers[1].send([memoryview(b"a weight" * (LARGE // 2))], 0))
    poll_until(lambda: room[0] != 0)
    peers[0].close()
    receiver.join(GUARD_S)
    assert [type(error) for error in ended] == [GroupBroken]
    whole = bytes(room).rstrip(b"\0")
    assert len(whole) < len(room)
