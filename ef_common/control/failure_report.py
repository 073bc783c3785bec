"""How a launcher, which is no worker, tells the coordinator that the job has failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ef_common.control import wire
from ef_common.control.auth import Token, new_nonce
from ef_common.control.line import Line, attempt_line
from ef_common.control.sockets import Address, format_address, parse_address
from ef_common.core.view import Member
from ef_common.errors import AuthenticationError, ProtocolError

logger = logging.getLogger(__name__)

REPORT_S = 2.0


def report_failure(addresses: Sequence[Address], member: Member, token: Token | None, why: str, *, fatal: bool) -> str:
    """Tell whoever leads; takes `REPORT_S` at most for each address.

    Args:
        addresses: Where the coordinator may be. A standby may name another address.
        member: Who tells; its id must be nobody else's.
        token: The job token, or None.
        why: One line.
        fatal: It ends the job. Else only if the job has not begun yet.

    Returns:
        Why the job has failed, as the coordinator has it; "" if it goes on, or nobody was reached.
    """
    todo = list(addresses)
    asked: set[Address] = set()
    while todo:
        address = todo.pop(0)
        if address in asked:
            continue
        asked.add(address)
        try:
            answer = _ask(address, member, token, wire.Fail(why, fatal))
        except (OSError, ProtocolError, AuthenticationError) as error:
            logger.debug("no coordinator at %s: %s", format_address(address), error)
            continue
        if isinstance(answer, wire.Failed):
            return answer.why
        if isinstance(answer, wire.Redirect) and answer.address:
            todo.insert(0, parse_address(answer.address, what="the address that a standby named"))
    return ""


def _ask(address: Address, member: Member, token: Token | None, message: wire.Fail) -> wire.FromCoordinator | None:
    line, answer = attempt_line(address, member, token, key=new_nonce(), timeout_s=REPORT_S, returning=True)
    try:
        if not isinstance(answer, wire.Welcome):
            return answer
        line.send(message)
        return _decision(line)
    finally:
        line.close()


def _decision(line: Line) -> wire.FromCoordinator | None:
    deadline = time.monotonic() + REPORT_S
    while time.monotonic() < deadline:
        answer = line.receive()
        if answer is None or isinstance(answer, (wire.Failed, wire.Redirect, wire.Evicted)):
            return answer
    return None
