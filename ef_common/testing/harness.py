"""Real worker processes for tests, which start in a moment.

A *forkserver* imports the frameworks once; each worker is a fork of it, so it starts in milliseconds and not
in the seconds that importing torch takes. The coordinator is a real one, hosted by the test process::

    with Job(tmp_path, preload=["lightning.pytorch", "ef_lightning"]) as job:
        a, b = job.start_world(2, train, {"epochs": 2})
        job.wait_for_step(3)
        a.kill()
        assert b.wait() == 0
        job.audit()

Whatever happens in the block, no process outlives it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from ef_common.control.coordinator import Coordinator
from ef_common.core.membership import Settings
from ef_common.events import Record
from ef_common.launch import environment
from ef_common.protocol.addresses import format_address
from ef_common.testing import forkservers
from ef_common.testing.harness_run import GUARD_S, HEARTBEAT_TIMEOUT_S, HarnessError, Run

__all__ = ["GUARD_S", "HarnessError", "Job", "WorkerProcess"]

_PR_SET_PDEATHSIG = 1
_DUMP_S = 0.5
_CONTEXT = multiprocessing.get_context("forkserver")


class WorkerProcess:
    """A worker of a job.

    Args:
        process: The process, not started yet.
        name: Its name in the job; also that of its node, if it is alone on it.
        job: The job.
    """

    def __init__(self, process: Any, name: str, job: Job) -> None:
        self._process = process
        self._job = job
        self.name = name
        self.output = job.outputs / f"{name}.txt"

    @property
    def pid(self) -> int:
        """Process id."""
        return int(self._process.pid)

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet (a stopped one is alive)."""
        return bool(self._process.is_alive())

    @property
    def id(self) -> str:
        """Id of the worker in views; waits until it has said it."""
        return str(self._job.wait_for("start", pid=self.pid)[0]["worker"])

    def events(self, kind: str | None = None, **fields: Any) -> list[Record]:
        """Events that this worker has logged."""
        return self._job.events(kind, worker=self.id, **fields)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal. SIGKILL is waited for."""
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            self._process.join(GUARD_S)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until it ends.

        Returns:
            Its exit status; minus the signal's number if one ended it.

        Raises:
            HarnessError: It did not end in time; with the tails of all outputs.
        """
        self._process.join(self._job.guard_s if timeout_s is None else timeout_s)
        if self._process.exitcode is None:
            self._job.dump_stacks()
            raise HarnessError(f"{self.name} does not end\n{self._job.tails()}")
        return int(self._process.exitcode)

    def result(self) -> Any:
        """What its target returned; the worker must have ended well.

        Raises:
            HarnessError: It has not.
        """
        status = self.wait()
        path = self._job.results / f"{self.name}.json"
        if status != 0 or not path.exists():
            raise HarnessError(f"{self.name} ended with status {status}\n{self._job.tails()}")
        return json.loads(path.read_text())

    def end(self) -> None:
        """Kill it and its children, whatever they do, and reap it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            if self.alive:  # it may not lead its group yet
                os.kill(self.pid, signal.SIGKILL)
        self._process.join(GUARD_S)


class Job(Run):
    """A job with a coordinator in this process.

    Args:
        directory: Run directory.
        preload: Modules that the forkserver imports before it forks the first worker.
        settings: Settings of the membership. The first view waits for no more than it knows of.
        heartbeat_timeout_s: Of the coordinator.
        hang_timeout_s: Likewise.
        guard_s: How long to wait for what must happen.
    """

    def __init__(
        self,
        directory: Path,
        *,
        preload: Sequence[str] = (),
        settings: Settings | None = None,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        hang_timeout_s: float | None = None,
        guard_s: float = GUARD_S,
    ) -> None:
        super().__init__(directory, guard_s=guard_s)
        self._preload = list(preload)
        self.coordinator = Coordinator(
            ("127.0.0.1", 0),
            settings=settings or Settings(last_call_s=0.0),
            heartbeat_timeout_s=heartbeat_timeout_s,
            hang_timeout_s=hang_timeout_s,
        )
        self.workers: list[WorkerProcess] = []
        self._ended = False

    def __enter__(self) -> Job:
        forkservers.start((*self._preload, __name__))
        self.coordinator.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            worker.end()
        self.coordinator.stop()
        if kind is not None and not issubclass(kind, HarnessError):
            print(self.tails(), file=sys.stderr)

    def start(
        self,
        target: Callable[..., Any],
        *args: Any,
        node: str = "",
        environ: Mapping[str, str] | None = None,
    ) -> WorkerProcess:
        """Start one worker, by default on a node of its own.

        Args:
            target: An importable function; what it returns must be JSON.
            args: Its arguments.
            node: Name of its node.
            environ: Further variables of its environment.
        """
        name = f"w{len(self.workers)}"
        variables = {
            environment.COORDINATOR: format_address(self.coordinator.address),
            environment.RUN_DIR: str(self.directory),
            environment.AUDIT: "1",
            environment.NODE: node or name,
            "OMP_NUM_THREADS": "1",
            **(environ or {}),
        }
        output, result = self.outputs / f"{name}.txt", self.results / f"{name}.json"
        process = _CONTEXT.Process(target=_work, args=(target, args, variables, str(output), str(result)), name=name)
        worker = WorkerProcess(process, name, self)
        output.touch()
        with without_main():
            process.start()
        self.workers.append(worker)
        return worker

    def start_world(self, number: int, target: Callable[..., Any], *args: Any) -> list[WorkerProcess]:
        """Start the first view: the workers of one node, which is admitted when all of them are there."""
        return [
            self.start(
                target,
                *args,
                node="founders",
                environ={"LOCAL_WORLD_SIZE": str(number), "LOCAL_RANK": str(rank)},
            )
            for rank in range(number)
        ]

    def by_id(self, worker: str) -> WorkerProcess:
        """The process that is this worker of a view."""
        pid = self.wait_for("start", worker=worker)[0]["pid"]
        return next(process for process in self.workers if process.pid == pid)

    def founders(self, world_size: int) -> list[WorkerProcess]:
        """Wait until all members of the first view of this size have arrived in it, even if it is over by now.

        Returns:
            Its members in rank order.
        """

        def complete(events: Sequence[Record]) -> list[str]:
            arrived: dict[int, set[str]] = {}
            for view in (event for event in events if event["kind"] == "view"):
                members: list[str] = view["members"]
                arrived.setdefault(view["generation"], set()).add(view["worker"])
                if len(members) == world_size and arrived[view["generation"]].issuperset(members):
                    return members
            return []

        members = self.wait_until(complete, f"the first view of {world_size}")
        return [self.by_id(member) for member in members]

    def view(self, world_size: int, *, after: int = 0) -> list[WorkerProcess]:
        """Wait for a view of this size, newer than a generation, in which all have arrived and still are.

        If something may end that view by itself, it may be missed: see `founders`.

        Returns:
            Its members in rank order.
        """

        def complete(events: Sequence[Record]) -> list[str]:
            newest: dict[str, Record] = {e["worker"]: e for e in events if e["kind"] == "view"}
            for view in newest.values():
                members: list[str] = view["members"]
                here = [newest.get(m, {}).get("generation") == view["generation"] for m in members]
                if view["generation"] > after and len(members) == world_size and all(here):
                    return members
            return []

        members = self.wait_until(complete, f"a view of {world_size} after generation {after}")
        return [self.by_id(member) for member in members]

    def dump_stacks(self) -> None:
        """Have all workers, and then their data workers, write the stacks of their threads to their outputs."""
        workers = [psutil.Process(worker.pid) for worker in self.workers if worker.alive]
        for process in [*workers, *(child for worker in workers for child in worker.children(recursive=True))]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGUSR2)
            time.sleep(_DUMP_S)

    @property
    def generation(self) -> int:
        """The newest generation that anybody has logged."""
        return max((int(event["generation"]) for event in self.events("view")), default=0)

    def check(self) -> None:
        """Nothing can come of a job none of whose workers is left."""
        ended_before = self._ended
        self._ended = bool(self.workers) and not any(worker.alive for worker in self.workers)
        if self._ended and ended_before:  # so the events have been read once more after the end
            raise HarnessError(f"all workers have ended\n{self.tails()}")


# ---------------------------------------------------------------- children of the forkserver


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Keep multiprocessing from importing this process's main module (pytest, mostly) in the child."""
    main = sys.modules["__main__"]
    names = ("__spec__", "__file__")
    saved: dict[str, Any] = {name: main.__dict__.pop(name) for name in names if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(saved)


def _work(
    target: Callable[..., Any], args: Sequence[Any], variables: Mapping[str, str], output: str, result: str
) -> None:
    """Body of a worker process."""
    os.setsid()  # its children can then be ended with it
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with the forkserver, and so with us
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.environ.update(variables)
    multiprocessing.set_start_method("fork", force=True)  # for data workers: as in a process of its own
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    try:
        value = target(*args)
        Path(result).write_text(json.dumps(value))
    except Exception:
        sys.excepthook(*sys.exc_info())  # multiprocessing's children leave without
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # so they do here
