from __future__ import annotations

from dataclasses import replace

import pytest

from ef_common.core.view import Member
from ef_common.errors import UsageError
from ef_common.protocol.auth import Token, coordinator_proof, new_nonce, proves, worker_proof

MEMBER = Member("a", "n", "10.0.0.1", 0, 2)


def proof_of(
    token: Token | None = None, *, server: str = "s", client: str = "c", key: str = "k", member: Member = MEMBER
) -> str:
    return worker_proof(token, server_nonce=server, client_nonce=client, key=key, member=member)


def test_proof_of_same_secret_is_equal():
    assert proves(proof_of(Token("secret")), proof_of(Token(" secret\n")))


@pytest.mark.parametrize(
    "other",
    [
        proof_of(None),
        proof_of(Token("other")),
        proof_of(Token("secret"), server="s2"),
        proof_of(Token("secret"), client="c2"),
        proof_of(Token("secret"), server="c", client="s"),
        proof_of(Token("secret"), key="k2"),
        coordinator_proof(Token("secret"), client_nonce="c", server_nonce="s"),
        *[
            proof_of(Token("secret"), member=replace(MEMBER, **change))
            for change in (
                {"id": "b"},
                {"node": "m"},
                {"address": ""},
                {"local_rank": 1},
                {"local_world_size": 3},
            )
        ],
        proof_of(Token("secret"), member=replace(MEMBER, id="an", node="")),
    ],
)
def test_proof_of_anything_else_differs(other):
    assert not proves(proof_of(Token("secret")), other)


def test_token_is_in_no_text_of_it():
    token = Token("hunter2")
    assert "hunter2" not in f"{token!r} {token}"


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_token_empty_raises_usage_error(text, tmp_path):
    with pytest.raises(UsageError, match="ELASTICFLOW_TOKEN must be the secret"):
        Token(text, source="ELASTICFLOW_TOKEN")
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(UsageError, match=str(path)):
        Token.from_file(path)


def test_token_file_is_stripped(tmp_path):
    path = tmp_path / "token"
    path.write_text("  hunter2\n")
    assert Token.from_file(path).secret == "hunter2"


def test_token_file_unreadable_raises_usage_error(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        Token.from_file(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        Token.from_file(tmp_path / "binary")


def test_nonces_differ():
    assert len({new_nonce() for _ in range(100)}) == 100


def test_lines_of_a_token_are_secrets_of_which_the_first_is_used():
    token = Token(" new \n\n\told\n")
    assert (token.secret, token.others, token.text) == ("new", ("old",), "new\nold")
    assert [one.secret for one in token.accepted] == ["new", "old"]
    assert proof_of(token) == proof_of(Token("new"))
    assert "old" not in f"{token!r} {token}"


def test_secret_for_workers_follows_from_the_token_and_not_the_other_way_round():
    token = Token("new\nold")
    assert [one.secret for one in token.for_workers().accepted] == [
        one.for_workers().secret for one in (Token("new"), Token("old"))
    ]
    assert len({token.secret, token.for_workers().secret, token.derive("x").hex(), token.derive("y").hex()}) == 4
