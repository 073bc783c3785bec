"""A worker's side of the control plane: the real `ControlChannel` of :mod:`ef_common.session`."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from ef_common import threads
from ef_common.control.control_connection import ControlConnection
from ef_common.control.name_lookups import NameLookups
from ef_common.control.sockets import call_in_forked_children, listen
from ef_common.core.quorum import Bid
from ef_common.core.room import Room
from ef_common.core.stragglers import StragglerReport
from ef_common.core.view import Member, View
from ef_common.core.watermark import Watermark
from ef_common.errors import AuthenticationError, JobFailed, ProtocolError, StorageError, ThreadFailed
from ef_common.protocol.addresses import LOOPBACK, Address
from ef_common.protocol.auth import Token
from ef_common.protocol.client import Client
from ef_common.protocol.client_outputs import (
    AskForClaim,
    ClientOutput,
    Connect,
    CoordinatorLink,
    Disconnect,
    EndSending,
    Hung,
    Leave,
    Replaced,
    Send,
    TrustLeader,
)
from ef_common.session.crash_record import CrashRecord
from ef_common.session.ports import GetClaim
from ef_common.session.progress_tracker import ProgressTracker
from ef_common.tls import Tls

logger = logging.getLogger(__name__)
T = TypeVar("T")

FAIL_S = 2.0
"""How long a failed worker waits to hear that all others have been told."""
_GOODBYE_S = 1.0
"""How long a coordinator may take to end a connection that this worker has ended."""
_JOIN_S = 5.0
_NOTED_S = 1.0  # so often at least its agent sees that this process lives
_LOOK_AGAIN_S = 1.0  # waiting in slices lets Ctrl-C through on every platform


class CoordinatorClient:
    """Runs a :class:`~ef_common.protocol.client.Client` with threads: one connects and reads, one keeps the time.

    A third one reads the second connection to a coordinator, as long as there is one.

    Each call, message or deadline is taken in under one lock, by the thread that has it; what follows is done after
    the lock has been let go. A signal handler that interrupts its own thread in there leaves its call to it.

    A forked child (a data worker) has no share in the connection: its duplicate is closed at the fork.

    Args:
        address: Host and port of the coordinator.
        member: This worker. With an empty address the coordinator fills in the one that it sees.
        token: The job token, or None.
        connect_timeout_s: How long to try to reach the coordinator.
        tracker: How this worker moves on; its heartbeats tell it.
        crash_record: Where its heartbeats are recorded, until its main thread has heard of the end.
        on_hung: Called, in a thread of its own, when the others go on without this worker since it has kept them
            waiting: with the reason, and an event that is set as soon as the main thread has heard of it.
        on_straggling: Called with (slow, ratio, waiting) when this worker becomes a straggler, or is no longer one; see
            :class:`~ef_common.core.stragglers.StragglerReport`.
        tls: The identity of this worker, if connections are encrypted.
    """

    def __init__(
        self,
        address: Address,
        member: Member,
        token: Token | None,
        *,
        connect_timeout_s: float = 60.0,
        tracker: ProgressTracker | None = None,
        crash_record: CrashRecord | None = None,
        on_hung: Callable[[str, threading.Event], None] = lambda why, heard: None,
        on_straggling: Callable[[bool, float, float], None] = lambda slow, ratio, waiting: None,
        tls: Tls | None = None,
    ) -> None:
        self._tls = tls
        self._names = NameLookups()
        progress = (lambda: None) if tracker is None else tracker.read
        self._protocol = Client(address, member, token, connect_timeout_s=connect_timeout_s, progress=progress)
        self._token = token
        self._tracker = tracker
        self._crash_record = crash_record or CrashRecord()
        self._on_hung = on_hung
        self._on_straggling = on_straggling
        self._on_view: Callable[[int], None] = lambda generation: None
        self._claim: GetClaim | None = None
        self._claim_problem = ""
        self._process = 0
        self._threads: list[threading.Thread] = []
        self._liveness_listener: socket.socket | None = None
        self._end_met = threading.Event()  # whoever waits, or asks, has been told of the end
        self._changed = threading.Condition(threading.RLock())  # guards the protocol; signal handlers may interrupt
        self._calls: deque[tuple[int, Callable[[], None]]] = deque()  # each with the thread that wants it
        self._caller: int | None = None  # the thread that is in the protocol
        self._connections: dict[CoordinatorLink, ControlConnection] = {}
        self._connects: SimpleQueue[Connect | None] = SimpleQueue()
        self._connecting: set[threading.Thread] = set()  # they wait for an answer, and nothing can wake them

    @property
    def member(self) -> Member:
        """This worker."""
        return self._protocol.member

    @property
    def change_pending(self) -> bool:
        """See the port."""
        return self._protocol.change_pending

    @property
    def room(self) -> Room | None:
        """See the port."""
        return self._protocol.room

    # ------------------------------------------------------------ what the worker asks

    def start(self, on_view: Callable[[int], None]) -> bool:
        """Connect and introduce this worker; `on_view(generation)` is called when a newer view is known.

        Returns:
            True if the job runs already: warm up, then send `ready`. False if the first view is there.

        Raises:
            AuthenticationError: The token is missing, or differs.
            CoordinatorLost: The coordinator cannot be reached, or was lost before the first view.
            JobFailed, JobFinished: The job has ended.
            ProtocolError: The peer is no coordinator, or one of another version.
        """
        if self._process:
            raise ProtocolError(f"worker {self.member.id} starts its control connection twice")
        self._process = os.getpid()
        self._on_view = on_view
        try:
            self._open_liveness_port()
            self._do(lambda: self._protocol.start(time.monotonic()))
            self._spawn("elasticflow-reader", "listens to the coordinator", self._read_all)
            self._spawn("elasticflow-heartbeat", "sends heartbeats to the coordinator", self._keep_time)
            return self._wait(self._protocol.started)
        except BaseException:
            self.stop()
            raise

    def _open_liveness_port(self) -> None:
        """Listen as long as this process lives: who is refused need not wait for it."""
        if self.member.standby:
            host = LOOPBACK if self._token is None else ""
            self._liveness_listener = listen((host, 0))
            self._protocol.member = replace(self.member, liveness_port=self._liveness_listener.getsockname()[1])
            call_in_forked_children(self._close_liveness_port)

    def _close_liveness_port(self) -> None:
        if self._liveness_listener is not None:
            self._liveness_listener.close()

    def send(self, kind: str, generation: int = 0) -> None:
        """See the port."""
        if self._process in (0, os.getpid()):  # not in a forked copy
            self._do(lambda: self._protocol.send(kind, generation))

    def fail(self, why: str) -> bool:
        """Report an exception of the user's code, which ends the job; waits for at most `FAIL_S`.

        Args:
            why: Worker, node and exception. It is cut to `fields.MAX_FAILURE_CHARS`.

        Returns:
            Whether all others have been told.
        """
        if self._process != os.getpid():
            return False
        self._do(lambda: self._protocol.fail(why))
        with self._changed:
            self._changed.wait_for(lambda: self._protocol.end is not None, FAIL_S)
            return isinstance(self._protocol.end, JobFailed)

    def next_view(self, after: int) -> View:
        """Wait for the newest view with a generation above `after`.

        Raises:
            CoordinatorLost: The control connection has ended, and no newer view is known.
            Evicted: The others went on without this worker.
            JobFailed, JobFinished: The job has ended.
            Left: This worker asked to leave, and is out.
            ThreadFailed: A thread of the control connection has failed.
            TrainingOver: In a newcomer: the members are in a later training than the one that it is ready for.
        """
        return self._wait(lambda: self._protocol.newer_view(after))

    def bootstrap(self, generation: int) -> RelayBootstrap:
        """Exchange of values among the members of one view, relayed by the coordinator."""
        return RelayBootstrap(self._protocol, generation, do=self._do, wait=self._wait)

    def tell_watermark(self, watermark: Watermark) -> None:
        """Report this member's watermark in the next heartbeats; never waits. One that names too much is left out."""
        self._protocol.tell_watermark(watermark)  # one assignment

    def want(self, num_nodes: int) -> None:
        """See the port."""
        if self._process == os.getpid():
            self._do(lambda: self._protocol.want(num_nodes))

    def use_store(self, store: str, claim: GetClaim | None = None) -> None:
        """See the port."""
        if self._protocol.resume_state.store is None:
            self._claim = claim
        self._do(lambda: self._protocol.tell_store(store))

    def job_watermark(self) -> Watermark | None:
        """In a newcomer: the watermark of the members, as far as it is known.

        Raises:
            CoordinatorLost: The control connection has ended.
            JobFinished: The job has ended.
        """
        self._raise_end()
        return self._protocol.watermark

    def job_training(self) -> int:
        """See the port."""
        self._raise_end()
        return self._protocol.training

    def _raise_end(self) -> None:
        if self._protocol.end is not None:
            self._end_met.set()
            raise self._protocol.end

    def stop(self) -> None:
        """Close the connection. May be repeated."""
        if self._process != os.getpid():
            return  # not started, or a forked copy, whose locks may be held by threads that it lacks
        self._end_met.set()
        self._do(self._protocol.stop)
        self._join(_GOODBYE_S)
        for connection in list(self._connections.values()):
            connection.hang_up()
        self._join(_JOIN_S)
        for connection in list(self._connections.values()):
            connection.close()
        self._close_liveness_port()

    # ------------------------------------------------------------ into the protocol, and out of it

    def _do(self, act: Callable[[], None]) -> None:
        """Let the protocol do something, and do what follows."""
        self._calls.append((threading.get_ident(), act))
        if self._caller == threading.get_ident():
            return  # this is a signal handler, and the thread that it interrupts does it next
        while self._calls:  # again, if one came when that was looked at for the last time
            outputs: list[ClientOutput] = []
            try:
                with self._changed:
                    self._caller = threading.get_ident()
                    try:
                        self._do_all(outputs)
                    finally:
                        self._caller = None
            finally:
                for output in outputs:
                    try:
                        self._carry_out(output)
                    except Exception as error:  # whichever thread this is, the worker waits for what follows
                        self._break(_logged(error))

    def _do_all(self, outputs: list[ClientOutput]) -> None:
        try:
            while self._calls:
                asker, act = self._calls.popleft()
                try:
                    act()
                except Exception as error:
                    if asker == threading.get_ident():
                        raise
                    self._protocol.break_off(_logged(error))  # the thread that asked for it would never know
        finally:
            while self._protocol.outputs:
                output = self._protocol.outputs.popleft()
                if isinstance(output, Send) and (connection := self._connections.get(output.link)) is not None:
                    connection.queue(output.data)  # in this order
                outputs.append(output)
            if self._protocol.is_over:
                self._connects.put(None)
            self._changed.notify_all()

    def _carry_out(self, output: ClientOutput) -> None:
        match output:
            case Connect(beside=True):
                with self._changed:
                    self._threads[:] = [thread for thread in self._threads if thread.is_alive()]
                try:
                    self._spawn("elasticflow-downlink", "hears the coordinator", partial(self._read, output))
                except ThreadFailed as error:  # there can be no more threads, and it can do without
                    problem = str(error)
                    self._do(lambda: self._protocol.unreached(output.link, problem, time.monotonic()))
            case Connect():
                for other in list(self._connections.values()):
                    other.give_up()  # so that the reader has time
                self._connects.put(output)
            case AskForClaim(bid):
                get = partial(self._get_claim, bid)
                threads.start(get, name="elasticflow-claim", job=f"gets the claim {bid.claim}", on_failure=self._break)
            case Replaced(generation):
                self._tell(generation)
            case Hung(why):
                watch = partial(self._on_hung, why, self._end_met)
                try:
                    threads.start(watch, name="elasticflow-watchdog", job="ends this worker if it hangs")
                except ThreadFailed:  # there can be no more threads
                    watch()
            case StragglerReport(_, slow, ratio, waiting):
                self._on_straggling(slow, ratio, waiting)
            case _ if (connection := self._connections.get(output.link)) is not None:  # else it has just been ended
                self._carry_out_on(connection, output)

    def _carry_out_on(
        self, connection: ControlConnection, output: Send | TrustLeader | Disconnect | Leave | EndSending
    ) -> None:
        match output:
            case Send():
                connection.flush()
            case TrustLeader(_, timeout_s):
                connection.trust(timeout_s)
            case Disconnect(link):
                self._connections.pop(link, None)
                connection.close()
            case Leave(link, word):
                self._connections.pop(link, None)
                connection.leave(word)
            case EndSending():
                connection.end_sending(_GOODBYE_S)

    def _tell(self, generation: int) -> None:
        try:
            self._on_view(generation)
        except Exception:
            # Whatever it is, the connection must stay alive; the worker's own thread will meet the cause.
            logger.exception("ending the group of the view before view %d failed", generation)

    def _get_claim(self, bid: Bid) -> None:
        if self._claim is None:
            return
        named: tuple[str, ...] | None = None
        try:
            named = self._claim(bid.claim, bid.members) or None
        except BaseException as error:  # not even SystemExit is an answer, and the coordinator waits for one
            if str(error) != self._claim_problem:
                trace = None if isinstance(error, StorageError) else error
                text = "the claim %s is not decided, and is tried again: %s"
                logger.warning(text, bid.claim, error, exc_info=trace)
            self._claim_problem = str(error)
        self._do(lambda: self._protocol.claimed(bid, named, time.monotonic()))

    def _wait(self, ready: Callable[[], T | None]) -> T:
        with self._changed:
            while True:
                try:
                    value = ready()
                except Exception as error:
                    if error is self._protocol.end:
                        self._end_met.set()
                    raise
                if value is not None:
                    return value
                self._changed.wait(_LOOK_AGAIN_S)

    # ------------------------------------------------------------ threads

    def _join(self, seconds: float) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread() and thread not in self._connecting:
                thread.join(seconds)

    def _spawn(self, name: str, job: str, run: Callable[[], None]) -> None:
        self._threads.append(threads.start(run, name=name, job=job, on_failure=self._break))

    def _break(self, failure: ThreadFailed) -> None:
        """A thread of the connection has failed: this worker can no longer hear, or be heard, and must end."""
        self._do(lambda: self._protocol.break_off(failure))

    def _read_all(self) -> None:
        """Connect where the protocol wants it, and read, one connection after the other."""
        while (connect := self._connects.get()) is not None:
            self._read(connect)

    def _read(self, connect: Connect) -> None:
        protocol, link, thread = self._protocol, connect.link, threading.current_thread()
        if not protocol.wants(link):  # its time was over before its turn came
            return
        try:
            self._connecting.add(thread)
            connection = ControlConnection.connect(
                link.address,
                connect.timeout_s,
                accept_s=connect.accept_s,
                tls=self._tls,
                find=self._names.find,
                on_accepted=lambda: self._do(lambda: protocol.accepted(link)),
            )
        except (OSError, AuthenticationError) as error:
            self._connecting.discard(thread)
            problem: str | AuthenticationError
            if isinstance(error, AuthenticationError):
                problem = error
            else:
                problem = error.strerror or str(error) or type(error).__name__
            self._do(lambda: protocol.unreached(link, problem, time.monotonic()))
            return
        self._connecting.discard(thread)
        self._connections[link] = connection
        self._do(lambda: protocol.connected(link, time.monotonic()))
        while data := connection.read():
            self._do(partial(protocol.receive, link, data, time.monotonic()))
        self._do(lambda: protocol.ended(link, in_order=connection.ended_by_peer, now=time.monotonic()))

    def _keep_time(self) -> None:
        try:
            while not self._protocol.stopped:
                rests = self._tracker is not None and self._tracker.rests
                if self._end_met.is_set() or self._protocol.resume_state.closed or rests:
                    self._crash_record.rest()
                else:
                    self._crash_record.beat()
                self._do(lambda: self._protocol.tick(time.monotonic()))
                with self._changed:
                    deadline = self._protocol.deadline
                    if deadline is not None:  # else it has been stopped meanwhile
                        self._changed.wait(min(_NOTED_S, max(0.0, deadline - time.monotonic())))
        finally:
            self._crash_record.rest()


