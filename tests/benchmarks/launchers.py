"""Each launcher: from the command to the first step, against torchrun under it; and how long a lost node is missed.

Two nodes, which are network namespaces (ssh, Slurm) or ranks on this machine (MPI), with one worker each. The peer is
what people do without us: the bare launcher starts one torchrun with DDP on each node. A node is lost by SIGKILL of all
that runs on it; the time from there to the next step of the other node is held against one step and 0.1 s. A launcher
that is not installed here is left out.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from shutil import which
from statistics import median

import psutil

from tests.benchmarks import step_log
from tests.benchmarks.elastic_job import SLEEP_S
from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.benchmarks.processes import ROOT, Processes
from tests.benchmarks.step_log import Step
from tests.faults import networks, slurm_cluster, ssh_hosts

MOST_PAUSE_S = SLEEP_S + 0.1
_PORT = 29500
_TIMEOUT_S = 240.0
_POLL_S = 0.02
_STEADY_STEPS = 8
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--master-port={_PORT}")
_RUN = (sys.executable, "-m", "ef_common.cli", "run")
_STARTS = str(Path(__file__).with_name("launchers_worker.py"))
_STEPS = str(Path(__file__).with_name("elasticflow_worker.py"))


class Launcher(ABC):
    """A launcher with two nodes.

    Args:
        processes: Starts commands.
    """

    name: str
    interface = "eth0"

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.run_dir = processes.directory / "run"
        self.environ = {
            "PYTHONPATH": str(ROOT),
            "ELASTICFLOW_TOKEN": "secret",
            step_log.DIRECTORY: str(processes.directory),
            step_log.NODE: "step",
            "GLOO_SOCKET_IFNAME": self.interface,
        }

    @abstractmethod
    def elastic(self, script: Sequence[str]) -> None:
        """Start an elastic job of two nodes."""

    @abstractmethod
    def plain(self, script: Sequence[str]) -> None:
        """Start torchrun on each of them."""

    @abstractmethod
    def lose(self) -> None:
        """Kill all that runs on the second node."""

    @abstractmethod
    def end(self) -> None:
        """End what this has started, as far as that does not end with this process's children."""

    def start(self, *command: str, prefix: Sequence[str] = ()) -> None:
        """Start a command on the machine from which jobs are started."""
        line = ("env", *(f"{name}={value}" for name, value in self.environ.items()), *command)
        code = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
        self.processes.start(["-c", code, *prefix, *line], name=f"launcher-{time.monotonic_ns()}")


class Ssh(Launcher):
    """Hosts that ssh reaches."""

    name = "ssh"

    def __init__(self, processes: Processes, hosts: ssh_hosts.SshHosts) -> None:
        super().__init__(processes)
        self._hosts = hosts
        self.environ["PATH"] = os.environ["PATH"]

    def elastic(self, script: Sequence[str]) -> None:
        """See the base."""
        file = self.processes.directory / "hosts.txt"
        file.write_text("node1\nnode2\n")
        options = (f"--hosts={file}", f"--ssh-command={self._hosts.ssh}", f"--run-dir={self.run_dir}")
        self.start(*_RUN, *options, *script, prefix=self._hosts.inside)

    def plain(self, script: Sequence[str]) -> None:
        """See the base."""
        variables = [f"{name}={value}" for name, value in self.environ.items()]
        for rank in (0, 1):
            options = (f"--node-rank={rank}", f"--master-addr={networks.address(1)}")
            remote = (
                shlex.join(["cd", str(ROOT)]) + " && " + shlex.join(["env", *variables, *_TORCHRUN, *options, *script])
            )
            self.start(*shlex.split(self._hosts.ssh), f"node{rank + 1}", remote, prefix=self._hosts.inside)

    def lose(self) -> None:
        """See the base."""
        self._hosts.kill_all(2)

    def end(self) -> None:
        """See the base."""
        for node in (1, 2, 3):
            self._hosts.kill_all(node)


class Slurm(Launcher):
    """A cluster of Slurm's."""

    name = "slurm"

    def __init__(self, processes: Processes, cluster: slurm_cluster.Cluster) -> None:
        super().__init__(processes)
        self._cluster = cluster
        self.environ |= {name: value for name, value in cluster.environ.items() if name == "SLURM_CONF"}

    def elastic(self, script: Sequence[str]) -> None:
        """See the base."""
        options = ("--nodes=1:2", "--rdzv-conf=last_call_timeout=10", "--exclusive", f"--run-dir={self.run_dir}")
        self.start(*_RUN[:-1], "slurm", "submit", *options, *script, prefix=self._cluster.inside)

    def plain(self, script: Sequence[str]) -> None:
        """See the base."""
        torchrun = shlex.join([*_TORCHRUN, f"--master-addr={networks.address(1)}"])
        wrapped = f"srun bash -c '{torchrun} --node-rank=$SLURM_NODEID {shlex.join(script)}'"
        options = ("--nodes=2", "--ntasks-per-node=1", "--exclusive", "--output=/dev/null")
        self.start("sbatch", *options, f"--chdir={ROOT}", f"--wrap={wrapped}", prefix=self._cluster.inside)

    def lose(self) -> None:
        """See the base."""
        for pid in self._cluster.processes(2):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if not process.name().startswith("slurm"):
                    process.kill()

    def end(self) -> None:
        """See the base."""
        self._cluster.cancel_all()


