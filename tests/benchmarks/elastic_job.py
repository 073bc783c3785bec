"""An elastic job under torchrun, ours or the peer's, each node an agent with one worker on this machine."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.benchmarks import step_log
from tests.benchmarks.processes import Processes, free_port, kill_tree
from tests.benchmarks.step_log import Step

SLEEP_S = 0.05
_POLL_S = 0.02
_TIMEOUT_S = 150.0
_STEADY_STEPS = 8


@dataclass(frozen=True)
class Side:
    """How one side starts.

    Args:
        name: "ours" or "peer".
        worker: Module of the worker.
        rendezvous: Backend of torchrun's rendezvous.
        options: Its `--rdzv-conf`.
        environment: Additional environment of agents and workers.
    """

    name: str
    worker: str
    rendezvous: str
    options: str
    environment: tuple[tuple[str, str], ...] = ()


OURS = Side("ours", "tests.benchmarks.elasticflow_worker", "elasticflow", "last_call_timeout=2")
# Tuned: all that torchrun offers to be quick (its defaults are several times slower). A keep-alive interval
# is a whole number of seconds, and with a single attempt agents evict each other while they live.
PEER = Side(
    "peer",
    "tests.benchmarks.ddp_worker",
    "c10d",
    "keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=1,heartbeat_timeout=2,close_timeout=2",
    # Without it torch 2.13's agents may all exit when a node joins.
    (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),),
)


@dataclass
class Node:
    """A node of the job."""

    name: str
    agent: subprocess.Popen[bytes]


TORCHRUN = ("-m", "torch.distributed.run")
ELASTICFLOW_RUN = ("-m", "ef_common.cli", "run")


class ElasticJob:
    """A running job.

    Args:
        side: Whose.
        processes: Starts the agents.
        size: Model.
        sleep_s: Pretended computation of a step.
        launcher: What starts a node.
    """

    def __init__(
        self,
        side: Side,
        processes: Processes,
        *,
        size: str = "tiny",
        sleep_s: float = SLEEP_S,
        launcher: Sequence[str] = TORCHRUN,
    ) -> None:
        self.side = side
        self.nodes: list[Node] = []
        self._processes = processes
        self._launcher = launcher
        self._arguments = (size, str(sleep_s))
        self._port = free_port()
        self._num_started = 0
        self.run_dir = processes.directory / "run"
        self._steps = processes.directory / "steps"
        self._steps.mkdir()

    def add_nodes(
        self, num: int = 1, *, prefix: Sequence[str] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        """Start further nodes. The first of all hosts the rendezvous.

        Args:
            num: How many.
            prefix: What starts the launcher.
            variables: More of the environment.
        """
        for _ in range(num):
            name = f"node{self._num_started}"
            options = f"{self.side.options},is_host={int(self._num_started == 0)}"
            self._num_started += 1
            own = [f"--run-dir={self.run_dir}"] if self._launcher is ELASTICFLOW_RUN else []
            command = [*self._launcher, *own, "--nnodes=1:8", "--nproc-per-node=1", "--max-restarts=100"]
            command += ["--monitor-interval=0.1", "--rdzv-id=bench", f"--rdzv-backend={self.side.rendezvous}"]
            command += [f"--rdzv-endpoint=127.0.0.1:{self._port}", f"--rdzv-conf={options}"]
            command += ["-m", self.side.worker, *self._arguments]
            environment = {
                **dict(self.side.environment),
                step_log.DIRECTORY: str(self._steps),
                step_log.NODE: name,
                "ELASTICFLOW_RUN_DIR": str(self.run_dir),
                **(variables or {}),
            }
            agent = self._processes.start(command, name=name, environment=environment, prefix=prefix)
            self.nodes.append(Node(name, agent))

    def steps(self, node: Node) -> list[Step]:
        """Steps of a node so far."""
        return step_log.read(self._steps, node.name)

    def wait_until_steady(self) -> None:
        """Wait until all nodes train together."""

        def is_steady() -> bool:
            recent = [self.steps(node)[-_STEADY_STEPS:] for node in self.nodes]
            return all(
                len(steps) == _STEADY_STEPS and all(step.world_size == len(self.nodes) for step in steps)
                for steps in recent
            )

        self._wait(is_steady, f"{len(self.nodes)} nodes do not train together")

    def kill_last_node(self) -> tuple[Node, float]:
        """SIGKILL the newest node: its agent and its worker. Returns it, and the time of the kill."""
        return self.kill_node(-1)

    def kill_node(self, index: int) -> tuple[Node, float]:
        """The same of another one."""
        node = self.nodes.pop(index)
        return node, kill_tree(node.agent)

    def first_steps_after(self, when: float) -> list[Step]:
        """Each node's first step after `when` that all nodes of the present, and no others, have made."""

        def found(node: Node) -> Sequence[Step]:
            world_size = len(self.nodes)
            return [s for s in self.steps(node) if s.time > when and s.world_size == world_size]

        self._wait(lambda: all(map(found, self.nodes)), "no step after the change")
        return [found(node)[0] for node in self.nodes]

    def _wait(self, condition: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not condition():
            ended = [node.name for node in self.nodes if node.agent.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise TimeoutError(f"{self.side.name}: {problem}; agents that have ended: {ended}")
            time.sleep(_POLL_S)