def _logged(error: Exception) -> ThreadFailed:
    failure = threads.failed("speaks with the coordinator", error)
    logger.error("%s", failure, exc_info=error)
    return failure


class RelayBootstrap:
    """The `Bootstrap` port of one view: the coordinator relays values to all other members.

    Args:
        protocol: The worker's client.
        generation: That of the view.
        do: Calls a function that changes the client, and carries out what follows from it.
        wait: Waits until a function of the client gives something other than None.
    """

    def __init__(
        self,
        protocol: Client,
        generation: int,
        *,
        do: Callable[[Callable[[], None]], None],
        wait: Callable[[Callable[[], bytes | None]], bytes],
    ) -> None:
        self._protocol, self._generation = protocol, generation
        self._do, self._wait = do, wait

    def put(self, key: str, value: bytes) -> None:
        """Publish a value to the members of the view."""
        self._do(lambda: self._protocol.publish(self._generation, key, value))

    def get(self, key: str) -> bytes:
        """Wait for a value that a member publishes.

        Raises:
            GroupBroken: The view has been replaced, or the control connection is lost.
        """
        return self._wait(lambda: self._protocol.value(self._generation, key))

    def replaced(self) -> bool:
        """Whether a newer view is known or the connection is lost, so that waiting for this group is useless."""
        return self._protocol.end is not None or self._protocol.generation != self._generation
