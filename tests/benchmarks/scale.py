"""How the cost of a change grows with the number of workers: the start, losses, joins, and failovers.

A real coordinator, in a process of its own, serves real clients over loopback: the state machine of a worker's end,
with a socket each, many in this process; no training, and no process groups. A client counts as settled in a view as
soon as it has it. Each worker's node has an address of its own, of loopback, so that the coordinator knows as many
standbys as there are nodes; a third process answers for all of them but two, which take over.

For each change, and for the exchange of addresses in a view (`meeting`): the bytes that all clients send and receive,
the longest message, and the CPU time of the coordinator that leads. The exponents are those of a power law through the
figures of 64 workers and more.

* `start`: all come, and form the first view. The CPU time is without that of the process's own start.
* `loss`, `join`: of one.
* `joins`, `losses`: of 100 at once; a third is lost at most, as more than half have to go on.
* `failover`: the leader is killed; `announcing`: likewise, until its successor has told all standbys that it leads.
* `later_failover`: as many are lost at once, and the leader is killed before any view without them has come about.
"""

from __future__ import annotations

import json
import math
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import IO

from ef_common.collectives.bootstrap_store import pack
from ef_common.control.sockets import raise_file_limit
from ef_common.core.view import Member
from ef_common.errors import MembershipError
from ef_common.protocol import client_outputs as outputs
from ef_common.protocol.auth import Token
from ef_common.protocol.client import Client
from tests.benchmarks.figure import Figure, emit, is_quick
from tests.benchmarks.processes import ROOT

SIZES = (16, 64, 256, 1024, 4096)
QUICK_SIZES = (16, 64, 256, 1024)
NUM_JOINS = NUM_LOSSES = 100
CHANGES = ("start", "loss", "join", "losses", "failover", "announcing", "later_failover", "meeting")
"""Those whose growth is fitted; 100 joins cost the same among few workers."""
TOKEN = Token("of this benchmark alone")
TARGET_EXPONENT = 1.3
BUDGET_S = 1.0
BUDGET_SIZE = 1024
MAX_MESSAGE_BYTES = 1024 * 1024
_GUARD_S = 900.0
_LOOK_S = 0.05
_AT_ONCE = 64
_GREETINGS_AT_ONCE = 128
"""So many introduce themselves at a time: all share one core here; as processes of their own, they answer at once."""
_READ_BYTES = 256 * 1024
_PAIR_BYTES = 8


@dataclass
class Cost:
    """What a change has cost.

    Args:
        num_bytes: That all clients have sent and received.
        longest: Bytes of the longest message.
        cpu_s: CPU time of the leader.
        wall_s: Until all had settled.
    """

    num_bytes: int
    longest: int
    cpu_s: float
    wall_s: float


class Leader:
    """The process of a coordinator."""

    def __init__(self, num_workers: int, role: str = "leader") -> None:
        command = [sys.executable, "-m", "tests.benchmarks.scale_coordinator", str(num_workers), role]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self._pipe(self.process.stdout).readline())

    def ask(self) -> dict[str, float]:
        """What it has used, and decided."""
        asks = self._pipe(self.process.stdin)
        asks.write("\n")
        asks.flush()
        answer: dict[str, float] = json.loads(self._pipe(self.process.stdout).readline())
        return answer

    def kill(self) -> None:
        """Kill it, as a node that is lost."""
        self.process.kill()
        self.process.communicate()

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        if pipe is None:
            raise RuntimeError("the coordinator has no pipe")
        return pipe


class Lengths:
    """The lengths of the lines that come in pieces."""

    def __init__(self) -> None:
        self._rest = 0

    def longest(self, data: bytes) -> int:
        """Bytes of the longest line that ends in this piece; 0 if none does."""
        first, *others = (len(part) for part in data.split(b"\n"))
        lengths = [self._rest + first, *others]
        self._rest = lengths.pop()
        return max(lengths, default=0)


