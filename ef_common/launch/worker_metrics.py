"""What a worker knows of the training, for Prometheus and for the controller of a cluster.

One thread answers, one request after the other, so strangers can keep that thread busy, and nothing else: a training
does not wait for it, and needs no more memory if many ask. It tells a few numbers, which every member knows.

Cost: one number is read each second, and a line of text is written for each metric and request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from http.server import HTTPServer

from ef_common import threads
from ef_common.control.pages import handler_of
from ef_common.errors import ThreadFailed
from ef_common.launch.environment import METRICS_PORT, WorkerEnvironment
from ef_common.session import Session

logger = logging.getLogger(__name__)

SPEED_S = 10.0
_LOOK_S = 1.0
_AGAIN_S = 2.0
_PATIENCE_S = 1.0
_PREFIX = "elasticflow_"


class Speed:
    """What is done per second lately: over ten seconds, or over one interval between changes if that is longer."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, float]] = deque()

    def note(self, now: float, total: float) -> None:
        """So much was done until now."""
        readings = self._readings
        if readings and readings[-1][1] == total:
            return
        readings.append((now, total))
        while len(readings) > 2 and readings[1][0] <= now - SPEED_S:
            readings.popleft()

    def at(self, now: float) -> float:
        """The speed, which falls when nothing is done for long."""
        if len(self._readings) < 2:
            return 0.0
        (began, first), (ended, last) = self._readings[0], self._readings[-1]
        stands = now - ended > max(SPEED_S, ended - began)
        return (last - first) / ((now if stands else ended) - began)


class MetricsPage:
    """A server of the metrics of a worker; it waits for its port, which the worker before this one may still have.

    Args:
        port: Port; 0 for one that is free.
        session: The worker's membership.
        clock: Monotonic time in seconds.
    """

    def __init__(self, port: int, session: Session, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.port, self._session, self._clock = port, session, clock
        self._speed = Speed()
        self._server: HTTPServer | None = None
        self._stopped = threading.Event()
        self._open = threading.Event()

    def start(self) -> None:
        """Serve, in a thread. A training does not fail for want of it."""
        with suppress(ThreadFailed):
            threads.start(self._run, name="elasticflow-metrics", job="answers with metrics")

    def wait_until_open(self, timeout_s: float) -> bool:
        """Wait until it has its port."""
        return self._open.wait(timeout_s)

    def stop(self) -> None:
        """End it. May be repeated."""
        self._stopped.set()
        if self._server is not None:
            self._server.server_close()

    def text(self) -> str:
        """All of it, as Prometheus reads it."""
        session = self._session
        view, room, now = session.view, session.job.room, self._clock()
        is_member = view.generation > 0 and view.rank_of(session.worker.id) is not None and not session.newcomer
        self._speed.note(now, session.stats.num_samples_trained)
        wanted = 0 if room is None else room.wanted
        if wanted and view.rank_of(session.stats.replaces) is not None:
            wanted += 1  # whoever comes in its place waits until it goes
        values = {
            "workers": view.world_size if is_member else 0,
            "view_generation": view.generation,
            "step": session.stats.step,
            "samples_per_second": round(self._speed.at(now), 3) if is_member else 0,
            "samples_total": round(session.stats.num_samples_trained),
            "pause_seconds_total": round(session.stats.paused_s, 3),
            "nodes_wanted": wanted,
        }
        if session.stats.checkpoint_step is not None:
            values["checkpoint_step"] = session.stats.checkpoint_step
        lines = [f"{name} {value}" for name, value in values.items()]
        if is_member and view.members[0].address:
            lines.append(f'rank_zero{{address="{view.members[0].address}"}} 1')
        slow = () if room is None else room.stragglers
        addresses = {member.address for member in view.members if member.id in slow} - {""}
        lines += [f'straggler{{address="{address}"}} 1' for address in sorted(addresses)]
        return "".join(f"{_PREFIX}{line}\n" for line in lines)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._server = self._bind()
                break
            except OSError as error:
                logger.debug("port %d, which %s names, is not free: %s", self.port, METRICS_PORT, error)
                self._stopped.wait(_AGAIN_S)
        server = self._server
        if server is None:
            return
        self.port = server.server_address[1]
        self._open.set()
        with server, suppress(OSError, ValueError):  # it was closed
            while not self._stopped.is_set():
                server.handle_request()
                self._speed.note(self._clock(), self._session.stats.num_samples_trained)

    def _bind(self) -> HTTPServer:
        def answer(path: str) -> tuple[int, str]:
            return (200, self.text()) if path == "/metrics" else (404, "there is /metrics\n")

        class Server(HTTPServer):
            timeout = _LOOK_S

            def handle_error(self, *_: object) -> None:
                """Whoever has asked has gone."""

        return Server(("", self.port), handler_of(answer, patience_s=_PATIENCE_S))


def metrics_page(session: Session, environment: WorkerEnvironment) -> MetricsPage:
    """The page of this worker, started if the environment names a port: one worker of a node has it."""
    page = MetricsPage(environment.metrics_port, session)
    if environment.metrics_port and environment.local_rank == 0:
        page.start()
    return page
