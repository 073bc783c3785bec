"""Virtual time, and the processes that live in it.

A process is a greenlet: it runs until it waits for a ticket, and goes on when an event resolves the ticket.
Nothing else moves time, so a run is a function of its seed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

Act = Callable[..., None]


class Scheduler:
    """The clock, and the queue of what is to come.

    Args:
        seed: Seed of every random choice.

    Attributes:
        now: The time, in seconds.
        num_events: Events so far.
        num_foreseen: Events that are to come, without those of `idle_at`.
    """

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.num_events = 0
        self.num_foreseen = 0
        self.random = random.Random(f"elasticflow/simulation/{seed}")
        self.hub: greenlet = getcurrent()
        self._queue: list[tuple[float, int, bool, Act, tuple[Any, ...]]] = []
        self._num_pushed = 0

    def after(self, delay_s: float, act: Act, *args: Any) -> None:
        """Do something later."""
        self.at(self.now + delay_s, act, *args)

    def at(self, time_s: float, act: Act, *args: Any) -> None:
        """Do something at a time (now, if that has passed)."""
        self.num_foreseen += 1
        self._push(time_s, True, act, args)

    def idle_at(self, time_s: float, act: Act, *args: Any) -> None:
        """The same for what goes on and on, though nothing else happens: messages and alarms."""
        self._push(time_s, False, act, args)

    def idle_after(self, delay_s: float, act: Act, *args: Any) -> None:
        """Likewise, later."""
        self.idle_at(self.now + delay_s, act, *args)

    def _push(self, time_s: float, foreseen: bool, act: Act, args: tuple[Any, ...]) -> None:
        self._num_pushed += 1
        heapq.heappush(self._queue, (max(self.now, time_s), self._num_pushed, foreseen, act, args))

    def advance(self) -> bool:
        """Carry out the next event; False if there is none."""
        if not self._queue:
            return False
        self.now, _, foreseen, act, args = heapq.heappop(self._queue)
        self.num_events += 1
        self.num_foreseen -= foreseen
        act(*args)
        return True

    def delay(self, typical_s: float) -> float:
        """A random delay: mostly around the typical one, at times far longer."""
        draw = self.random.random()
        return typical_s * (draw * 2.0 if draw < 0.95 else draw * 20.0)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.random.random() < probability


class Ticket:
    """What a process waits for: resolved or failed once, from an event."""

    __slots__ = ("_process", "done")

    def __init__(self, process: Process) -> None:
        self._process = process
        self.done = False

    def resolve(self, value: Any = None) -> None:
        """The process goes on with a value."""
        if not self.done:
            self.done = True
            self._process.resume(value, None)

    def fail(self, error: Exception) -> None:
        """The process goes on with an exception."""
        if not self.done:
            self.done = True
            self._process.resume(None, error)


class Process:
    """One simulated process. It may be killed, or frozen and thawed.

    Args:
        scheduler: Its clock.
        name: For traces.
        run: What it does.
    """

    def __init__(self, scheduler: Scheduler, name: str, run: Callable[[], None]) -> None:
        self.name = name
        self.alive = True
        self.frozen = False
        self._scheduler = scheduler
        self._greenlet = greenlet(lambda _: run(), parent=scheduler.hub)
        self._deferred: tuple[Any, Exception | None] | None = (None, None)

    def start(self) -> None:
        """Run it until it waits for the first time."""
        self.thaw()

    def wait(self) -> Any:
        """Give way until the newest ticket is settled (called by the process itself)."""
        return self._scheduler.hub.switch()

    def sleep(self, delay_s: float) -> None:
        """Let virtual time pass (called by the process itself)."""
        self._scheduler.after(delay_s, Ticket(self).resolve)
        self._scheduler.hub.switch()

    def resume(self, value: Any, error: Exception | None) -> None:
        """Go on, or, while frozen, as soon as it has thawed."""
        if not self.alive:
            return
        if self.frozen:
            self._deferred = (value, error)
        elif error is None:
            self._greenlet.switch(value)
        else:
            self._greenlet.throw(error)
        if self._greenlet.dead:
            self.alive = False

    def freeze(self) -> None:
        """Stop it where it is."""
        self.frozen = True

    def thaw(self) -> None:
        """Let it go on."""
        self.frozen = False
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self.resume(*deferred)

    def kill(self) -> None:
        """End it at once, wherever it is; never returns if the process kills itself."""
        self.alive = False
        if self._greenlet is getcurrent():
            raise GreenletExit
        if self._greenlet:
            self._greenlet.throw(GreenletExit)
