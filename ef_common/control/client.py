"""A worker's side of the control plane: the real `ControlChannel` of :mod:`ef_common.session`."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping

from ef_common.control import wire
from ef_common.control.auth import Token
from ef_common.control.inbox import Inbox
from ef_common.control.line import Line, open_line
from ef_common.control.sockets import Address, format_address
from ef_common.core.place import Place
from ef_common.core.view import Member, View
from ef_common.errors import CoordinatorLost, Evicted, JobFinished, Left, ProtocolError

logger = logging.getLogger(__name__)

BEATS_PER_TIMEOUT = 4
"""A worker sends so many heartbeats within the heartbeat timeout."""
_JOIN_S = 5.0
_ABOVE_ALL = 1 << 60  # a generation that is newer than any view

_MESSAGES: Mapping[str, Callable[[int], wire.FromWorker]] = {
    "ready": lambda generation: wire.Ready(),
    "at_boundary": wire.AtBoundary,
    "suspect": wire.Suspect,
    "settled": wire.Settled,
    "leave": lambda generation: wire.Leave(),
    "close": lambda generation: wire.Close(),
    "bye": lambda generation: wire.Bye(),
}


class CoordinatorClient:
    """The line to the coordinator, read and kept alive by two threads.

    A forked child (a data worker) has no share in the line: its duplicate is closed at the fork.

    Args:
        address: Host and port of the coordinator.
        member: This worker. With an empty address the coordinator fills in the one that it sees.
        token: The job token, or None.
        connect_timeout_s: How long to try to reach the coordinator.
    """

    change_pending: bool

    def __init__(
        self, address: Address, member: Member, token: Token | None, *, connect_timeout_s: float = 60.0
    ) -> None:
        self.change_pending = False
        self._address = address
        self.member = member
        self._token = token
        self._connect_timeout_s = connect_timeout_s
        self._inbox = Inbox()
        self._line: Line | None = None
        self._process = 0
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()
        self._on_view: Callable[[int], None] = lambda generation: None
        self._place: Place | None = None

    def start(self, on_view: Callable[[int], None]) -> bool:
        """Connect and introduce this worker; `on_view(generation)` is called when a newer view is known.

        Returns:
            True if the job runs already: warm up, then send `ready`. False if the first view is there.

        Raises:
            AuthenticationError: The token is missing, or differs.
            CoordinatorLost: The coordinator cannot be reached, or was lost before the first view.
            JobFinished: The job has ended.
            ProtocolError: The peer is no coordinator, or one of another version.
        """
        if self._line is not None:
            raise ProtocolError(f"worker {self.member.id} starts its line to the coordinator twice")
        line, answer = open_line(self._address, self.member, self._token, timeout_s=self._connect_timeout_s)
        self._line = line
        self._process = os.getpid()
        self._on_view = on_view
        try:
            return self._begin(line, answer)
        except BaseException:
            self.stop()
            raise

    def _begin(self, line: Line, answer: wire.Welcome | wire.Finish) -> bool:
        if isinstance(answer, wire.Finish):
            raise JobFinished("the job has ended")
        line.trust(answer.heartbeat_timeout_s)
        self._receive(answer)
        self._spawn("elasticflow-reader", lambda: self._read(line))
        self._spawn("elasticflow-heartbeat", lambda: self._beat(line, answer.heartbeat_timeout_s))
        return self._inbox.wait_start()

    def send(self, kind: str, generation: int = 0) -> None:
        """Tell the coordinator: `ready`, `at_boundary`, `suspect`, `settled`, `leave`, `close`, `bye`."""
        if kind not in _MESSAGES:
            raise ProtocolError(f"a worker sends one of {', '.join(_MESSAGES)}. Received: kind={kind!r}")
        self._send(_MESSAGES[kind](generation))

    def next_view(self, after: int) -> View:
        """Wait for the newest view with a generation above `after`.

        Raises:
            CoordinatorLost: The line has ended, and no newer view is known.
            Evicted: The others went on without this worker.
            JobFinished: The job has ended.
            Left: This worker asked to leave, and is out.
        """
        return self._inbox.wait_view(after)

    def bootstrap(self, generation: int) -> RelayBootstrap:
        """Exchange of values among the members of one view, relayed by the coordinator."""
        return RelayBootstrap(self._inbox, self._send, generation)

    def tell_place(self, place: Place) -> None:
        """Have the next heartbeats tell where this member is; never waits. One that names too much is not told."""
        if len(place.returned) <= wire.MAX_RETURNED:
            self._place = place

    def job_place(self) -> Place | None:
        """In a newcomer: where the members are, as far as is known.

        Raises:
            CoordinatorLost: The line has ended.
            JobFinished: The job has ended.
        """
        return self._inbox.place()

    def stop(self) -> None:
        """Close the line. May be repeated."""
        if self._line is None or self._process != os.getpid():
            return  # not started, or a forked copy, whose locks may be held by threads that it lacks
        self._stopped.set()
        self._line.hang_up()
        self._inbox.put_end(CoordinatorLost("this worker has closed its line to the coordinator"))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
        self._line.close()

    # ------------------------------------------------------------ threads

    def _spawn(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _beat(self, line: Line, timeout_s: float) -> None:
        while not self._stopped.wait(timeout_s / BEATS_PER_TIMEOUT):
            line.send(wire.Heartbeat(self._place))

    def _read(self, line: Line) -> None:
        where = format_address(self._address)
        try:
            while (message := line.receive()) is not None:
                self._receive(message)
            end = f"the connection to the coordinator at {where} has ended"
        except ProtocolError as error:
            end = f"the coordinator at {where} sent what the protocol does not allow: {error}"
        line.hang_up()
        self._stopped.set()
        self._inbox.put_end(CoordinatorLost(end))

    def _send(self, message: wire.FromWorker) -> None:
        if self._line is not None:
            self._line.send(message)

    # ------------------------------------------------------------ messages

    def _receive(self, message: wire.FromCoordinator) -> None:
        match message:
            case wire.NewView(view):
                self._receive_view(view)
            case wire.Relay(generation, key, value):
                self._inbox.put_value(generation, key, value)
            case wire.Announce(generation):
                if generation == self._inbox.generation:
                    self.change_pending = True
            case wire.Welcome(warm_up=warm_up):
                if warm_up:
                    self._inbox.put_warm_up()
            case wire.JobPlace(place):
                self._inbox.put_place(place)
            case wire.Finish():
                self._inbox.put_end(JobFinished("the job has ended"))
            case wire.Evicted(reason):
                self._inbox.put_end(Evicted(f"the others went on without worker {self.member.id}: {reason}"))
                # A world of one has no peers whose loss would tell it: it must ask at its next boundary.
                self.change_pending = True
                self._tell(_ABOVE_ALL)
            case wire.Error(reason=reason):
                self._inbox.put_end(CoordinatorLost(f"the coordinator closed the connection: {reason}"))
            case wire.Challenge():
                raise ProtocolError("a second challenge")

    def _receive_view(self, view: View) -> None:
        if view.rank_of(self.member.id) is None:
            self._inbox.put_end(Left(view.reason, last=not view.members))
        elif view.generation <= self._inbox.generation:
            raise ProtocolError(f"view {view.generation} came after view {self._inbox.generation}")
        else:
            self.change_pending = False
            self._inbox.put_view(view)
        self._tell(view.generation)

    def _tell(self, generation: int) -> None:
        try:
            self._on_view(generation)
        except Exception:
            # Whatever it is, the line must stay alive; the worker's own thread will meet the cause.
            logger.exception("ending the group of the view before view %d failed", generation)


class RelayBootstrap:
    """The `Bootstrap` port of one view: values go to all other members by way of the coordinator."""

    def __init__(self, inbox: Inbox, send: Callable[[wire.FromWorker], None], generation: int) -> None:
        self._inbox = inbox
        self._send = send
        self._generation = generation

    def put(self, key: str, value: bytes) -> None:
        """Publish a value to the members of the view."""
        self._inbox.put_value(self._generation, key, value)
        self._send(wire.Relay(self._generation, key, value))

    def get(self, key: str) -> bytes:
        """Wait for a value that a member publishes.

        Raises:
            GroupBroken: The view has been replaced, or the line to the coordinator is lost.
        """
        return self._inbox.wait_value(self._generation, key)

    def replaced(self) -> bool:
        """A newer view is known, or the line is lost: nobody should wait for this view's group any more."""
        return self._inbox.ended or self._inbox.generation != self._generation
