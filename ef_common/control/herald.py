"""Tells other coordinators that this one leads or gathers members, or that the job has failed."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from ef_common.control import wire
from ef_common.control.auth import Token, new_nonce
from ef_common.control.line import attempt_line
from ef_common.control.sockets import LOOPBACK, Address
from ef_common.control.switchboard import Switchboard
from ef_common.core.view import Member
from ef_common.errors import AuthenticationError, ProtocolError

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_AGAIN_S = 5.0
_ATTEMPT_S = 0.5


@dataclass(frozen=True)
class _News:
    leads: bool = False
    failed: str = ""


class Herald:
    """A thread that notifies the standbys of all nodes, and any coordinator at the endpoint.

    It is repeated now and then. A standby that nobody listens for is gone for good; at the endpoint another agent may
    come up. A coordinator that has never taken over from another one, nor lost anybody without a word, has
    nothing to tell, unless the job has failed.

    Args:
        name: The coordinator's.
        switchboard: What it has decided, and whom it has heard of.
        token: The job token, or None.
        port: On which it listens.
        endpoint: Where new workers look for the coordinator, or None.
    """

    def __init__(
        self, name: str, switchboard: Switchboard, token: Token | None, *, port: int, endpoint: Address | None
    ) -> None:
        self._member = Member(name, "coordinator", LOOPBACK)
        self._switchboard = switchboard
        self._token = token
        self._key = new_nonce()
        self._port = port
        self._endpoint = endpoint
        self._stopped = threading.Event()
        self._due: dict[Address, float] = {}
        self._told = _News()
        self._thread = threading.Thread(target=self._run, name="elasticflow-herald", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread without waiting for a connection attempt. May be repeated."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            state = self._switchboard.state
            if not state.failed and (state.view is None or not state.contested):
                continue
            news = _News(leads=not state.failed and not state.held, failed=state.failed)
            if news != self._told and (news.leads or news.failed):
                self._due = {}
            self._told = news
            known = dict(self._switchboard.standbys)
            if self._endpoint is not None and not state.failed:  # the next job may be there already
                known[self._endpoint] = None
            self._due = {address: due for address, due in self._due.items() if address in known}
            for address in known:
                if not self._stopped.is_set() and time.monotonic() >= self._due.get(address, 0.0):
                    self._due[address] = time.monotonic() + self._tell(address, news)

    def _tell(self, address: Address, news: _News) -> float:
        """Notify one coordinator; returns the time until the next attempt in seconds."""
        try:
            line, _ = attempt_line(
                address, self._member, self._token, key=self._key, timeout_s=_ATTEMPT_S, returning=True
            )
        except ConnectionRefusedError:
            if address == self._endpoint:
                return 0.0
            self._switchboard.standbys.pop(address, None)
        except (OSError, ProtocolError, AuthenticationError) as error:
            logger.debug("no standby at %s: %s", address, error)
        else:
            line.send(wire.Follow(self._port, news.leads, news.failed))
            line.close()
        return _AGAIN_S
