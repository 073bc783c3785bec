"""Programs of a cluster, which run on this machine around an etcd of their own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ef_common.errors import ClusterFailed
from ef_common.testing.ports import free_ports
from tests.entered import Entered

NEEDED = ("openssl", "setpriv")
"""What is needed beside etcd and the programs themselves."""
_GUARD_S = 120.0
_RUNS_S, _STANDS_S = 0.1, 0.9


class Programs(Entered):
    """They run between entering and leaving it, and end with this process in any case.

    Args:
        folder: For their files.
        etcd: The program.
        num_ports: How many ports the others need.

    Attributes:
        ports: These.
    """

    def __init__(self, folder: Path, *, etcd: str, num_ports: int) -> None:
        self._folder, self._etcd = folder, etcd
        self._etcd_port, self._peers_port, *self.ports = free_ports(2 + num_ports)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __exit__(self, *_: object) -> None:
        for program in reversed(list(self._running)):
            self.kill(program)

    def kill(self, program: str) -> None:
        """End one of them at once."""
        process = self._running.pop(program)
        process.kill()
        process.wait()

    @contextlib.contextmanager
    def standing_still(self, program: str) -> Iterator[None]:
        """One of them does nothing meanwhile, and loses nothing."""
        self._running[program].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._running[program].send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def slow(self, program: str) -> Iterator[None]:
        """One of them does something for a tenth of each second only."""
        over = threading.Event()

        def slow_down() -> None:
            while not over.wait(_RUNS_S):
                with self.standing_still(program):
                    over.wait(_STANDS_S)

        thread = threading.Thread(target=slow_down)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @property
    def etcd_option(self) -> str:
        """How an API server finds etcd."""
        return f"--etcd-servers=http://127.0.0.1:{self._etcd_port}"

    def start_etcd(self) -> None:
        """Start it; it finds what it has written before."""
        here, peers = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._peers_port}"
        self._run(
            *(self._etcd, f"--data-dir={self._folder}/etcd", f"--listen-client-urls={here}"),
            *(f"--advertise-client-urls={here}", f"--listen-peer-urls={peers}"),
            *(f"--initial-advertise-peer-urls={peers}", f"--initial-cluster=default={peers}", "--unsafe-no-fsync"),
        )

    def _run(self, *command: str) -> None:
        name = Path(command[0]).name
        with self._log(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
            )

    def _wait_until_answered(self, ask: Callable[[], None], by: str) -> None:
        """Wait until one of them answers, and all run."""
        deadline = time.monotonic() + _GUARD_S
        while True:
            with contextlib.suppress(ClusterFailed):
                ask()
                return
            for name, process in self._running.items():
                assert process.poll() is None, self._log(name).read_text()[-4000:]
            assert time.monotonic() < deadline, self._log(by).read_text()[-4000:]
            time.sleep(0.1)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"
