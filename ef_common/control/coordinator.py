"""The coordinator: a server in its own thread, hosted by an agent or a worker."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ef_common import threads
from ef_common.control.leader_announcer import LeaderAnnouncer
from ef_common.control.serving import ServerLoop
from ef_common.control.sockets import call_in_forked_children, listen, raise_file_limit
from ef_common.core.founding import FINISHED, LEFT
from ef_common.core.membership import Gathering, Idle, Membership, Settings
from ef_common.core.progress import DEFAULT_HEARTBEAT_TIMEOUT_S, Limits
from ef_common.errors import ThreadFailed, UsageError
from ef_common.protocol.addresses import LOOPBACK, Address, format_address, is_loopback
from ef_common.protocol.announcer import Announcer
from ef_common.protocol.auth import Token
from ef_common.protocol.endpoint_announcer import EndpointAnnouncer
from ef_common.protocol.server import CoordinatorServer
from ef_common.tls import Credentials, Tls

logger = logging.getLogger(__name__)

_TIMEOUTS_TO_NOTICE = 1.5
_STOP_S = 10.0


class Coordinator:
    """Serves the membership of one job.

    Without a token it listens on the loopback interface only, whatever address is asked for.

    Args:
        address: Host and port to listen on; an empty host means all interfaces, port 0 a free one.
        token: The job token, or None.
        settings: Settings of the membership. `loss_notice_s` is derived from the heartbeat timeout.
        heartbeat_timeout_s: A worker that is silent for longer is evicted. All other times of the control
            plane follow from it: workers send four heartbeats in it, and a loss is noticed for sure within
            1.25 times as long.
        hang_timeout_s: A worker that keeps the others waiting for longer in a training step is evicted; None for a
            limit that is learned (:mod:`ef_common.core.progress`), 0 for none.
        standby: It leads nobody until members of a job come to it that have lost their coordinator.
        endpoints: Where newcomers look for the job; if it leads, it tells whoever is there instead.
        credentials: Its identity, if connections are encrypted.
        job: Name of the job; "" if it has none.

    Raises:
        UsageError: The heartbeat timeout is not positive, or the credentials cannot be used.
    """

    def __init__(
        self,
        address: Address,
        *,
        token: Token | None = None,
        settings: Settings | None = None,
        heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
        hang_timeout_s: float | None = None,
        standby: bool = False,
        endpoints: Sequence[Address] = (),
        credentials: Credentials | None = None,
        job: str = "",
    ) -> None:
        if not 0.1 <= heartbeat_timeout_s <= 3600:
            raise UsageError(
                f"the heartbeat timeout must be 0.1 to 3600 seconds. Received: heartbeat_timeout={heartbeat_timeout_s}"
            )
        self._tls = None if credentials is None else Tls(credentials)
        self._wanted = address
        self._bound: Address | None = None
        self._token = token
        loss_notice_s = _TIMEOUTS_TO_NOTICE * heartbeat_timeout_s
        self._settings = replace(settings or Settings(), loss_notice_s=loss_notice_s)
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._limits = Limits(hang_timeout_s=hang_timeout_s)
        self._standby = standby
        self._endpoints = endpoints
        self._name = secrets.token_hex(8)
        self._job = job
        self._announcer: LeaderAnnouncer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._server: CoordinatorServer | None = None
        self._serving: ServerLoop | None = None
        self._population = 0
        self._has_begun = False
        self._population_changed = threading.Condition()
        self._faults_logged: set[str] = set()
        self._broken: ThreadFailed | None = None  # the thread has ended, so nobody is served any more

    @property
    def address(self) -> Address:
        """The host and port on which it listens.

        Raises:
            UsageError: It has not been started.
        """
        if self._bound is None:
            raise UsageError("the coordinator listens nowhere before start()")
        return self._bound

    @property
    def _state(self) -> Membership | None:
        return None if self._server is None else self._server.state

    @property
    def has_begun(self) -> bool:
        """Whether a worker has connected, even if it has gone already."""
        return self._has_begun

    @property
    def is_over(self) -> bool:
        """Whether the job has ended or failed."""
        state = self._state
        return state is not None and (state.closed or bool(state.failed))

    @property
    def failure(self) -> str:
        """Why the job has failed; "" if it has not."""
        return "" if self._state is None else self._state.failed

    @property
    def leads(self) -> bool:
        """Whether it leads members, or waits for the first ones, or gathers those of another coordinator."""
        return self._broken is None and self._state is not None and not isinstance(self._state, Idle)

    @property
    def outcome(self) -> str:
        """How the job has ended under its lead, as :mod:`ef_common.core.founding` names it; "" if that is not sure."""
        state = self._state
        if state is None or state.failed or isinstance(state, Idle):
            return ""
        if state.closed:
            return FINISHED
        has_members = state.view is not None or isinstance(state, Gathering) or state.workers
        return "" if has_members or self._settings.on_minority == "continue" else LEFT

    def check(self) -> None:
        """Make sure that it still serves.

        Raises:
            ThreadFailed: Its thread has failed. All connections have ended.
        """
        if self._broken is not None:
            raise self._broken

    def start(self) -> None:
        """Listen, and serve in a thread.

        Raises:
            OSError: The address cannot be bound (EADDRINUSE: another coordinator has it).
        """
        raise_file_limit()
        address = self._address_to_bind()
        listener = listen(address)
        if address != self._wanted:
            self._say_what_lacks()
        host, port = listener.getsockname()[:2]
        self._bound = (host, port)
        self._loop = asyncio.SelectorEventLoop()
        self._loop.set_exception_handler(self._log_fault)
        self._server = CoordinatorServer(
            self._loop.time(),
            token=self._token,
            settings=replace(self._settings, port=port),
            heartbeat_timeout_s=self._heartbeat_timeout_s,
            limits=self._limits,
            standby=self._standby,
            name=self._name,
            job=self._job,
        )
        self._serving = ServerLoop(self._loop, listener, self._server, self._note_population, self._tls)
        announcer = Announcer(port=port, endpoints=self._endpoints, job=self._job)
        to_endpoints = EndpointAnnouncer(port=port, endpoints=self._endpoints, job=self._job)
        self._announcer = LeaderAnnouncer(self._name, self._server, self._token, announcer, to_endpoints, tls=self._tls)
        call_in_forked_children(self._close_in_child)
        self._thread = threads.start(
            partial(self._serve, self._loop, self._serving, self._announcer),
            name="elasticflow-coordinator",
            job="serves the workers of the job",
            on_failure=self._break,
        )
        self._announcer.start()
        what = "a standby of the coordinator" if self._standby else "the coordinator"
        logger.info("%s listens on %s", what, format_address(self.address))

    def stop(self) -> None:
        """End all connections and the thread. May be repeated."""
        if self._loop is None or self._thread is None:
            return
        if self._announcer is not None:
            self._announcer.stop()
        if self._thread.is_alive():
            with suppress(RuntimeError):  # its thread has failed, and is about to end
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_STOP_S)
        self._thread = None

    def hand_over(self, node: str) -> bool:
        """Let the coordinator of another node lead, because this one is about to stop.

        Args:
            node: Name of the node of this coordinator.

        Returns:
            Whether there is one; `stop` may follow at once.
        """
        return self._call(CoordinatorServer.hand_over, node)

    def lead(self) -> bool:
        """Let this standby lead, because its agent has founded the job; False if it cannot."""
        return self._call(CoordinatorServer.lead)

    def follow(self, leader: Address) -> None:
        """Let this standby know that its agent has found the job, which is led from there."""
        self._call(CoordinatorServer.follow, format_address(leader))

    def _call(self, act: Callable[..., bool | None], *what: object) -> bool:
        """Report something to the server in its thread; False if that has failed or ended, or the server says no."""
        loop, serving = self._loop, self._serving
        if loop is None or serving is None or self._thread is None or not self._thread.is_alive():
            return False
        answer: Future[bool | None] = Future()
        try:
            loop.call_soon_threadsafe(lambda: answer.set_result(serving.report(act, serving.server, *what)))
            return answer.result(_STOP_S) is not False
        except (RuntimeError, NoAnswer):
            return False

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until no worker is connected; False if some are after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._population_changed:
            while self._population and (left := deadline - time.monotonic()) > 0:
                self._population_changed.wait(min(left, 1.0))
            return not self._population

    def wait_until_told(self, timeout_s: float) -> None:
        """If the job has failed, wait until other coordinators have been told of it: they may have the members."""
        if self.failure and self._announcer is not None:
            self._announcer.wait_until_told(timeout_s)

    def _address_to_bind(self) -> Address:
        host, port = self._wanted
        return (host, port) if self._token is not None or is_loopback(host) else (LOOPBACK, port)

    def _say_what_lacks(self) -> None:
        logger.warning(
            "There is no job token, so the coordinator listens on %s only: workers on other machines cannot "
            "join. Set ELASTICFLOW_TOKEN to the same secret on all nodes, or token_file in --rdzv-conf.",
            LOOPBACK,
        )

    def _note_population(self, number: int) -> None:
        with self._population_changed:
            self._population = number
            self._has_begun |= number > 0
            self._population_changed.notify_all()

    # ------------------------------------------------------------ in the thread

    def _serve(self, loop: asyncio.AbstractEventLoop, serving: ServerLoop, announcer: LeaderAnnouncer) -> None:
        with ExitStack() as at_end:  # all of it, whatever one of them raises: workers and `wait_until_idle` wait for it
            at_end.callback(self._note_population, 0)
            at_end.callback(loop.close)
            at_end.callback(serving.let_sockets_close)
            at_end.callback(serving.end_all)
            at_end.callback(announcer.stop)  # or it would go on telling others that this one leads
            at_end.callback(serving.stop)
            loop.call_soon(serving.start)
            loop.run_forever()

    def _break(self, failure: ThreadFailed) -> None:
        self._broken = failure

    def _log_fault(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """Log a fault of our own code, each kind once; the coordinator continues."""
        error = context.get("exception")
        kind = f"{type(error).__name__} {context.get('message')}"
        if kind not in self._faults_logged:
            self._faults_logged.add(kind)
            logger.error("fault in the coordinator: %s", context.get("message"), exc_info=error)

    def _close_in_child(self) -> None:
        if self._serving is not None:
            self._serving.close_in_child()
