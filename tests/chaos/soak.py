"""A training under constant faults: ``python -m tests.chaos soak``.

Four workers train. Two of them are struck, again and again, and replaced; the other two live on, and must not come to
need more of anything: memory, threads, file descriptors, shared memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import random
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console
from rich.table import Table

from ef_common.core.membership import Settings
from ef_common.testing.harness import HarnessError, WorkerProcess
from tests.chaos.coordinator import CoordinatorProcess
from tests.chaos.trial import HEARTBEAT_TIMEOUT_S
from tests.faults import harms
from tests.faults.conftest import TrainingJob, check_run
from tests.faults.hosts import HOSTS

NUM_WORKERS = 4
NUM_SURVIVORS = 2
_FAULTS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGSEGV", "SIGABRT", "SIGSTOP", "closed sockets")
_CLOSE_SOCKETS = signal.SIGRTMIN
_LOOK_S = 0.5
_ROUND = 4
"""Faults, on average, between two looks at what is used."""
_NUM_SAMPLES, _SAMPLE_S = 8, 0.1
_PR_SET_CHILD_SUBREAPER = 36
_OPTIONS = {"length": 2403, "batch_size": 8, "val_length": 53, "step_sleep_s": 0.02}


KEPT_LIMIT_BYTES = 1536
"""By so much the memory of a process may grow with each fault, in the second half of the time.

It is to be 1 kB. In 963 faults in 40 minutes, two survivors grew by 0.93 and 0.98 kB with each of the second half, and
a coordinator by 0.45 kB. Torch keeps 0.51 kB of each group. The rest rises to ceilings, which takes some hundred
faults: malloc keeps 130 to 190 kB for each of the threads that live at the same time, about ten, and CPython the names
of attributes that were looked up (0.3 MB).
"""
WINDOW = 100
"""Faults in each part of the time for which the growth is told."""
REMAINS = {"threads": 5, "file descriptors": 9}
"""What remains of one old Gloo group, for a while.

