"""A channel of TLS without its socket."""

from __future__ import annotations

import ssl
from collections.abc import Callable

import pytest

from ef_common.launch.certificates import trust_of
from ef_common.protocol.auth import Token
from ef_common.tls import COORDINATOR, WORKER, Channel, Credentials, Tls
from tests.diagrams import cases, rows

TRUST, OTHERS = trust_of(Token("hunter2"), "1"), trust_of(Token("another job's"), "1")


class Pair:
    """A worker that connects, and a coordinator that accepts it."""

    def __init__(self) -> None:
        self.worker = Tls(TRUST.worker).connects(COORDINATOR)
        self.coordinator = Tls(TRUST.coordinator).accepts()
        self.heard = b""

    @property
    def state(self) -> str:
        """That of the coordinator's end."""
        if self.coordinator._has_failed:
            return "failed"
        return "open" if self.coordinator.is_open else "shaking"

    def talk(self) -> None:
        """Carry bytes to and fro, until neither has any."""
        while data := self.worker.take():
            self.heard += self.coordinator.receive(data)
            self.worker.receive(self.coordinator.take())


def proves_its_identity(pair: Pair) -> None:
    pair.coordinator.send(b"early")
    assert pair.coordinator.take() == b""
    pair.coordinator.receive(pair.worker.take())
    pair.worker.receive(pair.coordinator.take())
    assert pair.worker.is_open  # before its certificate has been looked at
    pair.worker.send(b"word")
    assert pair.coordinator.receive(pair.worker.take()) == b"word"
    assert pair.worker.receive(pair.coordinator.take()) == b"early"
    assert pair.coordinator.peer == WORKER


def is_another_jobs(pair: Pair) -> None:
    stranger = Credentials(TRUST.worker.authorities, OTHERS.worker.certificate, OTHERS.worker.key)
    pair.worker = Tls(stranger).connects(COORDINATOR)
    with pytest.raises(ssl.SSLCertVerificationError):
        pair.talk()


def speaks_something_else(pair: Pair) -> None:
    with pytest.raises(ssl.SSLError):
        pair.coordinator.receive(b"GET / HTTP/1.1\r\n\r\n")


def is_changed(pair: Pair) -> None:
    pair.worker.send(b"word")
    data = bytearray(pair.worker.take())
    data[-1] ^= 1
    with pytest.raises(ssl.SSLError):
        pair.coordinator.receive(bytes(data))


WITNESSES: dict[str, tuple[tuple[Callable[[Pair], None], ...], ...]] = {
    "shaking → open": ((proves_its_identity,),),
    "shaking → failed": ((is_another_jobs,), (speaks_something_else,)),
    "open → failed": ((proves_its_identity, is_changed),),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(Channel) == list(WITNESSES)


@pytest.mark.parametrize(("row", "case"), cases(WITNESSES))
def test_each_row_of_the_diagram_is_true(row: str, case: int) -> None:
    pair = Pair()
    *first, last = WITNESSES[row][case]
    for act in first:
        act(pair)
    before = pair.state
    last(pair)
    assert row == f"{before} → {pair.state}"
    if pair.state == "failed":
        pair.coordinator.take()  # what tells the peer why
        pair.coordinator.send(b"more")
        assert pair.coordinator.take() == b""
