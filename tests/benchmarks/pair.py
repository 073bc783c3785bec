"""Workers that can be a job of ours and one of DDP, mostly two: no agents; the benchmark hosts the coordinator."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from ef_common.collectives.bootstrap import SharedValues
from ef_common.control.coordinator import Coordinator
from ef_common.core.membership import Settings
from ef_common.horovod.rendezvous import Rendezvous, environment_of
from tests.benchmarks.processes import Processes, free_port

WORLD_SIZE = 2
_POLL_S = 0.1
_MARK = "RESULT "


def run_pair(module: str, arguments: Sequence[str], *, timeout_s: float, world_size: int = WORLD_SIZE) -> list[Any]:
    """Run `module` in two processes, or so many; returns what each reported, in rank order.

    Raises:
        RuntimeError: One failed.
        TimeoutError: They took too long.
    """
    coordinator = Coordinator(("127.0.0.1", 0), settings=Settings(min_nodes=world_size, max_nodes=world_size))
    with Processes() as processes:
        coordinator.start()
        try:
            host, port = coordinator.address
            common = {
                "ELASTICFLOW_COORDINATOR": f"{host}:{port}",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
                "TORCHELASTIC_RUN_ID": "bench",
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "GROUP_WORLD_SIZE": str(world_size),
            }
            names = [f"rank{rank}" for rank in range(world_size)]
            started = [
                processes.start(
                    ["-m", module, *arguments],
                    name=name,
                    environment=common | {"RANK": str(rank), "GROUP_RANK": str(rank), "ELASTICFLOW_NODE": name},
                )
                for rank, name in enumerate(names)
            ]
            _wait(started, timeout_s)
            return [_result(processes.log(name)) for name in names]
        finally:
            coordinator.stop()


def run_horovod_pair(module: str, arguments: Sequence[str], *, timeout_s: float) -> list[Any]:
    """The same, of two processes that call Horovod's own `init`."""
    with Rendezvous(SharedValues()) as rendezvous, Processes() as processes:
        names = [f"rank{rank}" for rank in range(WORLD_SIZE)]
        started = [
            processes.start(
                ["-m", module, *arguments],
                name=name,
                environment=environment_of(rank, WORLD_SIZE, rendezvous, interface="lo"),
            )
            for rank, name in enumerate(names)
        ]
        _wait(started, timeout_s)
        return [_result(processes.log(name)) for name in names]


def run_single(module: str, arguments: Sequence[str], *, timeout_s: float) -> Any:
    """Run `module` in one process that has no coordinator; returns what it reported."""
    with Processes() as processes:
        _wait([processes.start(["-m", module, *arguments], name="single")], timeout_s)
        return _result(processes.log("single"))


def _wait(started: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in started):
        if any(process.poll() for process in started):
            break
        if time.monotonic() > deadline:
            raise TimeoutError(f"the workers are not done after {timeout_s:g} s")
        time.sleep(_POLL_S)
    failed = [process.returncode for process in started if process.poll()]
    if failed:
        raise RuntimeError(f"a worker failed. Received: status={failed[0]}")


def report(value: Any) -> None:
    """In a worker: report a JSON value to the benchmark."""
    print(_MARK + json.dumps(value), flush=True)


def _result(output: str) -> Any:
    lines = [line for line in output.splitlines() if line.startswith(_MARK)]
    if not lines:
        raise RuntimeError(f"a worker reported nothing; its last output: {output[-1000:]}")
    return json.loads(lines[-1].removeprefix(_MARK))
