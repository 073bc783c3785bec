"""What a worker knows of the training, for Prometheus and for the controller of a cluster.

One thread answers (:mod:`ef_common.launch.port_page`): a training does not wait for it, and needs no more memory if
many ask. It tells a few numbers, which every member knows.

Cost: one number is read each second, and a line of text is written for each metric and request.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ef_common.launch.environment import WorkerEnvironment
from ef_common.launch.port_page import PortPage
from ef_common.launch.speed import Speed
from ef_common.session import Session

_PREFIX = "elasticflow_"


class MetricsPage:
    """A server of the metrics of a worker; it waits for its port, which the worker before this one may still have.

    Args:
        port: Port; 0 for one that is free.
        session: The worker's membership.
        clock: Monotonic time in seconds.
    """

    def __init__(self, port: int, session: Session, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._session, self._clock = session, clock
        self._speed = Speed()
        self._page = PortPage(port, self.text, meanwhile=self._note)

    @property
    def port(self) -> int:
        """Port at which it answers."""
        return self._page.port

    def start(self) -> None:
        """Serve, in a thread. A training does not fail for want of it."""
        self._page.start()

    def wait_until_open(self, timeout_s: float) -> bool:
        """Wait until it has its port."""
        return self._page.wait_until_open(timeout_s)

    def stop(self) -> None:
        """End it. May be repeated."""
        self._page.stop()

    def _note(self) -> None:
        self._speed.note(self._clock(), self._session.stats.num_samples_trained)

    def text(self) -> str:
        """All of it, as Prometheus reads it."""
        session = self._session
        view, room, now = session.view, session.job.room, self._clock()
        is_member = view.generation > 0 and view.rank_of(session.worker.id) is not None and not session.newcomer
        self._note()
        wanted = 0 if room is None else room.wanted
        if wanted and view.rank_of(session.stats.replaces) is not None:
            wanted += 1  # whoever comes in its place waits until it goes
        values = {
            "workers": view.world_size if is_member else 0,
            "nodes": len({member.node for member in view.members}) if is_member else 0,
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


def metrics_page(session: Session, environment: WorkerEnvironment) -> MetricsPage:
    """The page of this worker, started if the environment names a port: one worker of a node has it."""
    page = MetricsPage(environment.metrics_port, session)
    if environment.metrics_port and environment.local_rank == 0:
        page.start()
    return page