class Worker:
    """A client and its sockets; it settles in each view, and comes to a boundary when it is to.

    Its clock stands still while it waits for its turn to connect, or it would give up coordinators that it never tried.
    """

    def __init__(self, crowd: Crowd, member: Member, address: tuple[str, int]) -> None:
        self.crowd = crowd
        self.client = Client(address, member, TOKEN, connect_timeout_s=_GUARD_S)
        self.sockets: dict[outputs.CoordinatorLink, socket.socket] = {}
        self.unsent: dict[outputs.CoordinatorLink, bytearray] = {}
        self.received: dict[outputs.CoordinatorLink, Lengths] = {}
        self.is_ready = False
        self.settled = self.asked = 0
        self._waited_s = 0.0
        self._waits_since: float | None = None
        self.client.start(self.now)
        self.do_all()

    @property
    def now(self) -> float:
        """Its time."""
        return (self._waits_since or time.monotonic()) - self._waited_s

    def tick(self) -> None:
        """Let its time pass, unless it waits for its turn."""
        due = self.client.deadline
        if self._waits_since is None and due is not None and self.now >= due:
            self.client.tick(self.now)
            self.do_all()

    def do_all(self) -> None:
        """Do what the client asks for, and say what a worker says."""
        self._act()
        while self.client.outputs:
            self._do(self.client.outputs.popleft())
            if not self.client.outputs:
                self._act()

    def _act(self) -> None:
        client = self.client
        try:
            if client.started() and not self.is_ready:
                self.is_ready = True
                client.send("ready", client.training)
            view = client.newer_view(self.settled)
        except MembershipError:
            return
        if view is not None:
            self.settled = view.generation
            if self.crowd.settles:
                client.send("settled", view.generation)
        if client.change_pending and self.settled > self.asked:
            self.asked = self.settled
            client.send("at_boundary", self.settled)

    def _do(self, output: outputs.ClientOutput) -> None:
        match output:
            case outputs.Connect(link, beside=beside):
                self.crowd.callers[link] = self
                if not beside:
                    self._waits_since = time.monotonic()
            case outputs.TrustLeader(link):
                self.crowd.greeting.discard(link)
            case outputs.Send(link, data):
                self.crowd.count(data, Lengths())
                self._send(link, data)
            case outputs.Disconnect(link) | outputs.Leave(link) | outputs.EndSending(link):
                self._close(link)

    def connect(self, link: outputs.CoordinatorLink) -> None:
        """Connect to a coordinator."""
        now = time.monotonic()
        self._waited_s, self._waits_since = self._waited_s + now - (self._waits_since or now), None
        sock = socket.socket()
        try:
            if link.address[1] not in self.crowd.ports:
                raise ConnectionRefusedError
            sock.connect(link.address)
        except OSError as error:
            sock.close()
            self.client.unreached(link, str(error), self.now)
        else:
            sock.setblocking(False)
            self.sockets[link], self.unsent[link], self.received[link] = sock, bytearray(), Lengths()
            self.crowd.watch(self, link, sock)
            self.client.connected(link, self.now)
        self.do_all()

    def _send(self, link: outputs.CoordinatorLink, data: bytes) -> None:
        sock = self.sockets.get(link)
        if sock is None:
            return
        self.unsent[link] += data
        try:
            sent = sock.send(self.unsent[link])
        except BlockingIOError:
            return
        except OSError:
            sent = len(self.unsent[link])
        del self.unsent[link][:sent]

    def _close(self, link: outputs.CoordinatorLink) -> None:
        sock = self.sockets.pop(link, None)
        self.crowd.callers.pop(link, None)
        if sock is not None:
            self.crowd.forget(link, sock)
            sock.close()

    def read(self, link: outputs.CoordinatorLink) -> None:
        """Something has come, or the connection has ended."""
        sock = self.sockets.get(link)
        if sock is None:
            return
        try:
            data = sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.crowd.count(data, self.received[link])
            self.client.receive(link, data, self.now)
        else:
            self._close(link)
            self.client.ended(link, in_order=True, now=self.now)
        self.do_all()

    def kill(self) -> None:
        """End all connections, as the system of a killed process does."""
        for link in list(self.sockets):
            self._close(link)