class Mpi(Launcher):
    """Open MPI on this machine."""

    name = "mpi"
    interface = "lo"
    program = "mpirun.openmpi"

    def __init__(self, processes: Processes) -> None:
        super().__init__(processes)
        self.environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    def elastic(self, script: Sequence[str]) -> None:
        """See the base."""
        elasticflow = str(Path(sys.executable).with_name("elasticflow"))
        mpi = (*_RUN[:-1], "mpi", f"--mpirun={self.program}", "--oversubscribe", "-np", "2")
        self.start(*mpi, elasticflow, "run", f"--run-dir={self.run_dir}", *script)

    def plain(self, script: Sequence[str]) -> None:
        """See the base."""
        torchrun = shlex.join([*_TORCHRUN, "--master-addr=127.0.0.1"])
        command = f"{torchrun} --node-rank=$OMPI_COMM_WORLD_RANK {shlex.join(script)}"
        self.start(self.program, "--oversubscribe", "-np", "2", "bash", "-c", command)

    def lose(self) -> None:
        """See the base."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.environ().get("OMPI_COMM_WORLD_RANK") == "1":
                    process.kill()

    def end(self) -> None:
        """See the base: nothing of it is elsewhere."""


@contextlib.contextmanager
def _each(name: str) -> Iterator[Callable[[Processes], Launcher]]:
    """Makes launchers of this name, whose nodes are there meanwhile; each of them has ended all of its jobs."""
    if name == Ssh.name:
        with ssh_hosts.ssh_hosts(2) as hosts:
            yield lambda processes: Ssh(processes, hosts)
    elif name == Slurm.name:
        with slurm_cluster.cluster(2) as cluster:
            yield lambda processes: Slurm(processes, cluster)
    else:
        yield Mpi


def _why_not(name: str) -> str | None:
    if name == Mpi.name:
        return None if which(Mpi.program) else f"not installed: {Mpi.program}"
    return ssh_hosts.why_not() if name == Ssh.name else slurm_cluster.why_not()


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure in turns; the first round fills the caches."""
    figures: dict[str, Figure] = {}
    for name in (Ssh.name, Mpi.name, Slurm.name):
        if (why := _why_not(name)) is not None:
            print(f"{name}: {why}")
            continue
        seconds: dict[str, list[float]] = {"elasticflow": [], "ddp": []}
        pauses: list[float] = []
        with _each(name) as make:
            for number in range(3 if quick else 6):
                for strategy, found in seconds.items():
                    taken = _with(make, lambda launcher, strategy=strategy: _first_step(launcher, strategy))
                    if number:
                        found.append(taken)
                if number:
                    pauses.append(_with(make, _pause))
        print(
            f"| {name} | {median(seconds['elasticflow']):.2f} | {median(seconds['ddp']):.2f} | {median(pauses):.3f} |"
        )
        figures[f"launch_{name}"] = of_samples(*seconds.values(), target=1.1, unit="s")
        figures[f"launch_{name}_loss"] = of_samples(pauses, [MOST_PAUSE_S], target=1.0, unit="s")
    return figures


def _with(make: Callable[[Processes], Launcher], measure: Callable[[Launcher], float]) -> float:
    with Processes() as processes:
        launcher = make(processes)
        try:
            return measure(launcher)
        finally:
            launcher.end()


def _first_step(launcher: Launcher, strategy: str) -> float:
    """Seconds from the command to the end of the first step."""
    first = launcher.processes.directory / "first"
    script = [_STARTS, strategy, str(first)]
    began = time.time()
    (launcher.elastic if strategy == "elasticflow" else launcher.plain)(script)
    _wait(lambda: first.exists() and bool(first.read_text()), f"{launcher.name}: {strategy} makes no step")
    return float(first.read_text()) - began


def _pause(launcher: Launcher) -> float:
    """Seconds from the loss of a node to the next step of the other one."""
    launcher.elastic([_STEPS, "tiny", str(SLEEP_S)])
    steps = launcher.processes.directory

    def recent() -> list[Step]:
        return step_log.read(steps, "step")[-2 * _STEADY_STEPS :]

    _wait(
        lambda: len(recent()) == 2 * _STEADY_STEPS and all(step.world_size == 2 for step in recent()),
        f"{launcher.name}: two nodes do not train together",
    )
    lost_at = time.monotonic()
    launcher.lose()
    _wait(lambda: recent()[-1].world_size == 1, f"{launcher.name}: no step after the loss")
    steps_after = (step for step in step_log.read(steps, "step") if step.time > lost_at and step.world_size == 1)
    return next(steps_after).time - lost_at


def _wait(condition: Callable[[], bool], problem: str) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(problem)
        time.sleep(_POLL_S)


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
