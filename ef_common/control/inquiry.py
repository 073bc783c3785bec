"""Lets a launcher ask the coordinator whether the others continue without one of its workers."""

from __future__ import annotations

from collections.abc import Sequence

from ef_common.control import wire
from ef_common.control.auth import Token
from ef_common.control.errand import ask_leader
from ef_common.control.sockets import Address
from ef_common.core.view import Member


def inquire(addresses: Sequence[Address], member: Member, token: Token | None, worker: str) -> str | None:
    """Ask the leading coordinator whether a worker is out.

    Args:
        addresses: Where the coordinator may be. A standby may name another address.
        member: The one that asks; nobody else may have its id.
        token: The job token, or None.
        worker: Id of the worker.

    Returns:
        Why it is out; "" if it is not, or that is not decided; None if nobody was reached who knows.
    """
    answer = ask_leader(addresses, member, token, wire.Inquire(worker))
    if isinstance(answer, (wire.Evicted, wire.Failed)):
        return answer.reason if isinstance(answer, wire.Evicted) else answer.why
    return "" if isinstance(answer, wire.Alive) else None
