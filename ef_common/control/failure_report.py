"""Lets a launcher, which is not a worker, tell the coordinator that the job has failed."""

from __future__ import annotations

from collections.abc import Sequence

from ef_common.control import wire
from ef_common.control.auth import Token
from ef_common.control.errand import ask_leader
from ef_common.control.sockets import Address
from ef_common.core.view import Member


def report_failure(addresses: Sequence[Address], member: Member, token: Token | None, why: str, *, fatal: bool) -> str:
    """Report the failure to the leading coordinator.

    Args:
        addresses: Where the coordinator may be. A standby may name another address.
        member: The one that reports; nobody else may have its id.
        token: The job token, or None.
        why: One line.
        fatal: It ends the job. Else only if the job has not begun yet.

    Returns:
        Why the job has failed, as the coordinator has it; "" if it goes on, or nobody was reached.
    """
    answer = ask_leader(addresses, member, token, wire.Fail(why, fatal))
    return answer.why if isinstance(answer, wire.Failed) else ""
