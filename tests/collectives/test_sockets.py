"""Sockets that a library opens in this process."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from ef_common.collectives.library_sockets import NewSockets, address_of, any_ended, keep_out, shut_down


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def listen(stack: contextlib.ExitStack, host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    return stack.enter_context(socket.create_server((host, port)))


def connect(stack: contextlib.ExitStack, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    near = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=5.0))
    far, _ = listener.accept()
    return near, stack.enter_context(far)


def identity(sock: socket.socket) -> tuple[int, int]:
    return sock.fileno(), os.fstat(sock.fileno()).st_ino


def test_connections_are_those_that_start_or_end_at_a_listener_of_the_group(stack: contextlib.ExitStack) -> None:
    old = connect(stack, listen(stack))
    with NewSockets() as new:
        ours = listen(stack)
        port = ours.getsockname()[1]
        others = listen(stack, "127.0.0.2", port)  # the same port at another address
        mine, theirs = connect(stack, ours), connect(stack, others)
    connected = new.connected({("127.0.0.1", port)})
    assert set(connected) == set(map(identity, mine))
    assert set(new.connected({("127.0.0.2", port)})) == set(map(identity, theirs))
    assert new.listening({("127.0.0.1", port)}) == [identity(ours)]
    assert new.listener() == identity(ours)
    assert address_of(*identity(ours)) == ("127.0.0.1", port)
    for descriptor, inode in connected:
        shut_down(descriptor, inode)
    assert any_ended(connected)
    assert not any_ended([identity(sock) for sock in (*old, *theirs)])


def test_nobody_comes_to_a_listener_that_is_kept_from_strangers_and_those_who_are_there_go_on(
    stack: contextlib.ExitStack,
) -> None:
    listener = listen(stack)
    near, far = connect(stack, listener)
    keep_out(*identity(listener))
    with pytest.raises(TimeoutError):
        socket.create_connection(listener.getsockname(), timeout=0.5)
    near.sendall(b"still here")
    assert far.recv(100) == b"still here"
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_descriptor_that_is_another_socket_by_now_is_left_alone(stack: contextlib.ExitStack) -> None:
    listener = listen(stack)
    descriptor, inode = identity(listener)
    keep_out(descriptor, inode + 1)
    shut_down(descriptor, inode + 1)
    assert connect(stack, listener)
    with pytest.raises(OSError, match="closed"):
        address_of(descriptor, inode + 1)


def test_kernel_that_keeps_nobody_out_is_an_error(stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ef_common.collectives.library_sockets._SO_ATTACH_FILTER", 999)
    with pytest.raises(OSError, match="not available"):
        keep_out(*identity(listen(stack)))
