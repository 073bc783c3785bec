from __future__ import annotations

import errno
import os
import socket
import struct
import threading

import pytest

from ef_common.control.control_connection import ControlConnection
from ef_common.protocol import wire
from tests.waiting import poll_until

BYE = wire.encode(wire.Bye())


def test_message_that_is_left_to_a_thread_that_is_sending_comes_before_the_end() -> None:
    ours, theirs = socket.socketpair()
    connection = ControlConnection(ours)
    with theirs, theirs.makefile("rb") as heard:
        connection._sending.acquire()  # a heartbeat is being sent
        connection.queue(BYE)
        connection.flush()
        timer = threading.Timer(0.2, connection._sending.release)
        timer.start()
        connection.end_sending(30.0)
        assert heard.read() == BYE
        timer.join()
    connection.close()


def test_end_does_not_wait_for_ever_for_a_thread_that_is_sending() -> None:
    ours, theirs = socket.socketpair()
    connection = ControlConnection(ours)
    with theirs, theirs.makefile("rb") as heard, connection._sending:
        connection.queue(BYE)
        connection.flush()
        connection.end_sending(0.05)
        assert heard.read() == b""
    connection.close()


@pytest.mark.parametrize("in_order", [True, False])
def test_end_that_a_sender_meets_before_the_reader_does_is_told_from_a_reset(in_order: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = ControlConnection.connect(server.getsockname(), 30.0)
        peer, _ = server.accept()
        if not in_order:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
        peer.close()  # nobody reads at this end

        def has_failed() -> bool:
            connection.queue(BYE)
            connection.flush()
            return connection._failed

        poll_until(has_failed)
        assert connection.read() == b""
        assert connection.ended_by_peer == in_order
        connection.close()


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ECONNRESET])
def test_connection_that_the_system_has_given_up_ends_and_not_in_order(number: int) -> None:
    """That of a host that has vanished: Python calls the first of these a TimeoutError."""

    class GivenUp(socket.socket):
        def recv_into(self, *args: object) -> int:
            raise OSError(number, os.strerror(number))

    ours, theirs = socket.socketpair()
    connection = ControlConnection(GivenUp(fileno=ours.detach()))
    with theirs:
        assert connection.read() == b""
        assert not connection.ended_by_peer
        connection.close()


def test_reader_that_has_a_limit_of_its_own_is_told_when_it_is_over() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(0.01)
    connection = ControlConnection(ours)
    with theirs, pytest.raises(TimeoutError):
        connection.read()
    connection.close()
