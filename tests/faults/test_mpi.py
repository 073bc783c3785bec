"""`mpirun` of Open MPI and of MPICH: ranks find each other, are killed, and are told to leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from shutil import which
from typing import Any

import psutil
import pytest

from tests.faults import networks
from tests.faults.conftest import check_gentle
from tests.faults.hosts import ENOUGH
from tests.faults.launched import LaunchedRun
from tests.faults.torchrun_nodes import OPTIONS, SCRIPT

pytestmark = [pytest.mark.processes, pytest.mark.timeout(530)]

NUM_NODES = 3
GUARD_S = 200.0
ALONE = """
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from ef_lightning import ElasticFlowStrategy

strategy = ElasticFlowStrategy()
pl.Trainer(strategy=strategy, max_steps=2, logger=False, enable_checkpointing=False).fit(BoringModel())
print("trained")
"""
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True)
class Mpi:
    """A launcher.

    Attributes:
        program: Its command.
        here: Options for all ranks on this machine.
        there: Options for one rank on each node; without the remote shell and the list of hosts.
        shell: Option that names the remote shell.
        hosts: Option that names the hosts.
    """

    program: str
    here: tuple[str, ...]
    there: tuple[str, ...]
    shell: tuple[str, ...]
    hosts: str


MPIS = {
    "openmpi": Mpi(
        "mpirun.openmpi",
        ("--oversubscribe", "--mca", "oob_tcp_if_include", "lo"),
        ("--map-by", "ppr:1:node", "--mca", "oob_tcp_if_include", "eth0"),
        ("--mca", "plm_rsh_agent"),
        "--host",
    ),
    "mpich": Mpi("mpirun.mpich", (), ("-ppn", "1", "-iface", "eth0"), ("-launcher", "rsh", "-launcher-exec"), "-hosts"),
}
each_mpi = pytest.mark.parametrize("mpi", MPIS, indirect=True)


@pytest.fixture
def mpi(request: pytest.FixtureRequest) -> Mpi:
    found = MPIS[request.param]
    if which(found.program) is None:
        pytest.skip(f"not installed (openmpi-bin, mpich): {found.program}")
    return found


class MpiRun(LaunchedRun):
    """A training under `mpirun`, which `elasticflow mpi` has started."""

    shell = ""

    def __init__(self, directory: Path, prefix: Sequence[str] = ()) -> None:
        super().__init__(directory, guard_s=GUARD_S, without=("OMPI_", "PMIX_", "PMI_", "SLURM_"), environ=AS_ROOT)
        self._prefix = prefix

    def start(
        self, mpi: Mpi, *options: str, by: Sequence[str] = (), script: Sequence[str] = (), **training: Any
    ) -> None:
        """Start `elasticflow mpi`, with options of its own and of `elasticflow run`."""
        given = json.dumps({**OPTIONS, "stop": ENOUGH, **training})
        self.launch(
            *(*self._prefix, sys.executable, "-m", "ef_common.cli", "mpi", f"--mpirun={mpi.program}", *options),
            *(f"{Path(sys.executable).parent}/elasticflow", "run", f"--run-dir={self.directory}"),
            *("--monitor-interval=0.1", *by, *(script or (str(SCRIPT), given))),
        )

    def ranks(self) -> list[psutil.Process]:
        """The processes that mpirun has started, in the order of their ranks."""
        names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
        found = {}
        for process in psutil.Process(self.launcher.pid).children(recursive=True):
            environ = process.environ()
            number = next((environ[name] for name in names if name in environ), None)
            if number is not None and f"{Path(sys.executable).parent}/elasticflow" in process.cmdline()[:2]:
                found.setdefault(int(number), process)  # its children come later
        return [found[number] for number in sorted(found)]

    def kill(self, rank: int) -> None:
        """Kill a rank with all that it has started."""
        victim = self.ranks()[rank]
        for process in (victim, *victim.children(recursive=True)):
            process.kill()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[MpiRun]:
    running = MpiRun(tmp_path / "run")
    yield running
    running.close()


@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.thorough)], indirect=True)
def test_ranks_on_one_machine_are_one_job_and_survive_the_first_one(run: MpiRun, mpi: Mpi) -> None:
    run.start(mpi, *mpi.here, "-np", "2")
    first = run.wait_for_world(2)
    run.wait_for_steps()
    run.kill(0)
    run.wait_for_world(1, after=first)
    run.wait_for_steps()
    (run.directory / ENOUGH).touch()
    assert run.status() == 0, run.tails()
    run.audit()
    assert "elasticflow-rank-status" not in run.tails()


@pytest.mark.thorough
@each_mpi
def test_signal_lets_all_ranks_leave_with_a_checkpoint(run: MpiRun, mpi: Mpi, tmp_path: Path) -> None:
    run.start(mpi, *mpi.here, "-np", "2", checkpoint=f"file://{tmp_path}/checkpoints")
    run.wait_for_world(2)
    run.wait_for_steps()
    run.launcher.send_signal(signal.SIGTERM)
    assert run.status() == 75, run.tails()
    last = max(event["step"] for event in run.events("step"))
    assert max(event["step"] for event in run.events("checkpoint")) in (last, last + 1)
    check_gentle(run)


@pytest.mark.thorough
@each_mpi
def test_exception_in_the_script_is_the_exit_status(run: MpiRun, mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise ValueError('this is wrong')")
    run.start(mpi, *mpi.here, "-np", "2", script=[str(tmp_path / "bad.py")])
    assert run.status() == 1, run.tails()


@pytest.mark.thorough
@each_mpi
def test_script_that_mpirun_starts_without_elasticflow_run_does_not_train_apart(
    run: MpiRun, mpi: Mpi, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(ALONE)
    run.launch(mpi.program, *mpi.here, "-np", "2", sys.executable, str(tmp_path / "train.py"))
    assert run.status() != 0, run.tails()
    assert "each of them would run a training of its own" in run.said()
    assert "trained" not in run.said()


@pytest.mark.thorough
@each_mpi
def test_another_command_adds_ranks_to_a_job_that_runs(run: MpiRun, mpi: Mpi) -> None:
    run.environ["ELASTICFLOW_TOKEN"] = "that of both shells"
    run.start(mpi, *mpi.here, "-np", "1", by=("--nnodes=1:3",))
    first = run.wait_for_world(1)
    run.wait_for_steps()
    more = (mpi.program, *mpi.here, "-np", "2", f"{Path(sys.executable).parent}/elasticflow", "run")
    with (run.outputs / "more.txt").open("ab") as output:
        added = subprocess.Popen(
            (*more, f"--join={run.directory}"), env=run.environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        run.wait_for_world(3, after=first)
        run.wait_for_steps()
        (run.directory / ENOUGH).touch()
        assert (run.status(), added.wait(timeout=GUARD_S)) == (0, 0), run.tails()
    finally:
        added.kill()
    run.audit()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[MpiRun]:
    """Nodes of a network, on the last one of which `mpirun` is given, with a remote shell that enters the others."""
    if networks.why_not() is not None:
        pytest.skip(str(networks.why_not()))
    hosts = {node: f"node{node}" for node in range(1, NUM_NODES + 1)} | {NUM_NODES + 1: "control"}
    with tempfile.TemporaryDirectory(prefix="ef-mpi-") as folder, networks.nodes(NUM_NODES + 1):
        for node in hosts:
            networks.set_names(node, {host: [networks.address(one)] for one, host in hosts.items()})
        cases = "\n".join(
            f'{host}) set -- {" ".join(map(quote, networks.inside_as(node, host)))} sh -c "$*";;'
            for node, host in hosts.items()
        )
        shell = Path(folder, "rsh")
        shell.write_text(f'#!/bin/sh\nhost=$1; shift\ncase $host in\n{cases}\n*) exit 255;;\nesac\nexec "$@"\n')
        shell.chmod(0o755)
        running = MpiRun(tmp_path / "run", networks.inside_as(NUM_NODES + 1, "control"))
        running.shell = str(shell)
        yield running
        running.close()
        for node in hosts:
            for pid in networks.processes(node):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.thorough
@each_mpi
def test_ranks_on_several_nodes_meet_and_go_on_without_the_first_node(nodes: MpiRun, mpi: Mpi) -> None:
    hosts = ",".join(f"node{node}" for node in range(1, NUM_NODES + 1))
    nodes.start(mpi, *mpi.there, *mpi.shell, nodes.shell, mpi.hosts, hosts, "-np", str(NUM_NODES))
    first = nodes.wait_for_world(NUM_NODES)
    nodes.wait_for_steps()
    for pid in networks.processes(1):
        process = psutil.Process(pid)
        if "elasticflow" in " ".join(process.cmdline()) or str(SCRIPT) in process.cmdline():
            process.kill()
    nodes.wait_for_world(NUM_NODES - 1, after=first)
    nodes.wait_for_steps()
    (nodes.directory / ENOUGH).touch()
    assert nodes.status() == 0, nodes.tails()
    nodes.audit()
