"""Tells other coordinators that this one leads or gathers members, or that the job has failed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from ef_common import threads
from ef_common.control.leader_request import Conversation
from ef_common.core.view import Member
from ef_common.errors import AuthenticationError, ProtocolError
from ef_common.protocol import wire
from ef_common.protocol.addresses import LOOPBACK, Address
from ef_common.protocol.announcer import LOOK_S, Announcer
from ef_common.protocol.auth import Token
from ef_common.protocol.endpoint_announcer import EndpointAnnouncer
from ef_common.protocol.server import CoordinatorServer
from ef_common.tls import Tls

logger = logging.getLogger(__name__)

_AFTER_FAULT_S = 5.0
_ATTEMPT_S = 0.5


class LeaderAnnouncer:
    """Threads that carry out what an `Announcer` and an `EndpointAnnouncer` choose.

    Each has a thread of its own: an address that does not answer takes half a second, and there may be many standbys.

    Args:
        name: The coordinator's.
        server: What it has decided, and whom it has heard of.
        token: The job token, or None.
        announcer: Which standbys are to be told.
        to_endpoints: Which endpoints are to be told.
        tls: The identity of this coordinator, if connections are encrypted.
    """

    def __init__(
        self,
        name: str,
        server: CoordinatorServer,
        token: Token | None,
        announcer: Announcer,
        to_endpoints: EndpointAnnouncer,
        *,
        tls: Tls | None = None,
    ) -> None:
        self._tls = tls
        self._member = Member(name, "coordinator", LOOPBACK)
        self._server = server
        self._token = token
        self._announcer = announcer
        self._to_endpoints = to_endpoints
        self._stopped = threading.Event()
        self._told_failure = threading.Event()  # every standby has been told, or tried

    def start(self) -> None:
        """Start the threads."""
        for look in (self._look, *([self._look_at_endpoints] if self._to_endpoints.endpoints else [])):
            run = partial(self._run, look)
            threads.start(run, name="elasticflow-announcer", job="tells other coordinators who leads")

    def wait_until_told(self, timeout_s: float) -> None:
        """Wait at most so long until each standby that was heard of has been told of a failure, or tried in vain."""
        self._told_failure.wait(timeout_s)

    def stop(self) -> None:
        """End the threads without waiting for a connection attempt. May be repeated."""
        self._stopped.set()

    def _run(self, look: Callable[[], None]) -> None:
        pause_s = LOOK_S
        while not self._stopped.wait(pause_s):
            pause_s = LOOK_S
            try:
                look()
            except Exception:  # other coordinators wait for the news, so the thread must continue
                logger.exception("other coordinators cannot be told what this one knows; trying again")
                pause_s = _AFTER_FAULT_S

    def _look(self) -> None:
        """Tell every standby whose turn it is; who is heard of meanwhile has its turn soon, too."""
        server = self._server
        has_failed = bool(server.state.failed)  # read first: the standbys that are to hear of it are noted before it
        standbys, seen_at = server.standbys.addresses, time.monotonic()
        while not self._stopped.is_set():
            now = time.monotonic()
            if now >= seen_at + LOOK_S:  # not for each, as all of them are compared when one has come or gone
                standbys, seen_at = server.standbys.addresses, now
            address = self._announcer.next(server.state, standbys, now)
            if address is None:
                if has_failed:
                    self._told_failure.set()
                return
            try:
                if self._tell(address, self._announcer.news):
                    self._announcer.told(address)
            except ConnectionRefusedError:
                self._announcer.refused(address)
                server.standbys.forget(address)

    def _look_at_endpoints(self) -> None:
        """Tell every endpoint whose turn it is."""
        announcer = self._to_endpoints
        while not self._stopped.is_set():
            address = announcer.next(self._server.state, time.monotonic())
            if address is None:
                return
            try:
                if self._tell(address, announcer.news):
                    announcer.told(address)
                else:
                    announcer.unanswered(address, time.monotonic())
            except ConnectionRefusedError:
                announcer.refused(address)

    def _tell(self, address: Address, news: wire.Follow) -> bool:
        """Tell one coordinator; returns whether it has heard it.

        Raises:
            ConnectionRefusedError: Nobody listens there.
        """
        try:
            conversation = Conversation(address, self._member, self._token, timeout_s=_ATTEMPT_S, tls=self._tls)
        except ConnectionRefusedError:
            raise
        except (OSError, ProtocolError, AuthenticationError) as error:
            logger.debug("no coordinator at %s: %s", address, error)
        except Exception:  # the others must still be told
            logger.exception("the coordinator at %s cannot be told what this coordinator knows", address)
        else:
            conversation.send(news)
            conversation.close()
            return True
        return False