class Crowd:
    """Many workers, served by one loop.

    Attributes:
        workers: All.
        callers: Those that are to connect.
        greeting: Connections whose coordinator has not taken the worker so far.
        num_bytes: That all have sent and received.
        longest: Bytes of the longest message among them.
        settles: Views come about: workers settle in them.
        ports: Of the coordinators that workers reach: those that gather others would wait for all, for long.
    """

    def __init__(self, ports: Collection[int] = ()) -> None:
        self.settles = True
        self.ports = ports
        self.workers: list[Worker] = []
        self.callers: dict[outputs.CoordinatorLink, Worker] = {}
        self.greeting: set[outputs.CoordinatorLink] = set()
        self.num_bytes = self.longest = 0
        self._selector = selectors.DefaultSelector()

    def add(self, worker: Worker) -> Worker:
        """One more."""
        self.workers.append(worker)
        return worker

    def watch(self, worker: Worker, link: outputs.CoordinatorLink, sock: socket.socket) -> None:
        """Read what comes on this socket."""
        self._selector.register(sock, selectors.EVENT_READ, (worker, link))
        self.greeting.add(link)

    def forget(self, link: outputs.CoordinatorLink, sock: socket.socket) -> None:
        """No more."""
        self._selector.unregister(sock)
        self.greeting.discard(link)

    def count(self, data: bytes, lengths: Lengths) -> None:
        """Count bytes that a connection has carried, and the longest line among them."""
        self.num_bytes += len(data)
        self.longest = max(self.longest, lengths.longest(data))

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Let all go on.

        Raises:
            TimeoutError: It has taken too long.
        """
        now = time.monotonic()
        end, look_at = now + _GUARD_S, now
        while True:
            while self.callers and len(self.greeting) < _GREETINGS_AT_ONCE:
                link = next(iter(self.callers))
                self.callers.pop(link).connect(link)
            # A few at a time, as processes of their own would all have their turn.
            events = [key.data for key, _ in self._selector.select(_LOOK_S)]
            for worker, link in sorted(events, key=lambda event: event[1] not in self.greeting)[:_AT_ONCE]:
                worker.read(link)
            now = time.monotonic()
            if now < look_at:
                continue
            look_at = now + _LOOK_S
            for worker in self.workers:
                worker.tick()
            if is_over():
                return
            if now > end:
                raise TimeoutError("the change does not come about")


class Job:
    """A job of so many workers, and the standbys of their nodes: those of the first two are processes of their own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.leader, self.others = Leader(size), Leader(size, "others")
        self.standbys = [Leader(size, "standby") for _ in range(2)]
        self.crowd = Crowd({self.leader.port})
        self.num_made = 0

    def start(self) -> Cost:
        """All come."""

        def act() -> None:
            for _ in range(self.size):
                self.join()

        return self.cost(act, lambda: self.is_settled(self.size))

    def join(self) -> Worker:
        """One more worker, on a node of its own."""
        index = self.num_made
        self.num_made += 1
        node = f"node-{index:05}.cluster"
        own = index < len(self.standbys)
        address = "127.0.0.1" if own else f"127.1.{index // 250}.{1 + index % 250}"
        port = self.standbys[index].port if own else self.others.port
        member = Member(f"{node}/0-{index:08x}", node, address, standby=port)
        return self.crowd.add(Worker(self.crowd, member, ("127.0.0.1", self.leader.port)))

    def is_settled(self, size: int, after: int = 0) -> bool:
        """Whether so many workers are in a view after that of this generation, and have all settled."""
        return self.has_view(size, after) and self.leader.ask()["settled"] == size

    def has_view(self, size: int, after: int) -> bool:
        """Whether so many workers are in a view after that of this generation, and all know it."""
        views = [worker.client.generation for worker in self.crowd.workers]
        if min(views) <= after or len(set(views)) > 1:
            return False
        state = self.leader.ask()
        return state["size"] == size and state["generation"] == views[0]

    def cost(self, act: Callable[[], None], is_over: Callable[[], bool]) -> Cost:
        """What a change costs."""
        crowd = self.crowd
        crowd.num_bytes = crowd.longest = 0
        begin, before_s = time.monotonic(), self.leader.ask()["cpu_s"]
        act()
        crowd.run_until(is_over)
        return Cost(crowd.num_bytes, crowd.longest, self.leader.ask()["cpu_s"] - before_s, time.monotonic() - begin)

    def lose(self) -> Cost:
        """A worker is killed."""
        lost = self.crowd.workers[self.size // 2]
        newest = lost.client.generation
        self.crowd.workers.remove(lost)
        size = len(self.crowd.workers)
        return self.cost(lost.kill, lambda: self.is_settled(size, newest))

    def gain(self, number: int) -> Cost:
        """So many workers come at once."""
        newest = self.crowd.workers[0].client.generation
        size = len(self.crowd.workers) + number

        def act() -> None:
            for _ in range(number):
                self.join()

        return self.cost(act, lambda: self.is_settled(size, newest))

    def lose_newest(self, number: int, *, settles: bool = True) -> Cost:
        """As many of those who came last are killed at once; perhaps no view without them comes about."""
        crowd = self.crowd
        newest = crowd.workers[0].client.generation
        crowd.workers, lost = crowd.workers[:-number], crowd.workers[-number:]
        size = len(crowd.workers)
        crowd.settles = settles

        def act() -> None:
            for worker in lost:
                worker.kill()

        return self.cost(act, lambda: self.is_settled(size, newest) if settles else self.has_view(size, newest))

    def meet(self) -> Cost:
        """All publish addresses as Gloo does, and wait for those of all others."""
        workers = self.crowd.workers
        generation, keys = workers[0].client.generation, [f"0/{rank}" for rank in range(len(workers))]

        def act() -> None:
            for rank, worker in enumerate(workers):
                pairs = b"".join(
                    (rank * len(workers) + other).to_bytes(_PAIR_BYTES, "little") for other in range(self.size)
                )
                worker.client.publish(generation, keys[rank], pack(bytes(154) + pairs))
                worker.do_all()

        def is_over() -> bool:
            return all(len(worker.client._newest._values) >= len(workers) for worker in workers)

        return self.cost(act, is_over)

    def fail_over(self) -> Cost:
        """The coordinator is killed."""
        size = len(self.crowd.workers)
        killed, self.leader = self.leader, self.standbys.pop(0)
        self.crowd.ports, self.crowd.settles = {self.leader.port}, True

        def is_over() -> bool:
            state = self.leader.ask()
            return bool(state["leads"]) and state["size"] == state["settled"] == size

        return self.cost(killed.kill, is_over)

    def announce(self, failover: Cost) -> Cost:
        """The successor tells all standbys; it has told some of them during the failover, which is part of this."""
        rest = self.cost(lambda: None, lambda: self.leader.ask()["told"] >= self.size - 2)
        return replace(failover, cpu_s=failover.cpu_s + rest.cpu_s, wall_s=failover.wall_s + rest.wall_s)

    def close(self) -> None:
        """End it."""
        for worker in self.crowd.workers:
            worker.kill()
        for leader in (self.leader, self.others, *self.standbys):
            leader.kill()


def measure(size: int) -> dict[str, Cost]:
    """The costs of each change in a job of this size."""
    job = Job(size)
    try:
        costs = {"start": job.start(), "loss": job.lose(), "join": job.gain(1), "meeting": job.meet()}
        num_losses = min(NUM_LOSSES, size // 3)
        costs |= {"losses": job.lose_newest(num_losses)}
        job.gain(num_losses)
        costs |= {"failover": job.fail_over()}
        costs |= {"announcing": job.announce(costs["failover"])}
        job.lose_newest(num_losses, settles=False)
        costs |= {"later_failover": job.fail_over()}
        return costs | {"joins": job.gain(NUM_JOINS)}
    finally:
        job.close()


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """That of the power law that fits best: the slope of a line through the logarithms."""
    xs, ys = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)


def run(sizes: Sequence[int]) -> dict[str, Figure]:
    """Measure jobs of these sizes."""
    raise_file_limit()
    costs: dict[int, dict[str, Cost]] = {}
    for size in sizes:
        costs[size] = measure(size)
        for change, cost in costs[size].items():
            print(
                f"{size:5} workers, {change:14}: {cost.num_bytes / 1e6:9.3f} MB, longest message "
                f"{cost.longest / 1e3:7.1f} kB, leader {cost.cpu_s:7.3f} s CPU, {cost.wall_s:7.3f} s",
                flush=True,
            )
    large = [size for size in sizes if size >= 64]
    figures: dict[str, Figure] = {}
    for change in CHANGES:
        for what in ("num_bytes", "cpu_s") if change != "announcing" else ("cpu_s",):
            found = [float(getattr(costs[size][change], what)) for size in large]
            steps = {
                f"{one}-{two}": exponent((one, two), pair)
                for (one, two), pair in zip(pairwise(large), pairwise(found), strict=True)
            }
            name = f"scale_{change}_exponent_{'bytes' if what == 'num_bytes' else 'cpu'}"
            details = {str(size): cost for size, cost in zip(large, found, strict=True)} | steps
            figures[name] = Figure(exponent(large, found), 1.0, TARGET_EXPONENT, "exponent", details)
    if BUDGET_SIZE in costs:
        for change in ("joins", *CHANGES):
            if change == "meeting":
                continue
            ours = costs[BUDGET_SIZE][change].cpu_s
            figures[f"scale_{change}_cpu_{BUDGET_SIZE}"] = Figure(ours, BUDGET_S, 1.0, "s CPU")
    longest = max(cost.longest for found in costs.values() for cost in found.values())
    figures["scale_longest_message"] = Figure(longest, MAX_MESSAGE_BYTES, 1.0, "bytes")
    return figures


if __name__ == "__main__":
    emit(run(QUICK_SIZES if is_quick(__doc__) else SIZES))
