"""Real torchrun nodes for tests: an agent each, with the workers that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import psutil

from ef_common.launch import environment
from ef_common.launch.ending import has_ended
from ef_common.testing.harness_run import GUARD_S, HEARTBEAT_TIMEOUT_S, HarnessError, Run
from ef_common.testing.ports import reserve_port

__all__ = ["Node", "TorchrunJob"]


class Agent(Protocol):
    """The process of an agent, as a `Popen` is one."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def send_signal(self, sig: int) -> None: ...


def _start(
    arguments: Sequence[str], environ: Mapping[str, str], output: Path, prefix: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "torch.distributed.run", *arguments],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


class Node:
    """A torchrun agent and its workers.

    Args:
        process: The agent.
        name: Its name in the job.
        job: The job.
    """

    def __init__(self, process: Agent, name: str, job: TorchrunJob) -> None:
        self._process = process
        self._job = job
        self.name = name

    @property
    def pid(self) -> int:
        """Process id of the agent."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether its agent has not ended yet."""
        return self._process.poll() is None

    def worker_pids(self) -> list[int]:
        """Process ids of its workers that have logged their start and still run."""
        started = {event["pid"] for event in self._job.events("start")}
        return sorted(started & {process.pid for process in self._tree()})

    def _tree(self) -> list[psutil.Process]:
        try:
            agent = psutil.Process(self.pid)
            return [agent, *agent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """Kill the node: the agent first, so that it does not see its workers end, then all else."""
        tree = self._tree()
        for process in tree:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._process.wait(GUARD_S)
        deadline = time.monotonic() + GUARD_S
        while not all(map(has_ended, tree)) and time.monotonic() < deadline:
            time.sleep(0.005)

    def signal(self, number: int) -> None:
        """Send the agent a signal."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """Wait until the agent ends; its exit status.

        Raises:
            HarnessError: It did not end in time; with the tails of all outputs.
        """
        try:
            return self._process.wait(self._job.guard_s)
        except subprocess.TimeoutExpired:
            raise HarnessError(f"{self.name} does not end\n{self._job.tails()}") from None


class TorchrunJob(Run):
    """A job of torchrun nodes on this machine. Whatever happens in its block, no process outlives it.

    Args:
        directory: Run directory.
        script: What the workers run.
        rdzv_backend: torchrun's rendezvous backend; "" to name neither one nor an endpoint.
        endpoint: Its endpoint; by default a free port of the loopback interface.
        guard_s: How long to wait for what must happen.
        start_agent: Starts what `python -m torch.distributed.run` is with these arguments, this environment, and an
            output; by default, that command.
    """

    def __init__(
        self,
        directory: Path,
        script: Path,
        *,
        rdzv_backend: str = "elasticflow",
        endpoint: str | None = None,
        guard_s: float = GUARD_S,
        start_agent: Callable[[Sequence[str], Mapping[str, str], Path], Agent] | None = None,
    ) -> None:
        super().__init__(directory, guard_s=guard_s)
        self._script = script
        self._backend = rdzv_backend
        self._start_agent = start_agent or _start
        self.nodes: list[Node] = []
        self._ended = False
        self._reserved = reserve_port()
        self._endpoint = endpoint or f"127.0.0.1:{self._reserved.getsockname()[1]}"

    def __enter__(self) -> TorchrunJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes:
            node.kill()
        self._reserved.close()
        if kind is not None and not issubclass(kind, HarnessError):
            print(self.tails(), file=sys.stderr)

    def start(
        self,
        *options: str,
        script_args: tuple[str, ...] = (),
        environ: Mapping[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> Node:
        """Start one node.

        Args:
            options: Of torchrun, such as `--nnodes=1:8`.
            script_args: Of the script.
            environ: Further variables of its environment.
            prefix: Command that runs the agent, such as one that enters a network namespace.
        """
        name = f"node{len(self.nodes)}"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "ELASTICFLOW_"))}
        variables = {
            **inherited,
            environment.RUN_DIR: str(self.directory),
            environment.AUDIT: "1",
            "OMP_NUM_THREADS": "1",
            environment.HEARTBEAT_TIMEOUT: str(HEARTBEAT_TIMEOUT_S),
            "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            **(environ or {}),
        }
        arguments = ["--monitor-interval=0.1"]
        if self._backend:
            arguments += [f"--rdzv-backend={self._backend}", f"--rdzv-endpoint={self._endpoint}"]
        arguments += [*options, str(self._script), *script_args]
        output = self.outputs / f"{name}.txt"
        if prefix:
            process: Agent = _start(arguments, variables, output, prefix)
        else:
            process = self._start_agent(arguments, variables, output)
        node = Node(process, name, self)
        self.nodes.append(node)
        return node

    def check(self) -> None:
        """Nothing can come of a job none of whose nodes is left."""
        ended_before = self._ended
        self._ended = bool(self.nodes) and not any(node.alive for node in self.nodes)
        if self._ended and ended_before:  # so the events have been read once more after the end
            raise HarnessError(f"all nodes have ended\n{self.tails()}")
