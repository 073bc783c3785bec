"""A node is told to go: how long the others pause, and how soon its worker's process and its launcher have ended.

Jobs of three nodes with steps of 50 ms. A node is told by signals to its launcher, its agent or its worker, by the end
of its terminal or of what reads its output, or by a notice; it hosts the coordinator or not. The longest time between
the ends of two steps of the others is held against one step and 0.1 s, the end of the worker's process after its last
step against 0.5 s. No process of the node may be left in the end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from ef_common.audit import audit
from ef_common.launch.ending import has_ended
from tests.benchmarks.elastic_job import ELASTICFLOW_RUN, OURS, SLEEP_S, TORCHRUN, ElasticJob, Node
from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.benchmarks.processes import Processes

MOST_GAP_S, MOST_END_S = SLEEP_S + 0.1, 0.5
NUM_NODES = 3
_LOOK_S = 0.005
_GUARD_S = 60.0
# Starts what follows in a terminal of its own, whose other end it holds; writes down its own pid and the launcher's.
_IN_TERMINAL = """
import os, pty, sys
pid, end = pty.fork()
if not pid: os.execv(sys.argv[2], sys.argv[2:])
print(os.getpid(), pid, file=open(sys.argv[1], "w"))
while data := os.read(end, 4096): os.write(1, data)
"""
# Starts what follows with its output in a pipe; writes down the pid of the reader, and its own, the launcher's.
_INTO_PIPE = 'file="$1"; shift; exec "$@" > >(echo $BASHPID $$ > "$file"; exec cat > /dev/null) 2>&1'


@dataclass(frozen=True)
class Target:
    """The node that is told to go.

    Args:
        launcher: What has started it.
        worker: Its worker.
        other: Who holds its terminal, or reads its output.
        notice: A file that is a notice.
    """

    launcher: psutil.Process
    worker: psutil.Process
    other: int
    notice: Path


def _to(whom: str, number: signal.Signals) -> Callable[[Target], None]:
    return lambda target: getattr(target, whom).send_signal(number)


def _close_terminal(target: Target) -> None:
    os.kill(target.other, signal.SIGKILL)


def _break_pipe(target: Target) -> None:
    os.kill(target.other, signal.SIGKILL)
    target.launcher.send_signal(signal.SIGINT)


@dataclass(frozen=True)
class Way:
    """A way to tell a node to go.

    Args:
        name: It, and who is told.
        tell: Tells.
        launcher: What starts the nodes.
        prefix: What starts the launcher of that node; the name of a file for pids follows.
        restarts: The worker is interrupted, which is no reason to leave: the node starts it again.
    """

    name: str
    tell: Callable[[Target], None]
    launcher: Sequence[str] = TORCHRUN
    prefix: Sequence[str] = ()
    restarts: bool = False


def ways(*, quick: bool) -> list[Way]:
    """All of them, or few."""
    few = (signal.SIGTERM, signal.SIGUSR1)
    found = [Way(f"{one.name} to the agent", _to("launcher", one)) for one in few]
    found += [Way(f"{one.name} to the worker", _to("worker", one)) for one in few]
    if quick:
        return found
    more = (signal.SIGINT, signal.SIGHUP)
    found += [Way(f"{one.name} to the agent", _to("launcher", one)) for one in more]
    found += [_to_worker(one) for one in more]
    run = ELASTICFLOW_RUN
    found += [Way(f"{one.name} to `elasticflow run`", _to("launcher", one), run) for one in (*few, *more)]
    found += [_to_worker(one, " of `elasticflow run`", run) for one in (*few, *more)]
    return [
        *found,
        Way("its terminal is closed", _close_terminal, run, (sys.executable, "-c", _IN_TERMINAL)),
        Way("Ctrl-C, whose pipe has lost its reader", _break_pipe, run, ("bash", "-c", _INTO_PIPE, "bash")),
        Way("a notice", lambda target: target.notice.touch()),
    ]


def _to_worker(number: signal.Signals, whose: str = "", launcher: Sequence[str] = TORCHRUN) -> Way:
    name = f"{number.name} to the worker{whose}"
    return Way(name, _to("worker", number), launcher, restarts=number == signal.SIGINT)


@dataclass(frozen=True)
class Departure:
    """What was seen of one.

    Args:
        gap_s: Longest time between two steps of the others.
        worker_s: From the worker's last step to the end of its process.
        launcher_s: From the moment in which the node was told to the end of its launcher; 0 if it goes on.
        status: Exit status of the launcher; None if it goes on.
    """

    gap_s: float
    worker_s: float
    launcher_s: float
    status: int | None


def measure(way: Way, *, leads: bool) -> Departure:
    """Tell one node of a new job to go."""
    with Processes() as processes:
        pids, notice = processes.directory / "pids", processes.directory / "notice"
        job = ElasticJob(OURS, processes, launcher=way.launcher)
        for goes in (leads, not leads, False):
            job.add_nodes(
                prefix=(*way.prefix, str(pids)) if goes and way.prefix else (),
                variables={"ELASTICFLOW_NOTICE": f"file://{notice}"} if goes else {},
            )
        job.wait_until_steady()
        going = job.nodes.pop(0 if leads else 1)
        other, launcher = map(int, pids.read_text().split()) if way.prefix else (0, going.agent.pid)
        target = Target(psutil.Process(launcher), psutil.Process(job.steps(going)[-1].pid), other, notice)
        family = [] if way.restarts else [target.launcher]
        family += (target.worker if way.restarts else target.launcher).children(recursive=True)
        began = time.monotonic()
        way.tell(target)
        worker_ended = _wait_for_end(target.worker)
        status = None if way.restarts else target.launcher.wait(_GUARD_S)
        launcher_s = 0.0 if way.restarts else time.monotonic() - began
        job.first_steps_after(time.monotonic() + 1.0)
        departure = Departure(
            max(_longest_gap(job, node, began) for node in job.nodes),
            worker_ended - job.steps(going)[-1].time,
            launcher_s,
            status,
        )
        if left := [process for process in family if not has_ended(process)]:
            raise RuntimeError(f"processes of the node are left: {left}")
        if not audit(job.run_dir).ok:
            raise RuntimeError("the audit does not hold")
    print(
        f"| {way.name} | {'yes' if leads else 'no'} | {departure.gap_s:.3f} | {departure.worker_s:.2f} | "
        f"{launcher_s:.2f} | {'goes on' if status is None else status} |",
        flush=True,
    )
    return departure


def _wait_for_end(process: psutil.Process) -> float:
    deadline = time.monotonic() + _GUARD_S
    while not has_ended(process):
        if time.monotonic() > deadline:
            raise TimeoutError("the worker does not end")
        time.sleep(_LOOK_S)
    return time.monotonic()


def _longest_gap(job: ElasticJob, node: Node, began: float) -> float:
    times = [step.time for step in job.steps(node)]
    return max(after - before for before, after in pairwise(times) if after > began)


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure."""
    print("| Told by | leads | others' longest step, s | worker's process, s | launcher, s | status |")
    print("|---|---|---|---|---|---|")
    found = [measure(way, leads=leads) for way in ways(quick=quick) for leads in (True, False)]
    gaps, ends = [one.gap_s for one in found], [one.worker_s for one in found]
    launchers = [round(one.launcher_s, 3) for one in found]
    return {
        "departure_gap": of_samples(gaps, [MOST_GAP_S], target=1.0, unit="s"),
        "departure_end": of_samples(ends, [MOST_END_S], target=1.0, unit="s", agents=launchers),
    }


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
