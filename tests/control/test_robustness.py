"""What strangers and broken peers send must not touch the training."""

from __future__ import annotations

import logging
import resource
import socket
import time

import pytest

from ef_common.control.serving import MAX_UNSENT_BYTES
from ef_common.core import membership
from ef_common.protocol import sessions, wire
from ef_common.protocol.auth import Token
from ef_common.protocol.relay import MAX_RELAYED_BYTES
from tests.waiting import poll_until

_FIELDS = b'"member":["a","n","",0,1,0,0],"nonce":"%s","key":"%s","proof":"%s","returning":false,"downlink":false'
HELLO = b'{"v":13,"t":"hello",%s}\n' % (_FIELDS % (b"0" * 32, b"0" * 32, b"0" * 64))


def assert_untouched(coordinator, workers, join) -> None:
    """The view is the first one still, and the coordinator serves."""
    newcomer = join(coordinator, "check").started()
    newcomer.client.send("ready")
    for worker in workers:
        while not worker.client.change_pending:
            time.sleep(0.01)
        assert worker.views_noticed == [1]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n",
        b"\x00" * 5000,
        b"x" * 5000,
        b'{"v":13,"t":"heartbeat","watermark":null,"progress":null}\n',
        b'{"v":13,"t":"hello"}\n',
        b'{"v":13,"t":"relay","generation":1,"key":"k","value":""}\n',
        HELLO,
        wire.encode(wire.Relay(1, "k", b"x" * 5000)),
    ],
    ids=["http", "tls", "zeros", "long", "no hello", "version", "relay", "proof", "big"],
)
def test_stranger_with_garbage_is_closed_and_logged_once(form, join, dial, caplog, data):
    coordinator, workers = form(2, token=Token("hunter2"))
    for _ in range(5):
        peer = dial(coordinator)
        peer.say(data)
        messages = peer.hear_all()
        assert isinstance(messages[0], wire.Challenge)
        assert [type(message) for message in messages[1:]] == [wire.Error] or len(messages) == 1
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    newcomer = join(coordinator, "check", Token("hunter2")).started()
    assert newcomer.warm_up
    assert [worker.views_noticed for worker in workers] == [[1], [1]]


def test_half_a_message_and_silence_are_closed(serve, dial):
    coordinator = serve(heartbeat_timeout_s=0.2)
    half, idle = dial(coordinator), dial(coordinator)
    half.say(HELLO[:40])
    for peer in (half, idle):  # after two seconds
        kinds = [type(message) for message in peer.hear_all()]
        assert kinds == [wire.Challenge]  # a word would tell a worker that has stood still that it is refused


def test_half_a_message_and_a_reset_leave_the_training_untouched(form, join, dial):
    coordinator, workers = form(1)
    peer = dial(coordinator)
    peer.say(HELLO[:40])
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    peer.close()
    assert_untouched(coordinator, workers, join)


def test_member_with_garbage_is_dropped_and_nobody_else(form, dial, join, serve):
    coordinator = serve(2)
    rude = dial(coordinator)
    assert isinstance(rude.introduce("rude"), wire.Welcome)
    worker = join(coordinator, "polite").started()
    rude.say(b"{}\n")
    assert worker.client.next_view(1).ids == ("polite",)
    assert isinstance(rude.hear_all()[-1], wire.Error)


@pytest.mark.parametrize(
    "message",
    [membership.Ready(""), membership.Closed(""), membership.AtBoundary("", 1)],
    ids=lambda m: type(m).__name__,
)
def test_worker_with_an_illegal_event_is_dropped_and_nobody_else(form, join, dial, message):
    coordinator, workers = form(1)
    rude = dial(coordinator)
    assert isinstance(rude.introduce("rude"), wire.Welcome)
    if isinstance(message, membership.Ready):
        rude.say(message)
    rude.say(message)
    errors = [m for m in rude.hear_all() if isinstance(m, wire.Error)]
    assert "rude" in errors[0].reason
    assert_untouched(coordinator, workers, join)


def test_second_worker_of_the_same_id_is_dropped_and_the_first_is_not(form, join, dial):
    coordinator, workers = form(1)
    twin = dial(coordinator)
    answer = twin.introduce(workers[0].client.member.id)
    assert isinstance(answer, wire.Error)
    assert_untouched(coordinator, workers, join)


def test_member_that_does_not_read_is_dropped_and_nobody_else(serve, join, dial):
    num_talkers = 2 + 2 * MAX_UNSENT_BYTES // MAX_RELAYED_BYTES
    coordinator = serve(1 + num_talkers)
    deaf = dial(coordinator)
    assert isinstance(deaf.introduce("deaf"), wire.Welcome)
    talkers = [join(coordinator, f"talker{i}") for i in range(num_talkers)]
    value = b"x" * 700_000
    for talker in talkers:
        box = talker.started().client.bootstrap(1)
        for i in range(MAX_RELAYED_BYTES // (len(value) * 4 // 3 + 100)):
            box.put(f"{i}", value)
    assert set(talkers[0].client.next_view(1).ids) == {f"talker{i}" for i in range(num_talkers)}
    poll_until(lambda: len(coordinator._serving._open) == num_talkers)
    with pytest.raises(ConnectionResetError):  # an end in order would say that the coordinator has ended
        list(iter(lambda: deaf.socket.recv(1 << 20), b""))


def test_many_lines_at_once_are_all_taken(form, dial, serve, join):
    coordinator = serve(2)
    hasty = dial(coordinator)
    assert isinstance(hasty.introduce("hasty"), wire.Welcome)
    worker = join(coordinator, "calm").started()
    relays = [wire.Relay(1, f"{i}", b"v") for i in range(2000)]
    hasty.say(b"".join(map(wire.encode, relays)) + wire.encode(membership.Leaving("")))
    box = worker.client.bootstrap(1)
    assert all(box.get(f"{i}") == b"v" for i in range(2000))
    while not worker.client.change_pending:
        time.sleep(0.01)


def test_crowd_of_idle_connections_keeps_nobody_out(form, join, caplog, monkeypatch):
    num_allowed = 512
    monkeypatch.setattr(sessions, "MAX_STRANGERS", num_allowed)
    coordinator, workers = form(2)
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 3 * num_allowed  # the coordinator raised it
    crowd = []
    try:
        for _ in range(min(10_000, room)):
            sock = socket.socket()
            crowd.append(sock)
            sock.connect(coordinator.address)
        assert_untouched(coordinator, workers, join)
    finally:
        for sock in crowd:
            sock.close()
    assert len(crowd) > num_allowed
    assert sum("oldest unauthenticated" in r.getMessage() for r in caplog.records if r.levelno >= 30) == 1
