"""Torchrun agents on nodes of a network, and their job."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ef_common.testing.harness_torchrun import Node, TorchrunJob
from tests.faults import networks
from tests.faults.hosts import ENOUGH
from tests.faults.switch import Switch
from tests.faults.torchrun_nodes import OPTIONS, SCRIPT

PORT = 29400


def behind(gate: Path) -> tuple[str, ...]:
    """Prefix of a command that is to wait at a pipe until somebody writes to it."""
    return ("sh", "-c", f': < {gate}; exec "$@"', "sh")


class Nodes:
    """Nodes of a network, which train.

    Args:
        directory: For the run directory, and what else is needed.
        switch: Their network.
        endpoint: What agents are told; without it, node 1.
        environ: Further variables of their environment.

    Attributes:
        job: Their job.
        switch: Their network.
    """

    def __init__(
        self, directory: Path, switch: Switch, *, endpoint: str = "", environ: Mapping[str, str] | None = None
    ) -> None:
        self.switch = switch
        self._environ = dict(environ or {})
        self._directory = directory
        (directory / "token").write_text("not for others\n")
        self.job = TorchrunJob(directory / "run", SCRIPT, endpoint=endpoint or f"{networks.address(1)}:{PORT}")
        self._nodes: dict[int, Node] = {}
        self._gone: set[str] = set()  # workers of starts of which nobody is left

    def start(
        self,
        *numbers: int,
        at_most: int = 0,
        last_call_s: float = 30.0,
        heartbeat_timeout_s: float = 2.0,
        environ: Mapping[str, str] | None = None,
        gate: Path | None = None,
        **options: object,
    ) -> None:
        """Start an agent on each of these nodes.

        Args:
            numbers: The nodes.
            at_most: How many train; without it, as many as these are.
            last_call_s: How long those wait who are fewer.
            heartbeat_timeout_s: After so long a silence, somebody is lost.
            environ: Further variables of their environment.
            gate: A pipe: they begin when somebody writes to it.
            options: Of the training.
        """
        waits = f"last_call_timeout={last_call_s},heartbeat_timeout={heartbeat_timeout_s}"
        for number in numbers:
            self._nodes[number] = self.job.start(
                f"--nnodes=1:{at_most or len(numbers)}",
                "--max-restarts=50",
                f"--rdzv-conf=token_file={self._directory}/token,{waits}",
                f"--local-addr={networks.address(number)}",
                script_args=(json.dumps({**OPTIONS, **options}),),
                environ={**self._environ, **(environ or {})},
                prefix=(*networks.inside(number), *(() if gate is None else behind(gate))),
            )

    def agent(self, number: int) -> int:
        """Process id of the agent of a node."""
        return self._nodes[number].pid

    def workers(self, number: int) -> set[str]:
        """Ids of the workers of a node."""
        pids = self._nodes[number].worker_pids()
        return {event["worker"] for event in self.job.events("start") if event["pid"] in pids}

    def leader(self) -> int:
        """The node whose agent has the workers' lines."""
        return max(self._nodes, key=self._num_lines)

    def _num_lines(self, number: int) -> int:
        command = (*networks.inside(number), "ss", "-Htnp", "state", "established")
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return lines.count(f"pid={self.agent(number)},")

    def said(self, number: int) -> str:
        """What the newest agent of a node, and its workers, have put out."""
        return (self.job.outputs / f"{self._nodes[number].name}.txt").read_text()

    def records_of(self, workers: Iterable[str], kind: str) -> int:
        """How many events of this kind these workers have logged."""
        return sum(event["worker"] in workers for event in self.job.events(kind))

    # ------------------------------------------------------------ what happens to them

    def kill(self, *numbers: int) -> None:
        """Kill the agents of these nodes with their workers."""
        for number in numbers:
            self._nodes.pop(number).kill()
        if not self._nodes:
            self._gone = {event["worker"] for event in self.job.events()}

    def lose(self, number: int) -> None:
        """The machine of a node is gone: nothing there answers, not even to refuse."""
        networks.set_link(number, "down")
        self.kill(number)

    def wait(self, number: int) -> int:
        """Wait until the agent of a node ends; its status."""
        return self._nodes[number].wait()

    # ------------------------------------------------------------ what is waited for

    def wait_for_view(self, size: int, *, after: int = 0) -> None:
        """Wait until so many are in one view, which is newer, and train."""

        def complete(events: list[dict[str, Any]]) -> bool:
            events = [event for event in events if event["worker"] not in self._gone]
            views = [e["generation"] for e in events if e["kind"] == "view" and e["world_size"] == size]
            new = {generation for generation in views if generation > after and views.count(generation) >= size}
            return any(event["kind"] == "step" and event["generation"] in new for event in events)

        self.job.wait_until(complete, f"a view of {size} after view {after}")

    def wait_for_steps(self, number: int) -> None:
        """Wait until so many more steps are made."""
        self.job.wait_for_step(max(event["step"] for event in self.job.events("step")) + number)

    def num_trainings(self) -> int:
        """How many have begun anew, each of which counts its views from 1."""
        return len({tuple(event["members"]) for event in self.job.events("view", generation=1)})

    def newest(self) -> int:
        """Generation of the newest view."""
        return max(event["generation"] for event in self.job.events("view"))

    def finish(self) -> None:
        """End the training: all nodes end with status 0, and the audit holds."""
        (self.job.directory / ENOUGH).touch()
        assert [node.wait() for node in self._nodes.values()] == [0] * len(self._nodes)
        self.job.audit()
