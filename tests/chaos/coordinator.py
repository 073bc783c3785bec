"""A coordinator in a process that does nothing else, so that one can see what it uses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

import psutil

from ef_common.control.coordinator import Coordinator
from ef_common.core.membership import Settings
from ef_common.protocol.addresses import Address


class CoordinatorProcess:
    """What a :class:`~ef_common.testing.harness.Job` needs of a coordinator."""

    def __init__(self, settings: Settings, heartbeat_timeout_s: float) -> None:
        self._order = {"settings": asdict(settings), "heartbeat_timeout_s": heartbeat_timeout_s}
        self._process: subprocess.Popen[bytes] | None = None
        self.address: Address = ("127.0.0.1", 0)

    def start(self) -> None:
        """Start it, and wait until it listens."""
        command = [sys.executable, "-m", __name__, json.dumps(self._order)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.address = ("127.0.0.1", int(self._process.stdout.readline()))

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.communicate()

    @property
    def process(self) -> psutil.Process:
        """The process."""
        assert self._process is not None
        return psutil.Process(self._process.pid)


def main() -> None:
    """Body of the process: it serves until its standard input ends."""
    order = json.loads(sys.argv[1])
    coordinator = Coordinator(
        ("127.0.0.1", 0), settings=Settings(**order["settings"]), heartbeat_timeout_s=order["heartbeat_timeout_s"]
    )
    coordinator.start()
    sys.stdout.write(f"{coordinator.address[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    coordinator.stop()


if __name__ == "__main__":
    main()
