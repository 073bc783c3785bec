from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ef_common.collectives.bootstrap import SharedValues
from ef_common.collectives.links import Links
from ef_common.core.view import Member, View
from ef_common.errors import GroupBroken

GUARD_S = 20.0
LARGE = 1 << 24  # more than what sockets hold


@pytest.fixture
def values() -> SharedValues:
    return SharedValues()


@pytest.fixture(params=["one node", "three nodes"])
def links(request: pytest.FixtureRequest, values: SharedValues) -> Iterator[list[Links]]:
    nodes = ["n0"] * 3 if request.param == "one node" else ["n0", "n1", "n2"]
    view = View(1, tuple(Member(f"w{rank}", node, "127.0.0.1") for rank, node in enumerate(nodes)))
    members = [Links(view, rank, values) for rank in range(3)]
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


def test_parts_arrive_in_order_between_any_two(links: list[Links]) -> None:
    sent = {(a, b): [bytes([a, b]) * 5, b"", bytes([b]) * LARGE] for a in range(3) for b in range(3) if a != b}
    received = {pair: [bytearray(len(part)) for part in parts] for pair, parts in sent.items()}
    threads = [
        outcome_of(lambda a=a, b=b, parts=parts: links[a].send([memoryview(part) for part in parts], b))
        for (a, b), parts in sent.items()
    ]
    threads += [
        outcome_of(lambda a=a, b=b, parts=parts: links[b].receive([memoryview(part) for part in parts], a))
        for (a, b), parts in received.items()
    ]
    for thread, ended in threads:
        thread.join(GUARD_S)
        assert ended == [None]
    assert received == sent


def test_close_wakes_a_sender_and_its_receiver(links: list[Links]) -> None:
    sender, sent = outcome_of(lambda: links[0].send([memoryview(bytearray(LARGE))] * 20, 1))
    target = bytearray(10)
    links[1].receive([memoryview(target)], 0)
    receiver, received = outcome_of(lambda: links[1].receive([memoryview(bytearray(30 * LARGE))], 0))
    links[1].close()
    sender.join(GUARD_S)
    receiver.join(GUARD_S)
    assert [type(one) for one in sent + received] == [GroupBroken] * 2


def test_close_wakes_who_waits_for_a_connection(links: list[Links]) -> None:
    thread, ended = outcome_of(lambda: links[0].receive([memoryview(bytearray(1))], 2))
    links[0].close()
    thread.join(GUARD_S)
    assert [type(one) for one in ended] == [GroupBroken]


def test_after_close_nothing_works(links: list[Links]) -> None:
    links[0].close()
    links[0].close()
    with pytest.raises(GroupBroken):
        links[0].send([memoryview(b"x")], 1)
    with pytest.raises(GroupBroken):
        links[0].receive([memoryview(bytearray(1))], 1)


def test_stranger_without_the_secret_is_turned_away(links: list[Links], values: SharedValues) -> None:
    received = bytearray(6)
    receiver, at_receiver = outcome_of(lambda: links[0].receive([memoryview(received)], 1))
    known = json.loads(values.get("link/0"))
    within = socket.socket(socket.AF_UNIX)
    within.connect("\0" + known["node"])
    outside = socket.create_connection((known["address"], known["port"]))
    for stranger in (within, outside):
        with stranger:
            stranger.settimeout(GUARD_S)
            stranger.sendall(bytes(16) + (1).to_bytes(4, "big") + b"poison")
            assert not _reads(stranger)
    sender, at_sender = outcome_of(lambda: links[1].send([memoryview(b"honest")], 0))
    for thread in (receiver, sender):
        thread.join(GUARD_S)
    assert (bytes(received), at_receiver, at_sender) == (b"honest", [None], [None])


def _reads(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1)
    except ConnectionResetError:  # what was sent too much was not read
        return b""


def test_members_of_one_node_that_do_not_share_a_network_use_tcp(links: list[Links], values: SharedValues) -> None:
    received = bytearray(6)
    receiver, ended = outcome_of(lambda: links[0].receive([memoryview(received)], 1))
    known = json.loads(values.get("link/0"))
    values.put("link/0", json.dumps({**known, "node": "elsewhere"}).encode())
    links[1].send([memoryview(b"abcdef")], 0)
    receiver.join(GUARD_S)
    assert (bytes(received), ended) == (b"abcdef", [None])


@pytest.mark.parametrize("rank", [-1, 0, 3])
def test_rank_of_no_other_member_is_refused(links: list[Links], rank: int) -> None:
    with pytest.raises(ValueError, match=f"Received: {rank} of 3"):
        links[0].send([], rank)
    with pytest.raises(ValueError, match=f"Received: {rank} of 3"):
        links[0].receive([], rank)
