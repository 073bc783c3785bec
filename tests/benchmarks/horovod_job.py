"""An elastic job under `horovodrun`, each node a host with one worker: all of them names of this machine."""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
import time
from pathlib import Path

import psutil

from tests.benchmarks import step_log
from tests.benchmarks.elastic_job import SLEEP_S, ElasticJob, Node, Side
from tests.benchmarks.processes import Processes

HOROVOD = Side("horovod", "tests.benchmarks.horovod_elastic_worker", "", "")


class HorovodJob(ElasticJob):
    """A running job of Horovod's own elastic training."""

    def __init__(self, processes: Processes, *, size: str = "tiny", sleep_s: float = SLEEP_S) -> None:
        super().__init__(HOROVOD, processes, size=size, sleep_s=sleep_s)
        self._hosts = processes.directory / "hosts"
        self._script = processes.directory / "discover.sh"
        self._script.write_text(f"#!/bin/sh\ncat {self._hosts}\n")
        self._script.chmod(self._script.stat().st_mode | stat.S_IXUSR)
        self._names = _names_of_this_machine()
        self._driver = None

    def add_nodes(self, num: int = 1) -> None:
        """Tell the discovery script of further hosts; the driver asks it once a second."""
        names = [self._names.pop(0) for _ in range(num)]
        partial = self._hosts.with_suffix(".new")
        known = self._hosts.read_text() if self._hosts.exists() else ""
        partial.write_text(known + "".join(f"{name}:1\n" for name in names))
        partial.rename(self._hosts)
        if self._driver is None:
            command = ["-m", "horovod.runner.launch", "-np", str(num), "--min-np", "1", "--max-np", "8"]
            command += ["--host-discovery-script", str(self._script), "--gloo", "--network-interfaces", "lo"]
            command += [sys.executable, "-m", self.side.worker, *self._arguments]
            environment = {step_log.DIRECTORY: str(self._steps), "PATH": _path()}
            self._driver = self._processes.start(command, name="driver", environment=environment)
        self.nodes += [Node(name, self._driver) for name in names]

    def kill_last_node(self) -> tuple[Node, float]:
        """SIGKILL the worker of a host. Returns it, and the time of the kill."""
        node = self.nodes.pop()
        victim = psutil.Process(self.steps(node)[-1].pid)
        before = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        return node, before


def _names_of_this_machine() -> list[str]:
    """A host on which a worker fails is never used again, so each worker needs one."""
    addresses = [entry.address for found in psutil.net_if_addrs().values() for entry in found]
    own = [address for address in addresses if address.count(".") == 3 and not address.startswith("127.")]
    return ["localhost", "127.0.0.1", *own[:1], socket.gethostname()]


def _path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
