"""A real etcd, of one member or several, on this machine alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from ef_common.testing.ports import free_ports
from tests.entered import Entered

PROGRAMS = ("etcd", "setpriv")
PATIENCE_S = 60.0
"""So long an etcd may take to answer on a busy machine, in tests in which it must answer."""
_DEADLINE_S = 60.0
_SERVES = "ready to serve client requests"


def missing_programs() -> list[str]:
    """What is not installed here."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


class EtcdServers(Entered):
    """Started by entering it, ended by leaving it; its processes end with this one in any case.

    Args:
        folder: For what they store.
        number: How many members the cluster has.
        apart: They are as many clusters of one member each, as if somebody had not joined them.
        host: Where they listen to clients.
        prefix: Of the command that starts one.
        options: Further ones.
    """

    def __init__(
        self,
        folder: Path,
        number: int = 1,
        *,
        apart: bool = False,
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._apart = apart
        self._prefix = prefix
        self._options = options
        scheme = "https" if any("--cert-file" in option for option in options) else "http"
        self._scheme = scheme.replace("http", "etcd")
        ports = free_ports(2 * number)
        self._addresses = [f"{host}:{port}" for port in ports[:number]]
        self._clients = [f"{scheme}://{address}" for address in self._addresses]
        self._peers = [f"http://127.0.0.1:{port}" for port in ports[number:]]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._starts = [0] * number

    @property
    def running(self) -> list[int]:
        """Which members run."""
        return list(self._processes)

    def address(self, index: int) -> tuple[str, int]:
        host, _, port = self._addresses[index].rpartition(":")
        return host, int(port)

    def url(self, prefix: str = "/test", *, order: Sequence[int] = (), user: str = "") -> str:
        """For these members (all of them), in this order."""
        addresses = [self._addresses[index] for index in order or range(len(self._addresses))]
        return f"{self._scheme}://{user}{','.join(addresses)}{prefix}"

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        self.start(*range(len(self._clients)))

    def start(self, *members: int) -> None:
        """Start members, or start them again, and wait until they serve: then there is a leader."""
        for index in members:
            self._start_member(index)
        deadline = time.monotonic() + _DEADLINE_S
        while any(self._log(index).read_text().count(_SERVES) < self._starts[index] for index in members):
            ended = [index for index in members if self._processes[index].poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "".join(self._log(index).read_text()[-2000:] for index in members)
                raise RuntimeError(f"Waited in vain for etcd; ended: {ended}\n{logs}")
            time.sleep(0.02)

    def signal(self, number: signal.Signals, index: int = 0) -> None:
        process = self._processes[index]
        process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # all of its threads stand still

    def kill(self, *members: int) -> None:
        for index in members:
            self._processes[index].kill()
        for index in members:
            self._processes.pop(index).wait()

    def stop(self) -> None:
        self.kill(*self._processes)

    def _start_member(self, index: int) -> None:
        client, peer = self._clients[index], self._peers[index]
        peers = [(index, peer)] if self._apart else list(enumerate(self._peers))
        with self._log(index).open("ab") as output:
            self._processes[index] = subprocess.Popen(
                [
                    *(*self._prefix, "setpriv", "--pdeathsig", "KILL", "etcd"),
                    *(f"--name=m{index}", f"--data-dir={self._folder}/m{index}"),
                    *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
                    *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
                    f"--initial-cluster={','.join(f'm{number}={url}' for number, url in peers)}",
                    *self._options,
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._starts[index] += 1

    def _log(self, index: int) -> Path:
        return self._folder / f"m{index}.log"
