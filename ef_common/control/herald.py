"""What a coordinator tells others of its kind: that it leads, that it gathers its members, that the job has failed."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from ef_common import threads
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
    """A thread that tells the standbys of all nodes, and whoever listens at the endpoint.

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

    def start(self) -> None:
        """Begin."""
        threads.start(self._run, name="elasticflow-herald", job="tells other coordinators who leads")

    def stop(self) -> None:
        """End; does not wait for a connection that is being tried. May be repeated."""
        self._stopped.set()

    def _run(self) -> None:
        pause_s = _LOOK_S
        while not self._stopped.wait(pause_s):
            pause_s = _LOOK_S
            try:
                self._look()
            except Exception:  # others wait to be told, so the thread must live on
                logger.exception("other coordinators cannot be told what this one knows; trying again")
                pause_s = _AGAIN_S

    def _look(self) -> None:
        """Tell all who are to be told now."""
        state = self._switchboard.state
        if not state.failed and (state.view is None or not state.contested):
            return
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
        """Tell one; returns how long to wait until the next time, in seconds."""
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
        except Exception:  # of this one alone
            logger.exception("the standby at %s cannot be told what this coordinator knows", address)
        else:
            line.send(wire.Follow(self._port, news.leads, news.failed))
            line.close()
        return _AGAIN_S
