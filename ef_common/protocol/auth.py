"""The job token, and the proofs with which a worker and the coordinator show each other that they know it.

The token itself never crosses the network. Each side answers the other's nonce with an HMAC; the worker's covers
everything that it says about itself. Nothing is encrypted, and an attacker who can change packets on the network can
take over an authenticated connection, so run jobs on a network that you trust, as torchrun itself demands.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from ef_common.core.view import Member
from ef_common.errors import UsageError

_CONTEXT = "elasticflow control 3"


@dataclass(frozen=True, slots=True)
class Token:
    """The secret of one job, which all its workers and its coordinator share.

    Args:
        secret: The text; surrounding whitespace does not count.
        source: Where it came from, for messages.

    Raises:
        UsageError: The secret is empty.
    """

    secret: str = field(repr=False)
    source: str = "the job token"

    def __post_init__(self) -> None:
        object.__setattr__(self, "secret", self.secret.strip())
        if not self.secret:
            raise UsageError(f"{self.source} must be the secret that all workers of the job share. Received: nothing")

    @classmethod
    def from_file(cls, path: str | Path) -> Token:
        """Read the token from a file.

        Raises:
            UsageError: The file cannot be read, or is empty.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise UsageError(f"cannot read the job token: {reason}. Received: token_file={path}") from None
        return cls(text, source=f"the token file {path}")


def new_nonce() -> str:
    """Return a nonce that was never used before."""
    return secrets.token_hex(16)


def worker_proof(token: Token | None, *, server_nonce: str, client_nonce: str, key: str, member: Member) -> str:
    """Proof of a worker: HMAC(token, "worker" | server nonce | client nonce | key | member fields)."""
    numbers = (member.local_rank, member.local_world_size, member.standby, member.door)
    return _proof(token, "worker", server_nonce, client_nonce, key, member.id, member.node, member.address, *numbers)


def coordinator_proof(token: Token | None, *, client_nonce: str, server_nonce: str) -> str:
    """Proof of the coordinator: HMAC(token, "coordinator" | client nonce | server nonce)."""
    return _proof(token, "coordinator", client_nonce, server_nonce)


def page_key(token: Token) -> str:
    """Key of the job's live page: HMAC(token, "page"). It is sent, unlike the token, and only shows the page."""
    return _proof(token, "page")[:32]


def proves(expected: str, received: str) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(expected.encode(), received.encode())


def _proof(token: Token | None, *parts: str | int) -> str:
    key = b"" if token is None else token.secret.encode("utf-8", "surrogateescape")
    # JSON keeps the parts apart whatever characters they hold.
    return hmac.new(key, json.dumps([_CONTEXT, *parts]).encode(), hashlib.sha256).hexdigest()