If a peer dies the moment before Gloo sends to it what it has asked for, Gloo never ends that operation: its group stays
until the operation's timeout (four threads, five files), after about one fault in a hundred. A group that nobody needs
any more before it is connected stays until Gloo has given it up, after some minutes (two threads, five files). What
memory each takes is not counted with that of the faults.
"""


@dataclass
class Usage:
    """What a process uses while all train together, faults or no faults in between: a number for each look.

    What it uses otherwise comes and goes with the other workers, so it tells nothing. Memory is what it does not share
    with files: workers are forked here, so what is theirs alone grows with each page that they or others write to.
    """

    faults: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def look(self, process: psutil.Process) -> None:
        """Take a sample."""
        memory = process.memory_info()
        self.memory.append(memory.rss - memory.shared)
        self.threads.append(process.num_threads())
        self.descriptors.append(process.num_fds())

    def note(self, samples: Usage, num_faults: int) -> None:
        """The median of the memory and the least of the others: a thread that saves, say, soon ends."""
        self.faults.append(num_faults)
        self.memory.append(statistics.median_low(samples.memory))
        self.threads.append(min(samples.threads))
        self.descriptors.append(min(samples.descriptors))

    @property
    def kept_bytes(self) -> float:
        """Bytes by which the memory grows with each fault, in the second half of the looks."""
        return self._kept_bytes_in(range(len(self.faults) // 2, len(self.faults)))

    @property
    def kept_bytes_by_window(self) -> list[float]:
        """The same for each hundred faults: whether it rises to a ceiling, or without an end."""
        found = []
        for start in range(0, max(self.faults, default=0), WINDOW):
            looks = [i for i, number in enumerate(self.faults) if start <= number < start + WINDOW]
            found.append(self._kept_bytes_in(looks))
        return found

    def _kept_bytes_in(self, looks: Sequence[int]) -> float:
        """The growth between looks at which as many threads were there: as much remained of old groups."""
        return slope(*([series[i] for i in looks] for series in (self.faults, self.memory, self.threads)))

    @property
    def more(self) -> dict[str, float]:
        """How many more there are in the last quarter than in the second one."""
        series = {"threads": self.threads, "file descriptors": self.descriptors}
        return {what: _last(values) - _second(values) for what, values in series.items()}


def slope(numbers: Sequence[int], values: Sequence[int], kinds: Sequence[int]) -> float:
    """The median of the slopes between any two points of a kind, which outliers do not change; 0 if there are none."""
    points = list(zip(numbers, values, kinds, strict=True))
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if b[0] > a[0] and b[2] == a[2]]
    return statistics.median(slopes) if slopes else 0.0


def newest_step(steps: Sequence[Mapping[str, Any]]) -> int:
    """The newest update that any of these events tells of; 0 if nobody has made one yet."""
    return max((event["step"] for event in steps), default=0)


def let_go_on(worker: WorkerProcess) -> None:
    """Let a stopped worker go on, unless it has ended: it may have been stopped when it was about to."""
    with contextlib.suppress(ProcessLookupError):
        worker.kill(signal.SIGCONT)


def _second(values: list[int]) -> float:
    quarter = len(values) // 4
    return statistics.median(values[quarter : quarter + max(quarter, 1)])


def _last(values: list[int]) -> float:
    return statistics.median(values[-max(len(values) // 4, 1) :])


@dataclass
class Soaked:
    """What has been seen.

    Args:
        num_faults: By their names.
        num_steps: Updates that were made.
        survivors: Usage of those that were never struck.
        coordinator: Usage of the coordinator.
        left_behind: Processes, and files of shared memory that nobody uses, that are there after the end and were not
            before.
    """

    num_faults: dict[str, int]
    num_steps: int
    survivors: list[Usage]
    coordinator: Usage
    left_behind: list[str]

    def leaks(self, usage: Usage) -> list[str]:
        """What one of them uses more and more of, beside memory: something that leaks with each recovery."""
        num_remains = 1 + sum(self.num_faults.values()) // 100
        return [what for what, more in usage.more.items() if more > num_remains * REMAINS[what]]


def train(host: str, options: dict[str, Any]) -> dict[str, Any]:
    """A worker that can be told to lose its connections."""
    signal.signal(_CLOSE_SOCKETS, lambda *_: harms.shut_down_all_sockets())
    return HOSTS[host].train(options)


def soak(host: str, directory: Path, *, duration_s: float, every_s: float, seed: int) -> Soaked:
    """Strike for so long, on average so often; then let all finish, and check what is promised of every run.

    Raises:
        HarnessError, AssertionError: A promise is broken.
    """
    before = _shared_memory()
    with _no_more_children() as left_behind:
        job = TrainingJob(directory, HOSTS[host], guard_s=180.0)
        job.coordinator = CoordinatorProcess(Settings(last_call_s=1.5, start_nodes=NUM_WORKERS), HEARTBEAT_TIMEOUT_S)
        with job:
            storm = _Storm(job, host, random.Random(seed), every_s)
            end = time.monotonic() + duration_s
            while time.monotonic() < end or storm.num_looks < 2:
                storm.rage(_ROUND * every_s)
                storm.look()
            storm.finish()
            num_steps = newest_step(job.events("step"))
    left_behind += [f"left behind: {file}" for file in sorted(_shared_memory() - before - _mapped_by_others())]
    return Soaked(storm.num_faults, num_steps, list(storm.usage.values()), storm.coordinator, left_behind)


class _Storm:
    def __init__(self, job: TrainingJob, host: str, dice: random.Random, every_s: float) -> None:
        self._job, self._dice, self._every_s = job, dice, every_s
        self._args = (host, {**_OPTIONS, **job.patient})
        for _ in range(NUM_WORKERS):
            job.start(train, *self._args)
        members = job.view(NUM_WORKERS)
        self._survivors = members[1 : 1 + NUM_SURVIVORS]  # so that they become the first ones
        self._others = [worker for worker in members if worker not in self._survivors]
        self._stopped: list[tuple[float, WorkerProcess]] = []
        self._struck: dict[WorkerProcess, str] = {}
        self._calm_after: int | None = None
        self._next_fault = time.monotonic() + self._pause_s()
        self.num_looks = 0
        self.usage = {worker: Usage() for worker in self._survivors}
        self.coordinator = Usage()
        self.num_faults = dict.fromkeys(_FAULTS, 0)

    def rage(self, duration_s: float) -> None:
        """Strike for so long; what was due since the time before, too, so that the average holds."""
        end = time.monotonic() + duration_s
        while (now := time.monotonic()) < end:
            if now >= self._next_fault and self._strike():
                self._next_fault += self._pause_s()
            self._heal()
            time.sleep(_LOOK_S)

    def _pause_s(self) -> float:
        return self._dice.expovariate(1 / self._every_s)

    def look(self) -> None:
        """Wait until all train together, and take samples of those that are never struck."""
        self._calm_after = None
        while not self._together():
            self._heal()
            time.sleep(_LOOK_S)
        processes = {worker: psutil.Process(worker.pid) for worker in self._survivors}
        samples = {worker: Usage() for worker in self._survivors}
        coordinator = Usage()
        for _ in range(_NUM_SAMPLES):
            for worker, process in processes.items():
                samples[worker].look(process)
            coordinator.look(self._job.coordinator.process)
            time.sleep(_SAMPLE_S)
        for worker, usage in self.usage.items():
            usage.note(samples[worker], sum(self.num_faults.values()))
        self.coordinator.note(coordinator, sum(self.num_faults.values()))
        self.num_looks += 1

    def _together(self) -> bool:
        """Nobody is about to go, and all have made an update that began after that."""
        if self._stopped or any(worker in self._struck for worker in self._others):
            self._calm_after = None
            return False
        steps = self._job.events("step")
        if self._calm_after is None:
            self._calm_after = newest_step(steps)
        makers: dict[int, set[str]] = {}
        for event in steps:
            if event["step"] > self._calm_after + 1:
                makers.setdefault(event["step"], set()).add(event["worker"])
        return NUM_WORKERS in map(len, makers.values())

    def _heal(self) -> None:
        """Let those go on that were stopped for long enough to be given up, and replace those that are gone."""
        for since, worker in list(self._stopped):
            if time.monotonic() > since + 2 * HEARTBEAT_TIMEOUT_S:
                let_go_on(worker)
                self._stopped.remove((since, worker))
        self._replace()
        for worker in self._survivors:
            if not worker.alive:
                raise HarnessError(f"{worker.name}, which nobody struck, has ended\n{self._job.tails()}")

    def _strike(self) -> bool:
        """Strike one that trains, or is about to, if there is one."""
        connected = {event["pid"] for event in self._job.events("start")}
        able = [w for w in self._others if w.alive and w not in self._struck and w.pid in connected]
        if not able:
            return False
        victim, fault = self._dice.choice(able), self._dice.choice(_FAULTS)
        self.num_faults[fault] += 1
        self._struck[victim] = fault
        victim.kill(_CLOSE_SOCKETS if fault == "closed sockets" else signal.Signals[fault])
        if fault == "SIGSTOP":
            self._stopped.append((time.monotonic(), victim))
        return True

    def _replace(self) -> None:
        """Start a newcomer for each that has been struck; one whose connections were closed may come back."""
        gone = [worker for worker in self._others if not worker.alive]
        gone += [worker for _, worker in self._stopped if worker in self._others]
        for worker in gone:
            self._others.remove(worker)
            self._others.append(self._job.start(train, *self._args))
        for worker in self._others:
            if self._struck.get(worker) == "closed sockets":
                del self._struck[worker]

    def finish(self) -> None:
        """All that are left train to the end together."""
        for _, worker in self._stopped:
            let_go_on(worker)
        self._replace()
        newest = newest_step(self._job.events("step"))
        self._job.wait_for_step(newest + 20)
        for worker in self._others:
            if worker not in self._struck:
                self._job.wait_for("start", pid=worker.pid)
        check_run(self._job, self._survivors)
        for worker in self._job.workers:
            worker.wait()


def _shared_memory() -> set[str]:
    return set(map(str, Path("/dev/shm").iterdir()))


def _mapped_by_others() -> set[str]:
    """Files that processes have mapped which are none of ours: ours have ended."""
    found: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found.update(region.path for region in process.memory_maps())
    return found


@contextlib.contextmanager
def _no_more_children() -> Iterator[list[str]]:
    """Names of the processes that are there in the end, and were not before; beside multiprocessing's own."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what workers leave behind becomes our child
    before = psutil.Process().children(recursive=True)
    found: list[str] = []
    try:
        yield found
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)
    for process in set(psutil.Process().children(recursive=True)).difference(before):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and not _is_multiprocessings(process):
                found.append(f"left behind: process {process.pid}: {' '.join(process.cmdline())}")


