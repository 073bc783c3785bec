"""Lets a launcher, which is not a worker, exchange a message with the leading coordinator."""

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

ANSWER_S = 2.0
_KEY = new_nonce()


def ask_leader(
    addresses: Sequence[Address], member: Member, token: Token | None, message: wire.Fail | wire.Inquire
) -> wire.FromCoordinator | None:
    """Send a message to the leading coordinator; each step with each address takes at most `ANSWER_S`.

    Args:
        addresses: Where the coordinator may be. A standby may name another address.
        member: The sender; nobody else may have its id.
        token: The job token, or None.
        message: The message.

    Returns:
        The answer; None if nobody was reached, or nobody leads.
    """
    todo = list(addresses)
    asked: set[Address] = set()
    while todo:
        address = todo.pop(0)
        if address in asked:
            continue
        asked.add(address)
        try:
            answer = _ask(address, member, token, message)
        except (OSError, ProtocolError, AuthenticationError) as error:
            logger.debug("no coordinator at %s: %s", format_address(address), error)
            continue
        if not isinstance(answer, wire.Redirect):
            if answer is not None:
                return answer
        elif answer.address:
            todo.insert(0, parse_address(answer.address, what="the address that a standby named"))
    return None


def _ask(
    address: Address, member: Member, token: Token | None, message: wire.Fail | wire.Inquire
) -> wire.FromCoordinator | None:
    line, answer = attempt_line(address, member, token, key=_KEY, timeout_s=ANSWER_S, returning=True)
    try:
        if not isinstance(answer, wire.Welcome):
            return answer
        line.send(message)
        return _answer(line)
    finally:
        line.close()


def _answer(line: Line) -> wire.FromCoordinator | None:
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        answer = line.receive()
        if answer is None or isinstance(answer, (wire.Failed, wire.Redirect, wire.Evicted, wire.Alive)):
            return answer
    return None
