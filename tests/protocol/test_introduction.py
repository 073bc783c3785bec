"""The handshake, from the side that connects."""

from __future__ import annotations

import pytest

from ef_common import errors
from ef_common.core import membership
from ef_common.core.view import Member
from ef_common.protocol import wire
from ef_common.protocol.auth import Token, coordinator_proof
from ef_common.protocol.introduction import Introduction
from tests.diagrams import cases, rows

NONCE, TOKEN = "0f" * 16, Token("secret")
CHALLENGE = wire.Challenge(NONCE)
FORGED = "0" * 64


class Handshake:
    """A worker, and what a coordinator says to it."""

    def __init__(self) -> None:
        self._introduction = Introduction(Member("w", "n", ""), TOKEN, key="1e" * 16, address=("h", 1))
        self._hello: wire.FromWorker | None = None

    @property
    def state(self) -> str:
        if self._introduction.answer is not None:
            return "answered"
        return "connected" if self._hello is None else "challenged"

    def hear(self, message: wire.FromCoordinator | None) -> None:
        """Take a message of the coordinator; None for a proper welcome."""
        if message is None:
            assert isinstance(self._hello, wire.Hello)
            proof = coordinator_proof(TOKEN, client_nonce=self._hello.nonce, server_nonce=NONCE)
            message = wire.Welcome(membership.Accept("", False), 4.0, proof, ())
        self._introduction.lines.feed(wire.encode(message))
        if said := self._introduction.take():
            self._hello = wire.decode_from_worker(said.rstrip(b"\n"))


WITNESSES: dict[str, tuple[tuple[wire.FromCoordinator | None, ...], ...]] = {
    "connected → challenged": ((CHALLENGE,),),
    "challenged → answered": ((CHALLENGE, None),),
    "connected → ProtocolError": ((wire.Alive(),), (wire.Welcome(membership.Accept("", False), 4.0, FORGED, ()),)),
    "challenged → ProtocolError": ((CHALLENGE, CHALLENGE), (CHALLENGE, wire.Error("protocol", "it is full"))),
    "challenged → AuthenticationError": (
        (CHALLENGE, wire.Welcome(membership.Accept("", False), 4.0, FORGED, ())),
        (CHALLENGE, wire.Finished(membership.Finish(""), FORGED)),
        (CHALLENGE, wire.Error("authentication", "who is that?")),
    ),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(Introduction) == list(WITNESSES)


@pytest.mark.parametrize(("row", "case"), cases(WITNESSES))
def test_each_row_of_the_diagram_is_true(row: str, case: int) -> None:
    handshake = Handshake()
    *first, last = WITNESSES[row][case]
    for message in first:
        handshake.hear(message)
    before, after = row.split(" → ")
    assert handshake.state == before
    if not after.endswith("Error"):
        handshake.hear(last)
        assert handshake.state == after
        return
    with pytest.raises(getattr(errors, after)) as caught:
        handshake.hear(last)
    assert type(caught.value).__name__ == after
    assert handshake.state == before
