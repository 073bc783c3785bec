"""The job token, and the proofs with which a worker and the coordinator show each other that they know it.

The token itself never crosses the network. Each side answers the other's nonce with an HMAC; the worker's covers
everything that it says about itself. This encrypts nothing: without TLS (:mod:`ef_common.tls`), an attacker who can
change packets on the network can take over an authenticated connection, so run jobs on a network that you trust, as
torchrun itself demands.
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

    Several lines are several secrets: the first one is used, and a coordinator accepts the others, too. So a secret is
    replaced in a running job: each node is restarted with the old and the new one, then with the new and the old one,
    and then with the new one alone.

    Args:
        secret: The text; whitespace around a line, and empty lines, do not count. Afterwards, the first line.
        source: Where it came from, for messages.

    Attributes:
        others: The other lines.

    Raises:
        UsageError: The secret is empty.
    """

    secret: str = field(repr=False)
    source: str = "the job token"
    others: tuple[str, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        first, *others = [line.strip() for line in self.secret.split("\n") if line.strip()] or [""]
        object.__setattr__(self, "secret", first)
        object.__setattr__(self, "others", tuple(others))
        if not self.secret:
            raise UsageError(f"{self.source} must be the secret that all workers of the job share. Received: nothing")

    @property
    def accepted(self) -> tuple[Token, ...]:
        """A token for each of the secrets, the one in use first."""
        return tuple(Token(secret, self.source) for secret in (self.secret, *self.others))

    @property
    def text(self) -> str:
        """All secrets, one in each line."""
        return "\n".join((self.secret, *self.others))

    def derive(self, purpose: str) -> bytes:
        """32 bytes that follow from the secret in use, and from which it does not follow: HMAC(token, purpose)."""
        return bytes.fromhex(_proof(self, "derived", purpose))

    def for_workers(self) -> Token:
        """The token that coordinators accept from workers which must not know this one."""
        return self._derived("worker")

    def for_start(self, nonce: str) -> Token:
        """The token of one start of a job: another job, or another start, does not know it although it has this one."""
        return self._derived(f"start {nonce}")

    def _derived(self, purpose: str) -> Token:
        return Token("\n".join(one.derive(purpose).hex() for one in self.accepted), self.source)

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
    numbers = (member.local_rank, member.local_world_size, member.standby, member.liveness_port)
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
