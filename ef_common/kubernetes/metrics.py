"""What a controller counts, for Prometheus, and whether it lives, for the kubelet.

The format is a few lines of text, so a controller needs no library for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from http.server import HTTPServer

from ef_common import threads
from ef_common.control.crowd import Crowd
from ef_common.control.pages import handler_of
from ef_common.core.cluster import Decision, Job, JobPhase

ALIVE_S = 60.0
"""A controller that acts hangs if it has finished neither a job nor a look for so long."""
_PATIENCE_S = 5.0
"""How long a client may keep a thread waiting."""


class Metrics:
    """Numbers; threads may share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {"pods_created": 0, "pods_deleted": 0, "looks": 0}
        self._gauges: dict[str, float] = {"leads": 0, "pods_wanted": 0, "pods_alive": 0, "jobs_waiting": 0}
        self._phases: dict[str, int] = {}
        self._lived_at: float | None = None

    def created(self) -> None:
        """A pod was created."""
        self._add("pods_created")

    def deleted(self) -> None:
        """A pod was deleted."""
        self._add("pods_deleted")

    def leads(self, leads: bool) -> None:
        """Whether this controller acts."""
        with self._lock:
            self._gauges["leads"] = float(leads)
            self._lived_at = None

    def looked(self, now: float) -> None:
        """It has looked at everything, and has done what could be done."""
        self._add("looks")
        self.lives(now)

    def lives(self, now: float) -> None:
        """It makes progress. If it has lost its lease meanwhile, no more of that is expected."""
        with self._lock:
            if self._gauges["leads"]:
                self._lived_at = now

    def decided(self, jobs: Mapping[str, Job], decisions: Mapping[str, Decision]) -> None:
        """What is there, and what shall be."""
        phases = dict.fromkeys((phase.value for phase in JobPhase), 0)
        for decision in decisions.values():
            phases[decision.record.phase.value] += 1
        wanted = [decision.wanted for decision in decisions.values()]
        waiting = [one for one in decisions.values() if not one.wanted and one.record.phase is JobPhase.PENDING]
        with self._lock:
            self._phases = phases
            self._gauges["pods_wanted"] = sum(wanted)
            self._gauges["pods_alive"] = sum(len(job.alive) for job in jobs.values())
            self._gauges["jobs_waiting"] = len(waiting)

    def hangs(self, now: float) -> bool:
        """Whether it acts, and has made no progress for too long."""
        with self._lock:
            return self._lived_at is not None and now > self._lived_at + ALIVE_S

    def text(self) -> str:
        """All of it, as Prometheus reads it."""
        with self._lock:
            lines = [f"elasticflow_controller_{name}_total {value}" for name, value in self._counts.items()]
            lines += [f"elasticflow_controller_{name} {value:g}" for name, value in self._gauges.items()]
            lines += [f'elasticflow_controller_jobs{{phase="{name}"}} {value}' for name, value in self._phases.items()]
        return "\n".join(lines) + "\n"

    def _add(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


class Page:
    """A server with `/healthz`, `/readyz` and `/metrics`.

    Args:
        host: Address at which it listens.
        port: Port; 0 for one that is free.
        metrics: The numbers.
        is_ready: Whether the controller knows the cluster.
    """

    def __init__(self, host: str, port: int, *, metrics: Metrics, is_ready: Callable[[], bool]) -> None:
        def answer(path: str) -> tuple[int, str]:
            match path:
                case "/healthz":
                    return (503, "it hangs\n") if metrics.hangs(time.time()) else (200, "ok\n")
                case "/readyz":
                    return (200, "ok\n") if is_ready() else (503, "it does not know the cluster yet\n")
                case "/metrics":
                    return 200, metrics.text()
            return 404, "there are /healthz, /readyz and /metrics\n"

        self._server = _Server((host, port), handler_of(answer, patience_s=_PATIENCE_S))
        self.port = self._server.server_address[1]

    def start(self) -> None:
        """Serve, in a thread."""
        threads.start(self._server.serve_forever, name="elasticflow-page", job="answers probes")

    def stop(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()


class _Server(Crowd, HTTPServer):
    """Strangers must not keep probes from an answer, or the controller would be taken for one that hangs."""
