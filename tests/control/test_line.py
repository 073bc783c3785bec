from __future__ import annotations

import socket
import threading

from ef_common.control.line import Line
from ef_common.protocol import wire

BYE = wire.encode(wire.Bye())


def test_message_that_is_left_to_a_thread_that_is_sending_comes_before_the_end() -> None:
    ours, theirs = socket.socketpair()
    line = Line(ours)
    with theirs, theirs.makefile("rb") as heard:
        line._sending.acquire()  # a heartbeat is being sent
        line.queue(BYE)
        line.flush()
        timer = threading.Timer(0.2, line._sending.release)
        timer.start()
        line.end_sending(30.0)
        assert heard.read() == BYE
        timer.join()
    line.close()


def test_end_does_not_wait_for_ever_for_a_thread_that_is_sending() -> None:
    ours, theirs = socket.socketpair()
    line = Line(ours)
    with theirs, theirs.makefile("rb") as heard, line._sending:
        line.queue(BYE)
        line.flush()
        line.end_sending(0.05)
        assert heard.read() == b""
    line.close()
