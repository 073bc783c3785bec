"""A worker of `newcomers`: a session with a state of bytes. The first one waits until all others are ready."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ef_common.control.coordinator import Coordinator
from ef_common.core.membership import Settings
from ef_common.launch.process import this_worker
from ef_common.protocol.auth import Token
from ef_common.session import Barrier


class Payload:
    """A state of so many bytes."""

    def __init__(self, num_bytes: int, *, filled: bool) -> None:
        self.array = np.full(num_bytes, int(filled), np.uint8)

    def prepare(self) -> None:
        """See the port."""

    def describe(self) -> bytes:
        """See the port."""
        return b"a state"

    def tensors(self, header: bytes | None) -> Sequence[np.ndarray]:
        """See the port."""
        return [self.array]

    def adopt(self, header: bytes) -> None:
        """See the port."""
        if not self.array.all():
            raise ValueError("the state is not whole")

    def restore(self) -> bool:
        """See the port."""
        return False


def serve(host: str, port: int) -> None:
    """Be the coordinator."""
    coordinator = Coordinator(
        (host, port),
        settings=Settings(start_nodes=1),
        token=Token(os.environ["ELASTICFLOW_TOKEN"]),
        heartbeat_timeout_s=60.0,
    )
    coordinator.start()
    time.sleep(3600)


def main() -> None:
    """Join, or let the others join."""
    directory, node, num_bytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    session = this_worker().session
    session.state = Payload(num_bytes, filled=not session.newcomer)
    session.trainings.begin(1)
    if session.newcomer:
        (directory / f"ready-{node}").touch()
        session.join()
    else:
        session.run(Barrier("start"))
        (directory / f"begun-{node}").touch()
        while not (directory / "go").exists():
            time.sleep(0.05)
        started = time.monotonic()
        session.boundary()
        (directory / "pause.new").write_text(f"{time.monotonic() - started} {session.world_size}")
        os.replace(directory / "pause.new", directory / "pause")
    time.sleep(3600)


if __name__ == "__main__":
    if sys.argv[1] == "coordinator":
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        main()
