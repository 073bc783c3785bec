"""Real torchrun agents with a worker that has no framework."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ef_common.testing.ports import reserve_port
from tests.launch import agents
from tests.launch.agents import Agent

T = TypeVar("T")

GUARD_S = 60.0
WORKER = Path(__file__).with_name("worker.py")
ROOT = WORKER.parents[2]


class Job:
    """The agents of one job, and what their workers have recorded."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.agents: list[Agent] = []
        self.reserved = reserve_port()
        self.endpoint = f"127.0.0.1:{self.reserved.getsockname()[1]}"

    def agent(self, *arguments: str, flags: bool = True, script: Path = WORKER, **variables: str) -> Agent:
        """Start one agent, which is a node."""
        options = ["--monitor-interval=0.1"]
        if flags:
            options += ["--rdzv-backend=elasticflow", f"--rdzv-endpoint={self.endpoint}"]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "ELASTICFLOW_"))}
        env |= {
            "EF_TEST_DIR": str(self.directory),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "ELASTICFLOW_HEARTBEAT_TIMEOUT": "10",  # a machine with too much to do makes nobody look dead
            **variables,
        }
        # Whatever kills pytest kills the agents, and whatever kills an agent kills its workers.
        log = self.directory / f"agent-{len(self.agents)}.log"
        agent = agents.start([*options, *arguments, str(script)], env, log)
        self.agents.append(agent)
        return agent

    def kill(self, agent: Agent) -> None:
        """Kill an agent and, by their parent-death signal, its workers."""
        agent.kill()
        agent.wait(GUARD_S)

    def tell(self, word: str, pid: int | None = None) -> None:
        (self.directory / (word if pid is None else f"{word}-{pid}")).touch()

    def untell(self, word: str, pid: int) -> None:
        (self.directory / f"{word}-{pid}").unlink()

    def records(self, kind: str) -> list[dict[str, Any]]:
        files = sorted(self.directory.glob("*.jsonl"))
        lines = [line for file in files for line in file.read_text().splitlines(keepends=True)]
        return [r for r in (json.loads(line) for line in lines if line.endswith("\n")) if r["kind"] == kind]

    def wait_for(self, kind: str, number: int = 1, **fields: Any) -> list[dict[str, Any]]:
        """Wait until so many records hold these fields (`size`: number of members)."""

        def fits(record: dict[str, Any]) -> bool:
            have = {**record, "size": len(record.get("members", ()))}
            return all(have[name] == value for name, value in fields.items())

        def found() -> list[dict[str, Any]]:
            records = [record for record in self.records(kind) if fits(record)]
            return records if len(records) >= number else []

        return self._wait_until(found, f"{number} records {kind} {fields}")

    def wait_for_log(self, text: str) -> None:
        """Wait until an agent or a worker has written this."""
        self._wait_until(lambda: text in self.logs(), repr(text))

    def _wait_until(self, found: Callable[[], T], what: str) -> T:
        """Wait until something is found, which is returned."""
        deadline = time.monotonic() + GUARD_S
        while not (result := found()):
            if time.monotonic() > deadline:
                pytest.fail(f"waited in vain for {what}\n{self.logs()}")
            time.sleep(0.05)
        return result

    def wait_exit(self, agent: Agent) -> int:
        try:
            return agent.wait(GUARD_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"agent {self.agents.index(agent)} does not end\n{self.logs()}")

    def logs(self) -> str:
        logs = [f"--- {file.name}\n{file.read_text()[-3000:]}" for file in sorted(self.directory.glob("*.log"))]
        seen = [file.read_text() for file in sorted(self.directory.glob("*.jsonl"))]
        return "\n".join(logs + seen)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    try:
        yield job
    finally:
        for agent in job.agents:
            job.kill(agent)
        job.reserved.close()


@pytest.fixture(scope="session")
def entry_point() -> None:
    """The handler must be registered, as `make test` and `pip install` do it."""
    names = [point.name for point in entry_points(group="torchrun.handlers")]
    if "elasticflow" not in names:
        pytest.fail("torchrun does not know 'elasticflow': run `pip install --editable .` first")


@pytest.fixture
def start_two(job: Job, entry_point: None) -> Callable[..., tuple[Any, ...]]:
    """Two nodes in their first view; the first one hosts."""

    def start(*arguments: str, **variables: str) -> tuple[Any, ...]:
        first = job.agent("--nnodes=2:8", *arguments, "--rdzv-conf=last_call_timeout=0", **variables)
        host = job.wait_for("start")[0]["pid"]
        second = job.agent("--nnodes=2:8", *arguments, "--rdzv-conf=last_call_timeout=0", **variables)
        job.wait_for("view", 2, generation=1, size=2)
        guest = next(r["pid"] for r in job.records("start") if r["pid"] != host)
        return first, host, second, guest

    return start
