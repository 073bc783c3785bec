"""A coordinator in its own process, for launchers that guarantee no process as long-lived as the job.

The process has no parent among the workers, so a launcher that ends a worker with its children does not end it. It ends
by itself when no worker has been connected for a while, so it does not outlive the job. If a launcher is there to end
it, it waits as long as that one lives: workers connect when they begin to train, and may prepare their data for hours.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ef_common.control.coordinator import Coordinator
from ef_common.core.membership import Settings
from ef_common.errors import CoordinatorLost
from ef_common.launch.child import SAFE_PATH
from ef_common.launch.ending import has_ended
from ef_common.protocol.addresses import Address, is_loopback
from ef_common.protocol.auth import Token
from ef_common.tls import Credentials

logger = logging.getLogger(__name__)

START_S = 180.0
"""How long it waits for the first worker."""
LINGER_S = 5.0
"""How long it waits for another worker when the job has ended and none is connected."""
RESTART_S = 60.0
"""The same while the job has not ended: the last worker has died, and its launcher may need this long to restart it."""
_LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class CoordinatorOrder:
    """The order to the process, as JSON.

    Args:
        host: Where to listen; "" for everywhere.
        token: The job token.
        settings: Fields of the settings of the membership.
        heartbeat_timeout_s: See :class:`~ef_common.control.coordinator.Coordinator`.
        hang_timeout_s: Its hang timeout.
        credentials: Its identity, if connections are encrypted.
        linger_s: How long it waits for another worker when the job has ended and none is connected.
        launcher: Process id of the launcher that ends it, and for as long as it lives it waits; None for nobody.
    """

    host: str
    token: str
    settings: dict[str, Any]
    heartbeat_timeout_s: float
    hang_timeout_s: float | None
    credentials: str | None = field(default=None, repr=False)
    linger_s: float = LINGER_S
    launcher: int | None = None

    def carry_out(self) -> Coordinator:
        """The coordinator, not started yet."""
        found = self.credentials
        return Coordinator(
            (self.host, 0),
            token=Token(self.token),
            settings=Settings(**self.settings),
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            hang_timeout_s=self.hang_timeout_s,
            credentials=None if found is None else Credentials.load(found, source="the order"),
        )


def start_coordinator(
    host: str,
    token: Token,
    settings: Settings,
    *,
    heartbeat_timeout_s: float,
    hang_timeout_s: float | None,
    credentials: Credentials | None = None,
    linger_s: float = LINGER_S,
    launcher: int | None = None,
    log: Path | None = None,
) -> tuple[Address, int]:
    """Start a coordinator and leave it to itself.

    Args:
        host: Address of this machine at which the workers reach it.
        token: The job token; it goes to the process by a pipe.
        settings: Settings of the membership.
        heartbeat_timeout_s: A worker that is silent for longer is evicted.
        hang_timeout_s: So is one that keeps the others waiting for longer; None to learn it, 0 for no limit.
        credentials: Its identity, if connections are encrypted; they go the same way.
        linger_s: How long it waits for another worker when the job has ended and none is connected. A worker that is
            started again and comes later looks in vain for the coordinator, and fails.
        launcher: Process id of the launcher on this machine that ends the coordinator: while it lives, the coordinator
            waits. None for nobody.
        log: File for its log; without one there is none.

    Returns:
        Where it listens, and the id of its process.

    Raises:
        CoordinatorLost: The process did not start.
    """
    order = CoordinatorOrder(
        host if is_loopback(host) else "",
        token.text,
        asdict(settings),
        heartbeat_timeout_s,
        hang_timeout_s,
        None if credentials is None else credentials.dump(),
        linger_s,
        launcher,
    )
    with (log or Path(os.devnull)).open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, *SAFE_PATH, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
    answer, _ = process.communicate(json.dumps(asdict(order)).encode())
    if process.returncode != 0 or not answer:
        raise CoordinatorLost(f"the process of the coordinator did not start (status {process.returncode})")
    port, pid = map(int, answer.split())
    return (host, port), pid


def main() -> None:
    """The body of the process: the order comes on standard input; port and process id go to standard output."""
    order = CoordinatorOrder(**json.load(sys.stdin))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    told, tell = os.pipe()
    if os.fork():
        os.close(tell)
        _wait_for_child(told)
    os.close(told)
    os.setsid()
    coordinator = order.carry_out()
    coordinator.start()
    os.write(tell, b"%d %d" % (coordinator.address[1], os.getpid()))
    os.close(tell)
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    launcher = None
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = None if order.launcher is None else psutil.Process(order.launcher)
    serve(coordinator, start_s=START_S, linger_s=order.linger_s, restart_s=RESTART_S, launcher=launcher)


def _wait_for_child(told: int) -> None:
    """In the parent: pass the answer on and end, so that the child has no parent."""
    answer = os.read(told, 64)
    os.write(1, answer)
    os._exit(0 if answer else 1)


def serve(
    coordinator: Coordinator,
    *,
    start_s: float,
    linger_s: float,
    restart_s: float,
    launcher: psutil.Process | None = None,
) -> None:
    """Serve until no worker has been connected for a while.

    Args:
        coordinator: The coordinator, started.
        start_s: How long to wait for the first worker.
        linger_s: How long to wait for another one.
        restart_s: The same time if the job has not ended.
        launcher: While it lives, this time does not begin.
    """
    last, patience_s = time.monotonic(), start_s
    while time.monotonic() < last + patience_s:
        time.sleep(_LOOK_S)
        if not coordinator.wait_until_idle(0) or not (launcher is None or has_ended(launcher)):
            last = time.monotonic()
        if coordinator.has_begun:
            patience_s = linger_s if coordinator.is_over else restart_s
    logger.info("no worker has been connected for %g s", patience_s)
    coordinator.stop()


if __name__ == "__main__":
    main()
