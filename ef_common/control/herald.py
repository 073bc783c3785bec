"""Tells other coordinators that this one leads or gathers members, or that the job has failed."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from ef_common import threads
from ef_common.control.leader_request import Conversation
from ef_common.core.view import Member
from ef_common.errors import AuthenticationError, ProtocolError
from ef_common.protocol import wire
from ef_common.protocol.addresses import LOOPBACK, Address
from ef_common.protocol.auth import Token, new_nonce
from ef_common.protocol.server import CoordinatorServer

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_AGAIN_S, _RARELY_S = 5.0, 15.0  # a worker looks for a coordinator for longer than either
_IN_DOUBT_S = 300.0
_ATTEMPT_S = 0.5


@dataclass(frozen=True)
class _News:
    leads: bool = False
    failed: str = ""


class Herald:
    """A thread that notifies the standbys of all nodes, and any coordinator at the endpoint.

    It repeats the news every 5 s for some minutes after the newest sign that others lead or look for a quorum, because
    workers may turn to a standby at any time meanwhile. Later it tries only the standbys that it has not reached so
    far, every 15 s: a node may be cut off for hours. A standby that gathers members announces that, which is such a
    sign again. A standby whose port is closed is gone for good; at the endpoint another agent may come up. A
    coordinator that has never taken over from another one, and never lost a worker without a word, has no news unless
    the job has failed.

    Args:
        name: The coordinator's.
        server: What it has decided, and whom it has heard of.
        token: The job token, or None.
        port: On which it listens.
        endpoint: Where new workers look for the coordinator, or None.
    """

    def __init__(
        self, name: str, server: CoordinatorServer, token: Token | None, *, port: int, endpoint: Address | None
    ) -> None:
        self._member = Member(name, "coordinator", LOOPBACK)
        self._server = server
        self._token = token
        self._key = new_nonce()
        self._port = port
        self._endpoint = endpoint
        self._stopped = threading.Event()
        self._tried: dict[Address, float] = {}  # time of the newest attempt
        self._heard: set[Address] = set()  # where an attempt has succeeded
        self._told = _News()
        self._news_at = 0.0

    def start(self) -> None:
        """Start the thread."""
        threads.start(self._run, name="elasticflow-herald", job="tells other coordinators who leads")

    def stop(self) -> None:
        """End the thread without waiting for a connection attempt. May be repeated."""
        self._stopped.set()

    def _run(self) -> None:
        pause_s = _LOOK_S
        while not self._stopped.wait(pause_s):
            pause_s = _LOOK_S
            try:
                self._look()
            except Exception:  # other coordinators wait for the news, so the thread must continue
                logger.exception("other coordinators cannot be told what this one knows; trying again")
                pause_s = _AGAIN_S

    def _look(self) -> None:
        """Notify every coordinator whose turn it is."""
        state = self._server.state
        if not state.failed and (state.view is None or not state.contested):
            return
        news = _News(leads=not state.failed and not state.held, failed=state.failed)
        if news != self._told and (news.leads or news.failed):
            self._tried, self._heard = {}, set()
            self._news_at = time.monotonic()
        self._told = news
        # A copy, because another thread changes it. The newest come first: former standbys may not answer any more.
        known = dict.fromkeys(reversed(list(self._server.standbys)))
        if self._endpoint is not None and not state.failed:  # the next job may be there already
            known[self._endpoint] = None
        self._tried = {address: when for address, when in self._tried.items() if address in known}
        self._heard.intersection_update(known)
        in_doubt = time.monotonic() < max(self._news_at, state.contested_at) + _IN_DOUBT_S
        for address in known:
            if not self._stopped.is_set() and self._is_due(address, in_doubt=in_doubt):
                self._tried[address] = time.monotonic()
                self._tell(address, news)

    def _is_due(self, address: Address, *, in_doubt: bool) -> bool:
        if address not in self._tried:
            return True
        since = time.monotonic() - self._tried[address]
        if in_doubt or address == self._endpoint:
            return since >= _AGAIN_S
        return address not in self._heard and since >= _RARELY_S

    def _tell(self, address: Address, news: _News) -> None:
        """Notify one coordinator."""
        try:
            conversation = Conversation(address, self._member, self._token, key=self._key, timeout_s=_ATTEMPT_S)
        except ConnectionRefusedError:
            if address == self._endpoint:
                del self._tried[address]  # a coordinator that comes up there must hear it at once
            else:
                self._server.standbys.pop(address, None)
        except (OSError, ProtocolError, AuthenticationError) as error:
            logger.debug("no standby at %s: %s", address, error)
        except Exception:  # the others must still be notified
            logger.exception("the standby at %s cannot be told what this coordinator knows", address)
        else:
            conversation.send(wire.Follow(self._port, news.leads, news.failed))
            conversation.close()
            self._heard.add(address)
