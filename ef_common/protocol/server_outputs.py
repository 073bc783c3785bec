"""What :class:`~ef_common.protocol.server.CoordinatorServer` asks of whoever runs it."""

from __future__ import annotations

from dataclasses import dataclass

from ef_common.core.view import Member
from ef_common.protocol.peer import Peer


@dataclass(frozen=True, slots=True)
class Write:
    """Send bytes to a peer, after all that it was sent before. It is never waited for.

    Args:
        peer: To whom.
        data: What.
        can_wait: Leave the bytes out if the peer has not read the earlier ones: they will be repeated.
    """

    peer: Peer
    data: bytes
    can_wait: bool = False


@dataclass(frozen=True, slots=True)
class WriteOrReset:
    """Send bytes that must precede any end of the connection.

    If they do not leave at once, reset the connection, and report :attr:`~ef_common.protocol.peer.End.UNSENT`.
    """

    peer: Peer
    data: bytes


@dataclass(frozen=True, slots=True)
class Close:
    """End a connection. Last words get a moment to be read; without any, it ends at once.

    Args:
        peer: Whose.
        last_words: What it is told before.
        resets: It must not take the end for one in order, because others may go on without it, and it lives.
    """

    peer: Peer
    last_words: bytes = b""
    resets: bool = False


@dataclass(frozen=True, slots=True)
class Probe:
    """Check whether the process of a member still listens, and report if its system refuses the connection."""

    member: Member


Output = Write | WriteOrReset | Close | Probe
