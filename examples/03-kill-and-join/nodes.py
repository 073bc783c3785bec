"""Nodes: each is one torchrun agent with one worker, here all on this machine."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

SLOW_DOWN_S = 1.5  # far less than the heartbeat timeout


class Nodes:
    """Starts nodes and ends them; leaving the context ends all of them.

    Args:
        run_dir: Directory of the run: the event log, and one output file per node.
        num_nodes: Nodes that train together; one more waits until there is room.
        command: The training script and its arguments.
    """

    def __init__(self, run_dir: Path, num_nodes: int, command: list[str]):
        self._run_dir = run_dir
        self._num_nodes = num_nodes
        self._command = command
        self._agents: list[subprocess.Popen] = []
        self._killed: set[int] = set()
        self._mark = f"DEMO_NODE={secrets.token_hex(8)}"  # how we know our own processes again
        self._endpoint = f"127.0.0.1:{_free_port()}"
        self._environ = {
            "ELASTICFLOW_HEARTBEAT_TIMEOUT": "10",  # long, so that a machine with too much to do makes nobody look dead
            **os.environ,
            "ELASTICFLOW_TOKEN": secrets.token_hex(16),
            "ELASTICFLOW_RUN_DIR": str(run_dir),
            "ELASTICFLOW_AUDIT": "1",
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *exc_info: object) -> None:
        # Until nothing is found: an agent may just be starting its worker.
        while pids := _processes_with(self._mark):
            _kill(pids)
            self.running()

    def __len__(self) -> int:
        return len(self._agents)

    def start(self) -> None:
        """Start one more node. The first hosts the coordinator."""
        number = len(self._agents)
        name, _, value = self._mark.partition("=")
        torchrun = [
            str(Path(sys.executable).with_name("torchrun")),  # that of this environment, whatever PATH says
            *(f"--nnodes=1:{self._num_nodes}", "--nproc-per-node=1", "--max-restarts=0"),
            *("--rdzv-backend=elasticflow", f"--rdzv-endpoint={self._endpoint}"),
            # All start at once, but on a busy machine not equally fast: let the first view wait for them.
            f"--rdzv-conf=is_host={int(number == 0)},last_call_timeout=60",
            f"--log-dir={self._run_dir / 'torchrun'}",  # else a killed agent leaves a temporary directory
        ]
        with self.output(number).open("wb") as output:
            agent = subprocess.Popen(
                [*torchrun, *self._command],
                env={**self._environ, name: f"{value}-{number}"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us; we end the nodes
            )
        self._agents.append(agent)

    def kill(self, number: int) -> None:
        """Lose a node, as in a power cut: SIGKILL to its agent and to its worker."""
        self._killed.add(number)
        _kill(_processes_with(f"{self._mark}-{number}"))

    def slow_down(self, number: int) -> None:
        """Have a node stand still for a moment. The others wait for it in their next step."""
        pids = _processes_with(f"{self._mark}-{number}")
        _send(pids, signal.SIGSTOP)
        time.sleep(SLOW_DOWN_S)
        _send(pids, signal.SIGCONT)

    def name_of(self, pid: int) -> str:
        """Name of the node that a process belongs to."""
        for number in range(len(self)):
            if pid in _processes_with(f"{self._mark}-{number}"):
                return f"node {number + 1}"
        return f"process {pid}"

    def running(self) -> bool:
        """Whether any node has not ended."""
        codes = [agent.poll() for agent in self._agents]  # of all of them: poll() also reaps
        return None in codes

    def failures(self) -> list[int]:
        """Nodes that ended with an error, other than those that were killed."""
        return [n for n, agent in enumerate(self._agents) if agent.poll() and n not in self._killed]

    def output(self, number: int) -> Path:
        """What a node has printed."""
        return self._run_dir / f"node-{number + 1}.log"

    def outputs(self) -> str:
        """What all nodes have printed."""
        return "".join(self.output(n).read_text(errors="replace") for n in range(len(self._agents)))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _processes_with(mark: str) -> list[int]:
    """Processes whose environment holds the mark: those that we have started, and their children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended, or is not ours
    return found


def _kill(pids: list[int]) -> None:
    _send(pids, signal.SIGKILL)
    time.sleep(0.05)


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
