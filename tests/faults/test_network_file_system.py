"""Nodes that share a file server (by sshfs): run directory, door and checkpoints of one job are there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ef_common.launch import environment
from ef_common.testing.harness_torchrun import Node, TorchrunJob
from tests.faults import networks, ssh_hosts
from tests.faults.hosts import ENOUGH
from tests.faults.ssh_hosts import SshHosts
from tests.faults.torchrun_nodes import OPTIONS, SCRIPT

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(ssh_hosts.why_not() is not None, reason=str(ssh_hosts.why_not())),
    pytest.mark.skipif(shutil.which("sshfs") is None, reason="not installed: sshfs"),
    pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="the kernel has no FUSE"),
]

SERVER = 3


@pytest.fixture(scope="module")
def machines() -> Iterator[SshHosts]:
    with ssh_hosts.ssh_hosts(SERVER) as running:
        yield running


class FileServer:
    """A directory of the server, which each node has at the same path.

    Args:
        machines: The nodes.
        directory: For it.

    Attributes:
        served: Where it is on the server.
        shared: Where it is on the nodes.
    """

    def __init__(self, machines: SshHosts, directory: Path) -> None:
        self._machines = machines
        self.served = directory / "served"
        self.shared = directory / "shared"
        for folder in (self.served, self.shared):
            folder.mkdir()

    def on(self, node: int) -> tuple[str, ...]:
        """Prefix of a command that is to run on a node, with the directory."""
        mount = f'sshfs -o ssh_command="{self._machines.ssh}" root@node{SERVER}:{self.served} {self.shared}'
        return (*networks.inside(node), "sh", "-c", f'{mount} && exec "$@"', "sh")


@pytest.fixture
def server(machines: SshHosts, tmp_path: Path) -> Iterator[FileServer]:
    yield FileServer(machines, tmp_path)
    for node in (1, 2):
        machines.kill_all(node)  # the mounts, too


@pytest.mark.thorough
def test_job_whose_files_are_on_a_file_server_loses_its_founder_and_gains_a_node(server: FileServer) -> None:
    shared = server.shared
    token = server.served / "token"
    token.write_text("not for others\n")
    training = {**OPTIONS, "checkpoint": f"file://{shared}/checkpoints", "checkpoint_steps": 5}
    with TorchrunJob(server.served / "run", SCRIPT, endpoint=f"file://{shared}/door") as job:

        def start(node: int) -> Node:
            return job.start(
                "--nnodes=1:2",
                "--max-restarts=5",
                f"--rdzv-conf=token_file={shared}/token,last_call_timeout=2",
                f"--local-addr={networks.address(node)}",
                script_args=(json.dumps(training),),
                environ={environment.RUN_DIR: f"{shared}/run"},
                prefix=server.on(node),
            )

        founder = start(1)
        job.wait_for("run")
        other = start(2)
        job.wait_for("view", 2, world_size=2)
        job.wait_for("checkpoint")
        kept = other.worker_pids()
        founder.kill()
        job.wait_for("view", world_size=1, generation=max(e["generation"] for e in job.events("view")) + 1)
        newcomer = start(1)
        job.wait_for("view", 4, world_size=2)
        assert other.worker_pids() == kept
        (job.directory / ENOUGH).touch()
        assert [node.wait() for node in (other, newcomer)] == [0, 0]
        job.audit()
    for command in ("audit", "status"):
        seen = subprocess.run(
            [*server.on(2), sys.executable, "-m", "ef_common.cli", command, f"{shared}/run"],
            capture_output=True,
            text=True,
        )
        assert seen.returncode == 0, seen.stdout + seen.stderr
