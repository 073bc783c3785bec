"""What a controller counts, for Prometheus, and whether it lives, for the kubelet.

The format is a few lines of text, so a controller needs no library for it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from http.server import HTTPServer

from ef_common import threads
from ef_common.control.crowd import Crowd
from ef_common.control.pages import handler_of
from ef_common.core.cluster import Decision, Job, JobPhase

ALIVE_S = 60.0
"""A controller that acts hangs if it has finished neither a job nor a look for so long."""
_BUCKETS_S = (0.01, 0.1, 1.0, 10.0)
_PATIENCE_S = 5.0
"""How long a client may keep a thread waiting."""


class Metrics:
    """Numbers; threads may share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {"pods_created": 0, "pods_deleted": 0, "looks": 0}
        self._gauges: dict[str, float] = {"leads": 0, "pods_wanted": 0, "pods_alive": 0, "jobs_waiting": 0}
        self._failing: tuple[str, ...] = ()
        self._phases: dict[str, int] = {}
        self._answers: Counter[tuple[str, int]] = Counter()  # by verb and status; 0 for none
        self._durations: dict[str, Durations] = {}  # by verb
        self._lived_at: float | None = None

    def created(self) -> None:
        """A pod was created."""
        self._add("pods_created")

    def deleted(self) -> None:
        """A pod was deleted."""
        self._add("pods_deleted")

    def answered(self, verb: str, status: int, duration_s: float | None) -> None:
        """The API server has answered a call.

        Args:
            verb: The method of HTTP.
            status: The status of HTTP; 0 if there was no answer.
            duration_s: How long it took; None for a watch, which takes as long as it is told to.
        """
        with self._lock:
            self._answers[verb, status] += 1
            if duration_s is not None:
                self._durations.setdefault(verb, Durations()).add(duration_s)

    def leads(self, leads: bool) -> None:
        """Whether this controller acts."""
        with self._lock:
            self._gauges["leads"] = float(leads)
            self._lived_at = None
            if not leads:
                self._failing = ()

    def looked(self, now: float) -> None:
        """It has looked at everything, and has done what could be done."""
        self._add("looks")
        self.lives(now)

    def lives(self, now: float) -> None:
        """It makes progress. If it has lost its lease meanwhile, no more of that is expected."""
        with self._lock:
            if self._gauges["leads"]:
                self._lived_at = now

    def decided(
        self, jobs: Mapping[str, Job], decisions: Mapping[str, Decision], *, failing: Sequence[str] = ()
    ) -> None:
        """What is there, and what shall be.

        Args:
            jobs: By their keys.
            decisions: By the same keys.
            failing: Keys of the jobs that could not be decided on.
        """
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
            self._failing = tuple(failing)

    def hangs(self, now: float) -> bool:
        """Whether it acts, and has made no progress for too long."""
        with self._lock:
            return self._lived_at is not None and now > self._lived_at + ALIVE_S

    @property
    def health(self) -> str:
        """What is wrong although it does not hang: a new start would only meet the same."""
        with self._lock:
            failing = self._failing
        return f"ok, but it cannot decide on {', '.join(failing)}\n" if failing else "ok\n"

    def text(self) -> str:
        """All of it, as Prometheus reads it."""
        with self._lock:
            lines = [f"elasticflow_controller_{name}_total {value}" for name, value in self._counts.items()]
            lines += [f"elasticflow_controller_{name} {value:g}" for name, value in self._gauges.items()]
            lines.append(f"elasticflow_controller_jobs_failing {len(self._failing)}")
            lines += [f'elasticflow_controller_jobs{{phase="{name}"}} {value}' for name, value in self._phases.items()]
            lines += [
                f'elasticflow_controller_api_answers_total{{verb="{verb}",code="{code}"}} {value}'
                for (verb, code), value in sorted(self._answers.items())
            ]
            for verb, durations in sorted(self._durations.items()):
                lines += durations.lines("elasticflow_controller_api_seconds", f'verb="{verb}"')
        return "\n".join(lines) + "\n"

    def _add(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


class Durations:
    """A histogram: how many calls took no longer than each of some limits."""

    def __init__(self) -> None:
        self._counts = [0] * len(_BUCKETS_S)
        self._num, self._sum_s = 0, 0.0

    def add(self, duration_s: float) -> None:
        """A call took so long."""
        self._counts = [count + (duration_s <= limit) for count, limit in zip(self._counts, _BUCKETS_S, strict=True)]
        self._num += 1
        self._sum_s += duration_s

    def lines(self, name: str, label: str) -> list[str]:
        """The histogram, as Prometheus reads it."""
        limits = [*(f"{limit:g}" for limit in _BUCKETS_S), "+Inf"]
        counts = zip(limits, [*self._counts, self._num], strict=True)
        return [
            *(f'{name}_bucket{{{label},le="{limit}"}} {count}' for limit, count in counts),
            f"{name}_sum{{{label}}} {self._sum_s:.6f}",
            f"{name}_count{{{label}}} {self._num}",
        ]


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
                    return (503, "it hangs\n") if metrics.hangs(time.time()) else (200, metrics.health)
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
