"""Which workers are admitted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ef_common.core.membership import Forming, Gathering, Membership, Phase, Returned, Serving
from ef_common.core.quorum import ChainLink
from ef_common.core.view import Member, View
from ef_common.protocol import wire
from ef_common.protocol.admission import Admission
from ef_common.protocol.auth import Token, coordinator_proof, worker_proof
from ef_common.protocol.peer import PeerRefusal
from tests.diagrams import rows

MEMBER, NONCE = Member("w", "n", ""), "0f" * 16
VIEW = View(1, (MEMBER,))


def hello(token: Token | None, key: str = "1e" * 16) -> wire.Hello:
    proof = worker_proof(token, server_nonce=NONCE, client_nonce="2d" * 16, key=key, member=MEMBER)
    return wire.Hello(MEMBER, "2d" * 16, key, proof, returning=False)


def test_proof_is_made_with_the_secret_that_the_worker_has() -> None:
    old, new = Token("old"), Token("new")
    admission = Admission(Token("new\nold"))
    for token in (old, new):
        expected = coordinator_proof(token, client_nonce="2d" * 16, server_nonce=NONCE)
        assert admission.prove(NONCE, hello(token)) == expected


@pytest.mark.parametrize(
    ("token", "shown", "why"),
    [(Token("a"), None, "has a job token"), (Token("a"), Token("b"), "has a job token"), (None, Token("b"), "has no")],
)
def test_worker_with_another_token_is_refused(token: Token | None, shown: Token | None, why: str) -> None:
    with pytest.raises(PeerRefusal, match=why) as refusal:
        Admission(token).prove(NONCE, hello(shown))
    assert refusal.value.code == "authentication"
    with pytest.raises(PeerRefusal):
        Admission(token).prove("3c" * 16, hello(token))  # an answer to another challenge


@pytest.mark.parametrize(
    ("state", "may_return"),
    [
        (Forming(), False),
        (Serving(view=VIEW, chain=(ChainLink(VIEW),)), True),
        (Gathering(since=0.0), False),
        (
            Gathering(since=0.0, returned={"w": Returned(MEMBER, Phase.MEMBER, promised=1, settled=1, received=())}),
            True,
        ),
    ],
)
def test_name_is_that_of_the_first_one_as_long_as_it_may_come_back(state: Membership, may_return: bool) -> None:
    admission = Admission(None)
    admission.remember("w", "1e" * 16)
    admission.forget(["w"], state)
    assert admission.known == ({"w"} if may_return else set())
    admission.prove(NONCE, hello(None))
    if may_return:
        with pytest.raises(PeerRefusal, match="worker w is somebody else"):
            admission.prove(NONCE, hello(None, key="4b" * 16))


def remembers(admission: Admission) -> None:
    admission.remember("w", "1e" * 16)


def forgets(admission: Admission) -> None:
    admission.forget(["w"], Forming())


WITNESSES: dict[str, tuple[Callable[[Admission], None], ...]] = {
    "unknown → known": (remembers,),
    "known → unknown": (remembers, forgets),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(Admission) == list(WITNESSES)


@pytest.mark.parametrize("row", WITNESSES)
def test_each_row_of_the_diagram_is_true(row: str) -> None:
    admission, shown = Admission(None), ["unknown"]
    for act in WITNESSES[row]:
        act(admission)
        shown.append("known" if "w" in admission.known else "unknown")
    assert row == " → ".join(shown[-2:])