def _is_multiprocessings(process: psutil.Process) -> bool:
    text = " ".join(process.cmdline())
    return "multiprocessing.forkserver" in text or "multiprocessing.resource_tracker" in text


@click.command("soak")
@click.option("--host", type=click.Choice(list(HOSTS)), default="lightning", show_default=True)
@click.option("--minutes", default=40.0, show_default=True)
@click.option("--every", "every_s", default=2.5, show_default=True, help="Seconds between faults, on average.")
@click.option("--seed", default=0, show_default=True)
@click.option("--run-dir", type=click.Path(path_type=Path), default=Path("build/soak"), show_default=True)
def command(host: str, minutes: float, every_s: float, seed: int, run_dir: Path) -> None:
    """Four workers, of which two are struck again and again."""
    console = Console(highlight=False)
    soaked = soak(host, run_dir, duration_s=60 * minutes, every_s=every_s, seed=seed)
    usages = [*((f"survivor {i}", u) for i, u in enumerate(soaked.survivors)), ("coordinator", soaked.coordinator)]
    series = {name: dataclasses.asdict(usage) for name, usage in usages}
    (run_dir / "usage.json").write_text(json.dumps(series))
    console.print(f"{soaked.num_steps} updates; faults: {soaked.num_faults}; the audit holds")
    windows = f"kB a fault, of {WINDOW} each"
    table = Table("", "kB a fault, second half", windows, *(f"more {what}" for what in REMAINS))
    for name, usage in usages:
        parts = " ".join(f"{kept / 1024:.1f}" for kept in usage.kept_bytes_by_window)
        table.add_row(name, f"{usage.kept_bytes / 1024:.1f}", parts, *(f"{more:+g}" for more in usage.more.values()))
    console.print(table)
    leaks = [name for name, usage in usages if soaked.leaks(usage) or usage.kept_bytes > KEPT_LIMIT_BYTES]
    for what in (*soaked.left_behind, *(f"what {name} uses has grown" for name in leaks)):
        console.print(what)
    raise SystemExit(bool(soaked.left_behind or leaks))
