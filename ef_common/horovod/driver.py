"""A worker's connection to Horovod's elastic driver; it does what :mod:`ef_common.horovod.rounds` decides."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ef_common import threads
from ef_common.core.room import Room
from ef_common.core.view import View
from ef_common.core.watermark import Watermark
from ef_common.errors import Left, MembershipError
from ef_common.horovod import rounds
from ef_common.horovod.rounds import RoundAction
from ef_common.horovod.store import RendezvousStore, StoreLost
from ef_common.session.ports import Bootstrap, ControlChannel, GetClaim

logger = logging.getLogger(__name__)

FINISHED_KEY = "finished"
CALL_KEY = "call"
PATIENCE_S = 180.0
"""How long processes that the driver has started may be missing before it is asked about them.

Asking costs one of --reset-limit, and imports from a busy file system can take minutes."""
SETTLE_S = 0.5
"""How long to wait for further losses after one, because losses of one cause are seen one after the other."""
STATUS_LEFT = os.EX_TEMPFAIL
"""Exit status of a worker that has left: for the driver, 0 would say that the job is complete."""
_READY_SCOPE = "rank_and_size"
_LOOK_S = 0.5
_LOOKS_PER_S = 100  # of all workers together


class Driver:
    """The connection to the driver: one thread, and another one while READY is sent.

    Args:
        store: horovodrun's store, which is also the driver.
        host: Name that the driver has for this host.
        local_rank: Index of this process on it.
        size: Number of processes that the driver counts on at the start.
        local_size: How many of them are on this host.
        interface: Network interface to use.
    """

    def __init__(
        self,
        store: RendezvousStore,
        *,
        host: str,
        local_rank: int,
        size: int,
        local_size: int,
        interface: str,
    ) -> None:
        self._store = store
        self._slot = f"{host}:{local_rank}"
        self._interface = interface
        self._published: dict[str, bytes] = {}
        self._is_over = False
        self._state = rounds.Rounds(host, size, local_size)
        self._events: queue.Queue[rounds.Event] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._process = 0
        self._ended = threading.Event()
        self._leave: Callable[[], None] = lambda: None
        self._notices: Any = None

    def register(self) -> None:
        """Have the driver tell this worker of hosts that come and go; it tells of each only once.

        Raises:
            StoreLost: horovodrun does not answer.
        """
        from ef_common.horovod.notices import HostNotices  # needs Horovod

        self._notices = HostNotices(self._store.own_host(), lambda: self._events.put(rounds.HostsChanged()))
        self._notices.start()
        self._notices.register(self._store, self._slot, self._interface)

    def start(self, published: Mapping[str, bytes]) -> None:
        """Start to act on what it has been told since it was registered.

        Args:
            published: What newcomers must find in the store, which the driver clears in each round.
        """
        self._published.update(published)
        self._process = os.getpid()
        self._thread = threads.start(self._run, name="elasticflow-driver", job="follows horovodrun's driver")

    def stop(self) -> None:
        """Hear no more of hosts. May be repeated."""
        if self._notices is not None:
            self._notices.stop()

    def close(self) -> None:
        """End when the process is about to end: wait for an open round, unless the process has failed."""
        if self._thread is None or self._process != os.getpid():
            return
        self.stop()
        if getattr(sys, "last_value", None) is None:
            # The driver may end this process while it waits; its work is done.
            signal.signal(signal.SIGTERM, lambda number, frame: os._exit(STATUS_LEFT if self._state.left else 0))
            self._events.put(rounds.Ending())
            while not self._ended.wait(1.0):  # in slices, so that signals are noticed
                continue
        self._thread = None

    # ------------------------------------------------------------ what the channel tells

    def follow(self, leave: Callable[[], None]) -> None:
        """Note how to leave the view at the next boundary."""
        self._leave = leave

    def view(self, view: View, worker: str) -> None:
        """Handle a new view; called in any thread."""
        members = tuple((member.id, member.node) for member in view.members)
        planned = view.admitted_at == view.generation
        self._events.put(rounds.Viewed(members, planned, view.rank_of(worker) is not None))

    def dismissed(self, *, left: bool) -> None:
        """This worker is out of the job before its end; called in any thread."""
        self._events.put(rounds.Dismissed(left))

    def finished(self) -> None:
        """The program ends with its trainings complete; called in any thread."""
        self._published[FINISHED_KEY] = b"1"
        self._events.put(rounds.RoundClosed())

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._state.ending:
                self._decide(self._next())
            self._finish_rounds()
        finally:
            self._ended.set()

    def _finish_rounds(self) -> None:
        """Wait for the open round, if there is one, and for each that is called by then."""
        while True:
            if not self._state.waiting and (called := self._look()):
                self._decide(called)
            if not self._state.waiting:
                return
            event = self._events.get()  # the answer comes, or the store is lost
            self._decide(event)
            if event == rounds.Answered(None):
                return

    def _next(self) -> rounds.Event:
        """The next event; if there is none for a while, look for a call."""
        pause_s = max(_LOOK_S, self._state.num_assigned / _LOOKS_PER_S)
        try:
            return self._events.get(timeout=pause_s)
        except queue.Empty:
            return self._look() or rounds.RoundTick()

    def _look(self) -> rounds.Event | None:
        if self._state.waiting or self._state.stage is rounds.RoundStage.HOMELESS:
            return None
        try:
            call = self._store.get(CALL_KEY)
        except StoreLost as error:  # for good, or because it has much to do
            logger.debug("%s", error)
            return None
        if call is None or self._others_have_finished():
            return None
        return rounds.Called(frozenset(json.loads(call)))

    def _decide(self, event: rounds.Event) -> None:
        self._state, actions, reason = rounds.decide(
            self._state, event, time.monotonic(), patience_s=PATIENCE_S, settle_s=SETTLE_S
        )
        if reason:
            logger.info("%s: %s", self._slot, reason)
        for action in actions:
            try:
                self._act(action)
            except StoreLost as error:
                logger.info("%s: cannot %s: %s", self._slot, action.value, error)

    def _act(self, action: RoundAction) -> None:
        match action:
            case RoundAction.CALL:
                self._call(set())
            case RoundAction.RESIGN:
                self._call({self._state.host})
            case RoundAction.READY if self._others_have_finished():
                self._decide(rounds.Answered(None))
            case RoundAction.READY:
                threads.start(self._say_ready, name="elasticflow-ready", job="tells horovodrun's driver READY")
            case RoundAction.LEAVE:
                self._leave()
            case RoundAction.PUBLISH:
                for key, value in self._published.items():
                    self._store.put(key, value)

    def _call(self, hosts: set[str]) -> None:
        """Call a round; the hosts that are named already stay (two that write at the same moment may lose one)."""
        named = set(json.loads(self._store.get(CALL_KEY) or b"[]"))
        self._store.put(CALL_KEY, json.dumps(sorted(named | hosts)).encode())

    def _others_have_finished(self) -> bool:
        """Whether the training of another worker is over, while this one has something left to do."""
        if self._state.closed or self._state.ending:
            return False
        if not self._is_over:
            with contextlib.suppress(StoreLost):  # READY will not be heard, either
                self._is_over = self._store.get(FINISHED_KEY) is not None
        return self._is_over

    def _say_ready(self) -> None:
        """Send READY and wait for the answer, which comes when all have.

        It is ``rank,size,local_rank,local_size,...``; all are -1 without a slot.
        """
        answered = rounds.Answered(None)
        try:
            answer = self._store.get(self._slot, scope=_READY_SCOPE, timeout_s=None)
            if answer is not None:
                rank, size, _, num_here = (int(number) for number in answer.split(b",")[:4])
                answered = rounds.Answered(size, num_here) if rank >= 0 else rounds.Answered(0)
        except (StoreLost, ValueError) as error:
            logger.info("%s: no answer from the driver: %s", self._slot, error)
        finally:  # whatever has come up: the round is waited for until there is an answer
            self._events.put(answered)


class WatchedChannel:
    """A connection to the coordinator that reports its events to a driver.

    Args:
        channel: The connection.
        driver: The driver.
        worker: Id of this worker.
    """

    def __init__(self, channel: ControlChannel, driver: Driver, worker: str) -> None:
        self._channel = channel
        self._driver = driver
        self._worker = worker
        driver.follow(lambda: channel.send("leave"))

    @property
    def change_pending(self) -> bool:
        """Whether a change waits for a boundary."""
        return self._channel.change_pending

    @property
    def room(self) -> Room | None:
        """What the coordinator knows of the number of nodes."""
        return self._channel.room

    def start(self, on_view: Callable[[int], None]) -> bool:
        """Connect; the driver learns of each view as soon as it is known."""

        def pass_on(generation: int) -> None:
            on_view(generation)
            self._tell(generation)

        return self._channel.start(pass_on)

    def _tell(self, generation: int) -> None:
        try:
            view = self._channel.next_view(generation - 1)  # it is here already
        except (Left, MembershipError) as error:
            self._driver.dismissed(left=isinstance(error, Left))
        except Exception as error:  # each kind of end, which the worker's own thread meets too
            logger.debug("no view for the driver: %s", error)
        else:
            self._driver.view(view, self._worker)

    def send(self, kind: str, generation: int = 0) -> None:
        """Tell the coordinator."""
        if kind == "close":
            self._driver.finished()
        self._channel.send(kind, generation)

    def next_view(self, after: int) -> View:
        """Wait for the newest view."""
        return self._channel.next_view(after)

    def fail(self, why: str) -> bool:
        """Report that an exception ends the job."""
        return self._channel.fail(why)

    def bootstrap(self, generation: int) -> Bootstrap:
        """Exchange of values among the members of one view."""
        return self._channel.bootstrap(generation)

    def tell_watermark(self, watermark: Watermark) -> None:
        """Report where this member is, for newcomers."""
        self._channel.tell_watermark(watermark)

    def want(self, num_nodes: int) -> None:
        """See the port."""
        self._channel.want(num_nodes)

    def use_store(self, store: str, claim: GetClaim | None = None) -> None:
        """See the port."""
        self._channel.use_store(store, claim)

    def job_watermark(self) -> Watermark | None:
        """In a newcomer: where the members are."""
        return self._channel.job_watermark()

    def job_training(self) -> int:
        """In a newcomer: the training that the members are in."""
        return self._channel.job_training()

    def stop(self) -> None:
        """Close the connection."""
        self._channel.stop()
